"""Fixtures of the tests that start real keepers."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from another_user import keepers_of_nobody
from fake_manager import Site

from nni_manager.domain import transports
from nni_manager.engine import storage_poller


@pytest.fixture
def silent_site(tmp_path: Path) -> Iterator[Site]:
    """A workspace whose manager.json contains the address of a manager that does not run."""
    site = Site(tmp_path)
    # This is the discard port. In a test, no program listens on a port below 1024.
    site.manager.address = "127.0.0.1:9"
    site.manager.write_document()
    yield site
    site.close()


@pytest.fixture
def site(silent_site: Site) -> Site:
    """A workspace with a manager that listens."""
    silent_site.manager.start()
    return silent_site


@pytest.fixture(scope="session")
def as_nobody() -> Iterator[tuple[str, ...]]:
    """The command prefix that starts a keeper as user nobody."""
    with tempfile.TemporaryDirectory(prefix="keeper-of-nobody-") as folder:
        yield keepers_of_nobody(Path(folder))


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give keepers so much time to reconnect that the manager does not poll the shared storage."""
    monkeypatch.setattr(transports, "RECONNECT_GRACE_S", 1e6)


@pytest.fixture
def late_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the manager assume that the shared storage shows writes of other machines only after an hour. Then it waits for such
    writes only at the end of a job.
    """
    monkeypatch.setattr(storage_poller, "STORAGE_LAG_S", 3600.0)
