"""Conversion of messages to protobuf and from protobuf."""

import contextlib
import dataclasses
import math
from enum import Enum

import pytest
from attempts import attempt_id
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from trial_keeper.wire import convert
from trial_keeper.wire import messages as m
from trial_keeper.wire.attempt_ids import is_attempt_id
from trial_keeper.wire.convert import (
    MAX_ATTEMPTS_OF_HELLO,
    MAX_BATCH,
    MAX_CHARACTERS_OF_MESSAGE,
    MAX_CHARACTERS_OF_VERSION,
    MAX_GPUS,
    MessageInvalid,
    keeper_messages_from_bytes,
    keeper_messages_to_pb,
    manager_messages_from_pb,
    manager_messages_to_bytes,
)
from trial_keeper.wire.reasons import STOP_MESSAGE_REASONS, ExitReason
from trial_keeper.wire.safe_open import is_safe_name
from trial_keeper.wire.v1 import keeper_pb2 as pb

UINT32 = 2**32 - 1
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,30}", fullmatch=True)
VERSIONS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=100)
TIMES = st.floats(0, m.LATEST_S)
FIGURES = st.floats(allow_nan=False, allow_infinity=False)
SIZES = st.integers(0, m.MAX_SIZE)
ATTEMPT_IDS = st.from_regex(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", fullmatch=True)
KEYS = st.builds(m.AttemptKey, NAMES, ATTEMPT_IDS, NAMES)
OFFSETS = st.dictionaries(st.sampled_from(m.Stream), SIZES)
ATTEMPTS = st.builds(m.AttemptOffsets, KEYS, OFFSETS, st.booleans(), st.booleans())
REASONS = st.sampled_from(ExitReason)
GPUS = st.builds(m.GpuUsage, st.integers(0, UINT32), FIGURES, SIZES)
KEEPER_MESSAGES = {
    m.Hello: st.builds(m.Hello, VERSIONS, NAMES, NAMES, NAMES, st.lists(KEYS).map(tuple), st.booleans()),
    m.TrialStarted: st.builds(m.TrialStarted, KEYS, TIMES),
    m.Chunk: st.builds(m.Chunk, KEYS, st.sampled_from(m.Stream), SIZES, st.binary()),
    m.TrialEnded: st.builds(
        m.TrialEnded,
        KEYS,
        REASONS,
        st.integers(-(2**31), 2**31 - 1),
        TIMES,
        TIMES,
        OFFSETS,
        TEXT,
        st.none() | SIZES,
        st.lists(TEXT, max_size=m.MAX_WARNINGS).map(tuple),
    ),
    m.Usage: st.builds(m.Usage, KEYS, FIGURES, SIZES, SIZES, st.lists(GPUS).map(tuple)),
    m.Idle: st.just(m.Idle()),
    m.TrialRevoked: st.builds(m.TrialRevoked, NAMES),
}
MANAGER_MESSAGES = {
    m.Welcome: st.builds(m.Welcome, TEXT, st.lists(ATTEMPTS).map(tuple)),
    m.RunTrial: st.builds(m.RunTrial, NAMES, ATTEMPT_IDS),
    m.RevokeTrial: st.builds(m.RevokeTrial, NAMES),
    m.StopTrial: st.builds(m.StopTrial, NAMES, st.sampled_from(sorted(STOP_MESSAGE_REASONS))),
    m.Ack: st.builds(m.Ack, ATTEMPTS),
    m.Shutdown: st.builds(m.Shutdown, TEXT),
}
KEY = pb.AttemptKey(trial_id="abcde", attempt_id=attempt_id(0), task="worker-0")


def keeper_message_from_pb(request: pb.ConnectRequest) -> m.KeeperMessage:
    (message,) = keeper_messages_from_bytes(request.SerializeToString())
    return message


def manager_message_from_pb(response: pb.ConnectResponse) -> m.ManagerMessage:
    (message,) = manager_messages_from_pb(response)
    return message


@pytest.mark.parametrize("text", ["", "..", "../x", "a/b", "a\nb", "a b", "a\0", "x" * 241, "ä"])
def test_an_id_is_refused_if_it_could_be_a_path_or_break_a_log_line(text: str) -> None:
    valid = {"version": "0.6.0", "experiment_id": "exp", "job_id": "job", "task": "main-0"}
    for name in ("experiment_id", "job_id", "task"):
        request = pb.ConnectRequest(hello=pb.Hello(**valid | {name: text}))
        with pytest.raises(MessageInvalid, match="is not a valid id"):
            keeper_message_from_pb(request)
    for key in (
        pb.AttemptKey(trial_id=text, attempt_id=attempt_id(0), task="main-0"),
        pb.AttemptKey(trial_id="abcde", attempt_id=attempt_id(0), task=text),
    ):
        for request in (
            pb.ConnectRequest(hello=pb.Hello(**valid, attempts=[key])),
            pb.ConnectRequest(chunk=pb.Chunk(key=key, stream=pb.STREAM_METRICS)),
            pb.ConnectRequest(trial_started=pb.TrialStarted(key=key)),
            pb.ConnectRequest(trial_ended=pb.TrialEnded(key=key, reason="succeeded")),
            pb.ConnectRequest(usage=pb.Usage(key=key)),
        ):
            with pytest.raises(MessageInvalid, match="is not a valid id"):
                keeper_message_from_pb(request)
    for response in (
        pb.ConnectResponse(run_trial=pb.RunTrial(trial_id=text)),
        pb.ConnectResponse(revoke_trial=pb.RevokeTrial(trial_id=text)),
        pb.ConnectResponse(stop_trial=pb.StopTrial(trial_id=text, reason="stopped by user")),
    ):
        with pytest.raises(MessageInvalid, match="is not a valid id"):
            manager_message_from_pb(response)


@pytest.mark.parametrize("text", ["0.6\n2026-01-01 INFO all is well", "x" * 101, "0.6ü"])
def test_a_malformed_version_in_a_hello_message_is_refused(text: str) -> None:
    hello = pb.Hello(version=text, experiment_id="exp", job_id="job", task="main-0")
    with pytest.raises(MessageInvalid, match="is not a valid version"):
        keeper_message_from_pb(pb.ConnectRequest(hello=hello))


@pytest.mark.parametrize("shown", ["ü" * 60, "ü" * 60 + "…"])
def test_an_error_message_shows_at_most_sixty_characters_of_an_invalid_text(shown: str) -> None:
    hello = pb.Hello(version=shown.replace("…", "xyz"), experiment_id="exp", job_id="job", task="main-0")
    with pytest.raises(MessageInvalid, match=f"message: '{shown}' is not a valid version"):
        keeper_message_from_pb(pb.ConnectRequest(hello=hello))


@given(st.one_of(list(KEEPER_MESSAGES.values())))
def test_a_keeper_message_is_decoded_unchanged(message: m.KeeperMessage) -> None:
    on_the_wire = keeper_messages_to_pb([message]).SerializeToString()
    assert keeper_message_from_pb(pb.ConnectRequest.FromString(on_the_wire)) == message


@given(st.one_of(list(MANAGER_MESSAGES.values())))
def test_a_manager_message_is_decoded_unchanged(message: m.ManagerMessage) -> None:
    on_the_wire = manager_messages_to_bytes([message])
    assert manager_message_from_pb(pb.ConnectResponse.FromString(on_the_wire)) == message


@given(st.lists(st.one_of(list(KEEPER_MESSAGES.values())), min_size=1, max_size=5))
def test_a_batch_of_keeper_messages_keeps_its_order(messages: list[m.KeeperMessage]) -> None:
    on_the_wire = keeper_messages_to_pb(messages).SerializeToString()
    assert keeper_messages_from_bytes(on_the_wire) == messages


@given(st.lists(st.one_of(list(MANAGER_MESSAGES.values())), min_size=1, max_size=5))
def test_a_batch_of_manager_messages_keeps_its_order(messages: list[m.ManagerMessage]) -> None:
    on_the_wire = manager_messages_to_bytes(messages)
    assert manager_messages_from_pb(pb.ConnectResponse.FromString(on_the_wire)) == messages


def test_an_invalid_message_invalidates_its_whole_batch() -> None:
    request = keeper_messages_to_pb([m.Idle(), m.Idle()])
    request.batch[0].ClearField("idle")
    with pytest.raises(MessageInvalid, match="keeper's message"):
        keeper_messages_from_bytes(request.SerializeToString())
    answers = [m.RunTrial("a", attempt_id(0)), m.Shutdown("b")]
    response = pb.ConnectResponse.FromString(manager_messages_to_bytes(answers))
    response.batch[0].ClearField("shutdown")
    with pytest.raises(MessageInvalid, match="manager's message"):
        manager_messages_from_pb(response)


def test_every_message_of_the_protocol_has_a_hypothesis_strategy_in_this_file() -> None:
    def cases(message: type) -> int:
        return len(message.DESCRIPTOR.oneofs_by_name["message"].fields)

    assert KEEPER_MESSAGES.keys() == set(m.KeeperMessage.__args__), "add a strategy to KEEPER_MESSAGES"
    assert MANAGER_MESSAGES.keys() == set(m.ManagerMessage.__args__), "add a strategy to MANAGER_MESSAGES"
    to_do = "add the message to the oneof of the .proto, or its class to the union in wire/messages.py"
    assert cases(pb.ConnectRequest) == len(KEEPER_MESSAGES), to_do
    assert cases(pb.ConnectResponse) == len(MANAGER_MESSAGES), to_do


@pytest.mark.parametrize("kind", m.KeeperMessage.__args__, ids=lambda kind: kind.__name__)
def test_each_text_field_of_a_keeper_message_is_validated(kind: type) -> None:
    converters = dict(convert._FIELDS[kind])
    unchecked = [
        each.name
        for each in dataclasses.fields(kind)
        if each.type in (str, "str") and converters[each.name] is convert._unchanged
    ]
    assert unchecked == [], f"add an entry for {kind.__name__} to _FIELDS_FROM_PB of wire/convert.py"


def test_each_stream_number_of_the_protocol_maps_to_one_stream() -> None:
    numbers = set(pb.Stream.values()) - {pb.STREAM_UNSPECIFIED}
    received = {
        keeper_message_from_pb(pb.ConnectRequest(chunk=pb.Chunk(key=KEY, stream=number))).stream
        for number in numbers
    }
    assert received == set(m.Stream)


@pytest.mark.parametrize("content", [b"", b"\xba\x06\x00"], ids=["nothing", "a field of a later version"])
def test_a_message_with_an_unknown_content_field_is_invalid(content: bytes) -> None:
    with pytest.raises(MessageInvalid, match="keeper's message"):
        keeper_message_from_pb(pb.ConnectRequest.FromString(content))
    with pytest.raises(MessageInvalid, match="manager's message"):
        manager_message_from_pb(pb.ConnectResponse.FromString(content))


@pytest.mark.parametrize("number", [0, 5, 99])
def test_a_message_with_an_unknown_stream_number_is_invalid(number: int) -> None:
    offsets = [pb.StreamOffset(stream=number, offset=1)]
    with pytest.raises(MessageInvalid, match=f"stream {number}"):
        keeper_message_from_pb(pb.ConnectRequest(chunk=pb.Chunk(key=KEY, stream=number)))
    with pytest.raises(MessageInvalid, match=f"stream {number}"):
        keeper_message_from_pb(
            pb.ConnectRequest(trial_ended=pb.TrialEnded(key=KEY, reason="succeeded", final_sizes=offsets))
        )
    attempt = pb.AttemptOffsets(key=KEY, offsets=offsets)
    with pytest.raises(MessageInvalid, match=f"stream {number}"):
        manager_message_from_pb(pb.ConnectResponse(ack=pb.Ack(attempt=attempt)))


@pytest.mark.parametrize("word", ["", "SUCCEEDED", "abducted"])
def test_a_message_with_an_unknown_exit_reason_is_invalid(word: str) -> None:
    with pytest.raises(MessageInvalid, match=repr(word)):
        keeper_message_from_pb(pb.ConnectRequest(trial_ended=pb.TrialEnded(key=KEY, reason=word)))
    with pytest.raises(MessageInvalid, match=repr(word)):
        manager_message_from_pb(pb.ConnectResponse(stop_trial=pb.StopTrial(trial_id="a", reason=word)))


@pytest.mark.parametrize("reason", sorted(set(ExitReason) - STOP_MESSAGE_REASONS))
def test_a_stop_request_whose_reason_is_not_a_stop_reason_is_invalid(reason: ExitReason) -> None:
    stop = pb.StopTrial(trial_id="a", reason=reason.value)
    with pytest.raises(MessageInvalid, match=f"{reason.value!r} is not a reason to stop a trial"):
        manager_message_from_pb(pb.ConnectResponse(stop_trial=stop))


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "a/b", "/etc", "a\0", "a\n", "x" * 300])
def test_an_attempt_key_is_invalid_if_its_trial_id_or_task_cannot_be_a_folder_name(name: str) -> None:
    for key in (
        pb.AttemptKey(trial_id=name, attempt_id=attempt_id(0), task="main"),
        pb.AttemptKey(trial_id="abcde", attempt_id=attempt_id(0), task=name),
    ):
        with pytest.raises(MessageInvalid):
            keeper_message_from_pb(pb.ConnectRequest(chunk=pb.Chunk(key=key, stream=pb.STREAM_METRICS)))
        with pytest.raises(MessageInvalid):
            keeper_message_from_pb(
                pb.ConnectRequest(
                    hello=pb.Hello(experiment_id="E", job_id="a", task="main-0", attempts=[key])
                )
            )


