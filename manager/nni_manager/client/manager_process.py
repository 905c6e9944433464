"""Starts, waits for and stops the process of a manager or of a view."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from nni_manager.client.experiments import KnownExperiment, stored_status
from nni_manager.client.manager_client import ConnectionClosed, ManagerClient, ManagerUnresponsive
from nni_manager.client.parent_death_pipe import ParentDeathPipe
from nni_manager.client.preflight import HOST, ports_are_free
from nni_manager.domain.stop_escalation import MAX_STOP_S
from nni_manager.errors import CANNOT_LISTEN, NniManagerError, RetryableError, UserError
from nni_manager.store.folders import ExperimentFolder, ManagerProcess, Registry
from trial_keeper.processes import terminate

if TYPE_CHECKING:
    from nni_manager.config.model import ExperimentSpec

_POLL_S = 0.05
# A manager is usually ready within two seconds; a cold disk under load takes longer, a hung one never answers.
READY_TIMEOUT_S = 30.0
# Each step of a stop has a deadline in the manager; a manager that exceeds their sum is stuck.
STOPPED_TIMEOUT_S = MAX_STOP_S
_LEFT_TIMEOUT_S = 10.0
_REPORT_INTERVAL_S = 5.0
# A manager writes at least this much before it is ready.
_PROBE_BYTES = 1 << 20
# A manager with leftovers to report waits longer than this before it exits.
_LISTEN_INTERVAL_S = 0.5
# Children to reap: this process may outlive them, and an unreaped child stays a zombie.
_children: list[subprocess.Popen[bytes]] = []


class ManagerFailed(UserError):
    """cannot start the manager; the last line of its stderr names the cause"""


class ManagerStuck(RetryableError):
    """cannot stop the manager; end its process by hand"""


class JobsLeft(RetryableError):
    """cannot end all jobs of the experiment; the message names each with the command that removes it"""


class StopNotRecorded(RetryableError):
    """cannot record that the experiment was stopped; nothing of it runs any more"""


def create_experiment(
    config: ExperimentSpec,
    secret: bytes,
    ports: Iterable[int],
    debug: bool,
    host: str = HOST,
    *,
    parent_death_pipe: ParentDeathPipe | None = None,
    experiment_id: str | None = None,
) -> KnownExperiment:
    """Create an experiment and start its manager on the first usable port of `ports`; return when the manager is ready.

    A failure leaves nothing behind: no folder, no registry entry, no process. The manager stops the experiment when
    this process's end of `parent_death_pipe` is closed. `experiment_id` None: generate an unused one.

    Raises:
        ManagerFailed: the manager did not become ready.
        UserError: the experiment's folder cannot be created, or exists already.
    """
    from nni_manager.engine.engine import EXPERIMENT_ID_LENGTH, new_id
    from nni_manager.store.writer import Store
    from nni_manager.training_service_factory import remove_from_share, storage_here

    new_folders = [each for each in (config.log_dir, *config.log_dir.parents) if not each.exists()]
    if experiment_id is not None:
        # Job names contain the id, and the registry holds one entry per id.
        for known in Registry.of_user().all():
            if known.experiment_id == experiment_id and known.path.exists():
                raise UserError(
                    f"cannot make experiment {experiment_id}: there is one in {known.path}; choose another id, or resume that one"
                )
    folder = ExperimentFolder(config.log_dir / (experiment_id or new_id(EXPERIMENT_ID_LENGTH)))
    while folder.path.exists():
        if experiment_id is not None:
            raise UserError(
                f"cannot make experiment {experiment_id}: there is {folder.path} already; choose another id, or resume that one"
            )
        folder = ExperimentFolder(config.log_dir / new_id(EXPERIMENT_ID_LENGTH))
    try:
        try:
            folder.make(storage_here(config))
            if config.is_annotated:
                config = _with_generated_code(config, folder)
            Store.create(
                folder.database,
                folder.collected_logs,
                folder.experiment_id,
                config.to_json(),
                secret,
                time.time(),
            ).close()
            Registry.of_user().add(folder)
        except OSError as error:
            raise UserError(
                f"cannot make {error.filename or folder.path}: {error.strerror}; choose another logDir, or fix its disk"
            ) from error
        return start_manager(folder, ports, debug, host, is_new=True, parent_death_pipe=parent_death_pipe)
    except BaseException:
        remove_from_share(config, folder.workspace)
        folder.remove()
        Registry.of_user().remove(folder.experiment_id)
        for each in new_folders:
            with contextlib.suppress(OSError):  # not empty: another process uses it now
                each.rmdir()
        raise


def _with_generated_code(config: ExperimentSpec, folder: ExperimentFolder) -> ExperimentSpec:
    """Generate the trial code from annotations in the experiment's folder; return the config that points to it."""
    import dataclasses

    from nni_manager.config.annotated_code import CodeNotCopied, read_code, write_copy
    from nni_manager.config.diagnostics import ConfigInvalid
    from nni_manager.training_service_factory import storage_here

    storage = storage_here(config)
    excluded = (config.log_dir,) if storage is None else (config.log_dir, storage)
    code = read_code(config.code_dir, config.code_dir, excluded, config.secret_files)
    if code.diagnostics:
        raise ConfigInvalid(code.diagnostics)
    if code.space and code.space != config.search_space_raw:
        raise CodeNotCopied(
            f"cannot copy codeDir {config.code_dir}: its annotations changed meanwhile; try again once they are as they should be"
        )
    write_copy(code, folder.generated_code, folder.annotated_code)
    return dataclasses.replace(config, code_dir=folder.generated_code)


