"""All paths and documents of a workspace.

    <mount>/<experiment id>/
        manager.json                        written by the manager: its version and addresses
        run.sh                              the script of each job
        code-<digest>.tar.gz                a snapshot of the training code, for jobs without access to the code folder
        checkpoints/                        what trials resume from, if the tuner supports it
        sdk/nni_sdk/                        the manager's own nni_sdk, for a Python that has none
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
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from trial_keeper.wire.attempt_ids import is_attempt_id, is_legacy_number, sort_key
from trial_keeper.wire.checkpoints import Checkpoint, checkpoint_of
from trial_keeper.wire.messages import AttemptKey, Environment, StopTrial, Stream, TrialEnded
from trial_keeper.wire.reasons import STOP_REASONS, ExitReason
from trial_keeper.wire.safe_open import MAX_DOCUMENT_BYTES, read_beneath
from trial_keeper.wire.signatures import DocumentInvalid, check_signature, signed
from trial_keeper.wire.small_files import replace_file as replace_file  # noqa: PLC0414 - its importers write documents

# An id names a folder, so path separators and ".." are excluded.
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,239}")
# Per owner: more than a cluster starts. Anyone with write access to the folder could create any number of folders.
_NEWEST_ATTEMPTS = 1000
# Without indentation, which would use Python's slow encoder between two trials.
_TEXT_OF = json.JSONEncoder(ensure_ascii=False).encode
_Read = TypeVar("_Read")

# trials/<trial id>/attempts/<id>/<task>
_ATTEMPT_DEPTH = 5

MAX_ATTEMPT_JSON_BYTES = 4096
"""The bound of attempt.json: some ids, each at most 240 bytes, and a signature."""


MAX_PACKAGES_BYTES = 512 << 10
"""The bound of a list of packages: 10,000 names with versions."""

MARKER = "NNI_SYS_DIR"
"""The variable that identifies a process's attempt: every process of the attempt inherits it, and its value is unique."""


def is_safe_name(name: str) -> bool:
    """True if the name can be a single path component in a workspace."""
    return _SAFE_NAME.fullmatch(name) is not None


def safe_name(name: str) -> str:
    """Return the name unchanged.

    Raises:
        ValueError: the name could escape its parent folder.
    """
    if not is_safe_name(name):
        raise ValueError(
            f"cannot use {name!r} as the name of a folder; use letters, digits, '.', '_' and '-' only"
        )
    return name


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

    def read_manager_json(self) -> "tuple[ManagerDocument, int]":
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


@dataclass(frozen=True, slots=True)
class ManagerDocument:
    """manager.json: the manager that owns the experiment, and its addresses (HOST:PORT; keepers try them in turn).

    `certificate` is the manager's own, as PEM: keepers then use TLS and accept no other certificate. None on loopback.
    """

    experiment_id: str
    version: str
    addresses: tuple[str, ...]
    certificate: str | None = None

    def to_bytes(self) -> bytes:
        """The file's content."""
        document = _fields_of(self)
        if self.certificate is None:
            del document["certificate"]
        return _dump(document)

    @classmethod
    def from_bytes(cls, content: bytes) -> "ManagerDocument":
        """Parse the file's content.

        Raises:
            DocumentInvalid: not such a document.
        """
        return _read("manager.json", content, cls)[0]


@dataclass(frozen=True, slots=True)
class TrialDocument:
    """trial.json: the data that a keeper needs to run a trial.

    `command` is executed by bash. `code_dir` is the working directory, as a path in the container; it is empty if
    `code_snapshot`, the name of a file in the workspace, has to be unpacked first. `gpu_indices` is None if the trial may use
    all GPUs of the container, and empty if the trial may use none. `seed`: for the training code; None: an earlier manager.
    `checkpoints`: those of attempts of other jobs from which the trial may continue; the manager has verified their signatures.
    """

    trial_id: str
    sequence_id: int
    command: str
    code_dir: str
    gpu_indices: tuple[int, ...] | None = None
    code_snapshot: str | None = None
    seed: int | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    result_metrics: tuple[str, ...] = ()
    """The numbers that a final result must have; empty: one, as NNI's."""

    def to_bytes(self) -> bytes:
        """The file's content."""
        document = _fields_of(self)
        checkpoints = [asdict(each) for each in document.pop("checkpoints")]
        document["gpu_indices"] = document.pop("gpu_indices")  # the last one in the file
        return _dump(document | {"checkpoints": checkpoints} if checkpoints else document)

    @classmethod
    def from_bytes(cls, content: bytes) -> "TrialDocument":
        """Parse the file's content.

        Raises:
            DocumentInvalid: not such a document.
        """
        return _read("trial.json", content, cls)[0]


@dataclass(frozen=True, slots=True)
class AttemptDocument:
    """attempt.json: which attempt a directory holds. Its keeper signs it with the job's token before the command starts.

    `started_at_s` is in seconds since the epoch, on the keeper's clock.
    """

    experiment_id: str
    job_id: str
    key: AttemptKey
    started_at_s: float

    def to_bytes(self, token: str) -> bytes:
        """The file's content, signed."""
        return _dump(signed(_ATTEMPT, _fields_of(self), token))

    @classmethod
    def from_bytes(cls, content: bytes, token_of: Callable[[str], str]) -> "AttemptDocument":
        """Parse the file's content. `token_of` returns the token of a job by its id.

        Raises:
            DocumentInvalid: not such a document.
            SignatureInvalid: the signature does not match the token of the job that the document names.
        """
        read, document = _read(_ATTEMPT, content, cls)
        check_signature(_ATTEMPT, document, token_of(read.job_id))
        return read


