"""Revoked trials: which trial is revoked, which idle job receives it, and events that occur during a revoke."""

import pytest
from simulated_search import SimulatedReuse, search_with_revocable_trials

from nni_manager.domain.events import (
    DispatchTrial,
    Effect,
    KeeperConnected,
    KeeperDisconnected,
    KeeperIdle,
    LimitsChanged,
    ParametersSuggested,
    SaveTrial,
    TrialReclaimed,
    TrialStopAsked,
)
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import TrialState
from trial_keeper.wire.reasons import ExitReason


@pytest.fixture
def revocable() -> SimulatedReuse:
    return search_with_revocable_trials()


def test_each_idle_job_receives_one_trial_that_is_revoked_from_a_busy_job() -> None:
    search = SimulatedReuse(concurrency=4, max_trials=1 + 1 + 12 + 3, may_prefetch=True)
    search.idle("env-0")
    search.start("t0")
    search.end("t0", at_s=10.01)
    search.deliver("t0")
    search.idle("env-0")
    long = search.experiment.jobs.live["env-0"]
    search.start("t1")
    assert long.trial_ids == tuple(f"t{number}" for number in range(1, 14))
    others = {"env-1": "t14", "env-2": "t15", "env-3": "t16"}
    for job_id in others:
        search.idle(job_id)
    for job_id, trial_id in others.items():
        search.run(trial_id)
        search.idle(job_id)
    assert search.revoked == [("env-0", "t13"), ("env-0", "t12"), ("env-0", "t11")]
    assert search.drained == []
    for trial_id in ("t13", "t12", "t11"):
        reclaim(search, trial_id)
    assert [each[:2] for each in search.dispatched[-3:]] == [
        ("env-1", "t13"),
        ("env-2", "t12"),
        ("env-3", "t11"),
    ]
    assert len(long.prefetched_ids) == 9


def reclaim(search: SimulatedReuse, trial_id: str, job_id: str = "env-0") -> list[Effect]:
    return search.handle(TrialReclaimed(job_id, trial_id, 25.0))


def test_the_last_prefetched_trial_is_revoked_and_dispatched_to_an_idle_job(
    revocable: SimulatedReuse,
) -> None:
    revocable.idle("env-1")
    assert revocable.revoked == [("env-0", "t4")]
    trial = revocable.trial("t4")
    assert trial.job_id == "env-0", "it stays assigned until it is reclaimed"
    job = revocable.experiment.jobs.live["env-1"]
    assert reclaim(revocable, "t4") == [SaveTrial(trial), SaveTrial(trial), DispatchTrial(job, trial)]
    assert (trial.job_id, trial.state, trial.run.attempt) == ("env-1", TrialState.WAITING, None)
    revocable.run("t4")
    revocable.idle("env-1")
    assert revocable.revoked == [("env-0", "t4"), ("env-0", "t3")]
    reclaim(revocable, "t3")
    for name in ("t1", "t2", "t3"):
        revocable.run(name)
    assert revocable.experiment.state is ExperimentState.DONE
    assert len(revocable.dispatched) == 6 + 2


def test_an_idle_job_causes_one_revoke_unless_a_request_to_the_tuner_is_unanswered(
    revocable: SimulatedReuse,
) -> None:
    revocable.idle("env-1")
    revocable.idle("env-1")
    assert len(revocable.revoked) == 1
    search = search_with_revocable_trials()
    # The higher limit causes a request, which the tuner has not answered yet. The idle job waits for the answer, so no trial is
    # revoked.
    search.experiment.handle(LimitsChanged(Limits(2, 7, None)), 0.0)
    search.idle("env-1")
    assert search.revoked == []
    search.handle(ParametersSuggested("t6", 6, {}, {}, 1.0))
    assert search.dispatched[-1] == ("env-1", "t6", None)


def test_a_trial_that_starts_during_its_revoke_keeps_running_and_the_idle_job_drains(
    revocable: SimulatedReuse,
) -> None:
    revocable.idle("env-1")
    for name in ("t1", "t2", "t3"):
        revocable.run(name)
        assert revocable.drained == []
    revocable.start("t4")
    assert revocable.drained == ["env-1"]
    assert reclaim(revocable, "t4") == [], "no keeper sends this"
    assert revocable.trial("t4").state is TrialState.RUNNING


