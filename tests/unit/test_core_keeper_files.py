"""The keeper's decisions about truncated, rewritten and large files, and the size of the metrics when a trial is stopped."""

import pytest
from simulated_keeper import (
    KEY,
    OTHER_KEY,
    REWRITTEN,
    TRUNCATED,
    SimulatedKeeper,
    durable,
    end_in,
    ended,
    exited,
    grew,
)

from trial_keeper.core.events import (
    Event,
    RecordExit,
    Send,
    SignalReceived,
    StreamChanged,
    StreamsGrew,
    StreamTruncated,
)
from trial_keeper.core.replication import SendChunk
from trial_keeper.wire.file_changes import FileChange
from trial_keeper.wire.limits import QUOTA_BYTES
from trial_keeper.wire.messages import (
    Shutdown,
    StopTrial,
    Stream,
)
from trial_keeper.wire.reasons import ExitReason


def test_a_truncated_stream_ends_at_the_truncation_and_the_connection_stays_open(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    simulated.at(1, grew(100))
    assert simulated.at(2, StreamTruncated(KEY, Stream.METRICS, 0, 30)) == [
        SendChunk(KEY, Stream.METRICS, 0, 30)
    ]
    assert "the metrics file was truncated to 30 bytes" in simulated.log[-1]
    assert simulated.at(3, grew(200)) == []
    end = ended(ExitReason.SUCCEEDED, 0, 30, "", FileChange.TRUNCATED)
    assert end_in(simulated.at(4, exited(0, size=200))) == end


def test_a_truncation_is_recorded_and_reported_if_it_is_found_after_the_trial_end(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    simulated.at(1, exited(0, size=100))
    end = ended(ExitReason.SUCCEEDED, 0, 30, "", FileChange.TRUNCATED)
    assert simulated.at(2, StreamTruncated(KEY, Stream.METRICS, 0, 30)) == [
        RecordExit(end),
        Send(end),
        SendChunk(KEY, Stream.METRICS, 0, 30),
    ]


def test_a_file_that_becomes_shorter_while_the_trial_runs_causes_one_warning_in_the_end_report(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    simulated.at(1, grew(100))
    simulated.at(2, grew(40))
    assert simulated.log[-1] == TRUNCATED
    simulated.at(3, grew(120))
    end = end_in(simulated.at(4, exited(0, size=130)))
    assert end == ended(ExitReason.SUCCEEDED, 0, 130, "", FileChange.TRUNCATED)
    assert simulated.log.count(TRUNCATED) == 1


def test_a_file_that_is_shorter_than_its_stored_bytes_at_the_trial_end_causes_a_warning(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    simulated.at(1, grew(100))
    simulated.at(2, durable(100))
    assert end_in(simulated.at(4, exited(0, size=90))).warnings == (TRUNCATED,)


def test_stream_files_that_only_grow_cause_no_warning(simulated: SimulatedKeeper) -> None:
    simulated.running()
    for size in (0, 10, 10, 11):
        simulated.at(1, grew(size))
    assert end_in(simulated.at(4, exited(0, size=11))).warnings == ()


def test_a_rewritten_file_is_recorded_and_reported_if_it_is_found_after_the_trial_end(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    simulated.at(1, exited(0, size=100))
    end = ended(ExitReason.SUCCEEDED, 0, 100, "", FileChange.REWRITTEN)
    change = StreamChanged(KEY, Stream.METRICS, FileChange.REWRITTEN)
    assert simulated.at(2, change) == [RecordExit(end), Send(end)]
    assert simulated.at(3, change) == []
    assert simulated.log.count(REWRITTEN) == 1


def test_only_the_first_change_of_a_stream_is_reported(simulated: SimulatedKeeper) -> None:
    simulated.running()
    simulated.at(1, StreamChanged(KEY, Stream.METRICS, FileChange.REWRITTEN))
    simulated.at(2, StreamChanged(KEY, Stream.METRICS, FileChange.REPLACED))
    assert end_in(simulated.at(4, exited(0))).warnings == (REWRITTEN,)


def test_a_stream_change_is_ignored_if_the_stream_is_not_collected_or_the_attempt_is_closed(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    simulated.at(1, StreamChanged(KEY, Stream.STDOUT, FileChange.REPLACED))
    assert simulated.at(2, StreamChanged(OTHER_KEY, Stream.METRICS, FileChange.REPLACED)) == []
    assert end_in(simulated.at(4, exited(0))).warnings == ()


STOPS = [
    StopTrial("abcde", ExitReason.EARLY_STOPPED),
    SignalReceived(15),
    Shutdown("over"),
    durable(closed=True),
]


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: type(stop).__name__)
@pytest.mark.parametrize("code", [0, 143])
def test_the_end_report_contains_the_size_that_the_metrics_had_when_the_stop_was_requested(
    simulated: SimulatedKeeper, stop: Event, code: int
) -> None:
    simulated.running()
    simulated.at(1, grew(80))
    simulated.metrics_size = 100
    simulated.at(2, stop)
    simulated.metrics_size = 200
    simulated.at(3, SignalReceived(15))
    simulated.at(3, grew(200))
    end = end_in(simulated.at(4, exited(code, size=210)))
    assert (end.metrics_size_at_stop, end.exit_code) == (100, code)


def test_the_end_report_of_a_trial_that_was_not_stopped_has_no_metrics_size_at_stop(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    end = end_in(simulated.at(1, exited(0, size=100)))
    assert end.metrics_size_at_stop is None


def test_a_truncation_before_the_stop_request_does_not_reduce_the_reported_metrics_size_at_stop(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    simulated.at(1, grew(100))
    simulated.metrics_size = 10
    simulated.at(2, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert end_in(simulated.at(4, exited(0, size=10))).metrics_size_at_stop == 100


@pytest.mark.parametrize("is_seen_while_it_runs", [True, False])
def test_a_stream_over_its_quota_is_reported_once(simulated, monkeypatch, is_seen_while_it_runs) -> None:
    monkeypatch.setitem(QUOTA_BYTES, Stream.METRICS, 12)
    simulated.running()
    if is_seen_while_it_runs:
        simulated.at(1, StreamsGrew(KEY, {Stream.METRICS: 12}))
        assert not any("quota" in text for text in simulated.log), "no byte is missing"
        for size in (13, 14):
            simulated.at(1, StreamsGrew(KEY, {Stream.METRICS: size}))
    simulated.at(2, exited(size=20))
    expected = [text for text in simulated.log if "metrics has reached its quota of 12 bytes" in text]
    assert len(expected) == 1
