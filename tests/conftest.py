"""Fixtures that many tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_experiment import RealExperiment


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
