"""A keeper that runs trials in sequence, with a simulated clock."""

import pytest
from attempts import attempt_id

from trial_keeper.core.events import (
    CleanupFinished,
    Effect,
    Event,
    ExitKeeper,
    LinkLost,
    LinkRefused,
    LogDecision,
    ManagerMoved,
    MeasureMetrics,
    OpenLink,
    PreparationFailed,
    PrepareTrial,
    PrewarmTrial,
    RecordExit,
    ReleaseAttempt,
    Send,
    SignalReceived,
    SignalTrial,
    SpawnTrial,
    StopNoticeWritten,
    StreamsGrew,
    TimerFired,
    TrialAssigned,
    TrialExited,
    TrialSpawned,
    WriteStopNotice,
)
from trial_keeper.core.keeper import PLENTY, Keeper
from trial_keeper.core.replication import SendChunk
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import (
    Ack,
    AttemptKey,
    AttemptOffsets,
    Idle,
    RevokeTrial,
    RunTrial,
    Shutdown,
    StopTrial,
    Stream,
    TrialRevoked,
    Welcome,
)
from trial_keeper.wire.reasons import ExitReason

SETTINGS = {"grace_s": 10.0, "linger_s": 30.0, "idle_timeout_s": 600.0}
IDLE = Send(Idle())


def key_of(trial_id: str) -> AttemptKey:
    return AttemptKey(trial_id, attempt_id(0), "main-0")


class SimulatedReusedKeeper:
    """A keeper, its clock and its log lines."""

    def __init__(self, **settings: float) -> None:
        self.keeper = Keeper(KeeperSettings("exp", "env-0", "/mnt/exp", "token", **(SETTINGS | settings)))  # type: ignore[arg-type]
        self.log: list[str] = []

    def at(self, now_s: float, event: Event) -> list[Effect]:
        effects = self.keeper.handle(event, now_s)
        self.log += [effect.text for effect in effects if isinstance(effect, LogDecision)]
        for effect in effects:
            if isinstance(effect, WriteStopNotice):
                effects += self.at(now_s, StopNoticeWritten(effect.key, is_awaited=False))
        unseen = LogDecision | MeasureMetrics | WriteStopNotice
        return [effect for effect in effects if not isinstance(effect, unseen)]

    def linked(self, *attempts: AttemptOffsets) -> list[Effect]:
        self.at(0, TimerFired())
        return self.at(0, Welcome("0.6.0", attempts))

    def runs(self, trial_id: str, now_s: float = 1.0) -> None:
        assert self.at(now_s, RunTrial(trial_id, attempt_id(0))) == [PrepareTrial(trial_id, attempt_id(0))]
        assert self.at(now_s, TrialAssigned(key_of(trial_id))) == [SpawnTrial(key_of(trial_id))]
        self.at(now_s, TrialSpawned(key_of(trial_id), 1000.0 + now_s))

    def exits(self, trial_id: str, now_s: float = 2.0, code: int = 0) -> list[Effect]:
        return self.at(now_s, TrialExited(key_of(trial_id), 1.0, code, None, {}, ""))

    def closes(self, trial_id: str, now_s: float = 3.0) -> list[Effect]:
        return self.at(now_s, Ack(AttemptOffsets(key_of(trial_id), {}, closed=True)))


@pytest.fixture
def simulated() -> SimulatedReusedKeeper:
    simulated = SimulatedReusedKeeper()
    assert simulated.linked() == [IDLE]
    return simulated


def test_a_keeper_without_a_trial_connects_and_reports_that_it_is_idle() -> None:
    simulated = SimulatedReusedKeeper()
    assert simulated.at(0, TimerFired()) == [OpenLink()]
    assert simulated.at(0, Welcome("0.6.0")) == [IDLE]


