"""Adapters for a user's tuner and assessor: each call goes to the process that runs the user's class.

After a restart the class is created again and its history is replayed: each trial is asked for, with its earlier id, and its
result is reported. A deterministic class is then in its earlier state. In any case the class receives the parameters that the
trial really had.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nni_manager.config.model import UserClass
from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.metrics import MetricValue
from nni_manager.errors import InternalError
from nni_manager.tuner.assessment import BaseAssessor
from nni_manager.tuner.base import BaseTuner, Later, Observation, PastTrial, Suggestion
from nni_manager.tuner.user_process import UserCodeFailed, UserProcess


class UserTuner(BaseTuner):
    """Delegates to an object with the methods of NNI's `Tuner`."""

    def __init__(
        self,
        of: UserClass,
        class_args: Mapping[str, Any],
        search_space: Mapping[str, Any],
        log_folder: Path | None = None,
    ) -> None:
        """Does not start the process: creating the class may take time, or fail."""
        self._of, self._class_args, self._search_space = of, class_args, search_space
        self._process = UserProcess(
            "tuner",
            of,
            None if log_folder is None else log_folder / "tuner.log",
            None if log_folder is None else log_folder.parent / "checkpoint",
        )
        self._asked: dict[int, tuple[int, Any]] = {}
        """The class's id and the parameters of each trial."""
        self._running: set[int] = set()

    def ask(self, trial_key: int) -> Suggestion | Later:
        """See `Tuner.ask`. A class that has no parameters now may have some after another trial ends.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        if trial_key in self._asked:
            raise InternalError(
                f"cannot propose parameters for trial {trial_key} a second time; please report this"
            )
        self._make(is_resumed=False)
        answer = self._process.call("ask")
        if answer is None:
            return Later.LATER
        parameter_id, parameters = answer
        if not isinstance(parameters, dict):
            raise UserCodeFailed(
                f"cannot use what {self._of.class_name} proposed for parameter_id {parameter_id}: "
                f"{str(parameters)[:200]} is not a dict; return a dict of names and values"
            )
        self._note(trial_key, parameter_id, parameters)
        return Suggestion(parameters, {"parameter_id": parameter_id})

    def tell(self, trial_key: int, value: float | None) -> None:
        """See `BaseTuner.tell`."""
        metric = None if value is None else json.dumps(value)
        self.hear(trial_key, Observation("", value, metric, value is not None))

    def hear(self, trial_key: int, result: Observation) -> None:
        """See `Tuner.hear`; the class receives the metric as it was reported.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        if trial_key not in self._asked:
            raise InternalError(
                f"cannot learn from trial {trial_key}: this tuner did not propose it; please report this"
            )
        if trial_key not in self._running:
            return
        self._running.remove(trial_key)
        parameter_id, parameters = self._asked[trial_key]
        self._process.call(
            "tell", parameter_id, parameters, result.metric, result.trial_id, result.has_succeeded
        )

    def import_results(self, results: Iterable[PriorResult]) -> int:
        """See `Tuner.import_results`. Counts all results: only the class can decide which of them are usable.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        data = [[dict(result.parameters), result.metric] for result in results]
        if data:
            self._make(is_resumed=False)
            self._process.call("import_data", data)
        return len(data)

    def restore(self, trials: Iterable[PastTrial]) -> None:
        """See `BaseTuner.restore`.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        if self._asked:
            raise InternalError("cannot rebuild a tuner that is in use; please report this")
        self._make(is_resumed=True)
        for trial in sorted(trials, key=_id_of):
            self._process.call("ask_again", _id_of(trial))
            self._note(trial.key, _id_of(trial), dict(trial.parameters))
            if trial.ended:
                result = Observation(trial.trial_id, trial.value, trial.metric, trial.has_succeeded)
                self.hear(trial.key, result)
        self._process.call("forget_given")

    def close(self) -> None:
        """See `BaseTuner.close`."""
        self._process.close()

    def _make(self, *, is_resumed: bool) -> None:
        if not self._process.is_running:
            self._process.call("make", self._of.class_name, self._class_args, self._of.validator, is_resumed)
            self._process.call("update_search_space", self._search_space)

    def _note(self, trial_key: int, parameter_id: int, parameters: Any) -> None:
        self._asked[trial_key] = parameter_id, parameters
        self._running.add(trial_key)


def _id_of(trial: PastTrial) -> int:
    parameter_id = trial.metadata.get("parameter_id")
    if not isinstance(parameter_id, int):
        raise InternalError(
            f"cannot rebuild the tuner: the metadata of trial {trial.key} is not of this search space; please report this"
        )
    return parameter_id


class UserAssessor(BaseAssessor):
    """Delegates to an object with the methods of NNI's `Assessor`."""

    def __init__(self, of: UserClass, class_args: Mapping[str, Any], log_folder: Path | None = None) -> None:
        """Does not start the process."""
        self._of, self._class_args = of, class_args
        self._process = UserProcess(
            "assessor", of, None if log_folder is None else log_folder / "assessor.log"
        )

    def may_go_on(self, trial: str, learning_curve: Sequence[float]) -> bool:
        """See `Assessor`; the class receives the results as they were reported.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        self._make()
        return bool(self._process.call("assess", trial, [_text_of(each) for each in learning_curve]))

    def end(self, trial: str, learning_curve: Sequence[float], *, has_succeeded: bool) -> None:
        """See `BaseAssessor`.

        Raises:
            UserCodeFailed: the user's code failed.
        """
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
