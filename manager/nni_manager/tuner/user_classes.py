"""A tuner and an assessor of the user's own, seen as ours: each call goes to the process where the user's class lives.

After a restart the class is made anew and its history told to it again: each trial is asked for, with the id it had, and
then told. A class that proposes the same for the same calls is then in the state it was in; whatever one proposes, it is told the
parameters that the trial really had.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nni_manager.config.known_results import KnownResult
from nni_manager.config.model import UserClass
from nni_manager.domain.metrics import Reported
from nni_manager.errors import Bug
from nni_manager.tuner.assessment import Assessor
from nni_manager.tuner.base import Later, PastTrial, Suggestion, TrialResult, Tuner
from nni_manager.tuner.user_process import UserCodeFailed, UserProcess


class UserTuner(Tuner):
    """Asks an object with the methods of NNI's `Tuner`."""

    def __init__(
        self,
        of: UserClass,
        class_args: Mapping[str, Any],
        search_space: Mapping[str, Any],
        log_folder: Path | None = None,
    ) -> None:
        """Starts nothing yet: what the class does when it is made may take its time, or fail."""
        self._of, self._class_args, self._search_space = of, class_args, search_space
        self._process = UserProcess(
            "tuner",
            of,
            None if log_folder is None else log_folder / "tuner.log",
            None if log_folder is None else log_folder.parent / "checkpoint",
        )
        self._asked: dict[int, tuple[int, Any]] = {}
        """The class's id of each trial, and the parameters."""
        self._running: set[int] = set()

    def ask(self, trial_key: int) -> Suggestion | Later:
        """See `Tuner.ask`. A class that has nothing now may have something when a trial is over.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        if trial_key in self._asked:
            raise Bug(f"cannot propose parameters for trial {trial_key} a second time; please report this")
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
        """See `Tuner.tell`."""
        metric = None if value is None else json.dumps(value)
        self.hear(trial_key, TrialResult("", value, metric, value is not None))

    def hear(self, trial_key: int, result: TrialResult) -> None:
        """See `Tuner.hear`; the class is told the metric as it was reported.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        if trial_key not in self._asked:
            raise Bug(
                f"cannot learn from trial {trial_key}: this tuner did not propose it; please report this"
            )
        if trial_key not in self._running:
            return
        self._running.remove(trial_key)
        parameter_id, parameters = self._asked[trial_key]
        self._process.call(
            "tell", parameter_id, parameters, result.metric, result.trial_id, result.has_succeeded
        )

    def import_results(self, results: Iterable[KnownResult]) -> int:
        """See `Tuner.import_results`; what of them is of use, only the class knows.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        data = [[dict(result.parameters), result.metric] for result in results]
        if data:
            self._make(is_resumed=False)
            self._process.call("import_data", data)
        return len(data)

    def restore(self, trials: Iterable[PastTrial]) -> None:
        """See `Tuner.restore`.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        if self._asked:
            raise Bug("cannot rebuild a tuner that is in use; please report this")
        self._make(is_resumed=True)
        for trial in sorted(trials, key=_id_of):
            self._process.call("ask_again", _id_of(trial))
            self._note(trial.key, _id_of(trial), dict(trial.parameters))
            if trial.ended:
                result = TrialResult(trial.trial_id, trial.value, trial.metric, trial.has_succeeded)
                self.hear(trial.key, result)
        self._process.call("forget_given")

    def close(self) -> None:
        """See `Tuner.close`."""
        self._process.close()

    def _make(self, *, is_resumed: bool) -> None:
        if not self._process.is_running:
            self._process.call("make", self._of.class_name, self._class_args, self._of.validator, is_resumed)
            self._process.call("update_search_space", self._search_space)

    def _note(self, trial_key: int, parameter_id: int, parameters: Any) -> None:
        self._asked[trial_key] = parameter_id, parameters
        self._running.add(trial_key)


def _id_of(trial: PastTrial) -> int:
    parameter_id = trial.memo.get("parameter_id")
    if not isinstance(parameter_id, int):
        raise Bug(
            f"cannot rebuild the tuner: the memo of trial {trial.key} is not of this search space; please report this"
        )
    return parameter_id


class UserAssessor(Assessor):
    """Asks an object with the methods of NNI's `Assessor`."""

    def __init__(self, of: UserClass, class_args: Mapping[str, Any], log_folder: Path | None = None) -> None:
        """Starts nothing yet."""
        self._of, self._class_args = of, class_args
        self._process = UserProcess(
            "assessor", of, None if log_folder is None else log_folder / "assessor.log"
        )

    def may_go_on(self, trial: str, course: Sequence[float]) -> bool:
        """See `Assessor`; the class is shown the results as they were reported.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        self._make()
        return bool(self._process.call("assess", trial, [_text_of(each) for each in course]))

    def end(self, trial: str, course: Sequence[float], *, has_succeeded: bool) -> None:
        """See `Assessor`.

        Raises:
            UserCodeFailed: the user's code failed.
        """
        self._make()
        self._process.call("end", trial, has_succeeded)

    def close(self) -> None:
        """See `Assessor.close`."""
        self._process.close()

    def _make(self) -> None:
        if not self._process.is_running:
            self._process.call("make", self._of.class_name, self._class_args, self._of.validator, False)


def _text_of(value: float) -> str:
    return value.text if isinstance(value, Reported) else json.dumps(value)
