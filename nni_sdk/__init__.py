"""The API for training code: `import nni_sdk as nni` in a script that was written for NNI.

Uses only the standard library, and imports almost nothing of it at start: the import delays every trial.
"""

from nni_sdk.errors import SdkError
from nni_sdk.trial import (
    get_current_parameter,
    get_experiment_id,
    get_next_parameter,
    get_sequence_id,
    get_trial_id,
    report_final_result,
    report_intermediate_result,
)

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from nni_sdk import assessor as assessor
    from nni_sdk import tuner as tuner
    from nni_sdk import utils as utils
    from nni_sdk.tuner import NoMoreTrialError as NoMoreTrialError
    from nni_sdk.utils import ClassArgsValidator as ClassArgsValidator

get_next_parameters = get_next_parameter
"""The older of NNI's two names for `get_next_parameter`."""

__all__ = [
    "SdkError",
    "get_current_parameter",
    "get_experiment_id",
    "get_next_parameter",
    "get_next_parameters",
    "get_sequence_id",
    "get_trial_id",
    "report_final_result",
    "report_intermediate_result",
]


# Imported on first use, as in NNI: `nni.utils` works without its own import, as do the names for custom tuners.
_MODULES = ("utils", "tuner", "assessor")
_HOMES = {"NoMoreTrialError": "tuner", "ClassArgsValidator": "utils"}


def __getattr__(name: str) -> object:
    if name in _MODULES or name in _HOMES:
        from importlib import import_module

        module = import_module(f"nni_sdk.{_HOMES.get(name, name)}")
        return module if name in _MODULES else getattr(module, name)
    hint = "; write `from nni_manager.experiment import Experiment`" if name == "experiment" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
