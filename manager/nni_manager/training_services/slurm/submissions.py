"""Collects the jobs that wait while sbatch runs: they become one job array."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from nni_manager.errors import RetryableError, UserError
from nni_manager.support.task_set import TaskSet
from nni_manager.training_services.slurm.jobs import Job
from trial_keeper.frozen_dataclass import dataclass

logger = logging.getLogger(__name__)

# Three calls of sbatch do not delay squeue.
_MAX_CALLS = 3
# Slurm's MaxArraySize is 1001, and the settings of all tasks are in one environment.
_MAX_TASKS = 100


@dataclass(slots=True)
class _Waiting:
    """A job that waits for sbatch. `is_alone`: it is submitted alone, because an array with it was refused."""

    job: Job
    answer: asyncio.Future[None]
    is_alone: bool = False


class Submissions:
    """Calls sbatch for jobs: at once, or together with others if it is busy."""

    def __init__(self, submit: Callable[[Sequence[Job]], Awaitable[None]]) -> None:
        """`submit` submits one job alone, and several as an array."""
        self._submit = submit
        self._tasks = TaskSet()
        self._waiting: list[_Waiting] = []
        self._calls = 0
        self._allows_arrays = True
        self._is_closed = False

    async def submit(self, job: Job) -> None:
        """Submit a job; returns when it exists. Raises what `submit` raises for it."""
        if self._is_closed:
            raise RetryableError(f"cannot submit job {job.job_id}: the manager is closing")
        waiting = _Waiting(job, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._start_calls()
        await waiting.answer

    async def close(self) -> None:
        """Cancel the submissions that have not ended. Later ones raise."""
        self._is_closed = True
        await self._tasks.cancel()
        for waiting in self._waiting:
            waiting.answer.cancel()

    def _start_calls(self) -> None:
        for _ in range(min(_MAX_CALLS - self._calls, len(self._waiting))):
            self._calls += 1
            self._tasks.spawn(self._run())

    async def _run(self) -> None:
        try:
            while batch := self._next_batch():
                await self._submit_batch(batch)
        finally:
            self._calls -= 1

    def _next_batch(self) -> list[_Waiting]:
        """The jobs of the next call. A job whose caller was cancelled is not wanted any more."""
        self._waiting = [each for each in self._waiting if not each.answer.cancelled()]
        if not self._waiting:
            return []
        if self._waiting[0].is_alone or not self._allows_arrays:
            return [self._waiting.pop(0)]
        batch = [each for each in self._waiting if not each.is_alone][:_MAX_TASKS]
        self._waiting = [each for each in self._waiting if each not in batch]
        return batch

    async def _submit_batch(self, batch: list[_Waiting]) -> None:
        try:
            await self._submit([each.job for each in batch])
        except asyncio.CancelledError:
            for each in batch:
                each.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - raised by `submit`
            if isinstance(error, UserError) and len(batch) > 1:
                logger.info("submitting %d jobs alone, because an array is refused: %s", len(batch), error)
                self._waiting[:0] = [_Waiting(each.job, each.answer, is_alone=True) for each in batch]
                self._start_calls()
                return
            for each in batch:
                if not each.answer.done():  # it is done if the caller was cancelled
                    each.answer.set_exception(error)
        else:
            if batch[0].is_alone:
                self._allows_arrays = False  # the array was refused, and the job alone is not
            for each in batch:
                if not each.answer.done():
                    each.answer.set_result(None)