def test_a_revoke_is_sent_again_after_the_keeper_reconnects(revocable: SimulatedReuse) -> None:
    revocable.idle("env-1")
    revocable.handle(KeeperDisconnected("env-0"))
    assert reclaim(revocable, "t4") == [], "a reclaim from before the disconnect"
    assert revocable.drained == [], "the keeper may reconnect"
    revocable.handle(KeeperConnected("env-0", supports_revoke=True))
    assert revocable.revoked == [("env-0", "t4")] * 2
    reclaim(revocable, "t4")
    assert revocable.dispatched[-1] == ("env-1", "t4", None)


def test_an_idle_keeper_gets_a_trial_again_if_the_reclaim_message_was_lost(
    revocable: SimulatedReuse,
) -> None:
    revocable.idle("env-1")
    revocable.handle(KeeperDisconnected("env-0"))
    revocable.lose("env-1", is_clean=True)
    for name in ("t1", "t2", "t3"):
        revocable.run(name)
    revocable.idle("env-0")
    assert revocable.dispatched[-1] == ("env-0", "t4", "main-0")


def test_an_idle_keeper_does_not_get_the_trial_whose_revoke_is_in_progress(revocable: SimulatedReuse) -> None:
    revocable.idle("env-1")
    for name in ("t1", "t2", "t3"):
        revocable.run(name)
    count = len(revocable.dispatched)
    revocable.handle(KeeperIdle("env-0", "main-0"))
    assert len(revocable.dispatched) == count
    reclaim(revocable, "t4")
    assert revocable.dispatched[-1] == ("env-1", "t4", None)
    assert revocable.drained == ["env-0"]


def test_a_late_reclaim_message_is_ignored_if_its_trial_is_terminal_or_reassigned(
    revocable: SimulatedReuse,
) -> None:
    revocable.idle("env-1")
    revocable.handle(TrialStopAsked("t4", ExitReason.STOPPED_BY_USER, 15.0))
    assert revocable.revoked == [("env-0", "t4")]
    reclaim(revocable, "t4")
    assert revocable.trial("t4").state is TrialState.USER_CANCELED
    assert revocable.revoked == [("env-0", "t4"), ("env-0", "t3")]
    assert reclaim(revocable, "t4") == []
    reclaim(revocable, "t3")
    assert reclaim(revocable, "t3") == []
    assert reclaim(revocable, "t3", "env-1") == []
    assert reclaim(revocable, "nobody", "env-7") == []
    assert revocable.trial("t3").job_id == "env-1"


def test_a_stop_request_during_a_revoke_cancels_the_trial_when_the_trial_is_reclaimed(
    revocable: SimulatedReuse,
) -> None:
    revocable.idle("env-1")
    for name in ("t1", "t2", "t3"):
        revocable.run(name)
    revocable.handle(TrialStopAsked("t4", ExitReason.STOPPED_BY_USER, 15.0))
    assert revocable.trial("t4").state is TrialState.STOPPING
    reclaim(revocable, "t4")
    assert revocable.trial("t4").state is TrialState.USER_CANCELED
    assert revocable.experiment.state is ExperimentState.DONE


def test_all_prefetched_trials_of_a_lost_job_go_to_another_job_even_if_a_revoke_is_in_progress(
    revocable: SimulatedReuse,
) -> None:
    revocable.idle("env-1")
    revocable.lose("env-0", "t2", "t3", "t4")
    assert [each[:2] for each in revocable.dispatched[6:]] == [("env-1", name) for name in ("t2", "t3", "t4")]
    assert reclaim(revocable, "t4") == []


def test_a_keeper_without_revoke_support_receives_no_revoke() -> None:
    class Older(SimulatedReuse):
        supports_revoke = False

    search = Older(concurrency=2, max_trials=6, may_prefetch=True)
    search.idle("env-0")
    search.start("t0")
    search.end("t0", at_s=10.5)
    search.deliver("t0")
    search.idle("env-0")
    search.idle("env-1")
    search.run("t5")
    search.idle("env-1")
    assert (search.revoked, search.drained[0]) == ([], "env-1")


def test_the_next_manager_repeats_a_revoke_after_the_keeper_has_connected(revocable: SimulatedReuse) -> None:
    revocable.idle("env-1")
    after = revocable.resumed()
    after.idle("env-1")
    assert after.revoked == []
    after.handle(KeeperConnected("env-0", supports_revoke=True))
    assert after.revoked == [("env-0", "t4")]