@given(st.binary())
def test_any_bytes_are_decoded_or_rejected_as_an_invalid_message(content: bytes) -> None:
    with contextlib.suppress(MessageInvalid):
        keeper_messages_from_bytes(content)
    try:
        parsed = pb.ConnectResponse.FromString(content)
    except DecodeError:
        # In a keeper, gRPC parses the manager's messages and handles a DecodeError. So such bytes never reach the function under
        # test.
        return
    with contextlib.suppress(MessageInvalid):
        manager_messages_from_pb(parsed)


def filled(message: Message, data: st.DataObject, depth: int = 0) -> Message:
    """Fill a message with arbitrary field values, within the limits of protobuf."""
    kind = FieldDescriptor
    values = {
        kind.TYPE_STRING: st.sampled_from(["", ".", "..", "../..", "/etc/passwd", "a\0b", "a\nb", "x" * 5000])
        | NAMES
        | TEXT,
        kind.TYPE_BYTES: st.binary(max_size=20),
        kind.TYPE_BOOL: st.booleans(),
        kind.TYPE_DOUBLE: st.floats(),
        kind.TYPE_UINT64: st.integers(0, 2**64 - 1) | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1]),
        kind.TYPE_UINT32: st.integers(0, UINT32),
        kind.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
        kind.TYPE_ENUM: st.integers(-1, 9),
    }
    for field in message.DESCRIPTOR.fields:
        if not data.draw(st.booleans()) or (depth > 1 and field.name == "batch"):
            continue
        if field.type == kind.TYPE_MESSAGE and field.is_repeated:
            for _ in range(data.draw(st.integers(0, 3))):
                filled(getattr(message, field.name).add(), data, depth + 1)
        elif field.type == kind.TYPE_MESSAGE:
            filled(getattr(message, field.name), data, depth + 1)
            getattr(message, field.name).SetInParent()
        elif field.name == "reason" and data.draw(st.booleans()):
            message.reason = data.draw(REASONS).value
        elif field.is_repeated:
            getattr(message, field.name).extend(data.draw(st.lists(values[field.type], max_size=20)))
        else:
            setattr(message, field.name, data.draw(values[field.type]))
    return message


