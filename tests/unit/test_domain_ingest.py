"""The manager's half of replication, step by step. The promise as a whole is tests/contract/test_exactly_once.py."""

from collections.abc import Callable

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.ingest import RECORDS_AT_ONCE, AttemptIngest, OffsetGap, StreamWrite
from nni_sdk.records import MAX_FRAME_BYTES, encode
from trial_keeper.wire.limits import QUOTA_BYTES
from trial_keeper.wire.messages import AttemptKey, Stream

KEY = AttemptKey("abcde", attempt_id(0), "main")
METRICS, STDOUT = Stream.METRICS, Stream.STDOUT
FIRST, SECOND = (encode(0, "abcde", "PERIODICAL", number, number / 10) for number in range(2))


@pytest.fixture
def a_receiver() -> Callable[..., AttemptIngest]:
    def make(**durable: int) -> AttemptIngest:
        """As restored from a store that has this much of these streams."""
        return AttemptIngest.restored(KEY, {Stream(word): offset for word, offset in durable.items()})

    return make


def values(commits: list[StreamWrite]) -> list[str]:
    return [record.value for commit in commits for record in commit.records]


def commit_all(receiver: AttemptIngest, commits: list[StreamWrite]) -> None:
    for commit in commits:
        receiver.committed(commit)


def test_log_bytes_are_committed_as_they_come(a_receiver) -> None:
    assert a_receiver().take(STDOUT, 0, b"hello") == [StreamWrite(KEY, STDOUT, 0, 5, data=b"hello")]


def test_records_are_committed_with_the_offset_after_them(a_receiver) -> None:
    (commit,) = a_receiver().take(METRICS, 0, FIRST + SECOND)
    assert (commit.offset, commit.new_offset) == (0, len(FIRST + SECOND))
    assert values([commit]) == ["0.0", "0.1"]
    assert commit.data == b""


def test_nothing_is_durable_before_it_is_committed(a_receiver) -> None:
    receiver = a_receiver()
    commits = receiver.take(METRICS, 0, FIRST)
    assert (receiver.durable, receiver.received(METRICS)) == ({METRICS: 0}, len(FIRST))
    commit_all(receiver, commits)
    assert receiver.durable == {METRICS: len(FIRST)}


def test_what_is_here_already_is_dropped(a_receiver) -> None:
    receiver = a_receiver()
    receiver.take(STDOUT, 0, b"hello")
    assert receiver.take(STDOUT, 0, b"hello") == []
    assert receiver.take(STDOUT, 2, b"ll") == []


def test_of_a_chunk_that_overlaps_only_the_rest_is_new(a_receiver) -> None:
    receiver = a_receiver(stdout=3)
    assert receiver.take(STDOUT, 1, b"ello") == [StreamWrite(KEY, STDOUT, 3, 5, data=b"lo")]


def test_a_gap_is_an_error_that_names_what_is_missing(a_receiver) -> None:
    receiver = a_receiver(stdout=3)
    with pytest.raises(OffsetGap, match="from offset 4: only 3 bytes have arrived"):
        receiver.take(STDOUT, 4, b"o")
    assert receiver.received(STDOUT) == 3


def test_an_empty_chunk_is_nothing_new(a_receiver) -> None:
    assert a_receiver().take(METRICS, 0, b"") == []


def test_a_torn_record_waits_for_its_rest(a_receiver) -> None:
    receiver = a_receiver()
    assert receiver.take(METRICS, 0, FIRST[:20]) == []
    commits = receiver.take(METRICS, 20, FIRST[20:] + SECOND[:1])
    assert values(commits) == ["0.0"]
    assert commits[0].new_offset == len(FIRST)


def test_a_manager_that_restarts_asks_for_a_torn_record_from_its_beginning(a_receiver) -> None:
    receiver = a_receiver()
    commit_all(receiver, receiver.take(METRICS, 0, FIRST + SECOND[:20]))
    restarted = AttemptIngest.restored(KEY, receiver.durable)
    assert restarted.durable == {METRICS: len(FIRST)}
    (commit,) = restarted.take(METRICS, len(FIRST), SECOND)
    assert values([commit]) == ["0.1"]
    assert commit.records[0].offset == len(FIRST)


