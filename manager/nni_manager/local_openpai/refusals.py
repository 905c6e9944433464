"""What the server does not do, in the words of OpenPAI's: its codes, its sentences, and the status of each code.

Where OpenPAI has a sentence, it is that one, since clients show and compare it; the others are ours.

Source: microsoft/pai v1.8.1, REST server (createError of its controllers and models).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nni_manager.errors import UserMistake

STATUS_OF: Mapping[str, int] = {
    "InvalidProtocolError": 400,
    "InvalidParametersError": 400,
    "NoUserError": 400,  # for a thing not found; clients rely on it
    "IncorrectPasswordError": 400,
    "UnauthorizedUserError": 401,
    "ForbiddenUserError": 403,
    "NoApiError": 404,
    "NoJobError": 404,
    "NoJobConfigError": 404,
    "NoJobSshInfoError": 404,
    "NoTaskError": 404,
    "NoTaskLogError": 404,
    "NoTagError": 404,
    "NoStorageError": 404,
    "NoVirtualClusterError": 404,
    "NoTokenError": 404,
    "ConflictJobError": 409,
    "ConflictUserError": 409,
    "UnknownError": 500,
    "BusyError": 503,
}


class Refused(UserMistake):
    """A request that is not done; `code` and the message are the body of the answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = STATUS_OF[code]

    def to_dict(self) -> dict[str, Any]:
        """The body."""
        return {"code": self.code, "message": str(self)}


def no_job(framework_name: str) -> Refused:
    """There is no such job."""
    return Refused("NoJobError", f"Job {framework_name} is not found.")


def guest() -> Refused:
    """Nobody said who asks."""
    return Refused("UnauthorizedUserError", "Guest is not allowed to do this operation.")


def bad_token() -> Refused:
    """Who asks is not who they say, or no more."""
    return Refused("UnauthorizedUserError", "Your token is invalid.")
