"""Converts messages to protobuf and back. The only module that uses generated code.

A peer may send anything. A message is either valid as a whole or rejected: every value in it can be stored, named and shown.
"""

import math
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from trial_keeper.wire import messages as m
from trial_keeper.wire.attempt_ids import is_attempt_id
from trial_keeper.wire.reasons import STOP_REASONS, ExitReason
from trial_keeper.wire.v1 import keeper_pb2 as pb
from trial_keeper.wire.workspace import is_safe_name

# A keeper batches at most 64 messages, and a manager what accumulated while it wrote.
MAX_BATCH = 4096
# A keeper has one attempt to deliver, and some more after a long time without a manager.
MAX_ATTEMPTS_OF_HELLO = 1024
# Keepers send the last 4 KiB of stderr.
MAX_CHARACTERS_OF_MESSAGE = 64 * 1024
# PEP 440 sets no limit; no real version is this long.
MAX_CHARACTERS_OF_VERSION = 100
MAX_GPUS = 1024
# An error repeats the value to help find it, but stays short for the peer and the log.
_MAX_SHOWN_CHARACTERS = 60

CONNECT_METHOD = pb.DESCRIPTOR.services_by_name["KeeperService"].methods_by_name["Connect"]
"""The protocol's only method; its `name`, and in `containing_service` the service's `full_name`."""


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
    request = keeper_message_to_pb(messages[0])
    request.batch.extend(map(keeper_message_to_pb, messages[1:]))
    return request


def keeper_messages_from_pb(request: pb.ConnectRequest) -> list[m.KeeperMessage]:
    """Convert a keeper's batch from protobuf.

    Raises:
        MessageInvalid: as for `keeper_message_from_pb`, for any of the messages; or there are too many.
    """
    _check_count("messages in one breath", len(request.batch), MAX_BATCH)
    return [keeper_message_from_pb(each) for each in (request, *request.batch)]


def keeper_messages_from_bytes(content: bytes) -> list[m.KeeperMessage]:
    """Parse a keeper's batch as received.

    Raises:
        MessageInvalid: as for `keeper_messages_from_pb`; or it is no protobuf.
    """
    try:
        request = pb.ConnectRequest.FromString(content)
    except DecodeError as error:
        raise MessageInvalid(f"cannot read a keeper's message: {error}") from error
    return keeper_messages_from_pb(request)


def manager_messages_to_bytes(messages: Sequence[m.ManagerMessage]) -> bytes:
    """Serialise a manager's batch of at least one message."""
    return manager_messages_to_pb(messages).SerializeToString()


def keeper_message_to_pb(message: m.KeeperMessage) -> pb.ConnectRequest:
    """Convert a keeper's message to protobuf."""
    match message:
        case m.Chunk():
            return pb.ConnectRequest(
                chunk=pb.Chunk(
                    key=_key_to_pb(message.key),
                    stream=_STREAM_TO_PB[message.stream],
                    offset=message.offset,
                    data=message.data,
                )
            )
        case m.Hello():
            return pb.ConnectRequest(
                hello=pb.Hello(
                    version=message.version,
                    experiment_id=message.experiment_id,
                    job_id=message.job_id,
                    task=message.task,
                    attempts=[_key_to_pb(key) for key in message.attempts],
                    is_probe=message.is_probe,
                    supports_revoke=message.supports_revoke,
                )
            )
        case m.TrialStarted():
            return pb.ConnectRequest(
                trial_started=pb.TrialStarted(key=_key_to_pb(message.key), started_at_s=message.started_at_s)
            )
        case m.TrialEnded():
            return pb.ConnectRequest(
                trial_ended=pb.TrialEnded(
                    key=_key_to_pb(message.key),
                    reason=message.reason.value,
                    exit_code=message.exit_code,
                    started_at_s=message.started_at_s,
                    ended_at_s=message.ended_at_s,
                    final_sizes=_offsets_to_pb(message.final_sizes),
                    message=message.message,
                    metrics_size_at_stop=message.metrics_size_at_stop,
                    warnings=message.warnings,
                )
            )
        case m.Usage():
            return pb.ConnectRequest(
                usage=pb.Usage(
                    key=_key_to_pb(message.key),
                    cpu_percent=message.cpu_percent,
                    rss_bytes=message.rss_bytes,
                    disk_bytes=message.disk_bytes,
                    gpus=[_gpu_to_pb(gpu) for gpu in message.gpus],
                )
            )
        case m.Idle():
            return pb.ConnectRequest(idle=pb.Idle())
        case m.TrialRevoked():
            return pb.ConnectRequest(trial_revoked=pb.TrialRevoked(trial_id=message.trial_id))


