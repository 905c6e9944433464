"""Converts messages to protobuf and back. The only module that uses generated code.

A peer may send any bytes. A message is accepted only as a whole: every value in an accepted message can be stored and displayed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from trial_keeper.wire import messages as m
from trial_keeper.wire.attempt_ids import is_attempt_id
from trial_keeper.wire.reasons import STOP_MESSAGE_REASONS, ExitReason
from trial_keeper.wire.safe_open import is_safe_name
from trial_keeper.wire.v1 import keeper_pb2 as pb

_Batch = TypeVar("_Batch", pb.ConnectRequest, pb.ConnectResponse)
# A keeper batches at most 64 messages, and a manager all messages that accumulated during a write.
MAX_BATCH = 4096
# A keeper usually has one attempt to deliver, and more after a long time without a manager.
MAX_ATTEMPTS_OF_HELLO = 1024
# Keepers send the last 4 KiB of stderr.
MAX_CHARACTERS_OF_MESSAGE = 64 * 1024
# PEP 440 sets no limit; no real version is this long.
MAX_CHARACTERS_OF_VERSION = 100
MAX_GPUS = 1024
# An error quotes the value, but stays short for the peer and the log.
_MAX_SHOWN_CHARACTERS = 60

CONNECT_METHOD = pb.DESCRIPTOR.services_by_name["KeeperService"].methods_by_name["Connect"]
"""The descriptor of the protocol's only method."""


class MessageInvalid(ValueError):
    """The peer sent a message that is invalid in this version of the protocol."""


_STREAM_TO_PB: dict[m.Stream, pb.Stream.ValueType] = {
    m.Stream.METRICS: pb.STREAM_METRICS,
    m.Stream.STDOUT: pb.STREAM_STDOUT,
    m.Stream.STDERR: pb.STREAM_STDERR,
    m.Stream.KEEPER: pb.STREAM_KEEPER,
}
_STREAM_FROM_PB: dict[int, m.Stream] = {number: stream for stream, number in _STREAM_TO_PB.items()}


def keeper_messages_to_pb(messages: Sequence[m.KeeperMessage]) -> pb.ConnectRequest:
    """Convert a keeper's batch of at least one message to protobuf."""
    return _batch_to_pb(pb.ConnectRequest, messages)


def keeper_messages_from_bytes(content: bytes) -> list[m.KeeperMessage]:
    """Parse a keeper's batch as received.

    Raises:
        MessageInvalid: no protobuf, no known message, an unknown stream or reason, an id that cannot name a folder, an invalid
            size, time or figure, or more items or messages than any keeper sends.
    """
    try:
        request = pb.ConnectRequest.FromString(content)
    except DecodeError as error:
        raise MessageInvalid(f"cannot read a keeper's message: {error}") from error
    return _batch_from_pb("keeper", request)


def manager_messages_to_bytes(messages: Sequence[m.ManagerMessage]) -> bytes:
    """Serialise a manager's batch of at least one message."""
    return _batch_to_pb(pb.ConnectResponse, messages).SerializeToString()


def manager_messages_from_pb(response: pb.ConnectResponse) -> list[m.ManagerMessage]:
    """Convert a manager's batch from protobuf.

    Raises:
        MessageInvalid: no known message, an unknown stream or reason, a reason that is no stop reason, an id that cannot
            name a folder, or too many messages.
    """
    return _batch_from_pb("manager", response)


def _batch_to_pb(kind: type[_Batch], messages: Sequence[Any]) -> _Batch:
    converted: list[Any] = [kind(**{_NAMES[type(message)]: _to_pb(message)}) for message in messages]
    batch: _Batch = converted.pop(0)
    if converted:
        batch.batch.extend(converted)
    return batch


def _batch_from_pb(sender: str, batch: pb.ConnectRequest | pb.ConnectResponse) -> list[Any]:
    _check_count("messages in one batch", len(batch.batch), MAX_BATCH)
    return [_read(sender, message) for message in (batch, *batch.batch)]


def _read(sender: str, message: pb.ConnectRequest | pb.ConnectResponse) -> Any:
    name = message.WhichOneof("message")
    if name is None:
        raise MessageInvalid(f"cannot read a {sender}'s message: its kind is unknown to this version")
    try:
        return _from_pb(_KINDS[name], getattr(message, name))
    except MessageInvalid:
        raise
    except ValueError as error:
        raise MessageInvalid(f"cannot read a {sender}'s message: {error}") from error


# ---- fields


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise MessageInvalid(f"cannot read a message with {count} {what}: the maximum is {most}")


def _checked(is_valid: Callable[[Any], bool], problem: str) -> Callable[[Any], Any]:
    """Build the validator of a field. `problem` completes the sentence "cannot read a message: VALUE …"."""

    def check(value: Any) -> Any:
        if not is_valid(value):
            raise MessageInvalid(f"cannot read a message: {_shown(value)} {problem}")
        return value

    return check


def _is_version(text: str) -> bool:
    """True for the characters and the length of a version. The version rule is checked elsewhere."""
    return text.isascii() and text.isprintable() and len(text) <= MAX_CHARACTERS_OF_VERSION


def _shown(value: str | float) -> str:
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARACTERS:
        value = f"{value[:_MAX_SHOWN_CHARACTERS]}…"
    return repr(value)


