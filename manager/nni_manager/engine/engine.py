"""The engine: owns one experiment, and does what its domain decides."""

import asyncio
import contextlib
import logging
import secrets
import string
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from nni_manager.clock import steady_s
from nni_manager.config.model import ExperimentConfig
from nni_manager.domain.events import (
    AskAssessor,
    AskTuner,
    AttemptLost,
    AttemptStarted,
    Begun,
    CancelTrial,
    CloseAttempt,
    DismissJob,
    Effect,
    Event,
    ExperimentStopAsked,
    Finish,
    ForgetTrial,
    GiveTrial,
    JobGone,
    JobSubmitted,
    ParametersSuggested,
    RecallTrial,
    SaveExperiment,
    SaveJob,
    SaveTrial,
    SaveUsage,
    SubmitJob,
    TakeRest,
    TellAssessor,
    TellTuner,
    TimePassed,
    TrialRefused,
    TrialStopAsked,
    TunerExhausted,
    TunerFailed,
    TunerNotReady,
)
from nni_manager.domain.experiment import STOPPED_BEFORE_IT_BEGAN
from nni_manager.domain.jobs import Job, JobState
from nni_manager.domain.metrics import reward
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.code_snapshot import take_snapshot
from nni_manager.engine.commits import GroupCommit
from nni_manager.engine.keepers import Keepers
from nni_manager.engine.mount_road import FilesClosed, MountRoad
from nni_manager.engine.picture import Picture, experiment_of
from nni_manager.engine.trial_files import Seen, write_experiment, write_trial
from nni_manager.errors import NniManagerError, TryAgain
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.store import (
    ExperimentRow,
    JobRow,
    Store,
    StoredExperiment,
    StoreReader,
    TrialRow,
    UsageRow,
)
from nni_manager.training_services.base import JobEnded, JobPresence, TrainingService
from nni_manager.tuner.assessment import Assessment, PastCourse
from nni_manager.tuner.base import Later, PastTrial, Suggestion, TrialResult, Tuner
from trial_keeper import __version__
from trial_keeper.exit_codes import known
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.limits import collected
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import ManagerDocument

log = logging.getLogger(__name__)

# So much of maxExecDuration a killed manager may forget.
_SAVE_DURATION_EVERY_S = 2.0
_LAST_KEEPERS_S = 5.0
# A machine out of memory or a mount that is away needs time; half a minute later nobody has lost much.
_FIRST_RESUBMIT_S = 0.5
_LONGEST_RESUBMIT_S = 30.0
_ID_LETTERS = string.ascii_letters + string.digits
TRIAL_ID_LENGTH = 5
EXPERIMENT_ID_LENGTH = 8


