"""Jobs on OpenPAI: handed in, looked at with one list for all of them, stopped, and found again by a later manager."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from urllib.parse import urlencode

from nni_manager.domain.completion import Completion
from nni_manager.errors import NniManagerError, TryAgain, UserMistake
from nni_manager.training_services.base import JobEnded, JobPresence, TrainingService
from nni_manager.training_services.openpai.job import (
    JobTemplate,
    job_name,
    job_prefix,
    render_job,
    render_run_script,
)
from nni_manager.training_services.openpai.rest import JobDetail, JobExists, JobUnknown, OpenPai
from nni_manager.training_services.openpai.states import LIVE, OUT_OF_MEMORY, JobState
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

logger = logging.getLogger(__name__)

# NNI's. OpenPAI lets a user list jobs 60 times a minute.
POLL_S = 5.0
# A job that was taken is not in OpenPAI's lists at once: its store is read some seconds later.
_SHOWN_WITHIN_S = 60.0
# A stop may be lost on its way through OpenPAI's store.
_STOP_AGAIN_S = 30.0
# A container that is stopped is killed 30 s later; by then its keeper has told how the trial ended.
_GRACE_S = 20.0
# Somebody who watches the first trial wants to know by then what it waits for.
_LONGEST_QUEUE_S = 60.0
_LOG_TAIL_BYTES = 2000
# Jobs that are handed in at the same time. One that OpenPAI puts off keeps neither others waiting nor the looking.
_SUBMITTERS = 4

Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Job:
    """One job. Times are monotonic.

    `is_posting`: it is being handed in. `was_taken`: OpenPAI has said that it has it. `is_watched`: its end has to be told.
    `was_seen`: OpenPAI has shown it since.
    """

    job_id: str
    name: str
    submitted_at_s: float
    is_posting: bool = False
    was_taken: bool = False
    is_watched: bool = False
    was_seen: bool = False
    waits_since_s: float | None = None
    stop_is_wanted: bool = False
    stop_told_at_s: float | None = None


class OpenPaiService(TrainingService):
    """One experiment's jobs on one cluster. Everything that asks the cluster does so from a thread."""

    uses_snapshot = True

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
    ) -> None:
        """`mount`: where containers see the folder that holds the workspace. `python`: see `render_run_script`."""
        super().__init__(on_job_ended)
        self._cluster = cluster
        self._template = template
        self._mount = mount
        self._experiment_id = workspace.root.name
        self._poll_s = poll_s
        self._python = python
        self._jobs: dict[str, _Job] = {}
        self._listed: dict[str, JobState] | None = None
        """The jobs of earlier managers, while this one takes them over."""
        self._is_away = False
        """The cluster could not tell of those, and has not been seen since."""
        self._problem = ""
        self._wake = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None
        self._submitters = ThreadPoolExecutor(_SUBMITTERS, thread_name_prefix="openpai-submit")
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="openpai-watch")

    @property
    def run_script(self) -> str:
        """The content of run.sh."""
        return render_run_script(self._python)

    @property
    def completion(self) -> Completion:
        """As the job file says it."""
        return self._template.completion

    @property
    def problem(self) -> str:
        """That the cluster cannot be asked, or which job has waited longest for a place on it."""
        if self._problem:
            return self._problem
        now_s = time.monotonic()
        waiting = [job for job in self._jobs.values() if job.waits_since_s is not None]
        longest = min(waiting, key=lambda job: job.waits_since_s or now_s, default=None)
        if longest is None or now_s - (longest.waits_since_s or now_s) < _LONGEST_QUEUE_S:
            return ""
        return (
            f"OpenPAI has not started {len(waiting)} of {len(self._jobs)} jobs, {longest.name} the first of them; free resources "
            f"in its virtual cluster, or see what it waits for with `nnictl openpai show {longest.name}`"
        )

    def link(self, job_id: str) -> str | None:
        """OpenPAI's page of the job. That of this machine has no pages.

        Source: NNI's trial url on OpenPAI.
        """
        if self._python is not None:
            return None
        asked = urlencode({"username": self._cluster.user, "jobName": job_name(self._experiment_id, job_id)})
        return f"{self._cluster.address}/job-detail.html?{asked}"

    async def submit(self, settings: KeeperSettings) -> None:
        """Hand the job in.

        Raises:
            TryAgain: OpenPAI does not take it, for whatever reason: all jobs of an experiment are alike, so that what ends this
                trial would end every other as well. The job may be there all the same; handing it in again is harmless.
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
            await _in_thread(self._submitters, self._hand_in, name, seen)
            job.is_watched = job.was_taken = True
        except UserMistake as error:
            raise TryAgain(str(error)) from error
        finally:
            job.is_posting = False
            job.submitted_at_s = time.monotonic()
        self._watch()

    def _hand_in(self, name: str, settings: KeeperSettings) -> None:
        # The name is ours alone: a job that has it was handed in by an earlier try.
        with contextlib.suppress(JobExists):
            self._cluster.submit(render_job(self._template, name, settings))

    async def stop(self, job_id: str) -> bool:
        """Have OpenPAI told to stop the job, as soon as it can be told."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        job.stop_is_wanted = job.is_watched = True
        self._watch()
        self._wake.set()
        return True

    async def adopt(self, job_id: str) -> JobPresence:
        """Find a job of an earlier manager. While OpenPAI is away it passes for one that runs, and is looked at later."""
        if self._listed is None and not self._is_away:
            try:
                rows = await self._ask(partial(self._cluster.jobs, keyword=job_prefix(self._experiment_id)))
                self._listed = {row.name: row.state for row in rows}
            except NniManagerError as error:
                self._note(str(error))
                self._is_away = True
        name = job_name(self._experiment_id, job_id)
        if self._listed is not None:
            state = self._listed.get(name)
            if state is None:
                return JobPresence.UNKNOWN
            if state.presence is JobPresence.ENDED:
                return JobPresence.ENDED
        self._jobs[job_id] = _Job(job_id, name, float("-inf"), was_taken=True, is_watched=True)
        self._watch()
        return JobPresence.RUNNING

    async def end_leftovers(self, job_id: str, trial_id: str) -> None:
        """A container that ended has left nothing."""

    async def close(self) -> None:
        """Stop looking; jobs go on."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
        self._cluster.close()
        for threads in (self._submitters, self._watcher):
            await asyncio.to_thread(threads.shutdown, wait=True, cancel_futures=True)

    # ---- looking

    def _watch(self) -> None:
        if self._poller is None:
            self._poller = asyncio.get_running_loop().create_task(self._poll())
            self._poller.add_done_callback(self._note_bug)

    async def _poll(self) -> None:
        while True:
            self._wake.clear()
            problem = ""
            # What hinders the one must not hinder the other.
            for step in (self._tell_stops, self._look):
                try:
                    await step()
                except NniManagerError as error:
                    problem = str(error)
            self._note(problem)
            if not problem:
                self._listed, self._is_away = None, False
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._poll_s)

    async def _tell_stops(self) -> None:
        refused: UserMistake | None = None
        now_s = time.monotonic()
        for job in list(self._jobs.values()):
            told_s = job.stop_told_at_s
            if (
                not job.stop_is_wanted
                or job.is_posting
                or (told_s is not None and now_s - told_s < _STOP_AGAIN_S)
            ):
                continue
            try:
                await self._ask(self._cluster.stop, job.name)
                job.stop_told_at_s = time.monotonic()
            except JobUnknown:
                pass  # not shown yet, or gone: a closer look tells
            except UserMistake as error:
                job.stop_told_at_s, refused = time.monotonic(), error
        if refused is not None:
            raise refused

    async def _look(self) -> None:
        if not self._jobs:
            return
        began_at_s = time.monotonic()
        rows = await self._ask(
            partial(self._cluster.jobs, keyword=job_prefix(self._experiment_id), states=LIVE)
        )
        states = {row.name: row.state for row in rows}
        for job in list(self._jobs.values()):
            state = states.get(job.name)
            if state is not None:
                _note_seen(job, state)
            elif job.is_watched and not job.is_posting and job.submitted_at_s < began_at_s:
                await self._look_closer(job)

    async def _look_closer(self, job: _Job) -> None:
        """The job is not among those that are alive: it has ended, is not shown yet, or somebody has removed it."""
        try:
            detail = await self._ask(self._cluster.job, job.name)
        except JobUnknown:
            if job.was_taken and not job.was_seen and time.monotonic() - job.submitted_at_s < _SHOWN_WITHIN_S:
                return
            gone = (
                "is gone: somebody has removed it there"
                if job.was_taken
                else "was stopped before it was there"
            )
            self._end(job, None, f"job {job.name} on OpenPAI {gone}", ExitReason.JOB_LOST)
            return
        if detail.state.presence is not JobPresence.ENDED:
            _note_seen(job, detail.state)
            return
        match detail.state:
            case JobState.SUCCEEDED:
                self._end(job, 0, "")
            case JobState.STOPPED if job.stop_is_wanted:
                self._end(job, None, f"OpenPAI has stopped job {job.name} as we asked", ExitReason.JOB_LOST)
            case JobState.STOPPED:
                self._end(job, None, f"somebody has stopped job {job.name} on OpenPAI", ExitReason.JOB_LOST)
            case _:
                words = await self._last_words(detail)
                said = f"OpenPAI says of job {job.name}: {detail.reason or detail.state.value}"
                message = "\n".join(part for part in (said, words) if part)
                is_oom = detail.exit_code == OUT_OF_MEMORY
                reason = ExitReason.OUT_OF_MEMORY if is_oom else ExitReason.KEEPER_LOST
                self._end(job, detail.exit_code, message, reason)

    async def _last_words(self, detail: JobDetail) -> str:
        """What the task that decided the end wrote last, if it can be had."""
        if detail.trigger is None:
            return ""
        role, index = detail.trigger
        try:
            task = _task_attempt(detail, role, index)
            find = partial(self._cluster.log_tails, detail.name, detail.attempt, role, index, task)
            locations = await self._ask(find)
            if "stderr" not in locations:
                return ""
            text = await self._ask(self._cluster.log, locations["stderr"])
        except NniManagerError as error:
            logger.info("no last words of job %s: %s", detail.name, error)
            return ""
        return text[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def _end(
        self, job: _Job, exit_code: int | None, message: str, reason: ExitReason = ExitReason.KEEPER_LOST
    ) -> None:
        if self._jobs.pop(job.job_id, None) is not None:
            self.on_job_ended(JobEnded(job.job_id, exit_code, message, reason))

    def _note(self, problem: str) -> None:
        if problem and not self._problem:
            logger.warning("%s", problem)
        elif self._problem and not problem:
            logger.info("OpenPAI answers again")
        self._problem = problem

    async def _ask(self, function: Callable[..., Answer], *arguments: object) -> Answer:
        return await _in_thread(self._watcher, function, *arguments)

    def _note_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._problem = (
                "cannot look at jobs on OpenPAI any more: this is a bug; stop the experiment, and resume it"
            )
            logger.critical("%s", self._problem, exc_info=error)


async def _in_thread(
    threads: ThreadPoolExecutor, function: Callable[..., Answer], *arguments: object
) -> Answer:
    return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *arguments))


def _note_seen(job: _Job, state: JobState) -> None:
    job.was_seen = True
    if state is not JobState.WAITING:
        job.waits_since_s = None
    elif job.waits_since_s is None:
        job.waits_since_s = time.monotonic()


def _task_attempt(detail: JobDetail, role: str, index: int) -> int:
    tasks = (detail.document.get("taskRoles") or {}).get(role, {}).get("taskStatuses") or []
    attempts = [task.get("attemptId") for task in tasks if task.get("taskIndex") == index]
    return int(attempts[0] or 0) if attempts else 0
