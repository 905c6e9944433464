"""The loop that handles the events of a running experiment, stores its decisions, and runs its tasks."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from nni_manager.domain.events import Event
from nni_manager.engine.commits import GroupCommit
from nni_manager.store.lease import LeaseLost
from nni_manager.store.rows import Write
from nni_manager.store.writer import Store
from nni_manager.support.task_set import TaskSet

log = logging.getLogger(__name__)


class EventLoop:
    """The `Runtime` of one experiment on one asyncio loop; nothing here is thread-safe."""

    def __init__(
        self, store: Store, handle: Callable[[Event], None], note_handled: Callable[[], None]
    ) -> None:
        """`handle` performs the effects of one event; `note_handled` is called after all posted events."""
        self.commits = GroupCommit(store, self.fail)
        self.failed = asyncio.Event()
        """Set when the manager must end and store nothing more: after a bug, from which a resume recovers, or because another
        manager holds the lease."""
        self.lease_lost: LeaseLost | None = None
        """The error that names the manager which now holds the lease; None while this one holds it."""
        self.last_save: asyncio.Future[None] | None = None
        """See `Runtime`."""
        self._handle = handle
        self._note_handled = note_handled
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._tasks = TaskSet(self.fail)
        self.spawn = self._tasks.spawn
        """See `Runtime`."""

    # ---- events

    def post(self, event: Event) -> None:
        """See `Runtime`."""
        if self.failed.is_set():
            return
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._handle(self._events.popleft())
            self._note_handled()
        except Exception as error:  # noqa: BLE001 - most callers cannot handle it
            self._events.clear()
            self.fail(error)
        finally:
            self._is_handling = False

    # ---- the store

    def save(self, write: Write) -> None:
        """See `Runtime`."""
        self.last_save = self.commits.add([write])

    def after_save(self, action: Callable[[], None]) -> None:
        """Call the action when all decisions so far are durable."""
        if self.last_save is None:
            action()
        else:
            self.last_save.add_done_callback(lambda done: action() if not done.exception() else None)

    def durable(self) -> "asyncio.Future[None]":
        """See `Runtime`."""
        return self.commits.add([])

    # ---- tasks and failures

    async def cancel_tasks(self) -> None:
        """Cancel all tasks, also those that are spawned from now on, and wait for their ends."""
        # No task may outlive the store. A cancelled submission ends its trial, and the next one would then be submitted.
        await self._tasks.cancel()

    def on_lease_lost(self, error: LeaseLost) -> None:
        """Store nothing more and end: another manager holds the lease."""
        if self.lease_lost is None:
            self.lease_lost = error
            log.critical("%s", error)
        self.failed.set()

    def fail(self, error: BaseException) -> None:
        """See `Runtime`."""
        if isinstance(error, LeaseLost):
            self.on_lease_lost(error)
            return
        # A bug: the state in memory cannot be trusted, so stop here. The stored state is valid.
        log.critical("internal error; the manager stops", exc_info=error)
        self.failed.set()
