"""A trial's processes: a command that leads its own session, and everything it starts.

Theory of operation. The keeper adopts orphans. So everything that the trial started stays below the keeper, even a process that
double forks, leaves its group, creates a session or closes its descriptors. Processes that
another program started for the trial are found by their environment. Reading the environments of all processes of a machine is
expensive, so pre-existing pids are skipped. Process 1 of a namespace has all processes below it. Cleanup kills round after
round until two scans in a row find nothing. A process can fork while others die, but not after it was sent SIGKILL. A scan can
miss a process that forks, executes or is adopted at that moment.

A trial is registered before it executes: a shell blocks on a pipe, its stdin, until `register` has returned, and only then
executes bash with the command. So the cleanup after a killed keeper knows the pid and the session of every process, also of those
that BASH_ENV starts. EOF on the pipe signals the keeper's death, and the shell exits.
"""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from trial_keeper import processes
from trial_keeper.errors import CommandNotStarted, KeeperRetryableError
from trial_keeper.exit_codes import of_signal
from trial_keeper.host.attempt_files import not_writable
from trial_keeper.host.cgroups import TrialCgroup
from trial_keeper.wire.safe_open import open_to_append
from trial_keeper.wire.small_files import read_all, write_all
from trial_keeper.wire.workspace import MARKER

_MAX_SHOWN = 200
# The maximum time for which the keeper's loop blocks. Most killed processes end within a millisecond.
_SHORT_S = 0.05
# sh sources no file at start. TMOUT would end the wait.
# With -e and pipefail a failure inside a pipe or before the last line fails the trial.
_START_GATE = 'TMOUT= read -r _ && exec "$0" -e -o pipefail -c "$1" </dev/null'
# Equals half of all memory: the kernel kills the trial before the keeper, but before other programs only if the trial is large.
_OOM_SCORE_RAISE = 500
# A cluster that cancels a job may signal all its processes, and the keeper last. Slurm's node needs milliseconds for that.
_SIGNAL_LAG_S = 1.0
_BY_SIGTERM = (-signal.SIGTERM, of_signal(signal.SIGTERM))
_HIGHEST_OOM_SCORE = 1000
# Limits on processes, memory or open files, of the user, the container or the machine.
_EXHAUSTED = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def exhausted(what: str, error: OSError) -> KeeperRetryableError:
    """The error for a process that cannot be started, because this machine has no more processes, memory or open files."""
    return KeeperRetryableError(
        f"cannot start {what}: {error.strerror}; raise the limits on processes, memory and open files here, or run "
        "fewer trials at a time"
    )


