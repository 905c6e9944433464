"""`trial-keeper`: the first process of a task. A job starts the keeper, and environment variables configure it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from trial_keeper import __version__
from trial_keeper.cluster_environment import task_name
from trial_keeper.errors import KeeperBug, KeeperError, KeeperUserError, VersionMismatch, WorkspaceMissing
from trial_keeper.exit_codes import of_signal
from trial_keeper.settings import PREFIX, KeeperSettings
from trial_keeper.wire.attempt_ids import sort_key
from trial_keeper.wire.documents import ManagerDocument, exit_to_bytes
from trial_keeper.wire.fork_requests import FORK_SERVER
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.versions import mismatch_message, versions_agree
from trial_keeper.wire.workspace import AttemptFolder, Workspace

GRACE_S = f"{PREFIX}GRACE_S"
HELP = """\
usage: trial-keeper [--grace-s N] [--help] [--version]
       trial-keeper doctor [--json]
       trial-keeper ctl COMMAND ...

Runs the trial of one job and delivers its metrics and logs to the manager. trial-keeper is the first process of a task. Do not
start it by hand: the jobs that `nnictl create --config FILE` creates start it, and environment variables configure it.

`trial-keeper doctor`, run inside a container of a job, checks everything that a keeper depends on: its settings, the shared
storage, the clock, the manager's version and address, the token, bash, GPUs. It prints one line per check, with the remedy.
It changes nothing and does not disturb a running trial.

`trial-keeper ctl` is `nnictl`, for a Python where NNI's own package has installed its command of that name, or has removed ours.
`trial-keeper ctl --help` lists its commands.

On SIGTERM, SIGINT or SIGHUP the keeper sends SIGTERM to the trial. After the grace period, or on a second signal, the keeper
kills everything that the trial has started.

options:
  --grace-s N  seconds between SIGTERM and SIGKILL, in place of TRIAL_KEEPER_GRACE_S (30 by default)
  --help       show this help
  --version    show the version; keeper and manager must agree in its first two numbers
  --json       for doctor: print a list of objects with check, outcome (OK, WARN, FAIL, SKIP), found and remedy

environment:
  TRIAL_KEEPER_*  the job's settings, set by the manager
  PAI_*, FC_*     the job and the task of this container, set by the cluster

exit code: the trial's own, 128+n if signal n ended it, or 100-119 when the keeper itself failed.
doctor: 0 when no check failed, 1 otherwise.

example:
  kubectl exec POD -- trial-keeper doctor
  trial-keeper ctl create --config exp.yml
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one job. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_standard_descriptors()
    match arguments:
        case []:
            return _run_job(os.environ)
        case ["--grace-s", seconds]:
            return _run_job({**os.environ, GRACE_S: seconds})
        case ["--help" | "-h"] | ["doctor", "--help" | "-h"]:
            print(HELP, end="")
            return 0
        case ["--version"]:
            print(f"trial-keeper {__version__}")
            return 0
        case ["doctor"] | ["doctor", "--json"]:
            return _run_doctor(as_json=len(arguments) > 1)
        case ["serve-machine"]:  # the manager starts it over SSH
            return _serve_machine()
        case ["ctl", *command]:
            return _run_nnictl(command)
        case [argument] if argument == FORK_SERVER:  # only the manager starts it
            from trial_keeper.host.fork_server import serve

            return serve(lambda: _run_job(os.environ))
    _complain(
        f"cannot use {' '.join(arguments)!r}: trial-keeper takes --grace-s N, --help, --version, doctor, "
        "doctor --json or ctl COMMAND only"
    )
    return KeeperUserError.exit_code


def _open_standard_descriptors() -> None:
    """Open those of the descriptors 0 to 2 that are closed; otherwise the keeper's own files would get these numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _complain(text: str) -> None:
    # stderr may have no reader; the exit code still reports the failure.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def _run_doctor(*, as_json: bool) -> int:
    from trial_keeper.host import doctor

    try:
        return doctor.report(
            doctor.examine(os.environ), lambda line: print(line, flush=True), as_json=as_json
        )
    except BrokenPipeError:
        # The reader has closed the pipe; Python would report that again on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _run_nnictl(arguments: list[str]) -> int:
    """Run nnictl, which a keeper's image need not have."""
    import importlib

    try:
        nnictl = importlib.import_module("nni_manager.cli.entry")
    except ModuleNotFoundError as error:
        if error.name != "nni_manager":
            raise
        _complain(
            "cannot run nnictl: this Python lacks the manager; run `pip install 'trial-keeper[manager]'` in this Python"
        )
        return KeeperUserError.exit_code
    sys.argv[1:] = arguments
    nnictl.main()
    return 0


def _serve_machine() -> int:
    """Answer the requests of a manager on another machine, about jobs on this one."""
    import importlib

    try:
        server = importlib.import_module("nni_manager.training_services.remote.machine_server")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("nni_manager"):
            raise
        _complain(
            "cannot serve a manager: this package has no nni_manager; run `pip install trial-keeper` in this Python"
        )
        return KeeperUserError.exit_code
    code: int = server.main()
    return code


