"""A `JobStore` behind a thread of its own, so that calls neither overlap nor block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from nni_manager.local_openpai.errors import ClusterClosed
from nni_manager.local_openpai.store import JobStore

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StoreThread:
    """One connection to the database; `call` runs a method of `JobStore` on it."""

    def __init__(self, path: Path, name: str) -> None:
        """Store the path; no I/O."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._store: JobStore | None = None

    async def open(self) -> None:
        """Open the database, or create it. Raises what `JobStore` raises."""
        self._store = await asyncio.get_running_loop().run_in_executor(self._thread, JobStore, self._path)

    async def call(
        self, method: Callable[Concatenate[JobStore, _P], _T], /, *values: _P.args, **named: _P.kwargs
    ) -> _T:
        """The result of a method of the store.

        Raises:
            ClusterClosed: the store is not open.
        """
        if self._store is None:
            raise ClusterClosed
        call = partial(method, self._store, *values, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def close(self) -> None:
        """Close the database after the pending calls; idempotent."""
        store, self._store = self._store, None
        if store is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, store.close)
        self._thread.shutdown()
