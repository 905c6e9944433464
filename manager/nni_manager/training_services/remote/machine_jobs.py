"""The jobs on a machine, seen from there: each a process group that outlives the SSH connection.

Theory of operation. A shell in a session of its own runs the keeper and then writes its exit code to a file. Both processes are
recorded before the keeper executes: its shell waits for a line on a pipe, and reads EOF if this program dies first. So each job
is started at most once, and a job that was started is found again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.processes import ProcessIdentity
from trial_keeper.settings import without_settings
from trial_keeper.wire.safe_open import safe_name
from trial_keeper.wire.small_files import replace_file

LOG_TAIL_BYTES = 2000
# The shell writes the file within milliseconds of the keeper's end.
_EXIT_CODE_TIMEOUT_S = 5.0
_POLL_S = 0.01
# The file of a job is torn: the machine lost power before the file was on its disk.
_TORN = (ValueError, TypeError, LookupError, AttributeError)
# The keeper ends only by its own decision; its shell ignores what a terminal or a shutdown sends to the session.
_SHELL = """\
trap : HUP INT TERM
bash -c 'echo $$; read -r go || { kill -KILL $PPID; exit 1; }; exec bash "$1" < /dev/null >> "$2" 2>&1' bash "$1" "$2"
code=$?
echo $code > "$3.new" && mv "$3.new" "$3"
"""


@dataclass(frozen=True, slots=True)
class JobState:
    """A job on its machine. Unknown: it was never started there. `pid`: of the keeper that runs.

    `has_rebooted`: the machine has, since the job was started.
    """

    is_known: bool
    has_ended: bool = False
    pid: int | None = None
    exit_code: int | None = None
    message: str = ""
    has_rebooted: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> JobState:
        """Read fields that another machine has sent.

        Raises:
            TypeError: they are others, or of other types.
        """
        state = cls(**document)
        if not all(value is None or type(value) is int for value in (state.pid, state.exit_code)):
            raise TypeError(f"{document} is not the state of a job")
        return state


@dataclass(frozen=True, slots=True)
class MachineJobs:
    """The jobs of one experiment on this machine. `folder` has `<job>.json`, `<job>.exit` and `<job>.log` of each."""

    folder: Path

    def log(self, job_id: str) -> Path:
        """The output of the keeper."""
        return self.folder / f"{safe_name(job_id)}.log"

    def start(
        self, job_id: str, run_script: Path, settings: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | None:
        """Start the keeper of a job; None if it was started before. `settings`: its variables.

        Raises:
            OSError: the machine cannot start a process now.
        """
        if self._file(job_id).exists():
            return None
        log, exit_file = self.log(job_id), self._exit_file(job_id)
        # The shell of a failed start may have written it, before the keeper started.
        exit_file.unlink(missing_ok=True)
        shell = subprocess.Popen(
            ["bash", "-c", _SHELL, "bash", str(run_script), str(log), str(exit_file)],
            cwd=self.folder,
            env={**_without_connection(without_settings(os.environ)), **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert shell.stdin is not None
        assert shell.stdout is not None
        with shell.stdin as gate, shell.stdout as printed:
            line = printed.readline().strip()
            keeper = ProcessIdentity.of(int(line)) if line else None
            own = ProcessIdentity.of(shell.pid)
            if keeper is None or own is None:
                shell.kill()
                shell.wait()
                raise OSError(0, "its shell has ended before the keeper started")
            document = {"keeper": keeper._asdict(), "shell": own._asdict()}
            replace_file(self._file(job_id), json.dumps(document).encode(), 0o600, is_durable=True)
            with contextlib.suppress(BrokenPipeError):  # it was killed, which its state shows
                gate.write(b"go\n")
                gate.flush()
        return shell

    def state(self, job_id: str) -> JobState:
        """The state of a job now."""
        try:
            processes = self._read(job_id)
        except _TORN:
            return JobState(True, True, None, None, self.log_tail(job_id), has_rebooted=True)
        if processes is None:
            return JobState(is_known=False)
        keeper, shell = processes
        deadline_s = time.monotonic() + _EXIT_CODE_TIMEOUT_S
        while True:
            # Looked at before the file: a shell that has ended has written it.
            is_written = not shell.is_alive or time.monotonic() > deadline_s
            if (code := self._exit_code(job_id)) is not None:
                return JobState(True, True, None, code, self.log_tail(job_id))
            if keeper.is_alive:
                return JobState(True, pid=keeper.pid)
            if is_written:
                has_rebooted = keeper.boot_id != (_own_boot_id() or keeper.boot_id)
                return JobState(True, True, None, None, self.log_tail(job_id), has_rebooted)
            time.sleep(_POLL_S)

    def open_pidfd(self, job_id: str) -> int | None:
        """A pidfd that becomes readable when the job's state changes; None if it has ended, or is unknown."""
        for process in reversed(self._processes(job_id)):
            if (descriptor := process.open_pidfd()) is not None:
                return descriptor
        return None

    def signal(self, job_id: str, number: int) -> bool:
        """Send a signal to the keeper, and SIGCONT. False if it does not run."""
        descriptor = next((keeper.open_pidfd() for keeper in self._processes(job_id)[:1]), None)
        if descriptor is None:
            return False
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        finally:
            os.close(descriptor)
        return True

    def log_tail(self, job_id: str) -> str:
        """The last lines of the keeper's output; empty without any."""
        with contextlib.suppress(OSError), self.log(job_id).open("rb") as log:
            log.seek(max(os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES, 0))
            return log.read(LOG_TAIL_BYTES).decode(errors="replace").strip()
        return ""

    def _exit_code(self, job_id: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int(self._exit_file(job_id).read_text())
        return None

    def _processes(self, job_id: str) -> tuple[ProcessIdentity, ...]:
        """The keeper and its shell; none if the job is unknown or lost."""
        with contextlib.suppress(*_TORN):
            return self._read(job_id) or ()
        return ()

    def _read(self, job_id: str) -> tuple[ProcessIdentity, ProcessIdentity] | None:
        try:
            document = json.loads(self._file(job_id).read_bytes())
            return ProcessIdentity.from_json(document["keeper"]), ProcessIdentity.from_json(document["shell"])
        except FileNotFoundError:
            return None

    def _file(self, job_id: str) -> Path:
        return self.folder / f"{safe_name(job_id)}.json"

    def _exit_file(self, job_id: str) -> Path:
        return self.folder / f"{safe_name(job_id)}.exit"


def _without_connection(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of the SSH session, which the job outlives.

    With SSH_CLIENT, each `bash -c` of a trial would read ~/.bashrc, which the login shell has read already. Source: bash(1).
    """
    return {name: value for name, value in environ.items() if not name.startswith(("SSH_", "SSH2_"))}


def _own_boot_id() -> str:
    own = ProcessIdentity.of(os.getpid())
    return "" if own is None else own.boot_id