def _run_job(environ: Mapping[str, str]) -> int:
    try:
        settings = KeeperSettings.from_environ(environ)
        return _run_keeper(settings)
    except KeeperError as error:
        _complain(f"trial-keeper: {error}")
        return error.exit_code
    except Exception:  # noqa: BLE001 - Python's exit code 1 could be the trial's own
        import traceback

        _complain(f"{traceback.format_exc()}trial-keeper: cannot continue: {KeeperBug()} Report these lines.")
        return KeeperBug.exit_code


def _run_keeper(settings: KeeperSettings) -> int:
    from trial_keeper.host.orphan_reaper import OrphanReaper

    # First: memory that the keeper changes later is no longer shared. Process 1 needs none: the kernel ends its whole namespace.
    reaper = OrphanReaper() if os.getpid() != 1 else None

    from trial_keeper.host.attempt_files import claim_attempt, read_trial
    from trial_keeper.host.mount import check_writing, wait_for_mount, with_code, written_folder

    # Process 1 of a container ignores these signals by default. The host installs its own handlers once the trial runs.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end_by_signal)
    task = task_name(os.environ, settings.role)
    workspace = Workspace(Path(settings.workspace))
    if settings.mount:
        wait_for_mount(
            Path(settings.mount),
            workspace,
            settings.mount_wait_s,
            lambda text: _complain(f"trial-keeper: {text}"),
        )
    if settings.trial_id is None:
        if reaper is not None:
            reaper.wait_for_start()
        if settings.mount:
            check_writing(written_folder(workspace, None))
        check_version(settings, workspace)
    else:
        trial = read_trial(workspace, settings.trial_id, settings.command)
        if reaper is not None:
            reaper.wait_for_start()
        if settings.mount:
            check_writing(written_folder(workspace, settings.trial_id))
        key, folder = claim_attempt(workspace, settings, settings.trial_id, task)
        try:
            check_version(settings, workspace)
            trial = with_code(workspace, trial, folder)
            _end_older_attempts(workspace, key)
        except (KeeperError, _Stopped) as error:
            _record_failure(settings, key, folder, error)
            raise
    import asyncio

    from trial_keeper.host.host import Host

    host = Host(settings, workspace, task, reaper)
    if settings.trial_id is not None:
        host.begin(trial, key, folder)
    return asyncio.run(host.run())


class _Stopped(SystemExit):
    """A signal ended the keeper before its trial started."""

    def __init__(self, number: int) -> None:
        super().__init__(of_signal(number))
        self.exit_code = of_signal(number)

    def __str__(self) -> str:
        return "stopped before the command started"


def _end_by_signal(number: int, _: object) -> None:
    raise _Stopped(number)


def _record_failure(
    settings: KeeperSettings, key: AttemptKey, folder: AttemptFolder, error: KeeperError | _Stopped
) -> None:
    """Write exit.json. It reaches a manager with another protocol version, or one that sees a different exit code."""
    from trial_keeper.core.attempt import never_started

    ended = never_started(
        key, settings.streams, error.exit_code, time.time(), str(error), ExitReason.JOB_LOST
    )
    # If the storage is full, only the exit code reports the failure.
    with contextlib.suppress(OSError):
        replace_file(folder.exit_json, exit_to_bytes(ended, settings.token))


def _end_older_attempts(workspace: Workspace, key: AttemptKey) -> None:
    """End the trial of a keeper that was killed together with its orphan reaper: two attempts must not run at once."""
    if os.getpid() == 1:  # no other process exists in this container
        return
    try:
        attempts = workspace.attempts_of(key.trial_id)
    except OSError as error:
        from trial_keeper.host.attempt_files import not_readable

        raise not_readable(workspace.trial(key.trial_id).attempts, error) from error
    # If two keepers start at the same moment, the newer attempt continues.
    older = [
        str(workspace.attempt(each).path)
        for each in attempts
        if each.task == key.task and sort_key(each.attempt_id) < sort_key(key.attempt_id)
    ]
    if not older:
        return
    from trial_keeper.host.process import end_marked

    if ended := end_marked(older):
        _complain(
            f"trial-keeper: killed {ended} processes that an earlier attempt of this trial left running"
        )


def check_version(settings: KeeperSettings, workspace: Workspace) -> None:
    """Compare this keeper with the manager that manager.json names.

    Raises:
        VersionMismatch: the versions differ in the first two numbers.
        WorkspaceMissing: there is no valid manager.json.
    """
    from trial_keeper.host.attempt_files import read_shared

    try:
        manager = ManagerDocument.from_bytes(read_shared(workspace, workspace.manager_json))
    except DocumentInvalid as error:
        raise WorkspaceMissing(f"{error}; run `nnictl resume` so that the manager writes it again") from error
    if settings.version_check and not versions_agree(manager.version, __version__):
        raise VersionMismatch(mismatch_message(manager.version, __version__))


if __name__ == "__main__":
    sys.exit(main())
