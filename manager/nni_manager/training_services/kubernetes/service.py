"""Jobs as resources of an operator: made, watched, deleted, and found again by a later manager.

Three watches tell of all jobs of an experiment: of their resources, of their pods, and of what Kubernetes warns of. A resource
that has ended is deleted once its end is told, and with it go its secrets and what is left of its pods. Which operator it is,
`operator.Operator` knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from nni_manager.domain.completion import Completion
from nni_manager.errors import NniManagerError, TryAgain, UserMistake
from nni_manager.training_services.base import JobEnded, JobPresence, TrainingService
from nni_manager.training_services.kubernetes.api import Document, Kubernetes
from nni_manager.training_services.kubernetes.errors import AlreadyThere, Forbidden, NotThere
from nni_manager.training_services.kubernetes.events import FIELDS, Warnings
from nni_manager.training_services.kubernetes.operator import Operator, Stage, Verdict
from nni_manager.training_services.kubernetes.pods import (
    has_node,
    has_run,
    is_pending,
    last_words,
    what_goes_first,
    why_it_waits,
)
from nni_manager.training_services.kubernetes.render import (
    as_in_containers,
    job_of,
    job_secrets,
    labels_of,
    render_run_script,
    render_secrets,
    selector_of,
)
from nni_manager.training_services.kubernetes.resources import EVENTS, PODS, SECRETS
from nni_manager.training_services.kubernetes.storage import SharedStorage
from nni_manager.training_services.kubernetes.watch import Change, Denied, Gone, Listed, Seen, Trouble, Watch
from nni_manager.training_services.share import Share
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

logger = logging.getLogger(__name__)

# Calls that are made at the same time. One that is put off keeps no other waiting.
_CALLERS = 4
_FIRST_AGAIN_S = 1.0
_LONGEST_AGAIN_S = 30.0
# What was made is shown by the watch a moment later; only what is not is asked for.
_SHOWN_WITHIN_S = 2.0
# Pods are watched apart from the resources that own them, and may be told of a little later.
_POD_LAG_S = 5.0
# For resources that have ended, and that a manager which ends has not deleted yet.
_LAST_DELETES_S = 10.0
# An operator that has nothing else to do makes pods within a second.
_PODS_WITHIN_S = 10.0
# Somebody who watches the first trial wants to know by then what it waits for.
_LONGEST_QUEUE_S = 60.0

Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Job:
    """One job. `was_taken`: its resource is there, or was. `was_seen`: a watch has shown it. `gone_pods`: by their names.

    `gone_uid`: of a resource that was deleted while the job was being made. `is_doubtful`: meanwhile a list did not show it.
    """

    job_id: str
    name: str
    uid: str | None = None
    gone_uid: str | None = None
    is_doubtful: bool = False
    is_posting: bool = False
    was_taken: bool = False
    was_seen: bool = False
    stop_is_wanted: bool = False
    is_ending: bool = False
    waits_since_s: float = field(default_factory=time.monotonic)
    has_begun: bool = False
    gone_pods: set[str] = field(default_factory=set)


class KubernetesService(TrainingService):
    """One experiment's jobs on one cluster. Calls are made from threads, and so are the watches' tales told."""

    uses_snapshot = True

    def __init__(
        self,
        cluster: Kubernetes,
        operator: Operator,
        workspace: Workspace,
        on_job_ended: Callable[[JobEnded], None],
        logins: Mapping[Path, str] | None = None,
        storage: SharedStorage | None = None,
    ) -> None:
        """`logins`: the content of each role's registry login. Containers see the workspace's parent at MOUNT."""
        super().__init__(on_job_ended)
        self._cluster = cluster
        self._operator = operator
        self._namespace = operator.config.namespace or cluster.namespace
        self._experiment_id = workspace.root.name
        self._logins = logins or {}
        self._storage = storage or SharedStorage()
        self._jobs: dict[str, _Job] = {}
        self._names: dict[str, str] = {}
        """The job of each resource, by its name."""
        self._resources: dict[str, Document] = {}
        self._pods: dict[str, dict[str, Document]] = {}
        """By job, then by their own name. Those of a job are kept until its end is told."""
        self._words: dict[str, str] = {}
        """Of jobs that ended while no manager was there."""
        self._warnings = Warnings(self._experiment_id)
        self._troubles: dict[str, str] = {}
        self._problem = ""
        self._was_listed = False
        self._all_are_adopted = False
        self._doomed: set[str] = set()
        """The uids of resources that are being deleted because they are of no use."""
        self._news, self._pod_news = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._deletes: set[asyncio.Task[None]] = set()
        self._watches: list[Watch] = []
        self._callers = ThreadPoolExecutor(_CALLERS, thread_name_prefix="kubernetes")

    @property
    def run_script(self) -> str:
        """The content of run.sh."""
        return render_run_script()

    @property
    def share(self) -> Share | None:
        """As the storage has it."""
        return self._storage.share

    @property
    def completion(self) -> Completion:
        """As the operator decides it."""
        return self._operator.completion

    @property
    def problem(self) -> str:
        """That the cluster cannot be watched or asked, or what keeps the job from running that has waited longest."""
        told = next(filter(None, [*self._troubles.values(), self._problem]), "")
        if told:
            return told
        waiting = [job for job in self._jobs.values() if job.was_taken and not job.has_begun]
        for job in sorted(waiting, key=lambda job: job.waits_since_s):
            if why := self._why_it_waits(job):
                return f"Kubernetes has not started {len(waiting)} of {len(self._jobs)} jobs; {job.name} waits: {why}"
        longest = min(waiting, key=lambda job: job.waits_since_s, default=None)
        if longest is None or time.monotonic() - longest.waits_since_s < _LONGEST_QUEUE_S:
            return ""
        return (
            f"{self._operator.title} has not started {len(waiting)} of {len(self._jobs)} jobs, {longest.name} the first; see "
            f"what it waits for with `kubectl describe {self._operator.resource.plural},pods -n {self._namespace} "
            f"-l expId={self._experiment_id}`"
        )

    def why_it_waits(self, job_id: str) -> str:
        """By its pods' states, what Kubernetes warns of, and what its operator says."""
        job = self._jobs.get(job_id)
        return self._why_it_waits(job) if job is not None and job.was_taken and not job.has_begun else ""

    async def submit(self, settings: KeeperSettings) -> None:
        """Make the job's resource, and the secrets that it owns.

        Raises:
            TryAgain: the cluster does not take it, for whatever reason: all jobs of an experiment are alike, so that what ends
                this trial would end every other as well. What was made is there to be found by the next try.
        """
        name = self._operator.name_of(self._experiment_id, settings.job_id)
        if self._names.get(name, settings.job_id) != settings.job_id:
            raise TryAgain(
                f"cannot make {self._kind} {name} yet: job {self._names[name]} has that name, and has not ended"
            )
        job = self._job(settings.job_id)
        job.is_posting, job.is_doubtful = True, False
        self._watch()
        try:
            job.uid = await self._ask(self._hand_in, settings)
            job.was_taken = True
        except UserMistake as error:
            raise TryAgain(str(error)) from error
        finally:
            job.is_posting = False
        if (seen := self._resources.get(job.name)) is not None:
            self._look(job, seen)  # it was quicker than the answer
        elif job.uid is not None and job.gone_uid == job.uid:
            self._end_deleted(job)  # and so was somebody who deleted it
        elif job.is_doubtful and not job.was_seen:
            self._spawn(self._verify(job, _SHOWN_WITHIN_S))

    def _hand_in(self, settings: KeeperSettings) -> str:
        """The uid of the job's resource."""
        operator, resource = self._operator, self._operator.resource
        wanted = operator.render(self._namespace, as_in_containers(settings))
        name = wanted["metadata"]["name"]
        try:
            made = self._cluster.create(resource, self._namespace, wanted)
        except AlreadyThere as error:
            made = self._cluster.get(resource, self._namespace, name)
            meta = made["metadata"]
            is_ending = "deletionTimestamp" in meta or meta["uid"] in self._doomed
            if is_ending or not _is_of(made, self._experiment_id, settings.job_id):
                raise TryAgain(
                    f"cannot make {self._kind} {name}: another of that name is in namespace {self._namespace}; it is tried again "
                    "when that is gone"
                ) from error
        # `adopt` looks for the last one, the token's: where that is, they all are.
        contents = [*self._storage.secrets(), *job_secrets(operator.config, settings.token, self._logins)]
        for secret in render_secrets(made, contents):
            # An earlier try has made it, or it goes with the resource that had this name before.
            with contextlib.suppress(AlreadyThere):
                self._cluster.create(SECRETS, self._namespace, secret)
                continue
            found = self._cluster.get(SECRETS, self._namespace, secret["metadata"]["name"])
            if found["metadata"].get("ownerReferences") != secret["metadata"]["ownerReferences"]:
                raise TryAgain(
                    f"cannot make Secret {secret['metadata']['name']}: another of that name is in namespace {self._namespace}; "
                    "it is tried again when that is gone"
                )
        return str(made["metadata"]["uid"])

    async def stop(self, job_id: str) -> bool:
        """Delete the resource; its pods are told to end, and the job has ended when they have."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        if not job.stop_is_wanted:
            job.stop_is_wanted = True
            self._watch()
            self._spawn(self._delete_job(job))
        return True

    async def adopt(self, job_id: str) -> JobPresence:
        """Find a job of an earlier manager. While the cluster is away it passes for one that runs, and is looked at later."""
        self._watch()
        await self._news.wait()
        name = self._operator.name_of(self._experiment_id, job_id)
        seen = self._resources.get(name)
        if self._was_listed:
            if seen is None or not _is_of(seen, self._experiment_id, job_id):
                return JobPresence.UNKNOWN
            stage = self._operator.stage_of(seen)
            if stage is Stage.ENDED:
                self._words[job_id] = self._message(job_id, self._verdict(job_id, seen))
                self._delete_soon(name, seen["metadata"]["uid"])
                return JobPresence.ENDED
            if stage is Stage.WAITING and not await self._has_secret(name):
                # The earlier manager died before it had made all: no pod of it can start.
                self._delete_soon(name, seen["metadata"]["uid"])
                return JobPresence.UNKNOWN
        job = self._job(job_id)
        job.was_taken = True
        if seen is not None:
            self._look(job, seen)
        return JobPresence.RUNNING

    def last_words(self, job_id: str) -> str:
        """Why it ended, as far as the cluster still knew."""
        return self._words.get(job_id, "")

    async def end_leftovers(self, job_id: str, trial_id: str) -> None:
        """A container that ended has left nothing."""

    def clear_away(self) -> None:
        """Delete resources that have ended, and their secrets with them."""
        self._all_are_adopted = True
        self._watch()
        self._delete_leftovers()

    async def close(self) -> None:
        """Stop watching, and give what is being deleted a moment; jobs go on."""
        if self._deletes:
            _, left = await asyncio.wait(self._deletes, timeout=_LAST_DELETES_S)
            for task in left:
                logger.warning(
                    "%s %s is left in namespace %s; it is deleted when the experiment is resumed, or by `kubectl delete`",
                    *(self._kind, task.get_name(), self._namespace),
                )
        for watch in self._watches:
            watch.end()
        for task in self._tasks | self._deletes:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._deletes, return_exceptions=True)
        self._cluster.close()
        self._storage.close()
        for watch in self._watches:
            await asyncio.to_thread(watch.join)
        await asyncio.to_thread(self._callers.shutdown, wait=True, cancel_futures=True)

    # ---- what the watches tell

    def _watch(self) -> None:
        if self._watches:
            return
        loop, selector = asyncio.get_running_loop(), selector_of(self._experiment_id)
        for resource, take in ((self._operator.resource, self._take_resource), (PODS, self._take_pod)):
            self._watches.append(
                Watch(self._cluster, resource, self._namespace, selector, partial(_tell, loop, take))
            )
        # Events have no labels of the objects that they are about.
        events = Watch(
            *(self._cluster, EVENTS, self._namespace, "", partial(_tell, loop, self._take_event)),
            fields=FIELDS,
            concerns=self._warnings.concerns,
            is_optional=True,
        )
        self._watches.append(events)
        for watch in self._watches:
            watch.start()

    def _take_resource(self, change: Change) -> None:
        match change:
            case Seen(document):
                name = document["metadata"]["name"]
                self._resources[name] = document
                if (job := self._job_of(document)) is not None:
                    self._look(job, document)
            case Gone(document):
                job = self._job_of(document)
                self._forget(document)
                if job is None:
                    pass
                elif job.is_posting:
                    job.gone_uid = document["metadata"]["uid"]
                else:
                    self._end_deleted(job)
            case Listed():
                self._was_listed = True
                self._news.set()
                for job in list(self._jobs.values()):
                    if job.is_posting:
                        job.is_doubtful = True  # deleted before the list, or made after it
                    elif job.was_taken and not job.was_seen:
                        self._spawn(self._verify(job))
                self._delete_leftovers()
            case Trouble(message):
                self._note_trouble(self._operator.resource.plural, message)
                self._news.set()
            case Denied():
                pass

    def _take_pod(self, change: Change) -> None:
        match change:
            case Seen(document) | Gone(document):
                job_id, name = job_of(document), document["metadata"]["name"]
                pods = self._pods.setdefault(job_id, {})
                pods[name] = document
                job = self._jobs.get(job_id)
                if job is not None and has_run(document):
                    job.has_begun = True
                if isinstance(change, Gone) and job is not None:
                    job.gone_pods.add(name)
                elif job is not None:
                    job.gone_pods.discard(name)  # one that is made anew may have the same name
                elif isinstance(change, Gone):
                    del pods[name]  # of a job whose end was told
                    if not pods:
                        del self._pods[job_id]
                self._pod_news.set()
            case Trouble(message):
                self._note_trouble("pods", message)
            case Listed() | Denied():
                pass

    def _take_event(self, change: Change) -> None:
        match change:
            case Seen(document):
                self._warnings.take(document)
            case Gone(document):
                self._warnings.drop(document)
            case Denied(message):
                logger.warning("%s; without it, less is known of pods that do not start", message)
            case Listed() | Trouble():
                pass  # whoever cannot be asked for events cannot be asked for jobs either, which is told

    def _note_trouble(self, of: str, message: str) -> None:
        if message:
            logger.warning("%s", message)
        elif self._troubles.get(of):
            logger.info("Kubernetes shows %s again", of)
        self._troubles[of] = message

    def _job_of(self, document: Document) -> _Job | None:
        job = self._jobs.get(self._names.get(document["metadata"]["name"], ""))
        uid = document["metadata"]["uid"]
        if job is None or uid in self._doomed or (job.uid is not None and job.uid != uid):
            return None
        return job if _is_of(document, self._experiment_id, job.job_id) else None

    def _look(self, job: _Job, document: Document) -> None:
        job.was_seen = True
        job.uid = document["metadata"]["uid"]
        stage = self._operator.stage_of(document)
        job.has_begun = job.has_begun or stage is not Stage.WAITING
        if stage is Stage.ENDED and not job.is_posting and not job.is_ending:
            job.is_ending = True
            self._spawn(self._finish(job, document))

    def _forget(self, document: Document) -> None:
        name, uid = document["metadata"]["name"], document["metadata"]["uid"]
        if self._resources.get(name, document)["metadata"]["uid"] == uid:
            self._resources.pop(name, None)
        self._doomed.discard(uid)

    # ---- ends

    async def _finish(self, job: _Job, document: Document) -> None:
        """Tell how it ended, with its last words if they come, and clear it away."""
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._until_told(job, document), _POD_LAG_S)
        verdict = self._verdict(job.job_id, document)
        self._end(job, verdict.exit_code, self._message(job.job_id, verdict), verdict.reason)
        self._delete_soon(job.name, job.uid)

    async def _until_told(self, job: _Job, document: Document) -> None:
        while (verdict := self._verdict(job.job_id, document)).awaits_pod:
            awaited = {verdict.pod} if verdict.pod is not None else set(self._pods.get(job.job_id, {}))
            if awaited and awaited <= job.gone_pods:
                return
            self._pod_news.clear()
            await self._pod_news.wait()

    def _verdict(self, job_id: str, document: Document) -> Verdict:
        return self._operator.verdict_of(document, self._pods.get(job_id, {}))

    def _message(self, job_id: str, verdict: Verdict) -> str:
        pod = self._pods.get(job_id, {}).get(verdict.pod or "", {})
        told = "\n".join(part for part in (verdict.message, last_words(pod)) if part)
        if verdict.exit_code is None and verdict.pod is not None:
            # No container says why it ended, e.g. of a node that is lost; a warning may.
            warning = self._warnings.of(verdict.pod, has_node=True)
            told += f"\nKubernetes warned: {warning}" if warning else ""
        return told

    def _end_deleted(self, job: _Job) -> None:
        if job.is_ending:
            return  # it had completed, and is cleared away
        who = "was deleted as we asked" if job.stop_is_wanted else "is gone: somebody has deleted it"
        why = self.why_it_waits(job.job_id)
        message = f"{self._kind} {job.name} in namespace {self._namespace} {who}"
        message += f"; it had not started: {why}" if why else ""
        self._end(job, None, message, ExitReason.JOB_LOST)

    def _end(self, job: _Job, exit_code: int | None, message: str, reason: ExitReason) -> None:
        if self._jobs.pop(job.job_id, None) is None:
            return
        if self._names.get(job.name) == job.job_id:
            del self._names[job.name]
        self._pods.pop(job.job_id, None)
        self._warnings.forget(job.name)
        self.on_job_ended(JobEnded(job.job_id, exit_code, message, reason))

    async def _verify(self, job: _Job, after_s: float = 0.0) -> None:
        """A job that a list does not show: it may be newer than the list."""
        await asyncio.sleep(after_s)
        delay_s = _FIRST_AGAIN_S
        while self._jobs.get(job.job_id) is job and not job.was_seen:
            try:
                await self._ask(self._cluster.get, self._operator.resource, self._namespace, job.name)
            except NotThere:
                if not job.is_posting and not job.was_seen:
                    self._end_deleted(job)
            except NniManagerError as error:
                self._note(str(error))
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_AGAIN_S)
                continue
            self._note("")
            return

    async def _delete_job(self, job: _Job) -> None:
        delay_s = _FIRST_AGAIN_S
        while job.job_id in self._jobs:
            if not job.is_posting:
                try:
                    await self._ask(self._delete_own, job)
                except NotThere:
                    if not job.is_ending:
                        self._end_deleted(job)
                    return
                except NniManagerError as error:
                    self._note(str(error))
                else:
                    job.was_taken = True
                    self._note("")
                    return  # the watch tells when it is gone
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_AGAIN_S)

    def _delete_own(self, job: _Job) -> None:
        resource, uid = self._operator.resource, job.uid
        if uid is None:
            # Nobody has said yet that there is one, and another's may have its name.
            found = self._cluster.get(resource, self._namespace, job.name)
            if not _is_of(found, self._experiment_id, job.job_id):
                raise NotThere
            uid = found["metadata"]["uid"]
        self._cluster.delete(resource, self._namespace, job.name, uid=uid, waits=True)

    def _delete_leftovers(self) -> None:
        """Resources of which an earlier manager has told the end, and died or lost the cluster before it had deleted them."""
        if not (self._all_are_adopted and self._was_listed):
            return
        for name, document in self._resources.items():
            uid = document["metadata"]["uid"]
            is_known = uid in self._doomed or job_of(document) in self._jobs
            if not is_known and self._operator.stage_of(document) is Stage.ENDED:
                self._delete_soon(name, uid)

    def _delete_soon(self, name: str, uid: str | None) -> None:
        if uid is not None:
            self._doomed.add(uid)
        task = asyncio.get_running_loop().create_task(self._delete(name, uid), name=name)
        self._deletes.add(task)
        task.add_done_callback(self._deletes.discard)

    async def _delete(self, name: str, uid: str | None) -> None:
        delay_s = _FIRST_AGAIN_S
        while True:
            try:
                delete = partial(self._cluster.delete, uid=uid)
                await self._ask(delete, self._operator.resource, self._namespace, name)
            except NotThere:
                self._doomed.discard(uid or "")
                return
            except Forbidden as error:
                logger.warning("%s", error)
                return
            except NniManagerError as error:
                logger.info("%s", error)
            else:
                return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_AGAIN_S)

    # ---- parts

    @property
    def _kind(self) -> str:
        return self._operator.resource.kind

    def _job(self, job_id: str) -> _Job:
        name = self._operator.name_of(self._experiment_id, job_id)
        self._names[name] = job_id
        return self._jobs.setdefault(job_id, _Job(job_id, name))

    def _why_it_waits(self, job: _Job) -> str:
        pods, seen = self._pods.get(job.job_id, {}), self._resources.get(job.name)
        # Of a job whose one pod has no image, the others wait at a barrier, and say less.
        for tell in (why_it_waits, self._warning_of, what_goes_first):
            if told := next(filter(None, map(tell, pods.values())), ""):
                return told
        if told := "" if seen is None else self._operator.why_it_waits(seen):
            return told
        if pods or job.waits_since_s + _PODS_WITHIN_S > time.monotonic():
            return "" if pods else self._warnings.of(job.name)
        # Not every operator says so: FrameworkController tries again and is silent.
        return self._warnings.of(job.name) or (
            f"{self._operator.title} has made no pod of it yet; see whether the namespace has room for one with "
            f"`kubectl describe quota -n {self._namespace}`, and whether {self._operator.title} runs"
        )

    def _warning_of(self, pod: Document) -> str:
        return self._warnings.of(pod["metadata"]["name"], has_node=has_node(pod)) if is_pending(pod) else ""

    async def _has_secret(self, name: str) -> bool:
        try:
            await self._ask(self._cluster.get, SECRETS, self._namespace, name)
        except NotThere:
            return False
        except NniManagerError as error:
            logger.info("%s", error)
        return True

    def _note(self, problem: str) -> None:
        if problem and not self._problem:
            logger.warning("%s", problem)
        self._problem = problem

    async def _ask(self, function: Callable[..., Answer], *arguments: object) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._callers, partial(function, *arguments))

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_done)

    def _note_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._problem = "cannot look at jobs on Kubernetes any more: this is a bug; stop the experiment, and resume it"
            logger.critical("%s", self._problem, exc_info=error)


def _is_of(document: Document, experiment_id: str, job_id: str) -> bool:
    """Whether it is the resource of this job. Operators and the cluster's own webhooks may have added labels."""
    labels = document["metadata"].get("labels") or {}
    return labels_of(experiment_id, job_id).items() <= labels.items()


def _tell(loop: asyncio.AbstractEventLoop, take: Callable[[Change], None], change: Change) -> None:
    # A loop that is closed wants to hear nothing more.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(take, change)
