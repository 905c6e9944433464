"""A trial's processes: a command that leads a session of its own, and whatever it starts.

Theory of operation. A process that double forks, leaves its group, makes a session or closes its descriptors still cannot
leave its ancestors: this process adopts orphans, so whatever the trial started is below it, and stays. Processes that
another one started on the trial's behalf are found by the environment they were given; a look at all of a machine's is
dear, so only those are looked at that were not there before the trial. Process 1 of a namespace has all of it below
itself. What is found is killed, round after round until nothing new is there: a process can fork while others die, but not
once it was sent SIGKILL.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trial_keeper.errors import CommandNotStarted
from trial_keeper.host.cgroups import TrialCgroup
from trial_keeper.wire.small_files import read_all, write_all
from trial_keeper.wire.workspace import MARKER

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LONGEST_SHOWN = 200
# What was killed is mostly gone within a millisecond. The keeper's loop stands still for so long at the most.
_SHORT_S = 0.05
# Memory of hundreds of gigabytes, or a GPU's, takes seconds to be given back.
LONGEST_DEATH_S = 10.0
_LOOK_AGAIN_S = 0.001
# Half of all memory: enough to come before a keeper, and before what else runs on a laptop only if it is really large.
_OOM_SCORE_RAISE = 500
_HIGHEST_OOM_SCORE = 1000


def adopt_orphans() -> None:
    """Become the parent of what a trial's processes leave behind, as the first process of a container is by nature.

    Where the kernel will not have it, orphans go elsewhere, and only the trial's group and marked processes are found.
    """
    import ctypes  # 2 ms of a keeper's start, and only a keeper's

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process that could not be ended. `command` is the beginning of its command line."""

    pid: int
    command: str