def _size_from(size: int) -> int:
    if size > m.MAX_SIZE:  # not with `_checked`: each chunk has an offset
        raise MessageInvalid(f"cannot read a message: {size} is too large for a size or an offset")
    return size


def _stream_from_pb(number: int) -> m.Stream:
    stream = _STREAM_FROM_PB.get(number)
    if stream is None:
        raise MessageInvalid(f"cannot read a message: stream {number} is unknown to this version")
    return stream


def _reason_from(word: str) -> ExitReason:
    try:
        return ExitReason(word)
    except ValueError as error:
        raise MessageInvalid(
            f"cannot read a message: reason {_shown(word)} is unknown to this version"
        ) from error


def _stop_reason_from(word: str) -> ExitReason:
    reason = _reason_from(word)
    if reason not in STOP_MESSAGE_REASONS:
        raise MessageInvalid(f"cannot read a message: {word!r} is not a reason to stop a trial")
    return reason


def _message_from(text: str) -> str:
    _check_count("characters of an end", len(text), MAX_CHARACTERS_OF_MESSAGE)
    return text


def _offsets_from_pb(offsets: Iterable[pb.StreamOffset]) -> dict[m.Stream, int]:
    return {_stream_from_pb(entry.stream): _size_from(entry.offset) for entry in offsets}


def _from_pb(kind: type, message: Any) -> Any:
    values = [convert(getattr(message, name)) for name, convert in _FIELDS[kind]]
    if kind is m.TrialEnded and not message.HasField(_OPTIONAL):
        values[_OPTIONAL_AT] = None
    return kind(*values)


def _many(kind: type, what: str = "", most: int | None = None) -> Callable[[Any], Any]:
    """Build the converter of a repeated field. `most`: the maximum length of a keeper's field."""

    def convert(messages: Any) -> tuple[Any, ...]:
        if most is not None:
            _check_count(what, len(messages), most)
        return tuple([_from_pb(kind, message) for message in messages])

    return convert


# How a field is validated and converted, by its name or, where the name has several meanings, by message and name.
# All other fields stay as they are.
_FIELDS_FROM_PB: dict[str, Callable[[Any], Any]] = {
    # An id names folders and appears in logs.
    **dict.fromkeys(
        ("trial_id", "experiment_id", "job_id", "task"), _checked(is_safe_name, "is not a valid id")
    ),
    **dict.fromkeys(("offset", "rss_bytes", "disk_bytes", "memory_used_bytes"), _size_from),
    **dict.fromkeys(
        ("cpu_percent", "utilisation_percent"), _checked(math.isfinite, "is not a finite number")
    ),
    **dict.fromkeys(("offsets", "final_sizes"), _offsets_from_pb),
    "attempt_id": _checked(
        is_attempt_id, "is not an attempt id; use a keeper and a manager of the same version"
    ),
    "stream": _stream_from_pb,
    "key": partial(_from_pb, m.AttemptKey),
    "attempt": partial(_from_pb, m.AttemptOffsets),
    "environment": partial(_from_pb, m.Environment),
    "gpus": _many(m.GpuUsage, "GPUs", MAX_GPUS),
    "warnings": tuple,
    "Hello.version": _checked(_is_version, "is not a valid version"),
    "Hello.attempts": _many(m.AttemptKey, "attempts", MAX_ATTEMPTS_OF_HELLO),
    "Welcome.attempts": _many(m.AttemptOffsets),
    "TrialEnded.reason": _reason_from,
    "TrialEnded.message": _message_from,
    "StopTrial.reason": _stop_reason_from,
}
_OPTIONAL = "metrics_size_at_stop"
"""The only field that distinguishes absence from 0."""


# ---- messages: dataclasses and protobuf have the same names, of messages and of fields


def _unchanged(value: Any) -> Any:
    return value


_FIELDS: dict[type, list[tuple[str, Callable[[Any], Any]]]] = {
    kind: [
        (
            each.name,
            _FIELDS_FROM_PB.get(f"{kind.__name__}.{each.name}", _FIELDS_FROM_PB.get(each.name, _unchanged)),
        )
        for each in fields(kind)
    ]
    for kind in vars(m).values()
    if is_dataclass(kind) and isinstance(kind, type)
}
_OPTIONAL_AT = [each.name for each in fields(m.TrialEnded)].index(_OPTIONAL)
_KINDS = {
    field.name: getattr(m, field.message_type.name)
    for stream in (pb.ConnectRequest, pb.ConnectResponse)
    for field in stream.DESCRIPTOR.oneofs_by_name["message"].fields
    if field.message_type is not None
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def _to_pb(message: Any) -> Any:
    kind = type(message)
    values = {}
    for name, _ in _FIELDS[kind]:
        value = getattr(message, name)
        convert = _VALUES_TO_PB.get(type(value))
        values[name] = value if convert is None else convert(value)
    return getattr(pb, kind.__name__)(**values)


_VALUES_TO_PB: dict[type, Callable[[Any], Any]] = {
    m.Stream: _STREAM_TO_PB.__getitem__,
    tuple: lambda values: [_VALUES_TO_PB.get(type(value), _unchanged)(value) for value in values],
    dict: lambda offsets: [
        pb.StreamOffset(stream=_STREAM_TO_PB[stream], offset=offset) for stream, offset in offsets.items()
    ],
    **dict.fromkeys(_FIELDS, _to_pb),
}
