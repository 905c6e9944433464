"""What training code imports: `import nni_sdk as nni` in a script that was written for NNI.

Standard library only, and next to none of it at import: a trial pays for the SDK when it starts, every time.
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

TYPE_CHECKING = False  # the typing module costs more to import than the SDK; type checkers know this name
if TYPE_CHECKING:
    from nni_sdk import assessor as assessor
    from nni_sdk import tuner as tuner
    from nni_sdk import utils as utils
    from nni_sdk.tuner import NoMoreTrialError as NoMoreTrialError
    from nni_sdk.utils import ClassArgsValidator as ClassArgsValidator

get_next_parameters = get_next_parameter
"""The older of NNI's two names for it."""

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


# Found when they are asked for, as in NNI: `nni.utils` without an import of its own, and names for tuners of one's own.
_MODULES = ("utils", "tuner", "assessor")
_HOMES = {"NoMoreTrialError": "tuner", "ClassArgsValidator": "utils"}


def __getattr__(name: str) -> object:
    if name in _MODULES or name in _HOMES:
        from importlib import import_module

        module = import_module(f"nni_sdk.{_HOMES.get(name, name)}")
        return module if name in _MODULES else getattr(module, name)
    hint = "; write `from nni_manager.experiment import Experiment`" if name == "experiment" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