def test_a_torn_record_is_given_up_when_the_attempt_is_over(a_receiver) -> None:
    receiver = a_receiver()
    commit_all(receiver, receiver.take(METRICS, 0, FIRST + SECOND[:20]))
    (commit,) = receiver.end({METRICS: len(FIRST) + 20})
    assert (commit.offset, commit.new_offset) == (len(FIRST), len(FIRST) + 20)
    assert [span.length for span in commit.garbage] == [20]
    assert not receiver.is_complete
    receiver.committed(commit)
    assert receiver.is_complete


def test_a_torn_record_that_comes_after_the_end_is_given_up_too(a_receiver) -> None:
    receiver = a_receiver()
    assert receiver.end({METRICS: len(FIRST) + 5}) == []
    commits = receiver.take(METRICS, 0, FIRST + SECOND[:5])
    assert values(commits) == ["0.0"]
    commit_all(receiver, commits)
    assert receiver.is_complete
    assert receiver.durable == {METRICS: len(FIRST) + 5}


def test_an_end_that_is_told_twice_is_one_end(a_receiver) -> None:
    receiver = a_receiver()
    receiver.take(METRICS, 0, FIRST[:20])
    assert len(receiver.end({METRICS: 20})) == 1
    assert receiver.end({METRICS: 20}) == []


def test_complete_means_ended_and_every_stream_durable(a_receiver) -> None:
    receiver = a_receiver(metrics=5, stdout=7)
    assert not receiver.is_complete
    receiver.end({METRICS: 5, STDOUT: 9})
    assert not receiver.is_complete
    commits = receiver.take(STDOUT, 7, b"ab")
    assert not receiver.is_complete
    commit_all(receiver, commits)
    assert receiver.is_complete


def test_an_attempt_is_not_complete_while_anything_of_it_waits_even_if_its_end_leaves_that_out(
    a_receiver,
) -> None:
    receiver = a_receiver()
    commits = receiver.take(METRICS, 0, FIRST)
    receiver.end({METRICS: 0})
    assert not receiver.is_complete
    commit_all(receiver, commits)
    assert receiver.is_complete


def test_an_attempt_that_wrote_nothing_is_complete_when_it_ends(a_receiver) -> None:
    receiver = a_receiver()
    assert receiver.end({METRICS: 0, STDOUT: 0}) == []
    assert receiver.is_complete


def test_logs_are_not_waited_for_when_nobody_collects_them(a_receiver) -> None:
    receiver = a_receiver()
    receiver.end({METRICS: 0})
    assert receiver.is_complete


def test_streams_do_not_mix(a_receiver) -> None:
    receiver = a_receiver()
    receiver.take(METRICS, 0, FIRST[:20])
    receiver.take(STDOUT, 0, b"x" * 50)
    assert values(receiver.take(METRICS, 20, FIRST[20:])) == ["0.0"]


def test_what_is_no_record_is_passed_over_and_told(a_receiver) -> None:
    (commit,) = a_receiver().take(METRICS, 0, b"not a record\n" + FIRST)
    assert values([commit]) == ["0.0"]
    assert sum(span.length for span in commit.garbage) == 13


