"""Fixtures of the tests that start real keepers."""

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from another_user import keepers_of_nobody
from fake_manager import Site

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def silent_site(tmp_path: Path) -> Iterator[Site]:
    """A workspace whose manager.json names a manager that does not run."""
    site = Site(tmp_path)
    site.manager.address = "127.0.0.1:9"  # the discard port: no program listens below port 1024 in a test
    site.manager.write_document()
    yield site
    site.close()


@pytest.fixture
def site(silent_site: Site) -> Site:
    """A workspace whose manager listens."""
    silent_site.manager.start()
    return silent_site


@pytest.fixture(scope="session")
def as_nobody() -> Iterator[tuple[str, ...]]:
    """The command prefix that starts a keeper as user nobody."""
    with tempfile.TemporaryDirectory(prefix="keeper-of-nobody-") as folder:
        yield keepers_of_nobody(Path(folder))


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of tests/benchmarks by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    # Only those of this folder: numpy, for example, cannot be imported twice.
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]
