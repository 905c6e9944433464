"""Trials whose jobs the cluster preempts. The manager starts such a trial again, and this does not count as a retry."""

import pytest
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st
from simulated_search import SimulatedReuse, new_search

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.domain.events import (
    AttemptDelivered,
    AttemptEnded,
    AttemptStarted,
    CancelTrial,
    CloseAttempt,
    ExperimentStopAsked,
    GiveUpJob,
    JobProcessesEnded,
    JobRequeued,
    JobTerminated,
    TaskReported,
    TimePassed,
    TrialStopAsked,
)
from nni_manager.domain.lost_jobs import END_REASON_TIMEOUT_S
from nni_manager.domain.trial import TrialState
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import ExitReason

PREEMPTED, JOB_LOST = ExitReason.PREEMPTED, ExitReason.JOB_LOST


def a_search(**options):
    return new_search(concurrency=1, max_trials=1, reports_preemption=True, **options)


@pytest.mark.parametrize("reason_of_keeper", [None, JOB_LOST, PREEMPTED])
def test_a_preempted_trial_restarts_without_counting_as_a_retry(reason_of_keeper):
    search = a_search(max_retries=0)
    trial_id = search.suggest()
    search.start(trial_id)
    search.report(trial_id, "0.9", final=False)
    if reason_of_keeper:  # the cluster gave the pod its grace period, and the keeper ended the trial
        search.end(trial_id, reason_of_keeper)
        assert any(isinstance(each, CloseAttempt) for each in search.deliver(trial_id))
        assert search.trial(trial_id).state is TrialState.CLOSING
    search.lose_job(trial_id, PREEMPTED)
    trial = search.trial(trial_id)
    assert (trial.state, trial.retries, trial.preemptions) == (TrialState.WAITING, 0, 1)
    assert trial.warning == "the cluster preempted it; restart 1 of 100"
    assert search.submitted == ["t0", "t0-1"]
    search.start(trial_id, attempt=1)
    search.report(trial_id, "0.5", attempt=1)
    search.end(trial_id, attempt=1)
    search.deliver(trial_id, attempt=1)
    assert (trial.state, trial.run.value) == (TrialState.SUCCEEDED, 0.5)


def test_a_trial_does_not_restart_if_only_its_keeper_reports_a_preemption():
    search = a_search()
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, PREEMPTED)
    search.deliver(trial_id)
    search.lose_job(trial_id, JOB_LOST)
    trial = search.trial(trial_id)
    assert (trial.state, trial.run.reason, trial.preemptions) == (TrialState.FAILED, PREEMPTED, 0)


def test_a_deleted_job_does_not_count_as_preempted():
    search = a_search()
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, JOB_LOST)
    search.deliver(trial_id)
    search.lose_job(trial_id, JOB_LOST)
    trial = search.trial(trial_id)
    assert (trial.state, trial.run.reason, trial.preemptions) == (TrialState.FAILED, JOB_LOST, 0)


def test_a_trial_gets_the_message_of_the_cluster_if_the_cluster_ended_it_with_a_signal():
    search = a_search()
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, JOB_LOST)
    search.deliver(trial_id)
    search.lose_job(trial_id, ExitReason.KEEPER_LOST, "pod t0 was evicted: the node was low on memory")
    trial = search.trial(trial_id)
    assert (trial.state, trial.run.reason) == (TrialState.FAILED, JOB_LOST)
    assert trial.run.message == "pod t0 was evicted: the node was low on memory"


def test_a_trial_that_the_cluster_ended_with_a_signal_is_retried_after_its_job_is_lost():
    search = a_search(max_retries=1)
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, JOB_LOST)
    search.deliver(trial_id)
    search.lose_job(trial_id, JOB_LOST)
    trial = search.trial(trial_id)
    assert (trial.state, trial.retries, trial.preemptions) == (TrialState.WAITING, 1, 0)
    search.start(trial_id, attempt=1)
    search.end(trial_id, attempt=1)
    search.deliver(trial_id, attempt=1)
    assert trial.state is TrialState.SUCCEEDED


