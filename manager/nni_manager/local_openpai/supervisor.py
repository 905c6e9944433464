"""The container supervisor: one process that runs a task's scripts, writes its logs, and records how it ended.

A fork server (`fork_supervisors`) forks the supervisor, which outlives the cluster. The isolated interpreter of the fork server
imports only this module, `container_logs`, `trial_keeper.processes` and the standard library.

Supervisor and cluster communicate through files in the container's folder:

| File | Writer | Content |
|---|---|---|
| spec.json | cluster | what to run, secrets included |
| process.json | supervisor | identity of this process; created once: the first writer prevents another start |
| exit.json | supervisor | how the container ended; written when none of its processes is left |

Once started, the supervisor writes one byte to a pipe of the fork server.

For real containers, `sandbox` in spec.json has four commands: create the container, remove the container, run a script, and
stop the script.

Theory of operation. Each script leads its own session. The supervisor adopts orphans, so all descendants stay below it. When
the last script has ended, the supervisor kills all descendants. SIGTERM goes to the script's process group; after a grace
period SIGKILL goes to every descendant. Output passes through pipes, so that the
supervisor can mask secrets and rotate files.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from nni_manager.local_openpai.container_logs import Streams
from trial_keeper import processes

SPEC, PROCESS, EXIT, STDERR = "spec.json", "process.json", "exit.json", "supervisor.stderr"
BEGIN = "container"
"""The stage that creates the real container, where tasks run in one."""
BEGUN = b"!"
FORKS = "--fork"
"""Program argument: fork a supervisor for each folder read from stdin."""
MOUNT_PROBE = "--mount-probe"
"""Program argument: fail unless storages can be mounted."""

_READ_BYTES = 65536
_POLL_S = 1.0
_TOOL_S = 60.0
# The cluster kills this process soon after the grace period, so a hanging tool must end earlier.
_TOOL_BEFORE_KILL_S = 10.0
# podman detects the exit of a container's monitor process with a delay.
_REMOVALS = 5
_REMOVAL_PAUSE_S = 2.0
# Retry on a full disk: without this file the cluster reports the task as lost.
_EXIT_TRIES = 60
_MAX_MOUNT_SIBLINGS = 500

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000  # linux/sched.h
# linux/mount.h
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_MOVE, _MS_REC, _MS_SLAVE = 1, 32, 4096, 8192, 16384, 1 << 19


def claim(folder: Path, document: Mapping[str, Any]) -> bool:
    """Create process.json with this content; False if it already exists."""
    temporary = folder / f".{PROCESS}.{os.getpid()}"
    _write_durably(temporary, document)
    try:
        os.link(temporary, folder / PROCESS)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def _write_durably(path: Path, document: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        os.fsync(file.fileno())  # otherwise a crash can leave an empty file


class Supervisor:
    """One container, from its first script to the end of its last process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spec: dict[str, Any] = json.loads((folder / SPEC).read_text(encoding="utf-8"))
        self._sandbox: dict[str, list[str]] | None = self._spec["sandbox"]
        self._stops_inside = False
        self._removes_container_first = self._is_removed = False
        self._stop_requested = self._stop_forwarded = False
        self._kill_at_s = float("inf")
        """The end of the grace period."""
        signal.signal(signal.SIGTERM, self._request_stop)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # meant for the process that started the cluster
        secrets = [secret.encode() for secret in self._spec["secrets"]]
        self._child = 0
        self._ended: int | None = None
        waker, wakes = os.pipe()
        limits = self._spec["log_file_bytes"], self._spec["old_log_files"]
        self._streams = Streams(Path(self._spec["logs"]), secrets, *limits, waker)
        for descriptor in (waker, wakes):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def run(self) -> None:
        """Run all stages, end all processes and write exit.json."""
        began_at_s, began_s = time.time(), time.monotonic()
        stage, code = "", 0
        try:
            for problem in mount_storages(self._spec["mounts"], self._folder):
                self._streams.log(problem)
        except MountFailed as error:
            self._streams.log(str(error))
            self._spec["stages"], stage, code = [], "init", 1
        for stage, script in [*([[BEGIN, ""]] if self._sandbox else []), *self._spec["stages"]]:
            if self._stop_requested:
                code = 128 + signal.SIGTERM
                break
            self._streams.log(f"{stage} starts")
            code = self._run_script(stage, script)
            if stage == BEGIN:
                self._removes_container_first = code == 0
            self._streams.log(f"{stage} has ended with exit code {code}")
            if code != 0:
                break
        survivors = self._kill_descendants()
        if self._sandbox and not self._is_removed:
            self._ensure_removed(self._sandbox, was_made=stage != BEGIN or code == 0)
        self._streams.drain()
        if survivors:
            self._streams.log(f"cannot kill the processes {survivors}: they belong to another user, or hang")
        self._write_exit(
            {
                "stage": stage,
                "exit_code": code,
                "was_stopped": self._stop_requested,
                "began_at_s": began_at_s,
                "ended_at_s": began_at_s + time.monotonic() - began_s,
            }
        )

    def _request_stop(self, _number: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM. Only the first one counts: a cluster that was restarted during the stop sends another one."""
        if not self._stop_requested:
            self._kill_at_s = time.monotonic() + self._spec["grace_s"]
            self._stop_requested = True

    def _run_script(self, stage: str, script: str) -> int:
        is_user = stage == "user"
        command = ["bash", script]
        if self._sandbox:
            command = self._sandbox["begin"] if stage == BEGIN else [*self._sandbox["run"], script]
        self._stops_inside = self._sandbox is not None and stage != BEGIN
        try:
            child = subprocess.Popen(
                command,
                cwd=self._spec["work_dir"],
                env=None if self._sandbox else self._spec["environ"],
                stdin=subprocess.DEVNULL,
                stdout=self._streams.writers["stdout" if is_user else "runtime"],
                stderr=self._streams.writers["stderr" if is_user else "runtime"],
                start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509 - the supervisor has one thread
            )
        except OSError as error:
            self._streams.log(
                f"cannot start {command[0]} in {self._spec['work_dir']}: {error.strerror}; install {command[0]}"
            )
            return 127
        self._child, self._ended = child.pid, None
        while not self._is_over():
            self._forward_stop(child.pid)
            if time.monotonic() >= self._kill_at_s:
                self._kill_descendants()
            # Poll, since SIGCHLD does not report a group member that is not a child of this process.
            grace_left_s = max(0.01, self._kill_at_s - time.monotonic())
            self._streams.pump(min(_POLL_S if self._ended is None else 0.05, grace_left_s))
            self._reap()
        self._streams.pump(0)  # what the script wrote last, before the line about its end
        code = self._ended or 0
        child.returncode = code
        return code if code >= 0 else 128 - code

    def _is_over(self) -> bool:
        """True if the script has ended. A stopped script ends with its whole group: the shell may exit before its children."""
        if self._ended is None:
            return False
        is_waited_for = self._stop_requested and time.monotonic() < self._kill_at_s
        return not (is_waited_for and processes.signal_group(self._child, 0))

    def _forward_stop(self, group: int) -> None:
        if self._stop_requested and not self._stop_forwarded:
            self._stop_forwarded = True
            self._streams.log("stop requested")
            if self._stops_inside:
                self._streams.log(run_tool(self._sandbox["stop"] if self._sandbox else [])[1])
                return
            for number in (signal.SIGTERM, signal.SIGCONT):
                processes.signal_group(group, number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._child:
                    self._ended = os.waitstatus_to_exitcode(ended[1])

    def _kill_descendants(self) -> list[int]:
        """Kill all descendants; returns the pids that survived.

        The tool removes a real container first. The container's monitor process is also a descendant, and podman does not
        remove a container whose monitor has been killed.
        """
        if self._sandbox and self._removes_container_first:
            self._removes_container_first = False
            self._try_to_remove(self._sandbox, _TOOL_BEFORE_KILL_S if self._stop_requested else _TOOL_S)
        deadline_s = time.monotonic() + processes.MAX_DEATH_S
        empty_scans = 0
        while True:
            self._reap()
            found = [pid for pid in processes.descendants((os.getpid(),)) if not processes.is_dead(pid)]
            empty_scans = 0 if found else empty_scans + 1
            if empty_scans == processes.EMPTY_SCANS or time.monotonic() > deadline_s:
                return found
            for pid in found:
                processes.kill(pid)
            self._streams.pump(0.01 if found else 0.0)

    def _ensure_removed(self, sandbox: Mapping[str, list[str]], *, was_made: bool) -> None:
        """Retry the removal after all processes have ended. After a failed creation without a stop request, try only once."""
        for _ in range(_REMOVALS):
            self._try_to_remove(sandbox, _TOOL_S)
            if self._is_removed or not (was_made or self._stop_requested):
                return
            until_s = time.monotonic() + _REMOVAL_PAUSE_S
            while (left_s := until_s - time.monotonic()) > 0:
                self._streams.pump(left_s)
        self._streams.log(f"cannot confirm that the container was removed; run `{' '.join(sandbox['end'])}`")

    def _try_to_remove(self, sandbox: Mapping[str, list[str]], within_s: float) -> None:
        self._is_removed, output = run_tool(sandbox["end"], within_s)
        self._streams.log(output)

    def _write_exit(self, document: Mapping[str, Any]) -> None:
        temporary = self._folder / f".{EXIT}"
        for _ in range(_EXIT_TRIES):
            with contextlib.suppress(OSError):
                _write_durably(temporary, document)
                temporary.replace(self._folder / EXIT)
                return
            time.sleep(1.0)


def run_tool(command: list[str], within_s: float = _TOOL_S) -> tuple[bool, str]:
    """Run a command; returns its success and its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"cannot run {command[0]}: {error}; check that it works on this machine"
    output = f"{' '.join(command[:2])}: exit code {done.returncode} {done.stdout}{done.stderr}".strip()
    return done.returncode == 0, output


# ---- storages


class MountFailed(Exception):
    """The storage cannot be mounted; the message has the reason."""


def mount_storages(mounts: list[dict[str, Any]], folder: Path) -> list[str]:
    """Mount storages at the job's paths, for this process and its children. Returns one line for each failure.

    Raises:
        MountFailed: a required mount is missing.
    """
    wanted = [
        mount for mount in mounts if os.path.realpath(mount["path"]) != os.path.realpath(mount["mount_path"])
    ]
    if not wanted:
        return []
    try:
        _enter_namespace()
    except MountFailed as error:
        return [_not_mounted(mount, error) for mount in wanted]
    problems = []
    for mount in wanted:
        try:
            _mount_storage(mount, folder)
        except (MountFailed, OSError) as error:
            problems.append(_not_mounted(mount, error))
    return problems


def _not_mounted(mount: Mapping[str, Any], error: Exception) -> str:
    if mount["size_mb"] or mount["is_required"]:
        problem = f"cannot give this task its own {mount['mount_path']}: {error}; run the cluster as root"
        if mount["is_required"]:
            raise MountFailed(problem) from error
        return problem
    return (
        f"cannot mount storage {mount['name']} at {mount['mount_path']}: {error}; "
        f"use its path {mount['path']}, or run the cluster as root"
    )


def _enter_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    try:
        _call("unshare", _CLONE_NEWNS)
    except MountFailed:
        # An unprivileged process gets the privileges inside a user namespace.
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, content in maps.items():
            Path(f"/proc/self/{name}").write_text(content, encoding="ascii")
    _mount("none", "/", _MS_REC | _MS_SLAVE)


def _mount_storage(mount: Mapping[str, Any], folder: Path) -> None:
    target = os.path.normpath(mount["mount_path"])
    if not os.path.isabs(target) or target == "/" or folder.is_relative_to(target):
        raise MountFailed("the cluster itself uses this path")
    if not os.path.isdir(target):
        _make_mount_point(target, folder)
    if mount["size_mb"]:
        _mount("tmpfs", target, 0, "tmpfs", f"size={mount['size_mb']}m,mode=1777")
        return
    _mount(mount["path"], target, _MS_BIND | _MS_REC)
    if mount["is_read_only"]:
        _mount("none", target, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def _make_mount_point(target: str, folder: Path) -> None:
    """Create a mount point, in a private tmpfs where possible so that it does not appear on the machine itself."""
    above = os.path.dirname(target)
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    if above == "/":
        os.makedirs(target)
        return
    with os.scandir(above) as found:
        entries = list(found)
    if len(entries) > _MAX_MOUNT_SIBLINGS:
        raise MountFailed(f"{above} has too many entries to add a mount point")
    stage = folder / f"mount-{time.time_ns()}"
    stage.mkdir()
    _mount("tmpfs", str(stage), 0, "tmpfs", "mode=0755")
    for entry in entries:
        copy = stage / entry.name
        if entry.is_symlink():
            copy.symlink_to(os.readlink(entry.path))
            continue
        copy.mkdir() if entry.is_dir() else copy.touch()
        _mount(entry.path, str(copy), _MS_BIND | _MS_REC)
    os.makedirs(f"{stage}{target[len(above) :]}")
    _mount(str(stage), above, _MS_MOVE)


def end_with(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends.

    Called between fork and exec. Until the exec nothing else shows that this process belongs to a container, so the cluster would
    not find it after the death of the supervisor.
    """
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent has ended before
        os._exit(1)


def _call(name: str, *arguments: str | int | None) -> None:
    import ctypes  # takes a few milliseconds; only a supervisor needs it

    values = [
        ctypes.c_ulong(each) if isinstance(each, int) else None if each is None else each.encode()
        for each in arguments
    ]
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*values) != 0:
        raise MountFailed(os.strerror(ctypes.get_errno()))


def _mount(source: str, target: str, flags: int, kind: str | None = None, data: str | None = None) -> None:
    _call("mount", source, target, kind, flags, data)


def fork_supervisors() -> None:
    """Read null-terminated folders from stdin and answer each: `BEGUN`, or another byte if its supervisor cannot start."""
    import ctypes  # noqa: F401 - loaded once for all forks

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    rest = b""
    while data := os.read(0, _READ_BYTES):
        *folders, rest = (rest + data).split(b"\0")
        for folder in folders:
            os.write(1, _forked(Path(os.fsdecode(folder))) or b"?")


def _forked(folder: Path) -> bytes:
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.close(reader)
            _become_supervisor(folder, writer)
        except BaseException:  # noqa: BLE001 - the child must never return into the fork server's loop
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        return os.read(reader, 1)
    finally:
        os.close(reader)


def _become_supervisor(folder: Path, writer: int) -> None:
    """Run the container of this folder, unless another process has claimed the folder."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(folder)
    for descriptor, path in enumerate((os.devnull, os.devnull, str(folder / STDERR))):
        _redirect(path, descriptor)
    identity = processes.ProcessIdentity.of(os.getpid())
    assert identity is not None
    if not claim(folder, identity._asdict()):
        return
    processes.adopt_orphans()
    supervisor = Supervisor(folder)
    # From here on a cluster can find and stop this process.
    os.write(writer, BEGUN)
    os.close(writer)
    supervisor.run()


def _redirect(path: str, descriptor: int) -> None:
    opened = os.open(
        path, (os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_APPEND | os.O_CREAT), 0o600
    )
    os.dup2(opened, descriptor)
    os.close(opened)


def start() -> None:
    """Run the function that the program's only argument selects."""
    {FORKS: fork_supervisors, MOUNT_PROBE: _enter_namespace}[sys.argv[1]]()
