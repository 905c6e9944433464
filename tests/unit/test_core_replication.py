"""The keeper's half of replication, step by step. tests/contract/test_exactly_once.py tests both halves together."""

from collections.abc import Callable

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

import trial_keeper.core.replication as module
from nni_sdk.records import MAX_FRAME_BYTES
from trial_keeper.core.replication import Replication, SendChunk
from trial_keeper.wire.limits import QUOTA_BYTES
from trial_keeper.wire.messages import AttemptKey, Stream

KEY = AttemptKey("abcde", attempt_id(0), "worker-0")
METRICS, STDOUT, STDERR = Stream.METRICS, Stream.STDOUT, Stream.STDERR


@pytest.fixture
def a_replication() -> Callable[..., Replication]:
    def make(*, size: int = 0, durable: int | None = 0, stream: Stream = METRICS) -> Replication:
        """A replication of one stream that is connected to a manager with the offset `durable`. If `durable` is None, the
        replication is not connected.
        """
        replication = Replication([stream])
        replication.grew({stream: size})
        if durable is not None:
            replication.link_came_up({stream: durable})
        return replication

    return make


def test_the_send_window_for_metrics_is_large_enough_for_the_longest_record() -> None:
    assert module.METRICS_WINDOW_BYTES >= MAX_FRAME_BYTES


def test_no_bytes_are_sent_before_the_connection_is_open(a_replication) -> None:
    assert a_replication(size=10, durable=None).next_chunks(KEY) == []


def test_bytes_are_not_sent_twice_on_one_connection(a_replication) -> None:
    replication = a_replication(size=10)
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 0, 10)]
    assert replication.next_chunks(KEY) == []


def test_only_the_appended_bytes_are_sent_after_a_stream_has_grown(a_replication) -> None:
    replication = a_replication(size=10)
    replication.next_chunks(KEY)
    replication.grew({METRICS: 15})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 10, 5)]


def test_a_keeper_starts_to_send_at_the_offset_that_the_manager_has_stored(a_replication) -> None:
    assert a_replication(size=10, durable=7).next_chunks(KEY) == [SendChunk(KEY, METRICS, 7, 3)]


def test_a_stream_is_sent_from_its_first_byte_if_the_manager_names_no_offset_for_it() -> None:
    replication = Replication([METRICS, STDOUT])
    replication.grew({METRICS: 3, STDOUT: 4})
    replication.link_came_up({METRICS: 3})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, STDOUT, 0, 4)]


def test_unacknowledged_bytes_are_sent_again_on_the_next_connection(a_replication) -> None:
    replication = a_replication(size=10)
    replication.next_chunks(KEY)
    replication.confirmed({METRICS: 4})
    replication.link_went_down()
    assert replication.next_chunks(KEY) == []
    replication.link_came_up({METRICS: 4})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 4, 6)]


def test_a_keeper_sends_all_bytes_again_to_a_manager_that_lost_its_store(a_replication) -> None:
    replication = a_replication(size=10, durable=10)
    replication.link_went_down()
    replication.link_came_up({})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 0, 10)]


def test_a_report_of_a_smaller_file_size_is_ignored(a_replication) -> None:
    replication = a_replication(size=10)
    replication.grew({METRICS: 2})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 0, 10)]


def test_a_keeper_does_not_send_bytes_that_the_manager_has_read_from_the_workspace(a_replication) -> None:
    replication = a_replication(size=5)
    replication.next_chunks(KEY)
    replication.confirmed({METRICS: 8})
    replication.grew({METRICS: 10})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 8, 2)]


def test_an_acknowledgement_of_an_offset_below_the_last_acknowledged_offset_has_no_effect(
    a_replication,
) -> None:
    window_bytes = module.METRICS_WINDOW_BYTES
    replication = a_replication(size=window_bytes * 2)
    replication.next_chunks(KEY)
    replication.confirmed({METRICS: 8})
    replication.confirmed({METRICS: 3})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, window_bytes, 8)]


def test_an_acknowledgement_of_an_uncollected_stream_is_ignored(a_replication) -> None:
    replication = a_replication(size=10)
    replication.confirmed({STDOUT: 99})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 0, 10)]


def test_a_keeper_sends_no_bytes_until_the_file_is_longer_than_the_managers_offset(a_replication) -> None:
    replication = a_replication(size=0, durable=10)
    assert replication.next_chunks(KEY) == []
    replication.grew({METRICS: 12})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 10, 2)]


@pytest.mark.parametrize(
    ("stream", "chunk_bytes", "window_bytes"),
    [
        (METRICS, module.METRICS_CHUNK_BYTES, module.METRICS_WINDOW_BYTES),
        (STDOUT, module.LOG_CHUNK_BYTES, module.LOG_WINDOW_BYTES),
        (Stream.KEEPER, module.LOG_CHUNK_BYTES, module.LOG_WINDOW_BYTES),
    ],
)
def test_the_number_of_unacknowledged_bytes_never_exceeds_the_send_window(
    a_replication, stream, chunk_bytes, window_bytes
) -> None:
    replication = a_replication(size=window_bytes * 3, stream=stream)
    chunks = replication.next_chunks(KEY)
    assert sum(chunk.size_bytes for chunk in chunks) == window_bytes
    assert {chunk.size_bytes for chunk in chunks} == {chunk_bytes}
    replication.confirmed({stream: 1000})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, stream, window_bytes, 1000)]


