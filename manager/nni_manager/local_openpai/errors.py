"""Errors of the cluster and its API, with OpenPAI's codes and messages, and the HTTP status of each code.

OpenPAI's own messages are used where they exist, since clients show and compare them.

Source: microsoft/pai v1.8.1, REST server (createError of its controllers and models).
"""

from __future__ import annotations

from collections.abc import Mapping

from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.openpai.job_checks import ProtocolDiagnostic, ProtocolInvalid

STATUS_OF: Mapping[str, int] = {
    "InvalidProtocolError": 400,
    "InvalidParametersError": 400,
    "NoUserError": 400,  # not found; clients rely on 400, except for DELETE
    "IncorrectPasswordError": 400,
    "UnauthorizedUserError": 401,
    "ForbiddenUserError": 403,
    "NoApiError": 404,
    "NoJobError": 404,
    "NoJobSshInfoError": 404,
    "NoTaskLogError": 404,
    "NoGroupError": 404,
    "NoTagError": 404,
    "NoStorageError": 404,
    "NoVirtualClusterError": 404,
    "NoTokenError": 404,
    "ConflictJobError": 409,
    "ConflictUserError": 409,
    "TooManyLoginsError": 429,
    "UnknownError": 500,
    "BusyError": 503,
}


class ApiError(UserError):
    """An error response; `code` and the message form its body."""

    def __init__(self, code: str, message: str, status: int | None = None) -> None:
        """`status`: None is that of the code."""
        super().__init__(message)
        self.code = code
        self.status = STATUS_OF[code] if status is None else status


def invalid_parameters(message: str) -> ApiError:
    """Error: a value in the request is invalid."""
    return ApiError("InvalidParametersError", message)


def no_job(framework_name: str) -> ApiError:
    """Error: no such job."""
    return ApiError("NoJobError", f"Job {framework_name} is not found.")


def bad_token() -> ApiError:
    """Error: the token is invalid or has expired."""
    return ApiError("UnauthorizedUserError", "Your token is invalid.")


def invalid_job(*problems: str) -> ProtocolInvalid:
    """Error: this cluster can never run the job."""
    return ProtocolInvalid(ProtocolDiagnostic("", None, None, "", problem) for problem in problems)


class StateDirUnusable(UserError):
    """cannot use the cluster's state directory; choose another"""


class StateBusy(RetryableError):
    """cannot write the cluster's state; free disk space or try again later"""


class ClusterClosed(RetryableError):
    """cannot use the cluster: it is starting or closed; try again later"""
