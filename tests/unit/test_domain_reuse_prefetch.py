"""Prefetched trials: the number per job, the order of execution, and the loss of the job."""

import pytest
from simulated_search import SimulatedReuse

from nni_manager.domain.events import (
    CancelTrial,
    ExperimentStopAsked,
    KeeperConnected,
    KeeperDisconnected,
    KeeperIdle,
    LimitsChanged,
    TrialProposed,
    TrialReclaimed,
    TrialStopAsked,
)
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import TrialState
from nni_manager.domain.trial_lifecycle import STOPPED_BEFORE_START
from trial_keeper.wire.reasons import ExitReason


@pytest.fixture
def prefetched() -> SimulatedReuse:
    """One job runs t1 and holds the prefetched trial t2."""
    search = SimulatedReuse(max_trials=6, may_prefetch=True)
    search.idle()
    search.run("t0")
    search.idle()
    search.start("t1")
    assert search.dispatched[1:] == [("env-0", "t1", None), ("env-0", "t2", None)]
    return search


def test_no_trials_are_prefetched_if_the_tuner_learns_or_trials_may_be_long() -> None:
    for search in (SimulatedReuse(may_prefetch=True), SimulatedReuse()):
        search.idle()
        search.start("t0")
        assert list(search.experiment.trials) == ["t0"]
    search.run("t0")
    search.idle()
    assert list(search.experiment.trials) == ["t0", "t1"]
    long = SimulatedReuse(may_prefetch=True)
    long.idle()
    long.start("t0")
    long.end("t0", at_s=100.0)
    long.deliver("t0")
    long.idle()
    assert list(long.experiment.trials) == ["t0", "t1"]


def test_a_prefetched_trial_starts_while_the_previous_trial_is_closing(
    prefetched: SimulatedReuse,
) -> None:
    prefetched.end("t1")
    prefetched.start("t2")
    assert [prefetched.trial(name).state.value for name in ("t1", "t2")] == ["CLOSING", "RUNNING"]
    prefetched.deliver("t1")
    assert prefetched.dispatched[-1] == ("env-0", "t3", None)
    prefetched.end("t2")
    prefetched.deliver("t2")
    assert prefetched.submitted == ["env-0"]


def test_a_prefetching_job_gets_all_trials_and_drains_after_the_last_trial(
    prefetched: SimulatedReuse,
) -> None:
    for name in ("t1", "t2", "t3", "t4", "t5"):
        prefetched.run(name)
    assert [each[1] for each in prefetched.dispatched] == [f"t{number}" for number in range(6)]
    assert (prefetched.experiment.state, prefetched.drained) == (ExperimentState.DONE, ["env-0"])


def test_a_prefetched_trial_may_end_before_all_bytes_of_the_previous_trial_arrive(
    prefetched: SimulatedReuse,
) -> None:
    prefetched.end("t1")
    prefetched.run("t2")
    assert prefetched.trial("t2").state is TrialState.SUCCEEDED
    prefetched.deliver("t1")
    assert prefetched.trial("t1").state is TrialState.SUCCEEDED
    assert prefetched.dispatched[3:] == [("env-0", "t3", None), ("env-0", "t4", None)]


def test_an_idle_keeper_gets_a_prefetched_trial_again_if_the_dispatch_was_lost(
    prefetched: SimulatedReuse,
) -> None:
    prefetched.end("t1")
    prefetched.idle()
    assert prefetched.dispatched[-1] == ("env-0", "t2", "main-0")
    prefetched.start("t2")
    prefetched.deliver("t1")
    prefetched.run("t2")
    assert prefetched.dispatched[4:] == [("env-0", "t3", None), ("env-0", "t4", None)]


def stop(search: SimulatedReuse, name: str) -> None:
    search.handle(TrialStopAsked(name, ExitReason.STOPPED_BY_USER, 15.0))


def reclaim(search: SimulatedReuse, name: str) -> None:
    search.handle(TrialReclaimed("env-0", name, 16.0))


def test_a_stopped_prefetched_trial_ends_if_its_keeper_never_started_the_trial(
    prefetched: SimulatedReuse,
) -> None:
    stop(prefetched, "t2")
    assert prefetched.revoked == [("env-0", "t2")]
    assert prefetched.trial("t2").state is TrialState.STOPPING
    reclaim(prefetched, "t2")
    trial = prefetched.trial("t2")
    assert (trial.state, trial.run.message) == (TrialState.USER_CANCELED, STOPPED_BEFORE_START)
    assert prefetched.trial("t1").state is TrialState.RUNNING
    assert prefetched.all_of(CancelTrial) == []
    assert prefetched.dispatched[-1] == ("env-0", "t3", None)