def test_the_bytes_of_metrics_are_sent_before_the_bytes_of_logs() -> None:
    replication = Replication([METRICS, STDOUT, STDERR])
    replication.grew({STDERR: 1, STDOUT: 1, METRICS: 1})
    replication.link_came_up({})
    assert [chunk.stream for chunk in replication.next_chunks(KEY)] == [METRICS, STDOUT, STDERR]


def test_bytes_that_are_written_after_the_trial_has_ended_are_not_sent(a_replication) -> None:
    replication = a_replication(size=10)
    replication.ended({METRICS: 12})
    replication.grew({METRICS: 20})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 0, 12)]


def test_a_trial_end_raises_an_error_if_the_final_size_of_a_stream_is_missing() -> None:
    with pytest.raises(KeyError):
        Replication([METRICS, STDOUT]).ended({METRICS: 0})


@pytest.mark.parametrize(("size", "end"), [(0, 10), (10, 10), (17, 17)])
def test_a_truncated_stream_ends_at_the_larger_of_its_new_size_and_the_sent_offset(
    a_replication, size, end
) -> None:
    replication = a_replication(size=10)
    replication.next_chunks(KEY)
    replication.grew({METRICS: 20})
    (unreadable,) = replication.next_chunks(KEY)
    assert replication.cut(METRICS, unreadable.offset, size) == end
    assert not replication.is_due(unreadable)
    assert replication.next_chunks(KEY) == ([SendChunk(KEY, METRICS, 10, end - 10)] if end > 10 else [])
    replication.grew({METRICS: 99})
    assert replication.next_chunks(KEY) == []
    assert replication.final_sizes({METRICS: 99}) == {METRICS: end}


def test_a_truncated_stream_ends_at_the_managers_offset_if_sent_bytes_were_lost(
    a_replication,
) -> None:
    replication = a_replication(size=10)
    replication.next_chunks(KEY)
    replication.grew({METRICS: 20})
    replication.next_chunks(KEY)
    replication.cut(METRICS, 10, 2)
    replication.link_came_up({METRICS: 4})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 4, 6)]
    assert replication.cut(METRICS, 4, 2) == 4
    assert replication.final_sizes({METRICS: 2}) == {METRICS: 4}


def test_a_truncation_of_one_stream_leaves_other_streams_unchanged() -> None:
    replication = Replication([METRICS, STDOUT])
    replication.grew({METRICS: 5, STDOUT: 5})
    replication.link_came_up({})
    metrics, _ = replication.next_chunks(KEY)
    replication.cut(STDOUT, 0, 0)
    assert replication.is_due(metrics)
    replication.grew({METRICS: 9, STDOUT: 9})
    assert replication.next_chunks(KEY) == [SendChunk(KEY, METRICS, 5, 4)]


def test_bytes_over_the_quota_are_never_sent_but_count_in_the_final_size(a_replication, monkeypatch) -> None:
    monkeypatch.setitem(QUOTA_BYTES, METRICS, 12)
    replication = a_replication(size=10)
    assert (replication.next_chunks(KEY), replication.over_quota) == ([SendChunk(KEY, METRICS, 0, 10)], ())
    replication.grew({METRICS: 50})
    assert (replication.next_chunks(KEY), replication.over_quota) == (
        [SendChunk(KEY, METRICS, 10, 2)],
        (METRICS,),
    )
    replication.confirmed({METRICS: 12})
    assert replication.next_chunks(KEY) == []
    assert replication.final_sizes({METRICS: 60}) == {METRICS: 60}
    replication.ended({METRICS: 60})
    assert replication.next_chunks(KEY) == []


@pytest.mark.parametrize("link_is_up", [True, False])
def test_the_final_size_includes_truncated_bytes_that_the_manager_may_have_received(
    a_replication, link_is_up
) -> None:
    replication = a_replication(size=10)
    replication.next_chunks(KEY)
    replication.confirmed({METRICS: 6})
    if not link_is_up:
        replication.link_went_down()
    assert replication.final_sizes({METRICS: 3}) == {METRICS: 10 if link_is_up else 6}


@given(
    st.lists(
        st.tuples(st.sampled_from(["grow", "confirm"]), st.integers(0, 2_000_000)),
        max_size=20,
    ),
    st.sampled_from(list(Stream)),
)
def test_the_sent_chunks_of_a_stream_have_no_gap_and_no_overlap(steps, stream) -> None:
    replication = Replication([stream])
    replication.link_came_up({})
    size = sent = 0
    for step, amount in steps:
        if step == "grow":
            size += amount
            replication.grew({stream: size})
        else:
            replication.confirmed({stream: min(amount, sent)})
        for chunk in replication.next_chunks(KEY):
            assert chunk.offset == sent
            sent += chunk.size_bytes
        assert sent <= size
