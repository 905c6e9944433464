"""The manager's half of replication, step by step. tests/contract/test_exactly_once.py tests both halves together."""

from collections.abc import Callable

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.ingest import RECORDS_AT_ONCE, AttemptIngest, OffsetGap, StreamWrite
from nni_sdk.frame import frame, frame_head
from nni_sdk.records import MAX_FRAME_BYTES, encode
from trial_keeper.wire.limits import QUOTA_BYTES
from trial_keeper.wire.messages import AttemptKey, Stream

KEY = AttemptKey("abcde", attempt_id(0), "main")
METRICS, STDOUT = Stream.METRICS, Stream.STDOUT
FIRST, SECOND = (encode(0, "abcde", "PERIODICAL", number, number / 10) for number in range(2))


@pytest.fixture
def new_ingest() -> Callable[..., AttemptIngest]:
    def make(**durable: int) -> AttemptIngest:
        """An ingest that is restored from a store. The store contains this many bytes of each stream."""
        return AttemptIngest.restored(KEY, {Stream(word): offset for word, offset in durable.items()})

    return make


def values(commits: list[StreamWrite]) -> list[str]:
    return [record.value for commit in commits for record in commit.records]


def commit_all(receiver: AttemptIngest, commits: list[StreamWrite]) -> None:
    for commit in commits:
        receiver.committed(commit)


def test_log_bytes_are_committed_on_arrival(new_ingest) -> None:
    assert new_ingest().take(STDOUT, 0, b"hello") == [StreamWrite(KEY, STDOUT, 0, 5, data=b"hello")]


def test_records_are_committed_with_the_end_offset_of_the_last_record(new_ingest) -> None:
    (commit,) = new_ingest().take(METRICS, 0, FIRST + SECOND)
    assert (commit.offset, commit.new_offset) == (0, len(FIRST + SECOND))
    assert values([commit]) == ["0.0", "0.1"]
    assert commit.data == b""


def test_received_bytes_are_durable_after_their_commit(new_ingest) -> None:
    receiver = new_ingest()
    commits = receiver.take(METRICS, 0, FIRST)
    assert (receiver.durable, receiver.received(METRICS)) == ({METRICS: 0}, len(FIRST))
    commit_all(receiver, commits)
    assert receiver.durable == {METRICS: len(FIRST)}


def test_bytes_that_are_received_again_are_dropped(new_ingest) -> None:
    receiver = new_ingest()
    receiver.take(STDOUT, 0, b"hello")
    assert receiver.take(STDOUT, 0, b"hello") == []
    assert receiver.take(STDOUT, 2, b"ll") == []


def test_only_the_new_part_of_an_overlapping_chunk_is_committed(new_ingest) -> None:
    receiver = new_ingest(stdout=3)
    assert receiver.take(STDOUT, 1, b"ello") == [StreamWrite(KEY, STDOUT, 3, 5, data=b"lo")]


def test_the_error_for_a_gap_in_a_stream_contains_the_missing_offset(new_ingest) -> None:
    receiver = new_ingest(stdout=3)
    with pytest.raises(OffsetGap, match="from offset 4: only 3 bytes have arrived"):
        receiver.take(STDOUT, 4, b"o")
    assert receiver.received(STDOUT) == 3


def test_an_empty_chunk_causes_no_commit(new_ingest) -> None:
    assert new_ingest().take(METRICS, 0, b"") == []


def test_a_partial_record_is_committed_only_after_its_remaining_bytes_have_arrived(new_ingest) -> None:
    receiver = new_ingest()
    assert receiver.take(METRICS, 0, FIRST[:20]) == []
    commits = receiver.take(METRICS, 20, FIRST[20:] + SECOND[:1])
    assert values(commits) == ["0.0"]
    assert commits[0].new_offset == len(FIRST)


def test_a_restarted_manager_requests_a_partial_record_from_its_first_byte(new_ingest) -> None:
    receiver = new_ingest()
    commit_all(receiver, receiver.take(METRICS, 0, FIRST + SECOND[:20]))
    restarted = AttemptIngest.restored(KEY, receiver.durable)
    assert restarted.durable == {METRICS: len(FIRST)}
    (commit,) = restarted.take(METRICS, len(FIRST), SECOND)
    assert values([commit]) == ["0.1"]
    assert commit.records[0].offset == len(FIRST)


def test_a_partial_record_is_discarded_when_the_attempt_ends(new_ingest) -> None:
    receiver = new_ingest()
    commit_all(receiver, receiver.take(METRICS, 0, FIRST + SECOND[:20]))
    (commit,) = receiver.end({METRICS: len(FIRST) + 20})
    assert (commit.offset, commit.new_offset) == (len(FIRST), len(FIRST) + 20)
    assert [span.length for span in commit.garbage] == [20]
    assert not receiver.is_complete
    receiver.committed(commit)
    assert receiver.is_complete


