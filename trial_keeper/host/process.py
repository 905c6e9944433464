"""The trial's command as a process group of its own, and whatever it starts."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from trial_keeper.errors import CommandNotStarted

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Each round kills what the last one's victims had started in the meantime.
_KILL_ROUNDS = 3
_LONGEST_SHOWN = 200


def adopt_orphans() -> None:
    """Become the parent of what a trial's processes leave behind, as the first process of a container is by nature.

    Where the kernel will not have it, orphans go elsewhere and only those of the trial's group are found.
    """
    import ctypes  # 2 ms of a keeper's start, and only a keeper's

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class TrialProcess:
    """A command that runs in a session of its own, with its stdout and stderr as files.

    The files are the child's own descriptors: it never waits for its keeper and never dies of a broken pipe. All children
    of this process are taken for the trial's.
    """

    def __init__(
        self, command: str, code_dir: str, environ: Mapping[str, str], stdout: Path, stderr: Path
    ) -> None:
        """Start it.

        Raises:
            CommandNotStarted: there is no bash, the code folder cannot be entered, or no system takes such a command.
        """
        if not os.path.isdir(code_dir):
            raise CommandNotStarted(
                f"cannot enter the code folder {code_dir}: there is no such folder here; check codeDir in the experiment file"
            )
        shown = repr(command if len(command) <= _LONGEST_SHOWN else command[:_LONGEST_SHOWN] + "...")
        with open(stdout, "ab") as out, open(stderr, "ab") as err:
            try:
                self._child = subprocess.Popen(
                    # A failure inside a pipe or before the last line is a failure of the trial.
                    ["bash", "-e", "-o", "pipefail", "-c", command],
                    cwd=code_dir,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                raise CommandNotStarted(
                    f"cannot start bash for the command {shown} in {code_dir}: {error.strerror}; "
                    "use an image that has bash, a code folder that this user may enter, and a command below 128 KiB"
                ) from error
            except ValueError as error:
                raise CommandNotStarted(
                    f"cannot start the command {shown}: {error}; use printable text"
                ) from error
        self.waits_for_group = False
        """Whether it was asked to stop and runs until its whole group is gone."""

    def poll(self) -> int | None:
        """None while it runs; afterwards its exit code, or -n for signal n.

        A command that was asked to stop runs until its whole group is gone: a shell dies of the polite signal at once,
        while what it started may still be saving its work. Orphans are reaped on the way.
        """
        self._reap()
        if self.waits_for_group and self._group_lives():
            return None
        return self._child.returncode

    def signal(self, *, kill: bool) -> None:
        """SIGTERM to every process of its group, or SIGKILL to everything it started, also to what left the group."""
        self.waits_for_group = not kill
        self._signal_group(signal.SIGKILL if kill else signal.SIGTERM)
        if kill:
            _kill_all_children()

    def _signal_group(self, number: int) -> None:
        # A process that became another user's is beyond reach.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)

    def _group_lives(self) -> bool:
        try:
            os.killpg(self._child.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def _reap(self) -> None:
        while (pid := _ended_child()) is not None:
            if pid != self._child.pid:
                os.waitpid(pid, 0)
                continue
            if not self.waits_for_group:
                # Now, while the dead leader still holds the group's number: later it could be somebody else's.
                self._signal_group(signal.SIGKILL)
            self._child.wait()


def _ended_child() -> int | None:
    """A child that ended and was not waited for."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if ended is None else ended.si_pid
    return None


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _kill_all_children() -> None:
    for _ in range(_KILL_ROUNDS):
        if not _has_children():
            return
        import psutil  # 15 ms that few trials need

        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