def storable(value: object) -> bool:
    """True if the value fits into a database, a folder name and the web page."""
    match value:
        case bool() | bytes() | None | Enum():
            return True
        case int():
            return -(2**63) <= value < 2**63
        case float():
            return math.isfinite(value)
        case str():
            return len(value) <= MAX_CHARACTERS_OF_MESSAGE
        case dict():
            return all(storable(inner) for inner in value.values())
        case tuple():
            return all(storable(inner) for inner in value)
        case m.AttemptKey():
            return (
                is_safe_name(value.trial_id) and is_safe_name(value.task) and is_attempt_id(value.attempt_id)
            )
        case m.Hello() if not all(map(is_safe_name, (value.experiment_id, value.job_id, value.task))):
            return False
        case _:
            return all(storable(getattr(value, each.name)) for each in dataclasses.fields(value))


def test_an_end_report_of_an_earlier_keeper_version_is_decoded_without_the_optional_fields() -> None:
    old = pb.TrialEnded(key=KEY, reason="early stopped", exit_code=143, started_at_s=1.0, ended_at_s=2.0)
    message = keeper_message_from_pb(pb.ConnectRequest(trial_ended=old))
    assert isinstance(message, m.TrialEnded)
    assert (message.metrics_size_at_stop, message.warnings) == (None, ())


