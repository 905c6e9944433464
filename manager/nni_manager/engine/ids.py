"""Random ids of experiments and trials. This module imports nothing of the manager: every `nnictl create` waits for it."""

import secrets
import string

_ID_LETTERS = string.ascii_letters + string.digits
TRIAL_ID_LENGTH = 5
EXPERIMENT_ID_LENGTH = 8


def new_id(length: int) -> str:
    """A random id in NNI's form; the caller must check that the id is unused."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(length))