def test_a_partial_record_is_discarded_if_it_arrives_after_the_attempt_has_ended(new_ingest) -> None:
    receiver = new_ingest()
    assert receiver.end({METRICS: len(FIRST) + 5}) == []
    commits = receiver.take(METRICS, 0, FIRST + SECOND[:5])
    assert values(commits) == ["0.0"]
    commit_all(receiver, commits)
    assert receiver.is_complete
    assert receiver.durable == {METRICS: len(FIRST) + 5}


def test_a_repeated_end_report_of_an_attempt_has_no_effect(new_ingest) -> None:
    receiver = new_ingest()
    receiver.take(METRICS, 0, FIRST[:20])
    assert len(receiver.end({METRICS: 20})) == 1
    assert receiver.end({METRICS: 20}) == []


def test_an_attempt_is_complete_when_it_has_ended_and_every_stream_is_durable(new_ingest) -> None:
    receiver = new_ingest(metrics=5, stdout=7)
    assert not receiver.is_complete
    receiver.end({METRICS: 5, STDOUT: 9})
    assert not receiver.is_complete
    commits = receiver.take(STDOUT, 7, b"ab")
    assert not receiver.is_complete
    commit_all(receiver, commits)
    assert receiver.is_complete


def test_an_attempt_with_uncommitted_bytes_is_incomplete_even_if_the_keeper_reported_fewer_bytes(
    new_ingest,
) -> None:
    receiver = new_ingest()
    commits = receiver.take(METRICS, 0, FIRST)
    receiver.end({METRICS: 0})
    assert not receiver.is_complete
    commit_all(receiver, commits)
    assert receiver.is_complete


def test_an_attempt_without_output_is_complete_when_it_ends(new_ingest) -> None:
    receiver = new_ingest()
    assert receiver.end({METRICS: 0, STDOUT: 0}) == []
    assert receiver.is_complete


def test_logs_that_are_not_collected_do_not_delay_completion(new_ingest) -> None:
    receiver = new_ingest()
    receiver.end({METRICS: 0})
    assert receiver.is_complete


def test_each_stream_is_received_independently_of_the_other_streams(new_ingest) -> None:
    receiver = new_ingest()
    receiver.take(METRICS, 0, FIRST[:20])
    receiver.take(STDOUT, 0, b"x" * 50)
    assert values(receiver.take(METRICS, 20, FIRST[20:])) == ["0.0"]


def test_bytes_that_are_not_a_record_are_skipped_and_reported(new_ingest) -> None:
    (commit,) = new_ingest().take(METRICS, 0, b"not a record\n" + FIRST)
    assert values([commit]) == ["0.0"]
    assert sum(span.length for span in commit.garbage) == 13


@given(st.lists(st.integers(0, len(FIRST + SECOND)), max_size=8), st.lists(st.integers(0, 60), max_size=20))
def test_a_stream_gives_the_same_records_for_all_chunk_boundaries_and_repeated_chunks(
    cuts: list[int], repeats: list[int]
) -> None:
    whole = FIRST + SECOND
    receiver, commits = AttemptIngest(KEY), []
    borders = [*sorted(cuts), len(whole)]
    for index, end in enumerate(borders):
        start = borders[index - 1] if index else 0
        again = repeats[index] if index < len(repeats) else 0
        start = max(0, start - again)
        commits += receiver.take(METRICS, start, whole[start:end])
    assert values(commits) == ["0.0", "0.1"]
    assert [commit.offset for commit in commits[1:]] == [commit.new_offset for commit in commits[:-1]]


def test_bytes_beyond_the_reported_end_are_dropped(new_ingest) -> None:
    receiver = new_ingest()
    receiver.take(STDOUT, 0, b"hel")
    receiver.end({METRICS: len(FIRST), STDOUT: 5})
    assert values(receiver.take(METRICS, 0, FIRST + SECOND)) == ["0.0"]
    assert receiver.take(STDOUT, 3, b"lo, and more") == [StreamWrite(KEY, STDOUT, 3, 5, data=b"lo")]
    assert receiver.take(STDOUT, 5, b"and more") == []
    assert receiver.take(METRICS, len(FIRST), SECOND) == []


