"""Starts the process of a manager or of a view, and waits until it is ready."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nni_manager.client import hub_folder
from nni_manager.client.experiments import KnownExperiment
from nni_manager.client.interrupts import deferred_interrupts
from nni_manager.client.manager_client import ManagerClient, ManagerUnresponsive
from nni_manager.client.parent_death_pipe import ParentDeathPipe
from nni_manager.client.preflight import ports_are_free
from nni_manager.config.key_names import key_of
from nni_manager.domain.stop_escalation import MAX_STOP_S
from nni_manager.errors import CANNOT_LISTEN, NniManagerError, UserError
from nni_manager.store.folders import ExperimentExists, ExperimentFolder, ManagerProcess
from nni_manager.store.registry import Registry
from nni_manager.support.plain_text import escaped
from nni_manager.support.web_server_options import WebServerOptions
from trial_keeper.frozen_dataclass import dataclass

if TYPE_CHECKING:
    from nni_manager.config.model import ExperimentSpec

_POLL_S = 0.05
# One read of a small file; a manager needs half a second.
_READY_POLL_S = 0.01
# A manager is usually ready within two seconds, and later with a cold disk cache and under load. A hung one never is.
READY_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 10.0
# A manager writes at least this much before it is ready.
_PROBE_BYTES = 1 << 20
# Children to reap: this process may outlive them, and an unreaped child stays a zombie.
_children: list[subprocess.Popen[bytes]] = []


class ManagerFailed(UserError):
    """cannot start the manager; the last line of its stderr names the cause"""


class ObjectiveMissing(UserError):
    """cannot resume the experiment: its trials run a function; resume it from Python with objective=FUNCTION"""


def create_experiment(
    config: ExperimentSpec,
    ports: Iterable[int],
    debug: bool,
    web: WebServerOptions | None = None,
    *,
    log_format: str = "text",
    parent_death_pipe: ParentDeathPipe | None = None,
    experiment_id: str | None = None,
    prepare: Callable[[ExperimentSpec, ExperimentFolder], ExperimentSpec] | None = None,
) -> KnownExperiment:
    """Create an experiment and start its manager on the first usable port of `ports`; return when the manager is ready.

    A failure leaves nothing behind: no folder, no registry entry, no process. The manager stops the experiment when
    this process's end of `parent_death_pipe` is closed. `experiment_id` None: generate an unused one. `debug`: write a verbose
    log, and check no versions. `web` None: the defaults. `log_format`: a name of
    `nni_manager.support.log_format`. `prepare` writes what trials need into the new folder, and returns the config with it.

    Raises:
        ManagerFailed: the manager did not become ready.
        ExperimentExists: the id is in use.
        UserError: the experiment's folder cannot be created.
    """
    from nni_manager.engine.ids import EXPERIMENT_ID_LENGTH, new_id
    from nni_manager.store.writer import Store
    from nni_manager.training_services.platform import platform_of

    if debug:
        config = config.replace(debug=True, version_check=False)
    new_folders = [each for each in (config.log_dir, *config.log_dir.parents) if not each.exists()]
    folder = ExperimentFolder(config.log_dir / (experiment_id or new_id(EXPERIMENT_ID_LENGTH)))
    while experiment_id is None and folder.path.exists():
        folder = ExperimentFolder(config.log_dir / new_id(EXPERIMENT_ID_LENGTH))
    # Job names contain the id, and the registry holds one entry per id.
    for known in (*Registry.of_user().all(), folder):
        if known.experiment_id == experiment_id and known.path.exists():
            raise ExperimentExists(known)
    try:
        try:
            folder.make(platform_of(config).storage_here())
            if config.is_annotated:
                config = _with_generated_code(config, folder)
            if prepare is not None:
                config = prepare(config, folder)
            Store.create(
                folder.database,
                folder.collected_logs,
                folder.experiment_id,
                config.to_json(),
                secrets.token_bytes(32),
                time.time(),
            ).close()
            Registry.of_user().add(folder)
        except OSError as error:
            raise UserError(
                f"cannot create {error.filename or folder.path}: {error.strerror}; choose another "
                f"{key_of(config, 'logDir')}, or fix the disk"
            ) from error
        return start_manager(
            folder,
            ports,
            debug,
            web,
            log_format=log_format,
            is_new=True,
            parent_death_pipe=parent_death_pipe,
        )
    except ExperimentExists:  # another process has just created it
        raise
    except BaseException:
        with deferred_interrupts():
            platform_of(config).remove_from_share(folder.workspace)
            folder.remove()
            Registry.of_user().remove(folder.experiment_id)
            for each in new_folders:
                with contextlib.suppress(OSError):  # not empty: another process uses the folder
                    each.rmdir()
        raise


def _with_generated_code(config: ExperimentSpec, folder: ExperimentFolder) -> ExperimentSpec:
    """Generate the trial code from annotations into the experiment's folder; return a config with that code folder."""
    from nni_manager.config.annotated_code import CodeNotCopied, read_code, write_copy
    from nni_manager.config.diagnostics import ConfigInvalid
    from nni_manager.training_services.platform import platform_of

    storage = platform_of(config).storage_here()
    excluded = (config.log_dir,) if storage is None else (config.log_dir, storage)
    code = read_code(config.code_dir, config.code_dir, excluded, config.secret_files)
    if code.diagnostics:
        raise ConfigInvalid(code.diagnostics)
    if code.space and code.space != config.search_space_raw:
        raise CodeNotCopied(
            f"cannot copy codeDir {config.code_dir}: its annotations changed after they were checked; run the command again"
        )
    write_copy(code, folder.generated_code, folder.annotated_code)
    return config.replace(code_dir=folder.generated_code)


