"""Tuners that propose each entry of a list of parameters once, in order."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from nni_manager.config.prior_results import PriorResult
from nni_manager.tuner.base import KeyedTuner, PastTrial, Suggestion, natural, reading_metadata_of


class Points(ABC):
    """A list of parameters that need not fit into memory."""

    @abstractmethod
    def has(self, index: int) -> bool:
        """True if there are parameters at the index."""

    @abstractmethod
    def at(self, index: int) -> dict[str, Any]:
        """The parameters at an index."""

    def is_repeated(self, index: int) -> bool:
        """True if an earlier index has the same parameters."""
        return False


class EnumeratingTuner(KeyedTuner[int]):
    """Proposes each point once, whatever the results; a failed trial is not repeated, one that a stop has interrupted is.

    The position of a trial (see `KeyedTuner`) is the index of its point.
    """

    learns = False

    def __init__(self, points: Points) -> None:
        """The points are requested one by one, in order."""
        super().__init__()
        self._points = points
        self._proposed: set[int] = set()
        self._next = 0
        self._known_elsewhere: set[str] = set()

    def propose(self, trial_key: int) -> Suggestion | None:
        """See `KeyedTuner`."""
        while self._points.has(self._next) and self._is_known(self._next):
            self._next += 1
        if not self._points.has(self._next):
            return None
        index = self._next
        self.note(trial_key, index)
        # A copy: changes by the caller must not reach the search space.
        return Suggestion(copy.deepcopy(self._points.at(index)), {"index": index})

    def _is_known(self, index: int) -> bool:
        if index in self._proposed or self._points.is_repeated(index):
            return True
        return bool(self._known_elsewhere) and _canonical(self._points.at(index)) in self._known_elsewhere

    def import_results(self, results: Iterable[PriorResult]) -> int:
        """See `BaseTuner`: an imported point is not proposed again, whatever its result."""
        known = [_canonical(dict(result.parameters)) for result in results]
        self._known_elsewhere.update(known)
        return len(known)

    def replay(self, trials: Iterable[PastTrial]) -> None:
        """See `KeyedTuner`."""
        for trial in trials:
            with reading_metadata_of(trial):
                index = natural(trial.metadata["index"])
                if not self._points.has(index):
                    raise ValueError(index)
            self.note(trial.key, index)
            if trial.ended:
                self.tell_result(trial.key, trial.observation)

    def requeue(self, position: int) -> None:
        """See `KeyedTuner`."""
        self._proposed.discard(position)
        self._next = min(self._next, position)

    def note(self, trial_key: int, position: int) -> None:
        """See `KeyedTuner`."""
        super().note(trial_key, position)
        self._proposed.add(position)


def _canonical(parameters: Any) -> str:
    def number(text: str) -> int | float:
        value = float(text)
        return int(value) if value.is_integer() else value  # 3 and 3.0 are the same value of a quniform

    return json.dumps(json.loads(json.dumps(parameters), parse_float=number), sort_keys=True)
