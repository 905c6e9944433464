"""All paths of a workspace.

    <mount>/<experiment id>/
        manager.json                        written by the manager: its version and addresses
        run.sh                              the script of each job
        code-<digest>.tar.gz                a snapshot of the training code, for jobs without access to the code folder
        checkpoints/                        what trials resume from, if the tuner supports it
        sdk/nni_sdk/                        the manager's own nni_sdk, for a Python that has none
        keeper/                             archives of the keeper, for images that have none
        keeper/unpacked/                    where run.sh unpacks one, in a container without another place for programs
        sdk/nni/                            `import nni` where no package nni is installed
        trials/<trial id>/
            trial.json, parameter.cfg       written by the manager
            stop.json                       written by the manager to stop the trial when no stream can deliver the request
            attempts/<id>/<task>/           written by one keeper; the trial's NNI_SYS_DIR
                attempt.json                which attempt this is, signed; without this file the folder is ignored
                parameter.cfg, .nni/metrics, exit.json
                stop_notice.json            why the trial is to end, for nni_sdk.should_stop
                .nni/awaits_stop_notice     written by nni_sdk: SIGTERM may follow the notice later
                output/{stdout, stderr, trial.log}
                checkpoints/                what training code saved to continue from: nni_sdk.checkpoints
                checkpoints.json            these checkpoints, signed by the keeper
                checkpoint_sources.json     the verified checkpoints from which this attempt may continue
                code/                       the unpacked snapshot of this attempt

Manager and keeper have the same tree at different mount points, so each side makes a `Workspace` from its own root.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.attempt_ids import is_attempt_id, is_legacy_number, sort_key
from trial_keeper.wire.documents import ManagerDocument
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.safe_open import MAX_DOCUMENT_BYTES, is_safe_name, read_beneath, safe_name

# Per owner: more than a cluster starts. Anyone with write access to the folder could create any number of folders.
_NEWEST_ATTEMPTS = 1000
# trials/<trial id>/attempts/<id>/<task>
_ATTEMPT_DEPTH = 5

MAX_ATTEMPT_JSON_BYTES = 4096
"""The bound of attempt.json: some ids, each at most 240 bytes, and a signature."""


MAX_PACKAGES_BYTES = 512 << 10
"""The bound of a list of packages: 10,000 names with versions."""

MARKER = "NNI_SYS_DIR"
"""The variable that identifies a process's attempt: every process of the attempt inherits it, and its value is unique."""


_STREAM_FILES = {
    Stream.METRICS: ".nni/metrics",
    Stream.STDOUT: "output/stdout",
    Stream.STDERR: "output/stderr",
    Stream.KEEPER: "output/trial.log",
}


