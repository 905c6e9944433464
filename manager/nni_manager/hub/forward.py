"""Passes requests of a browser on to the manager of an experiment, with the token of programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import requests
import urllib3
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from nni_manager.client.manager_client import api_url, session_with
from nni_manager.store.folders import ManagerProcess
from nni_manager.support.http_server import ResponseTruncated, mark_streaming
from nni_manager.web.change_feed import MAX_FOLLOWERS

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
        # An open event stream takes a thread.
        self._threads = ThreadPoolExecutor(MAX_FOLLOWERS + 20, "forward")

    async def pass_on(self, request: Request, path: str, manager: ManagerProcess) -> Response:
        """The manager's response.

        Raises:
            HTTPException: the manager does not answer.
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
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            mark_streaming(request.scope)
        return StreamingResponse(self._pieces(session, answer), answer.status_code, headers)

    async def _pieces(self, session: requests.Session, answer: requests.Response) -> AsyncIterator[bytes]:
        loop, pieces = asyncio.get_running_loop(), answer.raw.stream(_PIECE_BYTES, decode_content=False)
        try:
            while piece := await loop.run_in_executor(self._threads, next, pieces, b""):
                yield piece
        except urllib3.exceptions.HTTPError as error:
            raise ResponseTruncated(f"the manager has ended: {error}") from error
        finally:
            # A thread may still read: the manager's next comment, or its end, ends that.
            loop.run_in_executor(self._threads, _close, session, answer)

    def close(self) -> None:
        """Start no further request."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _close(session: requests.Session, answer: requests.Response) -> None:
    answer.close()
    session.close()
