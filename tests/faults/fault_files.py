"""Faults in files that the manager and the keepers need: an attempt is removed or forged, or a state file is truncated."""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from strangers import NOBODY

from nni_manager.store.folders import WORLD_WRITABLE_STICKY, ExperimentFolder
from nni_sdk.records import encode
from trial_keeper.wire.attempt_ids import new_attempt_id
from trial_keeper.wire.messages import Stream
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import AttemptFolder, Workspace

FORGED_VALUE = 424_242
"""A value that no run reports: see RUN_STRIDE of fault_checker.py."""
TASK = "main-0"
SPECIAL = ("pipe", "link", "sparse")
"""A pipe, a link to an endless device, and a sparse file of 4 GiB."""
# A forger has no token to make a valid signature, so forged documents have a random one.
_SIGNATURE = {"signature": secrets.token_hex(32)}


def remove_attempt(storage: Workspace, trial_id: str, attempt: str, aside: Path) -> bool:
    """Remove an attempt's folder atomically while processes write to it; return whether the folder existed.

    `aside`: an unused path on the same file system.
    """
    try:
        # Rename the folder before it is removed. Otherwise a process that still writes into the folder could recreate files that
        # rmtree has deleted.
        (storage.trial(trial_id).attempts / attempt).rename(aside)
    except FileNotFoundError:
        return False
    shutil.rmtree(aside)
    return True


def forge_attempts(storage: Workspace, trial_id: str) -> str:
    """Write two forged attempts with invented names for a trial.

    If this process is root, it writes them as another user.

    Returns:
        The file system's reason for a refusal; empty without a refusal.
    """
    return _in_attempts(storage, trial_id, lambda attempts: forge(attempts, storage.root.name, trial_id))


def _in_attempts(storage: Workspace, trial_id: str, attack: Callable[[int], None]) -> str:
    """Make the attempts folder of a trial world-writable, and call `attack` with a descriptor of this folder. If this process is
    root, `attack` runs as another user. Return the file system's reason for a refusal, or an empty text.
    """
    try:
        attempts = os.open(storage.trial(trial_id).attempts, os.O_DIRECTORY)
        # On a cluster's shared storage, the attempts folder has this mode, because containers of any user write into it.
        os.fchmod(attempts, WORLD_WRITABLE_STICKY)
    except OSError as error:
        return str(error.strerror)
    try:
        with _as_second_user():
            attack(attempts)
    except OSError as error:
        return str(error.strerror)
    finally:
        os.close(attempts)
    return ""


def forge(attempts: int, experiment_id: str, trial_id: str) -> None:
    """Write two forged attempts of a trial as the current user.

    `attempts`: a descriptor of the trial's attempts folder. Except for the signature, the files resemble those of a real keeper.

    Raises:
        OSError: the file system refuses.
    """
    for name in (new_attempt_id(time.time() + 3600), str(1000 + secrets.randbelow(1000))):
        _forge(attempts, experiment_id, trial_id, name)


def put_special_files(storage: Workspace, trial_id: str) -> str:
    """Add attempts to a trial's attempts folder. The attempt.json of each is a special file: see `special_files`.

    Returns:
        The file system's reason for a refusal; empty without a refusal.
    """
    return _in_attempts(storage, trial_id, partial(special_files, kinds=SPECIAL))


def append_to_metrics(storage: Workspace, trial_id: str, attempt: str) -> str:
    """As another user, append a result to the metrics of a running attempt. Return the file system's reason for a refusal; empty
    without a refusal.
    """
    metrics = AttemptFolder(Path(attempt) / TASK).stream(Stream.METRICS)

    def append(attempts: int) -> None:
        descriptor = os.open(metrics, os.O_WRONLY | os.O_APPEND, dir_fd=attempts)
        with open(descriptor, "ab") as opened:
            opened.write(encode(0, trial_id, "FINAL", 0, FORGED_VALUE))

    return _in_attempts(storage, trial_id, append)


