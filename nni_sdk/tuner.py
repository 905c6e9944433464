"""The base of a tuner of your own, with NNI's names: `from nni_sdk.tuner import Tuner`.

A file written for NNI may say `from nni.tuner import Tuner`: where the real package is not installed, the process that runs your
tuner answers to that name as well. Source: NNI v2.10, nni.tuner and nni.recoverable.
"""

import os

TYPE_CHECKING = False  # the typing module costs more to import than the SDK; type checkers know this name
if TYPE_CHECKING:
    from typing import Any


class NoMoreTrialError(Exception):
    """Raised by `generate_parameters` when there are no parameters, for now or for good."""

    def __init__(self, ErrorInfo: str = "") -> None:  # noqa: N803 - NNI's name
        super().__init__(ErrorInfo)
        self.errorinfo = ErrorInfo


class Recoverable:
    """What tuners and assessors may do about checkpoints of their own."""

    def load_checkpoint(self) -> None:
        """Called when an experiment is resumed, before its history is told again; does nothing unless you say so."""

    def save_checkpoint(self) -> None:
        """Never called by the manager, as in NNI; call it yourself if you have use for it."""

    def get_checkpoint_path(self) -> "str | None":
        """A folder of the experiment's for checkpoints; None outside of one."""
        folder = os.environ.get("NNI_CHECKPOINT_DIRECTORY")
        return folder if folder is not None and os.path.isdir(folder) else None


class Tuner(Recoverable):
    """Proposes parameters and learns from results. `update_search_space` is called first."""

    def generate_parameters(self, parameter_id: int, **kwargs: "Any") -> "dict[str, Any]":
        """Parameters for one trial, which later calls know by `parameter_id`.

        Raises:
            NoMoreTrialError: there are none, for now or for good.
        """
        raise NotImplementedError("Tuner: generate_parameters not implemented")

    def generate_multiple_parameters(
        self, parameter_id_list: "list[int]", **kwargs: "Any"
    ) -> "list[dict[str, Any]]":
        """Parameters for several trials; fewer than were asked for when there are no more.

        `kwargs["st_callback"](parameter_id, parameters)` gives the missing ones later, from within any other call.
        """
        found = []
        for parameter_id in parameter_id_list:
            try:
                found.append(self.generate_parameters(parameter_id, **kwargs))
            except Exception as error:
                if not is_no_more_trial(error):
                    raise
                break
        return found

    def receive_trial_result(
        self, parameter_id: int, parameters: "dict[str, Any]", value: "Any", **kwargs: "Any"
    ) -> None:
        """Learn what a trial reported as its final result: a number, or a dict whose `default` is one.

        `kwargs` has `trial_job_id` and `customized`.
        """
        raise NotImplementedError("Tuner: receive_trial_result not implemented")

    def trial_end(self, parameter_id: int, success: bool, **kwargs: "Any") -> None:
        """A trial is over; after `receive_trial_result`, if it had a result. `kwargs` has `trial_job_id`."""

    def update_search_space(self, search_space: "dict[str, Any]") -> None:
        """The search space, before anything else. When it changes, a new object hears it, and by `import_data` what is known."""
        raise NotImplementedError("Tuner: update_search_space not implemented")

    def import_data(self, data: "list[dict[str, Any]]") -> None:
        """Learn from results of elsewhere: each has `parameter` and `value`."""


def is_no_more_trial(error: BaseException) -> bool:
    """Whether it is this module's NoMoreTrialError, or that of the real package."""
    return any(kind.__name__ == "NoMoreTrialError" for kind in type(error).__mro__)
