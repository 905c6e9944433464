"""How the completion policy decides the end of a trial with several tasks."""

import pytest
from attempts import attempt_id

from nni_manager.domain.completion import Completion, TaskRole
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


def test_a_trial_needs_two_successes_if_the_policy_requires_two() -> None:
    first, second = end_of("worker-1"), end_of("worker-0")
    assert PS_AND_WORKERS.decisive([first]) is None
    assert PS_AND_WORKERS.decisive([first, second]) is second


def test_the_first_success_ends_the_trial_if_the_policy_requires_one() -> None:
    one_is_enough = Completion((TaskRole("ps", 1, 1, -1), TaskRole("worker", 2, 1, 1)))
    first = end_of("worker-1")
    assert one_is_enough.decisive([first]) is first


def test_the_first_task_failure_ends_the_trial_if_the_policy_allows_no_failure() -> None:
    failure = end_of("ps-0", succeeds=False)
    assert PS_AND_WORKERS.decisive([end_of("worker-0"), failure]) is failure


def test_no_task_end_has_an_effect_after_the_first_decisive_task_end() -> None:
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