def start_manager(
    folder: ExperimentFolder,
    ports: Iterable[int],
    debug: bool,
    host: str = HOST,
    *,
    is_new: bool = False,
    parent_death_pipe: ParentDeathPipe | None = None,
) -> KnownExperiment:
    """Start a manager on the first free port of `ports`, and return the experiment when the manager is ready.

    On failure, trials of a new experiment are stopped; trials of an older one continue.
    `parent_death_pipe`: see `create_experiment`.

    Raises:
        ManagerFailed: the manager did not become ready, and has exited.
    """
    return _on_first_free(
        ports, host, lambda port: _start_on(folder, host, port, debug, is_new, parent_death_pipe)
    )


def start_view(
    folder: ExperimentFolder,
    ports: Iterable[int],
    host: str = HOST,
    parent_death_pipe: ParentDeathPipe | None = None,
) -> KnownExperiment:
    """Start a view of the stored experiment on the first free port of `ports`; return when the view is ready.

    The view ends when this process's end of `parent_death_pipe` is closed.

    Raises:
        ManagerFailed: the view did not become ready, and has exited.
    """
    return _on_first_free(ports, host, lambda port: _view_on(folder, host, port, parent_death_pipe))


def _on_first_free(
    ports: Iterable[int], host: str, start: Callable[[int], KnownExperiment]
) -> KnownExperiment:
    failure: ManagerFailed | None = None
    for port in ports:
        try:
            return start(port)
        except ManagerFailed as error:
            failure = error
            # The process that took the port may have released it already.
            if CANNOT_LISTEN not in str(error) and ports_are_free(port, host):
                raise
    raise failure or ManagerFailed()


def _start_on(
    folder: ExperimentFolder,
    host: str,
    port: int,
    debug: bool,
    is_new: bool,
    parent_death_pipe: ParentDeathPipe | None,
) -> KnownExperiment:
    stderr_before = _size_of(folder.manager_stderr)
    child: subprocess.Popen[bytes] | None = None
    try:
        with folder.manager_stdout.open("ab") as stdout, folder.manager_stderr.open("ab") as stderr:
            child = _spawned(
                folder, host, port, ["--debug"] if debug else [], stdout, stderr, parent_death_pipe
            )
        process = _wait_until_ready(folder, child, folder.process, folder.manager_stderr, stderr_before)
        _children.append(child)
        return KnownExperiment(folder, process)
    except BaseException as error:
        if child is not None:
            _abort_start(folder, child, is_new)
        _forget_lost_port(error, folder.manager_stderr, stderr_before)
        raise


