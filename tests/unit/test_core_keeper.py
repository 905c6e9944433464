"""The keeper's decisions about a trial and its end. Events and the clock are simulated, so no test waits."""

from dataclasses import replace

import pytest
from simulated_keeper import KEY, STARTED_AT_S, SimulatedKeeper, durable, end_in, ended, exited, grew, welcome

from trial_keeper.core.events import (
    CleanupFinished,
    EnvironmentFound,
    ExitKeeper,
    LinkLost,
    OpenLink,
    RecordExit,
    Send,
    SignalTrial,
    SpawnFailed,
    SpawnTrial,
    TimerFired,
    TrialAssigned,
    TrialExited,
    TrialSpawned,
)
from trial_keeper.core.replication import SendChunk
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import (
    Environment,
    StopTrial,
    Stream,
    TrialEnded,
    TrialStarted,
)
from trial_keeper.wire.reasons import ExitReason


def test_a_keeper_starts_a_trial_and_replicates_its_streams_and_reports_its_end(
    simulated: SimulatedKeeper,
) -> None:
    assert simulated.at(0, TrialAssigned(KEY)) == [SpawnTrial(KEY), OpenLink()]
    assert simulated.at(0, TrialSpawned(KEY, STARTED_AT_S)) == []
    assert simulated.at(1, welcome()) == [Send(TrialStarted(KEY, STARTED_AT_S))]
    assert simulated.at(2, grew(100)) == [SendChunk(KEY, Stream.METRICS, 0, 100)]
    assert simulated.at(3, durable(100)) == []
    end = ended(ExitReason.SUCCEEDED, 0, 130)
    assert simulated.at(4, exited(0, size=130)) == [
        RecordExit(end),
        Send(end),
        SendChunk(KEY, Stream.METRICS, 100, 30),
    ]
    assert simulated.at(5, durable(130)) == []
    assert simulated.at(6, durable(130, closed=True)) == [ExitKeeper(0)]
    assert simulated.at(7, TimerFired()) == []


def test_the_trial_starts_without_waiting_for_a_manager(simulated: SimulatedKeeper) -> None:
    assert simulated.at(0, TrialAssigned(KEY))[0] == SpawnTrial(KEY)


