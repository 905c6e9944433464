"""Links to logs, as in OpenPAI: a link gives access to one log for a limited time, without a login.

Source: microsoft/pai v1.8.1, log-manager, and models/v2/job/log of the REST server.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from nni_manager.local_openpai.api_errors import bad_token
from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.jobs import LogPiece

# The lifetime of OpenPAI's links.
LINK_LIFE_S = 120
_CHUNK_BYTES = 256 * 1024


class LogPlace(NamedTuple):
    """The location of a log of a task's attempt; the fields are the arguments of `Cluster.read_log`, in their order."""

    owner: str
    job: str
    attempt: int
    role: str
    task_index: int
    task_attempt: int
    file: str

    def query(self) -> dict[str, str]:
        """The query parameters of a link, without the file name."""
        return {
            "username": self.owner,
            "jobname": self.job,
            "attempt": str(self.attempt),
            "taskrole": self.role,
            "taskindex": str(self.task_index),
            "taskattempt": str(self.task_attempt),
        }


class LogLinks:
    """Creates and serves links to the logs of a cluster at `address`."""

    PATH = "/log-manager/{node}/api/v1/logs/{file}"

    def __init__(self, cluster: Cluster, address: str, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._address = address
        self._clock = clock
        # A key per process: links are short-lived and need not outlive it.
        self._key = secrets.token_bytes(32)

    def link(self, place: LogPlace, tail: bool) -> str:
        """A link to a whole log, or to its end; without the server's address, as in OpenPAI."""
        expires = str(int(self._clock()) + LINK_LIFE_S)
        query = {**place.query(), "expires": expires, "token": self._signature(place, expires)}
        if tail:
            query["tail-mode"] = "true"
        return f"/log-manager/{self._address}/api/v1/logs/{quote(place.file, safe='')}?{urlencode(query)}"

    def _signature(self, place: LogPlace, expires: str) -> str:
        said = urlencode({**place.query(), "file": place.file, "expires": expires})
        return hmac.digest(self._key, said.encode(), "sha256").hex()

    async def read(self, request: Request) -> Response:
        """Serve a log to the holder of a valid link: the whole log, its end, or the requested byte range."""
        place = self._place_of(request)
        is_tail, first = request.query_params.get("tail-mode") == "true", _first_byte(request)
        if is_tail:
            piece = await self._cluster.read_log(*place)
        else:
            piece = await self._cluster.read_log(*place, offset=first or 0, most_bytes=_CHUNK_BYTES)
        if first is None and not (is_tail and piece.data):
            return StreamingResponse(self._rest_of(place, piece), media_type="text/plain")
        if not piece.data:
            return Response(status_code=416, headers={"Content-Range": f"bytes */{piece.size_bytes}"})
        last = piece.offset + len(piece.data) - 1
        content_range = f"bytes {piece.offset}-{last}/{piece.size_bytes}"
        return PlainTextResponse(piece.data, status_code=206, headers={"Content-Range": content_range})

    async def _rest_of(self, place: LogPlace, piece: LogPiece) -> AsyncIterator[bytes]:
        """All bytes that the log had at the request, and possibly a few appended since."""
        sent, size_bytes = 0, piece.size_bytes
        while piece.data and sent < size_bytes:
            yield piece.data
            sent += len(piece.data)
            piece = await self._cluster.read_log(*place, offset=sent, most_bytes=_CHUNK_BYTES)

    def _place_of(self, request: Request) -> LogPlace:
        query = request.query_params
        try:
            place = LogPlace(
                owner=query["username"],
                job=query["jobname"],
                attempt=int(query["attempt"]),
                role=query["taskrole"],
                task_index=int(query["taskindex"]),
                task_attempt=int(query["taskattempt"]),
                file=request.path_params["file"],
            )
            expires, token = query["expires"], query["token"]
            is_ours = hmac.compare_digest(self._signature(place, expires).encode(), token.encode())
        except (KeyError, ValueError) as error:
            raise bad_token() from error
        if not is_ours or self._clock() >= int(expires):
            raise bad_token()
        return place


def _first_byte(request: Request) -> int | None:
    """The first byte of the requested range; None without one. Only open-ended ranges are supported."""
    match = re.fullmatch(r"bytes=([0-9]{1,18})-", request.headers.get("range", ""))
    return int(match[1]) if match else None