def start_manager(
    folder: ExperimentFolder,
    ports: Iterable[int],
    debug: bool,
    web: WebServerOptions | None = None,
    *,
    log_format: str = "text",
    is_new: bool = False,
    parent_death_pipe: ParentDeathPipe | None = None,
) -> KnownExperiment:
    """Start a manager on the first free port of `ports`, and return the experiment when the manager is ready.

    On failure, trials of a new experiment are stopped; trials of an older one continue.
    `parent_death_pipe`, `web` and `log_format`: see `create_experiment`.

    Raises:
        ManagerFailed: the manager did not become ready, and has exited.
        FolderUnreadable: something else is in the place of a file of the experiment, or this user may not read it.
        ObjectiveMissing: trials run a function, which came with no archive.
    """
    options: tuple[str, ...] = ("--debug",) if debug else ()
    options += () if log_format == "text" else (f"--log_format={log_format}",)
    folder.check_files_of_manager()
    if not is_new:
        _check_objective(folder)
    outputs = folder.manager_stdout, folder.manager_stderr
    launch = _Launch(
        folder, web or WebServerOptions(), options, *outputs, folder.process, parent_death_pipe, is_new
    )
    return KnownExperiment(folder, launch.on_first_free(ports))


def _check_objective(folder: ExperimentFolder) -> None:
    if folder.objective.is_dir():
        return
    from nni_manager.store.reader import StoreReader

    name = None
    # The manager reports a database that cannot be read.
    with contextlib.suppress(NniManagerError), StoreReader(folder.database) as reader:
        # Not the whole config: checking it takes as long as the start of nnictl.
        name = json.loads(reader.experiment().config).get("objective")
    if name:
        raise ObjectiveMissing(
            f"cannot resume experiment {folder.experiment_id}: its trials run the function {escaped(name)}, which archives do "
            f"not contain; resume it from Python with Experiment.resume({folder.experiment_id!r}, objective=FUNCTION)"
        )


def start_view(
    folder: ExperimentFolder,
    ports: Iterable[int],
    web: WebServerOptions | None = None,
    parent_death_pipe: ParentDeathPipe | None = None,
) -> KnownExperiment:
    """Start a view of the stored experiment on the first free port of `ports`; return when the view is ready.

    The view ends when this process's end of `parent_death_pipe` is closed. `web`: see `create_experiment`.

    Raises:
        ManagerFailed: the view did not become ready, and has exited.
    """
    outputs = folder.view_stderr, folder.view_stderr
    web = web or WebServerOptions()
    launch = _Launch(folder, web, ("--view",), *outputs, folder.running_view, parent_death_pipe)
    return KnownExperiment(folder, None, view=launch.on_first_free(ports))


def start_hub(folder: ExperimentFolder, ports: Iterable[int], web: WebServerOptions) -> ManagerProcess:
    """Start the server of all experiments on the first free port of `ports`; return when it is ready.

    Raises:
        ManagerFailed: it did not become ready, and has exited.
    """
    outputs = folder.view_stderr, folder.view_stderr
    launch = _Launch(folder, web, (), *outputs, folder.running_view, program=hub_folder.PROGRAM)
    return launch.on_first_free(ports)


def become_hub(folder: ExperimentFolder, ports: Iterable[int], web: WebServerOptions) -> NoReturn:
    """Replace this process by the server of all experiments. Signals, exit code and stderr are then the server's."""
    command = [sys.executable, "-m", hub_folder.PROGRAM, "--folder", str(folder.path)]
    # Python imports modules from its working directory, which must not be the user's.
    os.chdir(folder.path)
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *web.arguments(), "--port", str(next(iter(ports)))])


