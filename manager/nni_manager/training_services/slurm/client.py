"""What is asked of Slurm, by its commands. Each call blocks until its command ends."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.errors import ClusterUnavailable
from nni_manager.training_services.slurm import states
from nni_manager.training_services.slurm.commands import (
    NOT_FOUND,
    Commands,
    CommandsHere,
    CommandsOnLoginNode,
)
from nni_manager.training_services.slurm.states import JobRow, error_of
from nni_manager.training_services.ssh.login import SshLogin
from trial_keeper.frozen_dataclass import dataclass

# sbatch retries for a minute by itself while slurmctld is busy.
_TIMEOUT_S = 120.0
# A client of NFS may see a new folder a few seconds later.
_SHARED_HOME = """\
for _ in {1..30}; do [ -d "$2" ] && break; sleep 0.2; done
id -u
[ -x "$1" ] && echo yes || echo no
[ -d "$2" ] && echo yes || echo no"""


class SlurmMissing(UserError):
    """cannot find Slurm's commands; run nnictl on a login node, or load the module that has them"""


def missing(command: str, login: SshLogin | None = None) -> str:
    """The message about a command of Slurm that is not on PATH."""
    if login is not None:
        return (
            f"cannot find Slurm's {command} on PATH of {login.address}; name a login node of the cluster in slurmConfig.login, "
            "and let your login shell there (~/.bash_profile) load the module that has Slurm's commands"
        )
    return (
        f"cannot find Slurm's {command} on PATH; run nnictl on a login node of the cluster, load the module that has Slurm's "
        "commands, or name a login node in slurmConfig.login"
    )


@dataclass(frozen=True, slots=True)
class ClusterNames:
    """The name of a cluster, and the host of its controller."""

    name: str
    controller: str