def keeper_message_from_pb(request: pb.ConnectRequest) -> m.KeeperMessage:
    """Convert a keeper's message from protobuf.

    Raises:
        MessageInvalid: no known message, an unknown stream or reason, an id that cannot name a folder, an invalid size, time or
            figure, or more items than any keeper sends.
    """
    try:
        return _keeper_message_from_pb(request)
    except MessageInvalid:
        raise
    except ValueError as error:
        raise MessageInvalid(f"cannot read a keeper's message: {error}") from error


def _keeper_message_from_pb(request: pb.ConnectRequest) -> m.KeeperMessage:
    match request.WhichOneof("message"):
        case "chunk":
            chunk = request.chunk
            return m.Chunk(
                _key_from_pb(chunk.key), _stream_from_pb(chunk.stream), _size_from(chunk.offset), chunk.data
            )
        case "hello":
            hello = request.hello
            _check_count("attempts", len(hello.attempts), MAX_ATTEMPTS_OF_HELLO)
            return m.Hello(
                _version_from(hello.version),
                _id_from(hello.experiment_id),
                _id_from(hello.job_id),
                _id_from(hello.task),
                tuple(_key_from_pb(key) for key in hello.attempts),
                hello.is_probe,
                hello.supports_revoke,
            )
        case "trial_started":
            started = request.trial_started
            return m.TrialStarted(_key_from_pb(started.key), started.started_at_s)
        case "trial_ended":
            ended = request.trial_ended
            _check_count("characters of an end", len(ended.message), MAX_CHARACTERS_OF_MESSAGE)
            return m.TrialEnded(
                key=_key_from_pb(ended.key),
                reason=_reason_from(ended.reason),
                exit_code=ended.exit_code,
                started_at_s=ended.started_at_s,
                ended_at_s=ended.ended_at_s,
                final_sizes=_offsets_from_pb(ended.final_sizes),
                message=ended.message,
                metrics_size_at_stop=(
                    ended.metrics_size_at_stop if ended.HasField("metrics_size_at_stop") else None
                ),
                warnings=tuple(ended.warnings),
            )
        case "usage":
            usage = request.usage
            _check_count("GPUs", len(usage.gpus), MAX_GPUS)
            return m.Usage(
                _key_from_pb(usage.key),
                _figure_from(usage.cpu_percent),
                _size_from(usage.rss_bytes),
                _size_from(usage.disk_bytes),
                tuple(_gpu_from_pb(gpu) for gpu in usage.gpus),
            )
        case "idle":
            return m.Idle()
        case "trial_revoked":
            return m.TrialRevoked(_id_from(request.trial_revoked.trial_id))
        case _:
            raise MessageInvalid(
                "cannot read a keeper's message: it holds no message that this version knows"
            )


def manager_messages_to_pb(messages: Sequence[m.ManagerMessage]) -> pb.ConnectResponse:
    """Convert a manager's batch of at least one message to protobuf."""
    response = manager_message_to_pb(messages[0])
    response.batch.extend(map(manager_message_to_pb, messages[1:]))
    return response


def manager_messages_from_pb(response: pb.ConnectResponse) -> list[m.ManagerMessage]:
    """Convert a manager's batch from protobuf.

    Raises:
        MessageInvalid: as for `manager_message_from_pb`, for any of the messages; or there are too many.
    """
    _check_count("messages in one breath", len(response.batch), MAX_BATCH)
    return [manager_message_from_pb(each) for each in (response, *response.batch)]


def manager_message_to_pb(message: m.ManagerMessage) -> pb.ConnectResponse:
    """Convert a manager's message to protobuf."""
    match message:
        case m.Ack():
            return pb.ConnectResponse(ack=pb.Ack(attempt=_attempt_to_pb(message.attempt)))
        case m.Welcome():
            return pb.ConnectResponse(
                welcome=pb.Welcome(
                    version=message.version,
                    attempts=[_attempt_to_pb(attempt) for attempt in message.attempts],
                )
            )
        case m.RunTrial():
            return pb.ConnectResponse(
                run_trial=pb.RunTrial(trial_id=message.trial_id, attempt_id=message.attempt_id)
            )
        case m.RevokeTrial():
            return pb.ConnectResponse(revoke_trial=pb.RevokeTrial(trial_id=message.trial_id))
        case m.StopTrial():
            return pb.ConnectResponse(
                stop_trial=pb.StopTrial(trial_id=message.trial_id, reason=message.reason.value)
            )
        case m.Shutdown():
            return pb.ConnectResponse(shutdown=pb.Shutdown(reason=message.reason))