class _Inside:
    """An attribute: the path of `name` in the folder that the attribute `folder` holds."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = folder, name

    def __get__(self, owner: object, _: type) -> Path:
        folder: Path = getattr(owner, self._folder)
        return folder / self._name


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """The files that one keeper writes for one attempt."""

    path: Path

    parameter_cfg = _Inside("path", "parameter.cfg")
    """The parameters, at the path that the SDK reads."""
    output = _Inside("path", "output")
    """NNI_OUTPUT_DIR."""
    code = _Inside("path", "code")
    """The attempt's own copy of the training code, if it comes from a snapshot."""
    attempt_json = _Inside("path", "attempt.json")
    """The document that identifies the attempt, signed by its keeper."""
    exit_json = _Inside("path", "exit.json")
    """The record of the attempt's end, signed by its keeper; absent before the end."""

    checkpoints = _Inside("path", "checkpoints")
    """The checkpoints that the training code has saved."""
    checkpoints_json = _Inside("path", "checkpoints.json")
    """The saved checkpoints that may be loaded, signed by the attempt's keeper; absent before the first."""
    checkpoint_sources_json = _Inside("path", "checkpoint_sources.json")
    """The verified checkpoints from which the attempt may continue; absent if there are none."""

    stop_notice_json = _Inside("path", "stop_notice.json")
    """Tells training code that asks `nni_sdk.should_stop` why the trial is to end; absent before the stop."""
    python_json = _Inside("path", ".nni/python.json")
    """The training code's own report of its interpreter; absent if it does not use the SDK."""
    awaits_stop_notice = _Inside("path", ".nni/awaits_stop_notice")
    """Exists once training code has asked `nni_sdk.should_stop`."""

    def stream(self, stream: Stream) -> Path:
        """The file of a stream."""
        return self.path / _STREAM_FILES[stream]


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """The files that the manager writes for one trial, and its attempts."""

    path: Path

    trial_json = _Inside("path", "trial.json")
    """The trial's data for the keeper."""
    parameter_cfg = _Inside("path", "parameter.cfg")
    """The parameters, in the SDK's format."""
    stop_json = _Inside("path", "stop.json")
    """The stop request for the trial; exists only if one of its keepers had no stream to receive the request."""
    attempts = _Inside("path", "attempts")
    """One folder per attempt, named by its id."""
    checkpoints = _Inside("path", "checkpoints")
    """For files that training code writes, in whatever attempt: NNI_CHECKPOINT_DIR. Nothing here reads them."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folder of one experiment on the shared storage."""

    root: Path

    manager_json = _Inside("root", "manager.json")
    """The manager's current addresses; replaced by rename when they change."""
    run_sh = _Inside("root", "run.sh")
    """The script that every job runs."""
    sdk = _Inside("root", "sdk")
    """The folder on a trial's Python path; it holds `sdk_packages` and nothing else."""
    checkpoints = _Inside("root", "checkpoints")
    """The checkpoints from which later trials resume, if the tuner supports that."""
    trials = _Inside("root", "trials")
    """One folder per trial."""
    keeper = _Inside("root", "keeper")
    """The archives of the keeper, for containers whose image has none."""
    unpacked_keepers = _Inside("keeper", "unpacked")
    """Where a container unpacks an archive that has no other place for programs."""
    packages = _Inside("root", "packages")
    """Lists of installed packages. The name of a file is the SHA-256 of its content, so equal lists are one file."""

    @property
    def sdk_packages(self) -> tuple[Path, Path, Path]:
        """The packages nni_sdk, nni and nni_sdk.integrations. No other folders are in `sdk`; a package follows its parent."""
        return self.sdk / "nni_sdk", self.sdk / "nni", self.sdk / "nni_sdk" / "integrations"

    def code_snapshots(self) -> list[Path]:
        """All snapshots of the training code, by name."""
        return sorted(self.root.glob("code-*.tar.gz"))

    def code_snapshot(self, digest: str) -> Path:
        """The snapshot of training code with this digest."""
        return self.file(f"code-{digest}.tar.gz")

    def file(self, name: str) -> Path:
        """The path of a file that a document in the workspace names.

        Raises:
            ValueError: the name could escape the workspace.
        """
        return self.root / safe_name(name)

    def trial(self, trial_id: str) -> TrialFolder:
        """The folder of a trial.

        Raises:
            ValueError: the id could escape the workspace.
        """
        return TrialFolder(self.trials / safe_name(trial_id))

    def attempt(self, key: AttemptKey) -> AttemptFolder:
        """The folder of an attempt.

        Raises:
            ValueError: an id could escape the workspace.
        """
        return AttemptFolder(
            self.trial(key.trial_id).attempts / safe_name(key.attempt_id) / safe_name(key.task)
        )

    def read_document(self, path: Path) -> bytes:
        """The content of a document that the manager wrote.

        Raises:
            UnsafePath: it is not a regular file, or larger than any document.
            OSError: it cannot be read.
        """
        return read_beneath(self.root, path, MAX_DOCUMENT_BYTES).data

    def read_manager_json(self) -> tuple[ManagerDocument, int]:
        """The content of manager.json, and the uid of its owner: the manager's user, who may differ from a container's.

        Raises:
            DocumentInvalid: it is not such a document.
            OSError: as for `read_document`.
        """
        content = read_beneath(self.root, self.manager_json, MAX_DOCUMENT_BYTES)
        return ManagerDocument.from_bytes(content.data), content.uid

    def attempt_folder_of(self, path: Path) -> Path:
        """The folder of the attempt that a file belongs to."""
        return self.root.joinpath(*path.relative_to(self.root).parts[:_ATTEMPT_DEPTH])

    def warm_marker(self, job_id: str) -> str:
        """The marker of the processes of a job's warm interpreter, in place of an attempt's folder. No such folder exists."""
        return str(self.root / "warm" / safe_name(job_id))

    def attempts_of(
        self, trial_id: str, folders_in: Callable[[Path], list[str]] | None = None
    ) -> list[AttemptKey]:
        """The attempts that have a folder, sorted by start. A folder alone does not prove that one of our keepers made it.

        Other names are skipped, and all but the newest thousand folders of each owner. `folders_in` lists the folders in a
        folder, for storage that is not on this machine.

        Raises:
            PermissionError: this user can open none of the folders. If at least one is readable, unreadable ones are skipped:
                anyone can create them.
            OSError: the storage cannot list them.
        """
        folder = self.trial(trial_id).attempts
        names = _newest_folders_in(folder) if folders_in is None else folders_in(folder)
        ids = [name for name in names if is_attempt_id(name) or is_legacy_number(name)]
        keys: list[AttemptKey] = []
        closed: PermissionError | None = None
        for attempt_id in sorted(ids, key=sort_key):
            try:
                tasks = (folders_in or _folders_in)(folder / attempt_id)
            except PermissionError as error:
                closed = error
            else:
                keys += [
                    AttemptKey(trial_id, attempt_id, task) for task in sorted(filter(is_safe_name, tasks))
                ]
        if closed is not None and not keys:
            raise closed
        return keys


def _folders_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):  # it is gone, or something else is in its place
        return []


def _newest_folders_in(folder: Path) -> list[str]:
    names = _folders_in(folder)
    if len(names) <= _NEWEST_ATTEMPTS:
        return names
    # Another user's folders must not crowd out a keeper's.
    by_owner: dict[int, list[str]] = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            by_owner.setdefault(os.lstat(folder / name).st_uid, []).append(name)
    return [name for own in by_owner.values() for name in sorted(own, key=sort_key)[-_NEWEST_ATTEMPTS:]]
