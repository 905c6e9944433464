"""What the jobs of an experiment need done: they are submitted, given trials, stopped, taken over, and recovered from.

Decides nothing about trials: it does what the domain's effects say, and posts what came of it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from nni_manager.config.model import ExperimentConfig
from nni_manager.domain.events import (
    AskBack,
    AttemptLost,
    AttemptStarted,
    Event,
    GiveTrial,
    JobGone,
    JobSubmitted,
    KeeperCutOff,
)
from nni_manager.domain.experiment import STOPPED_BEFORE_IT_BEGAN, Experiment
from nni_manager.domain.jobs import Job, JobState
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.commits import GroupCommit
from nni_manager.engine.keepers import Keepers
from nni_manager.engine.mount_road import FilesClosed, MountRoad
from nni_manager.engine.shared_files import SharedFiles
from nni_manager.engine.trial_files import STORAGE_LAG_S, Seen
from nni_manager.errors import NniManagerError, TryAgain
from nni_manager.training_services.base import JobEnded, JobPresence, TrainingService
from trial_keeper.exit_codes import known
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.reasons import ExitReason

log = logging.getLogger(__name__)

# A machine out of memory or a mount that is away needs time; half a minute later nobody has lost much.
_FIRST_RESUBMIT_S = 0.5
_LONGEST_RESUBMIT_S = 30.0


class ClusterJobs:
    """The jobs of one experiment, on its training service. Lives on the engine's loop."""

    def __init__(
        self,
        config: ExperimentConfig,
        experiment: Experiment,
        files: SharedFiles,
        service: TrainingService,
        keepers: Keepers,
        mount_road: MountRoad,
        commits: GroupCommit,
        post: Callable[[Event], None],
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
        saved: Callable[[], "asyncio.Future[None] | None"],
    ) -> None:
        """`saved`: what is done once all that the domain has decided so far is durable; None when there is nothing."""
        self._config = config
        self._experiment = experiment
        self._files = files
        self._service = service
        self._keepers = keepers
        self._mount_road = mount_road
        self._commits = commits
        self._post = post
        self._spawn = spawn
        self._saved = saved
        self.problem = ""
        """Why jobs cannot be submitted at present; empty while all is well."""
        self.code_snapshot: str | None = None
        """The packed training code, where jobs need it."""
        self._submitting: dict[str, asyncio.Task[None]] = {}
        """Jobs that do not exist yet, and the work to make them; that work may be cancelled."""
        self._giving: dict[str, asyncio.Task[None]] = {}
        """For each job the last word to its keepers that was or is to be given: they run trials in the order of these."""
        self._words_under_way: set[tuple[str, str, str | None]] = set()
        """The trials that are being given: the job, the trial, and the task that is told, or None for all."""
        self._questions: dict[tuple[str, str], object] = {}
        """For each job and trial that is about to be asked back, the newest question: it follows all that was said before."""

    def begin_to_submit(self, job: Job) -> None:
        """Ask the cluster for the job, again and again as long as that fails for the moment only."""
        self._submitting[job.job_id] = self._spawn(self._submit(job))

    async def _submit(self, job: Job) -> None:
        delay_s = _FIRST_RESUBMIT_S
        try:
            while self._is_wanted(job):
                try:
                    await self._submit_once(job)
                    break
                except (TryAgain, OSError) as error:
                    # Of the moment: failing this trial would fail every one that follows it as well.
                    self._note_problem(f"cannot submit job {job.job_id} for now, and tries again: {error}")
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_RESUBMIT_S)
        except NniManagerError as error:
            self._note_gone(job.job_id, ExitReason.COULD_NOT_START, str(error))
        except asyncio.CancelledError:
            if self._is_wanted(job):
                raise
            self._note_gone(job.job_id, ExitReason.JOB_LOST, STOPPED_BEFORE_IT_BEGAN)
            return
        finally:
            self._submitting.pop(job.job_id, None)
        # A keeper may be there before the training service has answered: its trial runs then, and is not to be stopped.
        trial = self._trial_of(job)
        is_to_end = job.state is JobState.LEAVING or (
            trial is not None and trial.state is TrialState.STOPPING
        )
        if job.job_id in self._experiment.jobs.live and is_to_end:
            await self.stop(job.job_id)

    def _note_problem(self, problem: str) -> None:
        if not self.problem:
            log.warning("%s", problem)
        self.problem = problem

    def _is_wanted(self, job: Job) -> bool:
        """Whether the job, which does not exist yet, should. A lost one should not, even if its trial waits for another."""
        trial = self._trial_of(job)
        is_live = job.job_id in self._experiment.jobs.live and job.state is not JobState.LEAVING
        return is_live and (trial is None or trial.state is TrialState.WAITING)

    def _trial_of(self, job: Job) -> Trial | None:
        return None if job.trial_id is None else self._experiment.trials[job.trial_id]

    def _trials_of(self, job: Job) -> list[Trial]:
        return [self._experiment.trials[trial_id] for trial_id in job.trial_ids]

    async def _submit_once(self, job: Job) -> None:
        if (saved := self._saved()) is not None:
            await asyncio.shield(saved)  # a job nobody remembers must not exist
        is_submitted = False
        await self._service.place(job.job_id)
        try:
            trial = self._trial_of(job)
            if trial is not None:
                await self._write_trial(job, trial)
            if self._is_wanted(job):
                # From here on the job may exist, so a stop has to go through the training service.
                self._submitting.pop(job.job_id, None)
                self._post(JobSubmitted(job.job_id))
                self._keepers.roads.watch(job.job_id, time.monotonic())
                await self._service.submit(self._settings(job))
                is_submitted = True
                self.problem = ""
        finally:
            if not is_submitted:
                self._service.release(job.job_id)

    async def _write_trial(self, job: Job, trial: Trial) -> None:
        placement = self._service.placement(job.job_id)
        await self._mount_road.threads.call(
            self._files.write_trial,
            trial,
            self._config.trial_command,
            placement,
            self.code_snapshot,
        )

    def begin_to_give(self, effect: GiveTrial) -> None:
        """Let the keepers of a job run a trial, after whatever they were to be given before."""
        trial_id, job_id = effect.trial.trial_id, effect.job.job_id
        word = (job_id, trial_id, effect.task)
        if self._words_under_way & {word, (job_id, trial_id, None)}:
            return  # whoever asks again hears the one that is under way
        self._words_under_way.add(word)
        give = self._give(effect.job, effect.trial, effect.task, self._giving.get(job_id))
        self._giving[job_id] = self._spawn(give)
        self._giving[job_id].add_done_callback(lambda _: self._words_under_way.discard(word))

    async def _give(
        self, job: Job, trial: Trial, task: str | None, before: "asyncio.Task[None] | None"
    ) -> None:
        saved, delay_s = self._saved(), _FIRST_RESUBMIT_S
        if before is not None:
            await asyncio.wait({before})
        while _runs_in(job, trial):
            try:
                await self._write_trial(job, trial)
                break
            except (OSError, TryAgain) as error:
                self._note_problem(f"cannot give trial {trial.trial_id} to its job for now: {error}")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_RESUBMIT_S)
        if saved is not None:
            await asyncio.shield(saved)  # a trial nobody remembers must not run
        self.problem = ""
        if _runs_in(job, trial):
            self._keepers.run(job.job_id, trial.trial_id, task)
            if trial.stop_reason is not None:
                self._keepers.stop(trial, trial.stop_reason)

    def begin_to_ask_back(self, effect: AskBack) -> None:
        """Ask the keeper of a job for a trial: it hears of that after it was told to run it, and before anything else."""
        # An older one is left out: its stream has ended, and since then the keeper may have been told to run the trial.
        question = self._questions[effect.job.job_id, effect.trial.trial_id] = object()
        ask = self._ask_back(effect.job, effect.trial, question, self._giving.get(effect.job.job_id))
        self._giving[effect.job.job_id] = self._spawn(ask)

    async def _ask_back(
        self, job: Job, trial: Trial, question: object, before: "asyncio.Task[None] | None"
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        if self._questions.get((job.job_id, trial.trial_id)) is not question:
            return
        del self._questions[job.job_id, trial.trial_id]
        if trial.trial_id in job.asked_ids:
            log.info("trial %s: job %s is asked to give it back", trial.trial_id, job.job_id)
            self._keepers.ask_back(job.job_id, trial.trial_id)

    def _settings(self, job: Job) -> KeeperSettings:
        return KeeperSettings(
            experiment_id=self._experiment.experiment_id,
            job_id=job.job_id,
            workspace=str(self._files.workspace.root),
            token=self._keepers.token(job.job_id),
            trial_id=job.trial_id,
            collect_logs=self._config.log_collection == "http",
            version_check=self._config.version_check,
            idle_timeout_s=self._config.reuse.idle_timeout_s,
            max_trials=self._config.reuse.max_trials,
            warm_imports=self._config.reuse.warm_imports,
        )

    def cancel(self, trial: Trial, reason: ExitReason) -> None:
        """End a trial that has a job, and the job with it unless it can run another."""
        job_id = trial.job_id
        job_must_end = not (self._keepers.stop(trial, reason) and self._experiment.reuses_jobs)
        if job_id in self._submitting or self._keepers.roads.is_all_stream(job_id):
            if job_must_end:
                self._spawn(self.stop(job_id))
        else:
            self._spawn(self._stop_by_mount(trial, reason, job_must_end=job_must_end))

    async def _stop_by_mount(self, trial: Trial, reason: ExitReason, *, job_must_end: bool) -> None:
        """First, so that a keeper that hears of it in no other way has what is left of the cluster's own grace."""
        await self._mount_road.leave_stop(trial.trial_id, reason)
        if job_must_end:
            await self.stop(trial.job_id)

    async def stop(self, job_id: str) -> None:
        """End a job, whether it exists already or not."""
        submission = self._submitting.pop(job_id, None)
        if submission is not None:
            submission.cancel()
        elif not await self._service.stop(job_id):
            self._note_gone(job_id, ExitReason.JOB_LOST, STOPPED_BEFORE_IT_BEGAN)

    def _note_gone(self, job_id: str, reason: ExitReason, message: str) -> None:
        self._post(JobGone(job_id, reason, message, time.time()))

    def note_ended(self, ended: JobEnded) -> None:
        """The training service has seen a job end."""
        job = self._experiment.jobs.live.get(ended.job_id)
        self._giving.pop(ended.job_id, None)
        if job is not None:
            self._spawn(self._recover(job, ended))

    async def take_over(self, job: Job) -> None:
        """Find out how a job of an earlier manager is, and go on from there."""
        presence = await self._service.adopt(job.job_id)
        trial = self._trial_of(job)
        is_untouched = all([await self._is_untouched(each) for each in self._trials_of(job)])
        log.info("job %s is %s", job.job_id, presence.value)
        if presence is JobPresence.RUNNING:
            self._keepers.roads.watch(job.job_id, time.monotonic())
            if (trial is not None and trial.state is TrialState.STOPPING) or job.state is JobState.LEAVING:
                await self.stop(job.job_id)
            elif not job.was_heard:
                self._post(JobSubmitted(job.job_id))
        elif self._experiment.reuses_jobs and is_untouched:
            # Or it never was: the manager died before it had handed it in.
            how = "it ended while no manager was there"
            self._post(
                JobGone(job.job_id, ExitReason.JOB_LOST, how, time.time(), is_clean=True, was_watched=False)
            )
        elif presence is JobPresence.UNKNOWN and trial is not None and is_untouched:
            self.begin_to_submit(job)
        else:
            unknown = "its job is not known to the training service any more"
            message = unknown if presence is JobPresence.UNKNOWN else self._service.last_words(job.job_id)
            self._spawn(self._recover(job, JobEnded(job.job_id, None, message)))

    async def _is_untouched(self, trial: Trial) -> bool:
        """Whether no keeper has begun the trial."""
        try:
            return trial.state is TrialState.WAITING and not await self._mount_road.left_behind(
                trial, may_be_late=False
            )
        except FilesClosed:
            return False

    async def _recover(self, job: Job, ended: JobEnded) -> None:
        """The job is gone, perhaps before its keepers told everything: the workspace has the rest."""
        # From here on none of its trials goes to another job, where what is left of it here would be taken for it.
        self._post(KeeperCutOff(job.job_id))
        how = (
            "its keeper is gone"
            if ended.exit_code is None
            else f"its keeper ended with exit code {ended.exit_code}"
        )
        reason = ended.reason
        if ended.exit_code is not None and (own := known(ended.exit_code)) is not None:
            how, reason = f"{how}: {own.meaning}; {own.remedy}", own.reason
        untouched: set[str] = set()
        looked_at: set[str] = set()
        shows_all_at_s = time.monotonic() + STORAGE_LAG_S
        # A trial whose end is found here makes room, and as long as the job is not known to be gone the next one is given to it.
        while trial := self._next_trial_of(job, looked_at):
            looked_at.add(trial.trial_id)
            await self._service.end_leftovers(job.job_id, trial.trial_id)
            try:
                may_be_late = time.monotonic() < shows_all_at_s
                left = await self._take_left(trial, ended, may_be_late=may_be_late)
            except FilesClosed as error:
                how, reason, left = str(error), ExitReason.MOUNT, []
            else:
                if not left:
                    untouched.add(trial.trial_id)
            # Everything read so far is stored, and the experiment knows of it.
            await asyncio.shield(self._commits.add([]))
            if any(each.ended for each in left) and not trial.state.is_final:
                how, reason = (
                    "the workspace does not hold all that it wrote; check the shared storage",
                    ExitReason.MOUNT,
                )
        log.info("job %s is gone: %s", job.job_id, how)
        message = "\n".join(part for part in (how, ended.message) if part)
        self._post(
            JobGone(
                job.job_id,
                reason,
                message,
                time.time(),
                is_clean=ended.exit_code == 0,
                untouched=frozenset(untouched),
            )
        )

    def _next_trial_of(self, job: Job, looked_at: Collection[str]) -> Trial | None:
        trials = (each for each in self._trials_of(job) if not each.state.is_final)
        return next((each for each in trials if each.trial_id not in looked_at), None)

    async def _take_left(self, trial: Trial, ended: JobEnded, *, may_be_late: bool) -> list[Seen]:
        """Take all that the attempts of a trial have left, now that nobody writes there any more; how each stands.

        `may_be_late`: the storage may not show yet what was written last.

        Raises:
            FilesClosed: the storage does not let the manager read there.
        """
        # Elsewhere an end may be written that this machine is not shown yet. A keeper that failed itself has mostly left none.
        has_begun = trial.state is not TrialState.WAITING or ended.exit_code == 0
        is_own = ended.exit_code is not None and known(ended.exit_code) is not None
        left = await self._mount_road.left_behind(
            trial, may_be_late=may_be_late and self._service.uses_snapshot and has_begun and not is_own
        )
        for each in left:
            self._post(
                AttemptStarted(each.key, time.time() if each.ended is None else each.ended.started_at_s)
            )
            await self._mount_road.take_rest(trial, each)
        for each in left:
            if each.ended is not None:
                self._keepers.end(each.ended)
        return left

    async def take_missing(self, key: AttemptKey) -> None:
        """A keeper died and left its job alive: what its attempt had still to tell lies in the workspace."""
        trial = self._experiment.trials[key.trial_id]
        try:
            left = await self._mount_road.left_behind(trial, may_be_late=False)
            found = next((each for each in left if each.key == key and each.ended), None)
            if found is not None:
                await self._mount_road.take_rest(trial, found)
        except FilesClosed as error:
            log.warning("trial %s: %s", key, error)
            found = None
        if found is None or found.ended is None:
            log.warning("trial %s: its keeper is gone, and told no end", key)
            self._post(AttemptLost(key, time.time()))
        else:
            self._keepers.end(found.ended)


def _runs_in(job: Job, trial: Trial) -> bool:
    """Whether the job is still to run the trial, or runs it: a job that is gone has it no more."""
    return trial.trial_id in job.trial_ids and trial.job_id == job.job_id and not trial.state.is_final
