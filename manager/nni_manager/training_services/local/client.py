"""Keeper processes on this machine: forks of a fork server. They outlive the manager; a later manager adopts them."""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, ClassVar

from nni_manager.config.model import ExperimentSpec
from nni_manager.errors import RetryableError
from nni_manager.startup import open_files
from nni_manager.store.torn_files import read_state
from nni_manager.support.leftovers import is_keeper_of, kill_keeper, reap_job
from nni_manager.training_services.base import JobEnded, JobPresence, ManagedGpu, Placement, TrainingService
from nni_manager.training_services.local.fork_server import KeeperForkServer
from nni_manager.training_services.local.gpus import GpuShares, gpus_in_use, gpus_of_this_machine
from nni_manager.training_services.local.section import LocalSection
from nni_manager.training_services.reservations import NoRoom, ReservationQueue
from trial_keeper import processes
from trial_keeper.gpus import GpusUnseen
from trial_keeper.settings import KeeperSettings, without_settings
from trial_keeper.wire.documents import TrialDocument
from trial_keeper.wire.safe_open import open_beneath
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import Workspace

logger = logging.getLogger(__name__)

_LOG_TAIL_BYTES = 2000
# Source: proc_sys_kernel(5), pid_max.
_MAX_PID = 1 << 22
# The interval between looks at the GPUs that other programs use.
_GPU_POLL_S = 2.0
# The fork server reports an exit code within a millisecond.
_EXIT_CODE_TIMEOUT_S = 2.0


