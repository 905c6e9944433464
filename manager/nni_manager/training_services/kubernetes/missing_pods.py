"""Finds out why an operator creates no pods for a job: a dry run of the pod gets the refusal that the operator gets.

FrameworkController retries a pod that a quota or a webhook refuses without reporting it. A dry run passes the same admission
control and creates nothing. It needs the right to create pods, and is made only while a job has no pod.

Source: Kubernetes API Concepts, Dry-run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from nni_manager.errors import NniManagerError
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.errors import Forbidden
from nni_manager.training_services.kubernetes.job_states import KubernetesJob

logger = logging.getLogger(__name__)

# An idle operator creates pods within a second.
_FIRST_CHECK_S = 3.0
# One call for all jobs: the cause of one is usually that of all.
_CHECK_INTERVAL_S = 10.0


class MissingPods:
    """Checks while jobs have no pods.

    `waiting_jobs`: the jobs that have not started. `missing_pod`: by the id and the name of a job, a pod that its operator has
    not created; None: there is none. `refusal_of`: why the cluster refuses a pod, see `Kubernetes.refusal`.
    """

    def __init__(
        self,
        waiting_jobs: Callable[[], Iterable[KubernetesJob]],
        missing_pod: Callable[[str, str], Document | None],
        refusal_of: Callable[[Document], Awaitable[str]],
    ) -> None:
        self._waiting_jobs, self._missing_pod, self._refusal_of = waiting_jobs, missing_pod, refusal_of
        self.refusal = ""
        """Why the cluster refuses the pods at present, in its own words; empty if it does not, or if that is unknown."""
        self._is_checking = False

    async def check(self) -> None:
        """Check until no job waits. Returns at once if a check is in progress."""
        if self._is_checking:
            return
        self._is_checking = True
        try:
            await asyncio.sleep(_FIRST_CHECK_S)
            while jobs := self._waiting_jobs():
                missing = (self._missing_pod(job.job_id, job.name) for job in jobs)
                pod = next(filter(None, missing), None)
                try:
                    self.refusal = "" if pod is None else await self._refusal_of(pod)
                except Forbidden as error:
                    logger.info(
                        "%s; without this right, the reasons of some missing pods are not shown", error
                    )
                    return
                except NniManagerError as error:
                    logger.info("%s", error)
                await asyncio.sleep(_CHECK_INTERVAL_S)
        finally:
            self._is_checking = False
            self.refusal = ""
