"""Base class for custom tuners, with NNI's names: `from nni_sdk.tuner import Tuner`.

A file written for NNI may use `from nni.tuner import Tuner`: if the real package is not installed, the process that runs the
tuner provides that name too. Source: NNI v2.10, nni.tuner and nni.recoverable.
"""

import os

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


class NoMoreTrialError(Exception):
    """Raised by `generate_parameters` if there are no parameters, temporarily or permanently."""

    def __init__(self, ErrorInfo: str = "") -> None:  # noqa: N803 - NNI's name
        super().__init__(ErrorInfo)
        self.errorinfo = ErrorInfo


class Recoverable:
    """Optional checkpoints of tuners and assessors."""

    def load_checkpoint(self) -> None:
        """Called when an experiment is resumed, before its history is replayed; does nothing unless overridden."""

    def save_checkpoint(self) -> None:
        """Never called by the manager, as in NNI; call it yourself if needed."""

    def get_checkpoint_path(self) -> "str | None":
        """Return the experiment's folder for checkpoints; None outside of one."""
        folder = os.environ.get("NNI_CHECKPOINT_DIRECTORY")
        return folder if folder is not None and os.path.isdir(folder) else None


class Tuner(Recoverable):
    """Proposes parameters and updates its model from results. `update_search_space` is called first."""

    def generate_parameters(self, parameter_id: int, **kwargs: "Any") -> "dict[str, Any]":
        """Return the parameters of one trial, which later calls identify by `parameter_id`.

        Raises:
            NoMoreTrialError: there are no parameters, temporarily or permanently.
        """
        raise NotImplementedError("Tuner: generate_parameters not implemented")

    def generate_multiple_parameters(
        self, parameter_id_list: "list[int]", **kwargs: "Any"
    ) -> "list[dict[str, Any]]":
        """Return parameters for several trials; fewer than requested if there are no more.

        `kwargs["st_callback"](parameter_id, parameters)` delivers the missing ones later, from within any other call.
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
        """Receive a trial's final result: a number, or a dict whose `default` is one.

        `kwargs` has `trial_job_id` and `customized`.
        """
        raise NotImplementedError("Tuner: receive_trial_result not implemented")

    def trial_end(self, parameter_id: int, success: bool, **kwargs: "Any") -> None:
        """Called when a trial has ended, after any `receive_trial_result`. `kwargs` has `trial_job_id`."""

    def update_search_space(self, search_space: "dict[str, Any]") -> None:
        """Set the search space; called before all other methods.

        After a change the manager creates a new tuner, and passes past results to its `import_data`.
        """
        raise NotImplementedError("Tuner: update_search_space not implemented")

    def import_data(self, data: "list[dict[str, Any]]") -> None:
        """Add prior results of other experiments: each has `parameter` and `value`."""


def is_no_more_trial(error: BaseException) -> bool:
    """True for this module's NoMoreTrialError, and for that of the real package."""
    return any(kind.__name__ == "NoMoreTrialError" for kind in type(error).__mro__)


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # each import from this module asks for __path__
        raise AttributeError(name)
    from nni_sdk.aliases import absent

    return absent("nni_sdk.tuner", name)
