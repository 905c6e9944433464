"""The keeper's decisions when a trial is stopped: stop notice, SIGTERM and SIGKILL."""

import pytest
from simulated_keeper import KEY, REUSED, SimulatedKeeper, durable, end_in, exited, grew

from trial_keeper.core.events import (
    ExitKeeper,
    SignalReceived,
    SignalTrial,
    TimerFired,
)
from trial_keeper.wire.messages import (
    Ack,
    AttemptOffsets,
    StopTrial,
    Welcome,
)
from trial_keeper.wire.reasons import ExitReason


def test_a_stop_command_causes_sigterm_first_and_sigkill_after_the_grace_period(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    assert simulated.at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED)) == [SignalTrial(KEY, kill=False)]
    assert simulated.keeper.next_deadline_s == 110
    assert simulated.at(109.9, TimerFired()) == []
    assert simulated.at(110, TimerFired()) == [SignalTrial(KEY, kill=True)]
    assert simulated.at(111, TimerFired()) == []
    end = end_in(simulated.at(112, exited(None, 9)))
    assert (end.reason, end.exit_code) == (ExitReason.EARLY_STOPPED, 137)


def test_a_keeper_exits_with_0_if_its_task_is_stopped_because_the_trial_has_ended(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.TRIAL_OVER))
    end = end_in(simulated.at(101, exited(None, 15)))
    assert (end.reason, end.exit_code) == (ExitReason.TRIAL_OVER, 143)
    assert simulated.at(102, durable(closed=True)) == [ExitKeeper(0)]


@pytest.mark.parametrize("is_linked", [True, False])
@pytest.mark.parametrize(("succeeded", "code"), [(True, 0), (False, 143)])
def test_a_keeper_of_a_closed_attempt_exits_with_0_only_if_the_trial_succeeded(
    simulated: SimulatedKeeper, is_linked: bool, succeeded: bool, code: int
) -> None:
    closed = AttemptOffsets(KEY, {}, closed=True, trial_succeeded=succeeded)
    message = Ack(closed) if is_linked else Welcome("0.7.0", (closed,))
    assert SignalTrial(KEY, kill=False) in simulated.running(linked=is_linked).at(100, message)
    simulated.at(101, exited(None, 15))
    assert simulated.at(102, durable(closed=True)) == [ExitKeeper(code)]


def test_a_trial_that_exits_within_the_grace_period_is_not_killed(simulated: SimulatedKeeper) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.STOPPED_BY_USER))
    assert end_in(simulated.at(101, exited(None, 15))).reason is ExitReason.STOPPED_BY_USER
    assert simulated.at(120, TimerFired()) == []


def test_code_that_handles_stop_notices_gets_sigterm_after_half_the_grace_period(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().awaits_notice = True
    assert simulated.at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED)) == []
    assert simulated.notices == [ExitReason.EARLY_STOPPED]
    assert simulated.keeper.next_deadline_s == 105
    assert simulated.at(104.9, TimerFired()) == []
    assert simulated.at(105, TimerFired()) == [SignalTrial(KEY, kill=False)]
    assert simulated.keeper.next_deadline_s == 110
    assert simulated.at(110, TimerFired()) == [SignalTrial(KEY, kill=True)]


def test_code_that_exits_after_the_stop_notice_gets_no_signal(simulated: SimulatedKeeper) -> None:
    simulated.running().awaits_notice = True
    simulated.at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    end = end_in(simulated.at(103, exited(0)))
    assert (end.reason, end.exit_code) == (ExitReason.EARLY_STOPPED, 0)
    assert simulated.at(105, TimerFired()) == []


def test_code_that_handles_stop_notices_is_killed_on_time_even_if_only_other_events_arrive(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().awaits_notice = True
    simulated.at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert SignalTrial(KEY, kill=True) in simulated.at(115, grew(1))


def test_a_second_signal_kills_code_that_handles_stop_notices(simulated: SimulatedKeeper) -> None:
    simulated.running().awaits_notice = True
    assert simulated.at(100, SignalReceived(15)) == []
    assert simulated.at(101, SignalReceived(15)) == [SignalTrial(KEY, kill=True)]
    assert simulated.at(105, TimerFired()) == []


def test_the_grace_period_ends_on_time_even_if_only_other_events_arrive(simulated: SimulatedKeeper) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.STOPPED_BY_USER))
    assert SignalTrial(KEY, kill=True) in simulated.at(115, grew(1))