def _view_on(
    folder: ExperimentFolder, host: str, port: int, parent_death_pipe: ParentDeathPipe | None
) -> KnownExperiment:
    stderr_before = _size_of(folder.view_stderr)
    child: subprocess.Popen[bytes] | None = None
    try:
        with folder.view_stderr.open("ab") as stderr:
            child = _spawned(folder, host, port, ["--view"], stderr, stderr, parent_death_pipe)
        process = _wait_until_ready(folder, child, folder.running_view, folder.view_stderr, stderr_before)
        _children.append(child)
        return KnownExperiment(folder, None, view=process)
    except BaseException as error:
        if child is not None:
            _abort_start(folder, child, is_new=False)
        _forget_lost_port(error, folder.view_stderr, stderr_before)
        raise


def _forget_lost_port(error: BaseException, stderr: Path, size_before: int) -> None:
    """Remove the error of a lost port from stderr: the caller handles it, and it would look like a later process's fault."""
    if isinstance(error, ManagerFailed) and CANNOT_LISTEN in str(error):
        os.truncate(stderr, size_before)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _spawned(
    folder: ExperimentFolder,
    host: str,
    port: int,
    options: Sequence[str],
    stdout: BinaryIO,
    stderr: BinaryIO,
    parent_death_pipe: ParentDeathPipe | None,
) -> subprocess.Popen[bytes]:
    tied = () if parent_death_pipe is None else ("--parent_death_pipe", str(parent_death_pipe.manager_fd))
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "nni_manager",
            "--folder",
            str(folder.path),
            "--host",
            host,
            "--port",
            str(port),
            *options,
            *tied,
        ],
        # Python imports modules from its working directory, which must not be the user's.
        cwd=folder.path,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=() if parent_death_pipe is None else (parent_death_pipe.manager_fd,),
    )


def _wait_until_ready(
    folder: ExperimentFolder,
    child: subprocess.Popen[bytes],
    noted: Callable[[], ManagerProcess | None],
    stderr: Path,
    stderr_before: int,
) -> ManagerProcess:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        process = noted()
        if process is not None and process.pid == child.pid:
            with contextlib.suppress(ManagerUnresponsive):
                ManagerClient(folder.experiment_id, process).summary()
                return process
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_S)
            raise ManagerFailed(_last_words(folder, stderr, stderr_before, child.returncode))
    raise ManagerFailed(
        f"cannot start the manager of experiment {folder.experiment_id}: it was not ready within {READY_TIMEOUT_S:.0f} s; "
        "free this machine of other work and try again, or look into it with --debug"
    )


def _last_words(folder: ExperimentFolder, stderr: Path, since: int, exit_code: int) -> str:
    with stderr.open("rb") as file:
        file.seek(since)
        text = file.read().decode(errors="replace")
    lines = text.strip().splitlines()
    if lines and lines[-1].startswith("cannot") and text.endswith("\n"):
        return lines[-1]
    # A manager on a full or read-only disk cannot write its error to stderr.
    if refusal := _refusal_of_disk(folder.path):
        return f"cannot start the manager of experiment {folder.experiment_id}: {refusal}"
    last = lines[-1] if lines else "it said nothing"
    return (
        f"cannot start the manager: it ended with exit code {exit_code}: {last}; "
        "try again with --debug, and report it if that fails too"
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
        return f"cannot write in {folder}: {error.strerror}; {remedy}, then try again: nothing stored is lost"
    return ""


def _abort_start(folder: ExperimentFolder, child: subprocess.Popen[bytes], is_new: bool) -> None:
    try:
        if is_new:
            # Trials may run already. Only a ready manager can stop them, so wait until it is ready.
            deadline_s = time.monotonic() + _LEFT_TIMEOUT_S
            while child.poll() is None and time.monotonic() < deadline_s:
                process = folder.process()
                if process is not None and process.pid == child.pid:
                    # The caller reports the original error; errors of this cleanup must not replace it.
                    with contextlib.suppress(NniManagerError, subprocess.TimeoutExpired):
                        ManagerClient(folder.experiment_id, process).delete("/experiment")
                        child.wait(STOPPED_TIMEOUT_S)
                    break
                time.sleep(_POLL_S)
    finally:
        # The folder may be removed next, and the process could not be found afterwards.
        for end in (child.terminate, child.kill):
            if child.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_LEFT_TIMEOUT_S)