def test_a_prefetched_trial_is_canceled_if_it_starts_after_a_stop_request(
    prefetched: SimulatedReuse,
) -> None:
    stop(prefetched, "t2")
    prefetched.end("t1")
    prefetched.start("t2")
    assert [(effect.trial.trial_id, effect.ends_job) for effect in prefetched.all_of(CancelTrial)] == [
        ("t2", False)
    ]
    reclaim(prefetched, "t2")
    assert prefetched.trial("t2").state is TrialState.STOPPING, "no keeper sends this"


def test_the_result_of_a_prefetched_trial_counts_if_the_trial_ends_despite_a_late_stop_request(
    prefetched: SimulatedReuse,
) -> None:
    prefetched.handle(KeeperDisconnected("env-0"))
    stop(prefetched, "t2")
    assert prefetched.revoked == [], "the keeper cannot be asked"
    prefetched.handle(KeeperConnected("env-0", supports_revoke=True))
    assert prefetched.revoked == [("env-0", "t2")]
    prefetched.run("t1")
    prefetched.run("t2")
    assert prefetched.trial("t2").state is TrialState.SUCCEEDED


def test_an_idle_keeper_does_not_receive_a_stopped_prefetched_trial_again(
    prefetched: SimulatedReuse,
) -> None:
    prefetched.handle(KeeperDisconnected("env-0"))
    stop(prefetched, "t2")
    prefetched.run("t1")
    prefetched.idle()
    assert prefetched.revoked == [("env-0", "t2")]
    assert [trial_id for _, trial_id, _ in prefetched.dispatched].count("t2") == 1
    reclaim(prefetched, "t2")
    assert prefetched.trial("t2").run.message == STOPPED_BEFORE_START


def test_an_idle_keeper_gets_the_next_trial_if_it_never_received_the_stopped_trial() -> None:
    search = SimulatedReuse(max_trials=6, may_prefetch=True)
    search.idle()
    search.run("t0")
    search.idle()
    assert search.experiment.jobs.live["env-0"].trial_ids == ("t1", "t2")
    stop(search, "t1")
    search.handle(KeeperIdle("env-0", "main-0"))
    assert search.revoked == [("env-0", "t1")]
    assert search.dispatched[-1] == ("env-0", "t2", "main-0")


def test_a_stopped_prefetched_trial_is_canceled_when_its_job_is_lost(
    prefetched: SimulatedReuse,
) -> None:
    stop(prefetched, "t2")
    prefetched.lose("env-0", "t2")
    trial = prefetched.trial("t2")
    assert (trial.state, trial.run.message) == (TrialState.USER_CANCELED, STOPPED_BEFORE_START)


def test_a_new_manager_revokes_a_prefetched_trial_that_the_previous_manager_stopped(
    prefetched: SimulatedReuse,
) -> None:
    stop(prefetched, "t2")
    search = prefetched.resumed()
    assert search.experiment.jobs.live["env-0"].trial_ids == ("t1", "t2")
    assert search.experiment.scheduler.stops.stage("env-0") is None, "the job goes on"
    search.handle(KeeperConnected("env-0", supports_revoke=True))
    assert search.revoked == [("env-0", "t2")]


def test_a_prefetched_trial_of_a_lost_job_goes_to_another_job(prefetched: SimulatedReuse) -> None:
    prefetched.lose("env-0", "t2")
    assert [prefetched.trial(name).state.value for name in ("t1", "t2")] == ["FAILED", "WAITING"]
    assert prefetched.submitted == ["env-0", "env-1"]
    prefetched.idle("env-1")
    assert prefetched.dispatched[3:] == [("env-1", "t2", None), ("env-1", "t3", None)]


def test_the_unstarted_trials_of_an_exited_job_return_to_the_queue_in_order() -> None:
    search = SimulatedReuse(max_trials=6, may_prefetch=True)
    search.idle()
    search.run("t0")
    search.idle()
    search.lose("env-0", is_clean=True)
    assert list(search.experiment.jobs.queue) == ["t1", "t2"]


def test_a_stop_of_the_experiment_cancels_prefetched_trials(prefetched: SimulatedReuse) -> None:
    prefetched.handle(ExperimentStopAsked(16.0))
    reclaim(prefetched, "t2")
    prefetched.end("t1", succeeds=False)
    prefetched.deliver("t1")
    assert prefetched.experiment.state is ExperimentState.STOPPED
    assert prefetched.trial("t2").state is TrialState.USER_CANCELED


def test_a_prefetched_trial_that_could_not_start_is_not_revoked_for_an_idle_job() -> None:
    search = SimulatedReuse(concurrency=2, max_trials=4, may_prefetch=True)
    for job_id in ("env-0", "env-1"):
        search.idle(job_id)
    for name in ("t0", "t1"):
        search.start(name)
    search.end("t0", at_s=10.5)
    search.deliver("t0")
    search.idle("env-0")
    assert search.experiment.jobs.live["env-1"].trial_ids == ("t1", "t2")
    search.end("t1")
    search.end("t2", succeeds=False)
    search.run("t3")
    search.idle("env-0")
    assert search.revoked == []