def test_a_trial_whose_keeper_got_a_signal_is_retried_even_if_the_cluster_reports_no_preemptions():
    search = new_search(concurrency=1, max_trials=1, max_retries=1)
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, JOB_LOST)
    search.deliver(trial_id)
    assert search.trial(trial_id).state is TrialState.CLOSING
    search.lose_job(trial_id, JOB_LOST)
    trial = search.trial(trial_id)
    assert (trial.state, trial.retries) == (TrialState.WAITING, 1)
    search.start(trial_id, attempt=1)
    search.end(trial_id, JOB_LOST, attempt=1)
    search.deliver(trial_id, attempt=1)
    assert (trial.state, trial.retries) == (TrialState.FAILED, 1), (
        "no retries are left, so nothing is waited for"
    )


def test_a_trial_of_a_lost_job_fails_immediately_if_the_cluster_does_not_report_preemptions():
    search = new_search(concurrency=1, max_trials=1)
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, JOB_LOST)
    search.deliver(trial_id)
    assert search.trial(trial_id).state is TrialState.FAILED


@pytest.mark.parametrize("reason_of_keeper", [JOB_LOST, PREEMPTED])
def test_a_preempted_trial_without_restarts_left_fails_as_preempted_whatever_its_keeper_reported(
    reason_of_keeper,
):
    search = a_search(max_preemptions=0)
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, reason_of_keeper)
    search.deliver(trial_id)
    search.lose_job(trial_id, PREEMPTED)
    trial = search.trial(trial_id)
    assert (trial.state, trial.run.reason, trial.preemptions) == (TrialState.FAILED, PREEMPTED, 0)


@given(most=st.integers(0, 5), retries=st.integers(0, 2))
def test_a_preempted_trial_is_restarted_at_most_max_preemptions_times(most, retries):
    search = a_search(max_preemptions=most, max_retries=retries)
    trial_id = search.suggest()
    for attempt in range(most + 1):
        assert search.trial(trial_id).state is TrialState.WAITING
        search.start(trial_id, attempt)
        search.lose_job(trial_id, PREEMPTED)
    trial = search.trial(trial_id)
    assert (trial.state, trial.run.reason) == (TrialState.FAILED, PREEMPTED)
    assert (trial.preemptions, trial.retries) == (most, 0)
    assert len(set(search.submitted)) == most + 1


@given(st.lists(st.sampled_from([PREEMPTED, JOB_LOST]), max_size=8))
def test_every_restart_gets_a_new_job_and_is_counted_as_a_preemption_or_a_retry(losses):
    search = a_search(max_retries=99)
    trial_id = search.suggest()
    for attempt, reason in enumerate(losses):
        search.start(trial_id, attempt)
        search.lose_job(trial_id, reason)
    trial = search.trial(trial_id)
    assert (trial.preemptions, trial.retries) == (losses.count(PREEMPTED), losses.count(JOB_LOST))
    assert len(set(search.submitted)) == len(losses) + 1


@pytest.mark.parametrize("reason", [ExitReason.SUCCEEDED, ExitReason.NONZERO_EXIT])
def test_a_trial_that_ended_before_the_preemption_is_not_restarted(reason):
    search = a_search()
    trial_id = search.suggest()
    search.start(trial_id)
    search.report(trial_id, "0.5")
    search.end(trial_id, reason)
    search.deliver(trial_id)
    state = search.trial(trial_id).state
    search.lose_job(trial_id, PREEMPTED)
    assert state.is_terminal
    assert (search.trial(trial_id).state, len(search.submitted)) == (state, 1)


