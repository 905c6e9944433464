"""Fixtures that many tests share."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_experiment import RealExperiment


@pytest.fixture(autouse=True, scope="session")
def signals_of_a_terminal() -> None:
    """Whoever runs the tests may ignore a signal, as nohup does; what tests start would inherit that."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


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
