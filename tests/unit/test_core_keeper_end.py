"""The keeper's decisions after the end of its trial: reports, closing, and the wait before the keeper exits."""

import pytest
from simulated_keeper import (
    KEY,
    OTHER_KEY,
    STARTED_AT_S,
    SimulatedKeeper,
    durable,
    end_in,
    ended,
    exited,
    grew,
    welcome,
)

from trial_keeper.core.events import (
    Effect,
    ExitKeeper,
    ExitNotRecorded,
    LinkLost,
    ManagerMoved,
    OpenLink,
    Send,
    SignalReceived,
    SignalTrial,
    SpawnFailed,
    TimerFired,
    TrialSpawned,
)
from trial_keeper.core.link import LinkState
from trial_keeper.core.replication import SendChunk
from trial_keeper.wire.messages import (
    Shutdown,
    Stream,
    TrialStarted,
)
from trial_keeper.wire.reasons import ExitReason


def test_the_trial_end_is_reported_again_on_every_new_connection(simulated: SimulatedKeeper) -> None:
    end = ended(ExitReason.SUCCEEDED, 0, 10)
    simulated.running().at(1, exited(0, size=10))
    for now_s in (2, 4, 6):
        simulated.at(now_s, LinkLost("manager killed"))
        assert simulated.at(now_s + 1, TimerFired()) == [OpenLink()]
        assert simulated.at(now_s + 1, welcome({Stream.METRICS: 4})) == [
            Send(TrialStarted(KEY, STARTED_AT_S)),
            Send(end),
            SendChunk(KEY, Stream.METRICS, 4, 6),
        ]
    assert simulated.at(8, durable(10, closed=True)) == [ExitKeeper(0)]


def test_a_keeper_exits_if_its_trial_has_ended_and_the_welcome_message_closes_the_attempt(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, exited(0, size=10))
    simulated.at(2, LinkLost("reset"))
    simulated.at(3, TimerFired())
    assert simulated.at(4, welcome({Stream.METRICS: 10}, closed=True)) == [ExitKeeper(0)]


