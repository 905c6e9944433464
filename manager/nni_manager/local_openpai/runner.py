"""Containers as processes: starts their supervisors, watches them, ends them, finds them again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nni_manager.local_openpai import supervisor
from nni_manager.local_openpai.core.exits import (
    CONTAINER_NOT_MADE,
    IMAGE_NOT_FOUND,
    KILLED,
    NODE_LOST,
    NOT_CREATED,
    SEARCHED_BYTES,
    Exit,
    container_exit,
)
from nni_manager.local_openpai.core.job import StartContainer, Task
from nni_manager.local_openpai.core.plan import JobPlan
from nni_manager.local_openpai.environment import CONTAINER_ID, inherited, task_variables
from nni_manager.local_openpai.planning import RUNTIME_DIR
from nni_manager.local_openpai.sandbox import (
    RUNTIME_IN_CONTAINER,
    container_tool,
    end_command,
    registry_logins,
    sandbox_commands,
)
from nni_manager.local_openpai.settings import ClusterSettings, Sandbox
from nni_manager.local_openpai.starter import NotStarted, Starter, program

logger = logging.getLogger(__name__)

# An init script's failure, of whatever code, is this one.
_INIT_FAILED = 1
# What the original tells of a failed task's output.
_LAST_LINES = 15
_LAST_BYTES = 2048
# What podman, docker and registries say of an image that is not there, or that this user may not have.
_NO_IMAGE = re.compile(
    "manifest unknown|not found|no such image|does not exist|access denied|unauthorized", re.IGNORECASE
)
_KILL_ROUNDS = 5
# Starting a process blocks for a millisecond or two; the machine has no use for many at a time.
_THREADS = 4
_SUPERVISOR_DELAY_S = 20.0


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the cluster keeps what."""

    state_dir: Path

    @property
    def database(self) -> Path:
        """Jobs, and what became of them."""
        return self.state_dir / "cluster.sqlite"

    @property
    def lock(self) -> Path:
        """Held by the cluster that uses the folder."""
        return self.state_dir / "lock"

    @property
    def containers(self) -> Path:
        """A folder for each container that may run."""
        return self.state_dir / "containers"

    @property
    def logs(self) -> Path:
        """Logs, until their job is deleted."""
        return self.state_dir / "logs"

    def container(self, container_id: str) -> Path:
        """The folder of one container."""
        return self.containers / container_id

    def logs_of_job(self, debug_id: str) -> Path:
        """The logs of all containers of a job."""
        return self.logs / debug_id

    def logs_of(self, debug_id: str, mangled_role: str, container_id: str) -> Path:
        """The logs of one container."""
        return self.logs_of_job(debug_id) / mangled_role / container_id


@dataclass(slots=True)
class _Container:
    """One that runs, or is about to. `descriptor` is readable when its process ends, whoever its parent is."""

    plan: JobPlan
    logs: Path
    descriptor: int | None = None
    stop_is_wanted: bool = False
    killing: asyncio.TimerHandle | None = None


