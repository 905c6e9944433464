"""Notifications of job changes: a line in a file, or a POST to a webhook, each at least once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import requests

from nni_manager.local_openpai.errors import StateBusy
from nni_manager.local_openpai.settings import ClusterSettings
from nni_manager.local_openpai.store import JobStore, StoreThread
from nni_manager.support.backoff import delays_s
from nni_manager.support.webhook import post_json

logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _MAX_WAIT_S = 1.0, 60.0
# After this time without delivery, a notification is dropped.
_MAX_RETRY_S = 3600.0


class Notifier:
    """Delivers the stored notifications in order. A failed delivery to a webhook is retried for an hour."""

    def __init__(self, settings: ClusterSettings, database: StoreThread) -> None:
        self._url = settings.notification_url
        self._file = settings.notification_file
        self._database = database
        self._pending = asyncio.Event()
        self._pending.set()  # an earlier cluster may have left undelivered notifications

    @property
    def is_enabled(self) -> bool:
        """True if a file or a webhook is configured."""
        return self._url is not None or self._file is not None

    def wake(self) -> None:
        """Check for new notifications."""
        self._pending.set()

    async def run(self) -> None:
        """Deliver, until cancelled."""
        while True:
            await self._pending.wait()
            self._pending.clear()
            while pending := await self._retried(self._database.call, JobStore.notifications):
                for number, body in pending:
                    if self._file is not None:
                        await self._retried(asyncio.to_thread, _append, self._file, body)
                    if self._url is not None:
                        await self._notify(self._url, body)
                    write = ("remove_notification", {"notification_id": number})
                    await self._retried(self._database.call, JobStore.commit, [write])

    async def _retried(self, call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """The result of a call, repeated until the disk accepts it."""
        waits_s = delays_s(_FIRST_WAIT_S, _MAX_WAIT_S)
        while True:
            try:
                return await call(*arguments)
            except (OSError, StateBusy) as error:
                logger.warning("cannot deliver notifications of job changes: %s; trying again", error)
            await asyncio.sleep(next(waits_s))

    async def _notify(self, url: str, body: str) -> None:
        deadline_s, waits_s = time.monotonic() + _MAX_RETRY_S, delays_s(_FIRST_WAIT_S, _MAX_WAIT_S)
        while not await asyncio.to_thread(_post, url, body):
            if time.monotonic() >= deadline_s:
                logger.warning("cannot notify %s within an hour: dropped the notification %s", url, body)
                return
            await asyncio.sleep(next(waits_s))


def _append(file: Path, body: str) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(f"{body}\n")


def _post(url: str, body: str) -> bool:
    try:
        return post_json(url, body) < 400
    except requests.RequestException as error:
        logger.info("cannot reach %s: %s", url, error)
        return False
