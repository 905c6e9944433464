"""Every path in a workspace, and the documents that lie there.

    <mount>/<experiment id>/
        manager.json                        written by the manager: its version and addresses
        run.sh                              what a job runs
        code-<digest>.tar.gz                the training code as jobs unpack it; not with jobs that see the code folder itself
        checkpoints/                        what trials go on from, with a tuner that lets them
        sdk/nni_sdk/                        the manager's own nni_sdk, for a Python that has none
        trials/<trial id>/
            trial.json, parameter.cfg       written by the manager
            stop.json                       written by the manager when the trial is to end and no stream can carry the word
            attempts/<n>/<task>/            written by one keeper; the trial's NNI_SYS_DIR
                parameter.cfg, .nni/metrics, exit.json
                output/{stdout, stderr, trial.log}
                code/                       the snapshot, unpacked for this attempt alone

Manager and keeper see the same tree under different mount points, so a `Workspace` is made from the root as its side sees it.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_keeper.wire.messages import AttemptKey, StopTrial, Stream, TrialEnded
from trial_keeper.wire.reasons import STOP_REASONS, ExitReason
from trial_keeper.wire.small_files import write_all

# An id names a folder, so it can hold nothing that leads out of one.
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,239}")
# More than a cluster starts; whoever may write there could make any number of folders, with any names.
_NEWEST_ATTEMPTS = 1000
_ATTEMPT_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
# On one line: several would take Python's slow encoder, between two trials.
_TEXT_OF = json.JSONEncoder(ensure_ascii=False).encode


class DocumentInvalid(ValueError):
    """A document in the workspace is missing a field or is not what its name says."""


MARKER = "NNI_SYS_DIR"
"""The variable that tells whose a process is: every process of an attempt inherits it, and no other has its value."""


def is_safe_name(name: str) -> bool:
    """Whether the name can be one folder of a workspace, and no more than one."""
    return _SAFE_NAME.fullmatch(name) is not None


def safe_name(name: str) -> str:
    """The name.

    Raises:
        ValueError: it could lead out of the folder that it is to be in.
    """
    if not is_safe_name(name):
        raise ValueError(
            f"cannot use {name!r} as the name of a folder; use letters, digits, '.', '_' and '-' only"
        )
    return name


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """What one keeper writes for one attempt."""

    path: Path

    @property
    def parameter_cfg(self) -> Path:
        """The parameters, where the SDK looks for them."""
        return self.path / "parameter.cfg"

    @property
    def output(self) -> Path:
        """NNI_OUTPUT_DIR."""
        return self.path / "output"

    @property
    def code(self) -> Path:
        """The attempt's own copy of the training code, where it comes from a snapshot."""
        return self.path / "code"

    @property
    def exit_json(self) -> Path:
        """How the attempt ended; there once it has."""
        return self.path / "exit.json"

    def stream(self, stream: Stream) -> Path:
        """The file of a stream."""
        match stream:
            case Stream.METRICS:
                return self.path / ".nni" / "metrics"
            case Stream.STDOUT:
                return self.output / "stdout"
            case Stream.STDERR:
                return self.output / "stderr"
            case Stream.KEEPER:
                return self.output / "trial.log"


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """What the manager writes for one trial, and the attempts below it."""

    path: Path

    @property
    def trial_json(self) -> Path:
        """What the keeper needs to know of the trial."""
        return self.path / "trial.json"

    @property
    def parameter_cfg(self) -> Path:
        """The parameters, in the form the SDK reads."""
        return self.path / "parameter.cfg"

    @property
    def stop_json(self) -> Path:
        """There once the trial is to end and its keepers could not all be told over a stream."""
        return self.path / "stop.json"

    @property
    def attempts(self) -> Path:
        """One folder per attempt, named by its number."""
        return self.path / "attempts"


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folder of one experiment on the shared storage."""

    root: Path

    @property
    def manager_json(self) -> Path:
        """Where the manager is at present; replaced by rename when it moves."""
        return self.root / "manager.json"

    @property
    def run_sh(self) -> Path:
        """The script that every job runs."""
        return self.root / "run.sh"

    @property
    def sdk(self) -> Path:
        """The folder that is put on a trial's Python path: it holds the package nni_sdk and nothing else."""
        return self.root / "sdk"

    @property
    def checkpoints(self) -> Path:
        """What trials save for later ones to go on from, where the tuner has them do so."""
        return self.root / "checkpoints"

    @property
    def trials(self) -> Path:
        """One folder per trial."""
        return self.root / "trials"

    def code_snapshot(self, digest: str) -> Path:
        """The snapshot of training code with this content."""
        return self.file(f"code-{digest}.tar.gz")

    def file(self, name: str) -> Path:
        """A file that a document in the workspace names.

        Raises:
            ValueError: the name could lead out of the workspace.
        """
        return self.root / safe_name(name)

    def trial(self, trial_id: str) -> TrialFolder:
        """The folder of a trial.

        Raises:
            ValueError: the id could lead out of the workspace.
        """
        return TrialFolder(self.trials / safe_name(trial_id))

    def attempt(self, key: AttemptKey) -> AttemptFolder:
        """The folder of an attempt.

        Raises:
            ValueError: an id could lead out of the workspace.
        """
        return AttemptFolder(self.trial(key.trial_id).attempts / str(key.attempt) / safe_name(key.task))

    def warm_marker(self, job_id: str) -> str:
        """Instead of an attempt's folder, what marks the processes of a job's warm interpreter. There is no such folder."""
        return str(self.root / "warm" / safe_name(job_id))

    def attempts_of(
        self, trial_id: str, folders_in: Callable[[Path], list[str]] | None = None
    ) -> list[AttemptKey]:
        """The attempts that have left a folder, oldest first. What else a trial may have put there is passed over, and all but
        the newest thousand numbers. `folders_in` names the folders in a folder where they are not on this machine.

        Raises:
            OSError: the storage does not show them.
        """
        folder, look = self.trial(trial_id).attempts, folders_in or _folders_in
        numbers = sorted(int(name) for name in look(folder) if _ATTEMPT_NUMBER.fullmatch(name))
        del numbers[:-_NEWEST_ATTEMPTS]
        return [
            AttemptKey(trial_id, number, task)
            for number in numbers
            for task in sorted(filter(is_safe_name, look(folder / str(number))))
        ]


