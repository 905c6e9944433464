"""Calls about the resources of jobs and their secrets, on worker threads: create, read, and delete until the cluster answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nni_manager.backoff import delays_s
from nni_manager.errors import NniManagerError, RetryableError
from nni_manager.training_services.kubernetes import render
from nni_manager.training_services.kubernetes.api import Document, Kubernetes
from nni_manager.training_services.kubernetes.errors import AlreadyExists, Forbidden, NotFound
from nni_manager.training_services.kubernetes.job_states import KubernetesJob
from nni_manager.training_services.kubernetes.operator import Operator
from nni_manager.training_services.kubernetes.resources import SECRETS
from trial_keeper.settings import KeeperSettings

if TYPE_CHECKING:
    from nni_manager.training_services.kubernetes.azure_share import AzureShare

logger = logging.getLogger(__name__)

# Concurrent calls, so that a throttled one does not block the others.
_CALLERS = 4
_FIRST_RETRY_DELAY_S = 1.0
_MAX_RETRY_DELAY_S = 30.0
# The time to delete terminal resources when the manager exits.
_LAST_DELETES_S = 10.0

Answer = TypeVar("Answer")


def retry_delays_s() -> Iterator[float]:
    """The delays between the tries of a call that is repeated until the cluster answers."""
    return delays_s(_FIRST_RETRY_DELAY_S, _MAX_RETRY_DELAY_S)


class ResourceCalls:
    """The calls of one experiment, and its background deletes."""

    def __init__(
        self,
        cluster: Kubernetes,
        operator: Operator,
        namespace: str,
        experiment_id: str,
        share: AzureShare | None,
        logins: Mapping[Path, str],
    ) -> None:
        """`logins`: the content of each role's registry login."""
        self._cluster, self._operator, self._share, self._logins = cluster, operator, share, logins
        self._namespace, self._experiment_id = namespace, experiment_id
        self.doomed: set[str] = set()
        """The uids of resources that are no longer needed and being deleted."""
        self._deletes: set[asyncio.Task[None]] = set()
        self._callers = ThreadPoolExecutor(_CALLERS, thread_name_prefix="kubernetes")

    async def create(self, settings: KeeperSettings) -> str:
        """Create the resource of a job and the secrets that it owns, unless they exist. Returns the uid of the resource."""
        return await self._ask(self._create, settings)

    def _create(self, settings: KeeperSettings) -> str:
        operator, resource = self._operator, self._operator.resource
        wanted = operator.render(self._namespace, render.as_in_containers(settings))
        name = wanted["metadata"]["name"]
        try:
            made = self._cluster.create(resource, self._namespace, wanted)
        except AlreadyExists as error:
            made = self._cluster.get(resource, self._namespace, name)
            meta = made["metadata"]
            is_ours = self.is_of(made, settings.job_id)
            # Two jobs of this experiment may share a name; the other's resource is deleted once that job has ended.
            is_of_other_job = not is_ours and (meta.get("labels") or {}).get("expId") == self._experiment_id
            if "deletionTimestamp" in meta or meta["uid"] in self.doomed or is_of_other_job:
                raise RetryableError(
                    f"cannot create {resource.kind} {name}: namespace {self._namespace} still has another one of that name; the "
                    "submit is retried when that is deleted"
                ) from error
            if not is_ours:
                raise
        # The token's secret is created last, because `has_secret` checks only this one.
        contents = [
            *(self._share.secrets() if self._share else ()),
            *render.job_secrets(operator.config, settings.token, self._logins),
        ]
        for secret in render.render_secrets(made, contents):
            # The secret may exist from an earlier try, or belong to a previous resource of this name that is being deleted.
            with contextlib.suppress(AlreadyExists):
                self._cluster.create(SECRETS, self._namespace, secret)
                continue
            found = self._cluster.get(SECRETS, self._namespace, secret["metadata"]["name"])
            if found["metadata"].get("ownerReferences") != secret["metadata"]["ownerReferences"]:
                raise RetryableError(
                    f"cannot create Secret {secret['metadata']['name']}: namespace {self._namespace} still has another one of "
                    "that name; the submit is retried when that is deleted"
                )
        return str(made["metadata"]["uid"])

    def is_of(self, document: Document, job_id: str) -> bool:
        """True if it is this job's resource. Operators and the cluster's webhooks may have added labels."""
        labels = document["metadata"].get("labels") or {}
        return render.labels_of(self._experiment_id, job_id).items() <= labels.items()

    async def read(self, job: KubernetesJob) -> bool:
        """True if there is a resource of the job's name."""
        return await self._exists(self._cluster.get, self._operator.resource, self._namespace, job.name)

    async def has_secret(self, name: str) -> bool:
        """True if the secrets of a resource were created, or if the cluster does not answer."""
        try:
            return await self._exists(self._cluster.get, SECRETS, self._namespace, name)
        except NniManagerError as error:
            logger.info("%s", error)
            return True

    async def delete(self, job: KubernetesJob) -> bool:
        """Delete the resource of a job, its pods first. False: the job has no resource."""
        return await self._exists(self._delete, job)

    def _delete(self, job: KubernetesJob) -> None:
        resource, uid = self._operator.resource, job.uid
        if uid is None:
            # No answer has confirmed the resource yet, and another job's may have its name.
            found = self._cluster.get(resource, self._namespace, job.name)
            if not self.is_of(found, job.job_id):
                raise NotFound
            uid = found["metadata"]["uid"]
        self._cluster.delete(resource, self._namespace, job.name, uid=uid, waits=True)

    # ---- background deletes

    def start_delete(self, name: str, uid: str | None) -> None:
        """Delete a resource that is no longer needed."""
        if uid is not None:
            self.doomed.add(uid)
        delete = partial(self._cluster.delete, self._operator.resource, self._namespace, name, uid=uid)
        self._start(name, delete, uid)

    def start_delete_refused(self, job: KubernetesJob) -> None:
        """Delete what a refused submit, or an earlier one of the job, has created."""
        self._start(job.name, partial(self._delete, job), None)

    def _start(self, name: str, delete: Callable[[], None], uid: str | None) -> None:
        task = asyncio.get_running_loop().create_task(self._until_deleted(delete, uid), name=name)
        self._deletes.add(task)
        task.add_done_callback(self._deletes.discard)

    async def _until_deleted(self, delete: Callable[[], None], uid: str | None) -> None:
        for delay_s in retry_delays_s():
            try:
                if not await self._exists(delete):
                    self.doomed.discard(uid or "")
            except Forbidden as error:
                logger.warning("%s", error)
            except NniManagerError as error:
                logger.info("%s", error)
                await asyncio.sleep(delay_s)
                continue
            return

    async def finish_deletes(self) -> None:
        """Wait briefly for the deletes in progress."""
        if self._deletes:
            _, left = await asyncio.wait(self._deletes, timeout=_LAST_DELETES_S)
            for task in left:
                logger.warning(
                    "cannot delete %s %s in namespace %s in time; resume the experiment, or run `kubectl delete`",
                    *(self._operator.resource.kind, task.get_name(), self._namespace),
                )

    async def close(self) -> None:
        """Cancel everything in progress, and close the clients of the share and the cluster."""
        if self._share is not None:
            self._share.close()
        for task in self._deletes:
            task.cancel()
        await asyncio.gather(*self._deletes, return_exceptions=True)
        self._cluster.close()
        await asyncio.to_thread(self._callers.shutdown, wait=True, cancel_futures=True)

    async def _exists(self, function: Callable[..., object], *arguments: object) -> bool:
        """Make a call about an object; False: it is not found."""
        try:
            await self._ask(function, *arguments)
        except NotFound:
            return False
        return True

    async def _ask(self, function: Callable[..., Answer], *arguments: object) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._callers, partial(function, *arguments))
