"""Runs one experiment: passes events to its domain and performs the effects."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from nni_manager.config.model import ExperimentSpec
from nni_manager.domain import events
from nni_manager.domain.attempts import AttemptReport, Attempts
from nni_manager.domain.events import Effect, Event
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.jobs import Job
from nni_manager.domain.stop_escalation import MAX_STOP_S, RECORDED_TIMEOUT_S
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import OFFSET_OF_INHERITED
from nni_manager.engine.connected_keepers import ConnectedKeepers
from nni_manager.engine.event_loop import EventLoop
from nni_manager.engine.experiment_commands import ExperimentCommands
from nni_manager.engine.history import History
from nni_manager.engine.ids import TRIAL_ID_LENGTH, new_id
from nni_manager.engine.job_recovery import JobRecovery
from nni_manager.engine.job_submission import JobSubmission
from nni_manager.engine.keeper_admission import KeeperAdmission
from nni_manager.engine.keeper_ingest import KeeperIngest
from nni_manager.engine.notifier import Notifier
from nni_manager.engine.profiles import metadata_view
from nni_manager.engine.provenance import ProvenanceRecorder
from nni_manager.engine.shared_files import STORAGE_LAG_S, AttemptReadout, SharedFiles
from nni_manager.engine.snapshot import ExperimentSnapshot, snapshot_from_stored
from nni_manager.engine.storage_executor import StorageExecutor
from nni_manager.engine.storage_poller import SharedStoragePoller, StoragePermissionDenied
from nni_manager.engine.tracing import trial_tracer
from nni_manager.engine.trial_dispatch import TrialDispatch
from nni_manager.engine.tuner_executor import TunerExecutor
from nni_manager.engine.workspace_writer import WorkspaceWriter
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.lease import Lease
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import UsageRow, attempt_row, experiment_row, job_row, remarks_row, trial_row
from nni_manager.store.writer import Store
from nni_manager.support.clock import monotonic_epoch_s
from nni_manager.training_services.base import JobEnded, TrainingService
from nni_manager.tuner.assessment import Assessment
from nni_manager.tuner.base import BaseTuner
from trial_keeper.timeouts import set_within
from trial_keeper.wire.limits import collected
from trial_keeper.wire.messages import Stream
from trial_keeper.wire.reasons import ExitReason

log = logging.getLogger(__name__)

# A killed manager loses at most this much of the time that counts against maxExecDuration.
_SAVE_DURATION_INTERVAL_S = 2.0
# A limit that has run out may stay for a moment, until its experiment or trial has handled it.
_MIN_PAUSE_S = 0.05
_LAST_KEEPERS_S = 5.0


class Engine:
    """Runs one experiment: creates, starts and ends its components, and executes the effects that `domain` returns."""

    def __init__(
        self,
        config: ExperimentSpec,
        folder: ExperimentFolder,
        make_service: Callable[[Callable[[JobEnded], None]], TrainingService],
        make_tuner: Callable[[ExperimentSpec], BaseTuner],
        assessment: Assessment | None = None,
        lease: Lease | None = None,
    ) -> None:
        # The lease holder migrates the database to the current schema before it is read.
        store = Store(folder.database, folder.collected_logs, lease)
        self.runtime = runtime = EventLoop(store, self._handle, self._note_handled)
        self.commits = runtime.commits
        self.folder = folder
        self.reader = reader = StoreReader(folder.database)
        self.stored = stored = reader.experiment()
        self.service = service = make_service(self._note_job_ended)
        self.tuner_executor = TunerExecutor(
            stored.experiment_id, config, make_tuner, assessment, runtime.post, self.new_trial_id
        )
        self.experiment = experiment = snapshot_from_stored(
            stored, config, service, may_prefetch=not self.tuner_executor.learns
        )
        self.finished = asyncio.Event()
        """Set when the experiment is terminal, no trial runs and this is stored."""
        self.ended_at_s: float | None = stored.ended_at_s
        self.history = History(experiment, reader)
        self.storage = StorageExecutor()
        files = SharedFiles(folder.workspace, service.share, service.runs_as_manager)
        self.keepers = ConnectedKeepers(experiment)
        read_packages = partial(self.storage.call, files.read_packages)
        self.provenance = ProvenanceRecorder(runtime, reader, read_packages)
        self.ingest = KeeperIngest(
            runtime, experiment, self.commits, reader, folder.workspace, self.keepers, self.provenance
        )
        self.admission = admission = KeeperAdmission(
            runtime, experiment, self.keepers, self.ingest, stored.secret, bool(config.version_check)
        )
        streams = tuple(Stream) if config.log_collection == "http" else (Stream.METRICS,)
        # Other machines write to the storage only if the jobs need a snapshot.
        lag_s = STORAGE_LAG_S if service.uses_snapshot else 0.0
        self.storage_poller = SharedStoragePoller(
            runtime, experiment, files, self.storage, admission, self.ingest, streams, lag_s
        )
        self.writer = WorkspaceWriter(config, folder, files, self.storage, service, admission)
        self.recovery = JobRecovery(runtime, experiment, folder, service, self.ingest, self.storage_poller)
        self.submission = JobSubmission(
            runtime, experiment, config, service, admission, self.writer, self.recovery
        )
        self.dispatch = TrialDispatch(
            runtime, experiment, service, self.keepers, self.writer, self.submission
        )
        service.on_job_preempted = self.dispatch.note_preempted
        service.on_node_changed = lambda job_id, is_ready: runtime.post(
            events.NodeReadinessChanged(job_id, is_ready)
        )
        self.commands = ExperimentCommands(
            runtime,
            experiment,
            config,
            self.tuner_executor,
            self.history,
            lambda trial: files.find_checkpoints(trial, admission.signer_of(trial)),
            self.new_trial_id,
        )
        self.notifier = Notifier(
            config,
            experiment.state,
            folder.notifications_log,
            lambda: metadata_view(self.snapshot()),
            runtime.after_save,
            runtime.spawn,
        )
        self.tracer = trial_tracer(stored.experiment_id, config.experiment_name)
        self._no_jobs = asyncio.Event()
        self._no_jobs.set()
        self._is_ending = asyncio.Event()
        """Set when the experiment has finished, even if its end is not stored yet."""
        self._logged: dict[str, TrialState] = {}
        self._restarted: list[events.AttemptStarted] = []
        """The starts of new runs that `restore` found in the workspace."""

    @property
    def config(self) -> ExperimentSpec:
        """The current configuration."""
        return self.commands.config

    def new_trial_id(self) -> str:
        """An id that no trial has."""
        trial_id = new_id(TRIAL_ID_LENGTH)
        while trial_id in self.experiment.trials:
            trial_id = new_id(TRIAL_ID_LENGTH)
        return trial_id

    # ---- lifecycle

    async def restore(self) -> None:
        """Restore the state of an earlier manager from store and workspace. Call this before any keeper can connect.

        Raises:
            WorkspaceUnusable: the workspace's storage is not mounted, or the workspace is lost.
        """
        await asyncio.to_thread(self.writer.open)
        trials = self.reader.trials()
        attempts = self.reader.open_attempts()
        for trial in trials:
            if not trial.state.is_terminal:
                trial.restore_attempts(attempts.get(trial.trial_id, Attempts()))
                if trial.run.started_at_s is not None:
                    # A later change of the wall clock does not change the measured duration. The keeper's clock may be behind
                    # this one, but no trial has run for longer than it exists.
                    began_at_s = max(trial.run.started_at_s, trial.created_at_s)
                    trial.run.start_received_at_s = time.monotonic() - max(time.time() - began_at_s, 0.0)
                self._restore_results(trial)
                self.ingest.restore_source(trial)
                await self._restore_tasks(trial)
        self.experiment.restore(trials)
        self.experiment.scheduler.restore(*self.reader.jobs())
        imported = self.reader.imported(self.experiment.leaderboard.objectives)
        self.commands.imported = len(imported)
        if trials or imported:
            await self.tuner_executor.restore(
                self.history.past([trial for trial in trials if not trial.is_customized]),
                [*imported, *self.history.prior_results(trial for trial in trials if trial.is_customized)],
                lambda: self.history.learning_curves(trials),
            )

    def _restore_results(self, trial: Trial) -> None:
        """Restore the final result from the metric rows, which are stored before the trial's row."""
        pages = self.reader.metric_pages(True, trial.sequence_id, trial.sequence_id)
        for row in next(pages, [])[:1]:  # a trial may have millions of rows
            offset = row.record_offset if row.attempt == trial.run.attempt else OFFSET_OF_INHERITED
            trial.run.set_final(row.value, offset, self.experiment.leaderboard.objectives)

    async def _restore_tasks(self, trial: Trial) -> None:
        """Restore the state of the tasks from the workspace: the store lacks the ends of single tasks."""
        if trial.state is TrialState.WAITING:
            return
        try:
            all_left = await self.storage_poller.scan_remaining(trial, may_be_late=False)
        except StoragePermissionDenied as error:
            log.warning("trial %s: %s", trial.trial_id, error)
            return
        for left in all_left:
            if (new := trial.registered.register(left.key)) is not None:
                self.commits.add([attempt_row(new.key, new.number)])
            if trial.supersedes(left.key):
                if left.has_started:
                    self._note_restarted(trial, left)
                continue
            trial.add_task(left.key)
            if left.ended is not None:
                trial.ended_in(left.ended)
                durable = self.reader.offsets(left.key)
                if not self.ingest.awaits_source(left.key) and all(
                    durable.get(stream, 0) >= collected(stream, size)
                    for stream, size in left.ended.final_sizes.items()
                ):
                    trial.attempts[left.key.task].apply(AttemptReport.DELIVERED)

    def _note_restarted(self, trial: Trial, left: AttemptReadout) -> None:
        """Let the started manager start the new run of a trial whose container was restarted while no manager ran."""
        trial.run.start_received_at_s = None  # the time limit of the earlier run does not concern the new one
        at_s = time.time() if left.ended is None else left.ended.started_at_s
        self._restarted.append(events.AttemptStarted(left.key, at_s))

    async def start(self, addresses: tuple[str, ...], certificate: str | None = None) -> None:
        """Start the experiment, or resume it. From now on keepers reach this manager at `addresses`.

        `certificate`: the server's certificate there, as PEM; None: no encryption.

        Raises:
            CodeUnusable, SnapshotNotWritten: the training code cannot be packed for the jobs.
            StorageUnavailable: the files that jobs need cannot be written to their storage.
        """
        self.experiment.transports.addresses = addresses
        await self.writer.write_experiment(addresses, certificate)
        inherited_jobs = list(self.experiment.jobs.live.values())
        self.submission.expect(inherited_jobs)
        self.finished.clear()
        if self.experiment.state is ExperimentState.INITIALIZED and not self.experiment.trials:
            known = (each.parameters for each in self.config.warm_start)
            for parameters in (*self.config.initial_trials, *known):
                self.runtime.post(events.TrialProposed(self.new_trial_id(), parameters, time.time()))
        self.runtime.post(events.ManagerReady())
        for started in self._restarted:
            self.runtime.post(started)
        for source in self.ingest.awaited:
            # The earlier manager ended before it had stored the results before a checkpoint.
            self.recovery.drain_source(source)
        self.admission.is_open = True
        for job in inherited_jobs:
            await self.submission.adopt(job)
        await self.recovery.adopt_leftovers()
        if self.experiment.trials:
            self.service.garbage_collect()
        self.runtime.spawn(self.provenance.record_code(self.config, self.folder.workspace))
        self.runtime.spawn(self._watch_time())
        self.runtime.spawn(self.storage_poller.follow())

    async def close(self) -> None:
        """Release all resources. Running trials continue, and all received data is stored."""
        if self.experiment.state.is_terminal:
            # Wait until the last keepers have shut down, so that no process outlives the manager.
            await set_within(self._no_jobs, _LAST_KEEPERS_S)
        await self.notifier.close()
        await self.runtime.cancel_tasks()
        self.admission.close()
        await self.service.close()
        if not self.runtime.failed.is_set():
            self._save_experiment()
            await self.commits.close()
        if self.tracer is not None:
            await self.tracer.close()
        self.tuner_executor.close()
        self.storage.close()
        self.reader.close()

    def snapshot(self) -> ExperimentSnapshot:
        """A snapshot of the experiment."""
        return ExperimentSnapshot(
            self.config,
            self.folder,
            self.experiment,
            self.stored.created_at_s,
            self.ended_at_s,
            self.experiment.budget.duration_s(time.monotonic()),
            self._problems(),
            tuple(self.recovery.leftovers.values()),
            len(self.keepers),
            time.monotonic(),
            pending_reason=self.submission.pending_reason,
            warning_of=self.service.warning,
            keepers_of=self.keepers.seen,
            link_of=self.service.link,
            gpus=self.service.gpus,
            job_log=self.service.job_log if self.service.has_job_logs else None,
            code=self.provenance.code,
            store=self.commits.load,
        )

    def _problems(self) -> tuple[str, ...]:
        found = (
            self.commits.problem,
            self.submission.problem,
            *self.recovery.leftovers.values(),
            self.service.problem,
            *self.notifier.problems,
            *self.storage_poller.problems,
            *self.experiment.transports.problems(time.monotonic()),
        )
        return tuple(dict.fromkeys(filter(None, found)))

    def stop(self) -> None:
        """Stop the experiment: running trials are cancelled, and `finished` is set when the last has ended."""
        self.runtime.post(events.ExperimentStopAsked(time.time()))

    def stop_trial(self, trial_id: str, reason: ExitReason = ExitReason.STOPPED_BY_USER) -> None:
        """Stop one trial, which must exist."""
        self.runtime.post(events.TrialStopAsked(trial_id, reason, time.time()))

    async def until_stopped(self) -> None:
        """Wait until the experiment has finished; then, with timeouts, until its end is stored and its jobs have ended."""
        await self._is_ending.wait()
        await set_within(self.finished, RECORDED_TIMEOUT_S)
        await set_within(self._no_jobs, MAX_STOP_S)
        await self.recovery.settle()

    # ---- effects

    def _handle(self, event: Event) -> None:
        for effect in self.experiment.handle(event, time.monotonic()):
            self._perform(effect)

    def _note_handled(self) -> None:
        if not self.experiment.state.is_terminal:
            self.finished.clear()
        if self.experiment.state.counts_time:
            self._is_ending.clear()
        if self.experiment.scheduler.runs_jobs:
            self._no_jobs.clear()
        else:
            self._no_jobs.set()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case events.SaveTrial():
                self._save_trial(effect.trial)
            case events.SaveTrialAttempt():
                self.runtime.save(attempt_row(effect.key, effect.number, effect.is_lost))
            case events.SaveExperiment():
                self._save_experiment()
            case events.SaveRemarks():
                self.runtime.save(remarks_row(effect.trial_id, effect.remarks))
            case events.SaveJob():
                ended_at_s = time.time() if effect.has_ended else None
                self.runtime.save(job_row(effect.job, monotonic_epoch_s(), ended_at_s))
            case events.SaveUsage():
                self.commits.add_deferred([UsageRow(effect.usage, monotonic_epoch_s())])
            case events.AskTuner():
                self.runtime.spawn(self.tuner_executor.ask(effect.sequence_id))
            case events.TellTuner():
                self.runtime.spawn(
                    self.tuner_executor.tell(effect.sequence_id, self.history.observation(effect))
                )
            case events.AddObservation():
                self.history.pending.add(effect.trial_id)
                self.runtime.spawn(self._teach(self.experiment.trials[effect.trial_id], effect.value))
            case events.AskAssessor():
                self.runtime.spawn(self.tuner_executor.assess(effect))
            case events.TellAssessor():
                self.runtime.spawn(self.tuner_executor.tell_assessor(effect))
            case events.SubmitJob():
                self.submission.start(effect.job)
            case events.DispatchTrial():
                self.dispatch.start(effect)
            case events.RevokePrefetched():
                self.dispatch.start_revoke(effect)
            case events.CancelTrial():
                self.dispatch.cancel(effect)
            case events.DrainJob():
                self.dispatch.drain(effect.job)
            case events.GiveUpJob():
                self.runtime.spawn(self.recovery.give_up(effect.job))
            case events.EscalateStop():
                self.submission.escalate(effect.job, effect.stage)
            case events.CloseAttempt():
                self.runtime.after_save(lambda: self.ingest.close(effect.key))
            case events.DrainAttempt():
                self.runtime.spawn(self.recovery.drain_orphaned(effect.key))
            case events.DrainSource():
                self.recovery.drain_source(effect.key)
            case events.DetachTrial():
                self.ingest.forget_trial(effect.trial, effect.job_id)
            case events.Finish():
                self._finish(is_recorded=effect.is_recorded)

    def _save_experiment(self) -> None:
        experiment = self.experiment
        self.runtime.save(
            experiment_row(
                experiment.state,
                experiment.error,
                experiment.budget.duration_s(time.monotonic()),
                self.ended_at_s if experiment.state.is_terminal else None,
                experiment.scheduler.any_compatible_keeper,
            )
        )
        self.notifier.note_state(experiment.state, experiment.error)

    def _finish(self, *, is_recorded: bool) -> None:
        if is_recorded:
            # The clock may have been set back since the experiment was created.
            self.ended_at_s = max(time.time(), self.stored.created_at_s)
            self._save_experiment()
            self.runtime.after_save(self._note_finish_stored)
        self._is_ending.set()

    def _note_finish_stored(self) -> None:
        if self.experiment.state.is_terminal:  # otherwise a user has extended the experiment in the meantime
            self.finished.set()

    async def _teach(self, trial: Trial, value: float) -> None:
        self.history.pending.discard(trial.trial_id)
        await self.tuner_executor.teach([self.history.prior_result(trial, value)])

    def _save_trial(self, trial: Trial) -> None:
        self.runtime.save(trial_row(trial))
        if self._logged.get(trial.trial_id) is trial.state:
            return
        self._logged[trial.trial_id] = trial.state
        if self.tracer is not None:
            self.tracer.note(trial)
        if trial.state.is_terminal:
            self.notifier.note_end(trial)
            reason, value = trial.run.reason, trial.run.value
            how = "" if reason is None else f", {reason.value}"
            result = "" if value is None else f", value {value}"
            log.info("trial %s: %s%s%s", trial.trial_id, trial.state.value, how, result)
        else:
            log.info("trial %s: %s", trial.trial_id, trial.state.value)

    def _note_job_ended(self, ended: JobEnded) -> None:
        self.dispatch.forget(ended.job_id)
        job = self.experiment.jobs.live.get(ended.job_id)
        if ended.is_unknown and job is not None:
            self.runtime.spawn(self._resubmit_or_recover(job, ended))
        else:
            self.recovery.note_ended(ended)

    async def _resubmit_or_recover(self, job: Job, ended: JobEnded) -> None:
        if not await self.submission.resubmit(job, is_unknown=True):
            self.recovery.note_ended(ended)

    # ---- time

    async def _watch_time(self) -> None:
        while True:
            await asyncio.sleep(_pause_s(self.experiment.time_runs_out_at_s, time.monotonic()))
            self.runtime.post(events.TimePassed())
            if problem := self.experiment.transports.new_problem(time.monotonic()):
                log.warning("%s", problem)
            if self.experiment.state.counts_time:
                self._save_experiment()


def _pause_s(runs_out_at_s: float | None, now_s: float) -> float:
    """The time to the next check of the time limits: when the first runs out, or when the duration is saved."""
    left_s = _SAVE_DURATION_INTERVAL_S if runs_out_at_s is None else runs_out_at_s - now_s
    return min(max(left_s, _MIN_PAUSE_S), _SAVE_DURATION_INTERVAL_S)
