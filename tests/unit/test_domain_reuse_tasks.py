"""Replaced keepers of a reused job, and jobs with several tasks."""

import pytest
from attempts import attempt_id
from simulated_search import SimulatedReuse

from nni_manager.domain.attempts import AttemptReport
from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.domain.events import (
    AttemptLost,
    AttemptOrphaned,
    AttemptStarted,
    CancelTrial,
    CloseAttempt,
    DrainAttempt,
    ManagerReady,
    TrialStopAsked,
)
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.domain.trial import TrialState
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.reasons import ExitReason

T0 = AttemptKey("t0", attempt_id(0), "main-0")


@pytest.fixture
def running() -> SimulatedReuse:
    search = SimulatedReuse()
    search.idle()
    search.start("t0")
    return search


def test_a_trial_is_dispatched_again_if_no_end_is_found_while_its_orphaned_attempt_is_drained(
    running: SimulatedReuse,
) -> None:
    running.report("t0", "1")
    assert running.handle(AttemptOrphaned(T0)) == [DrainAttempt(T0)]
    running.idle()
    assert len(running.dispatched) == 1, "not before the end of the first attempt is known"
    running.handle(AttemptLost(T0, 15.0))
    assert running.dispatched[-1] == ("env-0", "t0", "main-0")
    running.start("t0", attempt=1)
    trial = running.trial("t0")
    assert (trial.state, trial.run.attempt, trial.run.final) == (TrialState.RUNNING, 1, None)


def test_a_job_gets_the_next_trial_after_the_end_of_an_orphaned_attempt_is_found(
    running: SimulatedReuse,
) -> None:
    running.handle(AttemptOrphaned(T0))
    running.idle()
    running.end("t0")
    running.deliver("t0")
    assert running.trial("t0").state is TrialState.SUCCEEDED
    assert running.dispatched[-1] == ("env-0", "t1", None)


def test_a_stopping_trial_is_canceled_when_its_orphaned_attempt_is_lost(running: SimulatedReuse) -> None:
    running.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 12.0))
    running.handle(AttemptOrphaned(T0))
    running.handle(AttemptLost(T0, 15.0))
    assert running.trial("t0").state is TrialState.USER_CANCELED


@pytest.mark.parametrize("reuses_jobs", [True, False])
def test_an_orphaned_attempt_is_not_drained_if_the_trial_has_ended_or_jobs_are_not_reused(
    reuses_jobs: bool,
) -> None:
    search = SimulatedReuse()
    search.experiment.scheduler.reuses_jobs = reuses_jobs
    search.idle()
    search.start("t0")
    if reuses_jobs:
        search.run("t0")
    assert search.handle(AttemptOrphaned(T0)) == []


PAIR = Completion((TaskRole("ps", 1, 1, -1), TaskRole("worker", 2, 1, 2)))


TASKS = ("ps-0", "worker-0", "worker-1")


@pytest.fixture
def team() -> SimulatedReuse:
    search = SimulatedReuse(completion=PAIR)
    for task in TASKS:
        assert search.dispatched == []
        search.idle(task=task)
    for task in TASKS:
        search.start("t0", task)
    return search


def test_a_trial_is_dispatched_when_all_tasks_of_a_job_are_idle(team: SimulatedReuse) -> None:
    assert team.dispatched == [("env-0", "t0", None)]


def test_the_metrics_of_a_trial_come_from_the_task_that_reports_first_and_another_reporter_causes_a_warning(
    team: SimulatedReuse,
) -> None:
    team.report("t0", "0.5", "worker-1")
    team.report("t0", "0.9", "worker-0")
    trial = team.trial("t0")
    assert (trial.run.reporter, trial.run.final) == ("worker-1", "0.5")
    assert "worker-0" in trial.warning


def test_the_completion_policy_ends_the_trial_and_stops_the_other_tasks(team: SimulatedReuse) -> None:
    for task in ("worker-0", "worker-1"):
        assert team.trial("t0").state is TrialState.RUNNING
        team.end("t0", task)
        team.deliver("t0", task)
    assert team.trial("t0").state is TrialState.CLOSING
    assert [effect.trial.trial_id for effect in team.all_of(CancelTrial)] == ["t0"]
    team.end("t0", "ps-0", succeeds=False)
    team.deliver("t0", "ps-0")
    assert team.trial("t0").state is TrialState.SUCCEEDED