def stop_experiment(known: KnownExperiment, report: Callable[[str], None]) -> None:
    """Stop a running experiment: cancel its trials, keep its data, and wait until its manager has exited.

    `report` receives the number of unfinished trials, or the current storage problem, whenever it changes.

    Raises:
        ManagerStuck: the manager had to be terminated without a clean stop; the message names what may still run.
        JobsLeft: some jobs may still run.
        StopNotRecorded: nothing runs, but the stop is not in the database.
    """
    process = known.manager
    if process is None:
        raise UserError(f"cannot stop experiment {known.experiment_id}: it does not run; nothing to do")
    client = ManagerClient(known.experiment_id, process)
    _wake(known, process)
    try:
        _ask_to_stop(client)
    except ManagerUnresponsive as error:
        if not known.running_process():
            return
        leave(known)
        raise ManagerStuck(
            f"cannot stop the trials of experiment {known.experiment_id}: its manager did not answer and was ended by a signal; "
            f"trials may go on: `nnictl resume {known.experiment_id}` finds them, and `nnictl stop` then stops them"
        ) from error
    progress = _StopProgress(client, report)
    if not _wait_until_gone(known, STOPPED_TIMEOUT_S, progress.look):
        leave(known)
        raise ManagerStuck(
            f"cannot stop all trials of experiment {known.experiment_id} within {STOPPED_TIMEOUT_S:.0f} s: "
            f"its manager was ended by a signal; trials may go on: `nnictl resume {known.experiment_id}` finds them"
        )
    reap()
    if progress.leftovers:
        raise JobsLeft("; ".join(progress.leftovers))
    if not known.folder.path.exists():
        Registry.of_user().remove(known.experiment_id)
    elif progress.problem and not _is_recorded(known):
        raise StopNotRecorded(
            f"cannot record that experiment {known.experiment_id} was stopped, although nothing of it runs any more: "
            f"{progress.problem}; once that is fixed, `nnictl resume {known.experiment_id}` goes on from what is recorded"
        )


def _wake(known: KnownExperiment, process: ManagerProcess) -> None:
    """Send SIGCONT: a manager that a debugger or a batch system has stopped never answers."""
    descriptor = _descriptor_of(process, known.folder, is_view=False)
    if descriptor is not None:
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        finally:
            os.close(descriptor)


def _is_recorded(known: KnownExperiment) -> bool:
    try:
        return bool(stored_status(known.folder)["isOver"])
    except NniManagerError:
        return False  # a database on a full disk may be unreadable


def reap() -> None:
    """Reap child processes that have exited."""
    _children[:] = [child for child in _children if child.poll() is None]


def _ask_to_stop(client: ManagerClient) -> None:
    deadline_s = time.monotonic() + _LEFT_TIMEOUT_S
    while True:
        try:
            client.summary()
            client.delete("/experiment")
        except ConnectionClosed:
            # The manager may be at its connection limit. Retry: a signal would leave the trials running.
            if time.monotonic() > deadline_s:
                raise
        else:
            return
        time.sleep(_POLL_S)


def leave(known: KnownExperiment) -> None:
    """Terminate the manager's process. Trials continue, and `resume` finds them.

    Raises:
        ManagerStuck: the process does not exit.
    """
    process = known.running_process()
    if process is None:
        return
    descriptor = _descriptor_of(process, known.folder, is_view=False)
    if descriptor is None:
        # The manager is exiting, or runs on another machine; here its pid may belong to any process.
        if _wait_until_gone(known, _LEFT_TIMEOUT_S):
            return
        holder = known.folder.lease_holder() or "another process"
        raise ManagerStuck(
            f"cannot end the manager of experiment {known.experiment_id}: {holder} owns it, "
            f"and is no process of this machine; `nnictl stop {known.experiment_id}` there ends it"
        )
    if not terminate(descriptor, _LEFT_TIMEOUT_S):
        raise ManagerStuck(
            f"cannot end the manager of experiment {known.experiment_id}: process {process.pid} ignores SIGTERM; "
            f"end it with `kill -9 {process.pid}`: nothing stored is lost, and `nnictl resume {known.experiment_id}` goes on"
        )


