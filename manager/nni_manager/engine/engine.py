"""The engine: owns one experiment, and does what its domain decides."""

import asyncio
import contextlib
import json
import logging
import secrets
import string
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import chain
from typing import Any

from nni_manager.clock import steady_s
from nni_manager.config.known_results import KnownResult
from nni_manager.config.model import ExperimentConfig
from nni_manager.domain.events import (
    AskAssessor,
    AskBack,
    AskTuner,
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
    RecallTrial,
    SaveExperiment,
    SaveJob,
    SaveTrial,
    SaveUsage,
    SubmitJob,
    TakeRest,
    TeachTuner,
    TellAssessor,
    TellTuner,
    TimePassed,
    TrialStopAsked,
)
from nni_manager.domain.metrics import reward
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.algorithms import Algorithms
from nni_manager.engine.changes import Changes
from nni_manager.engine.cluster_jobs import ClusterJobs
from nni_manager.engine.code_snapshot import take_snapshot
from nni_manager.engine.commits import GroupCommit
from nni_manager.engine.keepers import Keepers
from nni_manager.engine.mount_road import FilesClosed, MountRoad
from nni_manager.engine.picture import Picture, experiment_of
from nni_manager.engine.shared_files import SharedFiles
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
from nni_manager.training_services.base import JobEnded, TrainingService
from nni_manager.tuner.assessment import Assessment, PastCourse
from nni_manager.tuner.base import PastTrial, TrialResult, Tuner
from trial_keeper import __version__
from trial_keeper.wire.limits import collected
from trial_keeper.wire.messages import Stream
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import ManagerDocument

log = logging.getLogger(__name__)

