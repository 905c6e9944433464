"""Bodies of requests: never more of one in memory than a request may have, and an answer even to who sends more.

Source: microsoft/pai v1.8.1 for the size (the default of its body-parser) and for the body of 413.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nni_manager.errors import UserMistake
from nni_manager.local_openpai.refusals import Refused

MOST_BODY_BYTES = 100 * 1024

# A client that is still sending when the connection closes never sees why. So much of the rest is read, and thrown away.
_DRAINED_BYTES = 16 * 2**20
_DRAINED_WITHIN_S = 5.0


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


class Patience:
    """Answers a client that is still sending at once, reads on for a while, and closes the connection.

    Otherwise the server would read to the end whatever is sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name for name, _ in scope["headers"]}
        was_read = names.isdisjoint({b"content-length", b"transfer-encoding"})
        # A client that waits for a word before it sends has not had it, and will not send.
        waits = b"expect" in names

        async def noticing() -> Message:
            nonlocal was_read, waits
            waits = False
            message = await receive()
            was_read = was_read or message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def sending(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start" and not was_read:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            if not is_last or was_read or waits:
                await send(message)
                return
            await send({**message, "more_body": True})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(drain(), _DRAINED_WITHIN_S)
            await send({"type": "http.response.body", "body": b""})

        async def drain() -> None:
            size = 0
            while not was_read and size < _DRAINED_BYTES:
                size += len((await noticing()).get("body", b""))

        await self._app(scope, noticing, sending)