class TrialProcess:
    """A child of this process that leads a session, with everything it started. One at a time.

    All children of this process are taken for the trial's and reaped, except those that are spared. A spared one leads a session
    too, and all of that session is left alone, with what is below it; its owner waits for it.
    """

    def __init__(
        self, pid: int, sys_dir: str | None, spared: Collection[int], bystanders: frozenset[int]
    ) -> None:
        """For `started` and `of`. `bystanders` were there before the trial."""
        self.seen: frozenset[int] = frozenset()
        """When it has ended: the processes that were there then, so before any trial that begins now. Empty if nobody looked."""
        self.pid = pid
        self._sys_dir = sys_dir
        self._spared = frozenset(spared)
        self._bystanders = bystanders
        self._popen: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        self._waits_for_group = False
        self._is_over = False
        self._gives_up_at_s: float | None = None
        self._left: list[int] = []
        self._cgroup = TrialCgroup.around(pid)

    @classmethod
    def started(
        cls,
        command: str,
        code_dir: str,
        environ: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        spared: Collection[int] = (),
        bystanders: frozenset[int] = frozenset(),
    ) -> "TrialProcess":
        """Start bash with a command; stdout and stderr are appended to files.

        The files are the child's own descriptors: it never waits for its keeper and never dies of a broken pipe. `bystanders`,
        where they are known: the processes that are there now.

        Raises:
            CommandNotStarted: there is no bash, the code folder cannot be entered, or no system takes such a command.
        """
        bystanders = bystanders or _all_pids()
        with _raised_oom_score():
            popen = _popen(command, code_dir, environ, stdout, stderr)
        trial = cls(popen.pid, environ.get(MARKER), spared, bystanders)
        trial._popen = popen
        return trial

    @classmethod
    def of(
        cls,
        pid: int,
        spared: Collection[int] = (),
        *,
        sys_dir: str | None = None,
        bystanders: frozenset[int] = frozenset(),
    ) -> "TrialProcess":
        """A child that runs already, as a fork of a warm interpreter does.

        `sys_dir` is its attempt's folder, which its own environment in /proc need not show, but that of what it starts does.
        `bystanders`, where they are known: the processes that were there when it began.
        """
        own = _oom_score()
        if own is not None:
            _set_oom_score(str(pid), min(own + _OOM_SCORE_RAISE, _HIGHEST_OOM_SCORE))
        return cls(pid, sys_dir, spared, bystanders or _all_pids())

    def poll(self) -> int | None:
        """None while it runs; afterwards its exit code, or -n for signal n.

        When it has ended, nothing it started is left to write into its files, or cannot be got rid of: see `leftovers`. A trial
        that was asked to stop runs until its whole group is gone: a shell dies of the polite signal at once, while
        what it started may still be saving its work. Orphans are reaped on the way. To be called again after a moment
        also when no child has ended since: the last process to go need not be one.
        """
        self._reap()
        if self._status is None or (self._waits_for_group and self._group_lives()):
            return None
        if not self._is_over:
            self._is_over = self._end_everything()
            if self._is_over and self._cgroup is not None:
                self._cgroup.remove()
        return self._status if self._is_over else None

    @property
    def ends_silently(self) -> bool:
        """Whether `poll` may find the end without any child having ended: it is to be called every moment."""
        return self._waits_for_group or (self._status is not None and not self._is_over)

    def signal(self, *, kill: bool) -> None:
        """SIGTERM to every process of its group, or SIGKILL to everything it started, also to what left the group."""
        self._waits_for_group = not kill
        if self._status is None:
            self._signal_group(signal.SIGKILL if kill else signal.SIGTERM)
            if not kill:
                # Whoever was stopped is to have its grace as well.
                self._signal_group(signal.SIGCONT)
        if kill and not self._is_over:
            self._end_everything()

    def leftovers(self) -> tuple[Leftover, ...]:
        """What is still there of a trial that has ended: another user's, or stuck in the kernel. Mostly empty."""
        self._reap()
        self._left = [pid for pid in self._left if not _is_dead(pid)]
        return tuple(Leftover(pid, _command_line(pid)) for pid in self._left)

    # ---- the group

    def _signal_group(self, number: int) -> None:
        # A process that became another user's is beyond reach.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                # In its first moment the fork of a warm interpreter leads no group yet.
                if self._status is None:
                    os.kill(self.pid, number)

    def _group_lives(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def _reap(self) -> None:
        for pid in _ended_children(self._spared):
            if pid == self.pid and not self._waits_for_group:
                # Now, while the dead leader still holds the group's number: later it could be somebody else's.
                self._signal_group(signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if pid == self.pid:
                self._status = os.waitstatus_to_exitcode(status)
                if self._popen is not None:
                    self._popen.returncode = self._status

    # ---- everything

    def _end_everything(self) -> bool:
        """Kill all of it, and wait a moment. Whether that is over: nothing is left, or nothing more can be done about it."""
        now_s = time.monotonic()
        if self._gives_up_at_s is None:
            self._gives_up_at_s = now_s + LONGEST_DEATH_S
        killed: set[int] = set()
        while True:
            if self._cgroup is not None:
                killed.update(self._cgroup.pids())
                self._cgroup.kill()
            self._reap()
            self._left = self._living()
            dying = [pid for pid in self._left if pid in killed or _kill(pid)]
            if not dying:
                return True
            # What was forked just before its parent died comes first, and only then time to die.
            is_new = not killed.issuperset(dying)
            killed.update(dying)
            if not is_new:
                _wait_for_ends(dying, now_s + _SHORT_S)
            if time.monotonic() > now_s + _SHORT_S:
                return time.monotonic() > self._gives_up_at_s

    def _living(self) -> list[int]:
        found = set(descendants((os.getpid(),), self._is_spared))
        if self._cgroup is not None:
            found.update(self._cgroup.pids())
        if self._sys_dir is not None and os.getpid() != 1:
            self.seen = _all_pids()
            new = self.seen - self._bystanders
            found.update(marked((self._sys_dir,), (pid for pid in new if not self._is_spared(pid))))
        return [pid for pid in found if not _is_dead(pid)]

    def _is_spared(self, pid: int) -> bool:
        return bool(self._spared) and pid != self.pid and _session_of(pid) in self._spared


def end_marked(sys_dirs: Collection[str], sessions: Collection[int] = ()) -> int:
    """Kill what attempts of a keeper that is gone have left on this machine, and wait for it; how many processes it was.

    Found by their environment, or by their session. Processes of other users stay.
    """

    def find() -> set[int]:
        pids = _all_pids()
        found = {*marked(sys_dirs, pids), *(pid for pid in pids if sessions and _session_of(pid) in sessions)}
        return found.union(descendants(found))

    return _end_all(find)


def end_below(pid: int) -> None:
    """Kill what this process has started, and what that has, and wait for it. Processes of other users stay."""
    _end_all(lambda: descendants((pid,)))


def _end_all(find: Callable[[], Iterable[int]]) -> int:
    """Kill what is found, and wait for it, until nothing more is found; how many processes it was."""
    gives_up_at_s = time.monotonic() + LONGEST_DEATH_S
    ended: set[int] = set()
    while time.monotonic() < gives_up_at_s:
        dying = [pid for pid in find() if not _is_dead(pid) and _kill(pid)]
        if not dying:
            break
        ended.update(dying)
        _wait_for_ends(dying, gives_up_at_s)
    return len(ended)


def marked(sys_dirs: Iterable[str], pids: Iterable[int]) -> list[int]:
    """Those of the processes that were started with the folder of one of these attempts as their NNI_SYS_DIR."""
    wanted = [os.fsencode(f"\0{MARKER}={sys_dir}\0") for sys_dir in sys_dirs]
    found = []
    for pid in pids:
        # It may be gone, or another user's.
        with contextlib.suppress(OSError):
            environ = b"\0%b\0" % read_all(f"/proc/{pid}/environ")
            if any(entry in environ for entry in wanted):
                found.append(pid)
    return found


def descendants(pids: Iterable[int], is_left_out: Callable[[int], bool] = lambda _: False) -> list[int]:
    """Children of these processes, their children, and so on, without those left out and what is below them.

    What forks or dies meanwhile may be missed.
    """
    found: list[int] = []
    following = list(pids)
    while following:
        children = [pid for pid in _children(following.pop()) if not is_left_out(pid)]
        found += children
        following += children
    return found


def ancestors() -> list[int]:
    """The parent of this process, its parent, and so on."""
    found = [os.getppid()]
    with contextlib.suppress(OSError):
        while found[-1] > 1:
            found.append(int(_fields_of(read_all(f"/proc/{found[-1]}/stat"))[1]))
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        # Of a keeper's threads, a dozen, only the first starts processes, and adopts orphans.
        for thread in (pid,) if pid == os.getpid() else os.listdir(f"/proc/{pid}/task"):
            children += map(int, read_all(f"/proc/{pid}/task/{thread}/children").split())
    except OSError:
        if os.path.exists("/proc/thread-self/children"):
            return children  # it, or one of its threads, is gone
        # A kernel without these files, which take a tenth of the time.
        import psutil  # 15 ms that few keepers need

        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
    return children


def _ended_children(spared: frozenset[int]) -> Iterator[int]:
    """Children that ended and were not waited for. The caller waits for each before it asks for the next."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, look)) is not None:
            if ended.si_pid in spared:
                break
            yield ended.si_pid
        else:
            return
        # The spared one hides what ended after it, until its owner has waited for it.
        for pid in _children(os.getpid()):
            if pid not in spared and os.waitid(os.P_PID, pid, look) is not None:
                yield pid


def _wait_for_ends(pids: Iterable[int], deadline_s: float) -> None:
    """Until all of them, killed before, have ended, or it is time. Children are not reaped."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        except OSError:  # a kernel before 5.3, or too many open files
            while not _is_dead(pid) and time.monotonic() < deadline_s:
                time.sleep(_LOOK_AGAIN_S)
            continue
        try:
            end = select.poll()
            end.register(descriptor, select.POLLIN)
            end.poll(max(deadline_s - time.monotonic(), 0.0) * 1e3)
        finally:
            os.close(descriptor)


def _kill(pid: int) -> bool:
    """Whether it is going to end."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def _is_dead(pid: int) -> bool:
    """Whether there is no such process, or only its entry until somebody waits for it."""
    try:
        stat = read_all(f"/proc/{pid}/stat")
    except OSError:
        return True
    return _fields_of(stat)[0] in b"ZX"


def _fields_of(stat: bytes) -> list[bytes]:
    """The state, the parent and what follows. The name before them stands in brackets and may hold anything.

    Source: proc_pid_stat(5).
    """
    return stat[stat.rindex(b")") + 2 :].split()


def _session_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            read_all(f"/proc/{pid}/cmdline")
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()[:_LONGEST_SHOWN]
        )
    return ""


def _all_pids() -> frozenset[int]:
    return frozenset(map(int, filter(str.isdecimal, os.listdir("/proc"))))


@contextlib.contextmanager
def _raised_oom_score() -> Iterator[None]:
    """Have the kernel end what is started meanwhile, and what that starts, before the one that watches it.

    The child inherits it: a moment later it may have children of its own that do not.
    """
    own = _oom_score()
    if own is not None:
        _set_oom_score("self", min(own + _OOM_SCORE_RAISE, _HIGHEST_OOM_SCORE))
    try:
        yield
    finally:
        if own is not None:
            _set_oom_score("self", own)


def _oom_score() -> int | None:
    with contextlib.suppress(OSError):
        return int(read_all("/proc/self/oom_score_adj"))
    return None


def _set_oom_score(process: str, score: int) -> None:
    # Where /proc is read-only, or the process is gone, it goes without. To lower a score to what it was is always allowed.
    with contextlib.suppress(OSError):
        write_all(os.open(f"/proc/{process}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC), b"%d" % score)


def _popen(
    command: str, code_dir: str, environ: Mapping[str, str], stdout: Path, stderr: Path
) -> subprocess.Popen[bytes]:
    if not os.path.isdir(code_dir):
        raise CommandNotStarted(
            f"cannot enter the code folder {code_dir}: there is no such folder here; check codeDir in the experiment file"
        )
    shown = repr(command if len(command) <= _LONGEST_SHOWN else command[:_LONGEST_SHOWN] + "...")
    with open(stdout, "ab") as out, open(stderr, "ab") as err:
        try:
            return subprocess.Popen(
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
