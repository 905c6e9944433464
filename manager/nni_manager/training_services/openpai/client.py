"""Jobs on OpenPAI: submitted, polled with one list call for all of them, stopped, and adopted by a later manager."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar
from urllib.parse import urlencode

from nni_manager.errors import NniManagerError, RetryableError, UserError
from nni_manager.support.keeper_bundle import KeeperBundle
from nni_manager.support.task_set import TaskSet
from nni_manager.training_services.base import JobEnded, JobPresence, TrainingService
from nni_manager.training_services.openpai.connection import (
    JobAlreadyExists,
    JobNotOnCluster,
    RequestRejected,
)
from nni_manager.training_services.openpai.job import (
    JobTemplate,
    is_of_others,
    job_name,
    job_prefix,
    render_job,
    render_run_script,
)
from nni_manager.training_services.openpai.job_log import ends_of_logs
from nni_manager.training_services.openpai.rest import LIVE, OUT_OF_MEMORY, JobStatus, OpenPai, PaiJobState
from nni_manager.training_services.openpai.termination import TerminationMessages
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.settings import KeeperSettings
from trial_keeper.timeouts import set_within
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

logger = logging.getLogger(__name__)

# NNI's interval.
POLL_S = 5.0
# OpenPAI lets a user list jobs 60 times a minute, in all experiments. One that is refused lists up to this factor less often.
_MAX_SLOWDOWN = 6
# OpenPAI's lists show an accepted job some seconds later.
_SHOWN_TIMEOUT_S = 60.0
# A stop request may be lost in OpenPAI's store.
_STOP_RETRY_DELAY_S = 30.0
# OpenPAI kills a stopped container after 30 s; by then its keeper has reported how the trial ended.
_GRACE_S = 20.0
# After this time, a user who watches a pending trial should see the reason.
_MAX_QUEUE_S = 60.0
# Concurrent submissions. A throttled one delays neither the others nor the poll.
_SUBMITTERS = 4

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class ClusterHere:
    """Control of the daemon of a cluster on this machine, if it does not answer. Both calls may raise NniManagerError.

    `wake` resumes a stopped daemon. `replace` kills one that does not answer, and starts another; it blocks.
    """

    wake: Callable[[], object]
    replace: Callable[[], None]


@dataclass(slots=True)
class _Job:
    """One job. Times are monotonic.

    `is_posting`: a submit is in progress. `was_accepted`: OpenPAI has accepted it. `is_watched`: its end must be reported.
    `was_seen`: a poll has shown it. `is_adopted`: an earlier manager submitted it, or ended before.
    `is_ending`: it has ended, and its termination message is being fetched.
    """

    job_id: str
    name: str
    submitted_at_s: float
    is_posting: bool = False
    was_accepted: bool = False
    is_watched: bool = False
    was_seen: bool = False
    is_adopted: bool = False
    is_ending: bool = False
    waits_since_s: float | None = None
    stop_is_wanted: bool = False
    stop_sent_at_s: float | None = None


class OpenPaiService(TrainingService):
    """One experiment's jobs on one cluster. Calls to the cluster run on worker threads."""

    uses_snapshot = True
    reports_preemption = True
    has_job_logs = True
    # OpenPAI's grace for a container, plus two polls: one to send the stop and one to detect the end.
    grace_s = 30.0 + 2 * POLL_S

    def __init__(
        self,
        cluster: OpenPai,
        template: JobTemplate,
        mount: str,
        workspace: Workspace,
        on_job_ended: Callable[[JobEnded], None],
        *,
        poll_s: float = POLL_S,
        python: str | None = None,
        bundle: KeeperBundle | None = None,
        runs_as_manager: bool = False,
        which: str = "",
        here: ClusterHere | None = None,
    ) -> None:
        """`mount`: the path where containers see the workspace's parent folder. `python`, `bundle`: see `keeper_lookup_snippet`.

        `runs_as_manager`: on the local OpenPAI without containers. `which`: options that select this cluster for nnictl.
        `here`: control of a cluster on this machine.
        """
        super().__init__(on_job_ended)
        self.run_script, self.completion = render_run_script(python, bundle), template.completion
        self.bundle = bundle
        self.runs_as_manager = runs_as_manager
        self._cluster = cluster
        self._template = template
        self._mount = mount
        self._experiment_id = workspace.root.name
        self._poll_s = self._interval_s = poll_s
        self._python = python
        self._which = which
        self._here = here
        self._replacing = asyncio.Lock()
        self._jobs: dict[str, _Job] = {}
        self._listed: dict[str, PaiJobState] | None = None
        """The jobs of earlier managers, by name, during adoption. None: not listed."""
        self._is_unreachable = False
        """True after a failed call during adoption, until a poll succeeds."""
        self._problem = ""
        self._wake = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._messages = TerminationMessages(cluster)
        self._endings = TaskSet()
        self._submitters = ThreadPoolExecutor(_SUBMITTERS, thread_name_prefix="openpai-submit")
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="openpai-watch")

    @property
    def problem(self) -> str:
        """Why the cluster cannot be polled, or which job has been pending longest."""
        if self._problem:
            return self._problem
        waiting = [
            (job.waits_since_s, job.name) for job in self._jobs.values() if job.waits_since_s is not None
        ]
        since_s, name = min(waiting, default=(math.inf, ""))
        if time.monotonic() - since_s < _MAX_QUEUE_S:
            return ""
        return (
            f"OpenPAI has not started {len(waiting)} of {len(self._jobs)} jobs, {name} the longest; free resources "
            f"in its virtual cluster, or find the reason with `nnictl openpai show {name}`"
        )

    def will_restart(self, job_id: str) -> bool:
        """Returns True for a job in the queue: OpenPAI starts evicted and preempted jobs again, whatever their jobRetryCount."""
        job = self._jobs.get(job_id)
        return job is not None and job.waits_since_s is not None and not job.stop_is_wanted

    def link(self, job_id: str) -> str | None:
        """Returns the URL of OpenPAI's page of the job. The local OpenPAI has no pages.

        Source: NNI's trial url on OpenPAI.
        """
        if self._python is not None:
            return None
        query = urlencode({"username": self._cluster.user, "jobName": job_name(self._experiment_id, job_id)})
        return f"{self._cluster.address}/job-detail.html?{query}"

    async def job_log(self, job_id: str) -> Mapping[str, str]:
        """Returns the last 16 kB of each task's log, by the task's name."""
        return await asyncio.to_thread(ends_of_logs, self._cluster, job_name(self._experiment_id, job_id))

    async def submit(self, settings: KeeperSettings) -> None:
        """Submit the job.

        Raises:
            UserError: OpenPAI refuses the job permanently, so the job does not exist; has OpenPAI's message.
            RetryableError: a later submit may succeed. The job may exist already; submitting again is harmless.
        """
        job_id = settings.job_id
        name = job_name(self._experiment_id, job_id)
        seen = replace(
            settings,
            workspace=f"{self._mount.rstrip('/')}/{self._experiment_id}",
            mount=self._mount,
            relay_output=True,
            grace_s=min(settings.grace_s, _GRACE_S),
        )
        job = self._jobs.setdefault(job_id, _Job(job_id, name, time.monotonic()))
        job.is_posting = True
        try:
            await self._ask(self._submit, name, seen, threads=self._submitters)
            job.is_watched = job.was_accepted = True
        except UserError:
            self._jobs.pop(job_id, None)
            raise
        finally:
            job.is_posting = False
            job.submitted_at_s = time.monotonic()
        self._watch()

    def _submit(self, name: str, settings: KeeperSettings) -> None:
        try:
            self._cluster.submit(render_job(self._template, name, settings))
        except RequestRejected as error:
            # The answer is not about the job: gateways send such answers while the servers behind them start.
            raise RetryableError(str(error)) from error
        except JobAlreadyExists:
            # An earlier try has created the job, unless the stored job proves to belong to others.
            if is_of_others(_read(self._cluster.config, name) or "", settings):
                raise
        except UserError:
            # An earlier try whose answer was lost may have created the job before this try was refused.
            if _read(self._cluster.job, name) is None:
                raise

    async def stop(self, job_id: str) -> bool:
        """Send OpenPAI a stop request as soon as possible."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        job.stop_is_wanted = job.is_watched = True
        self._watch()
        self._wake.set()
        return True

    def wake(self, job_id: str) -> None:
        """Resume a daemon on this machine that was stopped (SIGSTOP)."""
        if self._here is not None:
            try:
                self._here.wake()
            except NniManagerError as error:
                logger.warning("%s", error)

    async def kill(self, job_id: str) -> None:
        """Request the stop again; of another daemon, if the one on this machine does not answer."""
        if self._here is not None:
            async with self._replacing:  # for one job; the others find a daemon that answers
                try:
                    await asyncio.to_thread(self._here.replace)
                except NniManagerError as error:
                    logger.warning("%s", error)
        await self.stop(job_id)

    def removal_command(self, job_id: str) -> str:
        """An nnictl command, with the options that select this cluster: another shell may have a different default."""
        return " ".join(
            filter(None, ("nnictl openpai stop", job_name(self._experiment_id, job_id), self._which))
        )

    async def adopt(self, job_id: str) -> JobPresence:
        """Find a job of an earlier manager. While OpenPAI is unreachable, jobs count as running and are polled later."""
        if self._listed is None and not self._is_unreachable:
            try:
                rows = await self._ask(partial(self._cluster.jobs, keyword=job_prefix(self._experiment_id)))
                self._listed = {row.name: row.state for row in rows}
            except NniManagerError as error:
                self._note_unreachable(error)
        name = job_name(self._experiment_id, job_id)
        state = PaiJobState.UNKNOWN
        if self._listed is not None:
            found = self._listed.get(name) or await self._state_of(name)
            if found is None:
                return JobPresence.UNKNOWN
            if found.is_terminal:
                return JobPresence.ENDED
            state = found
        self._watch_adopted(job_id, was_seen=state is not PaiJobState.UNKNOWN)
        return JobPresence.RUNNING

    async def _state_of(self, name: str) -> PaiJobState | None:
        """Returns the state of a job that the list does not show, perhaps not yet; None if OpenPAI has no such job."""
        try:
            return (await self._ask(self._cluster.job, name)).state
        except JobNotOnCluster:
            return None
        except NniManagerError as error:
            self._note_unreachable(error)
            return PaiJobState.UNKNOWN

    def _note_unreachable(self, error: NniManagerError) -> None:
        self._set_problem(str(error))
        self._listed, self._is_unreachable = None, True

    def report_end(self, job_id: str, *, stop_was_asked: bool) -> None:
        """Read why the job ended at the next poll: OpenPAI's lists lack its exit code and reason."""
        self._watch_adopted(job_id, was_seen=True, stop_is_wanted=stop_was_asked)

    def _watch_adopted(self, job_id: str, **known: bool) -> None:
        name = job_name(self._experiment_id, job_id)
        self._jobs[job_id] = _Job(
            job_id, name, float("-inf"), was_accepted=True, is_watched=True, is_adopted=True, **known
        )
        self._watch()

    async def close(self) -> None:
        """Stop polling. Jobs continue."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
        await self._endings.cancel()
        self._cluster.close()
        for threads in (self._submitters, self._watcher):
            await asyncio.to_thread(threads.shutdown, wait=True, cancel_futures=True)

    # ---- polling

    def _watch(self) -> None:
        if self._poller is None:
            self._poller = asyncio.get_running_loop().create_task(self._poll())
            self._poller.add_done_callback(self._report_bug)

    async def _poll(self) -> None:
        while True:
            self._wake.clear()
            problem, limited = "", self._cluster.limited_lists
            # A failure of one step must not block the other.
            for step in (self._send_stops, self._poll_states):
                try:
                    await step()
                except NniManagerError as error:
                    problem = str(error)
            self._adapt_interval(is_limited=self._cluster.limited_lists > limited)
            self._set_problem(problem or self._of_limit())
            if not problem:
                self._listed, self._is_unreachable = None, False
            await set_within(self._wake, self._interval_s)

    def _adapt_interval(self, *, is_limited: bool) -> None:
        # Doubled at once and shortened in steps, so that experiments of one user converge to equal shares of the limit.
        if is_limited:
            self._interval_s = min(2 * self._interval_s, _MAX_SLOWDOWN * self._poll_s)
        else:
            self._interval_s = max(self._interval_s - self._poll_s / 2, self._poll_s)

    def _of_limit(self) -> str:
        if self._interval_s == self._poll_s:
            return ""
        return (
            f"OpenPAI at {self._cluster.address} limits this user's calls: jobs are listed every {self._interval_s:.3g} s "
            f"instead of {self._poll_s:.3g} s; run fewer experiments at a time"
        )

    async def _send_stops(self) -> None:
        refused: UserError | None = None
        now_s = time.monotonic()
        for job in list(self._jobs.values()):
            is_sent = job.stop_sent_at_s is not None and now_s - job.stop_sent_at_s < _STOP_RETRY_DELAY_S
            if not job.stop_is_wanted or job.is_posting or job.is_ending or is_sent:
                continue
            try:
                await self._ask(self._cluster.stop, job.name)
                job.stop_sent_at_s = time.monotonic()
            except JobNotOnCluster:
                pass  # not shown yet, or removed: `_resolve_unlisted` distinguishes these
            except UserError as error:
                job.stop_sent_at_s, refused = time.monotonic(), error
        if refused is not None:
            raise refused

    async def _poll_states(self) -> None:
        if not self._jobs:
            return
        started_at_s = time.monotonic()
        rows = await self._ask(
            partial(self._cluster.jobs, keyword=job_prefix(self._experiment_id), states=LIVE)
        )
        states = {row.name: row.state for row in rows}
        for job in list(self._jobs.values()):
            state = states.get(job.name)
            if state is not None:
                _mark_seen(job, state)
            elif job.is_ending:
                pass
            elif job.is_watched and not job.is_posting and job.submitted_at_s < started_at_s:
                await self._resolve_unlisted(job)

    async def _resolve_unlisted(self, job: _Job) -> None:
        """Handle a job that is not listed as alive: it has ended, is not shown yet, or was removed."""
        try:
            detail = await self._ask(self._cluster.job, job.name)
        except JobNotOnCluster:
            if (
                job.was_accepted
                and not job.was_seen
                and time.monotonic() - job.submitted_at_s < _SHOWN_TIMEOUT_S
            ):
                return
            gone = (
                "no longer exists: it was removed there"
                if job.was_accepted
                else "was stopped before it was created"
            )
            is_unknown = job.is_adopted and not job.was_seen and not job.stop_is_wanted
            message = f"job {job.name} on OpenPAI {gone}"
            self._end(job, None, message, ExitReason.JOB_LOST, is_unknown=is_unknown)
            return
        if not detail.state.is_terminal:
            _mark_seen(job, detail.state)
            return
        match detail.state:
            case PaiJobState.SUCCEEDED:
                self._end(job, 0, "")
            case PaiJobState.STOPPED:
                message = f"job {job.name} was stopped on OpenPAI, but not by this manager"
                if job.stop_is_wanted:
                    message = f"OpenPAI has stopped job {job.name} on request"
                self._end(job, None, message, ExitReason.JOB_LOST)
            case _:
                job.is_ending = True
                ending = self._endings.spawn(self._end_failed(job, detail))
                ending.add_done_callback(self._report_bug)

    async def _end_failed(self, job: _Job, detail: JobStatus) -> None:
        parts = (
            f"OpenPAI reports job {job.name}: {detail.reason or detail.state.value}",
            await self._messages.of(detail),
        )
        message = "\n".join(filter(None, parts))
        if detail.is_preempted:
            self._end(job, None, message, ExitReason.PREEMPTED)
            return
        reason = ExitReason.OUT_OF_MEMORY if detail.exit_code == OUT_OF_MEMORY else ExitReason.KEEPER_LOST
        self._end(job, detail.exit_code, message, reason)

    def _end(
        self,
        job: _Job,
        exit_code: int | None,
        message: str,
        reason: ExitReason = ExitReason.KEEPER_LOST,
        *,
        is_unknown: bool = False,
    ) -> None:
        if self._jobs.pop(job.job_id, None) is not None:
            self.on_job_ended(JobEnded(job.job_id, exit_code, message, reason, is_unknown=is_unknown))

    def _set_problem(self, problem: str) -> None:
        if problem and not self._problem:
            logger.warning("%s", problem)
        elif self._problem and not problem:
            logger.info("OpenPAI is reachable again")
        self._problem = problem

    async def _ask(
        self,
        function: Callable[..., Answer],
        *arguments: object,
        threads: ThreadPoolExecutor | None = None,
    ) -> Answer:
        call = partial(function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(threads or self._watcher, call)

    def _report_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._problem = "cannot poll jobs on OpenPAI because of a bug; stop and resume the experiment, and report the bug"
            logger.critical("%s", self._problem, exc_info=error)


def _read(function: Callable[[str], Answer], name: str) -> Answer | None:
    """Returns the object of this name on OpenPAI; None if OpenPAI refuses the call."""
    try:
        return function(name)
    except UserError:
        return None


def _mark_seen(job: _Job, state: PaiJobState) -> None:
    job.was_seen = True
    if state is not PaiJobState.WAITING:
        job.waits_since_s = None
    elif job.waits_since_s is None:
        job.waits_since_s = time.monotonic()