def end_view(known: KnownExperiment) -> None:
    """Terminate the process that serves a view of the experiment; does nothing if there is none.

    Raises:
        ManagerStuck: the process does not exit.
    """
    process = known.view
    if process is None:
        return
    descriptor = _descriptor_of(process, known.folder, is_view=True)
    if descriptor is not None and not terminate(descriptor, _LEFT_TIMEOUT_S):
        raise ManagerStuck(
            f"cannot end the view of experiment {known.experiment_id}: process {process.pid} ignores SIGTERM; "
            f"end it with `kill -9 {process.pid}`: it has nothing to lose"
        )


def wait_for_view(known: KnownExperiment) -> None:
    """Block until the process that serves this view has exited."""
    descriptor = None if known.view is None else _descriptor_of(known.view, known.folder, is_view=True)
    if descriptor is not None:
        try:
            select.select([descriptor], [], [])
        finally:
            os.close(descriptor)


def _descriptor_of(process: ManagerProcess, folder: ExperimentFolder, *, is_view: bool) -> int | None:
    """A pidfd of the process; None if it has exited. Its command line is verified, because the pid may be reused."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        words = psutil.Process(process.pid).cmdline()
        if str(folder.path) in words and ("--view" in words) is is_view:
            return descriptor
    os.close(descriptor)
    return None


def _wait_until_gone(
    known: KnownExperiment, within_s: float, look: Callable[[], None] = lambda: None
) -> bool:
    process = known.running_process()
    deadline_s = time.monotonic() + within_s
    while known.running_process() is not None:
        if time.monotonic() > deadline_s:
            return False
        look()
        time.sleep(_POLL_S)
    if process is not None:
        # The manager has released its lease, but the interpreter needs a moment to exit.
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process.pid)
            try:
                select.select([descriptor], [], [], _LEFT_TIMEOUT_S)
            finally:
                os.close(descriptor)
    return True


class _StopProgress:
    """Polls the progress of a stopping manager. It polls until the end, because an exited manager cannot be asked."""

    def __init__(self, client: ManagerClient, report: Callable[[str], None]) -> None:
        self.leftovers: list[str] = []
        self.problem = ""
        self._client = client
        self._report = report
        self._listens_at_s = time.monotonic() + _LISTEN_INTERVAL_S
        self._reports_at_s = time.monotonic() + _REPORT_INTERVAL_S
        self._reported = ""

    def look(self) -> None:
        """Poll the manager if the interval has passed, and report changes."""
        now_s = time.monotonic()
        if now_s < self._listens_at_s:
            return
        self._listens_at_s = now_s + _LISTEN_INTERVAL_S
        try:
            summary = self._client.summary()
        except ManagerUnresponsive:
            return  # it is about to exit
        # Managers of older versions do not report leftovers.
        self.leftovers, self.problem = summary.get("leftovers", []), str(summary["problem"])
        if now_s > self._reports_at_s:
            self._reports_at_s = now_s + _REPORT_INTERVAL_S
            waited_for = _waited_for(summary)
            if waited_for != self._reported:
                self._reported = waited_for
                self._report(waited_for)


def _waited_for(summary: Mapping[str, Any]) -> str:
    # A trial is terminal once its end is stored, so a full disk blocks all of them.
    problem = str(summary["problem"])
    if problem:
        return problem.strip().splitlines()[0]
    count = summary["counts"]["RUNNING"] + summary["counts"]["WAITING"]
    return "1 trial has not ended yet" if count == 1 else f"{count} trials have not ended yet"