def test_a_second_signal_ends_the_grace_period(simulated: SimulatedKeeper) -> None:
    simulated.running().at(100, SignalReceived(15))
    assert simulated.at(101, SignalReceived(2)) == [SignalTrial(KEY, kill=True)]
    assert simulated.at(102, SignalReceived(15)) == []
    assert simulated.at(110, TimerFired()) == []
    assert end_in(simulated.at(111, exited(None, 9))).reason is ExitReason.JOB_LOST


def test_a_signal_after_a_stop_command_counts_as_the_first_signal(simulated: SimulatedKeeper) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert simulated.at(101, SignalReceived(15)) == []
    assert simulated.at(102, SignalReceived(15)) == [SignalTrial(KEY, kill=True)]


def test_a_second_stop_command_changes_neither_the_stop_reason_nor_the_grace_period(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    assert simulated.at(105, StopTrial("abcde", ExitReason.STOPPED_BY_USER)) == []
    assert simulated.at(106, SignalReceived(15)) == []
    assert simulated.at(110, TimerFired()) == [SignalTrial(KEY, kill=True)]
    assert end_in(simulated.at(111, exited(None, 9))).reason is ExitReason.EARLY_STOPPED


def test_a_trial_that_exits_with_0_after_a_stop_command_keeps_the_stop_reason(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().at(100, StopTrial("abcde", ExitReason.EARLY_STOPPED))
    end = end_in(simulated.at(101, exited(0)))
    assert (end.reason, end.exit_code) == (ExitReason.EARLY_STOPPED, 0)
    assert simulated.at(102, durable(closed=True)) == [ExitKeeper(0)]


def test_a_stop_command_after_the_trial_end_has_no_effect(simulated: SimulatedKeeper) -> None:
    simulated.running().at(1, exited(1))
    assert simulated.at(2, StopTrial("abcde", ExitReason.STOPPED_BY_USER)) == []
    assert simulated.at(3, durable(closed=True)) == [ExitKeeper(1)]


def test_a_signal_to_the_keeper_ends_the_trial_with_reason_job_lost(simulated: SimulatedKeeper) -> None:
    assert simulated.running().at(1, SignalReceived(15)) == [SignalTrial(KEY, kill=False)]
    assert end_in(simulated.at(2, exited(None, 15))).reason is ExitReason.JOB_LOST


def test_a_cluster_signal_after_a_preemption_notice_does_not_count_as_second_signal(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running().awaits_notice = True
    assert simulated.at(100, StopTrial("abcde", ExitReason.PREEMPTED)) == []
    assert simulated.at(101, SignalReceived(15)) == []
    assert end_in(simulated.at(102, exited(0))).reason is ExitReason.PREEMPTED


def test_a_preemption_notice_has_no_effect_if_it_is_for_another_trial_or_comes_after_a_signal(
    simulated: SimulatedKeeper,
) -> None:
    simulated.running()
    assert simulated.at(99, StopTrial("other", ExitReason.PREEMPTED)) == []
    simulated.at(100, SignalReceived(15))
    assert simulated.at(101, StopTrial("abcde", ExitReason.PREEMPTED)) == []
    assert end_in(simulated.at(102, exited(0))).reason is ExitReason.JOB_LOST


def test_a_signal_ends_a_keeper_that_has_no_trial() -> None:
    assert ExitKeeper(0) in SimulatedKeeper(REUSED).at(0, SignalReceived(15))


def test_a_signal_ends_the_trial_even_if_the_keeper_has_no_connection(simulated: SimulatedKeeper) -> None:
    simulated.running(linked=False)
    assert simulated.at(1, SignalReceived(2)) == [SignalTrial(KEY, kill=False)]
    assert simulated.at(11, TimerFired()) == [SignalTrial(KEY, kill=True)]