class Slurm:
    """Asks Slurm. Methods may be called by several threads. `login`: of the host that has Slurm's commands; None: this machine.

    Raises of all methods:
        SlurmMissing: there is no such command.
        UserError: Slurm refuses the call permanently, or the login node the login; has what it printed.
        RetryableError: a later call may succeed.
    """

    def __init__(self, login: SshLogin | None = None) -> None:
        self._login = login
        self._commands: Commands = CommandsHere() if login is None else CommandsOnLoginNode(login)

    def cluster(self) -> ClusterNames:
        """The names of the cluster."""
        printed = self._ask(["scontrol", "show", "config"])
        found = dict(re.findall(r"^(ClusterName|SlurmctldHost\[0\])\s*= (.*)$", printed, re.MULTILINE))
        host = found.get("SlurmctldHost[0]", "")
        # The address in parentheses takes precedence: vm(10.0.0.1).
        address = re.fullmatch(r"([^(]*)\((.*)\)", host)
        return ClusterNames(found.get("ClusterName", ""), host if address is None else address[2])

    def submit(self, command: Sequence[str], script: str, variables: Mapping[str, str]) -> str:
        """Submit a batch job or a job array; returns its id. `variables`: those of the jobs' environment, besides others."""
        printed = self._ask(command, script, variables).strip()
        slurm_id = printed.partition(";")[0]  # followed by the cluster's name, in a federation
        if not slurm_id.isdigit():
            raise RetryableError(
                f"cannot find the job's id in what sbatch printed: {printed[:200]!r}; look for a wrapper of sbatch on PATH"
            )
        return slurm_id

    def test(self, command: Sequence[str]) -> None:
        """Let Slurm check a job without submitting it."""
        self._ask([*command, "--test-only"], "#!/bin/bash\n")

    def check_shared_home(self, folder: Path) -> None:
        """Check that jobs of this user can use this machine's folders: the login node has the same user, Python and `folder`.

        If `folder` does not exist, its nearest parent is checked.

        Raises:
            UserError: one of them is different there.
        """
        assert self._login is not None
        where = self._login.address
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        try:
            with tempfile.TemporaryDirectory(dir=existing, prefix=".nni-check-") as seen:
                found = self._ask(["bash", "-c", _SHARED_HOME, "-", sys.executable, seen]).split()
        except OSError as error:
            raise UserError(
                f"cannot write to {existing}: {error.strerror}; set experimentWorkingDirectory to a folder of the shared home "
                "that you may write to"
            ) from error
        user, has_python, has_folder = [*found, "", "", ""][:3]
        if user != str(os.geteuid()):
            raise UserError(
                f"cannot use slurmConfig.login {where}: its user id is {user}, and nnictl's is {os.geteuid()}, so jobs could not "
                "write to the experiment's folder; run nnictl as the user of the shared home"
            )
        if has_folder != "yes":
            raise UserError(
                f"cannot use slurmConfig.login {where}: it has no {seen}, so it does not share {existing}; set "
                "experimentWorkingDirectory to a folder of the shared home, at the same path here and there"
            )
        if has_python != "yes":
            raise UserError(
                f"cannot use slurmConfig.login {where}: it has no {sys.executable}; install trial-keeper on the shared home, and "
                "run the nnictl of that installation"
            )

    def jobs(self, prefix: str) -> list[JobRow]:
        """All jobs of this user with such names that Slurm knows, of any state: ended ones for some minutes (MinJobAge)."""
        command = [
            "squeue",
            "--noheader",
            "--array",
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

        `if_pending`: only those that have not started. Not for array tasks: scancel would cancel all pending ones of the array. A
        job that has ended is no error.
        """
        self._signal([*(["--state=PENDING"] if if_pending else []), *slurm_ids])

    def cancel_pending_tasks(self, slurm_ids: Collection[str]) -> None:
        """Cancel the array tasks among these that have not started. A hold keeps them from starting meanwhile."""
        code, _, errors = self._run(["scontrol", "hold", ",".join(slurm_ids)])
        error = error_of("scontrol hold", errors)
        if code != 0 and isinstance(error, RetryableError):
            raise error
        # A task may have ended, or the cluster allows no hold.
        command = [
            "squeue",
            "--noheader",
            "--array",
            "--states=PENDING",
            f"--user={os.geteuid()}",
            "--format=%i",
        ]
        pending = {*self._ask(command).split()}
        if left := [slurm_id for slurm_id in slurm_ids if slurm_id in pending]:
            self.cancel(left)

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
        self._commands.close()

    def _signal(self, arguments: Sequence[str]) -> set[str]:
        """Run scancel; returns the ids of the jobs that it could not signal: they have ended, or not started."""
        code, _, errors = self._run(["scancel", *arguments])
        if code == 0 or not errors:  # it is silent about jobs that are ending
            return set()
        error, ids = error_of("scancel", errors), states.unsignalled(errors)
        if isinstance(error, RetryableError) or not ids:
            raise error
        return ids

    def _ask(
        self, command: Sequence[str], stdin: str = "", variables: Mapping[str, str] | None = None
    ) -> str:
        code, printed, errors = self._run(command, stdin, variables)
        if code != 0:
            raise error_of(command[0], errors or printed)
        return printed

    def _run(
        self, command: Sequence[str], stdin: str = "", variables: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Run a command; returns its exit code, its stdout and its stderr."""
        try:
            code, printed, errors = self._commands.run(command, stdin, variables or {}, _TIMEOUT_S)
        except TimeoutError as error:
            raise ClusterUnavailable(
                f"cannot get an answer of `{command[0]}` within {_TIMEOUT_S:.0f} s; check slurmctld with `scontrol ping`"
            ) from error
        if code == NOT_FOUND:
            raise SlurmMissing(missing(command[0], self._login))
        return code, printed, errors


def _parsed(parse: Callable[[str], list[JobRow]], command: str, printed: str) -> list[JobRow]:
    try:
        return parse(printed)
    except ValueError as error:
        raise RetryableError(
            f"cannot read what {command} printed: {error}; report this with the output of `{command} --version`"
        ) from error