def test_the_next_trial_may_start_before_the_previous_trial_is_closed(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.runs("first")
    effects = simulated.exits("first")
    assert [type(effect) for effect in effects] == [RecordExit, Send, Send]
    assert effects[-1] == IDLE
    simulated.runs("second")
    assert simulated.closes("first") == [ReleaseAttempt(key_of("first"))]
    assert simulated.exits("second")[-1] == IDLE


def test_one_connection_carries_the_bytes_of_a_closing_trial_and_of_a_running_trial(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.runs("first")
    simulated.at(1, StreamsGrew(key_of("first"), {Stream.METRICS: 10}))
    simulated.exits("first")
    simulated.runs("second")
    sent = simulated.at(2, StreamsGrew(key_of("second"), {Stream.METRICS: 5}))
    assert sent == [SendChunk(key_of("second"), Stream.METRICS, 0, 5)]
    simulated.at(3, LinkLost("gone"))
    assert simulated.at(10, TimerFired()) == [OpenLink()]
    again = simulated.at(10, Welcome("0.6.0", (AttemptOffsets(key_of("first"), {Stream.METRICS: 4}),)))
    assert [effect.offset for effect in again if isinstance(effect, SendChunk)] == [4, 0]
    assert IDLE not in again


def test_a_trial_that_is_dispatched_twice_starts_once(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first")
    assert simulated.at(1, RunTrial("first", attempt_id(0))) == []
    simulated.exits("first")
    assert simulated.at(2, RunTrial("first", attempt_id(0))) == []


def test_a_busy_keeper_starts_a_dispatched_trial_when_the_previous_trial_ends(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.runs("first")
    assert simulated.at(1, RunTrial("second", attempt_id(0))) == [PrewarmTrial("second", attempt_id(0))]
    assert simulated.at(1, RunTrial("second", attempt_id(0))) == []
    effects = simulated.exits("first")
    assert [type(effect) for effect in effects] == [RecordExit, Send, PrepareTrial]
    assert effects[-1] == PrepareTrial("second", attempt_id(0))
    simulated.at(2, TrialAssigned(key_of("second")))
    simulated.at(2, TrialSpawned(key_of("second"), 1002.0))
    assert simulated.exits("second", 3)[-1] == IDLE


def test_the_first_queued_trial_is_prewarmed_while_another_trial_runs(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.runs("first")
    for trial_id, effects in (
        ("second", [PrewarmTrial("second", attempt_id(0))]),
        ("third", []),
        ("fourth", []),
    ):
        assert simulated.at(1, RunTrial(trial_id, attempt_id(0))) == effects
    assert simulated.exits("first")[-1] == PrepareTrial("second", attempt_id(0))
    simulated.at(2, TrialAssigned(key_of("second")))
    assert simulated.at(2, TrialSpawned(key_of("second"), 1002.0))[-1] == PrewarmTrial("third", attempt_id(0))
    assert simulated.at(2, StopTrial("third", ExitReason.STOPPED_BY_USER)) == [
        PrewarmTrial("fourth", attempt_id(0))
    ]
    assert simulated.exits("second", 3)[-1] == PrepareTrial("fourth", attempt_id(0))
    simulated.at(3, TrialAssigned(key_of("fourth")))
    effects = simulated.at(3, TrialSpawned(key_of("fourth"), 1003.0))
    assert not any(isinstance(effect, PrewarmTrial) for effect in effects)


def test_the_queue_of_a_keeper_counts_as_deep_only_while_several_trials_are_queued(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.runs("first")
    for number in range(PLENTY):
        assert not simulated.keeper.queue_is_deep
        simulated.at(1, RunTrial(f"t{number}", attempt_id(0)))
    assert simulated.keeper.queue_is_deep
    simulated.exits("first")
    assert not simulated.keeper.queue_is_deep


def test_a_queued_trial_that_is_stopped_never_starts(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first")
    simulated.at(1, RunTrial("second", attempt_id(0)))
    assert simulated.at(1, StopTrial("second", ExitReason.STOPPED_BY_USER)) == []
    assert simulated.exits("first")[-1] == IDLE


def test_a_queued_trial_is_revoked_and_never_starts(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first")
    for trial_id in ("second", "third", "fourth"):
        simulated.at(1, RunTrial(trial_id, attempt_id(0)))
    assert simulated.at(1, RevokeTrial("fourth")) == [Send(TrialRevoked("fourth"))]
    assert simulated.log[-1] == "trial fourth is revoked, for an idle job"
    assert simulated.at(1, RevokeTrial("second")) == [
        Send(TrialRevoked("second")),
        PrewarmTrial("third", attempt_id(0)),
    ]
    assert simulated.at(1, RevokeTrial("third")) == [Send(TrialRevoked("third"))]
    assert simulated.exits("first")[-1] == IDLE
    simulated.runs("second")


def test_a_started_trial_is_not_revoked(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first")
    assert simulated.at(1, RevokeTrial("first")) == []
    simulated.exits("first")
    assert simulated.at(2, RevokeTrial("first")) == [], "it has ended, and its end was reported"


def test_a_revoke_of_an_unknown_trial_is_acknowledged(simulated: SimulatedReusedKeeper) -> None:
    assert simulated.at(1, RevokeTrial("other")) == [Send(TrialRevoked("other"))]
    simulated.runs("first")
    simulated.at(1, RunTrial("second", attempt_id(0)))
    simulated.at(1, RevokeTrial("second"))
    simulated.at(2, LinkLost("gone"))
    simulated.at(3, TimerFired())
    simulated.at(3, Welcome("0.6.0"))
    again = simulated.at(3, RevokeTrial("second"))
    assert again == [Send(TrialRevoked("second"))], "the first acknowledgement was lost"
    simulated.at(4, SignalReceived(15))
    assert simulated.at(4, RevokeTrial("third")) == [Send(TrialRevoked("third"))], (
        "the keeper is shutting down"
    )


def test_an_idle_keeper_reports_idle_after_a_stop_command_for_an_unknown_trial(
    simulated: SimulatedReusedKeeper,
) -> None:
    assert simulated.at(1, StopTrial("other", ExitReason.STOPPED_BY_USER)) == [IDLE]
    simulated.runs("first")
    assert simulated.at(2, StopTrial("other", ExitReason.STOPPED_BY_USER)) == []


def test_a_keeper_that_shuts_down_starts_no_queued_trial(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first")
    simulated.at(1, RunTrial("second", attempt_id(0)))
    simulated.at(2, SignalReceived(15))
    assert not any(isinstance(effect, PrepareTrial) for effect in simulated.exits("first", 3))
    assert simulated.closes("first", 4)[-1] == ExitKeeper(0)


def test_the_job_exits_with_0_although_its_trial_failed(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first")
    simulated.exits("first", code=3)
    simulated.closes("first")
    assert simulated.at(4, Shutdown("done")) == [ExitKeeper(0)]


def test_a_keeper_stops_its_running_trial_before_a_shutdown_ends_the_keeper(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.runs("first")
    assert simulated.at(2, Shutdown("done")) == [SignalTrial(key_of("first"), kill=False)]
    assert simulated.exits("first", 3)[-1] == ExitKeeper(0)


def test_a_keeper_exits_if_it_is_idle_for_too_long(simulated: SimulatedReusedKeeper) -> None:
    assert simulated.keeper.next_deadline_s == 600
    assert simulated.at(599, TimerFired()) == []
    assert simulated.at(600, TimerFired()) == [ExitKeeper(0)]
    assert "no trial was received for 600 s" in simulated.log[-1]


def test_a_job_that_cannot_reach_a_manager_exits_after_two_minutes() -> None:
    simulated = SimulatedReusedKeeper()
    for now_s in (0, 60, 119):
        assert simulated.at(now_s, TimerFired()) == [OpenLink()]
        simulated.at(now_s, LinkLost("nobody there"))
    assert ExitKeeper(KeeperExit.MANAGER_UNREACHABLE) in simulated.at(120, TimerFired())
    assert "the manager could not be reached" in simulated.log[-1]


def test_a_trial_that_arrives_when_the_idle_timeout_ends_is_started(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first", 600.0)
    simulated.exits("first", 601.0)
    simulated.runs("second", 1201.0)


def test_the_idle_timeout_counts_from_the_end_of_the_last_trial_even_without_a_connection(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.runs("first", 100)
    simulated.exits("first", 200)
    simulated.closes("first", 201)
    simulated.at(300, LinkLost("gone"))
    assert not any(isinstance(effect, ExitKeeper) for effect in simulated.at(799, TimerFired()))
    assert ExitKeeper(0) in simulated.at(800, TimerFired())


def test_a_keeper_with_unacknowledged_bytes_exits_only_after_a_timeout(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.runs("first", 100)
    simulated.exits("first", 200)
    assert simulated.at(210, SignalReceived(15)) == []
    assert simulated.at(239, TimerFired()) == []
    assert simulated.at(240, TimerFired()) == [ExitKeeper(0)]


def test_a_keeper_exits_after_its_maximum_number_of_trials() -> None:
    simulated = SimulatedReusedKeeper(max_trials=2)
    simulated.linked()
    simulated.runs("first")
    assert IDLE in simulated.exits("first")
    simulated.runs("second")
    assert IDLE not in simulated.exits("second")
    simulated.closes("first")
    assert simulated.closes("second") == [ReleaseAttempt(key_of("second")), ExitKeeper(0)]
    assert "2 trials" in simulated.log[-1]


def test_a_keeper_starts_no_further_trial_after_a_preemption_notice(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first")
    simulated.at(1, StopTrial("first", ExitReason.PREEMPTED))
    simulated.at(1, RunTrial("second", attempt_id(0)))
    effects = simulated.exits("first")
    assert IDLE not in effects
    assert PrepareTrial("second", attempt_id(0)) not in effects
    assert simulated.closes("first") == [ReleaseAttempt(key_of("first")), ExitKeeper(0)]


def test_growth_of_a_stream_after_its_attempt_was_closed_is_ignored(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.runs("first")
    simulated.exits("first")
    simulated.closes("first")
    assert simulated.at(4, StreamsGrew(key_of("first"), {Stream.METRICS: 10})) == []


def test_a_job_starts_no_trial_after_a_trial_with_unkillable_processes(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.runs("first")
    simulated.at(2, CleanupFinished(key_of("first"), ("17 (daemon)",)))
    assert IDLE not in simulated.exits("first")
    assert any("17 (daemon)" in line for line in simulated.log)
    assert simulated.at(2, RunTrial("second", attempt_id(0))) == []
    assert simulated.closes("first")[-1] == ExitKeeper(KeeperExit.TAINTED)


def test_files_left_in_the_temporary_folder_cause_only_a_log_line(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first")
    simulated.at(2, CleanupFinished(key_of("first"), (), "cache, model.bin"))
    assert "cache, model.bin" in simulated.log[-1]
    assert simulated.exits("first")[-1] == IDLE


def test_a_failed_preparation_ends_the_trial_with_a_reason_and_afterwards_ends_the_job(
    simulated: SimulatedReusedKeeper,
) -> None:
    simulated.at(1, RunTrial("first", attempt_id(0)))
    full = PreparationFailed(key_of("first"), 1001.0, KeeperExit.MOUNT_FULL, "cannot write: no space")
    effects = simulated.at(1, full)
    (record,) = [effect for effect in effects if isinstance(effect, RecordExit)]
    assert (record.ended.reason, record.ended.message) == (ExitReason.MOUNT, "cannot write: no space")
    assert IDLE not in effects
    assert simulated.closes("first")[-1] == ExitKeeper(KeeperExit.TAINTED)


def test_a_stop_command_for_a_trial_does_not_end_its_job(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first")
    assert simulated.at(2, StopTrial("first", ExitReason.EARLY_STOPPED)) == [
        SignalTrial(key_of("first"), kill=False)
    ]
    assert simulated.exits("first")[-1] == IDLE


def test_a_stop_command_for_a_trial_that_has_ended_is_ignored(simulated: SimulatedReusedKeeper) -> None:
    simulated.runs("first")
    simulated.exits("first")
    simulated.runs("second")
    assert simulated.at(3, StopTrial("first", ExitReason.STOPPED_BY_USER)) == []


def test_a_refused_keeper_waits_briefly_for_another_manager_and_exits() -> None:
    simulated = SimulatedReusedKeeper()
    simulated.at(0, TimerFired())
    simulated.at(1, LinkRefused("wrong token"))
    assert simulated.at(30, TimerFired()) == []
    assert simulated.at(31, TimerFired()) == [ExitKeeper(KeeperExit.REFUSED)]


def test_a_refused_keeper_connects_to_the_next_manager() -> None:
    simulated = SimulatedReusedKeeper()
    simulated.at(0, TimerFired())
    simulated.at(1, LinkRefused("wrong token"))
    assert simulated.at(20, ManagerMoved()) == [OpenLink()]
    assert simulated.at(20, Welcome("0.6.0")) == [IDLE]
    assert simulated.at(100, TimerFired()) == []
