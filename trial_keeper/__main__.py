"""`trial-keeper`: the first process of a task. Started by a job, told what to do by its environment."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trial_keeper import __version__
from trial_keeper.cluster_environment import task_identity
from trial_keeper.errors import KeeperBug, KeeperError, UserMistake, VersionMismatch, WorkspaceMissing
from trial_keeper.exit_codes import known, of_signal
from trial_keeper.settings import PREFIX, KeeperSettings
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.versions import mismatch_message, versions_agree
from trial_keeper.wire.workspace import (
    AttemptFolder,
    DocumentInvalid,
    ManagerDocument,
    Workspace,
    exit_to_bytes,
    replace_file,
)

GRACE_S = f"{PREFIX}GRACE_S"
HELP = """\
usage: trial-keeper [--grace-s N] [--help] [--version]
       trial-keeper doctor [--json]

Runs the trial of one job and delivers its metrics and logs to the manager. It is the first process of a task: a job starts
it, and the environment says what to do. You do not start it by hand; `nnictl create --config FILE` makes such jobs.

`trial-keeper doctor`, run inside a container of a job, looks at everything a keeper depends on there: its settings, the
shared storage, the clock, the manager's version and address, the token, bash, GPUs. One line per check, with the remedy.
It changes nothing, and does not disturb the trial that runs.

A SIGTERM, SIGINT or SIGHUP to the keeper is passed on to the trial as SIGTERM. After a grace everything the trial has started
is killed, at once when a second signal comes.

options:
  --grace-s N  seconds from the polite signal to the kill, in place of TRIAL_KEEPER_GRACE_S (30 by default)
  --help       this page
  --version    the version; keeper and manager must agree in its first two numbers
  --json       of doctor: a list of objects with check, outcome (OK, WARN, FAIL, SKIP), found and remedy

environment:
  TRIAL_KEEPER_*  the job's settings, written by the manager
  PAI_*, FC_*     which task of which job this container is, written by the cluster

exit code: the trial's own, 128+n if signal n ended it, or 100-119 when the keeper itself could not do its work.
doctor: 0 when nothing failed, 1 otherwise.

example:
  kubectl exec POD -- trial-keeper doctor
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one job; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_standard_descriptors()
    match arguments:
        case []:
            return _run_job(os.environ)
        case ["--grace-s", seconds]:
            return _run_job({**os.environ, GRACE_S: seconds})
        case ["--help" | "-h"]:
            print(HELP, end="")
            return 0
        case ["--version"]:
            print(f"trial-keeper {__version__}")
            return 0
        case ["doctor"]:
            return _run_doctor(as_json=False)
        case ["doctor", "--json"]:
            return _run_doctor(as_json=True)
        case ["doctor", "--help" | "-h"]:
            print(HELP, end="")
            return 0
    _complain(
        f"cannot use {' '.join(arguments)!r}: trial-keeper takes --grace-s N, --help, --version, doctor or doctor --json only"
    )
    return UserMistake.exit_code