class LocalTrainingService(TrainingService):
    """One process per job. Its files: jobs/<job>.json (the process identity) and jobs/<job>.log (the keeper's own output)."""

    runs_as_manager = True
    stops_at_once = True
    forks_keepers: ClassVar[bool] = True
    """False: each keeper is a new process, which executes run.sh."""

    def __init__(
        self,
        config: ExperimentSpec,
        workspace: Workspace,
        jobs: Path,
        on_job_ended: Callable[[JobEnded], None],
    ) -> None:
        """Create the service of one experiment.

        Raises:
            UserError: trials need more GPUs than this machine has.
        """
        super().__init__(on_job_ended)
        assert isinstance(config.cluster, LocalSection)
        # The manager's own Python, so that their versions are equal.
        self.run_script = (
            "#!/bin/bash\n"
            "# Started once per job; the TRIAL_KEEPER_* variables are the keeper's settings.\n"
            f"exec {shlex.quote(sys.executable)} -m trial_keeper\n"
        )
        self._config = config
        self._section = config.cluster
        self._workspace = workspace
        self._jobs = jobs
        self._gpus = GpuShares.of(config.cluster, config.trial_gpu_number, gpus_of_this_machine())
        self._reservations = ReservationQueue()
        self._starting: dict[str, bool] = {}
        """The jobs whose processes are being started; True for a job that is to stop."""
        self._running: dict[str, int] = {}
        """A pidfd of each job's process."""
        self._fork_server = KeeperForkServer(jobs)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """The jobs whose keepers were started as new processes."""
        self._exit_codes: dict[str, asyncio.Future[int | None]] = {}
        """Of the jobs whose keepers were forked."""
        self._pids: dict[str, int] = {}
        """The keeper's pid of each running job."""

    def prepare(self) -> None:
        """Start what the first job needs, before the tuner is imported. Called on the event loop."""
        if self.forks_keepers:
            self._fork_server.open()

    async def reserve(self, job_id: str, trial_id: str | None = None) -> None:
        """Wait for free GPUs, if trials need any."""
        if self._config.trial_gpu_number:
            await self._reservations.reserve(
                job_id, partial(self._take, job_id, self._config.trial_gpu_number)
            )

    async def _take(self, job_id: str, count: int) -> NoRoom | None:
        in_use = frozenset() if self._section.may_use_active_gpu else await _gpus_in_use() or frozenset()
        if self._gpus.take(job_id, count, in_use) is not None:
            return None
        others = self._gpus.used_by_others(in_use)
        # A job that ends is an event; another program's end is not.
        return NoRoom(_why_pending(count, others), _GPU_POLL_S if others else None)

    def pending_reason(self, job_id: str) -> str:
        """The GPUs that the job waits for."""
        return self._reservations.pending_reason(job_id)

    async def gpus(self) -> list[ManagedGpu]:
        """The GPUs that trials may use, if they need any."""
        return self._gpus.shown(await _gpus_in_use()) if self._config.trial_gpu_number else []

    def placement(self, job_id: str) -> Placement:
        """The user's own code folder, and the job's GPUs."""
        held = None if self._config.trial_gpu_number is None else self._gpus.held_by(job_id)
        return Placement(str(self._config.code_dir), held)

    async def submit(self, settings: KeeperSettings) -> None:
        """Start the keeper process.

        Raises:
            RetryableError: this machine cannot start a process now.
        """
        job_id = settings.job_id
        environ = without_settings(os.environ) | settings.to_environ()
        self._starting[job_id] = False
        try:
            with open(self._log(job_id), "ab") as log:
                is_forked = self.forks_keepers and await self._fork_server.start(
                    environ, log.fileno(), partial(self._watch_fork, job_id)
                )
                if not is_forked:
                    self._start_process(job_id, environ, log)
        except OSError as error:
            raise RetryableError(
                f"cannot start a keeper for job {job_id}: {error.strerror}; free memory, disk space or processes on this machine"
            ) from error
        finally:
            is_to_stop = self._starting.pop(job_id)
        if is_to_stop:
            await self.stop(job_id)
        identity = processes.ProcessIdentity.of(self._pids[job_id]) if job_id in self._pids else None
        if identity is not None:  # otherwise the process has ended, and `_watch` reports the end
            self._write_identity(job_id, identity)

    def _start_process(self, job_id: str, environ: Mapping[str, str], log: BinaryIO) -> None:
        child = subprocess.Popen(
            ["bash", str(self._workspace.run_sh)],
            # Not on shared storage, because Python cannot start in an unreadable folder, while a keeper reports it.
            cwd=self._jobs,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        open_files.restore_limit(child.pid)
        try:
            self._watch(job_id, child.pid)
        except OSError:  # too many open files: the submission is retried, and must not start a second keeper beside this one
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        self._children[job_id] = child

    def _watch_fork(self, job_id: str, pid: int, exit_code: "asyncio.Future[int | None]") -> None:
        if not self._watch(job_id, pid):
            raise ProcessLookupError(0, "the keeper was killed before it started")
        self._exit_codes[job_id] = exit_code

    async def stop(self, job_id: str) -> bool:
        """Send SIGTERM to the keeper, which ends its trial with grace. `submit` sends it to a keeper that is being started."""
        if job_id in self._starting:
            self._starting[job_id] = True
            return True
        descriptor = self._running.get(job_id)
        if descriptor is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        self.wake(job_id)
        return True

    def wake(self, job_id: str) -> None:
        """Send SIGCONT to the keeper."""
        if (descriptor := self._running.get(job_id)) is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)

    async def kill(self, job_id: str) -> None:
        """Send SIGTERM once more, then SIGKILL to the keeper and everything it started."""
        if await self.stop(job_id) and job_id in self._pids:
            await asyncio.to_thread(kill_keeper, self._pids[job_id], self._workspace, job_id)

    def removal_command(self, job_id: str) -> str:
        """A kill command for the keeper's process. The keeper's orphan guard ends its descendants."""
        return f"kill -9 {self._pids[job_id]}" if job_id in self._pids else "nnictl stop"

    async def adopt(self, job_id: str) -> JobPresence:
        """Find the process of a job that an earlier manager started."""
        stored = read_state(self._file(job_id), _parse_identity)
        if stored is None:
            # The earlier manager may have crashed before writing the file, or used another format.
            keepers = await asyncio.to_thread(
                processes.pids_where, partial(is_keeper_of, self._workspace, job_id)
            )
            # The oldest process is the keeper: its guard is a child with the same environment.
            identity = min(
                filter(None, map(processes.ProcessIdentity.of, keepers)),
                key=lambda each: each.start_ticks,
                default=None,
            )
            gpu_indices = await asyncio.to_thread(self._gpus_in_workspace, job_id)
            if identity is None or not self._watch(job_id, identity.pid, identity):
                return JobPresence.UNKNOWN
            # At once: the job may end at any time, and its end releases the GPUs.
            self._gpus.hold(job_id, gpu_indices)
            self._write_identity(job_id, identity)
            return JobPresence.RUNNING
        identity, gpu_indices = stored
        if not self._watch(job_id, identity.pid, identity):
            return JobPresence.ENDED
        self._gpus.hold(job_id, gpu_indices)
        return JobPresence.RUNNING

    def _gpus_in_workspace(self, job_id: str) -> tuple[int, ...]:
        """Returns the GPUs of a job without a state file. A single-trial job has its trial's id, so trial.json lists the GPUs.

        Empty for a reused job: its trials have other ids, and its keeper's environment lists no GPUs.
        """
        with contextlib.suppress(OSError, DocumentInvalid, ValueError):
            document = TrialDocument.from_bytes(
                self._workspace.read_document(self._workspace.trial(job_id).trial_json)
            )
            return document.gpu_indices or ()
        return ()

    def _write_identity(self, job_id: str, identity: processes.ProcessIdentity) -> None:
        """Record the process for a later manager. Processes end with the machine, so the file need not survive a power loss."""
        document = identity._asdict() | {"gpu_indices": self._gpus.held_by(job_id)}
        try:
            replace_file(self._file(job_id), json.dumps(document).encode())
        except OSError as error:
            # The job runs and is watched anyway; a later manager finds the keeper by its environment.
            logger.warning("cannot write %s: %s", self._file(job_id), error)

    def release(self, job_id: str) -> None:
        """Free the job's GPUs."""
        self._gpus.release(job_id)
        self._reservations.note_freed()

    async def reap_orphans(self, job_id: str, trial_ids: Collection[str]) -> None:
        """Kill the remaining processes of the trials and of a killed keeper: without a container, nothing else ends them."""
        await asyncio.to_thread(reap_job, self._workspace, job_id, trial_ids)

    async def close(self) -> None:
        """Stop watching, and end the fork server. Keepers continue."""
        self._running.clear()
        self._fork_server.close()

    def _watch(self, job_id: str, pid: int, identity: processes.ProcessIdentity | None = None) -> bool:
        """Watch for the process's end. False if the process has ended or does not match `identity`."""
        descriptor = processes.open_pidfd(pid)
        if descriptor is None:
            return False
        if identity is not None and not identity.is_alive:
            os.close(descriptor)
            return False
        self._running[job_id], self._pids[job_id] = descriptor, pid
        asyncio.get_running_loop().add_reader(descriptor, self._on_end, job_id, descriptor)
        return True

    def _on_end(self, job_id: str, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(descriptor)
        if (forked := self._exit_codes.pop(job_id, None)) is not None:
            # The fork server may be frozen, which must not hide the end.
            loop.call_later(_EXIT_CODE_TIMEOUT_S, _resolve_unknown, forked)
            forked.add_done_callback(lambda _: self._report_end(job_id, descriptor, forked.result()))
            return
        child = self._children.pop(job_id, None)
        self._report_end(job_id, descriptor, child.wait() if child is not None else None)

    def _report_end(self, job_id: str, descriptor: int, exit_code: int | None) -> None:
        os.close(descriptor)
        self.release(job_id)
        self._pids.pop(job_id, None)
        if self._running.pop(job_id, None) is not None:
            self.on_job_ended(JobEnded(job_id, exit_code, self.termination_message(job_id)))

    def termination_message(self, job_id: str) -> str:
        """The tail of the keeper's own log."""
        with contextlib.suppress(OSError), open(open_beneath(self._jobs, self._log(job_id)), "rb") as log:
            log.seek(max(os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES, 0))
            return log.read(_LOG_TAIL_BYTES).decode(errors="replace").strip()
        return ""

    def _file(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.json"

    def _log(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.log"


def _parse_identity(content: bytes) -> tuple[processes.ProcessIdentity, tuple[int, ...]]:
    """Parses jobs/<job>.json: the keeper's process, and the job's GPUs."""
    document = json.loads(content)
    pid, start_ticks = int(document["pid"]), int(document["start_ticks"])
    if not 0 < pid <= _MAX_PID:
        raise ValueError(f"{pid} is not a process id")
    return processes.ProcessIdentity(pid, start_ticks, str(document["boot_id"])), tuple(
        map(int, document["gpu_indices"])
    )


async def _gpus_in_use() -> frozenset[int] | None:
    """The GPUs on which any process computes; None if no driver answers, of which `create` has warned."""
    try:
        return await asyncio.to_thread(gpus_in_use)
    except GpusUnseen:
        return None


def _why_pending(count: int, others: Collection[int]) -> str:
    wanted = "a GPU" if count == 1 else f"{count} GPUs"
    if not others:
        return f"waits for {wanted}, which other trials have"
    listed = ", ".join(map(str, others))
    return f"waits for {wanted}: other programs compute on GPU {listed}; end them, or set useActiveGpu: true to share these GPUs"


def _resolve_unknown(exit_code: "asyncio.Future[int | None]") -> None:
    if not exit_code.done():
        exit_code.set_result(None)
