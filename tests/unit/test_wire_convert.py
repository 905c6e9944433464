"""Messages to protobuf and back."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_keeper.wire import messages as m
from trial_keeper.wire.convert import (
    MessageInvalid,
    keeper_message_from_pb,
    keeper_message_to_pb,
    keeper_messages_from_pb,
    keeper_messages_to_pb,
    manager_message_from_pb,
    manager_message_to_pb,
    manager_messages_from_pb,
    manager_messages_to_pb,
)
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.v1 import keeper_pb2 as pb

UINT32, UINT64 = 2**32 - 1, 2**64 - 1
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,30}", fullmatch=True)
VERSIONS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=100)
TIMES = st.floats(allow_nan=False)
KEYS = st.builds(m.AttemptKey, NAMES, st.integers(0, UINT32), NAMES)
OFFSETS = st.dictionaries(st.sampled_from(m.Stream), st.integers(0, UINT64))
ATTEMPTS = st.builds(m.AttemptOffsets, KEYS, OFFSETS, st.booleans())
REASONS = st.sampled_from(ExitReason)
GPUS = st.builds(m.GpuUsage, st.integers(0, UINT32), TIMES, st.integers(0, UINT64))
KEEPER_MESSAGES = {
    m.Hello: st.builds(m.Hello, VERSIONS, NAMES, NAMES, NAMES, st.lists(KEYS).map(tuple), st.booleans()),
    m.TrialStarted: st.builds(m.TrialStarted, KEYS, TIMES),
    m.Chunk: st.builds(m.Chunk, KEYS, st.sampled_from(m.Stream), st.integers(0, UINT64), st.binary()),
    m.TrialEnded: st.builds(
        m.TrialEnded, KEYS, REASONS, st.integers(-(2**31), 2**31 - 1), TIMES, TIMES, OFFSETS, TEXT
    ),
    m.Usage: st.builds(
        m.Usage, KEYS, TIMES, st.integers(0, UINT64), st.integers(0, UINT64), st.lists(GPUS).map(tuple)
    ),
    m.Idle: st.just(m.Idle()),
}
MANAGER_MESSAGES = {
    m.Welcome: st.builds(m.Welcome, TEXT, st.lists(ATTEMPTS).map(tuple)),
    m.RunTrial: st.builds(m.RunTrial, NAMES),
    m.StopTrial: st.builds(m.StopTrial, NAMES, REASONS),
    m.Durable: st.builds(m.Durable, ATTEMPTS),
    m.Leave: st.builds(m.Leave, TEXT),
}
KEY = pb.AttemptKey(trial_id="abcde", attempt=0, task="worker-0")


@pytest.mark.parametrize("text", ["", "..", "../x", "a/b", "a\nb", "a b", "a\0", "x" * 241, "ä"])
def test_an_id_that_could_lead_elsewhere_or_forge_a_line_of_a_log_is_refused(text: str) -> None:
    right = {"version": "0.6.0", "experiment_id": "exp", "job_id": "job", "task": "main-0"}
    for name in ("experiment_id", "job_id", "task"):
        request = pb.ConnectRequest(hello=pb.Hello(**right | {name: text}))
        with pytest.raises(MessageInvalid, match="can be no id"):
            keeper_message_from_pb(request)
    for key in (pb.AttemptKey(trial_id=text, task="main-0"), pb.AttemptKey(trial_id="abcde", task=text)):
        for request in (
            pb.ConnectRequest(hello=pb.Hello(**right, attempts=[key])),
            pb.ConnectRequest(chunk=pb.Chunk(key=key, stream=pb.STREAM_METRICS)),
            pb.ConnectRequest(trial_started=pb.TrialStarted(key=key)),
            pb.ConnectRequest(trial_ended=pb.TrialEnded(key=key, reason="succeeded")),
            pb.ConnectRequest(usage=pb.Usage(key=key)),
        ):
            with pytest.raises(MessageInvalid, match="can be no id"):
                keeper_message_from_pb(request)
    for response in (
        pb.ConnectResponse(run_trial=pb.RunTrial(trial_id=text)),
        pb.ConnectResponse(stop_trial=pb.StopTrial(trial_id=text, reason="stopped by user")),
    ):
        with pytest.raises(MessageInvalid, match="can be no id"):
            manager_message_from_pb(response)


@pytest.mark.parametrize("text", ["0.6\n2026-01-01 INFO all is well", "x" * 101, "0.6ü"])
def test_a_version_that_could_forge_a_line_of_a_log_is_refused(text: str) -> None:
    hello = pb.Hello(version=text, experiment_id="exp", job_id="job", task="main-0")
    with pytest.raises(MessageInvalid, match="can be no version"):
        keeper_message_from_pb(pb.ConnectRequest(hello=hello))


@given(st.one_of(list(KEEPER_MESSAGES.values())))
def test_what_a_keeper_says_is_what_the_manager_hears(message: m.KeeperMessage) -> None:
    on_the_wire = keeper_message_to_pb(message).SerializeToString()
    assert keeper_message_from_pb(pb.ConnectRequest.FromString(on_the_wire)) == message


@given(st.one_of(list(MANAGER_MESSAGES.values())))
def test_what_a_manager_says_is_what_the_keeper_hears(message: m.ManagerMessage) -> None:
    on_the_wire = manager_message_to_pb(message).SerializeToString()
    assert manager_message_from_pb(pb.ConnectResponse.FromString(on_the_wire)) == message


@given(st.lists(st.one_of(list(KEEPER_MESSAGES.values())), min_size=1, max_size=5))
def test_what_a_keeper_says_in_one_breath_is_heard_in_its_order(messages: list[m.KeeperMessage]) -> None:
    on_the_wire = keeper_messages_to_pb(messages).SerializeToString()
    assert keeper_messages_from_pb(pb.ConnectRequest.FromString(on_the_wire)) == messages


@given(st.lists(st.one_of(list(MANAGER_MESSAGES.values())), min_size=1, max_size=5))
def test_what_a_manager_says_in_one_breath_is_heard_in_its_order(messages: list[m.ManagerMessage]) -> None:
    on_the_wire = manager_messages_to_pb(messages).SerializeToString()
    assert manager_messages_from_pb(pb.ConnectResponse.FromString(on_the_wire)) == messages


def test_one_invalid_message_makes_the_whole_breath_invalid() -> None:
    said = keeper_messages_to_pb([m.Idle(), m.Idle()])
    said.also[0].ClearField("idle")
    with pytest.raises(MessageInvalid, match="keeper's message"):
        keeper_messages_from_pb(said)
    answered = manager_messages_to_pb([m.RunTrial("a"), m.Leave("b")])
    answered.also[0].ClearField("leave")
    with pytest.raises(MessageInvalid, match="manager's message"):
        manager_messages_from_pb(answered)


def test_no_message_of_the_protocol_is_left_out_above() -> None:
    def cases(message: type) -> int:
        return len(message.DESCRIPTOR.oneofs_by_name["message"].fields)

    assert KEEPER_MESSAGES.keys() == set(m.KeeperMessage.__args__)
    assert MANAGER_MESSAGES.keys() == set(m.ManagerMessage.__args__)
    assert (cases(pb.ConnectRequest), cases(pb.ConnectResponse)) == (6, 5)


def test_every_stream_has_a_number_and_every_number_a_stream() -> None:
    numbers = set(pb.Stream.values()) - {pb.STREAM_UNSPECIFIED}
    heard = {
        keeper_message_from_pb(pb.ConnectRequest(chunk=pb.Chunk(key=KEY, stream=number))).stream
        for number in numbers
    }
    assert heard == set(m.Stream)


@pytest.mark.parametrize("content", [b"", b"\xba\x06\x00"], ids=["nothing", "a field of a later version"])
def test_a_message_without_a_known_content_is_invalid(content: bytes) -> None:
    with pytest.raises(MessageInvalid, match="keeper's message"):
        keeper_message_from_pb(pb.ConnectRequest.FromString(content))
    with pytest.raises(MessageInvalid, match="manager's message"):
        manager_message_from_pb(pb.ConnectResponse.FromString(content))


@pytest.mark.parametrize("number", [0, 5, 99])
def test_an_unknown_stream_is_invalid(number: int) -> None:
    offsets = [pb.StreamOffset(stream=number, offset=1)]
    with pytest.raises(MessageInvalid, match=f"stream {number}"):
        keeper_message_from_pb(pb.ConnectRequest(chunk=pb.Chunk(key=KEY, stream=number)))
    with pytest.raises(MessageInvalid, match=f"stream {number}"):
        keeper_message_from_pb(
            pb.ConnectRequest(trial_ended=pb.TrialEnded(key=KEY, reason="succeeded", final_sizes=offsets))
        )
    attempt = pb.AttemptOffsets(key=KEY, offsets=offsets)
    with pytest.raises(MessageInvalid, match=f"stream {number}"):
        manager_message_from_pb(pb.ConnectResponse(durable=pb.Durable(attempt=attempt)))


@pytest.mark.parametrize("word", ["", "SUCCEEDED", "abducted"])
def test_an_unknown_reason_is_invalid(word: str) -> None:
    with pytest.raises(MessageInvalid, match=repr(word)):
        keeper_message_from_pb(pb.ConnectRequest(trial_ended=pb.TrialEnded(key=KEY, reason=word)))
    with pytest.raises(MessageInvalid, match=repr(word)):
        manager_message_from_pb(pb.ConnectResponse(stop_trial=pb.StopTrial(trial_id="a", reason=word)))


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "a/b", "/etc", "a\0", "a\n", "x" * 300])
def test_a_key_that_cannot_name_a_folder_is_invalid(name: str) -> None:
    for key in (pb.AttemptKey(trial_id=name, task="main"), pb.AttemptKey(trial_id="abcde", task=name)):
        with pytest.raises(MessageInvalid):
            keeper_message_from_pb(pb.ConnectRequest(chunk=pb.Chunk(key=key, stream=pb.STREAM_METRICS)))
        with pytest.raises(MessageInvalid):
            keeper_message_from_pb(pb.ConnectRequest(hello=pb.Hello(attempts=[key])))


@given(st.binary())
def test_no_bytes_make_anything_but_a_message_or_an_invalid_one(content: bytes) -> None:
    for parse, read in (
        (pb.ConnectRequest.FromString, keeper_messages_from_pb),
        (pb.ConnectResponse.FromString, manager_messages_from_pb),
    ):
        try:
            parsed = parse(content)
        except Exception:  # noqa: BLE001 - not protobuf at all: gRPC's business
            continue
        with contextlib.suppress(MessageInvalid):
            read(parsed)
