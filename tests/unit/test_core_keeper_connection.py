"""The keeper's decisions about its connection, with a simulated clock."""

import pytest
from simulated_keeper import KEY, STARTED_AT_S, SimulatedKeeper, durable, ended, exited, grew, welcome

from trial_keeper.core.events import (
    Effect,
    ExitKeeper,
    LinkLost,
    LinkRefused,
    ManagerMoved,
    OpenLink,
    RecordExit,
    Send,
    TimerFired,
)
from trial_keeper.core.link import FIRST_RETRY_S, LinkState
from trial_keeper.core.replication import METRICS_WINDOW_BYTES, SendChunk
from trial_keeper.wire.messages import (
    Stream,
    TrialStarted,
)
from trial_keeper.wire.reasons import ExitReason


def test_the_delays_between_connection_attempts_double_up_to_a_minute(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    now_s, waits = 0.0, []
    for _ in range(11):
        assert simulated.at(now_s, LinkLost("refused")) == []
        deadline_s = simulated.keeper.next_deadline_s
        assert deadline_s is not None
        assert simulated.at(deadline_s - 0.01, TimerFired()) == []
        assert simulated.at(deadline_s, TimerFired()) == [OpenLink()]
        waits.append(deadline_s - now_s)
        now_s = deadline_s
    own = waits[0] / FIRST_RETRY_S
    assert 0.5 <= own <= 1, "delays differ between keepers"
    longest = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0, 60.0]
    assert waits == pytest.approx([own * wait_s for wait_s in longest])


def test_a_connection_outage_of_any_length_is_logged_in_one_line(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    simulated.log.clear()
    for now_s in range(0, 3600 * 5, 60):
        simulated.at(now_s, LinkLost("nobody there"))
        assert len(simulated.log) == 1, "it is logged at once"
        simulated.at(now_s + 60, TimerFired())
    assert simulated.log == ["the link to the manager is down: nobody there"]


def test_a_keeper_reconnects_and_resumes_sending_at_the_managers_offset(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(1, grew(100))
    assert simulated.at(10, LinkLost("reset")) == []
    assert simulated.at(10.1, grew(120)) == []
    assert simulated.at(10.2, TimerFired()) == [OpenLink()]
    assert simulated.at(10.3, welcome({Stream.METRICS: 60})) == [
        Send(TrialStarted(KEY, STARTED_AT_S)),
        SendChunk(KEY, Stream.METRICS, 60, 60),
    ]


def test_a_keeper_never_sends_more_than_a_window_of_bytes_that_are_not_stored(
    simulated: SimulatedKeeper,
) -> None:
    def sent(effects: list[Effect]) -> int:
        return sum(effect.size_bytes for effect in effects if isinstance(effect, SendChunk))

    simulated.running()
    assert sent(simulated.at(1, grew(3 * METRICS_WINDOW_BYTES))) == METRICS_WINDOW_BYTES
    assert sent(simulated.at(2, TimerFired())) == 0
    assert sent(simulated.at(3, durable(1000))) == 1000
    assert sent(simulated.at(4, durable(2 * METRICS_WINDOW_BYTES))) == METRICS_WINDOW_BYTES


def test_a_chunk_remains_due_for_sending_until_the_connection_is_lost_or_the_attempt_is_closed(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    (chunk,) = (effect for effect in simulated.at(1, grew(100)) if isinstance(effect, SendChunk))
    assert simulated.keeper.is_due(chunk)
    simulated.at(2, LinkLost("reset"))
    assert not simulated.keeper.is_due(chunk)
    simulated.at(10, TimerFired())
    simulated.at(11, welcome({Stream.METRICS: 100}))
    assert simulated.keeper.is_due(chunk)
    simulated.at(12, exited(0, size=100))
    simulated.at(13, durable(100, closed=True))
    assert not simulated.keeper.is_due(chunk)


def test_a_keeper_tries_the_new_address_of_a_moved_manager_immediately(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    for now_s in range(0, 600, 60):
        simulated.at(now_s, LinkLost("nobody there"))
        simulated.at(now_s + 60, TimerFired())
    simulated.at(600, LinkLost("nobody there"))
    assert simulated.at(601, ManagerMoved()) == [OpenLink()]
    simulated.at(601, LinkLost("not ready yet"))
    assert simulated.keeper.next_deadline_s is not None
    assert 601 < simulated.keeper.next_deadline_s <= 601 + FIRST_RETRY_S


def test_a_keeper_replaces_a_pending_connection_attempt_when_the_manager_moves(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running(linked=False)
    assert simulated.keeper.link.state is LinkState.CONNECTING
    assert simulated.at(1, ManagerMoved()) == [OpenLink()]
    assert simulated.at(2, welcome()) == [Send(TrialStarted(KEY, STARTED_AT_S))]


def test_an_open_connection_stays_open_after_manager_json_changes(simulated: SimulatedKeeper) -> None:
    assert simulated.running().at(1, ManagerMoved()) == []


def test_a_refused_keeper_does_not_reconnect_and_its_trial_continues(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    assert simulated.at(1, LinkRefused("wrong token")) == []
    assert simulated.log[-1] == "the manager refused: wrong token"
    assert simulated.keeper.next_deadline_s is None
    assert simulated.at(3600, grew(10)) == []
    assert simulated.at(7200, exited(0, size=10)) == [RecordExit(ended(ExitReason.SUCCEEDED, 0, 10))]
    assert simulated.at(7204.9, TimerFired()) == []
    assert simulated.at(7205, TimerFired()) == [ExitKeeper(0)], (
        "a manager that was never reached cannot acknowledge anything"
    )


def test_the_refusal_of_a_keeper_after_an_outage_is_logged(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    for now_s in (0, 60, 120):
        simulated.at(now_s, LinkLost("nobody there"))
        simulated.at(now_s + 60, TimerFired())
    simulated.at(190, LinkRefused("wrong token"))
    assert simulated.log[-1] == "the manager refused: wrong token"


def test_a_refused_keeper_connects_to_the_next_manager(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False).at(1, LinkRefused("wrong token"))
    assert simulated.at(2, ManagerMoved()) == [OpenLink()]
    assert simulated.at(3, welcome()) == [Send(TrialStarted(KEY, STARTED_AT_S))]


def test_the_first_acknowledgement_after_an_outage_resets_the_reconnect_delay(
    simulated,
) -> None:
    simulated.running(linked=False)
    for now_s in range(0, 600, 60):
        simulated.at(now_s, LinkLost("connection refused"))
        simulated.at(now_s + 60, TimerFired())
    simulated.at(600, welcome())
    simulated.at(601, grew(100))
    simulated.at(602, durable(100))
    simulated.at(603, LinkLost("reset"))
    assert simulated.keeper.next_deadline_s is not None
    assert 603 < simulated.keeper.next_deadline_s <= 603 + FIRST_RETRY_S
