"""A keeper that is given one trial after another, played in milliseconds."""

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
    StreamsGrew,
    TimerFired,
    TrialAssigned,
    TrialExited,
    TrialSpawned,
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


class Play:
    """A keeper, its clock and what it logged."""

    def __init__(self, **settings: float) -> None:
        self.keeper = Keeper(KeeperSettings("exp", "env-0", "/mnt/exp", "token", **(SETTINGS | settings)))  # type: ignore[arg-type]
        self.log: list[str] = []

    def at(self, now_s: float, event: Event) -> list[Effect]:
        effects = self.keeper.handle(event, now_s)
        self.log += [effect.text for effect in effects if isinstance(effect, LogDecision)]
        return [effect for effect in effects if not isinstance(effect, LogDecision | MeasureMetrics)]

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
def play() -> Play:
    play = Play()
    assert play.linked() == [IDLE]
    return play


def test_a_keeper_without_a_trial_connects_and_says_that_it_is_idle() -> None:
    play = Play()
    assert play.at(0, TimerFired()) == [OpenLink(())]
    assert play.at(0, Welcome("0.6.0")) == [IDLE]


def test_the_next_trial_may_begin_while_the_last_one_is_not_closed(play: Play) -> None:
    play.runs("first")
    told = play.exits("first")
    assert [type(effect) for effect in told] == [RecordExit, Send, Send]
    assert told[-1] == IDLE
    play.runs("second")
    assert play.closes("first") == [ReleaseAttempt(key_of("first"))]
    assert play.exits("second")[-1] == IDLE


def test_the_bytes_of_both_are_sent(play: Play) -> None:
    play.runs("first")
    play.at(1, StreamsGrew(key_of("first"), {Stream.METRICS: 10}))
    play.exits("first")
    play.runs("second")
    sent = play.at(2, StreamsGrew(key_of("second"), {Stream.METRICS: 5}))
    assert sent == [SendChunk(key_of("second"), Stream.METRICS, 0, 5)]
    play.at(3, LinkLost("gone"))
    assert play.at(10, TimerFired()) == [OpenLink((key_of("first"), key_of("second")))]
    again = play.at(10, Welcome("0.6.0", (AttemptOffsets(key_of("first"), {Stream.METRICS: 4}),)))
    assert [effect.offset for effect in again if isinstance(effect, SendChunk)] == [4, 0]
    assert IDLE not in again


def test_a_trial_that_is_told_twice_is_run_once(play: Play) -> None:
    play.runs("first")
    assert play.at(1, RunTrial("first", attempt_id(0))) == []
    play.exits("first")
    assert play.at(2, RunTrial("first", attempt_id(0))) == []


def test_a_trial_that_is_given_to_a_busy_keeper_begins_when_the_one_before_ends(play: Play) -> None:
    play.runs("first")
    assert play.at(1, RunTrial("second", attempt_id(0))) == [PrewarmTrial("second", attempt_id(0))]
    assert play.at(1, RunTrial("second", attempt_id(0))) == []
    told = play.exits("first")
    assert [type(effect) for effect in told] == [RecordExit, Send, PrepareTrial]
    assert told[-1] == PrepareTrial("second", attempt_id(0))
    play.at(2, TrialAssigned(key_of("second")))
    play.at(2, TrialSpawned(key_of("second"), 1002.0))
    assert play.exits("second", 3)[-1] == IDLE


def test_what_follows_is_foreseen_as_soon_as_it_is_known_while_another_trial_runs(play: Play) -> None:
    play.runs("first")
    for trial_id, effects in (
        ("second", [PrewarmTrial("second", attempt_id(0))]),
        ("third", []),
        ("fourth", []),
    ):
        assert play.at(1, RunTrial(trial_id, attempt_id(0))) == effects
    assert play.exits("first")[-1] == PrepareTrial("second", attempt_id(0))
    play.at(2, TrialAssigned(key_of("second")))
    assert play.at(2, TrialSpawned(key_of("second"), 1002.0))[-1] == PrewarmTrial("third", attempt_id(0))
    assert play.at(2, StopTrial("third", ExitReason.STOPPED_BY_USER)) == [
        PrewarmTrial("fourth", attempt_id(0))
    ]
    assert play.exits("second", 3)[-1] == PrepareTrial("fourth", attempt_id(0))
    play.at(3, TrialAssigned(key_of("fourth")))
    told = play.at(3, TrialSpawned(key_of("fourth"), 1003.0))
    assert not any(isinstance(effect, PrewarmTrial) for effect in told)