def test_no_job_is_submitted_for_prefetched_trials() -> None:
    search = SimulatedReuse(concurrency=2, max_trials=9, may_prefetch=True)
    for job_id in ("env-0", "env-1"):
        search.idle(job_id)
    search.run("t0")
    search.idle("env-0")
    assert search.submitted == ["env-0", "env-1"]
    assert [len(job.prefetched_ids) for job in search.experiment.jobs.live.values()] == [1, 1]


def test_a_job_prefetches_several_very_short_trials_and_runs_the_trials_in_order() -> None:
    search = SimulatedReuse(max_trials=9, may_prefetch=True)
    search.idle()
    search.start("t0")
    search.end("t0", at_s=10.5)
    search.deliver("t0")
    search.idle()
    assert search.dispatched == [("env-0", f"t{number}", None) for number in range(5)]
    for number in range(1, 5):
        search.start(f"t{number}")
        search.end(f"t{number}", at_s=10.5)
        search.deliver(f"t{number}")
    assert search.dispatched == [("env-0", f"t{number}", None) for number in range(9)]
    assert search.submitted == ["env-0"]


def test_the_number_of_prefetched_trials_does_not_depend_on_the_duration_of_failed_trials() -> None:
    search = SimulatedReuse(max_trials=30, may_prefetch=True)
    search.idle()
    for number in range(2):
        search.start(f"t{number}")
        search.end(f"t{number}", at_s=10.02, succeeds=False)
        search.deliver(f"t{number}")
        search.idle()
    assert [each[1] for each in search.dispatched] == ["t0", "t1", "t2"]
    search.start("t2")
    search.end("t2", at_s=10.02)
    search.deliver("t2")
    search.idle()
    assert [each[1] for each in search.dispatched] == [f"t{number}" for number in range(3 + 1 + 12)]


@pytest.mark.parametrize(("lasted_s", "follow"), [(0.05, 12), (0.5, 3), (1.0, 1), (5.0, 1), (60.0, 0)])
def test_more_trials_are_prefetched_if_the_trials_are_shorter(lasted_s: float, follow: int) -> None:
    search = SimulatedReuse(max_trials=30, may_prefetch=True)
    search.idle()
    search.start("t0")
    search.end("t0", at_s=10.0 + lasted_s)
    search.deliver("t0")
    search.idle()
    assert [each[1] for each in search.dispatched] == [f"t{number}" for number in range(1 + 1 + follow)]


def test_the_number_of_prefetched_trials_does_not_depend_on_the_duration_of_lost_trials() -> None:
    search = SimulatedReuse(max_trials=30, may_prefetch=True, concurrency=2)
    for number in range(2):
        search.idle(f"env-{number}")
        search.start(f"t{number}")
    search.end("t0", at_s=10.02)
    search.deliver("t0")
    # The trial t1 has run for 100 s when its job is lost. This duration must not reduce the number of prefetched trials.
    search.trial("t1").run.start_received_at_s = -100.0
    search.lose("env-1", *search.experiment.jobs.live["env-1"].waiting_ids)
    assert search.trial("t1").state is TrialState.FAILED
    search.idle("env-0")
    assert len(search.experiment.jobs.live["env-0"].waiting_ids) == 12


def test_no_trial_is_prefetched_while_there_are_more_jobs_than_the_concurrency_allows() -> None:
    search = SimulatedReuse(max_trials=3, may_prefetch=True, concurrency=2)
    search.idle("env-0")
    search.start("t0")
    search.idle("env-1")
    search.start("t1")
    search.end("t0", at_s=10.5)
    search.deliver("t0")
    search.idle("env-0")
    search.handle(LimitsChanged(Limits(1, 3, None)))
    search.handle(TrialProposed("mine", {}, 1.0))
    assert [each[1] for each in search.dispatched] == ["t0", "t1", "t2"]
    search.handle(LimitsChanged(Limits(2, 3, None)))
    assert [each[1] for each in search.dispatched] == ["t0", "t1", "t2", "mine"]


def test_a_new_manager_does_not_revoke_a_trial_that_started_while_the_previous_trial_was_closing(
    prefetched: SimulatedReuse,
) -> None:
    prefetched.end("t1")
    prefetched.start("t2")
    stop(prefetched, "t2")
    after = prefetched.resumed()
    assert after.experiment.jobs.live["env-0"].trial_ids == ("t1", "t2")
    assert after.experiment.jobs.live["env-0"].waiting_ids == []