def test_a_metrics_size_of_zero_at_the_stop_is_not_decoded_as_a_missing_size() -> None:
    end = m.TrialEnded(
        m.AttemptKey("a", attempt_id(0), "b"), ExitReason.EARLY_STOPPED, 0, 1.0, 2.0, metrics_size_at_stop=0
    )
    assert keeper_message_from_pb(keeper_messages_to_pb([end])) == end


@pytest.mark.parametrize(
    "longest",
    [
        m.Hello("9" * MAX_CHARACTERS_OF_VERSION, "E", "a", "b", ()),
        m.Hello("1", "E", "a", "b", (m.AttemptKey("a", attempt_id(0), "b"),) * MAX_ATTEMPTS_OF_HELLO),
        m.TrialEnded(
            m.AttemptKey("a", attempt_id(0), "b"),
            ExitReason.SUCCEEDED,
            0,
            1.0,
            2.0,
            warnings=("x" * m.MAX_CHARACTERS_OF_WARNING,),
        ),
    ],
    ids=["version", "attempts", "warning"],
)
def test_a_field_of_the_maximum_length_is_valid(longest: m.KeeperMessage) -> None:
    assert keeper_message_from_pb(keeper_messages_to_pb([longest])) == longest


@given(st.data())
def test_every_accepted_keeper_message_can_be_stored(data: st.DataObject) -> None:
    content = filled(pb.ConnectRequest(), data).SerializeToString()
    with contextlib.suppress(MessageInvalid):
        messages = keeper_messages_from_bytes(content)
        assert all(map(storable, messages))