_ATTEMPT = "attempt.json"
_EXIT = "exit.json"


def exit_to_bytes(ended: TrialEnded, token: str) -> bytes:
    """The content of exit.json, signed with the job's token."""
    document = _fields_of(ended)
    document["final_sizes"] = {stream.value: size for stream, size in ended.final_sizes.items()}
    return _dump(signed(_EXIT, document, token))


def exit_from_bytes(content: bytes, token: str | None = None) -> TrialEnded:
    """Parse the content of exit.json. `token` None skips the signature check: attempts of version 0.6 are unsigned.

    Raises:
        DocumentInvalid: not such a document.
        SignatureInvalid: the signature does not match the token.
    """
    ended, document = _read(_EXIT, content, TrialEnded)
    if token is not None:
        check_signature(_EXIT, document, token)
    return ended


def stop_to_bytes(stop: StopTrial) -> bytes:
    """The content of stop.json."""
    return _dump(_fields_of(stop))


def stop_from_bytes(content: bytes) -> StopTrial:
    """Parse the content of stop.json.

    Raises:
        DocumentInvalid: not such a document.
    """
    stop, _ = _read("stop.json", content, StopTrial)
    if stop.reason not in STOP_REASONS:
        error = ValueError(f"{stop.reason.value!r} is not a reason to stop a trial")
        raise _invalid("stop.json", error) from error
    return stop


def stop_notice_to_bytes(reason: ExitReason) -> bytes:
    """The content of stop_notice.json."""
    return _dump({"reason": reason})


# ---- fields: the same names in the documents and in their dataclasses, except that a key is three fields


def _fields_of(document: Any) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for each in fields(document):
        value = getattr(document, each.name)
        if each.name == "key":
            written |= asdict(value)
        else:
            written[each.name] = asdict(value) if each.name == "environment" else value
    return written


def _read(name: str, content: bytes, kind: type[_Read]) -> tuple[_Read, dict[str, Any]]:
    """Parse the document with this name. Returns the object and all fields."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DocumentInvalid(f"cannot read {name}: it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise DocumentInvalid(f"cannot read {name}: it is not a JSON object")
    found = _ADDED_LATER | document
    try:
        values = {
            each.name: _key_of(found) if each.name == "key" else _READERS[each.name](found[each.name])
            for each in fields(kind)  # type: ignore[arg-type]
        }
        return kind(**values), document
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _invalid(name, error) from error


def _invalid(name: str, error: Exception) -> DocumentInvalid:
    return DocumentInvalid(f"cannot read {name}: a field is missing or invalid ({error!r})")


def _dump(document: dict[str, Any]) -> bytes:
    return (_TEXT_OF(document) + "\n").encode()


def _key_of(document: dict[str, Any]) -> AttemptKey:
    # Version 0.6 wrote a number.
    attempt_id = str(_typed(document["attempt"], int)) if "attempt" in document else document["attempt_id"]
    return AttemptKey(_text(document["trial_id"]), _text(attempt_id), _text(document["task"]))


def _typed(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"{value!r} is not {' or '.join(kind.__name__ for kind in kinds)}")
    if type(value) is str:
        value.encode()  # rejects a lone surrogate, which JSON allows and nothing can store
    return value


def _of(*kinds: type) -> Callable[[Any], Any]:
    return lambda value: _typed(value, *kinds)


_text = _of(str)


def _tuple_of(kind: type, value: Any) -> tuple[Any, ...]:
    return tuple(_typed(each, kind) for each in _typed(value, list))


def _addresses(value: Any) -> tuple[str, ...]:
    if not (addresses := _tuple_of(str, value)):
        raise ValueError("no address")
    return addresses


def _exit_code(value: Any) -> int:
    code: int = _typed(value, int)
    if not 0 <= code <= 255:
        raise ValueError(f"{code} is not an exit code")
    return code


_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("experiment_id", "version", "trial_id", "command", "code_dir", "message"), _text),
    **dict.fromkeys(("certificate", "code_snapshot"), _of(str, type(None))),
    **dict.fromkeys(("started_at_s", "ended_at_s"), lambda value: float(_typed(value, int, float))),
    "job_id": lambda value: safe_name(_text(value)),
    "sequence_id": _of(int),
    "seed": _of(int, type(None)),
    "result_metrics": lambda value: _tuple_of(str, value),
    "addresses": _addresses,
    "gpu_indices": lambda value: None if value is None else _tuple_of(int, value),
    "reason": ExitReason,
    "exit_code": _exit_code,
    "final_sizes": lambda value: {Stream(word): _typed(size, int) for word, size in value.items()},
    "metrics_size_at_stop": _of(int, type(None)),
    "checkpoints": lambda value: tuple(map(checkpoint_of, _typed(value, list))),
    "warnings": lambda value: _tuple_of(str, value),
    "environment": lambda value: Environment(**{name: _text(text) for name, text in value.items()}),
}
_ADDED_LATER: dict[str, Any] = {
    "certificate": None,
    "code_snapshot": None,
    "seed": None,
    "result_metrics": [],
    "metrics_size_at_stop": None,
    "warnings": [],
    "checkpoints": [],
    "environment": {},
}
"""The values of fields that documents of earlier managers and keepers do not have."""