def _folders_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def replace_file(path: Path, content: bytes, mode: int = 0o666, *, is_durable: bool = False) -> None:
    """Write a file that readers see whole or not at all. The folder must exist; one process writes a given path.

    `mode` is what the umask leaves of it. Whatever lies where the new file is made (of a process that died there, or put there by
    somebody: a link, a pipe) is removed and not written to. `is_durable`: the content is on the disk before the name is.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, mode)
    except FileExistsError:
        os.unlink(temporary)
        descriptor = os.open(temporary, flags, mode)
    write_all(descriptor, content, is_durable=is_durable)
    os.replace(temporary, path)


@dataclass(frozen=True, slots=True)
class ManagerDocument:
    """manager.json: which manager owns the experiment, and where it listens (HOST:PORT, the first that answers is used).

    `certificate`: the manager's own, as PEM; keepers then speak TLS, and to nobody who has another. None on loopback.
    """

    experiment_id: str
    version: str
    addresses: tuple[str, ...]
    certificate: str | None = None

    def to_bytes(self) -> bytes:
        """The file's content."""
        document: dict[str, Any] = {
            "experiment_id": self.experiment_id,
            "version": self.version,
            "addresses": list(self.addresses),
        }
        return _dump(document if self.certificate is None else document | {"certificate": self.certificate})

    @classmethod
    def from_bytes(cls, content: bytes) -> "ManagerDocument":
        """Read the file's content.

        Raises:
            DocumentInvalid: not such a document.
        """
        document = _load("manager.json", content)
        with _fields_of("manager.json"):
            addresses = tuple(_typed(address, str) for address in _typed(document["addresses"], list))
            if not addresses:
                raise ValueError("no address")
            certificate = document.get("certificate")
            return cls(
                _typed(document["experiment_id"], str),
                _typed(document["version"], str),
                addresses,
                None if certificate is None else _typed(certificate, str),
            )


