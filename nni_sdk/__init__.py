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
    from nni_sdk import utils as utils

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


def __getattr__(name: str) -> object:
    """`nni.utils` works without an import of its own, as it does in NNI."""
    if name == "utils":
        from importlib import import_module

        return import_module("nni_sdk.utils")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
