"""What the parts of an engine may do with its event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from nni_manager.domain.events import Event
from nni_manager.store.rows import Write


class Runtime(Protocol):
    """Posts events, stores decisions and starts tasks. Not thread-safe."""

    @property
    def last_save(self) -> "asyncio.Future[None] | None":
        """Done when all decisions so far are durable; None: nothing was decided yet."""

    def post(self, event: Event) -> None:
        """Handle an event at once, or after the current event if one is being handled."""

    def save(self, write: Write) -> None:
        """Store the write with the next transaction."""

    def durable(self) -> "asyncio.Future[None]":
        """A future that is done when all decisions, and all data so far, are stored."""

    def fail(self, error: BaseException) -> None:
        """End the manager, because the state in memory may lack something. The stored state is valid, and a resume reads it."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run the work as a task; its failure ends the manager. While the manager closes, no work starts."""