def test_a_welcome_message_that_closes_the_attempt_stops_a_running_trial(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    effects = simulated.at(1, welcome(closed=True))
    assert effects == [SignalTrial(KEY, kill=False)]
    assert end_in(simulated.at(2, exited(None, 15))).reason is ExitReason.JOB_LOST
    assert simulated.at(3, durable(closed=True)) == [ExitKeeper(143)]


def test_a_keeper_sends_streams_from_offset_0_if_the_welcome_message_lacks_the_attempt(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running(linked=False).at(0, grew(7))
    assert SendChunk(KEY, Stream.METRICS, 0, 7) in simulated.at(1, welcome({}, key=OTHER_KEY))


def test_an_ack_for_another_attempt_is_ignored(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, exited(0, size=5))
    assert simulated.at(2, durable(5, closed=True, key=OTHER_KEY)) == []


def test_an_event_of_another_attempt_raises_an_error(simulated: SimulatedKeeper) -> None:
    with pytest.raises(KeyError):
        simulated.at(0, TrialSpawned(OTHER_KEY, STARTED_AT_S))
    simulated.running()
    with pytest.raises(KeyError):
        simulated.at(1, SpawnFailed(OTHER_KEY, STARTED_AT_S, 127, "no such file"))
    assert simulated.keeper.current is not None, "the trial still runs"


def test_a_keeper_waits_30_s_for_an_absent_manager_and_then_exits(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, LinkLost("reset"))
    simulated.at(100, exited(3))
    for now_s in (110, 120, 129.9):
        assert not any(isinstance(effect, ExitKeeper) for effect in simulated.at(now_s, TimerFired()))
        if simulated.keeper.link.state is LinkState.CONNECTING:
            simulated.at(now_s, LinkLost("nobody there"))
    assert simulated.keeper.next_deadline_s is not None
    assert simulated.keeper.next_deadline_s <= 130
    assert simulated.at(130, TimerFired())[-1] == ExitKeeper(3)


def test_a_keeper_that_has_never_connected_waits_only_5_s_for_a_manager(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False).at(1, LinkLost("nobody there"))
    assert ExitKeeper(3) not in simulated.at(100, exited(3))
    simulated.at(100, LinkLost("nobody there"))
    assert ExitKeeper(3) not in simulated.at(104.9, TimerFired())
    assert simulated.at(105, TimerFired())[-1] == ExitKeeper(3)


def test_a_signalled_keeper_waits_only_5_s_for_an_absent_manager(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, LinkLost("manager killed"))
    simulated.at(100, SignalReceived(15))
    assert not exits_in(simulated.at(110, exited(None, 15)))
    simulated.at(110, LinkLost("nobody there"))
    assert not exits_in(simulated.at(114.9, TimerFired()))
    assert simulated.at(115, TimerFired())[-1] == ExitKeeper(143)


@pytest.mark.parametrize(("signalled_s", "exits_s"), [(110, 115), (128, 130)])
def test_a_signal_shortens_the_wait_for_an_absent_manager_to_at_most_5_s(
    simulated: SimulatedKeeper, signalled_s: float, exits_s: float
) -> None:
    simulated.running().at(1, LinkLost("manager killed"))
    simulated.at(100, exited(3))
    simulated.at(100, LinkLost("nobody there"))
    assert not exits_in(simulated.at(signalled_s, SignalReceived(15)))
    if simulated.keeper.link.state is LinkState.CONNECTING:
        simulated.at(signalled_s, LinkLost("nobody there"))
    assert not exits_in(simulated.at(exits_s - 0.1, TimerFired()))
    assert simulated.at(exits_s, TimerFired())[-1] == ExitKeeper(3)


def test_a_signalled_keeper_waits_30_s_if_its_manager_returned_or_its_exit_record_is_not_written(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, LinkLost("manager killed"))
    simulated.at(100, SignalReceived(15))
    simulated.at(101, exited(None, 15))
    simulated.at(103, welcome({Stream.METRICS: 0}))
    assert not exits_in(simulated.at(132.9, TimerFired()))
    simulated.at(132.9, LinkLost("manager killed"))
    simulated.at(132.9, ExitNotRecorded())
    assert not exits_in(simulated.at(162.8, TimerFired()))
    if simulated.keeper.link.state is LinkState.CONNECTING:
        simulated.at(162.8, LinkLost("nobody there"))
    assert simulated.at(162.9, TimerFired())[-1] == ExitKeeper(143)


def exits_in(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, ExitKeeper)]


def test_a_keeper_waits_30_s_for_a_manager_if_the_exit_record_cannot_be_written(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running(linked=False).at(1, LinkLost("nobody there"))
    simulated.at(100, exited(3))
    simulated.at(100.5, ExitNotRecorded())
    assert "retrying, for 30 s without a manager" in simulated.log[-1]
    simulated.at(100.5, LinkLost("nobody there"))
    assert ExitKeeper(3) not in simulated.at(130.4, TimerFired())
    if simulated.keeper.link.state is LinkState.CONNECTING:
        simulated.at(130.4, LinkLost("nobody there"))
    assert simulated.at(130.5, TimerFired())[-1] == ExitKeeper(3)


def test_a_connection_loss_after_the_trial_end_does_not_extend_the_wait_of_a_keeper_before_its_exit(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, exited(0))
    simulated.at(20, LinkLost("manager killed"))
    assert ExitKeeper(0) not in simulated.at(30.9, TimerFired())
    assert simulated.at(31, TimerFired()) == [ExitKeeper(0)]


def test_a_reconnection_during_the_wait_of_a_keeper_before_its_exit_restarts_the_wait(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running(linked=False).at(1, exited(0))
    simulated.at(25, welcome())
    assert simulated.at(54.9, TimerFired()) == []
    assert simulated.at(54.95, durable(closed=True)) == [ExitKeeper(0)]


def test_a_running_trial_continues_through_hours_without_a_manager(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, LinkLost("network down"))
    for hour in range(1, 49):
        simulated.at(hour * 3600, grew(hour * 100))
        if simulated.keeper.link.state is LinkState.CONNECTING:
            simulated.at(hour * 3600, LinkLost("network down"))
    effects = simulated.at(49 * 3600, ManagerMoved()) + simulated.at(49 * 3600, welcome({Stream.METRICS: 1}))
    assert effects[-1] == SendChunk(KEY, Stream.METRICS, 1, 4799)


def test_a_shutdown_message_stops_the_trial_and_then_ends_the_keeper(simulated: SimulatedKeeper) -> None:
    simulated.running()
    assert simulated.at(1, Shutdown("the experiment is over")) == [SignalTrial(KEY, kill=False)]
    assert "the manager sent Shutdown: the experiment is over" in simulated.log
    effects = simulated.at(2, exited(None, 15))
    assert end_in(effects).reason is ExitReason.JOB_LOST
    assert effects[-1] == ExitKeeper(143)


def test_a_shutdown_message_after_the_trial_end_ends_the_keeper_immediately(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, exited(2))
    assert simulated.at(2, Shutdown("enough")) == [ExitKeeper(2)]
