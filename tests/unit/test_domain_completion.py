"""How the completion policy decides the end of a trial with several tasks."""

import pytest
from attempts import attempt_id
from simulated_search import new_search

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.domain.events import (
    AttemptDelivered,
    AttemptEnded,
    AttemptStarted,
    JobTerminated,
    MetricsStored,
    TaskReported,
)
from nni_manager.domain.trial import TrialState
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import ExitReason


def end_of(task: str, *, succeeds: bool = True) -> TrialEnded:
    reason = ExitReason.SUCCEEDED if succeeds else ExitReason.NONZERO_EXIT
    return TrialEnded(AttemptKey("abcde", attempt_id(0), task), reason, 0 if succeeds else 1, 1.0, 2.0)


PS_AND_WORKERS = Completion((TaskRole("ps", 1, 1, -1), TaskRole("worker", 2, 1, 2)))


@pytest.mark.parametrize("succeeds", [True, False])
def test_the_end_of_the_only_task_ends_the_trial(succeeds) -> None:
    end = end_of("main-0", succeeds=succeeds)
    assert Completion().decisive([end]) is end


def test_a_trial_needs_two_successful_tasks_if_the_policy_requires_two() -> None:
    first, second = end_of("worker-1"), end_of("worker-0")
    assert PS_AND_WORKERS.decisive([first]) is None
    assert PS_AND_WORKERS.decisive([first, second]) is second


def test_the_first_successful_task_ends_the_trial_if_the_policy_requires_one() -> None:
    one_is_enough = Completion((TaskRole("ps", 1, 1, -1), TaskRole("worker", 2, 1, 1)))
    first = end_of("worker-1")
    assert one_is_enough.decisive([first]) is first


def test_the_first_task_failure_ends_the_trial_if_the_policy_allows_no_failure() -> None:
    failure = end_of("ps-0", succeeds=False)
    assert PS_AND_WORKERS.decisive([end_of("worker-0"), failure]) is failure


def test_only_the_first_decisive_task_end_determines_how_the_trial_ends() -> None:
    failure = end_of("worker-0", succeeds=False)
    assert PS_AND_WORKERS.decisive([failure, end_of("worker-1"), end_of("ps-0")]) is failure


def test_a_tolerated_failure_does_not_hide_the_success_of_another_task() -> None:
    lenient = Completion((TaskRole("worker", 2, -1, -1),))
    success, failure = end_of("worker-0"), end_of("worker-1", succeeds=False)
    assert lenient.decisive([failure]) is None
    assert lenient.decisive([failure, success]) is success
    assert lenient.decisive([success, failure]) is success


def test_the_trial_fails_when_every_task_has_failed() -> None:
    lenient = Completion((TaskRole("worker", 2, -1, -1),))
    failures = [end_of("worker-0", succeeds=False), end_of("worker-1", succeeds=False)]
    assert lenient.decisive(failures) is failures[-1]


def test_a_role_name_may_contain_dashes() -> None:
    named = Completion((TaskRole("my-ps", 1, -1, -1), TaskRole("my-worker", 1, 1, 1)))
    assert named.decisive([end_of("my-ps-0", succeeds=False)]) is None
    assert named.tasks == 2


def test_repeated_end_reports_of_stopped_tasks_do_not_change_the_decision() -> None:
    def stopped(task: str) -> TrialEnded:
        return TrialEnded(AttemptKey("abcde", attempt_id(0), task), ExitReason.TRIAL_OVER, 143, 1.0, 2.0)

    success, failure = end_of("worker-0"), end_of("worker-1", succeeds=False)
    one_is_enough = Completion((TaskRole("ps", 1, 1, -1), TaskRole("worker", 2, 1, 1)))
    assert one_is_enough.decisive([stopped("ps-0"), stopped("worker-1")]) is None
    assert one_is_enough.decisive([stopped("ps-0"), stopped("worker-1"), success]) is success
    assert one_is_enough.decisive([stopped("ps-0"), failure]) is failure
    lenient = Completion((TaskRole("worker", 2, -1, -1),))
    assert lenient.decisive([failure, stopped("worker-0")]) is failure
    assert Completion().decisive([stopped("main-0")]) is not None, "the only task always decides"


def a_trial_that_lost_task_2(reporter: str, *, is_final: bool, **limits: int):
    """A trial of three tasks whose job tolerates one failure: two tasks succeed, the last is lost."""
    search = new_search(
        concurrency=1, max_trials=1, completion=Completion((TaskRole("worker", 3, 2, 3),)), **limits
    )
    search.suggest()
    keys = [AttemptKey("t0", attempt_id(0), f"worker-{index}") for index in range(3)]
    for key in keys:
        search.handle(AttemptStarted(key, 10.0))
        if key.task == reporter:
            search.handle(TaskReported(key))
            search.handle(MetricsStored(key, ((is_final, "0.7"),)))
    for key in keys[:2]:
        search.handle(AttemptEnded(TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 20.0)))
        search.handle(AttemptDelivered(key))
    return search


@pytest.mark.parametrize("reporter", ["worker-0", "worker-2"])
def test_a_trial_succeeds_with_its_job_if_the_completion_policy_tolerates_the_lost_task(
    reporter: str,
) -> None:
    search = a_trial_that_lost_task_2(reporter, is_final=True)
    assert search.trial("t0").state is TrialState.RUNNING, "the lost task may still report its end"
    search.handle(JobTerminated("t0", ExitReason.KEEPER_LOST, "exit code 0", 60.0, is_clean=True))
    trial = search.trial("t0")
    assert (trial.state, trial.run.value, trial.run.exit_code) == (TrialState.SUCCEEDED, 0.7, 0)
    assert "lost without a report of their end: worker-2" in trial.warning
    assert [each.value for each in search.tuner_results] == [0.7]


@pytest.mark.parametrize(
    ("reporter", "is_clean"),
    [
        # The job has not succeeded, so it may have needed the lost task.
        ("worker-0", False),
        # The job has succeeded, but the lost task was the one that reports results, so the final result is lost.
        ("worker-2", True),
    ],
)
def test_a_trial_is_retried_if_its_lost_task_may_have_been_needed(reporter: str, is_clean: bool) -> None:
    search = a_trial_that_lost_task_2(reporter, is_final=False, max_retries=1)
    trial = search.trial("t0")
    search.handle(JobTerminated("t0", ExitReason.KEEPER_LOST, "gone", 60.0, is_clean=is_clean))
    assert (trial.state, trial.retries) == (TrialState.WAITING, 1)