@given(st.lists(st.integers(0, len(FIRST + SECOND)), max_size=8), st.lists(st.integers(0, 60), max_size=20))
def test_however_the_bytes_are_cut_and_repeated_the_records_are_the_same(
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


def test_behind_the_end_of_an_attempt_nothing_is_taken(a_receiver) -> None:
    receiver = a_receiver()
    receiver.take(STDOUT, 0, b"hel")
    receiver.end({METRICS: len(FIRST), STDOUT: 5})
    assert values(receiver.take(METRICS, 0, FIRST + SECOND)) == ["0.0"]
    assert receiver.take(STDOUT, 3, b"lo, and more") == [StreamWrite(KEY, STDOUT, 3, 5, data=b"lo")]
    assert receiver.take(STDOUT, 5, b"and more") == []
    assert receiver.take(METRICS, len(FIRST), SECOND) == []


def test_many_records_are_several_commits_that_follow_each_other(a_receiver) -> None:
    litter = b"not a record\n"
    one = FIRST * (RECORDS_AT_ONCE // 2) + litter
    commits = a_receiver().take(METRICS, 0, litter + one * 5)
    assert [len(commit.records) for commit in commits] == [RECORDS_AT_ONCE] * 2 + [RECORDS_AT_ONCE // 2]
    assert [commit.offset for commit in commits[1:]] == [commit.new_offset for commit in commits[:-1]]
    assert commits[-1].new_offset == len(litter + one * 5)
    assert sum(span.length for commit in commits for span in commit.garbage) == 6 * len(litter)
    for commit in commits:
        places = [record.offset for record in commit.records] + [span.offset for span in commit.garbage]
        assert all(commit.offset <= place < commit.new_offset for place in places)


def test_a_long_record_that_comes_in_small_pieces_is_looked_at_once(a_receiver, monkeypatch) -> None:
    from nni_manager.domain import ingest

    looks = []
    monkeypatch.setattr(
        ingest, "decode", lambda data, offset: looks.append(len(data)) or records_of(data, offset)
    )
    from nni_sdk.records import decode as records_of

    receiver = a_receiver()
    frame = encode(0, "abcde", "FINAL", 0, "x" * 100_000)
    for offset in range(0, len(frame), 100):
        commits = receiver.take(METRICS, offset, frame[offset : offset + 100])
    assert values(commits) == ['"' + "x" * 100_000 + '"']
    assert len(looks) == 1


def test_a_line_without_an_end_is_never_held_longer_than_the_longest_record(a_receiver) -> None:
    receiver, piece = a_receiver(), b"x" * 65_536
    given_up = 0
    for number in range(40):
        commits = receiver.take(METRICS, number * len(piece), piece)
        given_up += sum(span.length for commit in commits for span in commit.garbage)
    assert 40 * len(piece) - given_up <= MAX_FRAME_BYTES


@pytest.fixture
def small_limits(monkeypatch) -> None:
    for stream in Stream:
        monkeypatch.setitem(QUOTA_BYTES, stream, len(FIRST) + 20)


def test_what_lies_beyond_the_limit_is_passed_over_and_not_waited_for(a_receiver, small_limits) -> None:
    limit = QUOTA_BYTES[STDOUT]
    receiver = a_receiver()
    (commit,) = receiver.take(STDOUT, 0, b"x" * 500)
    assert (commit.new_offset, commit.data, commit.is_last_collected) == (limit, b"x" * limit, True)
    assert receiver.take(STDOUT, limit, b"y" * 10) == []
    assert receiver.received(STDOUT) == limit
    receiver.end({STDOUT: 10_000})
    assert not receiver.is_complete
    receiver.committed(commit)
    assert receiver.is_complete


def test_a_record_across_the_limit_is_none_and_the_offset_is_right_all_the_same(
    a_receiver, small_limits
) -> None:
    receiver = a_receiver()
    whole, torn = receiver.take(METRICS, 0, FIRST + SECOND)
    assert values([whole, torn]) == ["0.0"]
    assert (torn.new_offset, [span.length for span in torn.garbage]) == (len(FIRST) + 20, [20])
    assert [commit.is_last_collected for commit in (whole, torn)] == [False, True]
    commit_all(receiver, [whole, torn])
    receiver.end({METRICS: len(FIRST + SECOND)})
    assert receiver.is_complete
    restarted = AttemptIngest.restored(KEY, receiver.durable)
    assert restarted.take(METRICS, 0, FIRST + SECOND) == []


def test_a_stream_that_just_fits_is_not_cut(a_receiver, small_limits) -> None:
    (commit,) = a_receiver().take(STDOUT, 0, b"x" * (QUOTA_BYTES[STDOUT] - 1))
    assert not commit.is_last_collected


def test_the_reason_of_a_partial_record_is_its_writer_or_the_limit(a_receiver, small_limits) -> None:
    _, torn = a_receiver().take(METRICS, 0, FIRST + SECOND)
    assert [span.reason for span in torn.garbage] == ["the metrics are truncated inside this record"]
    for ends_first in (False, True):
        receiver = a_receiver()
        commits = receiver.end({METRICS: 9}) if ends_first else []
        commits += receiver.take(METRICS, 0, FIRST[:9])
        commits += [] if ends_first else receiver.end({METRICS: 9})
        (torn,) = commits
        assert [span.reason for span in torn.garbage] == ["the record is incomplete"]