# So much of maxExecDuration a killed manager may forget.
_SAVE_DURATION_EVERY_S = 2.0
_LAST_KEEPERS_S = 5.0
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
        make_tuner: Callable[[ExperimentConfig], Tuner],
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
        self._service = make_service(self._note_job_ended)
        self._files = SharedFiles(folder.workspace, self._service.share)
        self.experiment.completion = self._service.completion
        self.experiment.jobs.tasks = self.keepers.roads.tasks = self._service.completion.tasks
        self.experiment.jobs.max_trials = config.reuse.max_trials
        self.experiment.silence.needs_network = config.reuse.is_on
        self.mount_road = MountRoad(
            self.experiment,
            self._files,
            self.keepers,
            self.commits,
            tuple(Stream) if config.log_collection == "http" else (Stream.METRICS,),
            self.post,
        )
        self.algorithms = Algorithms(
            self.experiment.experiment_id, config, make_tuner, assessment, self.post, self.new_trial_id
        )
        self.experiment.looks_ahead = not self.algorithms.learns
        self.jobs = ClusterJobs(
            config,
            self.experiment,
            self._files,
            self._service,
            self.keepers,
            self.mount_road,
            self.commits,
            self.post,
            self._spawn,
            lambda: self._last_save,
        )
        self.changes = Changes(self)
        self._untaught: set[str] = set()
        """Proposed trials that are over and of which the tuner is to hear in a moment."""
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._last_save: asyncio.Future[None] | None = None
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
        imported = self.reader.imported()
        self.changes.imported_before(len(imported))
        if trials or imported:
            await self.algorithms.restore(
                [self._past(trial) for trial in trials if not trial.is_customized],
                [*imported, *self._lessons(trial for trial in trials if trial.is_customized)],
                lambda: self._courses(trials),
            )

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

    def _result_of(self, told: TellTuner) -> TrialResult:
        trial = self.experiment.trials[told.trial_id]
        has_succeeded = trial.state is TrialState.SUCCEEDED
        return TrialResult(trial.trial_id, told.value, self.experiment.metric_of(trial), has_succeeded)

    def _lesson(self, trial: Trial, value: float) -> KnownResult:
        return KnownResult(trial.parameters, value, self.experiment.metric_of(trial) or json.dumps(value))

    def _lessons(self, trials: Iterable[Trial]) -> list[KnownResult]:
        """What these came to, without those that came to nothing."""
        lessons = ((trial, self.experiment.lesson_of(trial)) for trial in trials if trial.state.is_final)
        return [self._lesson(trial, value) for trial, value in lessons if value is not None]

    def all_known(self) -> tuple[list[KnownResult], set[int]]:
        """All that a tuner could learn from and is not about to be taught, and the sequence ids of the trials that are over."""
        trials = self.experiment.trials.values()
        over = {trial.sequence_id for trial in trials if trial.state.is_final}
        taught = (trial for trial in trials if trial.trial_id not in self._untaught)
        return [*self.reader.imported(), *self._lessons(taught)], over

    def _courses(self, trials: Sequence[Trial]) -> Iterable[PastCourse]:
        """What each trial had reported in the attempt that counts."""
        courses: dict[str, list[float]] = {}
        for row in chain.from_iterable(self.reader.metric_pages(False, 0, 2**62)):
            if (number := self.experiment.seen_by_assessor(row.value)) is not None:
                courses.setdefault(row.trial_id, []).append(number)
        return [
            PastCourse(
                trial.trial_id,
                trial.attempt or 0,
                courses.get(trial.trial_id, []),
                trial.state is TrialState.SUCCEEDED if trial.state.is_final else None,
            )
            for trial in trials
        ]

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
            ShareAway: what jobs need cannot be sent to where they find it.
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
            self.jobs.code_snapshot = snapshot.name
        self.experiment.silence.addresses = addresses
        document = ManagerDocument(self.experiment.experiment_id, __version__, addresses, certificate)
        await asyncio.to_thread(
            self._files.write_experiment, document, self._service.run_script, self.jobs.code_snapshot
        )
        jobs_of_before = list(self.experiment.jobs.live.values())
        self.finished.clear()
        self.post(Begun())
        self.keepers.is_open = True
        for job in jobs_of_before:
            await self.jobs.take_over(job)
        if self.experiment.trials:
            self._service.clear_away()
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
        self.algorithms.close()
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
            or self.jobs.problem
            or self._service.problem
            or self.mount_road.problem
            or self.experiment.silence.problem(time.monotonic()),
            len(self.keepers),
            self.keepers.roads,
            time.monotonic(),
            why_it_waits=self._service.why_it_waits,
            keepers_of=self.keepers.seen,
            link_of=self._service.link,
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
            if not self.experiment.state.is_over:
                self.finished.clear()
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
                self._spawn(self.algorithms.ask(effect.sequence_id))
            case TellTuner():
                self._spawn(self.algorithms.tell(effect.sequence_id, self._result_of(effect)))
            case TeachTuner():
                self._untaught.add(effect.trial_id)
                self._spawn(self._teach(self.experiment.trials[effect.trial_id], effect.value))
            case AskAssessor():
                self._spawn(self.algorithms.assess(effect))
            case TellAssessor():
                self._spawn(self.algorithms.tell_assessor(effect))
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
                self.jobs.begin_to_submit(effect.job)
            case GiveTrial():
                self.jobs.begin_to_give(effect)
            case AskBack():
                self.jobs.begin_to_ask_back(effect)
            case CancelTrial():
                self.jobs.cancel(effect.trial, effect.reason)
            case RecallTrial():
                self.keepers.stop(effect.trial, effect.reason)
            case DismissJob():
                if not self.keepers.leave(effect.job.job_id, "there are no more trials"):
                    self._spawn(self.jobs.stop(effect.job.job_id))
            case CloseAttempt():
                self._after_save(lambda: self.keepers.close(effect.key))
            case TakeRest():
                self._spawn(self.jobs.take_missing(effect.key))
            case ForgetTrial():
                self.keepers.forget_trial(effect.trial, effect.job_id)
            case Finish():
                # The clock may have been set back since.
                self.ended_at_s = max(time.time(), self.stored.created_at_s)
                self._save_experiment()
                self._after_save(self._finish)

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

    def _finish(self) -> None:
        if self.experiment.state.is_over:  # else somebody has asked for more meanwhile
            self.finished.set()

    async def _teach(self, trial: Trial, value: float) -> None:
        self._untaught.discard(trial.trial_id)
        await self.algorithms.teach([self._lesson(trial, value)])

    def durable(self) -> "asyncio.Future[None]":
        """Done when all that was decided so far is stored."""
        return self.commits.add([])

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

    def _note_job_ended(self, ended: JobEnded) -> None:
        self.jobs.note_ended(ended)

    def new_trial_id(self) -> str:
        """An id that no trial has yet."""
        trial_id = new_id(TRIAL_ID_LENGTH)
        while trial_id in self.experiment.trials:
            trial_id = new_id(TRIAL_ID_LENGTH)
        return trial_id

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
