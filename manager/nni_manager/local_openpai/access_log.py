"""The access log, for operators: one line per request in the daemon's log."""

from __future__ import annotations

import logging
import re
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nni_manager.local_openpai.accounts import Caller

log = logging.getLogger("nni_manager.local_openpai.access")


class AccessLog:
    """Logs each request that changes something or fails. Queries and tokens are never logged."""

    _TOKEN = re.compile("(?<=/tokens/)(?!(?:application|check)$).*", re.DOTALL)

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle and log one request."""
        status = 500  # if no response is sent

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began_s = time.monotonic()
        try:
            await self._app(scope, receive, send_and_record)
        finally:
            if scope["type"] == "http" and not (scope["method"] == "GET" and status < 400):
                caller: Caller | None = scope.get("caller")
                path = quote(self._TOKEN.sub("***", scope["path"]))
                took_ms = 1000 * (time.monotonic() - began_s)
                who = caller.name if caller else "-"
                log.info("%s %s %s %d %.0f ms", who, scope["method"], path, status, took_ms)