def test_prefetched_trials_of_a_lost_job_go_to_an_idle_job_in_order() -> None:
    search = SimulatedReuse(max_trials=9, may_prefetch=True)
    search.idle()
    search.start("t0")
    search.end("t0", at_s=10.5)
    search.deliver("t0")
    search.idle()
    search.start("t1")
    search.lose("env-0", "t2", "t3", "t4")
    assert list(search.experiment.jobs.queue)[:3] == ["t2", "t3", "t4"]
    search.idle("env-1")
    assert [each[:2] for each in search.dispatched[5:8]] == [("env-1", f"t{number}") for number in (2, 3, 4)]


@pytest.fixture
def four_prefetched() -> SimulatedReuse:
    """One job holds four prefetched trials and has started none of them."""
    search = SimulatedReuse(max_trials=9, may_prefetch=True)
    search.idle()
    search.start("t0")
    search.end("t0", at_s=10.5)
    search.deliver("t0")
    search.idle()
    assert [each[1] for each in search.dispatched[1:]] == ["t1", "t2", "t3", "t4"]
    return search


def test_a_job_crash_between_trials_counts_only_against_the_next_trial(
    four_prefetched: SimulatedReuse,
) -> None:
    four_prefetched.lose("env-0", "t1", "t2", "t3", "t4")
    assert [
        name for name in four_prefetched.experiment.trials if four_prefetched.trial(name).was_returned
    ] == ["t1"]
    four_prefetched.idle("env-1")
    assert [each[:2] for each in four_prefetched.dispatched[5:9]] == [
        ("env-1", f"t{number}") for number in (1, 2, 3, 4)
    ]
    four_prefetched.lose("env-1", "t1", "t2", "t3", "t4")
    assert [four_prefetched.trial(f"t{number}").state.value for number in (1, 2, 3, 4)] == ["FAILED"] + [
        "WAITING"
    ] * 3
    four_prefetched.idle("env-2")
    assert ("env-2", "t2", None) in four_prefetched.dispatched
    assert not four_prefetched.trial("t2").was_returned


def test_a_job_crash_during_a_trial_counts_against_no_prefetched_trial(
    four_prefetched: SimulatedReuse,
) -> None:
    four_prefetched.start("t1")
    four_prefetched.lose("env-0", "t2", "t3", "t4")
    assert four_prefetched.trial("t1").state is TrialState.FAILED
    assert not any(trial.was_returned for trial in four_prefetched.experiment.trials.values())


def test_a_clean_job_exit_does_not_change_the_crash_counts_of_trials(
    four_prefetched: SimulatedReuse,
) -> None:
    four_prefetched.lose("env-0", "t1", "t2", "t3", "t4")
    four_prefetched.idle("env-1")
    four_prefetched.lose("env-1", "t1", "t2", "t3", "t4", is_clean=True)
    assert [
        name for name in four_prefetched.experiment.trials if four_prefetched.trial(name).was_returned
    ] == ["t1"]
    four_prefetched.idle("env-2")
    four_prefetched.lose("env-2", "t1", "t2", "t3", "t4")
    assert four_prefetched.trial("t1").state is TrialState.FAILED, (
        "two jobs crashed with this trial as the next"
    )


def test_a_job_keeps_its_running_and_its_prefetched_trial_after_a_manager_restart(
    prefetched: SimulatedReuse,
) -> None:
    after = prefetched.resumed()
    after.handle(KeeperConnected("env-0"))
    after.start("t1")
    after.end("t1")
    after.start("t2")
    after.deliver("t1")
    after.end("t2")
    after.deliver("t2")
    assert [after.trial(name).state for name in ("t1", "t2")] == [TrialState.SUCCEEDED] * 2
    assert after.submitted == []


def test_prefetch_respects_the_limit_of_trials_per_job_after_a_manager_restart() -> None:
    search = SimulatedReuse(max_trials=9, may_prefetch=True)
    search.experiment.jobs.max_trials = 4
    search.idle()
    search.start("t0")
    search.end("t0", at_s=10.5)
    search.deliver("t0")
    search.idle()
    assert [each[1] for each in search.dispatched] == ["t0", "t1", "t2", "t3"]
    search.run("t1")
    after = search.resumed()
    assert after.experiment.jobs.live["env-0"].taken == 4, "two trials have ended, and two are assigned"
    after.experiment.scheduler.may_prefetch = True
    after.start("t2")
    after.end("t2", at_s=10.5)
    after.deliver("t2")
    assert after.dispatched == []
    after.run("t3")
    after.lose("env-0", is_clean=True)
    assert after.submitted == ["env-1"]
    after.idle("env-1")
    assert after.dispatched[0] == ("env-1", "t4", None)
