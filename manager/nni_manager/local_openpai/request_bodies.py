"""Request bodies of bounded size: memory use is limited, and an oversized request still gets a response.

Source: microsoft/pai v1.8.1 for the size (the default of its body-parser) and for the body of 413.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from nni_manager.errors import UserError
from nni_manager.local_openpai.errors import ApiError, invalid_parameters

MAX_BODY_BYTES = 100 * 1024


class BodyTooLarge(UserError):
    """request entity too large"""


async def body_of(request: Request) -> bytes:
    """The body of a request.

    Raises:
        BodyTooLarge: as soon as the size exceeds the limit.
    """
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > MAX_BODY_BYTES:
        raise BodyTooLarge
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge
    return bytes(body)


async def job_text_of(request: Request) -> bytes:
    """The body of a request with a text content type.

    Raises:
        BodyTooLarge.
        ApiError: InvalidProtocolError, the content type is not text.
    """
    kind = request.headers.get("content-type", "nothing").partition(";")[0].strip()
    if not kind.lower().startswith("text/"):
        raise ApiError(
            "InvalidProtocolError",
            f"cannot read a job sent as {kind[:60]}; send it with Content-Type: text/yaml",
        )
    return await body_of(request)


async def fields_of(request: Request) -> dict[str, Any]:
    """The fields of a JSON or form body.

    Raises:
        BodyTooLarge.
        ApiError: InvalidParametersError, the body is neither JSON nor a form.
    """
    body = await body_of(request)
    try:
        if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            return dict(parse_qsl(body.decode(), keep_blank_values=True))
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid_parameters(
            "cannot read the request body; send JSON with Content-Type: application/json"
        ) from error
    if not isinstance(fields, dict):
        raise invalid_parameters("cannot use the request body: it is not a JSON object; send a JSON object")
    return fields


def text_in(fields: dict[str, Any], name: str) -> str:
    """A required text field.

    Raises:
        ApiError: InvalidParametersError.
    """
    value = fields.get(name)
    # JSON escapes can encode lone surrogates, which a response cannot encode.
    if not isinstance(value, str) or (not value.isascii() and re.search("[\ud800-\udfff]", value)):
        raise invalid_parameters(f"cannot find the text field {name} in the request body; add it")
    return value