def test_each_task_is_closed_when_the_bytes_of_the_task_are_delivered(team: SimulatedReuse) -> None:
    team.end("t0", "worker-0")
    team.deliver("t0", "worker-0")
    assert team.all_of(CloseAttempt) == [CloseAttempt(AttemptKey("t0", attempt_id(0), "worker-0"))]


def test_a_failed_task_ends_the_trial_for_all_tasks(team: SimulatedReuse) -> None:
    team.end("t0", "worker-1", succeeds=False)
    team.deliver("t0", "worker-1")
    for task in ("ps-0", "worker-0"):
        team.end("t0", task, succeeds=False)
        team.deliver("t0", task)
    assert (team.trial("t0").state, team.trial("t0").run.exit_code) == (TrialState.FAILED, 1)


def test_a_task_that_starts_after_the_end_of_the_trial_is_stopped() -> None:
    search = SimulatedReuse(completion=PAIR)
    for task in TASKS:
        search.idle(task=task)
    search.start("t0", "worker-0")
    search.end("t0", "worker-0", succeeds=False)
    search.start("t0", "ps-0")
    assert len(search.all_of(CancelTrial)) == 1


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_repeated_start_report_stops_an_ended_trial_only_if_the_trial_has_several_tasks(
    tasks: int,
) -> None:
    search = SimulatedReuse(completion=Completion((TaskRole("worker", tasks, 1, -1),)))
    names = [f"worker-{number}" for number in range(tasks)]
    for task in names:
        search.idle(task=task)
    search.start("t0", names[0])
    search.end("t0", names[0], succeeds=False)
    # The trial is now as in a manager that has just started and has no report of this attempt.
    search.trial("t0").attempts[names[0]].apply(AttemptReport.DISCARDED)
    search.start("t0", names[0])
    assert len(search.all_of(CancelTrial)) == tasks - 1


def test_an_ended_trial_succeeds_even_if_a_task_is_lost_without_an_end_report(
    team: SimulatedReuse,
) -> None:
    for task in ("worker-0", "worker-1"):
        team.end("t0", task)
        team.deliver("t0", task)
    team.lose("env-0")
    assert team.trial("t0").state is TrialState.SUCCEEDED


def test_a_task_that_starts_when_the_trial_is_terminal_is_closed(team: SimulatedReuse) -> None:
    for task in TASKS:
        team.end("t0", task)
        team.deliver("t0", task)
    assert team.trial("t0").state is TrialState.SUCCEEDED
    late = AttemptKey("t0", attempt_id(1), "ps-0")
    assert team.handle(AttemptStarted(late, 40.0)) == [CloseAttempt(late)]


def test_a_trial_ends_when_its_last_task_ends_if_it_needs_all_tasks() -> None:
    search = SimulatedReuse(completion=Completion((TaskRole("worker", 2, 1, -1),)))
    for task in ("worker-0", "worker-1"):
        search.idle(task=task)
    for task in ("worker-0", "worker-1"):
        search.start("t0", task)
    search.end("t0", "worker-0", at_s=20.0)
    search.deliver("t0", "worker-0")
    search.end("t0", "worker-1", at_s=120.0)
    assert search.trial("t0").state is TrialState.CLOSING
    search.deliver("t0", "worker-1")
    assert (search.trial("t0").state, search.trial("t0").run.ended_at_s) == (TrialState.SUCCEEDED, 120.0)


def test_a_restarted_task_leaves_the_results_of_other_tasks_unchanged(team: SimulatedReuse) -> None:
    team.report("t0", "0.5", "worker-0")
    team.end("t0", "worker-0")
    team.start("t0", "ps-0", attempt=1)
    trial = team.trial("t0")
    assert (
        trial.run.final,
        trial.run.attempt,
        trial.run.reporter,
        {ended.key.task for ended in trial.ends},
    ) == (
        "0.5",
        0,
        "worker-0",
        {"worker-0"},
    )
    team.end("t0", "worker-1")
    assert trial.state is TrialState.CLOSING


