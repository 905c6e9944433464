"""JSON of the HTTP API: bodies of requests and responses."""

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from nni_manager.client.results import finite
from nni_sdk.nesting import MAX_DOCUMENT_LEVELS, is_too_deep


def to_json(content: Any) -> bytes:
    """Encode as JSON. NaN and infinities become null: they are valid metrics, but JSON has none.

    Half a surrogate pair becomes an escape, which UTF-8 cannot encode otherwise.
    """
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(finite(content), allow_nan=False, separators=(",", ":")).encode()


class Json(JSONResponse):
    """A JSON response, encoded by `to_json`."""

    def render(self, content: Any) -> bytes:
        """The encoded body."""
        return to_json(content)


async def body_of(request: Request) -> Any:
    """The JSON of a request. The middleware has checked its size."""
    try:
        document = json.loads(await request.body())
        # Reject what a response cannot encode: NaN, numbers beyond floats, lone surrogates.
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise HTTPException(
            400, f"cannot read the request body: it is not JSON ({error}); send JSON"
        ) from error
    if is_too_deep(document, MAX_DOCUMENT_LEVELS):
        raise HTTPException(
            400,
            f"cannot read the request body: it is nested more than {MAX_DOCUMENT_LEVELS} levels deep; send flatter JSON",
        )
    return document
