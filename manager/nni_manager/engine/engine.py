"""Runs one experiment: passes events to its domain and performs the effects."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

from nni_manager.clock import monotonic_epoch_s
from nni_manager.config.model import ExperimentSpec
from nni_manager.domain import events
from nni_manager.domain.attempts import AttemptReport, Attempts
from nni_manager.domain.events import Effect
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.stop_escalation import MAX_STOP_S, RECORDED_TIMEOUT_S
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import OFFSET_OF_INHERITED
from nni_manager.engine.cluster_jobs import ClusterJobs
from nni_manager.engine.code_snapshot import take_snapshot
from nni_manager.engine.connected_keepers import ConnectedKeepers
from nni_manager.engine.experiment_commands import ExperimentCommands
from nni_manager.engine.history import History
from nni_manager.engine.keeper_admission import KeeperAdmission
from nni_manager.engine.keeper_ingest import KeeperIngest
from nni_manager.engine.provenance import ProvenanceRecorder
from nni_manager.engine.runtime import Runtime
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.engine.storage_poller import SharedStoragePoller, StoragePermissionDenied
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.lease import Lease
from nni_manager.store.rows import UsageRow, attempt_row, experiment_row, job_row, remarks_row, trial_row
from nni_manager.training_services.base import JobEnded, TrainingService
from nni_manager.tuner.assessment import Assessment
from nni_manager.tuner.base import BaseTuner
from trial_keeper import __version__
from trial_keeper.wire.limits import collected
from trial_keeper.wire.messages import Shutdown
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import ManagerDocument

log = logging.getLogger(__name__)

# A killed manager loses at most this much of the time that counts against maxExecDuration.
_SAVE_DURATION_INTERVAL_S = 2.0
# A limit that has run out may stay for a moment, until its experiment or trial has handled it.
_MIN_PAUSE_S = 0.05
_LAST_KEEPERS_S = 5.0


class Engine(Runtime):
    """Runs one experiment: starts and ends its components, and executes the effects that `domain` returns."""

    def __init__(
        self,
        config: ExperimentSpec,
        folder: ExperimentFolder,
        make_service: Callable[[Callable[[JobEnded], None]], TrainingService],
        make_tuner: Callable[[ExperimentSpec], BaseTuner],
        assessment: Assessment | None = None,
        lease: Lease | None = None,
    ) -> None:
        make_own_service = partial(make_service, self._note_job_ended)
        super().__init__(config, folder, make_own_service, make_tuner, assessment, lease)
        self.finished = asyncio.Event()
        """Set when the experiment is terminal, no trial runs and this is stored."""
        self.ended_at_s: float | None = self.stored.ended_at_s
        self.history = History(self.experiment, self.reader)
        self.keepers = ConnectedKeepers(self.experiment)
        self.provenance = ProvenanceRecorder(
            self, lambda digest: self.storage_poller.threads.call(self.files.read_packages, digest)
        )
        self.ingest = KeeperIngest(self, self.keepers, self.provenance)
        self.admission = KeeperAdmission(self, self.keepers, self.ingest)
        self.storage_poller = SharedStoragePoller(self, self.admission, self.ingest)
        self.jobs = ClusterJobs(self, self.admission, self.keepers, self.ingest, self.storage_poller)
        self.changes = ExperimentCommands(self, self.history)
        self._no_jobs = asyncio.Event()
        self._no_jobs.set()
        self._is_ending = asyncio.Event()
        """Set when the experiment has finished, even if its end is not stored yet."""
        self._logged: dict[str, TrialState] = {}

    # ---- lifecycle

    async def restore(self) -> None:
        """Restore the state of an earlier manager from store and workspace. Call this before any keeper can connect.

        Raises:
            WorkspaceUnusable: the workspace's storage is not mounted, or the workspace is lost.
        """
        await asyncio.to_thread(self.open_workspace)
        trials = self.reader.trials()
        attempts = self.reader.open_attempts()
        for trial in trials:
            if not trial.state.is_terminal:
                trial.restore_attempts(attempts.get(trial.trial_id, Attempts()))
                if trial.run.started_at_s is not None:
                    # A later change of the wall clock does not change the measured duration.
                    trial.run.start_received_at_s = time.monotonic() - max(
                        time.time() - trial.run.started_at_s, 0.0
                    )
                self._restore_results(trial)
                await self._restore_tasks(trial)
        self.experiment.restore(trials)
        self.experiment.scheduler.restore(*self.reader.jobs())
        imported = self.reader.imported(self.experiment.leaderboard.objectives)
        self.changes.imported = len(imported)
        if trials or imported:
            await self.algorithms.restore(
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
            trial.add_task(left.key)
            if left.ended is not None:
                trial.ended_in(left.ended)
                durable = self.reader.offsets(left.key)
                if all(
                    durable.get(stream, 0) >= collected(stream, size)
                    for stream, size in left.ended.final_sizes.items()
                ):
                    trial.attempts[left.key.task].apply(AttemptReport.DELIVERED)

    async def start(self, addresses: tuple[str, ...], certificate: str | None = None) -> None:
        """Start the experiment, or resume it. From now on keepers reach this manager at `addresses`.

        `certificate`: the server's certificate there, as PEM; None: no encryption.

        Raises:
            CodeUnusable, SnapshotNotWritten: the training code cannot be packed for the jobs.
            StorageUnavailable: the files that jobs need cannot be written to their storage.
        """
        if self.service.uses_snapshot:
            snapshot = await asyncio.to_thread(
                take_snapshot, self.config.code_dir, self.folder.workspace, self.config.secret_files
            )
            log.info("codeDir %s: %s", self.config.code_dir, snapshot)
            if snapshot.left_out:
                log.warning(
                    "codeDir: sockets, pipes and devices are not packed: %s",
                    ", ".join(map(repr, snapshot.left_out)),
                )
            self.jobs.code_snapshot = snapshot.name
        self.experiment.transports.addresses = addresses
        document = ManagerDocument(self.experiment.experiment_id, __version__, addresses, certificate)
        await asyncio.to_thread(
            self.files.write_experiment, document, self.service.run_script, self.jobs.code_snapshot
        )
        inherited_jobs = list(self.experiment.jobs.live.values())
        self.finished.clear()
        if self.experiment.state is ExperimentState.INITIALIZED and not self.experiment.trials:
            known = (each.parameters for each in self.config.warm_start)
            for parameters in (*self.config.initial_trials, *known):
                self.post(events.TrialProposed(self.new_trial_id(), parameters, time.time()))
        self.post(events.ManagerReady())
        self.admission.is_open = True
        for job in inherited_jobs:
            await self.jobs.adopt(job)
        await self.jobs.adopt_leftovers()
        if self.experiment.trials:
            self.service.garbage_collect()
        self.spawn(self.provenance.record_code())
        self.spawn(self._watch_time())
        self.spawn(self.storage_poller.follow(self.spawn))

    async def close(self) -> None:
        """Release all resources. Running trials continue, and all received data is stored."""
        if self.experiment.state.is_over:
            # Wait until the last keepers have shut down, so that no process outlives the manager.
            await _wait_at_most(self._no_jobs, _LAST_KEEPERS_S)
        await self._cancel_tasks()
        self.admission.close()
        await self.service.close()
        if not self.failed.is_set():
            self._save_experiment()
            await self.commits.close()
        self.algorithms.close()
        self.storage_poller.threads.close()
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
            tuple(self.jobs.leftovers.values()),
            len(self.keepers),
            time.monotonic(),
            pending_reason=self.jobs.pending_reason,
            warning_of=self.service.warning,
            keepers_of=self.keepers.seen,
            link_of=self.service.link,
            code=self.provenance.code,
        )

    def _problems(self) -> tuple[str, ...]:
        found = (
            self.commits.problem,
            self.jobs.problem,
            *self.jobs.leftovers.values(),
            self.service.problem,
            *self.storage_poller.problems,
            *self.experiment.transports.problems(time.monotonic()),
        )
        return tuple(dict.fromkeys(filter(None, found)))

    def stop(self) -> None:
        """Stop the experiment: running trials are cancelled, and `finished` is set when the last has ended."""
        self.post(events.ExperimentStopAsked(time.time()))

    def stop_trial(self, trial_id: str, reason: ExitReason = ExitReason.STOPPED_BY_USER) -> None:
        """Stop one trial, which must exist."""
        self.post(events.TrialStopAsked(trial_id, reason, time.time()))

    async def until_stopped(self) -> None:
        """Wait until the experiment has finished; then, with timeouts, until its end is stored and its jobs have ended."""
        await self._is_ending.wait()
        await _wait_at_most(self.finished, RECORDED_TIMEOUT_S)
        await _wait_at_most(self._no_jobs, MAX_STOP_S)
        await self.jobs.settle()

    # ---- effects

    def _note_handled(self) -> None:
        if not self.experiment.state.is_over:
            self.finished.clear()
        if not self.experiment.is_finished:
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
                self.save(attempt_row(effect.key, effect.number, effect.is_lost))
            case events.SaveExperiment():
                self._save_experiment()
            case events.SaveRemarks():
                self.save(remarks_row(effect.trial_id, effect.remarks))
            case events.SaveJob():
                ended_at_s = time.time() if effect.is_over else None
                self.save(job_row(effect.job, monotonic_epoch_s(), ended_at_s))
            case events.SaveUsage():
                self.commits.add_deferred([UsageRow(effect.usage, monotonic_epoch_s())])
            case events.AskTuner():
                self.spawn(self.algorithms.ask(effect.sequence_id))
            case events.TellTuner():
                self.spawn(self.algorithms.tell(effect.sequence_id, self.history.observation(effect)))
            case events.AddObservation():
                self.history.pending.add(effect.trial_id)
                self.spawn(self._teach(self.experiment.trials[effect.trial_id], effect.value))
            case events.AskAssessor():
                self.spawn(self.algorithms.assess(effect))
            case events.TellAssessor():
                self.spawn(self.algorithms.tell_assessor(effect))
            case events.SubmitJob():
                self.jobs.start_submission(effect.job)
            case events.DispatchTrial():
                self.jobs.dispatch(effect)
            case events.RevokePrefetched():
                self.jobs.begin_revoke(effect)
            case events.CancelTrial():
                self.jobs.cancel(effect.trial, effect.reason, ends_job=effect.ends_job)
            case events.DrainJob():
                if not self.keepers.send_all(effect.job.job_id, Shutdown("there are no more trials")):
                    self.spawn(self.jobs.stop(effect.job.job_id))
            case events.EscalateStop():
                self.jobs.escalate(effect.job, effect.stage)
            case events.CloseAttempt():
                self._after_save(lambda: self.ingest.close(effect.key))
            case events.DrainAttempt() | events.DrainSource():
                self.spawn(self.jobs.drain(effect))
            case events.DetachTrial():
                self.ingest.forget_trial(effect.trial, effect.job_id)
            case events.Finish():
                # The clock may have been set back since the experiment was created.
                if effect.is_recorded:
                    self.ended_at_s = max(time.time(), self.stored.created_at_s)
                    self._save_experiment()
                    self._after_save(self._finish)
                self._is_ending.set()

    def _save_experiment(self) -> None:
        experiment = self.experiment
        self.save(
            experiment_row(
                experiment.state,
                experiment.error,
                experiment.budget.duration_s(time.monotonic()),
                self.ended_at_s if experiment.state.is_over else None,
                experiment.scheduler.any_compatible_keeper,
            )
        )

    def _finish(self) -> None:
        if self.experiment.state.is_over:  # otherwise a user has extended the experiment in the meantime
            self.finished.set()

    async def _teach(self, trial: Trial, value: float) -> None:
        self.history.pending.discard(trial.trial_id)
        await self.algorithms.teach([self.history.prior_result(trial, value)])

    def _save_trial(self, trial: Trial) -> None:
        self.save(trial_row(trial))
        if self._logged.get(trial.trial_id) is trial.state:
            return
        self._logged[trial.trial_id] = trial.state
        if trial.state.is_terminal:
            log.info(
                "trial %s: %s, %s %s",
                trial.trial_id,
                trial.state.value,
                trial.run.reason and trial.run.reason.value,
                trial.run.value,
            )
        else:
            log.info("trial %s: %s", trial.trial_id, trial.state.value)

    def _note_job_ended(self, ended: JobEnded) -> None:
        self.jobs.note_ended(ended)

    # ---- time

    async def _watch_time(self) -> None:
        while True:
            await asyncio.sleep(_pause_s(self.experiment.time_runs_out_at_s, time.monotonic()))
            self.post(events.TimePassed())
            if problem := self.experiment.transports.new_problem(time.monotonic()):
                log.warning("%s", problem)
            if self.experiment.state.counts_time:
                self._save_experiment()


def _pause_s(runs_out_at_s: float | None, now_s: float) -> float:
    """The time to the next check of the time limits: when the first runs out, or when the duration is saved."""
    left_s = _SAVE_DURATION_INTERVAL_S if runs_out_at_s is None else runs_out_at_s - now_s
    return min(max(left_s, _MIN_PAUSE_S), _SAVE_DURATION_INTERVAL_S)


async def _wait_at_most(event: asyncio.Event, within_s: float) -> None:
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), within_s)