class Runner:
    """The containers of this machine. To be used from one event loop."""

    def __init__(
        self,
        settings: ClusterSettings,
        on_started: Callable[[str], None],
        on_ended: Callable[[str, Exit], None],
    ) -> None:
        """`on_started` and `on_ended` are told a container's id, once each.

        Raises:
            SandboxMissing: tasks are to run in containers, and nothing here makes any.
        """
        self._settings = settings
        self._folders = Folders(settings.state_dir)
        self._on_started = on_started
        self._on_ended = on_ended
        self._containers: dict[str, _Container] = {}
        self._tool = None if settings.sandbox is Sandbox.PROCESS else container_tool()
        self._starter = Starter()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="containers")
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- what the cluster asks for

    def start(self, plan: JobPlan, effect: StartContainer) -> None:
        """Start a container; what comes of it is told."""
        self._containers[effect.task.container_id] = _Container(plan, self._logs(plan, effect.task))
        self._soon(self._start(plan, effect), effect.task.container_id)

    def adopt(self, plan: JobPlan, task: Task) -> None:
        """Find out what became of a container of an earlier cluster, and watch it if it runs."""
        self._containers[task.container_id] = _Container(plan, self._logs(plan, task))
        self._soon(self._adopt(task.container_id), task.container_id)

    def stop(self, container_id: str) -> None:
        """End a container, with grace. One that is unknown has ended."""
        container = self._containers.get(container_id)
        if container is not None:
            container.stop_is_wanted = True
            self._pass_stop_on(container_id, container)

    def forget(self, container_id: str) -> None:
        """Its end is stored: its folder may go."""
        self._soon(self._in_thread(_remove, self._folders.container(container_id)))

    def remove_others(self, container_ids: Iterable[str]) -> None:
        """Remove the folders of all containers but these."""
        known = set(container_ids)
        with contextlib.suppress(FileNotFoundError):
            for folder in self._folders.containers.iterdir():
                if folder.name not in known:
                    _remove(folder)

    async def close(self) -> None:
        """Stop watching. Containers go on."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        for container in self._containers.values():
            self._unwatch(container)
        self._containers.clear()
        await self._in_thread(self._starter.close)
        self._threads.shutdown()

    # ---- starting

    async def _start(self, plan: JobPlan, effect: StartContainer) -> None:
        container_id = effect.task.container_id
        try:
            process = await self._in_thread(self._started, plan, effect)
        except (OSError, NotStarted) as error:
            problem = (
                f"cannot start a process for it: {error}; free memory, disk or processes on this machine"
            )
            self._ended(container_id, Exit(NOT_CREATED, diagnostics=problem))
            return
        self._watch(container_id, process)

    def _started(self, plan: JobPlan, effect: StartContainer) -> dict[str, Any]:
        folder = self._folders.container(effect.task.container_id)
        runtime, work = folder / "runtime", folder / "work"
        for path in (folder, runtime, work):
            path.mkdir(mode=0o700, parents=True)
        if self._tool is not None:
            runtime.chmod(
                0o777
            )  # an image's own user runs them; nobody else of this machine gets into the folder above
        seen = str(runtime) if self._tool is None else RUNTIME_IN_CONTAINER
        stages = []
        role = plan.role(effect.task.role)
        for stage, scripts in (
            ("init", role.init),
            ("pre", role.pre),
            ("user", (role.user,)),
            ("post", role.post),
        ):
            for number, script in enumerate(scripts):
                path = runtime / f"{stage}-{number}.sh"
                path.write_text(script.replace(RUNTIME_DIR, shlex.quote(seen)), encoding="utf-8")
                stages.append((stage, f"{seen}/{path.name}"))
        variables = task_variables(plan, effect.job_attempt_id, effect.task, effect.tasks, str(work))
        sandbox = None
        mounts = self._mounts(plan)
        if self._tool is not None:
            gpus = effect.task.place.gpus if effect.task.place is not None else ()
            made = sandbox_commands(self._tool, effect.task.container_id, role, folder, mounts, gpus)
            sandbox, mounts = made.to_spec(), []
            # The tool takes a line for each, and no variable of OpenPAI has two.
            lines = "".join(f"{name}={value}\n" for name, value in variables.items())
            (folder / "environ").write_text(lines, encoding="utf-8")
            if role.image_auth is not None:
                (folder / "config.json").write_text(registry_logins(role.image_auth), encoding="utf-8")
        spec = {
            "sandbox": sandbox,
            "stages": stages,
            "environ": {**inherited(os.environ), **variables},
            "work_dir": str(work),
            "logs": str(self._containers[effect.task.container_id].logs),
            "log_file_bytes": self._settings.log_file_bytes,
            "old_log_files": self._settings.old_log_files,
            "grace_s": self._settings.grace_s,
            "secrets": plan.secrets,
            "mounts": mounts,
        }
        (folder / supervisor.SPEC).write_text(json.dumps(spec), encoding="utf-8")
        return self._starter.start(folder)

    def _mounts(self, plan: JobPlan) -> list[dict[str, Any]]:
        storages = {storage.name: storage for storage in self._settings.storages}
        for mount in plan.storages:
            if mount.name not in storages:
                raise NotStarted(
                    f"storage {mount.name} is gone since it was submitted; start the cluster with it"
                )
        return [
            {
                "name": mount.name,
                "path": str(storages[mount.name].path),
                "mount_path": mount.mount_path,
                "is_read_only": storages[mount.name].is_read_only,
            }
            for mount in plan.storages
        ]

    def _logs(self, plan: JobPlan, task: Task) -> Path:
        return self._folders.logs_of(plan.debug_id, plan.role(task.role).mangled_name, task.container_id)

    # ---- watching

    async def _adopt(self, container_id: str) -> None:
        folder = self._folders.container(container_id)
        try:
            process = await self._in_thread(_process_of, folder)
        except OSError as error:
            self._ended(container_id, Exit(NODE_LOST, diagnostics=f"cannot read {folder}: {error}"))
            return
        except (ValueError, KeyError):  # a disk that lost what was written there, as with the machine's power
            await self._finish(container_id)
            return
        if process is None:
            problem = "the cluster was ended before it had started this container; nothing of it ran"
            self._ended(container_id, Exit(NOT_CREATED, diagnostics=problem))
        elif process["boot_id"] == supervisor.boot_id():
            self._watch(container_id, process)
        else:
            await self._finish(container_id)

    def _watch(self, container_id: str, process: dict[str, Any]) -> None:
        """Watch this very process, or learn how it ended."""
        container = self._containers[container_id]
        with contextlib.suppress(ProcessLookupError):
            container.descriptor = os.pidfd_open(process["pid"])
        self._on_started(container_id)
        # What has the number now may be another process, but what has the descriptor stays the same.
        if container.descriptor is None or supervisor.process_identity(process["pid"]) != process:
            self._note_end(container_id)
            return
        asyncio.get_running_loop().add_reader(container.descriptor, self._note_end, container_id)
        if container.stop_is_wanted:
            self._pass_stop_on(container_id, container)

    def _note_end(self, container_id: str) -> None:
        self._unwatch(self._containers[container_id])
        self._soon(self._finish(container_id), container_id)

    def _unwatch(self, container: _Container) -> None:
        if container.killing is not None:
            container.killing.cancel()
        if container.descriptor is not None:
            asyncio.get_running_loop().remove_reader(container.descriptor)
            os.close(container.descriptor)
            container.descriptor = None

    def _pass_stop_on(self, container_id: str, container: _Container) -> None:
        if container.descriptor is None:
            return  # as soon as there is a process
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(container.descriptor, signal.SIGTERM)
        container.killing = asyncio.get_running_loop().call_later(
            self._settings.grace_s + _SUPERVISOR_DELAY_S, self._kill, container_id
        )

    def _kill(self, container_id: str) -> None:
        container = self._containers.get(container_id)
        if container is not None and container.descriptor is not None:
            logger.warning("container %s does not end: its supervisor is killed", container_id)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(container.descriptor, signal.SIGKILL)

    async def _finish(self, container_id: str) -> None:
        container = self._containers[container_id]
        folder = self._folders.container(container_id)
        ended = await self._in_thread(_exit_of, container_id, folder, container)
        if self._tool is not None and ended.code in (KILLED, NODE_LOST):
            await self._in_thread(_run_quietly, end_command(self._tool, container_id))
        self._ended(container_id, ended)

    def _ended(self, container_id: str, ended: Exit) -> None:
        del self._containers[container_id]
        self._on_ended(container_id, ended)

    # ---- threads

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    def _soon(self, work: Any, container_id: str | None = None) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, container_id))

    def _done(self, container_id: str | None, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        logger.error("cannot look after a container: this is a bug", exc_info=task.exception())
        if container_id in self._containers:
            # No bug may hold its place for ever.
            self._unwatch(self._containers[container_id])
            problem = f"cannot look after it, which is a bug of the cluster: {task.exception()!r}; report it"
            self._ended(container_id, Exit(NODE_LOST, diagnostics=problem))


def _process_of(folder: Path) -> dict[str, Any] | None:
    """Which process a container's supervisor is; None if there is none, and never will be."""
    if not folder.is_dir():
        return None
    nobody = {"pid": None}
    if supervisor.claim(folder, nobody):
        return None
    document: dict[str, Any] = json.loads((folder / supervisor.PROCESS).read_text(encoding="utf-8"))
    return None if document == nobody else document


