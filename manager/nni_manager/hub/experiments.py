"""What the page of all experiments shows of each: its line in the list, and its best result so far.

Both are read from the stores. They are kept until a file of the store or of the registry changes.
"""

from __future__ import annotations

import os
from dataclasses import field
from pathlib import Path
from typing import Any

from nni_manager.config.model import ExperimentSpec
from nni_manager.domain.objectives import Objective
from nni_manager.engine.listing import line_of
from nni_manager.errors import NniManagerError
from nni_manager.store.folders import ExperimentFolder, FolderUnreadable
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry, corrupt_entries, latest_first
from trial_keeper.frozen_dataclass import dataclass

SPARKLINE_POINTS = 40
"""Maximum number of points of a line in the list."""
MAX_COMPARED = 20
"""Maximum number of experiments in one comparison."""

Signature = tuple[object, object]
Point = tuple[int, float, float]
"""An improvement: the number of results until then, the seconds since the start of the experiment, and the best result."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The best result so far. `points`: the improvements in order. `results`, `seconds`: where the curve ends."""

    objective: Objective
    points: tuple[Point, ...]
    results: int
    seconds: float

    def thinned(self, most: int) -> list[Point]:
        """At most `most` points, evenly chosen, with the first and the last one."""
        count = len(self.points)
        if count <= most:
            return list(self.points)
        return [self.points[place * (count - 1) // (most - 1)] for place in range(most)]


@dataclass(slots=True)
class _Kept:
    signature: Signature
    line: dict[str, Any]
    curve: Curve | None = None


@dataclass(slots=True)
class Experiments:
    """The experiments of this user. Used from one thread at a time."""

    _kept: dict[Path, _Kept] = field(default_factory=dict)

    def folder(self, experiment_id: str) -> ExperimentFolder | None:
        """The folder of an experiment; None: there is no such experiment."""
        folders = Registry.of_user().all()
        return next((each for each in folders if each.experiment_id == experiment_id), None)

    def lines(self) -> list[dict[str, Any]]:
        """A line for each experiment, the latest first. `best`: the points of its best result so far."""
        registry = Registry.of_user()
        folders = registry.all()
        for gone in self._kept.keys() - {folder.path for folder in folders}:
            del self._kept[gone]
        lines = [line for folder in folders if (line := self._line(folder)) is not None]
        return latest_first([*lines, *(line | {"url": None} for line in corrupt_entries(registry))])

    def curves(self, experiment_ids: list[str]) -> list[dict[str, Any]]:
        """The best result so far of each of these experiments, over the number of results and over the time."""
        found = []
        for experiment_id in experiment_ids[:MAX_COMPARED]:
            folder = self.folder(experiment_id)
            line = None if folder is None else self._line(folder)
            if folder is not None and line is not None and "problem" not in line:
                curve = self._curve(folder)
                found.append(
                    {
                        "id": experiment_id,
                        "name": line["experimentName"],
                        "metric": curve.objective.metric,
                        "mode": curve.objective.mode,
                        "points": curve.points,
                        "results": curve.results,
                        "seconds": curve.seconds,
                    }
                )
        return found

    def _line(self, folder: ExperimentFolder) -> dict[str, Any] | None:
        signature = _signature_of(folder)
        kept = self._kept.get(folder.path)
        if kept is None or kept.signature != signature:
            line = line_of(folder)
            if line is None:
                return None
            kept = self._kept[folder.path] = _Kept(signature, line)
        if "problem" in kept.line:
            return kept.line
        try:
            return kept.line | {"best": self._curve(folder).thinned(SPARKLINE_POINTS)}
        except NniManagerError as error:
            # It was deleted meanwhile, or its store is busy: it must not hide the others.
            return kept.line | {"problem": str(error)}

    def _curve(self, folder: ExperimentFolder) -> Curve:
        kept = self._kept[folder.path]
        if kept.curve is None:
            with StoreReader(folder.database) as reader:
                stored = reader.experiment()
                objectives = ExperimentSpec.from_json(stored.config).all_objectives
                rows = reader.values_over_time(objectives)
            kept.curve = curve_of(rows, stored.created_at_s, objectives.first)
        return kept.curve


def curve_of(rows: list[tuple[float, float | None]], started_at_s: float, objective: Objective) -> Curve:
    """The curve of results with their times (seconds since the epoch), in the order of time. None: it is never the best."""
    points: list[Point] = []
    maximize = objective.mode == "maximize"
    for count, (at_s, value) in enumerate(rows, 1):
        if value is not None and (
            not points or (value > points[-1][2] if maximize else value < points[-1][2])
        ):
            points.append((count, round(at_s - started_at_s, 3), value))
    seconds = round(rows[-1][0] - started_at_s, 3) if rows else 0.0
    return Curve(objective, tuple(points), len(rows), seconds)


def _signature_of(folder: ExperimentFolder) -> Signature:
    """A value that changes when the store, the manager or the view of an experiment does."""
    database = str(folder.database)
    states = _state_of(database), _state_of(f"{database}-wal")
    try:
        servers = folder.running_process(), folder.running_view()
    except FolderUnreadable:
        return states, ()  # the line has the reason
    return states, tuple(server and server.pid for server in servers)


def _state_of(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    # A reader makes an empty write-ahead log.
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found.st_size else (0, 0, 0)