def manager_message_from_pb(response: pb.ConnectResponse) -> m.ManagerMessage:
    """Convert a manager's message from protobuf.

    Raises:
        MessageInvalid: no known message, an unknown stream or reason, a reason that is no stop reason, an id that cannot
            name a folder.
    """
    match response.WhichOneof("message"):
        case "ack":
            return m.Ack(_attempt_from_pb(response.ack.attempt))
        case "welcome":
            welcome = response.welcome
            return m.Welcome(
                welcome.version, tuple(_attempt_from_pb(attempt) for attempt in welcome.attempts)
            )
        case "run_trial":
            run = response.run_trial
            return m.RunTrial(_id_from(run.trial_id), _attempt_id_from(run.attempt_id))
        case "revoke_trial":
            return m.RevokeTrial(_id_from(response.revoke_trial.trial_id))
        case "stop_trial":
            stop = response.stop_trial
            return m.StopTrial(_id_from(stop.trial_id), _stop_reason_from(stop.reason))
        case "shutdown":
            return m.Shutdown(response.shutdown.reason)
        case _:
            raise MessageInvalid(
                "cannot read a manager's message: it holds no message that this version knows"
            )


def _key_to_pb(key: m.AttemptKey) -> pb.AttemptKey:
    return pb.AttemptKey(trial_id=key.trial_id, attempt_id=key.attempt_id, task=key.task)


def _key_from_pb(key: pb.AttemptKey) -> m.AttemptKey:
    return m.AttemptKey(_id_from(key.trial_id), _attempt_id_from(key.attempt_id), _id_from(key.task))


def _attempt_id_from(text: str) -> str:
    if not is_attempt_id(text):
        raise MessageInvalid(
            f"cannot read a message: {_shown(text)} is no attempt's id; use a keeper and a manager of one version"
        )
    return text


def _id_from(text: str) -> str:
    """Validate a peer's id of an experiment, a job, a task or a trial: it names folders and appears in logs."""
    if not is_safe_name(text):
        raise MessageInvalid(f"cannot read a message: {_shown(text)} can be no id")
    return text


def _version_from(text: str) -> str:
    """Validate the characters and the length of a peer's version. The version rule is checked elsewhere."""
    if not (text.isascii() and text.isprintable() and len(text) <= MAX_CHARACTERS_OF_VERSION):
        raise MessageInvalid(f"cannot read a message: {_shown(text)} can be no version")
    return text


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise MessageInvalid(f"cannot read a message of {count} {what}: there are {most} at most")


def _size_from(size: int) -> int:
    if size > m.MAX_SIZE:
        raise MessageInvalid(f"cannot read a message: {size} is neither a size nor an offset")
    return size


def _figure_from(figure: float) -> float:
    if not math.isfinite(figure):
        raise MessageInvalid(f"cannot read a message: {figure} is no measured figure")
    return figure


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…")


def _gpu_to_pb(gpu: m.GpuUsage) -> pb.GpuUsage:
    return pb.GpuUsage(
        index=gpu.index,
        utilisation_percent=gpu.utilisation_percent,
        memory_used_bytes=gpu.memory_used_bytes,
    )


def _gpu_from_pb(gpu: pb.GpuUsage) -> m.GpuUsage:
    return m.GpuUsage(gpu.index, _figure_from(gpu.utilisation_percent), _size_from(gpu.memory_used_bytes))


def _offsets_to_pb(offsets: m.Offsets) -> list[pb.StreamOffset]:
    return [
        pb.StreamOffset(stream=_STREAM_TO_PB[stream], offset=offset) for stream, offset in offsets.items()
    ]


def _offsets_from_pb(offsets: Iterable[pb.StreamOffset]) -> dict[m.Stream, int]:
    return {_stream_from_pb(entry.stream): _size_from(entry.offset) for entry in offsets}


def _attempt_to_pb(attempt: m.AttemptOffsets) -> pb.AttemptOffsets:
    return pb.AttemptOffsets(
        key=_key_to_pb(attempt.key), offsets=_offsets_to_pb(attempt.offsets), closed=attempt.closed
    )


def _attempt_from_pb(attempt: pb.AttemptOffsets) -> m.AttemptOffsets:
    return m.AttemptOffsets(_key_from_pb(attempt.key), _offsets_from_pb(attempt.offsets), attempt.closed)


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
    if reason not in STOP_REASONS:
        raise MessageInvalid(f"cannot read a message: nobody stops a trial with the reason {word!r}")
    return reason
