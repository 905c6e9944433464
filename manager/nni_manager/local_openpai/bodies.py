"""Bodies of requests: never more of one in memory than a request may have, and an answer even to who sends more.

Source: microsoft/pai v1.8.1 for the size (the default of its body-parser) and for the body of 413.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from nni_manager.errors import UserMistake
from nni_manager.local_openpai.refusals import Refused

MOST_BODY_BYTES = 100 * 1024


class BodyTooLarge(UserMistake):
    """request entity too large"""


async def body_of(request: Request) -> bytes:
    """The body.

    Raises:
        BodyTooLarge: as soon as that is known.
    """
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > MOST_BODY_BYTES:
        raise BodyTooLarge
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise BodyTooLarge
    return bytes(body)


async def job_text_of(request: Request) -> bytes:
    """The body of a request that sends text.

    Raises:
        BodyTooLarge.
        Refused: InvalidProtocolError, it says that it sends something else.
    """
    kind = request.headers.get("content-type", "nothing").partition(";")[0].strip()
    if not kind.lower().startswith("text/"):
        raise Refused(
            "InvalidProtocolError",
            f"cannot read a job sent as {kind[:60]}; send it with Content-Type: text/yaml",
        )
    return await body_of(request)


async def fields_of(request: Request) -> dict[str, Any]:
    """The fields of a body that is JSON, or a form.

    Raises:
        BodyTooLarge.
        Refused: InvalidParametersError, it is neither.
    """
    body = await body_of(request)
    try:
        if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            return dict(parse_qsl(body.decode(), keep_blank_values=True))
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(
            "InvalidParametersError", "cannot read the body of this request; send JSON with its Content-Type"
        ) from error
    if not isinstance(fields, dict):
        raise Refused(
            "InvalidParametersError", "cannot use the body of this request: it is no JSON object; send one"
        )
    return fields


def text_in(fields: dict[str, Any], name: str) -> str:
    """A field that must be there, and text.

    Raises:
        Refused: InvalidParametersError.
    """
    value = fields.get(name)
    # JSON's escapes can spell half a character, which nothing can be answered about.
    if not isinstance(value, str) or (not value.isascii() and re.search("[\ud800-\udfff]", value)):
        raise Refused("InvalidParametersError", f"cannot do without {name}: add it to the body, as text")
    return value
