"""The manager's process as those see it who want one: begin, wait until it is ready, end."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from nni_manager.client import output
from nni_manager.client.experiments import KnownExperiment
from nni_manager.client.lifeline import Lifeline
from nni_manager.client.manager_client import ConnectionClosed, ManagerClient, ManagerSilent
from nni_manager.client.preflight import HOST, ports_are_free
from nni_manager.errors import CANNOT_LISTEN, NniManagerError, TryAgain, UserMistake
from nni_manager.store.folders import ExperimentFolder, ManagerProcess, Registry
from nni_manager.store.process_identity import terminate

if TYPE_CHECKING:
    from nni_manager.config.model import ExperimentConfig

_POLL_S = 0.05
# A manager is ready within two seconds here; a cold disk under load takes longer, a hung one for ever.
READY_WITHIN_S = 30.0
# Trials get a grace period after SIGTERM, then SIGKILL; what takes longer than this is stuck.
STOPPED_WITHIN_S = 60.0
_LEFT_WITHIN_S = 10.0
_REPORT_EVERY_S = 5.0
# Those that this process has started: it may live for longer than they do, and the system keeps a note of each that has ended.
_children: list[subprocess.Popen[bytes]] = []


class ManagerFailed(UserMistake):
    """cannot start the manager; its last words say why"""


class ManagerStuck(TryAgain):
    """cannot stop the manager; end its process by hand"""


def create_experiment(
    config: ExperimentConfig,
    secret: bytes,
    ports: Iterable[int],
    debug: bool,
    host: str = HOST,
    *,
    lifeline: Lifeline | None = None,
    experiment_id: str | None = None,
) -> KnownExperiment:
    """A new experiment with a manager that is ready, on the first of `ports` that works.

    Whatever goes wrong before that, nothing is left: no folder, no entry in the registry, no process. With a `lifeline` the
    experiment is stopped when that is cut. `experiment_id` None: one that nobody has.

    Raises:
        ManagerFailed: the manager did not become ready.
        UserMistake: the experiment's folder cannot be made, or is there already.
    """
    from nni_manager.engine.engine import EXPERIMENT_ID_LENGTH, new_id
    from nni_manager.services import remove_from_share, storage_here
    from nni_manager.store.store import Store

    new_folders = [each for each in (config.log_dir, *config.log_dir.parents) if not each.exists()]
    if experiment_id is not None:
        # Jobs are named after it, and the registry has one place for it.
        for known in Registry.of_user().all():
            if known.experiment_id == experiment_id and known.path.exists():
                raise UserMistake(
                    f"cannot make experiment {experiment_id}: there is one in {known.path}; choose another id, or resume that one"
                )
    folder = ExperimentFolder(config.log_dir / (experiment_id or new_id(EXPERIMENT_ID_LENGTH)))
    while folder.path.exists():
        if experiment_id is not None:
            raise UserMistake(
                f"cannot make experiment {experiment_id}: there is {folder.path} already; choose another id, or resume that one"
            )
        folder = ExperimentFolder(config.log_dir / new_id(EXPERIMENT_ID_LENGTH))
    try:
        try:
            folder.make(storage_here(config), reuses_jobs=config.reuse.is_on)
            if config.is_annotated:
                config = _with_code_of_its_own(config, folder)
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
            raise UserMistake(
                f"cannot make {error.filename or folder.path}: {error.strerror}; choose another logDir, or mend its disk"
            ) from error
        return start_manager(folder, ports, debug, host, is_new=True, lifeline=lifeline)
    except BaseException:
        remove_from_share(config, folder.workspace)
        folder.remove()
        Registry.of_user().remove(folder.experiment_id)
        for each in new_folders:
            with contextlib.suppress(OSError):  # not empty: somebody else's by now
                each.rmdir()
        raise


def _with_code_of_its_own(config: ExperimentConfig, folder: ExperimentFolder) -> ExperimentConfig:
    """The experiment with the code that is generated from annotations, in its folder."""
    import dataclasses

    from nni_manager.config.annotated_code import CodeNotCopied, read_code, write_copy
    from nni_manager.config.mistakes import ConfigInvalid
    from nni_manager.services import storage_here

    storage = storage_here(config)
    excluded = (config.log_dir,) if storage is None else (config.log_dir, storage)
    code = read_code(config.code_dir, config.code_dir, excluded, config.secret_files)
    if code.mistakes:
        raise ConfigInvalid(code.mistakes)
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
    lifeline: Lifeline | None = None,
) -> KnownExperiment:
    """The experiment with a manager that is ready, on the first of `ports` that nobody else takes meanwhile.

    When it does not come to that, trials of a new experiment are stopped, and those of an older one are left alone.
    `lifeline`: see `create_experiment`.

    Raises:
        ManagerFailed: it did not become ready, and has ended.
    """
    return _on_first_free(ports, host, lambda port: _start_on(folder, host, port, debug, is_new, lifeline))


def start_view(
    folder: ExperimentFolder, ports: Iterable[int], host: str = HOST, lifeline: Lifeline | None = None
) -> KnownExperiment:
    """The experiment with a view of what is stored that is ready, on the first of `ports` that nobody else takes meanwhile.

    With a `lifeline` the view ends when that is cut.

    Raises:
        ManagerFailed: it did not become ready, and has ended.
    """
    return _on_first_free(ports, host, lambda port: _view_on(folder, host, port, lifeline))


def _on_first_free(
    ports: Iterable[int], host: str, start: Callable[[int], KnownExperiment]
) -> KnownExperiment:
    failure: ManagerFailed | None = None
    for port in ports:
        try:
            return start(port)
        except ManagerFailed as error:
            failure = error
            # Whoever was quicker may have let go of it again.
            if CANNOT_LISTEN not in str(error) and ports_are_free(port, host):
                raise
    raise failure or ManagerFailed()


def _start_on(
    folder: ExperimentFolder, host: str, port: int, debug: bool, is_new: bool, lifeline: Lifeline | None
) -> KnownExperiment:
    stderr_before = _size_of(folder.manager_stderr)
    child: subprocess.Popen[bytes] | None = None
    try:
        with folder.manager_stdout.open("ab") as stdout, folder.manager_stderr.open("ab") as stderr:
            child = _spawned(folder, host, port, ["--debug"] if debug else [], stdout, stderr, lifeline)
        process = _wait_until_ready(folder, child, folder.process, folder.manager_stderr, stderr_before)
        _children.append(child)
        return KnownExperiment(folder, process)
    except BaseException as error:
        if child is not None:
            _end_half_started(folder, child, is_new)
        _forget_lost_port(error, folder.manager_stderr, stderr_before)
        raise


def _view_on(folder: ExperimentFolder, host: str, port: int, lifeline: Lifeline | None) -> KnownExperiment:
    stderr_before = _size_of(folder.view_stderr)
    child: subprocess.Popen[bytes] | None = None
    try:
        with folder.view_stderr.open("ab") as stderr:
            child = _spawned(folder, host, port, ["--view"], stderr, stderr, lifeline)
        process = _wait_until_ready(folder, child, folder.running_view, folder.view_stderr, stderr_before)
        _children.append(child)
        return KnownExperiment(folder, None, view=process)
    except BaseException as error:
        if child is not None:
            _end_half_started(folder, child, is_new=False)
        _forget_lost_port(error, folder.view_stderr, stderr_before)
        raise


def _forget_lost_port(error: BaseException, stderr: Path, size_before: int) -> None:
    """Whoever asked is told, or the next port is tried; a line that stayed would be taken for a fault of what runs then."""
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
    lifeline: Lifeline | None,
) -> subprocess.Popen[bytes]:
    tied = () if lifeline is None else ("--lifeline", str(lifeline.their_end))
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
        # Python looks for modules where it is started: not among the user's files.
        cwd=folder.path,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=() if lifeline is None else (lifeline.their_end,),
    )


def _wait_until_ready(
    folder: ExperimentFolder,
    child: subprocess.Popen[bytes],
    noted: Callable[[], ManagerProcess | None],
    stderr: Path,
    stderr_before: int,
) -> ManagerProcess:
    gives_up_at_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < gives_up_at_s:
        process = noted()
        if process is not None and process.pid == child.pid:
            with contextlib.suppress(ManagerSilent):
                ManagerClient(folder.experiment_id, process).summary()
                return process
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_S)
            raise ManagerFailed(_last_words(stderr, stderr_before, child.returncode))
    raise ManagerFailed(
        f"cannot start the manager of experiment {folder.experiment_id}: it was not ready within {READY_WITHIN_S:.0f} s; "
        "free this machine of other work and try again, or look into it with --debug"
    )


def _last_words(stderr: Path, since: int, exit_code: int) -> str:
    with stderr.open("rb") as file:
        file.seek(since)
        lines = file.read().decode(errors="replace").strip().splitlines()
    if lines and lines[-1].startswith("cannot"):
        return lines[-1]
    last = lines[-1] if lines else "it said nothing"
    return (
        f"cannot start the manager: it ended with exit code {exit_code}: {last}; "
        "try again with --debug, and report it if that fails too"
    )


def _end_half_started(folder: ExperimentFolder, child: subprocess.Popen[bytes], is_new: bool) -> None:
    try:
        if is_new:
            # Its first trials may run already. Only a manager that is ready can stop them, so it gets the time to be.
            gives_up_at_s = time.monotonic() + _LEFT_WITHIN_S
            while child.poll() is None and time.monotonic() < gives_up_at_s:
                process = folder.process()
                if process is not None and process.pid == child.pid:
                    # Why it was to end is what the user hears, and not why it did not do that by itself.
                    with contextlib.suppress(NniManagerError, subprocess.TimeoutExpired):
                        ManagerClient(folder.experiment_id, process).delete("/experiment")
                        child.wait(STOPPED_WITHIN_S)
                    break
                time.sleep(_POLL_S)
    finally:
        # Its folder will be removed: nobody would find it afterwards.
        for end in (child.terminate, child.kill):
            if child.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_LEFT_WITHIN_S)


def stop_experiment(known: KnownExperiment, report: Callable[[str], None]) -> None:
    """Stop a running experiment: its trials are cancelled, its data stays, its manager has ended afterwards.

    `report` is told what is still being waited for, or why nothing can be stored at present, whenever that changes.

    Raises:
        ManagerStuck: the manager had to be ended without that; the message says what may go on.
    """
    process = known.manager
    if process is None:
        raise UserMistake(f"cannot stop experiment {known.experiment_id}: it does not run; nothing to do")
    client = ManagerClient(known.experiment_id, process)
    try:
        _ask_to_stop(client)
    except ManagerSilent as error:
        if not known.running_process():
            return
        leave(known)
        raise ManagerStuck(
            f"cannot stop the trials of experiment {known.experiment_id}: its manager did not answer and was ended by a signal; "
            f"trials may go on: `nnictl resume {known.experiment_id}` finds them, and `nnictl stop` then stops them"
        ) from error
    if not _wait_until_gone(known, STOPPED_WITHIN_S, client, report):
        leave(known)
        raise ManagerStuck(
            f"cannot stop all trials of experiment {known.experiment_id} within {STOPPED_WITHIN_S:.0f} s: "
            f"its manager was ended by a signal; trials may go on: `nnictl resume {known.experiment_id}` finds them"
        )
    if not known.folder.path.exists():
        Registry.of_user().remove(known.experiment_id)
    reap()


def reap() -> None:
    """Let the system forget what this process had started and has ended since."""
    _children[:] = [child for child in _children if child.poll() is None]


def _ask_to_stop(client: ManagerClient) -> None:
    gives_up_at_s = time.monotonic() + _LEFT_WITHIN_S
    while True:
        try:
            client.summary()
            client.delete("/experiment")
        except ConnectionClosed:
            # Others may take all the room it has. A signal would leave the trials to themselves.
            if time.monotonic() > gives_up_at_s:
                raise
        else:
            return
        time.sleep(_POLL_S)


def leave(known: KnownExperiment) -> None:
    """End the manager's process; trials go on, and `resume` finds them.

    Raises:
        ManagerStuck: it does not end.
    """
    process = known.running_process()
    if process is None:
        return
    descriptor = _descriptor_of(process, known.folder, is_view=False)
    if descriptor is None:
        # It is just ending, or a process of another machine: this number may be anybody's here.
        if _wait_until_gone(known, _LEFT_WITHIN_S):
            return
        raise ManagerStuck(
            f"cannot end the manager of experiment {known.experiment_id}: {known.folder.owner() or 'another process'} owns it, "
            f"and is no process of this machine; `nnictl stop {known.experiment_id}` there ends it"
        )
    if not terminate(descriptor, _LEFT_WITHIN_S):
        raise ManagerStuck(
            f"cannot end the manager of experiment {known.experiment_id}: process {process.pid} ignores SIGTERM; "
            f"end it with `kill -9 {process.pid}`: nothing stored is lost, and `nnictl resume {known.experiment_id}` goes on"
        )


def end_view(known: KnownExperiment) -> None:
    """End whoever serves a view of the experiment; no matter if nobody does.

    Raises:
        ManagerStuck: it does not end.
    """
    process = known.view
    if process is None:
        return
    descriptor = _descriptor_of(process, known.folder, is_view=True)
    if descriptor is not None and not terminate(descriptor, _LEFT_WITHIN_S):
        raise ManagerStuck(
            f"cannot end the view of experiment {known.experiment_id}: process {process.pid} ignores SIGTERM; "
            f"end it with `kill -9 {process.pid}`: it has nothing to lose"
        )


def wait_for_view(known: KnownExperiment) -> None:
    """Returns when nobody serves this view of the experiment any more."""
    descriptor = None if known.view is None else _descriptor_of(known.view, known.folder, is_view=True)
    if descriptor is not None:
        try:
            select.select([descriptor], [], [])
        finally:
            os.close(descriptor)


def _descriptor_of(process: ManagerProcess, folder: ExperimentFolder, *, is_view: bool) -> int | None:
    """A descriptor of the process, None if it has ended: its number may be anybody's by now."""
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
    known: KnownExperiment,
    within_s: float,
    client: ManagerClient | None = None,
    report: Callable[[str], None] = output.info,
) -> bool:
    process = known.running_process()
    now_s = time.monotonic()
    gives_up_at_s, reports_at_s, reported = now_s + within_s, now_s + _REPORT_EVERY_S, ""
    while known.running_process() is not None:
        now_s = time.monotonic()
        if now_s > gives_up_at_s:
            return False
        if client is not None and now_s > reports_at_s:
            reports_at_s = now_s + _REPORT_EVERY_S
            with contextlib.suppress(ManagerSilent):  # it is about to end
                waited_for = _waited_for(client.summary())
                if waited_for != reported:
                    reported = waited_for
                    report(waited_for)
        time.sleep(_POLL_S)
    if process is not None:
        # It has let go of the experiment; Python still needs a moment to end.
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process.pid)
            try:
                select.select([descriptor], [], [], _LEFT_WITHIN_S)
            finally:
                os.close(descriptor)
    return True


def _waited_for(summary: Mapping[str, Any]) -> str:
    # A trial is over when its end is stored, so a full disk keeps all of them from ending.
    problem = str(summary["problem"])
    if problem:
        return problem.strip().splitlines()[0]
    count = summary["counts"]["RUNNING"] + summary["counts"]["WAITING"]
    return "1 trial has not ended yet" if count == 1 else f"{count} trials have not ended yet"
