"""The commands of Slurm on this machine. Each call blocks until its command ends."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.errors import ClusterUnavailable
from nni_manager.training_services.slurm import states
from nni_manager.training_services.slurm.render import commands_environ
from nni_manager.training_services.slurm.states import JobRow, error_of

# sbatch retries for a minute by itself while slurmctld is busy.
_TIMEOUT_S = 120.0


class SlurmMissing(UserError):
    """cannot find Slurm's commands; run nnictl on a login node, or load the module that has them"""


def missing(command: str) -> str:
    """The message about a command of Slurm that is not on PATH."""
    return (
        f"cannot find Slurm's {command} on PATH; run nnictl on a login node of the cluster, or load the module that has Slurm's "
        "commands"
    )


@dataclass(frozen=True, slots=True)
class ClusterNames:
    """The name of a cluster, and the host of its controller."""

    name: str
    controller: str


class Slurm:
    """Runs Slurm's commands. Methods may be called by several threads.

    Raises of all methods:
        SlurmMissing: there is no such command.
        UserError: Slurm refuses the call permanently; has what it printed.
        RetryableError: a later call may succeed.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def cluster(self) -> ClusterNames:
        """The names of the cluster that this machine belongs to."""
        printed = self._ask(["scontrol", "show", "config"])
        found = dict(re.findall(r"^(ClusterName|SlurmctldHost\[0\])\s*= (.*)$", printed, re.MULTILINE))
        host = found.get("SlurmctldHost[0]", "")
        # The address in parentheses takes precedence: vm(10.0.0.1).
        address = re.fullmatch(r"([^(]*)\((.*)\)", host)
        return ClusterNames(found.get("ClusterName", ""), host if address is None else address[2])

    def submit(self, command: Sequence[str], script: str, environ: Mapping[str, str]) -> str:
        """Submit a batch job; returns its id in Slurm."""
        printed = self._ask(command, script, environ).strip()
        slurm_id = printed.partition(";")[0]  # followed by the cluster's name, in a federation
        if not slurm_id.isdigit():
            raise RetryableError(
                f"cannot find the job's id in what sbatch printed: {printed[:200]!r}; look for a wrapper of sbatch on PATH"
            )
        return slurm_id

    def test(self, command: Sequence[str]) -> None:
        """Let Slurm check a job without submitting it."""
        self._ask([*command, "--test-only"], "#!/bin/bash\n")

    def jobs(self, prefix: str) -> list[JobRow]:
        """All jobs of this user with such names that Slurm knows, of any state: ended ones for some minutes (MinJobAge)."""
        command = [
            "squeue",
            "--noheader",
            "--states=all",
            f"--user={os.geteuid()}",
            f"--Format={states.FORMAT}",
        ]
        return _parsed(partial(states.parse_squeue, prefix=prefix), "squeue", self._ask(command))

    def ended_jobs(self, slurm_ids: Collection[str]) -> list[JobRow]:
        """The jobs of these ids that Slurm's accounting has; empty without accounting."""
        if not slurm_ids:
            return []
        command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(slurm_ids)}"]
        try:
            printed = self._ask([*command, f"--format={states.SACCT_FORMAT}"])
        except (UserError, RetryableError):
            return []  # without a database sacct fails, and one that does not answer has less to say than squeue
        return _parsed(states.parse_sacct, "sacct", printed)

    def cancel(self, slurm_ids: Collection[str], *, if_pending: bool = False) -> None:
        """Cancel jobs: Slurm sends SIGTERM to all their processes, and SIGKILL after its KillWait.

        `if_pending`: only those that have not started. A job that has ended is no error.
        """
        self._signal([*(["--state=PENDING"] if if_pending else []), *slurm_ids])

    def terminate(self, slurm_ids: Collection[str]) -> set[str]:
        """Send SIGTERM to the first process of each job, its keeper. Returns the ids of the jobs that received it."""
        if not slurm_ids:
            return set()
        return {*slurm_ids} - self._signal(["--batch", "--signal=TERM", *slurm_ids])

    def kill(self, slurm_id: str) -> None:
        """Send SIGKILL to the keeper of a job, and cancel the job: what is left of it, or a job that has not started."""
        self._signal(["--batch", "--signal=KILL", slurm_id])
        self.cancel([slurm_id])

    def close(self) -> None:
        """End the commands that run. Later calls raise."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()

    def _signal(self, arguments: Sequence[str]) -> set[str]:
        """Run scancel; returns the ids of the jobs that it could not signal: they have ended, or not started."""
        code, _, errors = self._run(["scancel", *arguments])
        if code == 0 or not errors:  # it is silent about jobs that are ending
            return set()
        error, ids = error_of("scancel", errors), states.unsignalled(errors)
        if isinstance(error, RetryableError) or not ids:
            raise error
        return ids

    def _ask(self, command: Sequence[str], stdin: str = "", environ: Mapping[str, str] | None = None) -> str:
        code, printed, errors = self._run(command, stdin, environ)
        if code != 0:
            raise error_of(command[0], errors or printed)
        return printed

    def _run(
        self, command: Sequence[str], stdin: str = "", environ: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Run a command; returns its exit code, its stdout and its stderr."""
        try:
            with self._lock:
                if self._is_closed:
                    raise RetryableError(f"cannot run {command[0]}: the manager is closing")
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=commands_environ(os.environ) if environ is None else environ,
                    start_new_session=True,
                )
                self._running.add(process)
        except FileNotFoundError as error:
            raise SlurmMissing(missing(command[0])) from error
        except OSError as error:
            why = f"{error.strerror}; free memory or processes on this machine"
            raise RetryableError(f"cannot run {command[0]}: {why}") from error
        try:
            printed, errors = process.communicate(stdin, _TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ClusterUnavailable(
                f"cannot get an answer of `{command[0]}` within {_TIMEOUT_S:.0f} s; check slurmctld with `scontrol ping`"
            ) from error
        finally:
            with self._lock:
                self._running.discard(process)
            if process.poll() is None:
                process.kill()
                process.communicate()
        return process.returncode, printed, errors


def _parsed(parse: Callable[[str], list[JobRow]], command: str, printed: str) -> list[JobRow]:
    try:
        return parse(printed)
    except ValueError as error:
        raise RetryableError(
            f"cannot read what {command} printed: {error}; report this with the output of `{command} --version`"
        ) from error