def test_a_restart_of_the_reporting_task_discards_the_earlier_results_of_the_trial(
    team: SimulatedReuse,
) -> None:
    team.report("t0", "0.5", "worker-0")
    team.end("t0", "worker-1")
    team.start("t0", "worker-0", attempt=1)
    trial = team.trial("t0")
    assert (trial.run.final, trial.run.attempt, {ended.key.task for ended in trial.ends}) == (
        None,
        1,
        {"worker-1"},
    )


def test_tasks_that_ended_in_the_previous_run_do_not_count_as_ended_after_a_restart_of_the_whole_job() -> (
    None
):
    search = SimulatedReuse(completion=Completion((TaskRole("worker", 2, 1, -1),)))
    for task in ("worker-0", "worker-1"):
        search.idle(task=task)
    for task in ("worker-0", "worker-1"):
        search.start("t0", task)
    search.end("t0", "worker-1", succeeds=False)
    assert search.trial("t0").state is TrialState.CLOSING
    search.start("t0", "worker-0", attempt=1)
    search.end("t0", "worker-0")
    assert search.trial("t0").state is TrialState.RUNNING, "the new attempt of worker-1 has not ended"


def test_a_trial_succeeds_despite_an_orphaned_task_that_the_completion_policy_does_not_need(
    team: SimulatedReuse,
) -> None:
    for task in ("worker-0", "worker-1"):
        team.end("t0", task)
        team.deliver("t0", task)
    key = AttemptKey("t0", attempt_id(0), "ps-0")
    assert team.handle(AttemptOrphaned(key)) == [DrainAttempt(key)]
    team.handle(AttemptLost(key, 15.0))
    assert team.trial("t0").state is TrialState.SUCCEEDED


def test_a_job_gets_the_next_trial_only_after_the_replaced_keeper_of_a_task_is_idle_again(
    team: SimulatedReuse,
) -> None:
    team.idle(task="ps-0")
    team.handle(AttemptLost(AttemptKey("t0", attempt_id(0), "ps-0"), 15.0))
    team.start("t0", "ps-0", attempt=1)
    for task in TASKS:
        team.end("t0", task)
        team.deliver("t0", task)
    for task in ("worker-0", "worker-1"):
        team.idle(task=task)
    assert "t1" not in [each[1] for each in team.dispatched]
    team.idle(task="ps-0")
    assert team.dispatched[-1] == ("env-0", "t1", None)


def test_the_loss_of_an_attempt_has_no_effect_if_its_trial_has_ended(running: SimulatedReuse) -> None:
    running.end("t0")
    running.deliver("t0")
    assert running.handle(AttemptLost(T0, 40.0)) == []


def test_a_restarted_manager_still_counts_the_tasks_that_have_already_ended(team: SimulatedReuse) -> None:
    for task in ("worker-0", "worker-1"):
        team.end("t0", task)
    # The manager stored the state RUNNING before the second task ended, and restarted before it stored the end.
    team.trial("t0").state = TrialState.RUNNING
    team.trial("t0").run.reason = None
    before = team.experiment
    after = SimulatedReuse.__new__(SimulatedReuse)
    after.effects = []
    after.experiment = ExperimentCore(
        "exp", before.budget.limits, MAXIMIZE, reuses_jobs=True, completion=PAIR, state=before.state
    )
    trial = team.trial("t0")
    trial.run.ended = None
    trial.attempts["worker-0"].apply(AttemptReport.DELIVERED)
    trial.attempts["worker-1"].apply(AttemptReport.DELIVERED)
    after.experiment.restore([trial])
    after.experiment.scheduler.restore(
        [type(job)(job.job_id, ever_connected=True) for job in before.jobs.live.values()], []
    )
    after.handle(ManagerReady())
    assert trial.state is TrialState.CLOSING
    assert len(after.all_of(CancelTrial)) == 1, "the remaining parameter server is stopped"
    after.end("t0", "ps-0", succeeds=False)
    after.deliver("t0", "ps-0")
    assert trial.state is TrialState.SUCCEEDED