@dataclass(frozen=True, slots=True)
class TrialDocument:
    """trial.json: what a keeper needs to run a trial.

    `command` is given to bash. `code_dir` is where it runs, as the container sees it; it is empty when `code_snapshot`, the
    name of a file in the workspace, has to be unpacked first. `gpu_indices` is None when the trial may see whatever the container
    sees, and empty when it may see no GPU.
    """

    trial_id: str
    sequence_id: int
    command: str
    code_dir: str
    gpu_indices: tuple[int, ...] | None = None
    code_snapshot: str | None = None

    def to_bytes(self) -> bytes:
        """The file's content."""
        return _dump(
            {
                "trial_id": self.trial_id,
                "sequence_id": self.sequence_id,
                "command": self.command,
                "code_dir": self.code_dir,
                "code_snapshot": self.code_snapshot,
                "gpu_indices": None if self.gpu_indices is None else list(self.gpu_indices),
            }
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> "TrialDocument":
        """Read the file's content.

        Raises:
            DocumentInvalid: not such a document.
        """
        document = _load("trial.json", content)
        with _fields_of("trial.json"):
            gpu_indices = document["gpu_indices"]
            code_snapshot = document.get("code_snapshot")  # documents of earlier managers have none
            return cls(
                _typed(document["trial_id"], str),
                _typed(document["sequence_id"], int),
                _typed(document["command"], str),
                _typed(document["code_dir"], str),
                None
                if gpu_indices is None
                else tuple(_typed(index, int) for index in _typed(gpu_indices, list)),
                None if code_snapshot is None else _typed(code_snapshot, str),
            )


def exit_to_bytes(ended: TrialEnded) -> bytes:
    """The content of exit.json."""
    return _dump(
        {
            "trial_id": ended.key.trial_id,
            "attempt": ended.key.attempt,
            "task": ended.key.task,
            "reason": ended.reason.value,
            "exit_code": ended.exit_code,
            "started_at_s": ended.started_at_s,
            "ended_at_s": ended.ended_at_s,
            "final_sizes": {stream.value: size for stream, size in ended.final_sizes.items()},
            "message": ended.message,
        }
    )


def exit_from_bytes(content: bytes) -> TrialEnded:
    """Read the content of exit.json.

    Raises:
        DocumentInvalid: not such a document.
    """
    document = _load("exit.json", content)
    with _fields_of("exit.json"):
        return TrialEnded(
            AttemptKey(
                _typed(document["trial_id"], str),
                _typed(document["attempt"], int),
                _typed(document["task"], str),
            ),
            ExitReason(document["reason"]),
            _exit_code(document["exit_code"]),
            float(_typed(document["started_at_s"], int, float)),
            float(_typed(document["ended_at_s"], int, float)),
            {Stream(word): _typed(size, int) for word, size in document["final_sizes"].items()},
            _typed(document["message"], str),
        )


def stop_to_bytes(stop: StopTrial) -> bytes:
    """The content of stop.json."""
    return _dump({"trial_id": stop.trial_id, "reason": stop.reason.value})


def stop_from_bytes(content: bytes) -> StopTrial:
    """Read the content of stop.json.

    Raises:
        DocumentInvalid: not such a document.
    """
    document = _load("stop.json", content)
    with _fields_of("stop.json"):
        reason = ExitReason(document["reason"])
        if reason not in STOP_REASONS:
            raise ValueError(f"nobody stops a trial with the reason {reason.value!r}")
        return StopTrial(_typed(document["trial_id"], str), reason)


def _exit_code(value: Any) -> int:
    code: int = _typed(value, int)
    if not 0 <= code <= 255:
        raise ValueError(f"{code} is no exit code")
    return code


def _dump(document: dict[str, Any]) -> bytes:
    return (_TEXT_OF(document) + "\n").encode()


def _load(name: str, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DocumentInvalid(f"cannot read {name}: it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise DocumentInvalid(f"cannot read {name}: it is not a JSON object")
    return document


def _typed(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"{value!r} is not {' or '.join(kind.__name__ for kind in kinds)}")
    if type(value) is str:
        value.encode()  # JSON can spell half a surrogate pair, which nothing can store
    return value


class _fields_of:  # noqa: N801 - reads as a statement in `with`
    """Turn whatever a wrong document raises into one kind of error."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, AttributeError, OverflowError)):
            raise DocumentInvalid(
                f"cannot read {self.name}: a field is missing or wrong ({error!r})"
            ) from error