class TrialProcess:
    """A child of this process that leads a session, with everything it started. Only one may exist at a time.

    All children of this process count as the trial's and are reaped, except those in `exempt_sessions`. An exempt child leads a
    session too. That whole session and its descendants are left alone, and the child's owner waits for it.
    """

    def __init__(
        self,
        pid: int,
        exempt_sessions: Collection[int] = (),
        *,
        sys_dir: str | None = None,
        preexisting_pids: frozenset[int] = frozenset(),
        popen: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """Wrap a child that runs already: a fork of a warm interpreter, or `popen`, which `started` has started.

        `sys_dir` is the attempt's folder. /proc need not show that folder in the child's own environment, but shows it in those
        of its children. `preexisting_pids`: the processes that existed at its start, if known.
        """
        if popen is None:
            _raise_oom_score(str(pid))
        self.seen: frozenset[int] = frozenset()
        """All processes at the trial's end, which predate any later trial. Empty if not scanned."""
        self.pid = pid
        self._sys_dir = sys_dir
        self._exempt_sessions = frozenset(exempt_sessions)
        self._preexisting_pids = preexisting_pids or processes.all_pids()
        self._popen = popen
        self._status: int | None = None
        self._waits_for_group = False
        self._was_signalled = False
        self._ended_at_s = 0.0
        self._is_over = False
        self._deadline_s: float | None = None
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
        exempt_sessions: Collection[int] = (),
        preexisting_pids: frozenset[int] = frozenset(),
        register: Callable[[int], None] | None = None,
    ) -> "TrialProcess":
        """Start bash with a command; stdout and stderr are appended to files.

        The child has its own descriptors of the files, so it never waits for the keeper and never gets SIGPIPE.
        `preexisting_pids`: the processes that exist now, if known. `register` is called with the pid, which is also the session
        id, before the command executes.

        Raises:
            CommandNotStarted: there is no bash, the code folder cannot be entered, or the system rejects the command.
            KeeperRetryableError: processes, memory or open files are exhausted.
            WorkspaceNotWritable: the files of its output cannot be opened.
        """
        preexisting_pids = preexisting_pids or processes.all_pids()
        try:
            gate, release = os.pipe()
        except OSError as error:
            raise exhausted("the trial's command", error) from error
        try:
            with _raised_oom_score():
                popen = _popen(command, code_dir, environ, gate, stdout, stderr)
            if register is not None:
                register(popen.pid)
            with contextlib.suppress(BrokenPipeError):  # the shell was killed
                os.write(release, b"\n")
        finally:
            os.close(gate)
            os.close(release)
        return cls(
            popen.pid,
            exempt_sessions,
            sys_dir=environ.get(MARKER),
            preexisting_pids=preexisting_pids,
            popen=popen,
        )

    def poll(self) -> int | None:
        """Return None while the trial runs; afterwards its exit code, or -n for signal n.

        After the end no process of the trial can write to the files, except `leftovers`. A trial that is being stopped runs until
        its whole group is gone: a shell dies of SIGTERM at once, while its children may still save their work. `poll` also reaps
        orphans. Poll repeatedly even if no child has ended since: the last process need not be a child.
        """
        self._reap()
        if self._status is None or (self._waits_for_group and processes.signal_group(self.pid, 0)):
            return None
        if self._awaits_signal:
            return None
        if not self._is_over:
            self._is_over = self._end_everything()
            if self._is_over and self._cgroup is not None:
                self._cgroup.remove()
        return self._status if self._is_over else None

    @property
    def ends_silently(self) -> bool:
        """True if `poll` may find the end without the end of a child: poll it at a short interval."""
        return self._waits_for_group or (self._status is not None and not self._is_over)

    def signal(self, *, kill: bool) -> None:
        """Send SIGTERM to every process of the trial's group, or SIGKILL to all its processes, also outside the group."""
        self._waits_for_group, self._was_signalled = not kill, True
        if self._status is None:
            self._signal_group(signal.SIGKILL if kill else signal.SIGTERM)
            if not kill:
                # A process that is stopped could not use its grace period.
                self._signal_group(signal.SIGCONT)
        if kill and not self._is_over:
            self._end_everything()

    @property
    def _awaits_signal(self) -> bool:
        """True for a moment after a SIGTERM that the keeper has not sent, and may be about to receive itself."""
        is_sudden = self._status in _BY_SIGTERM and not self._was_signalled
        return is_sudden and time.monotonic() < self._ended_at_s + _SIGNAL_LAG_S

    def leftovers(self) -> tuple[str, ...]:
        """Pid and command line of the remaining processes of an ended trial: another user's, or stuck in the kernel.

        Usually empty.
        """
        self._reap()
        self._left = [pid for pid in self._left if not processes.is_dead(pid)]
        return tuple(f"{pid} ({_command_line(pid)})" for pid in self._left)

    # ---- the group

    def _signal_group(self, number: int) -> None:
        # The fork of a warm interpreter leads no group until it has called setsid.
        if not processes.signal_group(self.pid, number) and self._status is None:
            processes.is_sent(self.pid, number)

    def _reap(self) -> None:
        for pid in _ended_children(self._exempt_sessions):
            if pid == self.pid and not self._waits_for_group:
                # Signal the group before the wait: afterwards the group id can be reused.
                self._signal_group(signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if pid == self.pid:
                self._status, self._ended_at_s = os.waitstatus_to_exitcode(status), time.monotonic()
                if self._popen is not None:
                    self._popen.returncode = self._status

    # ---- everything

    def _end_everything(self) -> bool:
        """Kill all processes of the trial, and wait briefly. True if none is left, or if the deadline has passed."""
        now_s = time.monotonic()
        self._deadline_s = self._deadline_s or now_s + processes.MAX_DEATH_S
        killed: set[int] = set()
        empty_scans = 0
        while True:
            if self._cgroup is not None:
                killed.update(self._cgroup.pids())
                self._cgroup.kill()
            self._reap()
            self._left = self._living()
            dying = [pid for pid in self._left if pid in killed or processes.kill(pid)]
            empty_scans = 0 if dying else empty_scans + 1
            if empty_scans == processes.EMPTY_SCANS:
                return True
            # First find processes that were forked just before their parents died; only then wait for the ends.
            is_new = not killed.issuperset(dying)
            killed.update(dying)
            if not is_new:
                processes.wait_for_ends(dying, now_s + _SHORT_S)
            if time.monotonic() > now_s + _SHORT_S:
                return time.monotonic() > self._deadline_s

    def _living(self) -> list[int]:
        found = set(processes.descendants((os.getpid(),), self._is_exempt))
        if self._cgroup is not None:
            found.update(self._cgroup.pids())
        if self._sys_dir is not None and os.getpid() != 1:
            self.seen = processes.all_pids()
            new = self.seen - self._preexisting_pids
            found.update(marked((self._sys_dir,), (pid for pid in new if not self._is_exempt(pid))))
        return [pid for pid in found if not processes.is_dead(pid)]

    def _is_exempt(self, pid: int) -> bool:
        exempt = self._exempt_sessions
        return bool(exempt) and pid != self.pid and processes.session_of(pid) in exempt


def marked(sys_dirs: Iterable[str], pids: Iterable[int]) -> list[int]:
    """Filter the processes that were started with one of these attempts' folders as NNI_SYS_DIR."""
    wanted = [os.fsencode(f"\0{MARKER}={sys_dir}\0") for sys_dir in sys_dirs]
    found = []
    for pid in pids:
        # The process may be gone, or another user's.
        with contextlib.suppress(OSError):
            environ = b"\0%b\0" % read_all(f"/proc/{pid}/environ")
            if any(entry in environ for entry in wanted):
                found.append(pid)
    return found


def end_marked(sys_dirs: Collection[str], sessions: Collection[int] = ()) -> int:
    """Kill the processes that attempts of a dead keeper have left on this machine, and wait for their end. Returns their number.

    The processes are found by their environment, by these sessions or a session that such a process leads, by the control group
    of these sessions' leaders, and by ancestry. Processes of other users survive, unless they are in the control group.
    """
    groups = [group for session in sessions if (group := TrialCgroup.of(session)) is not None]

    def find() -> set[int]:
        for group in groups:
            group.kill()
        in_groups = (pid for group in groups for pid in group.pids())
        return processes.families([*marked(sys_dirs, processes.all_pids()), *in_groups], sessions)

    ended = processes.end_all(find)
    for group in groups:
        group.remove()
    return ended


def _ended_children(exempt_sessions: frozenset[int]) -> Iterator[int]:
    """Yield children that ended and were not waited for. The caller must wait for each child before the next step."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, options)) is not None:
            if ended.si_pid in exempt_sessions:
                break
            yield ended.si_pid
        else:
            return
        # `waitid(P_ALL)` returns an ended exempt child until its owner has waited for it. So each other child is checked.
        for pid in processes.children(os.getpid()):
            if pid not in exempt_sessions and os.waitid(os.P_PID, pid, options) is not None:
                yield pid


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            read_all(f"/proc/{pid}/cmdline")
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()[:_MAX_SHOWN]
        )
    return ""


@contextlib.contextmanager
def _raised_oom_score() -> Iterator[None]:
    """Raise this process's OOM score, so that the kernel kills processes started meanwhile before their keeper.

    The children inherit the score. Setting it after their start would miss grandchildren.
    """
    own = _raise_oom_score("self")
    try:
        yield
    finally:
        if own is not None:
            _set_oom_score("self", own)


def _raise_oom_score(process: str) -> int | None:
    """Set a score that is higher than this process's own. Returns this process's own score, or None without one."""
    try:
        own = int(read_all("/proc/self/oom_score_adj"))
    except OSError:
        return None
    _set_oom_score(process, min(own + _OOM_SCORE_RAISE, _HIGHEST_OOM_SCORE))
    return own


def _set_oom_score(process: str, score: int) -> None:
    # Optional: fails if /proc is read-only or the process is gone. Restoring a previous lower score is always allowed.
    with contextlib.suppress(OSError):
        write_all(os.open(f"/proc/{process}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC), b"%d" % score)


def _popen(
    command: str, code_dir: str, environ: Mapping[str, str], gate: int, stdout: Path, stderr: Path
) -> subprocess.Popen[bytes]:
    """Start the trial's shell, which waits for a line from `gate`."""
    if not os.path.isdir(code_dir):
        raise CommandNotStarted(
            f"cannot enter the code folder {code_dir}: it does not exist in this container; check codeDir in the experiment file"
        )
    shown = repr(command if len(command) <= _MAX_SHOWN else command[:_MAX_SHOWN] + "...")
    with contextlib.ExitStack() as outputs:
        try:
            out, err = (
                outputs.enter_context(open(open_to_append(path.parent, path), "ab"))
                for path in (stdout, stderr)
            )
        except OSError as error:  # the workspace was writable when the attempt was claimed
            raise not_writable(stdout.parent, error) from error
        try:
            bash = shutil.which("bash", path=os.pathsep.join(os.get_exec_path(environ)))
            if bash is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return subprocess.Popen(
                ["/bin/sh", "-c", _START_GATE, bash, command],
                cwd=code_dir,
                env=dict(environ),
                stdin=gate,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            if error.errno in _EXHAUSTED:
                raise exhausted("the trial's command", error) from error
            raise CommandNotStarted(
                f"cannot start bash for the command {shown} in {code_dir}: {error.strerror}; "
                "use an image with bash, a code folder that this user may enter, and a command below 128 KiB"
            ) from error
        except ValueError as error:
            raise CommandNotStarted(
                f"cannot start the command {shown}: {error}; use only printable characters"
            ) from error
