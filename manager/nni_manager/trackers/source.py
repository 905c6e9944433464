"""What a tracker receives of an experiment: a run for each started trial, with its parameters and metrics as numbers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import partial
from typing import Any

from nni_manager.client.experiments import KnownExperiment
from nni_manager.client.results import flat, parsed
from nni_manager.domain.trial import TrialState
from nni_manager.store.reader import StoreReader
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """The numbers of one intermediate result. `step` counts from 0; `time_s`: when the manager stored it."""

    step: int
    time_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """A started trial. Names of nested parameters and metrics contain a slash; times are in seconds since the epoch.

    `final`: the numbers of the final result that counts; empty: none yet. `points` reads the intermediate results.
    """

    trial_id: str
    sequence_id: int
    state: TrialState
    parameters: Mapping[str, Any]
    started_at_s: float
    ended_at_s: float | None
    final: Mapping[str, float]
    tags: tuple[str, ...]
    note: str
    points: Callable[[], Iterator[Point]] = field(repr=False)

    @property
    def name(self) -> str:
        """The run's name: the trial's number and id."""
        return f"{self.sequence_id}-{self.trial_id}"

    @property
    def end_s(self) -> float:
        """The end of a terminal trial; its start if the end is unknown."""
        return self.started_at_s if self.ended_at_s is None else self.ended_at_s


@dataclass(frozen=True, slots=True)
class Source:
    """An experiment and its runs in order of creation."""

    experiment_id: str
    name: str
    metrics: tuple[str, ...]
    """The metrics of the objectives and constraints."""
    runs: tuple[Run, ...]
    waiting: int
    """The number of trials that have not started."""


@contextlib.contextmanager
def opened(known: KnownExperiment) -> Iterator[Source]:
    """The experiment as stored now. Its points can be read until the end of the block.

    Raises:
        StoreUnusable: the experiment cannot be read.
    """
    config = known.stored.config()
    with StoreReader(known.folder.database) as reader:
        trials = reader.trial_list()
        finals = {trial_id: numbers(text) for trial_id, _, text in reader.results()}
        runs = tuple(
            Run(
                row["trial_id"],
                row["sequence_id"],
                TrialState(row["state"]),
                dict(flat(json.loads(row["parameters"]))),
                row["started_at_s"],
                row["ended_at_s"],
                finals.get(row["trial_id"], {}),
                row["remarks"].tags,
                row["remarks"].note,
                partial(_points, reader, row["sequence_id"]),
            )
            for row in trials
            if row["started_at_s"] is not None
        )
        metrics = config.all_objectives.metrics
        yield Source(known.experiment_id, config.experiment_name, metrics, runs, len(trials) - len(runs))


def numbers(text: str) -> dict[str, float]:
    """The numbers of a result in JSON; a plain number has the name `default`. Text and lists are left out."""
    value = parsed(text)
    entries = flat(value) if isinstance(value, dict) else [("default", value)]
    found = {}
    for name, entry in entries:
        if isinstance(entry, int | float):
            with contextlib.suppress(OverflowError):  # an integer beyond a float
                found[name] = float(entry)
    return found


def _points(reader: StoreReader, sequence_id: int) -> Iterator[Point]:
    step = 0
    for page in reader.metric_pages(False, sequence_id, sequence_id):
        for row in page:
            yield Point(step, row.stored_at_s, numbers(row.value))
            step += 1
