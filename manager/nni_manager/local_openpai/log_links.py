"""Links to logs, as in OpenPAI: a link gives access to one log for a limited time, without a login.

Source: microsoft/pai v1.8.1, log-manager, and models/v2/job/log of the REST server.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.errors import bad_token
from nni_manager.local_openpai.logs import TAIL_BYTES, LogPiece, read_log

# The lifetime of OpenPAI's links.
LINK_LIFE_S = 120
_CHUNK_BYTES = 256 * 1024


class LogAddress(NamedTuple):
    """The address of a log of a task's attempt; the names are those of a link's query parameters.

    All fields except `file` are the arguments of `Cluster.logs_of`, in order.
    """

    username: str
    jobname: str
    attempt: int
    taskrole: str
    taskindex: int
    taskattempt: int
    file: str


class LogLinks:
    """Creates and serves links to the logs of a cluster at `address`."""

    PATH = "/log-manager/{node}/api/v1/logs/{file}"

    def __init__(self, cluster: Cluster, address: str, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._address = address
        self._clock = clock
        # One key per process: links are short-lived and need not survive a restart.
        self._key = secrets.token_bytes(32)

    def link(self, log: LogAddress, is_tail: bool) -> str:
        """A link to a whole log, or to its end; without the server's address, as in OpenPAI."""
        expires = str(int(self._clock()) + LINK_LIFE_S)
        query = {**log._asdict(), "expires": expires, "token": self._signature(log, expires)}
        del query["file"]
        if is_tail:
            query["tail-mode"] = "true"
        return f"/log-manager/{self._address}/api/v1/logs/{quote(log.file, safe='')}?{urlencode(query)}"

    def _signature(self, log: LogAddress, expires: str) -> str:
        signed = urlencode({**log._asdict(), "expires": expires})
        return hmac.digest(self._key, signed.encode(), "sha256").hex()

    async def read(self, request: Request) -> Response:
        """Serve a log to the holder of a valid link: the whole log, its end, or the requested byte range."""
        log = self._log_of(request)
        is_tail, first = request.query_params.get("tail-mode") == "true", _first_byte(request)
        piece = await (self._piece(log, None, TAIL_BYTES) if is_tail else self._piece(log, first or 0))
        if first is None and not (is_tail and piece.data):
            return StreamingResponse(self._rest_of(log, piece), media_type="text/plain")
        if not piece.data:
            return Response(status_code=416, headers={"Content-Range": f"bytes */{piece.size_bytes}"})
        last = piece.offset + len(piece.data) - 1
        content_range = f"bytes {piece.offset}-{last}/{piece.size_bytes}"
        return PlainTextResponse(piece.data, status_code=206, headers={"Content-Range": content_range})

    async def _rest_of(self, log: LogAddress, piece: LogPiece) -> AsyncIterator[bytes]:
        """All bytes that the log had at the request, and possibly a few appended since."""
        sent, size_bytes = 0, piece.size_bytes
        while piece.data and sent < size_bytes:
            yield piece.data
            sent += len(piece.data)
            piece = await self._piece(log, sent)

    async def _piece(self, log: LogAddress, offset: int | None, max_bytes: int = _CHUNK_BYTES) -> LogPiece:
        folder = await self._cluster.logs_of(*log[:-1])
        return await asyncio.to_thread(read_log, folder, log.file, offset, max_bytes)

    def _log_of(self, request: Request) -> LogAddress:
        query = request.query_params
        try:
            user, job, attempt, role, index, task_attempt = (query[name] for name in LogAddress._fields[:-1])
            file = request.path_params["file"]
            log = LogAddress(user, job, int(attempt), role, int(index), int(task_attempt), file)
            expires, token = query["expires"], query["token"]
            is_signed = hmac.compare_digest(self._signature(log, expires).encode(), token.encode())
        except (KeyError, ValueError) as error:
            raise bad_token() from error
        if not is_signed or self._clock() >= int(expires):
            raise bad_token()
        return log


def _first_byte(request: Request) -> int | None:
    """The first byte of the requested range; None without one. Only open-ended ranges are supported."""
    match = re.fullmatch(r"bytes=([0-9]{1,18})-", request.headers.get("range", ""))
    return int(match[1]) if match else None
