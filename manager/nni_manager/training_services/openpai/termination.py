"""Termination messages: the last output of the task that ended a job, read from its node's log server.

A dead node does not answer. Each message is therefore fetched once, within seconds, in its own thread: it delays neither the
poll nor other jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from nni_manager.errors import NniManagerError
from nni_manager.support.daemon_threads import in_daemon_thread
from nni_manager.training_services.openpai.rest import JobStatus, OpenPai, TaskStatus
from nni_manager.training_services.retry_policy import ClientRetryPolicy

logger = logging.getLogger(__name__)

# Users wait for the end of the trial, and a healthy log server answers within a second.
TIMEOUT_S = 4.0
_ONCE = ClientRetryPolicy(tries=1, connect_within_s=2.0, answer_within_s=3.0)
# Many jobs may end at the same time; jobs that get no free thread in time end without a message.
_THREADS = 8
_TAIL_BYTES = 2000


class TerminationMessages:
    """Fetches termination messages of one cluster. Runs on the manager's event loop."""

    def __init__(self, cluster: OpenPai) -> None:
        self._cluster = cluster
        self._free = asyncio.Semaphore(_THREADS)

    async def of(self, job: JobStatus) -> str:
        """Returns the last lines of stderr of the task that decided the job's end; empty if they do not arrive in time."""
        if job.trigger is None:
            return ""
        deadline_s = time.monotonic() + TIMEOUT_S
        try:
            return await asyncio.wait_for(self._fetched(job, deadline_s), TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            logger.info("no termination message of job %s: no answer within %g s", job.name, TIMEOUT_S)
        except NniManagerError as error:
            logger.info("no termination message of job %s: %s", job.name, error)
        except Exception:  # the job's end is reported regardless of the log server's answer
            logger.exception(
                "cannot parse the log server's answer with the termination message of job %s", job.name
            )
        return ""

    async def _fetched(self, job: JobStatus, deadline_s: float) -> str:
        await self._free.acquire()
        loop = asyncio.get_running_loop()

        def fetch() -> str:
            try:
                return _fetch(self._cluster.within(_ONCE), job, deadline_s)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._free.release)

        try:
            answer = in_daemon_thread(fetch, name=f"log-of-{job.name}")
        except RuntimeError:  # thread limit reached
            self._free.release()
            raise
        return await answer


def _fetch(cluster: OpenPai, job: JobStatus, deadline_s: float) -> str:
    assert job.trigger is not None
    ended = TaskStatus(*job.trigger, attempt=0, document={})
    task = next((each for each in job.tasks if each.name == ended.name), ended)
    locations = cluster.log_locations(job, task, is_tail=True)
    if "stderr" not in locations:
        return ""
    text = cluster.log_tail(locations["stderr"], _TAIL_BYTES, deadline_s)
    return text.decode(errors="replace").strip()