def test_a_trial_succeeds_if_it_reported_a_final_result_before_the_signal_of_the_cluster():
    search = a_search()
    trial_id = search.suggest()
    search.start(trial_id)
    search.report(trial_id, "0.5", offset=0)
    search.end(trial_id, JOB_LOST, metrics_size_at_stop=100)
    search.deliver(trial_id)
    assert search.trial(trial_id).state is TrialState.SUCCEEDED


def test_a_user_can_stop_a_trial_while_the_manager_waits_for_the_end_of_its_job():
    search = a_search()
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, JOB_LOST)
    search.deliver(trial_id)
    search.handle(TrialStopAsked(trial_id, ExitReason.STOPPED_BY_USER, 40.0))
    search.handle(JobTerminated("t0", PREEMPTED, "gone", 60.0))
    assert search.trial(trial_id).state is TrialState.USER_CANCELED


def test_a_stopped_experiment_restarts_no_preempted_trial():
    search = a_search()
    trial_id = search.suggest()
    search.start(trial_id)
    search.handle(ExperimentStopAsked(40.0))
    search.lose_job(trial_id, PREEMPTED)
    assert search.trial(trial_id).state is TrialState.USER_CANCELED


def test_a_resumed_manager_restarts_a_trial_whose_preemption_is_reported_only_after_the_resume():
    search = a_search()
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, JOB_LOST)
    search.deliver(trial_id)
    search = search.resumed()
    # The store does not contain `ended`, so the resumed manager does not have this field.
    search.trial(trial_id).run.ended = None
    search.experiment.state = type(search.state).RUNNING
    search.lose_job(trial_id, PREEMPTED)
    assert (search.trial(trial_id).state, search.trial(trial_id).preemptions) == (TrialState.WAITING, 1)


def test_a_trial_whose_attempt_was_lost_runs_again_when_its_job_starts_another_attempt():
    search = a_search()
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, JOB_LOST)
    search.deliver(trial_id)
    search.start(trial_id, attempt=1)
    assert search.trial(trial_id).state is TrialState.RUNNING


def test_the_trial_of_a_preempted_reused_job_restarts_in_another_job():
    search = SimulatedReuse(concurrency=1, max_trials=1, reports_preemption=True)
    (job_id,) = search.submitted
    search.idle(job_id)
    search.start("t0")
    key = search.next_attempt("t0")
    search.handle(AttemptEnded(TrialEnded(key, JOB_LOST, 143, 20.0, 30.0, {})))
    search.deliver("t0")
    search.handle(JobTerminated(job_id, PREEMPTED, "gone", 60.0))
    trial = search.experiment.trials["t0"]
    assert (trial.state, trial.preemptions, trial.retries) == (TrialState.WAITING, 1, 0)
    assert len(search.submitted) == 2


def a_cut_off_trial(*reasons):
    """A reused job whose tasks have ended for these reasons; all their data is stored."""
    names = [f"main-{task}" for task in range(len(reasons))]
    completion = Completion((TaskRole("main", len(reasons), min_succeeded_tasks=-1),))
    search = SimulatedReuse(concurrency=1, max_trials=1, reports_preemption=True, completion=completion)
    for name in names:
        search.idle(task=name)
    for name in names:
        search.start("t0", task=name)
    for name, reason in zip(names, reasons, strict=True):
        key = search.next_attempt("t0", name)
        search.handle(AttemptEnded(TrialEnded(key, reason, 143, 20.0, 30.0, {})))
        search.deliver("t0", name)
    assert search.trial("t0").state is TrialState.CLOSING
    return search