def test_there_is_plenty_to_do_as_long_as_several_trials_wait(play: Play) -> None:
    play.runs("first")
    for number in range(PLENTY):
        assert not play.keeper.queue_is_deep
        play.at(1, RunTrial(f"t{number}", attempt_id(0)))
    assert play.keeper.queue_is_deep
    play.exits("first")
    assert not play.keeper.queue_is_deep


def test_a_trial_that_waits_its_turn_and_is_stopped_is_not_begun(play: Play) -> None:
    play.runs("first")
    play.at(1, RunTrial("second", attempt_id(0)))
    assert play.at(1, StopTrial("second", ExitReason.STOPPED_BY_USER)) == []
    assert play.exits("first")[-1] == IDLE


def test_a_trial_that_waits_its_turn_is_given_back_and_never_begun(play: Play) -> None:
    play.runs("first")
    for trial_id in ("second", "third", "fourth"):
        play.at(1, RunTrial(trial_id, attempt_id(0)))
    assert play.at(1, RevokeTrial("fourth")) == [Send(TrialRevoked("fourth"))]
    assert play.log[-1] == "trial fourth is revoked, for an idle job"
    assert play.at(1, RevokeTrial("second")) == [
        Send(TrialRevoked("second")),
        PrewarmTrial("third", attempt_id(0)),
    ]
    assert play.at(1, RevokeTrial("third")) == [Send(TrialRevoked("third"))]
    assert play.exits("first")[-1] == IDLE
    play.runs("second")


def test_a_trial_that_has_begun_is_not_given_back(play: Play) -> None:
    play.runs("first")
    assert play.at(1, RevokeTrial("first")) == []
    play.exits("first")
    assert play.at(2, RevokeTrial("first")) == [], "it is over, and its end was told"


def test_a_keeper_that_does_not_have_a_trial_says_so(play: Play) -> None:
    assert play.at(1, RevokeTrial("other")) == [Send(TrialRevoked("other"))]
    play.runs("first")
    play.at(1, RunTrial("second", attempt_id(0)))
    play.at(1, RevokeTrial("second"))
    play.at(2, LinkLost("gone"))
    play.at(3, TimerFired())
    play.at(3, Welcome("0.6.0"))
    again = play.at(3, RevokeTrial("second"))
    assert again == [Send(TrialRevoked("second"))], "the first answer was lost"
    play.at(4, SignalReceived(15))
    assert play.at(4, RevokeTrial("third")) == [Send(TrialRevoked("third"))], "it is leaving"


def test_a_keeper_that_is_told_to_stop_what_it_never_heard_of_says_that_it_is_idle(play: Play) -> None:
    assert play.at(1, StopTrial("other", ExitReason.STOPPED_BY_USER)) == [IDLE]
    play.runs("first")
    assert play.at(2, StopTrial("other", ExitReason.STOPPED_BY_USER)) == []


def test_a_keeper_that_leaves_begins_nothing_that_waits(play: Play) -> None:
    play.runs("first")
    play.at(1, RunTrial("second", attempt_id(0)))
    play.at(2, SignalReceived(15))
    assert not any(isinstance(effect, PrepareTrial) for effect in play.exits("first", 3))
    assert play.closes("first", 4)[-1] == ExitKeeper(0)


def test_the_job_ends_well_however_its_trials_end(play: Play) -> None:
    play.runs("first")
    play.exits("first", code=3)
    play.closes("first")
    assert play.at(4, Shutdown("done")) == [ExitKeeper(0)]


def test_a_keeper_that_is_told_to_leave_stops_its_trial_first(play: Play) -> None:
    play.runs("first")
    assert play.at(2, Shutdown("done")) == [SignalTrial(key_of("first"), kill=False)]
    assert play.exits("first", 3)[-1] == ExitKeeper(0)


def test_idle_for_too_long_it_leaves(play: Play) -> None:
    assert play.keeper.next_deadline_s == 600
    assert play.at(599, TimerFired()) == []
    assert play.at(600, TimerFired()) == [ExitKeeper(0)]
    assert "no trial was received for 600 s" in play.log[-1]