def test_a_keeper_reports_the_trial_start_even_if_it_connects_after_the_start(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running(linked=False)
    simulated.at(0, grew(5))
    assert simulated.at(9, welcome({Stream.METRICS: 2})) == [
        Send(TrialStarted(KEY, STARTED_AT_S)),
        SendChunk(KEY, Stream.METRICS, 2, 3),
    ]


def test_start_reports_after_the_environment_was_found_and_the_end_report_contain_the_environment(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    here = Environment("host", "node", "3.11.2", "ab" * 32)
    assert simulated.at(1, EnvironmentFound(KEY, here)) == [Send(TrialStarted(KEY, STARTED_AT_S, here))]
    simulated.at(2, LinkLost("refused"))
    simulated.at(98, TimerFired())
    assert Send(TrialStarted(KEY, STARTED_AT_S, here)) in simulated.at(99, welcome())
    assert end_in(simulated.at(100, replace(exited(), environment=here))).environment == here


def test_logs_are_collected_only_if_log_collection_is_enabled() -> None:
    for collect_logs, streams in ((False, {Stream.METRICS}), (True, set(Stream))):
        simulated = SimulatedKeeper(
            KeeperSettings("exp", "job", "/mnt/exp", "token", "abcde", collect_logs=collect_logs)
        ).running()
        assert set(end_in(simulated.at(1, exited())).final_sizes) == streams


@pytest.mark.parametrize(
    ("event", "code", "reason"),
    [
        (exited(0), 0, ExitReason.SUCCEEDED),
        (exited(1, stderr="no GPU"), 1, ExitReason.NONZERO_EXIT),
        (exited(255), 255, ExitReason.NONZERO_EXIT),
        (exited(None, 9), 137, ExitReason.SIGNAL),
        (exited(None, 11), 139, ExitReason.SIGNAL),
        (exited(None, 15), 143, ExitReason.SIGNAL),
    ],
)
def test_the_keeper_exits_with_the_exit_code_of_its_trial(
    simulated: SimulatedKeeper, event: TrialExited, code: int, reason: ExitReason
) -> None:
    simulated.running()
    end = end_in(simulated.at(1, event))
    assert (end.exit_code, end.reason) == (code, reason)
    assert simulated.at(2, durable(closed=True)) == [ExitKeeper(code)]


def test_the_end_of_stderr_becomes_the_message_of_a_trial_only_if_the_trial_failed(
    simulated: SimulatedKeeper,
) -> None:
    assert end_in(simulated.running().at(1, exited(3, stderr="Traceback"))).message == "Traceback"
    assert end_in(SimulatedKeeper().running().at(1, exited(0, stderr="a warning"))).message == ""


LIMIT = "the container's memory limit of 512 MiB was reached"


@pytest.mark.parametrize(("code", "signal", "expected"), [(None, 9, 137), (137, None, 137), (1, None, 1)])
def test_the_reason_is_out_of_memory_if_a_trial_fails_while_memory_is_exhausted(
    simulated: SimulatedKeeper, code: int | None, signal: int | None, expected: int
) -> None:
    end = end_in(simulated.running().at(1, exited(code, signal, stderr="loading", out_of_memory=LIMIT)))
    assert (end.exit_code, end.reason) == (expected, ExitReason.OUT_OF_MEMORY)
    assert end.message == f"{LIMIT}\nloading"


def test_a_trial_that_exits_with_0_succeeds_even_if_memory_was_exhausted(simulated: SimulatedKeeper) -> None:
    end = end_in(simulated.running().at(1, exited(0, out_of_memory=LIMIT)))
    assert (end.reason, end.message) == (ExitReason.SUCCEEDED, "")


def test_a_stopping_trial_keeps_its_stop_reason_even_if_memory_is_exhausted(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, StopTrial(KEY.trial_id, ExitReason.EARLY_STOPPED))
    assert end_in(simulated.at(2, exited(None, 9, out_of_memory=LIMIT))).reason is ExitReason.EARLY_STOPPED


def test_processes_that_cannot_be_killed_are_named_in_the_log(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, CleanupFinished(KEY, ("71 (sleep 9)", "72 (python x.py)")))
    assert simulated.log[-2:] == [
        "cannot kill process 71 (sleep 9); kill it as its own user",
        "cannot kill process 72 (python x.py); kill it as its own user",
    ]


def test_a_command_that_could_not_start_causes_an_end_report_without_a_start_report(
    simulated: SimulatedKeeper,
) -> None:
    simulated.at(0, TrialAssigned(KEY))
    end = TrialEnded(
        KEY, ExitReason.COULD_NOT_START, 104, 50.0, 50.0, {Stream.METRICS: 0}, "cannot start: no bash"
    )
    assert simulated.at(0, SpawnFailed(KEY, 50.0, 104, "cannot start: no bash")) == [RecordExit(end)]
    assert simulated.at(1, welcome()) == [Send(end)]
    assert simulated.at(2, durable(closed=True)) == [ExitKeeper(104)]


def test_the_keeper_records_the_trial_end_before_it_reports_the_end(simulated: SimulatedKeeper) -> None:
    effects = simulated.running().at(1, exited())
    assert [type(effect) for effect in effects] == [RecordExit, Send]


def test_the_keeper_exits_after_the_manager_confirms_that_all_bytes_are_stored(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, exited(0, size=10))
    assert simulated.at(2, durable(10)) == []
    assert simulated.at(31, TimerFired()) == []
    assert simulated.at(31.5, durable(10, closed=True)) == [ExitKeeper(0)]


def test_a_keeper_exits_after_the_maximum_wait_if_no_acknowledgement_arrives(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, exited(0, size=10))
    assert simulated.at(30.9, TimerFired()) == []
    assert simulated.at(31, TimerFired()) == [ExitKeeper(0)]


def test_the_keeper_does_not_exit_while_acknowledgements_arrive(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, exited(0, size=1000))
    for step in range(1, 100):
        assert ExitKeeper(0) not in simulated.at(step * 29, durable(step))
    assert simulated.at(99 * 29 + 30, TimerFired()) == [ExitKeeper(0)]


def test_a_keeper_stops_a_running_trial_after_the_manager_closed_the_attempt(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    assert SignalTrial(KEY, kill=False) in simulated.at(5, durable(closed=True))


def test_a_stop_message_for_another_trial_is_ignored(simulated: SimulatedKeeper) -> None:
    simulated.running()
    assert simulated.at(5, StopTrial("other", ExitReason.STOPPED_BY_USER)) == []