@pytest.mark.parametrize(
    "request_",
    [
        pb.ConnectRequest(usage=pb.Usage(key=KEY, rss_bytes=2**63)),
        pb.ConnectRequest(usage=pb.Usage(key=KEY, disk_bytes=2**64 - 1)),
        pb.ConnectRequest(usage=pb.Usage(key=KEY, cpu_percent=math.nan)),
        pb.ConnectRequest(usage=pb.Usage(key=KEY, gpus=[pb.GpuUsage(utilisation_percent=math.inf)])),
        pb.ConnectRequest(usage=pb.Usage(key=KEY, gpus=[pb.GpuUsage(memory_used_bytes=2**63)])),
        pb.ConnectRequest(usage=pb.Usage(key=KEY, gpus=[pb.GpuUsage()] * (MAX_GPUS + 1))),
        pb.ConnectRequest(chunk=pb.Chunk(key=KEY, stream=1, offset=2**63)),
        pb.ConnectRequest(trial_started=pb.TrialStarted(key=KEY, started_at_s=math.nan)),
        pb.ConnectRequest(trial_started=pb.TrialStarted(key=KEY, started_at_s=-1)),
        pb.ConnectRequest(trial_ended=pb.TrialEnded(key=KEY, reason="signal", ended_at_s=math.inf)),
        pb.ConnectRequest(trial_ended=pb.TrialEnded(key=KEY, reason="signal", ended_at_s=1e18)),
        pb.ConnectRequest(
            trial_ended=pb.TrialEnded(key=KEY, reason="signal", message="x" * (MAX_CHARACTERS_OF_MESSAGE + 1))
        ),
        pb.ConnectRequest(
            trial_ended=pb.TrialEnded(
                key=KEY, reason="signal", final_sizes=[pb.StreamOffset(stream=1, offset=2**63)]
            )
        ),
        pb.ConnectRequest(trial_ended=pb.TrialEnded(key=KEY, reason="signal", metrics_size_at_stop=2**63)),
        pb.ConnectRequest(
            trial_ended=pb.TrialEnded(key=KEY, reason="signal", warnings=["x"] * (m.MAX_WARNINGS + 1))
        ),
        pb.ConnectRequest(
            trial_ended=pb.TrialEnded(
                key=KEY, reason="signal", warnings=["x" * (m.MAX_CHARACTERS_OF_WARNING + 1)]
            )
        ),
        pb.ConnectRequest(idle=pb.Idle(), batch=[pb.ConnectRequest(idle=pb.Idle())] * (MAX_BATCH + 1)),
        pb.ConnectRequest(
            trial_started=pb.TrialStarted(key=pb.AttemptKey(trial_id="a", attempt=7, task="b"))
        ),
        pb.ConnectRequest(
            hello=pb.Hello(
                version="9" * (MAX_CHARACTERS_OF_VERSION + 1), experiment_id="E", job_id="a", task="b"
            )
        ),
        pb.ConnectRequest(
            hello=pb.Hello(
                experiment_id="E", job_id="a", task="b", attempts=[KEY] * (MAX_ATTEMPTS_OF_HELLO + 1)
            )
        ),
        pb.ConnectRequest(hello=pb.Hello(experiment_id="E", job_id="a", task="../b")),
        pb.ConnectRequest(hello=pb.Hello(experiment_id="E", job_id="a\nb", task="b")),
    ],
    ids=lambda request: str(request)[:40].replace("\n", " "),
)
def test_a_message_with_an_out_of_range_value_is_invalid_with_a_short_reason(
    request_: pb.ConnectRequest,
) -> None:
    with pytest.raises(MessageInvalid) as caught:
        keeper_messages_from_bytes(request_.SerializeToString())
    assert str(caught.value).startswith("cannot read a ")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "content", [b"\xff\xff\xff", b"\x0a\x04\x0a\x02\xff\xfe"], ids=["no protobuf", "no UTF-8"]
)
def test_bytes_that_are_not_protobuf_are_rejected_as_an_invalid_message(content: bytes) -> None:
    with pytest.raises(MessageInvalid, match="keeper's message"):
        keeper_messages_from_bytes(content)