def test_a_job_that_reaches_no_manager_does_not_hold_its_place_for_as_long() -> None:
    play = Play()
    for now_s in (0, 60, 119):
        assert play.at(now_s, TimerFired()) == [OpenLink(())]
        play.at(now_s, LinkLost("nobody there"))
    assert ExitKeeper(KeeperExit.MANAGER_UNREACHABLE) in play.at(120, TimerFired())
    assert "the manager could not be reached" in play.log[-1]


def test_the_time_is_counted_from_the_last_trials_end_also_without_a_manager(play: Play) -> None:
    play.runs("first", 100)
    play.exits("first", 200)
    play.closes("first", 201)
    play.at(300, LinkLost("gone"))
    assert not any(isinstance(effect, ExitKeeper) for effect in play.at(799, TimerFired()))
    assert ExitKeeper(0) in play.at(800, TimerFired())


def test_leaving_it_waits_for_what_the_manager_does_not_have(play: Play) -> None:
    play.runs("first", 100)
    play.exits("first", 200)
    assert play.at(210, SignalReceived(15)) == []
    assert play.at(239, TimerFired()) == []
    assert play.at(240, TimerFired()) == [ExitKeeper(0)]


def test_after_as_many_trials_as_it_may_run_it_leaves() -> None:
    play = Play(max_trials=2)
    play.linked()
    play.runs("first")
    assert IDLE in play.exits("first")
    play.runs("second")
    assert IDLE not in play.exits("second")
    play.closes("first")
    assert play.closes("second") == [ReleaseAttempt(key_of("second")), ExitKeeper(0)]


def test_a_trial_that_cannot_be_cleared_away_is_the_jobs_last(play: Play) -> None:
    play.runs("first")
    play.at(2, CleanupFinished(key_of("first"), ("17 (daemon)",)))
    assert IDLE not in play.exits("first")
    assert any("17 (daemon)" in line for line in play.log)
    assert play.at(2, RunTrial("second", attempt_id(0))) == []
    assert play.closes("first")[-1] == ExitKeeper(KeeperExit.TAINTED)


def test_what_a_trial_leaves_in_the_temporary_folder_is_told_and_no_more(play: Play) -> None:
    play.runs("first")
    play.at(2, CleanupFinished(key_of("first"), (), "cache, model.bin"))
    assert "cache, model.bin" in play.log[-1]
    assert play.exits("first")[-1] == IDLE


def test_a_trial_that_cannot_be_prepared_fails_with_its_reason_and_the_job_leaves(play: Play) -> None:
    play.at(1, RunTrial("first", attempt_id(0)))
    full = PreparationFailed(key_of("first"), 1001.0, KeeperExit.MOUNT_FULL, "cannot write: no space")
    told = play.at(1, full)
    (record,) = [effect for effect in told if isinstance(effect, RecordExit)]
    assert (record.ended.reason, record.ended.message) == (ExitReason.MOUNT, "cannot write: no space")
    assert IDLE not in told
    assert play.closes("first")[-1] == ExitKeeper(KeeperExit.TAINTED)


def test_a_stop_of_one_trial_is_not_the_end_of_the_job(play: Play) -> None:
    play.runs("first")
    assert play.at(2, StopTrial("first", ExitReason.EARLY_STOPPED)) == [
        SignalTrial(key_of("first"), kill=False)
    ]
    assert play.exits("first")[-1] == IDLE


def test_a_stop_of_a_trial_that_is_over_is_nothing(play: Play) -> None:
    play.runs("first")
    play.exits("first")
    play.runs("second")
    assert play.at(3, StopTrial("first", ExitReason.STOPPED_BY_USER)) == []


def test_refused_by_the_manager_it_waits_a_moment_for_another_one_and_leaves() -> None:
    play = Play()
    play.at(0, TimerFired())
    play.at(1, LinkRefused("wrong token"))
    assert play.at(30, TimerFired()) == []
    assert play.at(31, TimerFired()) == [ExitKeeper(KeeperExit.REFUSED)]


def test_refused_by_the_manager_it_takes_the_next_one() -> None:
    play = Play()
    play.at(0, TimerFired())
    play.at(1, LinkRefused("wrong token"))
    assert play.at(20, ManagerMoved()) == [OpenLink(())]
    assert play.at(20, Welcome("0.6.0")) == [IDLE]
    assert play.at(100, TimerFired()) == []
