"""Calls about the resources of jobs and their secrets, on worker threads: create, read, and delete until the cluster answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nni_manager.errors import NniManagerError, RetryableError
from nni_manager.support.backoff import delays_s
from nni_manager.support.task_set import TaskSet
from nni_manager.training_services.kubernetes import render
from nni_manager.training_services.kubernetes.api import Document, Kubernetes
from nni_manager.training_services.kubernetes.errors import AlreadyExists, NotFound, RequestInvalid
from nni_manager.training_services.kubernetes.job_states import KubernetesJob
from nni_manager.training_services.kubernetes.operator import Operator
from nni_manager.training_services.kubernetes.resources import PODS, SECRETS
from trial_keeper.settings import KeeperSettings
from trial_keeper.timeouts import set_within

if TYPE_CHECKING:
    from nni_manager.training_services.kubernetes.azure_share import AzureShare

logger = logging.getLogger(__name__)

# Concurrent calls, so that a throttled one does not block the others.
_CALLERS = 4
_FIRST_RETRY_DELAY_S = 1.0
_MAX_RETRY_DELAY_S = 30.0
# The time to delete terminal resources when the manager exits.
_LAST_DELETES_S = 10.0
_SETTLE_INTERVAL_S = 0.1

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
        self.doomed: dict[str, tuple[str, str]] = {}
        """The resources that are no longer needed, until they are seen gone: the job id and the name of each uid."""
        self._refused: dict[str, str] = {}
        """The jobs that the cluster has refused, until what was created for them is deleted: the name for each id."""
        self._problems: dict[str, str] = {}
        """Why the resource of a job is not deleted yet."""
        self._is_last_chance = asyncio.Event()
        self._deletes = TaskSet()
        self._callers = ThreadPoolExecutor(_CALLERS, thread_name_prefix="kubernetes")

    async def create(self, job: KubernetesJob, settings: KeeperSettings) -> None:
        """Create the resource of a job and the secrets that it owns, unless they exist, and set the job's uid."""
        made = await self._ask(self._create, settings)
        job.uid = str(made["metadata"]["uid"])
        self._check_labels(made, settings.job_id)
        await self._ask(self._create_secrets, made, settings)

    def _create(self, settings: KeeperSettings) -> Document:
        operator, resource = self._operator, self._operator.resource
        wanted = operator.render(self._namespace, render.as_in_containers(settings))
        name = wanted["metadata"]["name"]
        try:
            return self._cluster.create(resource, self._namespace, wanted)
        except AlreadyExists as error:
            made = self._cluster.get(resource, self._namespace, name)
            meta = made["metadata"]
            is_of_experiment = (meta.get("labels") or {}).get("expId") == self._experiment_id
            # Two jobs of this experiment may share a name; the other's resource is deleted once that job has ended. A label with
            # the id of a job that has another name was changed by the cluster.
            owner = render.job_of(made)
            is_of_other_job = (
                is_of_experiment
                and owner not in ("", settings.job_id)
                and operator.name_of(self._experiment_id, owner) == name
            )
            if "deletionTimestamp" in meta or meta["uid"] in self.doomed or is_of_other_job:
                raise RetryableError(
                    f"cannot create {resource.kind} {name}: namespace {self._namespace} still has another one of that name; the "
                    "submit is retried when that is deleted"
                ) from error
            if not is_of_experiment:
                raise
            return made

    def _check_labels(self, made: Document, job_id: str) -> None:
        """Refuse a resource without the labels by which the watches find it: its job would never start or end for the manager.

        Raises:
            RequestInvalid: the cluster has changed or removed a label.
        """
        found = made["metadata"].get("labels") or {}
        for label, value in render.labels_of(self._experiment_id, job_id).items():
            if (now := found.get(label)) != value:
                how = "removed it" if now is None else f"changed it to {now!r}"
                raise RequestInvalid(
                    f"cannot watch {self._operator.resource.kind} {made['metadata']['name']}: its label {label} must be "
                    f"{value!r}, but an admission webhook or policy of the cluster has {how}; exempt the label from it; "
                    "`kubectl get mutatingwebhookconfigurations` lists the webhooks"
                )

    def _create_secrets(self, made: Document, settings: KeeperSettings) -> None:
        # The token's secret is created last, because `has_secret` checks only this one.
        contents = [
            *(self._share.secrets() if self._share else ()),
            *render.job_secrets(self._operator.config, settings.token, self._logins),
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

    def is_of(self, document: Document, job_id: str) -> bool:
        """True if it is this job's resource. Operators and the cluster's webhooks may have added labels."""
        labels = document["metadata"].get("labels") or {}
        return render.labels_of(self._experiment_id, job_id).items() <= labels.items()

    async def read(self, job: KubernetesJob) -> bool:
        """True if the job has a resource. No watch ever shows another one of its name."""
        return await self._exists(self._read, job)

    def _read(self, job: KubernetesJob) -> Document:
        found = self._cluster.get(self._operator.resource, self._namespace, job.name)
        if not self.is_of(found, job.job_id):
            raise NotFound
        return found

    async def refusal(self, pod: Document) -> str:
        """Why the cluster would refuse a pod, in its own words; empty if it would not."""
        return await self._ask(self._cluster.refusal, PODS, self._namespace, pod)

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
            uid = self._read(job)["metadata"]["uid"]
        self._cluster.delete(resource, self._namespace, job.name, uid=uid, waits=True)

    # ---- background deletes

    def start_delete(self, job_id: str, name: str, uid: str) -> None:
        """Delete a resource that is no longer needed."""
        self.doomed[uid] = job_id, name
        delete = partial(self._cluster.delete, self._operator.resource, self._namespace, name, uid=uid)
        self._deletes.spawn(self._until_deleted(job_id, delete, uid))

    def start_delete_refused(self, job: KubernetesJob) -> None:
        """Delete what a refused submit, or an earlier one of the job, has created."""
        self._refused[job.job_id] = job.name
        self._deletes.spawn(self._until_deleted(job.job_id, partial(self._delete, job), None))

    async def _until_deleted(self, job_id: str, delete: Callable[[], None], uid: str | None) -> None:
        for delay_s in retry_delays_s():
            try:
                exists = await self._exists(delete)
            except NniManagerError as error:
                # Rights, too, may come back.
                if job_id not in self._problems:
                    logger.warning("%s", error)
                self._problems[job_id] = str(error)
                await self._pause(delay_s)
                continue
            self._problems.pop(job_id, None)
            self._refused.pop(job_id, None)
            if not exists and uid is not None:
                self.note_gone(uid)
            return

    async def _pause(self, delay_s: float) -> None:
        """Wait before another try; at the end of the manager, not as long as an outage has made the delay."""
        if self._is_last_chance.is_set():
            await asyncio.sleep(min(delay_s, _FIRST_RETRY_DELAY_S))
            return
        await set_within(self._is_last_chance, delay_s)

    def note_gone(self, uid: str) -> None:
        """Record that the resource with this uid does not exist anymore."""
        self.doomed.pop(uid, None)

    @property
    def problem(self) -> str:
        """Why a resource cannot be deleted at present; empty: no problem."""
        return next(iter(self._problems.values()), "")

    def leftovers(self) -> dict[str, str]:
        """Why the cluster may still have the resource of an ended job, and the command that removes it, for each job id."""
        found = {}
        for job_id, name in (*self.doomed.values(), *self._refused.items()):
            what = f"{self._operator.resource.kind} {name} in namespace {self._namespace}"
            unseen = f"cannot confirm that {what} is deleted: Kubernetes has not shown it in time"
            why = self._problems.get(job_id, unseen)
            found[job_id] = f"{why}; remove it with `{self.removal_command(job_id)}`"
        return found

    def removal_command(self, job_id: str) -> str:
        """The kubectl command that deletes the resource of a job and its pods at once."""
        labels = ",".join(map("=".join, render.labels_of(self._experiment_id, job_id).items()))
        return (
            f"kubectl delete {self._operator.resource.plural},pods -n {self._namespace} "
            f"-l {labels} --grace-period=0 --force"
        )

    async def settle(self) -> None:
        """Wait for the deletes in progress, until the resources are seen gone, for a bounded time."""
        if self._is_last_chance.is_set():
            return
        self._is_last_chance.set()
        deadline_s = time.monotonic() + _LAST_DELETES_S
        while (self._deletes or self.doomed) and time.monotonic() < deadline_s:
            await asyncio.sleep(_SETTLE_INTERVAL_S)
        # The watch may be interrupted.
        for uid, (_, name) in list(self.doomed.items()):
            with contextlib.suppress(NniManagerError):
                if await self._is_gone(name, uid):
                    self.note_gone(uid)

    async def _is_gone(self, name: str, uid: str) -> bool:
        try:
            found = await self._ask(self._cluster.get, self._operator.resource, self._namespace, name)
        except NotFound:
            return True
        return bool(found["metadata"]["uid"] != uid)

    async def close(self) -> None:
        """Cancel everything in progress, and close the clients of the share and the cluster."""
        if self._share is not None:
            self._share.close()
        await self._deletes.cancel()
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
