"""Jobs that seem to be lost: the manager waits a bounded time for the cluster's reason or the return of a node."""

import pytest
from simulated_search import new_search

from nni_manager.domain.events import GiveUpJob, JobRequeued, NodeReadinessChanged, TimePassed
from nni_manager.domain.lost_jobs import (
    CHANGES,
    END_REASON_TIMEOUT_S,
    IGNORED,
    TRANSITIONS,
    LossEvent,
    LossStage,
)
from nni_manager.domain.trial import TrialState
from trial_keeper.wire.reasons import ExitReason

JOB_LOST = ExitReason.JOB_LOST
NODE_TIMEOUT_S = 100.0


def a_search(**limits):
    search = new_search(
        concurrency=1, max_trials=1, reports_preemption=True, lost_node_timeout_s=NODE_TIMEOUT_S, **limits
    )
    trial_id = search.suggest()
    search.experiment.transports.track("t0", search.now_s)
    search.start(trial_id)
    return search


def given_up(search, at_s):
    """The ids of the jobs that the manager gives up when the clock reaches this time."""
    search.now_s = at_s
    return [each.job.job_id for each in search.handle(TimePassed()) if isinstance(each, GiveUpJob)]


def test_the_transition_table_of_lost_jobs_covers_every_possible_stage_and_event():
    pairs = {(stage, event) for stage in LossStage for event in LossEvent}
    assert pairs - TRANSITIONS.keys() == {(LossStage.GIVEN_UP, LossEvent.OVERDUE)}
    assert not CHANGES.keys() & IGNORED


def test_the_manager_gives_up_a_job_only_once_if_the_cluster_reports_no_reason_in_time():
    search = a_search()
    search.end("t0", JOB_LOST)
    search.deliver("t0")
    start_s = search.now_s
    assert search.experiment.time_runs_out_at_s == start_s + END_REASON_TIMEOUT_S
    assert given_up(search, start_s + END_REASON_TIMEOUT_S - 0.1) == []
    assert search.trial("t0").state is TrialState.CLOSING
    assert given_up(search, start_s + END_REASON_TIMEOUT_S) == ["t0"]
    assert given_up(search, start_s + 1e6) == []
    assert search.experiment.time_runs_out_at_s is None


def test_the_manager_does_not_give_up_a_job_that_ended_in_time():
    search = a_search()
    search.end("t0", JOB_LOST)
    search.deliver("t0")
    search.lose_job("t0", JOB_LOST, "evicted")
    assert search.trial("t0").run.message == "evicted"
    assert search.experiment.time_runs_out_at_s is None
    assert given_up(search, search.now_s + 1e6) == []


def test_the_manager_does_not_give_up_a_job_if_a_new_attempt_of_its_trial_starts():
    search = a_search()
    search.end("t0", JOB_LOST)
    search.deliver("t0")
    search.start("t0", attempt=1)
    assert given_up(search, search.now_s + 1e6) == []


def test_the_manager_waits_without_a_deadline_for_a_job_that_the_cluster_restarts():
    search = a_search()
    search.end("t0", JOB_LOST)
    search.deliver("t0")
    assert given_up(search, search.now_s + END_REASON_TIMEOUT_S) == ["t0"]
    search.handle(JobRequeued("t0"))  # the training service reports that the cluster restarts the job
    assert given_up(search, search.now_s + 1e6) == []
    assert search.trial("t0").state is TrialState.CLOSING
    search.start("t0", attempt=1)
    assert search.trial("t0").state is TrialState.RUNNING
    search.end("t0", JOB_LOST, attempt=1)
    search.deliver("t0", attempt=1)
    assert given_up(search, search.now_s + END_REASON_TIMEOUT_S) == ["t0"], "the job seems to be lost again"


def test_the_manager_gives_up_a_job_if_the_node_of_the_job_stays_unready_until_the_timeout():
    search = a_search()
    search.handle(NodeReadinessChanged("t0", is_ready=False))
    start_s = search.now_s
    assert given_up(search, start_s + NODE_TIMEOUT_S - 0.1) == []
    assert given_up(search, start_s + NODE_TIMEOUT_S) == ["t0"]


def test_a_node_that_is_ready_again_in_time_is_not_lost():
    search = a_search()
    search.handle(NodeReadinessChanged("t0", is_ready=False))
    search.handle(NodeReadinessChanged("t0", is_ready=True))
    assert given_up(search, search.now_s + 1e6) == []


def test_a_node_is_not_lost_while_its_keeper_sends_reports():
    search = a_search()
    search.handle(NodeReadinessChanged("t0", is_ready=False))
    start_s, transports = search.now_s, search.experiment.transports
    transports.connected("t0", "main", start_s + 90)
    assert given_up(search, start_s + NODE_TIMEOUT_S) == []
    assert search.experiment.time_runs_out_at_s == start_s + 90 + NODE_TIMEOUT_S
    assert given_up(search, start_s + 90 + NODE_TIMEOUT_S) == ["t0"]


@pytest.mark.parametrize("max_retries", [0, 1])
def test_the_trial_of_a_lost_node_is_retried_within_the_retry_limit(max_retries):
    search = a_search(max_retries=max_retries)
    search.handle(NodeReadinessChanged("t0", is_ready=False))
    assert given_up(search, search.now_s + NODE_TIMEOUT_S) == ["t0"]
    search.lose_job("t0", JOB_LOST, "node n1 has not been ready for 100 s")
    trial = search.trial("t0")
    if max_retries:
        assert (trial.state, search.submitted) == (TrialState.WAITING, ["t0", "t0-1"])
        # The keeper on the lost node reconnects and reports a result of the lost attempt. The manager ignores this result.
        search.report("t0", "0.1")
        assert trial.run.final is None
    else:
        assert (trial.state, trial.run.message) == (
            TrialState.FAILED,
            "node n1 has not been ready for 100 s",
        )


def test_an_unknown_job_is_not_tracked_as_lost():
    search = a_search()
    search.handle(NodeReadinessChanged("other", is_ready=False))
    assert given_up(search, search.now_s + 1e6) == []
