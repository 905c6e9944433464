"""Passes requests of a browser on to the manager of an experiment, with the token of programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import requests
import urllib3
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nni_manager.client.manager_client import api_url, session_with
from nni_manager.store.folders import ManagerProcess
from nni_manager.support.http_server import ResponseTruncated, mark_streaming
from nni_manager.web.change_feed import MAX_FOLLOWERS, too_many_followers

# An event stream has a comment every 15 s.
TIMEOUT_S = 40.0
# Longer than the page waits for a change, which a manager confirms when its disk has it.
CHANGE_TIMEOUT_S = 130.0
_CONNECT_TIMEOUT_S = 5.0
_PIECE_BYTES = 64 * 1024
_FROM_BROWSER = ("accept", "accept-encoding", "content-type", "if-none-match")
_FROM_MANAGER = (
    *("content-type", "content-encoding", "content-disposition", "cache-control", "etag", "vary"),
    "x-accel-buffering",
)


class Forwarding:
    """Requests in threads: `requests` checks that the listener belongs to this user, and pins the certificate."""

    def __init__(self) -> None:
        # An open event stream takes a thread. The others are for short requests.
        self._threads = ThreadPoolExecutor(MAX_FOLLOWERS + 20, "forward")
        self._followers = 0

    async def pass_on(self, request: Request, path: str, manager: ManagerProcess) -> Response:
        """The manager's response.

        Raises:
            HTTPException: the manager does not answer, or too many event streams are open.
        """
        loop, body = asyncio.get_running_loop(), await request.body()

        def ask() -> tuple[requests.Session, requests.Response]:
            session = session_with(manager)
            session.headers.pop("Accept-Encoding")  # the browser's own counts
            try:
                return session, session.request(
                    request.method,
                    api_url(manager) + quote(path),
                    params=request.url.query,
                    data=body,
                    headers={name: value for name, value in request.headers.items() if name in _FROM_BROWSER},
                    stream=True,
                    timeout=(_CONNECT_TIMEOUT_S, TIMEOUT_S if request.method == "GET" else CHANGE_TIMEOUT_S),
                    allow_redirects=False,
                )
            except requests.RequestException:
                session.close()
                raise

        try:
            session, answer = await loop.run_in_executor(self._threads, ask)
        except requests.RequestException as error:
            raise HTTPException(
                502,
                f"cannot reach the manager at {manager.base_url}: {type(error).__name__}; wait and try again, or see "
                "`nnictl log stderr`",
            ) from error
        headers = {name: value for name, value in answer.headers.items() if name.lower() in _FROM_MANAGER}
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        if is_stream:
            if self._followers >= MAX_FOLLOWERS:
                loop.run_in_executor(self._threads, _close, session, answer)
                raise too_many_followers()
            mark_streaming(request.scope)
            self._followers += 1

        def end() -> None:
            self._followers -= is_stream
            # A thread may still read: the manager's next comment, or its end, ends that.
            loop.run_in_executor(self._threads, _close, session, answer)

        return _Forwarded(end, self._pieces(answer), answer.status_code, headers)

    async def _pieces(self, answer: requests.Response) -> AsyncIterator[bytes]:
        loop, pieces = asyncio.get_running_loop(), answer.raw.stream(_PIECE_BYTES, decode_content=False)
        try:
            while piece := await loop.run_in_executor(self._threads, next, pieces, b""):
                yield piece
        except urllib3.exceptions.HTTPError as error:
            raise ResponseTruncated(f"the manager has ended: {error}") from error

    def close(self) -> None:
        """Start no further request."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Forwarded(StreamingResponse):
    """A manager's response. `end` is called after it, also if the browser has gone before its start."""

    def __init__(
        self, end: Callable[[], None], pieces: AsyncIterator[bytes], status: int, headers: dict[str, str]
    ) -> None:
        super().__init__(pieces, status, headers)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def _close(session: requests.Session, answer: requests.Response) -> None:
    answer.close()
    session.close()
