"""Keeper processes on this machine. They outlive the manager, and a later manager finds them again."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psutil

from nni_manager import open_files
from nni_manager.config.model import ExperimentConfig
from nni_manager.errors import TryAgain
from nni_manager.store.process_identity import ProcessIdentity
from nni_manager.training_services.base import JobEnded, JobPresence, Placement, TrainingService
from nni_manager.training_services.local.gpus import GpuShares, gpus_of_this_machine
from nni_manager.training_services.local.render import render_run_script
from trial_keeper.errors import SettingsInvalid
from trial_keeper.settings import KeeperSettings, without_settings
from trial_keeper.wire.workspace import MARKER, Workspace, replace_file

logger = logging.getLogger(__name__)

_LOG_TAIL_BYTES = 2000
_KILL_ROUNDS = 5
_KILLED_WITHIN_S = 2.0


class LocalTrainingService(TrainingService):
    """One process per job. Its files: jobs/<job>.json (which process) and jobs/<job>.log (what the keeper itself says)."""

    def __init__(
        self,
        config: ExperimentConfig,
        workspace: Workspace,
        jobs: Path,
        on_job_ended: Callable[[JobEnded], None],
    ) -> None:
        """Ready to run jobs of one experiment.

        Raises:
            GpusMissing: trials want more GPUs than there are.
        """
        super().__init__(on_job_ended)
        self._config = config
        self._workspace = workspace
        self._jobs = jobs
        self._gpus = GpuShares.of(config.local, config.gpu_num, gpus_of_this_machine())
        self._room_was_made = asyncio.Event()
        self._running: dict[str, int] = {}
        """A descriptor of each job's process."""
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def run_script(self) -> str:
        """The content of run.sh."""
        return render_run_script(sys.executable)

    async def place(self, job_id: str) -> None:
        """Wait for free GPUs, if trials want any."""
        while self._config.gpu_num and self._gpus.take(job_id, self._config.gpu_num) is None:
            self._room_was_made.clear()
            await self._room_was_made.wait()

    def placement(self, job_id: str) -> Placement:
        """The code where the user has it, and the GPUs the job holds."""
        held = None if self._config.gpu_num is None else self._gpus.held_by(job_id)
        return Placement(str(self._config.code_dir), held)

    async def submit(self, settings: KeeperSettings) -> None:
        """Start the keeper's process.

        Raises:
            TryAgain: this machine can start no process now.
        """
        job_id = settings.job_id
        try:
            with open(self._log(job_id), "ab") as log:
                child = subprocess.Popen(
                    ["bash", str(self._workspace.run_sh)],
                    # Not on the storage: Python does not start where it cannot tell its folder, and a keeper says what is wrong.
                    cwd=self._jobs,
                    env=without_settings(os.environ) | settings.to_environ(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise TryAgain(
                f"cannot start a keeper for job {job_id}: {error.strerror}; free memory, disk or processes on this machine"
            ) from error
        open_files.give_back(child.pid)
        self._children[job_id] = child
        identity = ProcessIdentity.of(child.pid)
        try:
            if identity is not None:  # else it has ended, and its end is about to be told
                document = asdict(identity) | {"gpu_indices": self._gpus.held_by(job_id)}
                replace_file(self._file(job_id), json.dumps(document).encode())
        except OSError as error:
            # The job runs, so it is watched; a later manager finds it by its environment.
            logger.warning("cannot write %s: %s", self._file(job_id), error)
        self._watch(job_id, child.pid)

    async def stop(self, job_id: str) -> bool:
        """SIGTERM to the keeper, which ends its trial with grace."""
        descriptor = self._running.get(job_id)
        if descriptor is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        return True

    async def adopt(self, job_id: str) -> JobPresence:
        """Find the process of a job that an earlier manager started."""
        try:
            document = json.loads(self._file(job_id).read_bytes())
            identity = ProcessIdentity.from_json(document)
        except (FileNotFoundError, KeyError):
            # The earlier manager may have died between starting the keeper and noting it, or have noted it otherwise.
            keepers = await asyncio.to_thread(
                _processes_where, partial(_is_keeper_of, self._workspace, job_id)
            )
            if not keepers:
                return JobPresence.UNKNOWN
            # The oldest: a keeper's guard, which it made, has the same environment.
            oldest = min(keepers, key=psutil.Process.create_time)
            return JobPresence.RUNNING if self._watch(job_id, oldest.pid) else JobPresence.UNKNOWN
        if not self._watch(job_id, identity.pid, identity):
            return JobPresence.ENDED
        self._gpus.hold(job_id, tuple(document["gpu_indices"]))
        return JobPresence.RUNNING

    def release(self, job_id: str) -> None:
        """Give back the GPUs."""
        self._gpus.give_back(job_id)
        self._room_was_made.set()

    async def end_leftovers(self, job_id: str, trial_id: str) -> None:
        """Kill what the trial started and its keeper, killed itself, could not: on this machine no container ends with it."""
        folder = str(self._workspace.trial(trial_id).path) + os.sep
        warm = self._workspace.warm_marker(job_id)

        def is_of_trial(environ: dict[str, str]) -> bool:
            marker = environ.get(MARKER, "")
            return marker == warm or marker.startswith(folder)

        await asyncio.to_thread(_kill_where, is_of_trial)

    async def close(self) -> None:
        """Stop watching; keepers go on."""
        self._running.clear()

    def _watch(self, job_id: str, pid: int, identity: ProcessIdentity | None = None) -> bool:
        """Hear of the process's end; False when it has ended, or is not the one that was noted."""
        try:
            descriptor = os.pidfd_open(pid)  # readable when the process ends, whoever its parent is
        except ProcessLookupError:
            return False
        if identity is not None and not identity.is_alive:
            os.close(descriptor)
            return False
        self._running[job_id] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._note_end, job_id, descriptor)
        return True

    def _note_end(self, job_id: str, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        child = self._children.pop(job_id, None)
        exit_code = child.wait() if child is not None else None
        self.release(job_id)
        if self._running.pop(job_id, None) is not None:
            self.on_job_ended(JobEnded(job_id, exit_code, self.last_words(job_id)))

    def last_words(self, job_id: str) -> str:
        """The end of the keeper's own log."""
        with contextlib.suppress(OSError):
            return self._log(job_id).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return ""

    def _file(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.json"

    def _log(self, job_id: str) -> Path:
        return self._jobs / f"{job_id}.log"


def _processes_where(is_wanted: Callable[[dict[str, str]], bool]) -> list[psutil.Process]:
    """The processes of this user whose environment at their start says so."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or somebody else's
            if is_wanted(process.environ()):
                found.append(process)
    return found


def _kill_where(is_wanted: Callable[[dict[str, str]], bool]) -> None:
    # What is killed may have started something the moment before.
    for _ in range(_KILL_ROUNDS):
        found = _processes_where(is_wanted)
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=_KILLED_WITHIN_S)


def _is_keeper_of(workspace: Workspace, job_id: str, environ: dict[str, str]) -> bool:
    try:
        settings = KeeperSettings.from_environ(environ)
    except SettingsInvalid:
        return False
    return settings.job_id == job_id and settings.workspace == str(workspace.root)
