"""The documents of a workspace: their fields, their text and their signatures. `workspace` has their paths."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, TypeVar

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.checkpoints import Checkpoint, checkpoint_of
from trial_keeper.wire.messages import AttemptKey, Environment, StopTrial, Stream, TrialEnded
from trial_keeper.wire.reasons import STOP_REASONS, ExitReason
from trial_keeper.wire.safe_open import safe_name
from trial_keeper.wire.signatures import DocumentInvalid, check_signature, signed

# Without indentation, which would use Python's slow encoder between two trials.
_TEXT_OF = json.JSONEncoder(ensure_ascii=False).encode
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class ManagerDocument:
    """manager.json: the manager that owns the experiment, and its addresses, which keepers try in turn: HOST:PORT or unix:PATH.

    `certificate` is the manager's own, as PEM: keepers then use TLS and accept no other certificate. None on loopback.
    """

    experiment_id: str
    version: str
    addresses: tuple[str, ...]
    certificate: str | None = None

    def to_bytes(self) -> bytes:
        """The file's content."""
        return _dump(_fields_of(self))

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
