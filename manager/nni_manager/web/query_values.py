"""Values of query parameters, and their errors."""

from collections.abc import Collection

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nni_manager.domain.trial import TrialState

MAX_DIGITS = 18
STATUSES = sorted({state.nni_status for state in TrialState})
"""NNI's statuses of trials."""
# A status of NNI's that no trial has here; NNI's clients may ask for it.
_UNUSED_STATUS = "UNKNOWN"
_MAX_SHOWN = 40


def whole_number(request: Request, name: str, least: int, most: int) -> int | None:
    """The value of a query parameter; None if it is missing.

    Raises:
        HTTPException: it is not a number from `least` to `most`.
    """
    text = request.query_params.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    # Checked before int(), which raises on thousands of digits.
    if digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS and least <= int(text) <= most:
        return int(text)
    raise HTTPException(
        400, f"cannot use {name}={text[:MAX_DIGITS]}: write a number from {least} to {most}, in digits"
    )


def nni_status(request: Request) -> str | None:
    """The value of the query parameter `status`, one of NNI's; None if it is missing.

    Raises:
        HTTPException: there is no such status.
    """
    status = request.query_params.get("status")
    if status is not None and status not in (_UNUSED_STATUS, *STATUSES):
        raise HTTPException(
            400, f"cannot use status={status[:_MAX_SHOWN]}: write one of {', '.join(STATUSES)}"
        )
    return status


def refuse_unknown(request: Request, known: Collection[str]) -> None:
    """Raise if a query parameter has none of these names. For paths that NNI's clients do not use: those may send others.

    Raises:
        HTTPException: there is no such parameter.
    """
    for name in request.query_params:
        if name not in known:
            raise HTTPException(
                400,
                f"cannot use {name[:_MAX_SHOWN]}: there is no such parameter; write some of {', '.join(known)}",
            )


def is_true(request: Request, name: str) -> bool:
    """The value of a query parameter that is `true` or `false`; False if it is missing.

    Raises:
        HTTPException: it is another text.
    """
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise HTTPException(400, f"cannot use {name}={text[:MAX_DIGITS]}: write true or false")
    return text == "true"
