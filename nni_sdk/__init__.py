"""The API for training code: `import nni_sdk as nni` in a script that was written for NNI.

Uses only the standard library, and imports almost nothing of it at start: the import delays every trial. Runs on Python 3.7 and
later, whatever the keeper runs on. `nni_sdk.records` is the manager's half of the format and needs the manager's Python.
"""

import sys

# Any Python from 2.7 on can read this file, so an older one gets a sentence instead of a SyntaxError.
if sys.version_info < (3, 7):
    raise ImportError(
        "cannot use nni_sdk with Python %d.%d: it needs Python 3.7 or later; run this script with a newer Python"
        % sys.version_info[:2]
    )

from nni_sdk.errors import SdkError
from nni_sdk.trial import (
    get_current_parameter,
    get_experiment_id,
    get_next_parameter,
    get_sequence_id,
    get_trial_id,
    report_final_result,
    report_intermediate_result,
    should_stop,
    stop_reason,
)

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from nni_sdk import assessor as assessor
    from nni_sdk import tuner as tuner
    from nni_sdk import utils as utils
    from nni_sdk.checkpoints import checkpoint_dir as checkpoint_dir
    from nni_sdk.checkpoints import load_checkpoint as load_checkpoint
    from nni_sdk.checkpoints import save_checkpoint as save_checkpoint
    from nni_sdk.seeds import seed_everything as seed_everything
    from nni_sdk.tuner import NoMoreTrialError as NoMoreTrialError
    from nni_sdk.utils import ClassArgsValidator as ClassArgsValidator

__version__ = "3.0"
"""The version of NNI whose names these are; `nni.__version__` where nni is this package."""

get_next_parameters = get_next_parameter
"""The older of NNI's two names for `get_next_parameter`."""

__all__ = [
    "SdkError",
    "checkpoint_dir",
    "get_current_parameter",
    "get_experiment_id",
    "get_next_parameter",
    "get_next_parameters",
    "get_sequence_id",
    "get_trial_id",
    "load_checkpoint",
    "report_final_result",
    "report_intermediate_result",
    "save_checkpoint",
    "seed_everything",
    "should_stop",
    "stop_reason",
]


# Imported on first use, as in NNI: `nni.utils` works without its own import, as do the names for custom tuners.
_MODULES = ("utils", "tuner", "assessor")
_HOMES = {
    "NoMoreTrialError": "tuner",
    "ClassArgsValidator": "utils",
    "seed_everything": "seeds",
    "checkpoint_dir": "checkpoints",
    "load_checkpoint": "checkpoints",
    "save_checkpoint": "checkpoints",
}


def __dir__():  # type: () -> list[str]
    return sorted(set(globals()).union(_MODULES, _HOMES))


def __getattr__(name):  # type: (str) -> object
    if name in _MODULES or name in _HOMES:
        from importlib import import_module

        module = import_module("nni_sdk." + _HOMES.get(name, name))
        return module if name in _MODULES else getattr(module, name)
    from nni_sdk.aliases import attribute

    return attribute(name)
