"""The end of a search if all of its first trials fail because of an error in the training code."""

import pytest
from simulated_search import new_search

from nni_manager.domain.events import ManagerReady
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.fail_fast import FailFast
from nni_manager.domain.tracebacks import raised_at
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from trial_keeper.wire.reasons import ExitReason

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/ada/code/train.py", line 12, in <module>
    rate = parameters["lr"]
  File "/venv/lib/python3.11/site-packages/box/box.py", line 99, in __getitem__
    raise KeyError(name)
KeyError: 'lr'
"""


def a_trial(state=TrialState.FAILED, reason=ExitReason.NONZERO_EXIT, message=TRACEBACK):
    trial = Trial("t", 0, {}, {}, 1.0, "t", state, run=TrialRun(attempt=0))
    trial.run.reason, trial.run.exit_code, trial.run.message = reason, 1, message
    return trial


def test_the_search_ends_at_the_failure_limit_and_reports_the_common_cause():
    failures = FailFast()
    assert [failures.note(a_trial(), 3) for _ in range(2)] == ["", ""]
    error = failures.note(a_trial(), 3)
    assert error.startswith("cannot continue the search: the last 3 trials failed, and none has succeeded: ")
    assert (
        ": exit code 1: KeyError: 'lr' (train.py:12); fix the training code, then run `nnictl resume`, or "
        in error
    )
    assert failures.note(a_trial(), 3) == "", "the error is reported once"


def test_the_error_names_the_most_frequent_failure_cause_with_its_count():
    failures = FailFast()
    for message in (TRACEBACK, "", TRACEBACK):
        error = failures.note(a_trial(message=message), 3)
    assert "none has succeeded, 2 of them with: exit code 1: KeyError: 'lr' (train.py:12); " in error


@pytest.mark.parametrize("state", [TrialState.SUCCEEDED, TrialState.EARLY_STOPPED, TrialState.SYS_CANCELED])
def test_fail_fast_allows_any_number_of_failures_after_a_success(state):
    failures = FailFast()
    failures.note(a_trial(), 2)
    failures.note(a_trial(state, ExitReason.SUCCEEDED), 2)
    assert [failures.note(a_trial(), 2) for _ in range(9)] == [""] * 9


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (TrialState.FAILED, ExitReason.JOB_LOST),
        (TrialState.FAILED, ExitReason.KEEPER_LOST),
        (TrialState.FAILED, ExitReason.MOUNT),
        (TrialState.FAILED, ExitReason.VERSION),
        (TrialState.USER_CANCELED, ExitReason.STOPPED_BY_USER),
    ],
)
def test_fail_fast_ignores_failures_of_the_cluster_and_trials_stopped_by_the_user(state, reason):
    failures = FailFast()
    assert [failures.note(a_trial(state, reason), 1) for _ in range(3)] == [""] * 3
    assert failures.note(a_trial(), 1) != ""


def test_the_failure_count_is_reset_by_a_resume_and_its_limit_is_disabled_by_the_value_0():
    failures = FailFast()
    failures.note(a_trial(), 2)
    failures.restart()
    assert failures.note(a_trial(), 2) == ""
    assert failures.note(a_trial(), 2) != ""
    assert [FailFast().note(a_trial(), 0) for _ in range(3)] == [""] * 3


def test_an_experiment_ends_at_the_failure_limit_but_requests_trials_again_after_a_resume():
    search = new_search(concurrency=1, max_trials=9, fail_fast=2)
    for state in (ExperimentState.RUNNING, ExperimentState.ERROR):
        search.run(search.suggest(), None, ExitReason.NONZERO_EXIT)
        assert search.state is state
    assert search.experiment.error.startswith("cannot continue the search: the last 2 trials failed")
    assert (search.requests, search.finishes) == ([], 1)
    resumed = search.resumed()
    resumed.handle(ManagerReady())
    for state in (ExperimentState.RUNNING, ExperimentState.ERROR):
        resumed.run(resumed.suggest(), None, ExitReason.NONZERO_EXIT)
        assert resumed.state is state


def test_a_success_before_a_manager_restart_still_disables_fail_fast():
    search = new_search(concurrency=1, max_trials=9, fail_fast=2)
    search.run(search.suggest())
    resumed = search.resumed()
    resumed.handle(ManagerReady())
    for _ in range(3):
        resumed.run(resumed.suggest(), None, ExitReason.NONZERO_EXIT)
    assert resumed.state is ExperimentState.RUNNING


@pytest.mark.parametrize(
    ("stderr", "place"),
    [
        (TRACEBACK, "train.py:12"),
        ('  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode\n', "decoder.py:355"),
        ('  File "<string>", line 1, in <module>\n  File "<frozen runpy>", line 88, in _run\n', "<string>:1"),
        ("no traceback\n", ""),
        ("", ""),
    ],
)
def test_the_reported_location_of_an_exception_is_the_last_line_in_the_code_of_the_user(stderr, place):
    assert raised_at(stderr) == place
