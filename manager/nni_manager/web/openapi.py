"""The OpenAPI description of the HTTP API. Each operation is declared once; routes and document are derived from it.

Source: OpenAPI Specification 3.1.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nni_manager.web.auth_middleware import MAX_BODY_BYTES
from nni_manager.web.session_auth import KEY_HEADER
from trial_keeper import __version__
from trial_keeper.frozen_dataclass import dataclass

Schema = Mapping[str, Any]
ONE: Schema = {"type": "object"}
MANY: Schema = {"type": "array", "items": ONE}
MAPPING: Schema = {"type": "object", "additionalProperties": True}
_TEXT: Schema = {"type": "string"}

_PATH_PARAMETER = re.compile(r"\{(\w+)\}")
# Others are any text. `first` and `last` are sequence numbers of trials, in the order of creation.
_PATH_PARAMETERS: Mapping[str, Schema] = {
    "stream": {"type": "string", "enum": ["stdout", "stderr", "keeper"]},
    "first": {"type": "integer", "minimum": 0},
    "last": {"type": "integer", "minimum": 0},
}
# Responses of `web.auth_middleware` to any operation.
_REFUSALS_OF_ALL: Mapping[int, str] = {
    400: "The Host header does not name this manager, or a value in the request is invalid.",
    401: "The token is missing or wrong.",
    403: "The request comes from another web page, or would change an experiment that is only viewed.",
    411: "The body has no Content-Length.",
    413: "The body is too large.",
    431: "The address and the headers are too large.",
    503: "The database, or the storage that trials write to, does not answer now; try again.",
}
REFUSALS: Mapping[int, str] = {
    404: "The trial, the job, the log or the TensorBoard does not exist.",
    409: "The state of the trial or of the experiment does not allow the change; the message names the state.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the API. The first line of the endpoint's docstring is its summary.

    `answer`: the schema of the response; None: text of the `media_type`. `refusals`: the statuses in REFUSALS that the
    endpoint may return. `body`: the schema of the required request body; None: no body.
    """

    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    answer: Schema | None
    method: str = "GET"
    status: int = 200
    query: Mapping[str, Schema] = field(default_factory=dict)
    refusals: tuple[int, ...] = ()
    body: Schema | None = None
    most_body_bytes: int = MAX_BODY_BYTES
    media_type: str = "text/plain"

    def route(self) -> Route:
        """The route for the server."""
        return Route(self.path, self.endpoint, methods=[self.method])

    def described(self) -> dict[str, Any]:
        """The operation object of the OpenAPI document."""
        names = _PATH_PARAMETER.findall(self.path)
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": dict(_PATH_PARAMETERS.get(name, _TEXT))}
            for name in names
        ] + [{"name": name, "in": "query", "schema": dict(schema)} for name, schema in self.query.items()]
        content = {self.media_type: {"schema": dict(_TEXT)}} if self.answer is None else _json(self.answer)
        refusals = dict(_REFUSALS_OF_ALL) | {status: REFUSALS[status] for status in self.refusals}
        summary = (inspect.getdoc(self.endpoint) or "").partition("\n")[0]
        described: dict[str, Any] = {
            "summary": summary,
            "operationId": self.endpoint.__name__,
            "parameters": parameters,
        }
        if self.body is not None:
            described["requestBody"] = {"required": True, "content": _json(self.body)}
        described["responses"] = {str(self.status): {"description": summary, "content": content}} | {
            str(status): {"description": meaning, "content": _json(_ERROR)}
            for status, meaning in sorted(refusals.items())
        }
        return described


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": dict(schema)}}


_ERROR: Schema = {"$ref": "#/components/schemas/Error"}


def document(operations: Iterable[Operation], server: str, root: str, cookie_name: str) -> dict[str, Any]:
    """The OpenAPI document. `server` is what answers; `root` is the prefix of all paths; `cookie_name` is the session cookie."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(root + operation.path, {})[operation.method.lower()] = operation.described()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"trial-keeper: {server}",
            "version": __version__,
            "description": "Paths and responses are those of NNI's manager. Times are milliseconds since the epoch.",
        },
        "security": [{"token": []}, {"session": [], "key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": cookie_name},
                "key": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
            },
            "schemas": {
                "Error": {
                    "type": "object",
                    "required": ["error"],
                    "properties": {"error": {"type": "string", "pattern": "^cannot "}},
                }
            },
        },
    }