@dataclass(frozen=True, slots=True)
class _Launch:
    """A manager or a view to start. `recorded`: the process that the folder records as ready."""

    folder: ExperimentFolder
    web: WebServerOptions
    options: Sequence[str]
    stdout: Path
    stderr: Path
    recorded: Callable[[], ManagerProcess | None]
    parent_death_pipe: ParentDeathPipe | None = None
    is_new: bool = False
    program: str = "nni_manager"

    def on_first_free(self, ports: Iterable[int]) -> ManagerProcess:
        """The process, once it is ready on the first port that it could use."""
        failure: ManagerFailed | None = None
        for port in ports:
            try:
                return self._start_on(port)
            except ManagerFailed as error:
                failure = error
                # Another process used the port, and may have released it already.
                if CANNOT_LISTEN not in str(error) and ports_are_free(port, self.web.host):
                    raise
        raise failure or ManagerFailed()

    def _start_on(self, port: int) -> ManagerProcess:
        stderr_before = self.stderr.stat().st_size if self.stderr.exists() else 0
        child: subprocess.Popen[bytes] | None = None
        try:
            with deferred_interrupts():
                child = self._spawn(port)
            process = self._wait_until_ready(child, stderr_before)
        except BaseException as error:
            if child is not None:
                with deferred_interrupts():
                    self._abort(child)
            if isinstance(error, ManagerFailed) and CANNOT_LISTEN in str(error):
                # The caller tries another port; without this, the message would look like an error of the next process.
                os.truncate(self.stderr, stderr_before)
            raise
        _children.append(child)
        return process

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        pipe = self.parent_death_pipe
        pipe_option = () if pipe is None else ("--parent_death_pipe", str(pipe.manager_fd))
        command = [sys.executable, "-m", self.program, "--folder", str(self.folder.path)]
        address = (*self.web.arguments(), "--port", str(port))
        with self.stdout.open("ab") as stdout, self.stderr.open("ab") as stderr:
            return subprocess.Popen(
                [*command, *address, *self.options, *pipe_option],
                # Python imports modules from its working directory, which must not be the user's.
                cwd=self.folder.path,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                pass_fds=() if pipe is None else (pipe.manager_fd,),
            )

    def _wait_until_ready(self, child: subprocess.Popen[bytes], stderr_before: int) -> ManagerProcess:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        # Its imports take 150 ms, and the manager's own 400 ms: it is needed once the manager is ready.
        import requests  # noqa: F401

        while time.monotonic() < deadline_s:
            process = self.recorded()
            if process is not None and process.pid == child.pid:
                with contextlib.suppress(ManagerUnresponsive):
                    ManagerClient(self.folder.experiment_id, process).summary()
                    return process
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_READY_POLL_S)
                raise ManagerFailed(_why_it_ended(self.folder, self.stderr, stderr_before, child.returncode))
        raise ManagerFailed(
            f"cannot start the manager of experiment {self.folder.experiment_id}: it was not ready within "
            f"{READY_TIMEOUT_S:.0f} s; reduce the load of this machine and try again, or find the cause with --debug"
        )

    def _abort(self, child: subprocess.Popen[bytes]) -> None:
        try:
            if self.is_new:
                # Trials may run already. Only a ready manager can stop them, so wait until it is ready.
                deadline_s = time.monotonic() + _EXIT_TIMEOUT_S
                while child.poll() is None and time.monotonic() < deadline_s:
                    process = self.recorded()
                    if process is not None and process.pid == child.pid:
                        # The caller reports the original error; errors of this cleanup must not replace it.
                        with contextlib.suppress(NniManagerError, subprocess.TimeoutExpired):
                            ManagerClient(self.folder.experiment_id, process).delete("/experiment")
                            child.wait(MAX_STOP_S)
                        break
                    time.sleep(_POLL_S)
        finally:
            # The caller may remove the folder next; without it the process could not be found.
            for end in (child.terminate, child.kill):
                if child.poll() is None:
                    end()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(_EXIT_TIMEOUT_S)


def _why_it_ended(folder: ExperimentFolder, stderr: Path, since: int, exit_code: int) -> str:
    with stderr.open("rb") as file:
        file.seek(since)
        text = file.read().decode(errors="replace")
    lines = text.strip().splitlines()
    if lines and lines[-1].startswith("cannot") and text.endswith("\n"):
        return lines[-1]
    # A manager on a full or read-only disk cannot write its error to stderr.
    if refusal := _refusal_of_disk(folder.path):
        return f"cannot start the manager of experiment {folder.experiment_id}: {refusal}"
    last = lines[-1] if lines else "its stderr is empty"
    return (
        f"cannot start the manager: it ended with exit code {exit_code}: {last}; "
        "try again with --debug, and report the error if it occurs again"
    )


def _refusal_of_disk(folder: Path) -> str:
    """The reason why the folder is not writable, with the remedy; empty if it is writable."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space there" if full else "make it writable for this user"
        return f"cannot write in {folder}: {error.strerror}; {remedy}, then try again: no stored data is lost"
    return ""


def reap() -> None:
    """Reap child processes that have exited."""
    _children[:] = [child for child in _children if child.poll() is None]
