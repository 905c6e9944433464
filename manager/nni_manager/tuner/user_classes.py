"""Adapters for a user's tuner and assessor: each call goes to the process that runs the user's class.

After a restart, the class is created again and its history is replayed: each trial is asked for with its earlier id, and its
result is reported. A deterministic class is then in its earlier state. Other classes also receive the parameters that the trial
really had.
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from nni_manager.config.model import UserClass
from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.metrics import MetricValue
from nni_manager.tuner.assessment import MAX_STEPS, BaseAssessor
from nni_manager.tuner.base import KeyedTuner, Later, Observation, PastTrial, Suggestion, reading_metadata_of
from nni_manager.tuner.user_process import UserCodeFailed, UserProcess
from nni_sdk.nesting import TOO_DEEP, is_too_deep


class UserTuner(KeyedTuner[tuple[int, Any]]):
    """Delegates to an object with the methods of NNI's `Tuner`. A trial's position is the class's id and the parameters.

    All calls but `close` raise `UserCodeFailed` if the user's code fails.
    """

    def __init__(
        self,
        of: UserClass,
        class_args: Mapping[str, Any],
        search_space: Mapping[str, Any],
        log_folder: Path | None = None,
    ) -> None:
        """Does not start the process: creating the class may take time, or fail."""
        super().__init__()
        self._of, self._class_args, self._search_space = of, class_args, search_space
        self._reported: Counter[int] = Counter()
        checkpoints = log_folder and log_folder.parent / "checkpoint"
        self._process = UserProcess("tuner", of, log_folder and log_folder / "tuner.log", checkpoints)

    def propose(self, trial_key: int) -> Suggestion | Later:
        """See `KeyedTuner`. A class that has no parameters now may have some after another trial ends."""
        self._make(is_resumed=False)
        answer = self._process.call("ask")
        if answer is None:
            return Later.LATER
        parameter_id, parameters = answer
        if not isinstance(parameters, dict):
            raise UserCodeFailed(
                f"cannot use the proposal of {self._of.class_name} for parameter_id {parameter_id}: "
                f"{str(parameters)[:200]} is not a dict; return a dict of names and values"
            )
        if is_too_deep(parameters):
            raise UserCodeFailed(
                f"cannot use the proposal of {self._of.class_name} for parameter_id {parameter_id}: "
                f"{str(parameters)[:200]} is {TOO_DEEP}; return flatter parameters"
            )
        self.note(trial_key, (parameter_id, parameters))
        return Suggestion(parameters, {"parameter_id": parameter_id})

    def tell(self, trial_key: int, value: float | None) -> None:
        """See `BaseTuner.tell`."""
        metric = None if value is None else json.dumps(value)
        self.tell_result(trial_key, Observation("", value, metric, value is not None))

    def tell_result(self, trial_key: int, result: Observation) -> None:
        """See `BaseTuner.tell_result`; the class receives the metric as it was reported."""
        if (asked := self.end(trial_key)) is not None:
            self._process.call("tell", *asked, result.metric, result.trial_id, result.has_succeeded)

    def report(self, trial_key: int, trial_id: str, values: Sequence[float]) -> None:
        """See `BaseTuner.report`; the class receives the results as they were reported, up to `MAX_STEPS` of a trial."""
        room = MAX_STEPS - self._reported[trial_key]
        if room > 0:
            self._reported[trial_key] += len(values)
            parameter_id, _ = self.position_of[trial_key]
            self._process.call("report", parameter_id, trial_id, [_text_of(each) for each in values[:room]])

    def take_stops(self) -> list[str]:
        """See `BaseTuner.take_stops`."""
        stops, self._process.stops = self._process.stops, []
        return stops

    # An import creates the object, and a restored object loads its own checkpoint.
    restores_imports_first = False

    def import_results(self, results: Iterable[PriorResult]) -> int:
        """See `BaseTuner.import_results`. Counts all results: only the user's class can decide which results are usable."""
        data = [[dict(result.parameters), result.metric] for result in results]
        if data:
            self._make(is_resumed=False)
            self._process.call("import_data", data)
        return len(data)

    def replay(self, trials: Iterable[PastTrial]) -> None:
        """See `KeyedTuner`."""
        self._make(is_resumed=True)
        for trial in sorted(trials, key=_id_of):
            self._process.call("ask_again", _id_of(trial))
            self.note(trial.key, (_id_of(trial), dict(trial.parameters)))
            if trial.ended:
                self.tell_result(trial.key, trial.observation)
        self._process.call("discard_delivered")
        self.take_stops()  # of trials that have ended

    def close(self) -> None:
        """See `BaseTuner.close`."""
        self._process.close()

    def _make(self, *, is_resumed: bool) -> None:
        if not self._process.is_running:
            self._process.call("make", self._of.class_name, self._class_args, self._of.validator, is_resumed)
            self._process.call("update_search_space", self._search_space)


def _id_of(trial: PastTrial) -> int:
    with reading_metadata_of(trial):
        return operator.index(cast("int", trial.metadata["parameter_id"]))


class UserAssessor(BaseAssessor):
    """Delegates to an object with the methods of NNI's `Assessor`. Its calls raise `UserCodeFailed` if the user's code fails."""

    def __init__(self, of: UserClass, class_args: Mapping[str, Any], log_folder: Path | None = None) -> None:
        """Does not start the process."""
        self._of, self._class_args = of, class_args
        self._process = UserProcess("assessor", of, log_folder and log_folder / "assessor.log")

    def may_go_on(self, trial: str, learning_curve: Sequence[float]) -> bool:
        """See `BaseAssessor`; the class receives the results as they were reported."""
        self._make()
        return bool(self._process.call("assess", trial, [_text_of(each) for each in learning_curve]))

    def end(self, trial: str, learning_curve: Sequence[float], *, has_succeeded: bool) -> None:
        """See `BaseAssessor`."""
        self._make()
        self._process.call("end", trial, has_succeeded)

    def close(self) -> None:
        """See `BaseAssessor.close`."""
        self._process.close()

    def _make(self) -> None:
        if not self._process.is_running:
            self._process.call("make", self._of.class_name, self._class_args, self._of.validator, False)


def _text_of(value: float) -> str:
    return value.text if isinstance(value, MetricValue) else json.dumps(value)
