"""Writes the manager's files of an experiment and of its trials into the workspace."""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nni_manager.config.model import ExperimentSpec
from nni_manager.domain.attempts import AttemptPhase
from nni_manager.domain.jobs import Job
from nni_manager.domain.trial import Trial
from nni_manager.domain.trial_seed import trial_seed
from nni_manager.engine.code_snapshot import take_snapshot
from nni_manager.engine.keeper_admission import KeeperAdmission
from nni_manager.engine.shared_files import SharedFiles
from nni_manager.engine.storage_executor import StorageExecutor
from nni_manager.errors import RetryableError
from nni_manager.store.folders import ExperimentFolder, WorkspaceUnusable
from nni_manager.training_services.base import TrainingService
from trial_keeper import __version__
from trial_keeper.wire.checkpoints import Checkpoint
from trial_keeper.wire.documents import ManagerDocument
from trial_keeper.wire.messages import StopTrial
from trial_keeper.wire.reasons import ExitReason

log = logging.getLogger(__name__)

# The longest delay of the cluster's own stop by a stop request that cannot be written.
_MAX_WRITE_S = 5.0
_REMEDIES: dict[int | None, str] = {
    errno.EROFS: "mount its storage read-write",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there or request more quota",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "run as the user who created it, or make that user its owner"
    ),
}


@dataclass(eq=False)
class WorkspaceWriter:
    """Writes what jobs and keepers read. Runs on the engine's loop."""

    config: ExperimentSpec
    folder: ExperimentFolder
    files: SharedFiles
    storage: StorageExecutor
    service: TrainingService
    admission: KeeperAdmission
    _code_snapshot: str | None = None
    """The file name of the packed training code; None if jobs do not need it."""

    def open(self) -> None:
        """Call `ExperimentFolder.open_workspace` as this experiment needs it. Blocks.

        Raises:
            WorkspaceUnusable: the workspace is missing, or its storage refuses a change; has the remedy.
            OSError: another failure of the storage.
        """
        is_private, reuses_jobs = self.service.runs_as_manager, self.config.reuse_mode
        with _changing(self.folder.workspace.root):
            was_missing = self.folder.open_workspace(is_private=is_private, reuses_jobs=reuses_jobs)
        if was_missing:
            log.warning(
                "%s was missing and has been created; what trials had written there is gone",
                self.folder.workspace.trials,
            )

    async def write_experiment(self, addresses: tuple[str, ...], certificate: str | None) -> None:
        """Pack the training code, if jobs need it, and write what all jobs read; see `Engine.start`."""
        config, workspace = self.config, self.folder.workspace
        if self.service.uses_snapshot:
            snapshot = await asyncio.to_thread(take_snapshot, config.code_dir, workspace, config.secret_files)
            log.info("codeDir %s: %s", config.code_dir, snapshot)
            if snapshot.left_out:
                log.warning(
                    "codeDir: sockets, pipes and devices are not packed: %s",
                    ", ".join(map(repr, snapshot.left_out)),
                )
            self._code_snapshot = snapshot.name
        document = ManagerDocument(self.folder.experiment_id, __version__, addresses, certificate)
        service = self.service
        files = (document, service.run_script, self._code_snapshot, service.bundle)
        with _changing(workspace.root):
            await asyncio.to_thread(self.files.write_experiment, *files)

    async def write_trial(self, job: Job, trial: Trial) -> None:
        """Write the files of a trial, before its job or its keeper reads them.

        Raises:
            OSError, RetryableError: the storage does not work at present.
        """
        self.service.note_trial(job.job_id, trial.trial_id)
        checkpoints: list[Checkpoint] = []
        if trial.continues or trial.retries or trial.registered.registered:
            signer = self.admission.signer_of(trial)
            checkpoints = await self.storage.call(self.files.find_checkpoints, trial, signer)
        objectives = self.config.all_objectives
        document = (
            trial,
            self.config.trial_command,
            self.service.placement(job.job_id),
            self._code_snapshot,
            trial_seed(self.folder.experiment_id, self.config.tuner.seed, trial.sequence_id),
            checkpoints,
            () if objectives.is_plain else objectives.metrics,
            # Other tasks have ended the trial, and one that still runs may not have read its stop request.
            trial.run.reason is not None and trial.has_task_in(AttemptPhase.RUNNING),
        )
        try:
            await self.storage.call(self.files.write_trial, *document)
        except FileNotFoundError:  # the folder of trials may have been removed
            await self.storage.call(self.open)
            await self.storage.call(self.files.write_trial, *document)

    async def write_stop_request(self, trial_id: str, reason: ExitReason) -> None:
        """Write a stop request for unconnected keepers. A failed or slow write is logged and not awaited further."""
        try:
            await asyncio.wait_for(
                self.storage.call(self.files.write_stop, StopTrial(trial_id, reason)), _MAX_WRITE_S
            )
        except (OSError, RetryableError, TimeoutError, asyncio.TimeoutError) as error:
            log.warning("trial %s: cannot write the stop request for its keepers: %s", trial_id, error)


@contextlib.contextmanager
def _changing(root: Path) -> Iterator[None]:
    """A block that changes the workspace; raises `WorkspaceUnusable` with the remedy where it is known."""
    try:
        yield
    except OSError as error:
        if (remedy := _REMEDIES.get(error.errno)) is None:
            raise
        raise WorkspaceUnusable(f"cannot write to workspace {root}: {error.strerror}; {remedy}") from error
