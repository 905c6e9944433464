"""Collects the jobs that wait while sbatch runs: they become one job array."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from nni_manager.errors import UserError
from nni_manager.support.task_set import TaskSet
from nni_manager.training_services.slurm.jobs import Job

# Three calls of sbatch do not delay squeue.
_MOST_CALLS = 3
# Slurm's MaxArraySize is 1001, and the settings of all tasks are in one environment.
_MOST_TASKS = 100


class Submissions:
    """Calls sbatch for jobs: at once, or together with others if it is busy."""

    def __init__(self, submit: Callable[[Sequence[Job]], Awaitable[None]]) -> None:
        """`submit` submits one job alone, and several as an array."""
        self._submit = submit
        self._tasks = TaskSet()
        self._waiting: list[tuple[Job, asyncio.Future[None]]] = []
        self._calls = 0
        self._most_tasks = _MOST_TASKS

    async def submit(self, job: Job) -> None:
        """Submit a job; returns when it exists. Raises what `submit` raises for it."""
        is_submitted = asyncio.get_running_loop().create_future()
        self._waiting.append((job, is_submitted))
        if self._calls < _MOST_CALLS:
            self._calls += 1
            self._tasks.spawn(self._run())
        await is_submitted

    async def close(self) -> None:
        """Cancel the submissions that have not ended."""
        await self._tasks.cancel()
        for _, is_submitted in self._waiting:
            is_submitted.cancel()

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[: self._most_tasks], self._waiting[self._most_tasks :]
                await self._submit_batch(batch)
        finally:
            self._calls -= 1

    async def _submit_batch(self, batch: list[tuple[Job, asyncio.Future[None]]]) -> None:
        try:
            await self._submit([job for job, _ in batch])
        except asyncio.CancelledError:
            for _, is_submitted in batch:
                is_submitted.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - raised by `submit`
            if isinstance(error, UserError) and len(batch) > 1:
                # The cluster may refuse only arrays.
                self._most_tasks = 1
                self._waiting[:0] = batch
                return
            for _, is_submitted in batch:
                if not is_submitted.done():  # it is done if the caller was cancelled
                    is_submitted.set_exception(error)
        else:
            for _, is_submitted in batch:
                if not is_submitted.done():
                    is_submitted.set_result(None)