def special_files(attempts: int, kinds: Sequence[str]) -> None:
    """Create attempts whose attempt.json blocks its reader or never ends.

    Their names contain a future time, so that keepers read them first. `attempts`: a descriptor of the folder of attempts.
    `kinds`: names from SPECIAL, or "lease" for a file on which this process holds a lease.

    Raises:
        OSError: the file system refuses.
    """
    for number, kind in enumerate(kinds):
        name = new_attempt_id(time.time() + 3600 + number)
        document = AttemptFolder(Path(name) / TASK).attempt_json
        for made in (document.parent.parent, document.parent):
            os.mkdir(made, 0o755, dir_fd=attempts)
        match kind:
            case "pipe":
                os.mkfifo(document, 0o644, dir_fd=attempts)
            case "link":
                os.symlink("/dev/zero", document, dir_fd=attempts)
            case "sparse" | "lease":
                descriptor = os.open(document, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=attempts)
                os.truncate(descriptor, 4 << 30)
                if kind == "sparse":
                    os.close(descriptor)
                    continue
                # The descriptor stays open, because the kernel releases a file lease when its descriptor is closed. When another
                # process opens the file, the kernel sends SIGIO to this process, which would end it.
                signal.signal(signal.SIGIO, signal.SIG_IGN)
                # On a file system without leases, the file stays an ordinary sparse file.
                with contextlib.suppress(OSError):
                    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)


@contextlib.contextmanager
def _as_second_user() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, -1)
    try:
        yield
    finally:
        os.setresuid(0, 0, -1)


def _forge(attempts: int, experiment_id: str, trial_id: str, name: str) -> None:
    """Write one attempt. `attempts` is a descriptor, because another user may have no access to the parent folders."""
    folder = AttemptFolder(Path(name) / TASK)
    metrics = encode(0, trial_id, "FINAL", 0, FORGED_VALUE)
    now_s = time.time()
    attempt = {"attempt": int(name)} if name.isdecimal() else {"attempt_id": name}
    key = {"trial_id": trial_id, **attempt, "task": TASK}
    ended = {
        **key,
        "reason": ExitReason.SUCCEEDED.value,
        "exit_code": 0,
        # This start time is later than that of any real attempt, so the forged attempt appears to be the newest.
        "started_at_s": now_s + 3600,
        "ended_at_s": now_s + 3601,
        "final_sizes": {"metrics": len(metrics)},
        "message": "",
    }
    begun = {**key, "experiment_id": experiment_id, "job_id": trial_id, "started_at_s": now_s + 3600}
    files = {
        folder.path / "attempt.json": json.dumps(begun | _SIGNATURE).encode(),
        folder.stream(Stream.METRICS): metrics,
        # The exit record is written last, because a reader that finds the exit record reads all other files too.
        folder.exit_json: json.dumps(ended | _SIGNATURE).encode(),
    }
    for made in (folder.path.parent, folder.path, folder.stream(Stream.METRICS).parent):
        os.mkdir(made, 0o755, dir_fd=attempts)
    for path, content in files.items():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=attempts)
        with open(descriptor, "wb") as opened:
            opened.write(content)


def state_files(folder: ExperimentFolder, storage: Workspace) -> list[Path]:
    """The files, besides the database, that a restarted manager needs."""
    mine = [*folder.path.glob("*.json"), *folder.path.glob("*.pem"), *folder.jobs.glob("*.json")]
    return sorted(path for path in {*mine, storage.manager_json} if path.is_file())


def tear(files: list[Path], pick: float) -> str:
    """Empty one of the files, or cut it in half. `pick`, from 0 to 1, selects the file and the damage. Return a description."""
    number = int(pick * 2 * len(files))
    path, is_emptied = files[number // 2], number % 2 == 0
    os.truncate(path, 0 if is_emptied else path.stat().st_size // 2)
    return f"{path.parent.name}/{path.name} was {'emptied' if is_emptied else 'cut in half'}"
