"""Containers as processes: starts, watches and stops their supervisors, and adopts them after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pwd
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nni_manager.local_openpai import sandbox, supervisor
from nni_manager.local_openpai.container_logs import CURRENT, LOG_FOLDERS
from nni_manager.local_openpai.core import exits
from nni_manager.local_openpai.core.exits import TaskExit
from nni_manager.local_openpai.core.job import ContainerEnded, ContainerStarted, StartContainer, Task
from nni_manager.local_openpai.core.plan import JobPlan, RolePlan, SshKeyPair
from nni_manager.local_openpai.environment import CONTAINER_ID, inherited, task_variables
from nni_manager.local_openpai.fork_server import ProcessNotStarted, SupervisorForkServer, program
from nni_manager.local_openpai.planning import RUNTIME_DIR
from nni_manager.local_openpai.settings import ClusterSettings, Sandbox
from nni_manager.store.torn_files import NOT_WHOLE
from nni_manager.support.leftovers import reap_orphans
from nni_manager.support.task_set import TaskSet
from nni_manager.training_services.openpai.protocol import DEFAULT_SHM_MB
from trial_keeper.processes import ProcessIdentity, boot_id
from trial_keeper.wire.safe_open import read_beneath

logger = logging.getLogger(__name__)

# The reported exit code of an init script that failed without a signal.
_INIT_FAILED = 1
# The part of a failed task's output that OpenPAI reports.
_LAST_LINES = 15
_LAST_BYTES = 2048
# Messages of podman, docker and registries for a missing or forbidden image.
_NO_IMAGE = re.compile(
    "manifest unknown|not found|no such image|does not exist|access denied|unauthorized", re.IGNORECASE
)
# A state file of a container is far smaller.
_DOCUMENT_BYTES = 1 << 20
# Starting a process blocks for 1 to 2 ms, so a few threads are enough.
_THREADS = 4
_SUPERVISOR_DELAY_S = 20.0
_NEXT_TRY_S = 1.0
SSHD = "/usr/sbin/sshd"
# Each task that runs sshd or requests shared memory has a mount of its own there.
_OWN_FOLDER = "/dev/shm"


class StatePaths:
    """The paths in the cluster's state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.database = state_dir / "cluster.sqlite"
        self.lock = state_dir / "lock"
        # One folder for each container that is not terminal.
        self.containers = state_dir / "containers"
        # The logs of all jobs that are not deleted, in one folder for each job.
        self.logs = state_dir / "logs"

    def logs_of(self, debug_id: str, mangled_role: str, container_id: str) -> Path:
        """The logs of one container."""
        return self.logs / debug_id / mangled_role / container_id


@dataclass(slots=True)
class _Container:
    """A running or starting container. `descriptor` is a pidfd: it becomes readable when the supervisor ends."""

    logs: Path
    descriptor: int | None = None
    stop_is_requested: bool = False
    killing: asyncio.TimerHandle | None = None