@pytest.mark.parametrize("is_requeued", [True, False])
@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_reused_job_that_the_cluster_starts_again_continues_its_trial(is_requeued, is_resumed):
    search = a_cut_off_trial(JOB_LOST)
    if is_requeued:
        search.handle(JobRequeued("env-0"))
    if is_resumed:
        search = search.resumed()
    before = len(search.dispatched)
    search.idle()
    assert search.dispatched[before:] == [("env-0", "t0", "main-0")]
    assert search.experiment.scheduler.lost.next_deadline_s is None, "the restarted job is not given up"
    search.start("t0", attempt=1)
    assert search.trial("t0").state is TrialState.RUNNING
    search.report("t0", "0.5")
    search.end("t0")
    search.deliver("t0")
    trial = search.trial("t0")
    assert (trial.state, trial.run.value, trial.retries) == (TrialState.SUCCEEDED, 0.5, 0)


def test_each_task_of_a_restarted_job_gets_the_trial_again_unless_the_task_had_ended_by_itself():
    search = a_cut_off_trial(JOB_LOST, JOB_LOST)
    before = len(search.dispatched)
    search.idle(task="main-1")
    search.idle(task="main-0")
    assert search.dispatched[before:] == [("env-0", "t0", "main-1"), ("env-0", "t0", "main-0")]

    search = SimulatedReuse(
        max_trials=1,
        reports_preemption=True,
        completion=Completion((TaskRole("main", 2, min_succeeded_tasks=-1),)),
    )
    for task in ("main-0", "main-1"):
        search.idle(task=task)
        search.start("t0", task=task)
    search.end("t0", "main-1")
    search.deliver("t0", "main-1")
    key = search.next_attempt("t0", "main-0")
    search.handle(AttemptEnded(TrialEnded(key, JOB_LOST, 143, 20.0, 30.0, {})))
    search.deliver("t0", "main-0")
    before = len(search.dispatched)
    # The keeper repeats its idle report after a lost connection. Its task has ended by itself, so it does not get the trial.
    search.idle(task="main-1")
    assert search.dispatched[before:] == []


@pytest.mark.parametrize("preemptions", [0, 2])
def test_a_queued_trial_does_not_fail_if_its_jobs_are_preempted_before_their_keepers_connect(
    preemptions,
):
    search = SimulatedReuse(concurrency=1, max_trials=1, reports_preemption=True)
    for number in range(preemptions + 1):
        search.handle(JobTerminated(f"env-{number}", PREEMPTED, "gone", 60.0))
    trial = search.trial("t0")
    assert (trial.state, trial.preemptions, trial.retries) == (TrialState.WAITING, preemptions + 1, 0)
    assert len(search.submitted) == preemptions + 2
    search.idle(search.submitted[-1])
    search.start("t0")
    assert trial.state is TrialState.RUNNING


def test_a_job_whose_processes_have_ended_is_not_given_up_while_its_files_are_read():
    search = a_search()
    trial_id = search.suggest()
    search.start(trial_id)
    search.end(trial_id, JOB_LOST)
    search.deliver(trial_id)
    search.handle(JobProcessesEnded("t0"))
    search.now_s = 1000.0
    assert not any(isinstance(effect, GiveUpJob) for effect in search.handle(TimePassed()))
    search.lose_job(trial_id, PREEMPTED)
    assert search.trial(trial_id).preemptions == 1


def a_job_whose_first_task_the_cluster_ends():
    """A job for one trial with two tasks, one of which still runs."""
    search = a_search(completion=Completion((TaskRole("main", 2, min_succeeded_tasks=-1),)))
    trial_id = search.suggest()
    keys = [AttemptKey(trial_id, attempt_id(0), task) for task in ("main-0", "main-1")]
    for key in keys:
        search.handle(AttemptStarted(key, 20.0))
    effects = search.handle(AttemptEnded(TrialEnded(keys[0], JOB_LOST, 143, 20.0, 30.0, {})))
    assert search.trial(trial_id).state is TrialState.CLOSING
    return search, keys, effects


