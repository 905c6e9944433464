"""Links to logs, as OpenPAI gives them: whoever has one reads that log for a while, without logging in.

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

from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.jobs import LogPiece
from nni_manager.local_openpai.refusals import bad_token

# OpenPAI's links live as long.
LINK_LIFE_S = 120
_CHUNK_BYTES = 256 * 1024


class LogPlace(NamedTuple):
    """A log of a task's attempt, in the order in which the cluster is asked for it."""

    owner: str
    job: str
    attempt: int
    role: str
    task_index: int
    task_attempt: int
    file: str

    def query(self) -> dict[str, str]:
        """What a link says of it besides the name of the file."""
        return {
            "username": self.owner,
            "jobname": self.job,
            "attempt": str(self.attempt),
            "taskrole": self.role,
            "taskindex": str(self.task_index),
            "taskattempt": str(self.task_attempt),
        }


class LogLinks:
    """Makes links to the logs of a cluster that is at `address`, and answers them."""

    PATH = "/log-manager/{node}/api/v1/logs/{file}"

    def __init__(self, cluster: Cluster, address: str, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._address = address
        self._clock = clock
        # Links are short-lived, so they need not outlive this process.
        self._key = secrets.token_bytes(32)

    def link(self, place: LogPlace, tail: bool) -> str:
        """A link to all of a log, or to its end; without the server's address, as OpenPAI's."""
        expires = str(int(self._clock()) + LINK_LIFE_S)
        query = {**place.query(), "expires": expires, "token": self._signature(place, expires)}
        if tail:
            query["tail-mode"] = "true"
        return f"/log-manager/{self._address}/api/v1/logs/{quote(place.file, safe='')}?{urlencode(query)}"

    def _signature(self, place: LogPlace, expires: str) -> str:
        said = urlencode({**place.query(), "file": place.file, "expires": expires})
        return hmac.digest(self._key, said.encode(), "sha256").hex()

    async def read(self, request: Request) -> Response:
        """A log, for whoever has a link that still lives: all of it, its end, or a piece from the byte on that is asked for."""
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
        """All that was there when it was asked for, and of what came meanwhile a little."""
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
    """Where the range begins that is asked for; None without one. Only the kind that goes to the end is known."""
    match = re.fullmatch(r"bytes=([0-9]{1,18})-", request.headers.get("range", ""))
    return int(match[1]) if match else None