class ContainerRuntime:
    """The containers of this machine. Used from one event loop."""

    def __init__(
        self, settings: ClusterSettings, report: Callable[[ContainerStarted | ContainerEnded], None]
    ) -> None:
        """`report` is called with both events of each container.

        Raises:
            SandboxMissing: tasks are to run in containers, and no container tool is installed.
        """
        self._settings = settings
        self._paths = StatePaths(settings.state_dir)
        self._report = report
        self._containers: dict[str, _Container] = {}
        self._tool = None if settings.sandbox is Sandbox.PROCESS else sandbox.container_tool()
        self._starter = SupervisorForkServer()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="containers")
        self._tasks = TaskSet()

    # ---- commands of the cluster

    def start(self, plan: JobPlan, effect: StartContainer) -> None:
        """Start a container; the callbacks report the outcome."""
        self._add(plan, effect.task, self._start(plan, effect))

    def adopt(self, plan: JobPlan, task: Task) -> None:
        """Watch a container of an earlier cluster, or report its end if the container has ended."""
        self._add(plan, task, self._adopt(task.container_id))

    def _add(self, plan: JobPlan, task: Task, work: Coroutine[Any, Any, None]) -> None:
        role = plan.role(task.role).mangled_name
        logs = self._paths.logs_of(plan.debug_id, role, task.container_id)
        self._containers[task.container_id] = _Container(logs)
        self._soon(work, task.container_id)

    def stop(self, container_id: str) -> None:
        """Stop a container, with a grace period; no-op if the container has ended already."""
        container = self._containers.get(container_id)
        if container is not None:
            container.stop_is_requested = True
            self._send_stop(container_id, container)

    def remove_folder(self, container_id: str) -> None:
        """Remove the folder of a container whose end is stored."""
        self._threads.submit(_remove, self._paths.containers / container_id)

    def remove_others(self, container_ids: Iterable[str]) -> None:
        """Remove the folders of all other containers."""
        known = set(container_ids)
        with contextlib.suppress(FileNotFoundError):
            for folder in self._paths.containers.iterdir():
                if folder.name not in known:
                    _remove(folder)

    async def close(self) -> None:
        """Stop watching. Containers continue."""
        await self._tasks.join()
        for container in self._containers.values():
            self._unwatch(container)
        self._containers.clear()
        await self._in_thread(self._starter.close)
        await asyncio.to_thread(self._threads.shutdown)

    # ---- start

    async def _start(self, plan: JobPlan, effect: StartContainer) -> None:
        container_id = effect.task.container_id
        try:
            process = await self._in_thread(self._start_supervisor, plan, effect)
        except (OSError, ProcessNotStarted) as error:
            # If the fork server was killed, the supervisor may run nevertheless.
            process = await self._in_thread(_running_supervisor, self._paths.containers / container_id)
            if process is None:
                problem = f"cannot start the container's supervisor: {error}; free memory, disk space or processes here"
                self._ended(container_id, TaskExit(exits.NOT_CREATED, diagnostics=problem))
                return
        self._watch(container_id, process)

    def _start_supervisor(self, plan: JobPlan, effect: StartContainer) -> dict[str, Any]:
        folder = self._paths.containers / effect.task.container_id
        runtime, work = folder / "runtime", folder / "work"
        for path in (folder, runtime, work):
            path.mkdir(mode=0o700, parents=True)
        if self._tool is not None:
            runtime.chmod(0o777)  # for the image's user; other users cannot enter the parent folder
        seen = str(runtime) if self._tool is None else sandbox.RUNTIME_IN_CONTAINER
        stages = []
        role = plan.role(effect.task.role)
        scripts_of = {"init": role.init, "pre": role.pre, "user": (role.user,), "post": role.post}
        for stage, scripts in scripts_of.items():
            for number, script in enumerate(scripts):
                path = runtime / f"{stage}-{number}.sh"
                path.write_text(script.replace(RUNTIME_DIR, shlex.quote(seen)), encoding="utf-8")
                stages.append((stage, f"{seen}/{path.name}"))
        variables = task_variables(plan, effect.job_attempt_id, effect.task, effect.tasks, str(work))
        commands = None
        mounts = self._mounts(plan)
        if plan.ssh_keys is not None:
            _write_ssh_keys(runtime / "ssh-secret", plan.ssh_keys)
        if self._tool is None:
            mounts += _own_mounts(role, folder)
            if role.runs_sshd:
                # Open MPI's daemons on one machine fail if they create the same folder in /tmp at the same time. A container has
                # a /tmp of its own; here this is the task's own folder.
                variables["OMPI_MCA_orte_tmpdir_base"] = _OWN_FOLDER
        else:
            gpus = effect.task.allocation.gpus if effect.task.allocation is not None else ()
            commands = sandbox.sandbox_commands(
                self._tool, effect.task.container_id, role, folder, mounts, gpus
            )
            mounts = []
            # The tool reads one variable per line; no variable of OpenPAI contains a newline.
            lines = "".join(f"{name}={value}\n" for name, value in variables.items())
            (folder / "environ").write_text(lines, encoding="utf-8")
            if role.image_auth is not None:
                (folder / "config.json").write_text(
                    sandbox.registry_logins(role.image_auth), encoding="utf-8"
                )
        spec = {
            "sandbox": commands,
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
        mounts = []
        for mount in plan.storages:
            storage = storages.get(mount.name)
            if storage is None:
                raise ProcessNotStarted(
                    f"storage {mount.name} was removed after the job was submitted; start the cluster with this storage"
                )
            mounts.append(
                _mount_of(**asdict(mount), path=str(storage.path), is_read_only=storage.is_read_only)
            )
        return mounts

    # ---- watch

    async def _adopt(self, container_id: str) -> None:
        folder = self._paths.containers / container_id
        try:
            process = await self._in_thread(_process_of, folder)
        except (OSError, *NOT_WHOLE):  # the file lost its content, e.g. in a power failure, or was replaced
            await self._finish(container_id)
            return
        if process is None:
            problem = "the cluster was stopped before it started this container; no script ran"
            self._ended(container_id, TaskExit(exits.NOT_CREATED, diagnostics=problem))
        elif process["boot_id"] == boot_id():
            self._watch(container_id, process)
        else:
            await self._finish(container_id)

    def _watch(self, container_id: str, process: dict[str, Any]) -> None:
        """Watch exactly this process, or report its end if the process has exited."""
        container = self._containers.get(container_id)
        if container is None:  # closed meanwhile
            return
        try:
            container.descriptor = ProcessIdentity.from_json(process).open_pidfd()
        except OSError as error:
            logger.warning(
                "cannot watch container %s yet: %s; end other programs", container_id, error.strerror
            )
            asyncio.get_running_loop().call_later(_NEXT_TRY_S, self._watch, container_id, process)
            return
        self._report(ContainerStarted(container_id))
        if container.descriptor is None:
            self._note_end(container_id)
            return
        asyncio.get_running_loop().add_reader(container.descriptor, self._note_end, container_id)
        if container.stop_is_requested:
            self._send_stop(container_id, container)

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

    def _send_stop(self, container_id: str, container: _Container) -> None:
        if container.descriptor is None:
            return  # `_watch` sends the signals once the process exists
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(container.descriptor, signal.SIGTERM)
            # A stopped process handles SIGTERM only after SIGCONT.
            signal.pidfd_send_signal(container.descriptor, signal.SIGCONT)
        container.killing = asyncio.get_running_loop().call_later(
            self._settings.grace_s + _SUPERVISOR_DELAY_S, self._kill, container_id
        )

    def _kill(self, container_id: str) -> None:
        container = self._containers.get(container_id)
        if container is not None and container.descriptor is not None:
            logger.warning(
                "killing the supervisor of container %s: the container did not end in time", container_id
            )
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(container.descriptor, signal.SIGKILL)

    async def _finish(self, container_id: str) -> None:
        container = self._containers[container_id]
        folder = self._paths.containers / container_id
        ended = await self._in_thread(_exit_of, container_id, folder, container.logs)
        if self._tool is not None and ended.code in (exits.KILLED, exits.NODE_LOST):
            remove = sandbox.end_command(self._tool, container_id)
            await self._in_thread(supervisor.run_tool, remove, _SUPERVISOR_DELAY_S)
        self._ended(container_id, ended)

    def _ended(self, container_id: str, ended: TaskExit) -> None:
        del self._containers[container_id]
        self._report(ContainerEnded(container_id, ended))

    # ---- threads

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    def _soon(self, work: Coroutine[Any, Any, None], container_id: str) -> None:
        self._tasks.spawn(work).add_done_callback(partial(self._done, container_id))

    def _done(self, container_id: str, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        logger.error("cannot watch a container: this is a bug", exc_info=task.exception())
        if container_id in self._containers:
            # Release the allocation even after a bug.
            self._unwatch(self._containers[container_id])
            problem = f"cannot watch the container: {task.exception()!r}; report this bug of the cluster"
            self._ended(container_id, TaskExit(exits.NODE_LOST, diagnostics=problem))


def _write_ssh_keys(folder: Path, keys: SshKeyPair) -> None:
    """Readable for the image's user; other users of this machine cannot enter the container's folder."""
    folder.mkdir()
    (folder / "ssh-publickey").write_text(keys.public, encoding="ascii")
    (folder / "ssh-privatekey").write_text(keys.private, encoding="ascii")


def _own_mounts(role: RolePlan, folder: Path) -> list[dict[str, Any]]:
    """What a container has and a process shares: shared memory, if its size matters, and the user's folder for OpenSSH.

    MPI's processes on one machine exchange messages through files in /dev/shm, whose names are unique only in a container.
    """
    mounts = []
    if role.shm_mb or role.runs_sshd:
        size = {"size_mb": role.shm_mb or DEFAULT_SHM_MB}
        mounts.append(_mount_of(path="tmpfs", mount_path=_OWN_FOLDER, is_required=role.runs_sshd, **size))
    if role.runs_sshd:
        own, home = folder / "home-ssh", _home()
        assert home is not None  # `no_ssh_here` refuses such jobs
        users = home / ".ssh"
        own.mkdir(mode=0o700)
        users.mkdir(mode=0o700, exist_ok=True)
        mounts.append(_mount_of(path=str(own), mount_path=str(users), is_required=True))
    return mounts


def _mount_of(**values: Any) -> dict[str, Any]:
    return {"is_read_only": False, "is_required": False, "size_mb": 0, **values}


def _home() -> Path | None:
    """The home of this user for OpenSSH, whatever HOME is; None if the user has none."""
    with contextlib.suppress(KeyError):  # no entry in the user database
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
        return home if home.is_dir() else None
    return None


def no_ssh_here(settings: ClusterSettings, can_mount: bool) -> str | None:
    """Why tasks cannot run an sshd of their own; None if they can. `can_mount`: the result of `mounts_work`.

    In containers the image decides.
    """
    if settings.sandbox is not Sandbox.PROCESS:
        return None
    if not os.access(SSHD, os.X_OK):
        return f"{SSHD} does not exist; install Debian's openssh-server, or start the service with --sandbox podman"
    if _home() is None:
        return f"user {os.getuid()} has no home directory, where OpenSSH looks for keys; run the service as a user with one"
    if not can_mount:
        return "mount namespaces are not allowed, so tasks would share ~/.ssh; run the service as root, or with --sandbox podman"
    return None


def _process_of(folder: Path) -> dict[str, Any] | None:
    """Identity of a container's supervisor. None if no supervisor has started; the claim then prevents a later start."""
    if not folder.is_dir():
        return None
    unstarted = {"pid": None}
    if supervisor.claim(folder, unstarted):
        return None
    document = _document(folder, supervisor.PROCESS)
    return None if document == unstarted else document


def _running_supervisor(folder: Path) -> dict[str, Any] | None:
    """Identity of a running supervisor whose start was not reported. None if there is none; none starts later, then."""
    with contextlib.suppress(OSError, *NOT_WHOLE):
        process = _process_of(folder)
        if process is not None and ProcessIdentity.from_json(process).is_alive:
            return process
    return None


def _document(folder: Path, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(read_beneath(folder, folder / name, _DOCUMENT_BYTES).data)
    return document


def _exit_of(container_id: str, folder: Path, logs: Path) -> TaskExit:
    """The exit of a container whose supervisor has ended. Ends all remaining processes of the container."""
    path = folder / supervisor.EXIT
    try:
        record = _document(folder, supervisor.EXIT)
        stage, code = record["stage"], int(record["exit_code"])
    except FileNotFoundError:
        return _lost(container_id, folder)
    except (OSError, *NOT_WHOLE) as error:
        _end_leftovers(container_id)
        problem = f"the exit code is unknown: cannot read {path} ({error!r}), e.g. after a power failure or on a full disk"
        return TaskExit(exits.NODE_LOST, diagnostics=problem)
    if code == 0:
        return exits.container_exit(0, "")
    if stage == supervisor.BEGIN:
        return _creation_failure(logs)
    if stage == "init":
        kept = code if code > 128 else _INIT_FAILED
        problem = f"an init script of a plugin failed with exit code {code}; see runtime.log"
        return TaskExit(kept, container_exit_code=kept, diagnostics=problem)
    if stage == "user":
        ended = exits.container_exit(code, _tail(logs / LOG_FOLDERS["all"], exits.SEARCHED_BYTES))
        return replace(ended, diagnostics=_last_output(f"the commands ended with exit code {code}", logs))
    when, origin = ("before", None) if stage == "pre" else ("after", 0)
    problem = f"a script that runs {when} the commands failed with exit code {code}; see runtime.log"
    return replace(exits.container_exit(code, ""), origin_user_exit_code=origin, diagnostics=problem)


def _creation_failure(logs: Path) -> TaskExit:
    output = _tail(logs / LOG_FOLDERS["runtime.log"], _LAST_BYTES)
    code = exits.IMAGE_NOT_FOUND if _NO_IMAGE.search(output) else exits.CONTAINER_NOT_MADE
    return TaskExit(code, diagnostics=f"cannot create the container:\n{output}")


def _end_leftovers(container_id: str) -> None:
    """End the remaining processes of a container without a supervisor, including its keeper and the keeper's guard."""
    reap_orphans(lambda environ: environ.get(CONTAINER_ID) == container_id)


def _lost(container_id: str, folder: Path) -> TaskExit:
    _end_leftovers(container_id)
    try:
        is_of_this_boot = _document(folder, supervisor.PROCESS)["boot_id"] == boot_id()
    except (OSError, *NOT_WHOLE) as error:
        problem = f"cannot read {folder / supervisor.PROCESS}: {error}; the container's processes were ended"
        return TaskExit(exits.NODE_LOST, diagnostics=problem)
    if is_of_this_boot:
        return TaskExit(
            exits.KILLED,
            container_exit_code=exits.KILLED,
            diagnostics="the supervisor and all processes of the container were killed; find out what killed them",
        )
    return TaskExit(exits.NODE_LOST, diagnostics="this machine was restarted while the container was running")


def _last_output(what: str, logs: Path) -> str:
    lines = _tail(logs / LOG_FOLDERS["all"], _LAST_BYTES).splitlines()[-_LAST_LINES:]
    return "\n".join([f"{what}; its last output:", *lines]) if lines else f"{what} without any output"


def _tail(folder: Path, most_bytes: int) -> str:
    try:
        with (folder / CURRENT).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


_remove = partial(shutil.rmtree, ignore_errors=True)


def mounts_work() -> bool:
    """True if storages can be mounted at the paths in jobs."""
    return supervisor.run_tool(program(supervisor.MOUNT_PROBE), 10.0)[0]