def test_the_manager_does_not_stop_a_job_if_the_cluster_ends_one_of_its_tasks():
    """The cluster would regard such a stop as a user's, and would not start the job again."""
    search, keys, effects = a_job_whose_first_task_the_cluster_ends()
    assert not any(isinstance(each, CancelTrial) for each in effects)
    search.handle(AttemptDelivered(keys[0]))
    search.lose_job(keys[0].trial_id, PREEMPTED)
    trial = search.trial(keys[0].trial_id)
    assert (trial.state, trial.preemptions) == (TrialState.WAITING, 1)


@pytest.mark.parametrize("order", [("main-0", "main-1"), ("main-1", "main-0")])
def test_the_manager_does_not_stop_a_job_that_the_cluster_has_started_again(order):
    """The tasks of the restarted job start in any order. Before, only one task had reported metrics of the trial."""
    search, keys, _ = a_job_whose_first_task_the_cluster_ends()
    search.handle(TaskReported(keys[0]))
    search.handle(AttemptDelivered(keys[0]))
    search.handle(AttemptEnded(TrialEnded(keys[1], JOB_LOST, 143, 20.0, 30.0, {})))
    search.handle(AttemptDelivered(keys[1]))
    effects = []
    for task in order:
        effects += search.handle(AttemptStarted(AttemptKey(keys[0].trial_id, attempt_id(1), task), 50.0))
    assert not any(isinstance(each, CancelTrial) for each in effects)
    assert search.trial(keys[0].trial_id).state is TrialState.RUNNING


def test_the_manager_gives_up_a_job_if_the_cluster_does_not_report_why_it_ended_one_of_the_tasks():
    search, keys, _ = a_job_whose_first_task_the_cluster_ends()
    search.now_s += END_REASON_TIMEOUT_S
    assert [each.job.job_id for each in search.handle(TimePassed()) if isinstance(each, GiveUpJob)] == ["t0"]
    search.lose_job(keys[0].trial_id, JOB_LOST)
    assert search.trial(keys[0].trial_id).state is TrialState.FAILED


@pytest.mark.parametrize("has_second_task", [True, False])
def test_stopping_a_trial_ends_its_job_even_if_the_cluster_has_already_ended_its_keeper(has_second_task):
    """The cluster may only have suspended the job. Without a stop of the job, it would run the trial again later."""
    if has_second_task:
        search, keys, _ = a_job_whose_first_task_the_cluster_ends()
        trial_id = keys[0].trial_id
    else:
        search = a_search()
        trial_id = search.suggest()
        search.start(trial_id)
        search.end(trial_id, JOB_LOST)
        search.deliver(trial_id)
    effects = search.handle(TrialStopAsked(trial_id, ExitReason.STOPPED_BY_USER, 40.0))
    (cancel,) = [each for each in effects if isinstance(each, CancelTrial)]
    assert (cancel.trial.trial_id, cancel.ends_job) == (trial_id, True)
    search.now_s += END_REASON_TIMEOUT_S
    assert not any(isinstance(each, GiveUpJob) for each in search.handle(TimePassed()))
    search.lose_job(trial_id, JOB_LOST)
    assert search.trial(trial_id).state is TrialState.USER_CANCELED


@pytest.mark.parametrize("other_is_idle_first", [True, False])
def test_a_restarted_job_also_runs_its_trial_in_a_task_that_was_stopped_because_another_task_was_lost(
    other_is_idle_first,
):
    search = a_cut_off_trial(JOB_LOST, ExitReason.TRIAL_OVER)
    before = len(search.dispatched)
    tasks = ["main-1", "main-0"] if other_is_idle_first else ["main-0", "main-1"]
    for task in tasks:
        search.idle(task=task)
    assert sorted(search.dispatched[before:]) == [("env-0", "t0", "main-0"), ("env-0", "t0", "main-1")]
    for task in ("main-0", "main-1"):
        search.start("t0", task=task, attempt=1)
    assert search.trial("t0").state is TrialState.RUNNING
    for task in ("main-0", "main-1"):
        search.end("t0", task)
        search.deliver("t0", task)
    assert search.trial("t0").state is TrialState.SUCCEEDED
