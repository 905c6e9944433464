"""Values of query parameters, and their errors."""

from starlette.exceptions import HTTPException
from starlette.requests import Request

MAX_DIGITS = 18


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


def is_true(request: Request, name: str) -> bool:
    """The value of a query parameter that is `true` or `false`; False if it is missing.

    Raises:
        HTTPException: it is another text.
    """
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise HTTPException(400, f"cannot use {name}={text[:MAX_DIGITS]}: write true or false")
    return text == "true"