def test_many_records_are_committed_in_several_consecutive_commits(new_ingest) -> None:
    garbage = b"not a record\n"
    one = FIRST * (RECORDS_AT_ONCE // 2) + garbage
    commits = new_ingest().take(METRICS, 0, garbage + one * 5)
    assert [len(commit.records) for commit in commits] == [RECORDS_AT_ONCE] * 2 + [RECORDS_AT_ONCE // 2]
    assert [commit.offset for commit in commits[1:]] == [commit.new_offset for commit in commits[:-1]]
    assert commits[-1].new_offset == len(garbage + one * 5)
    assert sum(span.length for commit in commits for span in commit.garbage) == 6 * len(garbage)
    for commit in commits:
        places = [record.offset for record in commit.records] + [span.offset for span in commit.garbage]
        assert all(commit.offset <= place < commit.new_offset for place in places)


@pytest.mark.parametrize("more", [0, 1])
def test_each_commit_ends_after_its_last_record_or_after_all_received_bytes(new_ingest, more) -> None:
    longer = encode(0, "abcde", "PERIODICAL", 0, "x" * 50)
    records, rest = FIRST * (RECORDS_AT_ONCE - 1) + longer, FIRST * more + b"not a record\n"
    commits = new_ingest().take(METRICS, 0, records + rest)
    assert commits[-1].new_offset == len(records + rest)
    if more:
        assert commits[0].new_offset == len(records)


def test_each_checkpoint_mark_is_part_of_the_commit_that_contains_the_bytes_of_the_mark(new_ingest) -> None:
    mark = frame(frame_head(0, "abcde", "CHECKPOINT"), 0, '"1"')
    commits = new_ingest().take(METRICS, 0, mark + FIRST * RECORDS_AT_ONCE + mark + FIRST)
    assert [[each.offset for each in commit.marks] for commit in commits] == [[0], [commits[0].new_offset]]


def test_a_long_record_that_arrives_in_small_pieces_is_decoded_once(new_ingest, monkeypatch) -> None:
    from nni_manager.domain import ingest

    decodes = []
    monkeypatch.setattr(
        ingest, "decode", lambda data, offset: decodes.append(len(data)) or records_of(data, offset)
    )
    from nni_sdk.records import decode as records_of

    receiver = new_ingest()
    frame = encode(0, "abcde", "FINAL", 0, "x" * 100_000)
    for offset in range(0, len(frame), 100):
        commits = receiver.take(METRICS, offset, frame[offset : offset + 100])
    assert values(commits) == ['"' + "x" * 100_000 + '"']
    assert len(decodes) == 1


def test_an_endless_line_is_buffered_only_up_to_the_maximum_record_size(new_ingest) -> None:
    receiver, piece = new_ingest(), b"x" * 65_536
    discarded = 0
    for number in range(40):
        commits = receiver.take(METRICS, number * len(piece), piece)
        discarded += sum(span.length for commit in commits for span in commit.garbage)
    assert 40 * len(piece) - discarded <= MAX_FRAME_BYTES


@pytest.fixture
def small_limits(monkeypatch) -> None:
    for stream in Stream:
        monkeypatch.setitem(QUOTA_BYTES, stream, len(FIRST) + 20)


def test_bytes_over_the_quota_are_dropped_and_do_not_delay_completion(new_ingest, small_limits) -> None:
    limit = QUOTA_BYTES[STDOUT]
    receiver = new_ingest()
    (commit,) = receiver.take(STDOUT, 0, b"x" * 500)
    assert (commit.new_offset, commit.data, commit.is_last_collected) == (limit, b"x" * limit, True)
    assert receiver.take(STDOUT, limit, b"y" * 10) == []
    assert receiver.received(STDOUT) == limit
    receiver.end({STDOUT: 10_000})
    assert not receiver.is_complete
    receiver.committed(commit)
    assert receiver.is_complete


def test_a_later_chunk_that_exceeds_the_quota_is_cut_at_the_quota(new_ingest, small_limits) -> None:
    receiver, limit = new_ingest(), QUOTA_BYTES[STDOUT]
    receiver.take(STDOUT, 0, b"x" * (limit - 2))
    (commit,) = receiver.take(STDOUT, limit - 2, b"yyyy")
    assert (commit.data, commit.new_offset, receiver.received(STDOUT)) == (b"yy", limit, limit)


def test_a_record_that_exceeds_the_quota_is_dropped_and_the_offset_stays_correct(
    new_ingest, small_limits
) -> None:
    receiver = new_ingest()
    whole, torn = receiver.take(METRICS, 0, FIRST + SECOND)
    assert values([whole, torn]) == ["0.0"]
    assert (torn.new_offset, [span.length for span in torn.garbage]) == (len(FIRST) + 20, [20])
    assert [commit.is_last_collected for commit in (whole, torn)] == [False, True]
    commit_all(receiver, [whole, torn])
    receiver.end({METRICS: len(FIRST + SECOND)})
    assert receiver.is_complete
    restarted = AttemptIngest.restored(KEY, receiver.durable)
    assert restarted.take(METRICS, 0, FIRST + SECOND) == []


def test_a_stream_that_exactly_fills_the_quota_is_not_marked_as_truncated(new_ingest, small_limits) -> None:
    (commit,) = new_ingest().take(STDOUT, 0, b"x" * (QUOTA_BYTES[STDOUT] - 1))
    assert not commit.is_last_collected


def test_the_report_of_a_partial_record_says_whether_the_record_is_incomplete_or_cut(
    new_ingest, small_limits
) -> None:
    _, torn = new_ingest().take(METRICS, 0, FIRST + SECOND)
    assert [span.reason for span in torn.garbage] == ["the metrics are truncated inside this record"]
    for ends_first in (False, True):
        receiver = new_ingest()
        commits = receiver.end({METRICS: 9}) if ends_first else []
        commits += receiver.take(METRICS, 0, FIRST[:9])
        commits += [] if ends_first else receiver.end({METRICS: 9})
        (torn,) = commits
        assert [span.reason for span in torn.garbage] == ["the record is incomplete"]