def new_id(length: int) -> str:
    """A random id in NNI's form; whoever uses it looks whether it is taken."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(length))


class Engine:
    """One experiment. Lives on one event loop; nothing here is thread-safe."""

    def __init__(
        self,
        config: ExperimentConfig,
        folder: ExperimentFolder,
        make_service: Callable[[Callable[[JobEnded], None]], TrainingService],
        tuner: Tuner,
        assessment: Assessment | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        # The owner brings the database to today's format, and reads it then.
        self.commits = GroupCommit(Store(folder.database, folder.collected_logs), self._fail)
        self.reader = StoreReader(folder.database)
        self.stored: StoredExperiment = self.reader.experiment()
        self.experiment = experiment_of(self.stored, config)
        self.keepers = Keepers(
            self.experiment,
            self.stored.secret,
            config.version_check,
            self.commits,
            self.reader,
            folder.workspace,
            self.post,
        )
        self.finished = asyncio.Event()
        """Set when the experiment is over and nothing runs any more."""
        self.failed = asyncio.Event()
        """Set when the manager must end and store nothing more: for a bug, after which a resume goes on from what is stored, or
        because another manager owns the experiment."""
        self.ended_at_s: float | None = self.stored.ended_at_s
        self.submit_problem = ""
        """Why jobs cannot be submitted at present; empty while all is well."""
        self._service = make_service(self._note_job_ended)
        self.experiment.completion = self._service.completion
        self.experiment.jobs.tasks = self.keepers.roads.tasks = self._service.completion.tasks
        self.experiment.looks_ahead = not tuner.learns
        self.experiment.silence.needs_network = config.reuse.is_on
        self.mount_road = MountRoad(
            self.experiment,
            folder.workspace,
            self.keepers,
            self.commits,
            tuple(Stream) if config.log_collection == "http" else (Stream.METRICS,),
            self.post,
        )
        self._tuner = tuner
        self._tuner_thread = ThreadPoolExecutor(1, thread_name_prefix="tuner")
        self._assessment = assessment
        self._assessor_thread = ThreadPoolExecutor(1, thread_name_prefix="assessor")
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._last_save: asyncio.Future[None] | None = None
        self._code_snapshot: str | None = None
        self._submitting: dict[str, asyncio.Task[None]] = {}
        """Jobs that do not exist yet, and the work to make them; that work may be cancelled."""
        self._giving: dict[str, asyncio.Task[None]] = {}
        """For each job the last word to its keepers that was or is to be given: they run trials in the order of these."""
        self._words_under_way: set[tuple[str, str, str | None]] = set()
        """The trials that are being given: the job, the trial, and the task that is told, or None for all."""
        self._no_jobs = asyncio.Event()
        self._no_jobs.set()
        self._logged: dict[str, TrialState] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life

    async def restore(self) -> None:
        """Know what an earlier manager knew. To be done before any keeper can connect."""
        trials = self.reader.trials()
        for trial in trials:
            if not trial.state.is_final:
                if trial.started_at_s is not None:
                    # From here on the wall clock may be set, and nothing lasts longer for it.
                    trial.heard_s = time.monotonic() - max(time.time() - trial.started_at_s, 0.0)
                self._restore_results(trial)
                await self._restore_tasks(trial)
        self.experiment.restore(trials)
        self.experiment.restore_jobs(*self.reader.jobs())
        if trials:
            await self._in_tuner_thread(self._tuner.restore, [self._past(trial) for trial in trials])
            await self._restore_assessment(trials)

    def _past(self, trial: Trial) -> PastTrial:
        value = self.experiment.lesson_of(trial)
        return PastTrial(
            trial.sequence_id,
            trial.parameters,
            trial.memo,
            value,
            trial.state.is_final,
            trial.trial_id,
            self.experiment.metric_of(trial),
            trial.state is TrialState.SUCCEEDED,
        )

    async def _restore_assessment(self, trials: Sequence[Trial]) -> None:
        if self._assessment is None:
            return
        courses: dict[str, list[float]] = {}
        for row in chain.from_iterable(self.reader.metric_pages(False, 0, 2**62)):
            if (number := reward(row.value)) is not None:
                courses.setdefault(row.trial_id, []).append(number)
        past = [
            PastCourse(
                trial.sequence_id,
                trial.attempt or 0,
                courses.get(trial.trial_id, []),
                trial.state is TrialState.SUCCEEDED if trial.state.is_final else None,
            )
            for trial in trials
        ]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._assessor_thread, self._assessment.restore, past)

    def _restore_results(self, trial: Trial) -> None:
        """The rows are stored before the trial's own: a manager that died in between knew of results that its record lacks."""
        if trial.final is None:
            pages = self.reader.metric_pages(True, trial.sequence_id, trial.sequence_id)
            for row in next(pages, [])[:1]:  # one that reports without end may have millions
                trial.final, trial.value = row.value, reward(row.value)

    async def _restore_tasks(self, trial: Trial) -> None:
        """What a task has told and was let go with, before the trial was over, is nowhere but in the workspace."""
        if trial.state is TrialState.WAITING:
            return
        try:
            all_left = await self.mount_road.left_behind(trial, may_be_late=False)
        except FilesClosed as error:
            log.warning("trial %s: %s", trial.trial_id, error)
            return
        for left in all_left:
            trial.joined(left.key)
            if left.ended is not None:
                trial.ended_in(left.ended)
                durable = self.reader.offsets(left.key)
                if all(
                    durable.get(stream, 0) >= collected(stream, size)
                    for stream, size in left.ended.final_sizes.items()
                ):
                    trial.undelivered.discard(left.key.task)

    async def start(self, addresses: tuple[str, ...], certificate: str | None = None) -> None:
        """Begin, or go on where an earlier manager stopped. Keepers reach this manager at `addresses` from now on.

        `certificate`: the one that is listened with there, as PEM; None: without encryption.

        Raises:
            CodeUnusable, SnapshotNotWritten: the training code cannot be packed for the jobs.
        """
        if self._service.uses_snapshot:
            snapshot = await asyncio.to_thread(
                take_snapshot, self.config.code_dir, self.folder.workspace, self.config.secret_files
            )
            log.info("codeDir %s: %s", self.config.code_dir, snapshot)
            if snapshot.left_out:
                log.warning(
                    "codeDir: left out, because they are no files: %s",
                    ", ".join(map(repr, snapshot.left_out)),
                )
            self._code_snapshot = snapshot.name
        self.experiment.silence.addresses = addresses
        document = ManagerDocument(self.experiment.experiment_id, __version__, addresses, certificate)
        write_experiment(self.folder.workspace, document, self._service.run_script)
        jobs_of_before = list(self.experiment.jobs.live.values())
        self.finished.clear()
        self.post(Begun())
        self.keepers.is_open = True
        for job in jobs_of_before:
            await self._take_over(job)
        self._spawn(self._watch_time())
        self._spawn(self.mount_road.follow(self._spawn))

    async def close(self) -> None:
        """Let go of everything; trials that run go on, and all that was received is stored."""
        if self.experiment.state.is_over:
            # Its last keepers have been told to go: when the manager ends, nothing is left.
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._no_jobs.wait(), _LAST_KEEPERS_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.keepers.close_all()
        await self._service.close()
        if not self.failed.is_set():
            self._save_experiment()
            await self.commits.close()
        self._tuner.close()
        if self._assessment is not None:
            self._assessment.close()
        self._tuner_thread.shutdown(wait=False, cancel_futures=True)
        self._assessor_thread.shutdown(wait=False, cancel_futures=True)
        self.mount_road.threads.close()
        self.reader.close()

    def picture(self) -> Picture:
        """The experiment at this moment."""
        return Picture(
            self.config,
            self.folder,
            self.experiment,
            self.stored.created_at_s,
            self.ended_at_s,
            self.experiment.duration_s(time.monotonic()),
            self.commits.problem
            or self.submit_problem
            or self._service.problem
            or self.mount_road.problem
            or self.experiment.silence.problem(time.monotonic()),
            len(self.keepers),
            self.keepers.roads,
            time.monotonic(),
        )

    def note_taken(self) -> None:
        """Another manager owns the experiment now: store nothing more, and end."""
        log.critical(
            "another manager has taken the experiment while this one was out of reach; this one ends"
        )
        self.failed.set()

    def stop(self) -> None:
        """End the experiment: running trials are cancelled, and `finished` is set when the last is over."""
        self.post(ExperimentStopAsked(time.time()))

    def stop_trial(self, trial_id: str, reason: ExitReason = ExitReason.STOPPED_BY_USER) -> None:
        """End one trial. The trial is known."""
        self.post(TrialStopAsked(trial_id, reason, time.time()))

    # ---- events

    def post(self, event: Event) -> None:
        """Something happened. Handled at once, and in order when it happens while another event is handled."""
        if self.failed.is_set():
            return
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                for effect in self.experiment.handle(self._events.popleft(), time.monotonic()):
                    self._perform(effect)
            if self.experiment.jobs.live:
                self._no_jobs.clear()
            else:
                self._no_jobs.set()
        except Exception as error:  # noqa: BLE001 - many who post could only lose it
            self._events.clear()
            self._fail(error)
        finally:
            self._is_handling = False

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SaveTrial():
                self._save_trial(effect.trial)
            case SaveExperiment():
                self._save_experiment()
            case AskTuner():
                self._spawn(self._ask(effect.sequence_id))
            case TellTuner():
                self._spawn(self._tell(effect))
            case AskAssessor():
                self._spawn(self._assess(effect))
            case TellAssessor():
                self._spawn(self._tell_assessor(effect))
            case SaveJob():
                if effect.is_over:
                    self.keepers.roads.forget(effect.job.job_id)
                ended_at_s = time.time() if effect.is_over else None
                self._last_save = self.commits.add(
                    [JobRow(effect.job.job_id, effect.job.was_heard, ended_at_s)]
                )
            case SaveUsage():
                self.commits.add_unhurried([UsageRow(effect.usage, steady_s())])
            case SubmitJob():
                self._submitting[effect.job.job_id] = self._spawn(self._submit(effect.job))
            case GiveTrial():
                self._begin_to_give(effect)
            case CancelTrial():
                self._cancel(effect.trial, effect.reason)
            case RecallTrial():
                self.keepers.stop(effect.trial, effect.reason)
            case DismissJob():
                if not self.keepers.leave(effect.job.job_id, "there are no more trials"):
                    self._spawn(self._stop_job(effect.job.job_id))
            case CloseAttempt():
                self._after_save(lambda: self.keepers.close(effect.key))
            case TakeRest():
                self._spawn(self._take_missing(effect.key))
            case ForgetTrial():
                self.keepers.forget_trial(effect.trial)
            case Finish():
                # The clock may have been set back since.
                self.ended_at_s = max(time.time(), self.stored.created_at_s)
                self._save_experiment()
                self._after_save(self.finished.set)

    def _save_experiment(self) -> None:
        experiment = self.experiment
        self._last_save = self.commits.add(
            [
                ExperimentRow(
                    experiment.state,
                    experiment.error,
                    experiment.duration_s(time.monotonic()),
                    self.ended_at_s if experiment.state.is_over else None,
                    experiment.keeper_has_matched,
                )
            ]
        )

    def _after_save(self, action: Callable[[], None]) -> None:
        if self._last_save is None or self._last_save.done():
            action()
        else:
            self._last_save.add_done_callback(lambda done: action() if not done.exception() else None)

    def _save_trial(self, trial: Trial) -> None:
        self._last_save = self.commits.add([TrialRow.of(trial)])
        if self._logged.get(trial.trial_id) is trial.state:
            return
        self._logged[trial.trial_id] = trial.state
        if trial.state.is_final:
            log.info(
                "trial %s: %s, %s %s",
                trial.trial_id,
                trial.state.value,
                trial.reason and trial.reason.value,
                trial.value,
            )
        else:
            log.info("trial %s: %s", trial.trial_id, trial.state.value)

    # ---- the tuner, in a thread of its own: it may take its time

    async def _ask(self, sequence_id: int) -> None:
        try:
            suggestion: Suggestion | Later | None = await self._in_tuner_thread(self._tuner.ask, sequence_id)
        except Exception as error:  # noqa: BLE001 - whatever a tuner raises is shown to the user
            self._note_tuner_failure(error, was_asked=True)
            return
        if suggestion is None:
            self.post(TunerExhausted())
            return
        if suggestion is Later.LATER:
            self.post(TunerNotReady(sequence_id))
            return
        trial_id = new_id(TRIAL_ID_LENGTH)
        while trial_id in self.experiment.trials:
            trial_id = new_id(TRIAL_ID_LENGTH)
        self.post(
            ParametersSuggested(trial_id, sequence_id, suggestion.parameters, suggestion.memo, time.time())
        )

    async def _tell(self, effect: TellTuner) -> None:
        trial = self.experiment.trials[effect.trial_id]
        has_succeeded = trial.state is TrialState.SUCCEEDED
        result = TrialResult(trial.trial_id, effect.value, self.experiment.metric_of(trial), has_succeeded)
        try:
            await self._in_tuner_thread(self._tuner.hear, effect.sequence_id, result)
        except Exception as error:  # noqa: BLE001 - as above
            self._note_tuner_failure(error, was_asked=False)

    async def _assess(self, effect: AskAssessor) -> None:
        may_go_on = await self._in_assessor_thread(
            lambda assessment: assessment.hear(effect.sequence_id, effect.attempt, effect.values)
        )
        if may_go_on is False:
            log.info("trial %s: the assessor stops it", effect.trial_id)
            self.post(TrialRefused(effect.trial_id, effect.attempt, time.time()))

    async def _tell_assessor(self, effect: TellAssessor) -> None:
        await self._in_assessor_thread(
            lambda assessment: assessment.end(effect.sequence_id, has_succeeded=effect.has_succeeded)
        )

    async def _in_assessor_thread(self, use: Callable[[Assessment], bool | None]) -> bool | None:
        """What the assessor answers; None when it failed, or there is none."""
        if self._assessment is None:
            return None
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._assessor_thread, use, self._assessment
            )
        except Exception as error:  # noqa: BLE001 - as of a tuner
            name = "" if self.config.assessor is None else self.config.assessor.name
            self._note_failure("assessor", name, error)
            return None

    def _note_tuner_failure(self, error: Exception, *, was_asked: bool) -> None:
        self._note_failure("tuner", self.config.tuner.name, error, was_asked=was_asked)

    def _note_failure(self, what: str, name: str, error: Exception, *, was_asked: bool = False) -> None:
        text = "".join(traceback.format_exception(error))
        log.error("the %s failed:\n%s", what, text)
        self.post(
            TunerFailed(
                f"the {what} {name} failed, and no more trials are begun; what it raised follows. "
                f"Mend it, then go on with `nnictl resume {self.experiment.experiment_id}`.\n{text}",
                was_asked,
            )
        )

    def _in_tuner_thread(self, function: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().run_in_executor(self._tuner_thread, function, *arguments)

    # ---- jobs

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
        if job.job_id in self.experiment.jobs.live and is_to_end:
            await self._stop_job(job.job_id)

    def _note_problem(self, problem: str) -> None:
        if not self.submit_problem:
            log.warning("%s", problem)
        self.submit_problem = problem

    def _is_wanted(self, job: Job) -> bool:
        """Whether the job, which does not exist yet, should."""
        trial = self._trial_of(job)
        return job.state is not JobState.LEAVING and (trial is None or trial.state is TrialState.WAITING)

    def _trial_of(self, job: Job) -> Trial | None:
        return None if job.trial_id is None else self.experiment.trials[job.trial_id]

    def _trials_of(self, job: Job) -> list[Trial]:
        return [self.experiment.trials[trial_id] for trial_id in job.trial_ids]

    async def _submit_once(self, job: Job) -> None:
        if self._last_save is not None:
            await asyncio.shield(self._last_save)  # a job nobody remembers must not exist
        is_submitted = False
        await self._service.place(job.job_id)
        try:
            trial = self._trial_of(job)
            if trial is not None:
                await self._write_trial(job, trial)
            if self._is_wanted(job):
                # From here on the job may exist, so a stop has to go through the training service.
                self._submitting.pop(job.job_id, None)
                self.post(JobSubmitted(job.job_id))
                self.keepers.roads.watch(job.job_id, time.monotonic())
                await self._service.submit(self._settings(job))
                is_submitted = True
                self.submit_problem = ""
        finally:
            if not is_submitted:
                self._service.release(job.job_id)

    async def _write_trial(self, job: Job, trial: Trial) -> None:
        placement = self._service.placement(job.job_id)
        await self.mount_road.threads.call(
            write_trial,
            self.folder.workspace,
            trial,
            self.config.trial_command,
            placement,
            self._code_snapshot,
        )

    def _begin_to_give(self, effect: GiveTrial) -> None:
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
        saved, delay_s = self._last_save, _FIRST_RESUBMIT_S
        if before is not None:
            await asyncio.wait({before})
        while _runs_in(job, trial):
            try:
                await self._write_trial(job, trial)
                break
            except OSError as error:
                self._note_problem(f"cannot give trial {trial.trial_id} to its job for now: {error}")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_RESUBMIT_S)
        if saved is not None:
            await asyncio.shield(saved)  # a trial nobody remembers must not run
        self.submit_problem = ""
        if _runs_in(job, trial):
            self.keepers.run(job.job_id, trial.trial_id, task)
            if trial.stop_reason is not None:
                self.keepers.stop(trial, trial.stop_reason)

    def _settings(self, job: Job) -> KeeperSettings:
        return KeeperSettings(
            experiment_id=self.experiment.experiment_id,
            job_id=job.job_id,
            workspace=str(self.folder.workspace.root),
            token=self.keepers.token(job.job_id),
            trial_id=job.trial_id,
            collect_logs=self.config.log_collection == "http",
            version_check=self.config.version_check,
            idle_timeout_s=self.config.reuse.idle_timeout_s,
            max_trials=self.config.reuse.max_trials,
            warm_imports=self.config.reuse.warm_imports,
        )

    def _cancel(self, trial: Trial, reason: ExitReason) -> None:
        job_id = trial.job_id
        job_must_end = not (self.keepers.stop(trial, reason) and self.experiment.reuses_jobs)
        if job_id in self._submitting or self.keepers.roads.is_all_stream(job_id):
            if job_must_end:
                self._spawn(self._stop_job(job_id))
        else:
            self._spawn(self._stop_by_mount(trial, reason, job_must_end=job_must_end))

    async def _stop_by_mount(self, trial: Trial, reason: ExitReason, *, job_must_end: bool) -> None:
        """First, so that a keeper that hears of it in no other way has what is left of the cluster's own grace."""
        await self.mount_road.leave_stop(trial.trial_id, reason)
        if job_must_end:
            await self._stop_job(trial.job_id)

    async def _stop_job(self, job_id: str) -> None:
        submission = self._submitting.pop(job_id, None)
        if submission is not None:
            submission.cancel()
        elif not await self._service.stop(job_id):
            self._note_gone(job_id, ExitReason.JOB_LOST, STOPPED_BEFORE_IT_BEGAN)

    def _note_gone(self, job_id: str, reason: ExitReason, message: str) -> None:
        self.post(JobGone(job_id, reason, message, time.time()))

    def _note_job_ended(self, ended: JobEnded) -> None:
        job = self.experiment.jobs.live.get(ended.job_id)
        self._giving.pop(ended.job_id, None)
        if job is not None:
            self._spawn(self._recover(job, ended))

    async def _take_over(self, job: Job) -> None:
        presence = await self._service.adopt(job.job_id)
        trial = self._trial_of(job)
        is_untouched = all([await self._is_untouched(each) for each in self._trials_of(job)])
        log.info("job %s is %s", job.job_id, presence.value)
        if presence is JobPresence.RUNNING:
            self.keepers.roads.watch(job.job_id, time.monotonic())
            if (trial is not None and trial.state is TrialState.STOPPING) or job.state is JobState.LEAVING:
                await self._stop_job(job.job_id)
            elif not job.was_heard:
                self.post(JobSubmitted(job.job_id))
        elif self.experiment.reuses_jobs and is_untouched:
            # Or it never was: the manager died before it had handed it in.
            how = "it ended while no manager was there"
            self.post(
                JobGone(job.job_id, ExitReason.JOB_LOST, how, time.time(), is_clean=True, was_watched=False)
            )
        elif presence is JobPresence.UNKNOWN and trial is not None and is_untouched:
            self._perform(SubmitJob(job))
        else:
            unknown = "its job is not known to the training service any more"
            message = unknown if presence is JobPresence.UNKNOWN else self._service.last_words(job.job_id)
            self._spawn(self._recover(job, JobEnded(job.job_id, None, message)))

    async def _is_untouched(self, trial: Trial) -> bool:
        """Whether no keeper has begun the trial."""
        try:
            return trial.state is TrialState.WAITING and not await self.mount_road.left_behind(
                trial, may_be_late=False
            )
        except FilesClosed:
            return False

    async def _recover(self, job: Job, ended: JobEnded) -> None:
        """The job is gone, perhaps before its keepers told everything: the workspace has the rest."""
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
        # A trial whose end is found here makes room, and as long as the job is not known to be gone the next one is given to it.
        while trial := self._next_trial_of(job, looked_at):
            looked_at.add(trial.trial_id)
            await self._service.end_leftovers(job.job_id, trial.trial_id)
            try:
                left = await self._take_left(trial, ended)
            except FilesClosed as error:
                how, reason, left = str(error), ExitReason.MOUNT, []
            else:
                if not left:
                    untouched.add(trial.trial_id)
            # Everything read so far is stored, and the experiment knows of it.
            await asyncio.shield(self.commits.add([]))
            if any(each.ended for each in left) and not trial.state.is_final:
                how, reason = (
                    "the workspace does not hold all that it wrote; check the shared storage",
                    ExitReason.MOUNT,
                )
        log.info("job %s is gone: %s", job.job_id, how)
        message = "\n".join(part for part in (how, ended.message) if part)
        self.post(
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

    async def _take_left(self, trial: Trial, ended: JobEnded) -> list[Seen]:
        """Take all that the attempts of a trial have left, now that nobody writes there any more; how each stands.

        Raises:
            FilesClosed: the storage does not let the manager read there.
        """
        # Elsewhere an end may be written that this machine is not shown yet. A keeper that failed itself has mostly left none.
        has_begun = trial.state is not TrialState.WAITING or ended.exit_code == 0
        is_own = ended.exit_code is not None and known(ended.exit_code) is not None
        left = await self.mount_road.left_behind(
            trial, may_be_late=self._service.uses_snapshot and has_begun and not is_own
        )
        for each in left:
            self.post(
                AttemptStarted(each.key, time.time() if each.ended is None else each.ended.started_at_s)
            )
            await self.mount_road.take_rest(trial, each)
        for each in left:
            if each.ended is not None:
                self.keepers.end(each.ended)
        return left

    async def _take_missing(self, key: AttemptKey) -> None:
        """A keeper died and left its job alive: what its attempt had still to tell lies in the workspace."""
        trial = self.experiment.trials[key.trial_id]
        try:
            left = await self.mount_road.left_behind(trial, may_be_late=False)
            found = next((each for each in left if each.key == key and each.ended), None)
            if found is not None:
                await self.mount_road.take_rest(trial, found)
        except FilesClosed as error:
            log.warning("trial %s: %s", key, error)
            found = None
        if found is None or found.ended is None:
            log.warning("trial %s: its keeper is gone, and told no end", key)
            self.post(AttemptLost(key, time.time()))
        else:
            self.keepers.end(found.ended)

    # ---- time

    async def _watch_time(self) -> None:
        while True:
            runs_out_at_s = self.experiment.time_runs_out_at_s
            delay_s = _SAVE_DURATION_EVERY_S
            if runs_out_at_s is not None:
                delay_s = min(delay_s, max(runs_out_at_s - time.monotonic(), 0.05))
            await asyncio.sleep(delay_s)
            self.post(TimePassed())
            if news := self.experiment.silence.news(time.monotonic()):
                log.warning("%s", news)
            if self.experiment.state.counts_time:
                self._save_experiment()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_task)
        return task

    def _note_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        # A bug: go no further with a state that cannot be trusted. What is stored is right.
        log.critical("the manager has a bug and ends", exc_info=error)
        self.failed.set()


def _runs_in(job: Job, trial: Trial) -> bool:
    """Whether the job is still to run the trial, or runs it: a job that is gone has it no more."""
    return trial.trial_id in job.trial_ids and trial.job_id == job.job_id and not trial.state.is_final
