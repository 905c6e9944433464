"""Jobs as resources of an operator: created, watched, deleted, and adopted by a later manager.

`job_states` maps changes to job states, `resource_calls` makes the calls, and `observed` derives reasons and outcomes.

Three watches cover all jobs of an experiment: their resources, their pods, and Kubernetes' warning events. A terminal
resource is deleted after its end was reported, with its secrets and remaining pods. `operator.Operator` hides the
differences between operators.

More than 500 lines in one file: calls, watches and ends all change the same registered jobs, by one state machine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nni_manager.domain.stop_escalation import KEEPER_GRACE_S
from nni_manager.errors import NniManagerError, RetryableError, UserError
from nni_manager.support.keeper_bundle import KeeperBundle
from nni_manager.support.task_set import TaskSet
from nni_manager.training_services.base import JobEnded, JobPresence, TrainingService
from nni_manager.training_services.kubernetes import render, watch
from nni_manager.training_services.kubernetes.api import Document, Kubernetes
from nni_manager.training_services.kubernetes.errors import (
    AlreadyExists,
    Forbidden,
    RequestInvalid,
)
from nni_manager.training_services.kubernetes.job_problem import job_problem
from nni_manager.training_services.kubernetes.job_states import (
    FollowUp,
    KubernetesJob,
    KubernetesJobEvent,
    KubernetesJobState,
)
from nni_manager.training_services.kubernetes.job_watches import job_watches
from nni_manager.training_services.kubernetes.missing_pods import MissingPods
from nni_manager.training_services.kubernetes.observed import ObservedObjects, is_about_node
from nni_manager.training_services.kubernetes.operator import Operator, Stage
from nni_manager.training_services.kubernetes.pods import deletion_due_at_s, has_run
from nni_manager.training_services.kubernetes.resource_calls import ResourceCalls, retry_delays_s
from nni_manager.training_services.kubernetes.sidecars import REMEDY
from nni_manager.training_services.run_script import render_run_script
from trial_keeper.settings import KeeperSettings
from trial_keeper.timeouts import set_within
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

if TYPE_CHECKING:
    from nni_manager.training_services.kubernetes.azure_share import AzureShare

logger = logging.getLogger(__name__)

# The watch shows a created resource a moment later; after this time, the resource is read directly.
_SHOWN_TIMEOUT_S = 2.0
# Timestamps have a resolution of a second, and a node may report an end late.
_DELETION_LAG_S = 2.0
# The watch of pods may lag behind the watch of their resources.
_POD_LAG_S = 5.0
# A sidecar that ends with the other containers of its pod needs a few seconds.
_SIDECAR_GRACE_S = 15.0

_E = KubernetesJobEvent
_UNENDED = frozenset(KubernetesJobState) - {KubernetesJobState.ENDED}


class KubernetesService(TrainingService):
    """One experiment's jobs on one cluster. API calls and watches run on worker threads."""

    uses_snapshot = True
    reports_preemption = True
    grace_s = KEEPER_GRACE_S + render.TERMINATION_MARGIN_S

    def __init__(
        self,
        cluster: Kubernetes,
        operator: Operator,
        workspace: Workspace,
        on_job_ended: Callable[[JobEnded], None],
        logins: Mapping[Path, str] | None = None,
        share: AzureShare | None = None,
        bundle: KeeperBundle | None = None,
    ) -> None:
        """`logins`: the content of each role's registry login. Containers see the workspace's parent at MOUNT."""
        super().__init__(on_job_ended)
        self.run_script, self.bundle = render_run_script(bundle), bundle
        self.completion, self.share = operator.completion, share
        self._cluster = cluster
        self._operator = operator
        self._namespace = operator.config.namespace or cluster.login.namespace
        self._experiment_id = workspace.root.name
        self._calls = ResourceCalls(
            *(cluster, operator, self._namespace, self._experiment_id, share, logins or {})
        )
        self._jobs: dict[str, KubernetesJob] = {}
        self._observed = ObservedObjects(operator, self._namespace, self._experiment_id)
        self._missed_ends: dict[str, tuple[JobEnded, JobEnded]] = {}
        """The ends of jobs that ended while no manager was running: without and with a request to stop them."""
        self._failures: dict[str, str] = {}
        self._problem = ""
        self._was_listed = self._has_ended_sidecars = False
        self._all_are_adopted = False
        self._missing_pods = MissingPods(
            lambda: [job for job in self._jobs.values() if job.is_waiting],
            *(self._observed.missing_pod, self._calls.refusal),
        )
        self._list_changed, self._pods_changed = asyncio.Event(), asyncio.Event()
        self._pods_answered = asyncio.Event()
        """Pods were listed, or cannot be."""
        self._preemptions_answered = asyncio.Event()
        """As `_pods_answered`, for the events about preempted pods; or a job has waited for them."""
        self._tasks = TaskSet(self._note_bug)
        self._spawn = self._tasks.spawn
        self._watches: list[watch.Watch] = []

    @property
    def problem(self) -> str:
        """Why the cluster cannot be watched or called, or what the longest pending job waits for."""
        jobs = job_problem(list(self._jobs.values()), self._observed, self._pending_reason, time.monotonic())
        return next(filter(None, (*self._failures.values(), self._problem, self._calls.problem, jobs)), "")

    def pending_reason(self, job_id: str) -> str:
        """Based on pod states, Kubernetes' warnings, and the operator's conditions."""
        job = self._jobs.get(job_id)
        return self._pending_reason(job) if job is not None and job.is_waiting else ""

    def warning(self, job_id: str) -> str:
        """Based on the job, its pods, and Kubernetes' warnings: it is suspended, its pods are ended, or a node is not ready."""
        job = self._jobs.get(job_id)
        if job is None or job.stop_is_asked:
            return ""
        observed = self._observed
        return observed.node_warning(job_id) if job.is_waiting else observed.warning(job_id, job.name)

    def will_restart(self, job_id: str) -> bool:
        """True for a suspended job, whose pods its operator creates again, and for one that has new pods already."""
        job = self._jobs.get(job_id)
        if job is None or job.stop_is_asked:
            return False
        return bool(self._observed.suspension(job.name)) or self._observed.has_new_pod(job_id, job.name)

    async def submit(self, settings: KeeperSettings) -> None:
        """Create the job's resource and the secrets that it owns.

        Raises:
            UserError: the cluster refuses it permanently, with its own message; partially created objects are deleted.
            RetryableError: a later submit may succeed, and reuses what was created.
        """
        name = self._name_of(settings.job_id)
        namesakes = [each for each in self._jobs if each != settings.job_id and self._name_of(each) == name]
        if namesakes:
            raise RetryableError(
                f"cannot create {self._operator.resource.kind} {name} yet: job {namesakes[0]} has the same name; the submit is "
                "retried after its end"
            )
        job = self._job(settings.job_id)
        self._watch()
        self._apply(job, _E.SUBMIT_STARTED)
        answer = _E.SUBMIT_FAILED
        try:
            # A list that is later than a short job's pod would miss its message.
            await self._pods_answered.wait()
            await self._calls.create(job, settings)
            answer = _E.SUBMITTED
        except (Forbidden, RequestInvalid, AlreadyExists):
            answer = _E.REFUSED
            self._forget_job(job)
            self._calls.start_delete_refused(job)
            raise
        except UserError as error:
            # A missing namespace or kind may be created later, and a storage's key may become readable. An answer that is not
            # Kubernetes' is not about the job: gateways send such answers while the server behind them starts.
            raise RetryableError(str(error)) from error
        finally:
            self._apply(job, answer)
        self._spawn(self._missing_pods.check())
        # The watch may precede the answer, or still show an earlier resource of this name.
        seen = self._observed.resources.get(job.name)
        if seen is not None and seen["metadata"]["uid"] == job.uid:
            self._apply_document(job, seen)

    async def stop(self, job_id: str) -> bool:
        """Delete the resource. Kubernetes terminates its pods; the job has ended when they are gone."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        if not job.stop_is_asked:
            # The deletion changes the states that explain it.
            job.pending_reason_at_stop = self.pending_reason(job_id)
            job.stop_is_asked = True
            self._watch()
            self._spawn(self._call_until_answered(job, self._calls.delete, _UNENDED, _E.NOTHING_DELETED))
        return True

    def removal_command(self, job_id: str) -> str:
        """A kubectl command. It also force-deletes pods on an unresponsive node; these may still run there."""
        return self._calls.removal_command(job_id)

    async def adopt(self, job_id: str) -> JobPresence:
        """Find a job of an earlier manager. While the cluster is unreachable, jobs count as running and are verified later."""
        self._watch()
        await self._list_changed.wait()
        name = self._name_of(job_id)
        seen, has_secret = await self._found(name)
        if self._was_listed:
            if seen is None or not self._calls.is_of(seen, job_id):
                return JobPresence.UNKNOWN
            stage = self._operator.stage_of(seen)
            if stage is Stage.ENDED:
                # The deletion of the resource deletes its pods.
                await self._wait_for_listed_pods(job_id, seen)
                end_of = partial(self._observed.end_of, job_id, seen)
                self._missed_ends[job_id] = end_of(stop_was_asked=False), end_of(stop_was_asked=True)
                self._calls.start_delete(job_id, name, seen["metadata"]["uid"])
                return JobPresence.ENDED
            if not has_secret:
                # The earlier manager died before it created the secrets: no pod of this job can start.
                self._calls.start_delete(job_id, name, seen["metadata"]["uid"])
                return JobPresence.UNKNOWN
        job = self._job(job_id)
        self._apply(job, _E.CONFIRMED)
        if seen is not None:
            self._apply_document(job, seen)
        # The watch of pods may have shown them before the job was registered.
        self._announce(job)
        self._spawn(self._missing_pods.check())
        return JobPresence.RUNNING

    async def _found(self, name: str) -> tuple[Document | None, bool]:
        """A resource, and False if it waits for pods and has no secret."""
        while True:
            seen = self._observed.resources.get(name)
            if not self._was_listed or seen is None or self._operator.stage_of(seen) is not Stage.WAITING:
                return seen, True
            has_secret = await self._calls.has_secret(name)
            if self._observed.resources.get(name) is seen:
                return seen, has_secret
            # The watch has shown a change meanwhile, and no event will report it again.

    def report_end(self, job_id: str, *, stop_was_asked: bool) -> None:
        """Report what the cluster still had at the adoption."""
        self.on_job_ended(self._missed_ends.pop(job_id)[stop_was_asked])

    def garbage_collect(self) -> None:
        """Delete terminal resources and their secrets."""
        self._all_are_adopted = True
        self._watch()
        self._delete_leftovers()

    def leftovers(self) -> dict[str, str]:
        """The jobs that have ended, and whose resources were not seen gone."""
        return self._calls.leftovers()

    async def settle(self) -> None:
        """Wait for pending deletes."""
        await self._calls.settle()

    async def close(self) -> None:
        """Stop watching, and wait briefly for pending deletes. Jobs continue."""
        await self._calls.settle()
        for left in self.leftovers().values():
            logger.warning("%s", left)
        for each in self._watches:
            each.end()
        await self._tasks.cancel()
        await self._calls.close()
        for each in self._watches:
            await asyncio.to_thread(each.join)

    # ---- changes from the watches

    def _watch(self) -> None:
        if self._watches:
            return
        self._watches = job_watches(
            *(self._cluster, self._operator.resource, self._namespace, self._experiment_id),
            self._observed.warnings.concerns,
            (self._on_resource, self._on_pod, self._on_event, self._on_preempted),
        )
        for each in self._watches:
            each.start()

    def _on_resource(self, change: watch.Change) -> None:
        match change:
            case watch.Upserted(document):
                self._observed.resources[document["metadata"]["name"]] = document
                if (job := self._job_of(document)) is not None:
                    self._apply_document(job, document)
            case watch.Deleted(document):
                job = self._job_of(document)
                self._observed.drop_resource(document)
                self._calls.note_gone(document["metadata"]["uid"])
                if job is not None:
                    if self._observed.has_started(job.job_id, document):
                        self._apply(job, _E.STARTED)
                    self._apply(job, _E.DELETED)
            case watch.Synced():
                self._was_listed = True
                self._list_changed.set()
                for job in list(self._jobs.values()):
                    self._apply(job, _E.LISTED)
                self._delete_leftovers()
            case watch.WatchFailed(message):
                self._set_watch_failure(self._operator.resource.plural, message)
                self._list_changed.set()

    def _on_pod(self, change: watch.Change) -> None:
        match change:
            case watch.Upserted(document) | watch.Deleted(document):
                job = self._jobs.get(render.job_of(document))
                self._observed.store_pod(
                    document, is_gone=isinstance(change, watch.Deleted), is_kept=job is not None
                )
                if job is not None and has_run(document):
                    self._apply(job, _E.POD_STARTED)
                if job is not None:
                    self._announce(job)
                    if (due_at_s := deletion_due_at_s(document)) is not None:
                        self._spawn(self._announce_overdue(job, due_at_s))
                self._pods_changed.set()
            case watch.WatchFailed(message):
                self._set_watch_failure("pods", message)
                self._pods_answered.set()
            case watch.Synced():
                self._pods_answered.set()

    def _on_event(self, change: watch.Change) -> None:
        match change:
            case watch.Upserted(document):
                self._observed.warnings.take(document)
                if is_about_node(document):
                    self._announce_all()
            case watch.Deleted(document):
                self._observed.warnings.drop(document)
            case watch.WatchFailed(message):
                logger.warning(
                    "%s; without this right, lost nodes may not be detected, and the reasons of some pending pods are not shown",
                    message,
                )
            case watch.Synced():
                pass

    def _on_preempted(self, change: watch.Change) -> None:
        # Without the right to read events, which `_on_event` reports, newer clusters still set the pod's condition.
        match change:
            case watch.Upserted(document):
                self._observed.note_preempted(document)
                self._announce_all()
            case watch.Synced() | watch.WatchFailed():
                self._preemptions_answered.set()
            case watch.Deleted():
                pass

    def _announce_all(self) -> None:
        for job in list(self._jobs.values()):
            self._announce(job)

    def _announce(self, job: KubernetesJob) -> None:
        """Report a preemption of the job, and a changed readiness of its nodes."""
        is_ready = not self._observed.node_warning(job.job_id)
        if is_ready is not job.node_is_ready:
            job.node_is_ready = is_ready
            self.on_node_changed(job.job_id, is_ready)
        # An operator may replace one of several pods, whose other tasks continue.
        is_whole = self._observed.has_one_pod(job.job_id)
        if not job.is_preempted and is_whole and self._observed.preempted_pod(job.job_id) is not None:
            job.is_preempted = True
            self.on_job_preempted(job.job_id)
        if not job.awaits_sidecars and self._observed.has_only_sidecars(job.job_id):
            job.awaits_sidecars = True
            self._spawn(self._end_beside_sidecars(job))

    async def _announce_overdue(self, job: KubernetesJob, due_at_s: float) -> None:
        """Announce again when a pod should have ended: a lost node causes no further change of it."""
        await asyncio.sleep(max(due_at_s - time.time(), 0.0) + _DELETION_LAG_S)
        if self._jobs.get(job.job_id) is job:
            self._announce(job)

    def _set_watch_failure(self, of: str, message: str) -> None:
        if message:
            logger.warning("%s", message)
        elif self._failures.get(of):
            logger.info("the watch of %s works again after a failure", of)
        self._failures[of] = message

    def _job_of(self, document: Document) -> KubernetesJob | None:
        job = self._jobs.get(render.job_of(document))
        name, uid = document["metadata"]["name"], document["metadata"]["uid"]
        if job is None or job.name != name or uid in self._calls.doomed or job.uid not in (None, uid):
            return None
        return job if self._calls.is_of(document, job.job_id) else None

    def _apply_document(self, job: KubernetesJob, document: Document) -> None:
        job.uid = document["metadata"]["uid"]
        if self._operator.stage_of(document) is Stage.ENDED:
            self._apply(job, _E.COMPLETED)
        else:
            self._apply(job, _E.STARTED if self._observed.has_started(job.job_id, document) else _E.SHOWN)

    def _apply(self, job: KubernetesJob, event: KubernetesJobEvent) -> None:
        was_waiting = job.is_waiting
        match job.apply(event):
            case FollowUp.REPORT_OUTCOME:
                self._spawn(self._finish(job, self._observed.resources[job.name]))
            case FollowUp.REPORT_LOSS:
                self._end_deleted(job, self._why_pending(job) if was_waiting else "")
            case FollowUp.REPORT_PENDING_LOSS:
                self._spawn(self._finish_pending(job, self._why_pending(job)))
            case FollowUp.VERIFY:
                self._spawn(self._verify(job))
            case FollowUp.VERIFY_SOON:
                self._spawn(self._verify(job, _SHOWN_TIMEOUT_S))

    # ---- ends

    async def _finish(self, job: KubernetesJob, document: Document) -> None:
        """Report the job's end, with the pod's termination message if it arrives in time, and delete its resource."""
        await self._wait_for_pods(lambda: not self._observed.awaits_pods(job.job_id, document))
        reason = self._observed.verdict(job.job_id, document).reason
        ended = self._observed.end_of(job.job_id, document, stop_was_asked=job.stop_is_asked)
        why_pending = await self._reason_if_never_started(job, job.pending_reason_at_stop)
        self._apply(job, _E.REPORTED)
        if job.stop_is_asked and reason is ExitReason.JOB_LOST:
            # The operator reports our own deletion as somebody's.
            self._end_deleted(job, why_pending)
        else:
            self._end(job, ended)
        self._calls.start_delete(job.job_id, job.name, document["metadata"]["uid"])

    async def _end_beside_sidecars(self, job: KubernetesJob) -> None:
        """End a job whose pods run only because of sidecars: its operator would not."""
        while self._observed.has_only_sidecars(job.job_id):
            await asyncio.sleep(_SIDECAR_GRACE_S)
            if job.state is KubernetesJobState.RUNNING and self._observed.has_only_sidecars(job.job_id):
                if not self._has_ended_sidecars:
                    what = self._observed.verdict(job.job_id, self._observed.resources[job.name]).message
                    logger.warning("%s %s: %s; %s", self._operator.resource.kind, job.name, what, REMEDY)
                self._has_ended_sidecars = True
                self._apply(job, _E.TASKS_ENDED)
                return
        job.awaits_sidecars = False

    async def _finish_pending(self, job: KubernetesJob, pending_reason: str) -> None:
        """Report the loss of a job whose start no watch has shown."""
        pending_reason = await self._reason_if_never_started(job, pending_reason)
        self._apply(job, _E.REPORTED)
        self._end_deleted(job, pending_reason)

    async def _reason_if_never_started(self, job: KubernetesJob, pending_reason: str) -> str:
        """The pending reason of a deleted job; empty if a pod has run, which the watch of pods may show later."""
        if pending_reason:
            await self._wait_for_pods(lambda: not self._observed.pods_may_start(job.job_id))
        return "" if self._observed.pod_has_run(job.job_id) else pending_reason

    async def _wait_for_listed_pods(self, job_id: str, document: Document) -> None:
        """Wait until the pods that a list has shown explain the end of a terminal resource. Pods not listed are gone."""
        await self._pods_answered.wait()
        await self._wait_for_pods(
            lambda: not (self._observed.has_pods(job_id) and self._observed.awaits_pods(job_id, document))
        )
        if self._observed.verdict(job_id, document).reason is ExitReason.JOB_LOST:
            # Only an event may tell that a deleted pod was preempted. The next jobs do not wait for it again.
            await set_within(self._preemptions_answered, _POD_LAG_S)
            self._preemptions_answered.set()

    async def _wait_for_pods(self, is_shown: Callable[[], bool]) -> None:
        """Wait until the watch of pods shows what is awaited, for `_POD_LAG_S` at most."""
        deadline_s = time.monotonic() + _POD_LAG_S
        while not is_shown():
            self._pods_changed.clear()
            if not await set_within(self._pods_changed, deadline_s - time.monotonic()):
                return

    def _end_deleted(self, job: KubernetesJob, pending_reason: str) -> None:
        who = "was deleted on request" if job.stop_is_asked else "was deleted, but not by this manager"
        cause = f"{self._operator.resource.kind} {job.name} in namespace {self._namespace} {who}"
        cause += f"; the job had not started: {pending_reason}" if pending_reason else ""
        # Of a job that was adopted during an outage, no answer has confirmed that an earlier manager created it.
        is_unknown = job.uid is None and not job.stop_is_asked
        lost = JobEnded(job.job_id, None, cause, ExitReason.JOB_LOST, True, pending_reason, is_unknown)
        self._end(job, lost)
        if job.uid is not None and not job.stop_is_asked:
            # A watch reports a resource whose labels were changed as deleted, too. Its pods would keep their GPUs.
            self._calls.start_delete(job.job_id, job.name, job.uid)

    def _end(self, job: KubernetesJob, ended: JobEnded) -> None:
        if self._forget_job(job):
            self.on_job_ended(ended)

    def _forget_job(self, job: KubernetesJob) -> bool:
        """Remove the job. Returns True if it was registered."""
        if self._jobs.pop(job.job_id, None) is None:
            return False
        self._observed.forget_job(job.job_id, job.name)
        return True

    async def _verify(self, job: KubernetesJob, after_s: float = 0.0) -> None:
        """Read a job that a list does not show: it may be newer than the list."""
        await asyncio.sleep(after_s)
        await self._call_until_answered(
            job, self._calls.read, frozenset({KubernetesJobState.ACCEPTED}), _E.NOT_FOUND
        )

    async def _call_until_answered(
        self,
        job: KubernetesJob,
        call: Callable[[KubernetesJob], Awaitable[bool]],
        states: frozenset[KubernetesJobState],
        absent: KubernetesJobEvent,
    ) -> None:
        """Make a call until the cluster answers, while the job is in one of the states and between its submits."""
        for delay_s in retry_delays_s():
            if job.state not in states:
                return
            if not job.is_submitting:
                try:
                    exists = await call(job)
                except NniManagerError as error:
                    self._note(str(error))
                else:
                    self._apply(job, _E.CONFIRMED if exists else absent)
                    self._note("")
                    return
            await asyncio.sleep(delay_s)

    def _delete_leftovers(self) -> None:
        """Delete terminal resources whose end an earlier manager reported without deleting them."""
        if not (self._all_are_adopted and self._was_listed):
            return
        for name, document in self._observed.resources.items():
            uid, job_id = document["metadata"]["uid"], render.job_of(document)
            is_known = uid in self._calls.doomed or job_id in self._jobs
            if not is_known and self._operator.stage_of(document) is Stage.ENDED:
                self._calls.start_delete(job_id, name, uid)

    # ---- parts

    def _job(self, job_id: str) -> KubernetesJob:
        return self._jobs.setdefault(job_id, KubernetesJob(job_id, self._name_of(job_id), time.monotonic()))

    def _name_of(self, job_id: str) -> str:
        return self._operator.name_of(self._experiment_id, job_id)

    def _pending_reason(self, job: KubernetesJob) -> str:
        waited_s = time.monotonic() - job.waits_since_s
        return self._observed.pending_reason(job.job_id, job.name, waited_s, self._missing_pods.refusal)

    def _why_pending(self, job: KubernetesJob) -> str:
        """The pending reason of a deleted job."""
        return job.pending_reason_at_stop if job.stop_is_asked else self._pending_reason(job)

    def _note(self, problem: str) -> None:
        if problem and not self._problem:
            logger.warning("%s", problem)
        self._problem = problem

    def _note_bug(self, error: BaseException) -> None:
        self._problem = "cannot watch jobs on Kubernetes because of a bug; stop and resume the experiment, and report the bug"
        logger.critical("%s", self._problem, exc_info=error)