def _open_standard_descriptors() -> None:
    """Whoever starts a keeper with one of them closed would find the keeper's files under its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _complain(text: str) -> None:
    # Nobody may be reading: the exit code still says it.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


def _run_doctor(*, as_json: bool) -> int:
    from trial_keeper.host import doctor

    try:
        return doctor.report(
            doctor.examine(os.environ), lambda line: print(line, flush=True), as_json=as_json
        )
    except BrokenPipeError:
        # Nobody reads any more; Python would complain once more when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _run_job(environ: Mapping[str, str]) -> int:
    try:
        settings = KeeperSettings.from_environ(environ)
        return _run_trial(settings)
    except KeeperError as error:
        _complain(f"trial-keeper: {error}")
        return error.exit_code
    except Exception:  # noqa: BLE001 - any code but this one would pass for the trial's own
        import traceback

        _complain(
            f"{traceback.format_exc()}trial-keeper: cannot go on: {KeeperBug()} Report it, with these lines."
        )
        return KeeperBug.exit_code


def _run_trial(settings: KeeperSettings) -> int:
    from trial_keeper.host.attempt_files import claim_attempt, read_trial
    from trial_keeper.host.mount import check_writing, wait_for_mount, with_code, written_folder

    # The first process of a container would be deaf to them. The host has handlers of its own once the trial runs.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end_by_signal)
    identity = task_identity(os.environ, settings.role)
    workspace = Workspace(Path(settings.workspace))
    if settings.mount:
        wait_for_mount(
            Path(settings.mount),
            workspace,
            settings.mount_wait_s,
            lambda text: _complain(f"trial-keeper: {text}"),
        )
    if settings.trial_id is None:
        return _run_trials(settings, workspace, identity.task)
    trial = read_trial(workspace, settings.trial_id, settings.command)
    if settings.mount:
        check_writing(written_folder(workspace, settings.trial_id))
    key, folder = claim_attempt(workspace, settings.trial_id, identity.task)
    try:
        check_version(settings, workspace)
        trial = with_code(workspace, trial, folder)
    except (KeeperError, _Stopped) as error:
        _record_failure(settings, key, folder, error)
        raise
    _end_older_attempts(workspace, key)
    from trial_keeper.host.host import Host

    host = Host(settings, workspace, identity.task)
    host.begin(trial, key, folder)
    import asyncio  # the trial runs already

    return asyncio.run(host.run())


def _run_trials(settings: KeeperSettings, workspace: Workspace, task: str) -> int:
    import asyncio

    from trial_keeper.host.host import Host
    from trial_keeper.host.mount import check_writing, written_folder

    if settings.mount:
        check_writing(written_folder(workspace, settings.trial_id))
    check_version(settings, workspace)
    return asyncio.run(Host(settings, workspace, task).run())


class _Stopped(SystemExit):
    """A signal ended the keeper before its trial began."""

    def __init__(self, number: int) -> None:
        super().__init__(of_signal(number))
        self.exit_code = of_signal(number)

    def __str__(self) -> str:
        return "stopped before its command began"


def _end_by_signal(number: int, _: object) -> None:
    raise _Stopped(number)


def _record_failure(
    settings: KeeperSettings, key: AttemptKey, folder: AttemptFolder, error: KeeperError | _Stopped
) -> None:
    """exit.json carries it to the manager, which may not speak this keeper's protocol, or see another exit code."""
    own = known(error.exit_code)
    now_s = time.time()
    ended = TrialEnded(
        key,
        ExitReason.JOB_LOST if own is None else own.reason,
        error.exit_code,
        now_s,
        now_s,
        dict.fromkeys(settings.streams, 0),
        str(error),
    )
    # On storage that is full the exit code alone says it.
    with contextlib.suppress(OSError):
        replace_file(folder.exit_json, exit_to_bytes(ended))


def _end_older_attempts(workspace: Workspace, key: AttemptKey) -> None:
    """A keeper that was killed with its guard may have left its trial running, beside which this one would start."""
    if key.attempt == 0 or os.getpid() == 1:  # nothing can be there
        return
    from trial_keeper.host.process import end_marked

    older = [workspace.attempt(replace(key, attempt=number)).path for number in range(key.attempt)]
    ended = end_marked([str(path) for path in older])
    if ended:
        _complain(
            f"trial-keeper: ended {ended} processes that an earlier attempt of this trial had left here"
        )


def check_version(settings: KeeperSettings, workspace: Workspace) -> None:
    """Compare this keeper with the manager that manager.json names.

    Raises:
        VersionMismatch: they differ in the first two numbers.
        WorkspaceMissing: there is no such document.
    """
    from trial_keeper.host.attempt_files import read_shared

    try:
        manager = ManagerDocument.from_bytes(read_shared(workspace.manager_json))
    except DocumentInvalid as error:
        raise WorkspaceMissing(f"{error}; let the manager write it again with `nnictl resume`") from error
    if settings.version_check and not versions_agree(manager.version, __version__):
        raise VersionMismatch(mismatch_message(manager.version, __version__))


if __name__ == "__main__":
    sys.exit(main())