def _exit_of(container_id: str, folder: Path, container: _Container) -> Exit:
    """How a container ended whose process is gone. Nothing of it is left afterwards."""
    try:
        record = json.loads((folder / supervisor.EXIT).read_text(encoding="utf-8"))
    except OSError:
        return _lost(container_id, folder)
    stage, code = record["stage"], record["exit_code"]
    if code == 0:
        return Exit(0, container_exit_code=0, origin_user_exit_code=0)
    if stage == supervisor.BEGIN:
        return _not_made(container.logs)
    if stage == "init":
        kept = code if code > 128 else _INIT_FAILED
        said = f"an init script of a plugin failed with exit code {code}; see runtime.log"
        return Exit(kept, container_exit_code=kept, diagnostics=said)
    if stage == "user":
        found = container_exit(code, _tail(container.logs / supervisor.LOG_FOLDERS["all"], SEARCHED_BYTES))
        return Exit(
            found.code,
            container_exit_code=found.code,
            origin_user_exit_code=code,
            diagnostics=_said(f"the commands ended with exit code {code}", container.logs),
            matched_log=found.matched_log,
        )
    found = container_exit(code, "")
    when = "before" if stage == "pre" else "after"
    said = f"what runs {when} the commands failed with exit code {code}; see runtime.log"
    return Exit(
        found.code,
        container_exit_code=found.code,
        origin_user_exit_code=None if stage == "pre" else 0,
        diagnostics=said,
    )


