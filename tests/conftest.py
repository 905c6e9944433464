"""Fixtures that many tests share."""

import contextlib
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_experiment import RealExperiment
from xdist.scheduler import LoadScopeScheduling


@pytest.fixture(autouse=True, scope="session")
def signals_of_a_terminal() -> None:
    """Whoever runs the tests may ignore a signal, as nohup does; what tests start would inherit that."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


class ByFile(LoadScopeScheduling):
    """What shares a process: the tests of a file, and all that build or run containers."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "e2e" if "/e2e/" in file else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Not xdist's own groups by a mark: pytest 9.2 does not let it put them into the names of tests."""
    return ByFile(config, log)


@pytest.fixture
def open_way(tmp_path: Path) -> None:
    """Other users may pass to this test's folder."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        with contextlib.suppress(PermissionError):
            folder.chmod(folder.stat().st_mode | 0o755)


@pytest.fixture
def a_real_experiment(tmp_path: Path) -> Iterator[Callable[..., RealExperiment]]:
    """Makes experiments, and ends what they started."""
    made: list[RealExperiment] = []

    def make(train: str, **options: Any) -> RealExperiment:
        experiment = RealExperiment(tmp_path / f"experiment{len(made)}", train, **options)
        made.append(experiment)
        experiment.create()
        return experiment

    yield make
    for experiment in made:
        experiment.close()