def _not_made(logs: Path) -> Exit:
    said = _tail(logs / supervisor.LOG_FOLDERS["runtime.log"], _LAST_BYTES)
    code = IMAGE_NOT_FOUND if _NO_IMAGE.search(said) else CONTAINER_NOT_MADE
    return Exit(code, diagnostics=f"its container could not be made:\n{said}")


def _run_quietly(command: list[str]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=_SUPERVISOR_DELAY_S, check=False)


def _lost(container_id: str, folder: Path) -> Exit:
    end_marked(container_id)
    with contextlib.suppress(OSError, ValueError, KeyError):
        process = json.loads((folder / supervisor.PROCESS).read_text(encoding="utf-8"))
        if process["boot_id"] == supervisor.boot_id():
            return Exit(
                KILLED,
                container_exit_code=KILLED,
                diagnostics="its supervisor was killed, and with it all that it had started; see who kills processes here",
            )
    return Exit(NODE_LOST, diagnostics="this machine was restarted while it ran")


def end_marked(container_id: str) -> None:
    """Kill what a container without its supervisor has left, found by its environment."""
    mark = f"\0{CONTAINER_ID}={container_id}\0".encode()
    for _ in range(_KILL_ROUNDS):
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            # It may be gone, or another user's.
            with contextlib.suppress(OSError):
                if mark in b"\0%b\0" % Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # what was killed dies, and what it forked just before shows itself


def _said(what: str, logs: Path) -> str:
    lines = _tail(logs / supervisor.LOG_FOLDERS["all"], _LAST_BYTES).splitlines()[-_LAST_LINES:]
    return "\n".join([f"{what}; its last words:", *lines]) if lines else f"{what} and said nothing"


def _tail(folder: Path, most_bytes: int) -> str:
    try:
        with (folder / supervisor.CURRENT).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def mounts_work() -> bool:
    """Whether storages can be shown at the paths that jobs want."""
    probe = program(supervisor.MOUNT_PROBE)
    try:
        return subprocess.run(probe, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
