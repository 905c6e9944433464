"""Attempts of a trial: old and new attempts, retries after lost jobs, and resource usage."""

import pytest
from attempts import attempt_id
from simulated_search import SimulatedSearch, new_search

from nni_manager.domain.events import (
    AttemptSeen,
    CloseAttempt,
    DetachTrial,
    Effect,
    JobTerminated,
    SaveJob,
    SaveTrial,
    SaveTrialAttempt,
    SaveUsage,
    TellTuner,
    TrialStopAsked,
    UsageReported,
)
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.trial import (
    TERMINAL_STATE,
    TrialState,
)
from trial_keeper.wire.messages import AttemptKey, Usage
from trial_keeper.wire.reasons import ExitReason


def test_a_new_attempt_resets_the_results() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.9")
    search.start("t0", attempt=1)
    assert search.trial("t0").run.value is None
    search.report("t0", "0.4", attempt=1)
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert search.tuner_results == [TellTuner(0, 0.4)]


def test_metrics_of_an_old_attempt_are_ignored() -> None:
    search = new_search(concurrency=1)
    search.suggest()
    search.start("t0", attempt=1)
    assert search.report("t0", "0.9", attempt=0) == []
    assert search.report("t0", "0.1", final=False, attempt=0) == []
    trial = search.trial("t0")
    assert (trial.run.final, trial.run.intermediate_count) == (None, 0)


def test_a_late_report_of_an_old_attempt_does_not_discard_the_results_of_the_current_attempt() -> None:
    search = new_search(concurrency=1)
    search.suggest()
    search.start("t0", attempt=1)
    search.report("t0", "0.4", attempt=1)
    search.report("t0", "0.9", attempt=0)
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert search.tuner_results == [TellTuner(0, 0.4)]


def test_a_result_of_a_new_attempt_counts_even_if_it_arrives_before_the_start_report_of_the_attempt() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.9")
    search.report("t0", "0.4", attempt=1)
    assert (search.trial("t0").run.final, search.trial("t0").run.attempt) == ("0.4", 1)


def test_an_attempt_is_stored_with_its_number_when_it_is_first_seen() -> None:
    search = new_search(concurrency=1)
    search.suggest()
    for number in range(2):
        key = AttemptKey("t0", attempt_id(number), "main")
        assert search.handle(AttemptSeen(key)) == [SaveTrialAttempt(key, number, is_lost=False)]
        assert search.handle(AttemptSeen(key)) == []


def test_an_old_attempt_is_closed_after_its_delivery_and_the_trial_keeps_running() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.start("t0", attempt=1)
    assert search.end("t0", ExitReason.SIGNAL, attempt=0) == []
    assert search.deliver("t0", attempt=0) == [CloseAttempt(AttemptKey("t0", attempt_id(0), "main"))]
    assert search.trial("t0").state is TrialState.RUNNING


def test_the_delivery_of_an_old_attempt_does_not_close_the_new_attempt() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.start("t0", attempt=1)
    search.end("t0", attempt=1)
    assert search.deliver("t0", attempt=0) == [CloseAttempt(AttemptKey("t0", attempt_id(0), "main"))]
    assert search.trial("t0").state is TrialState.CLOSING


def test_a_trial_keeps_running_if_its_retry_starts_before_the_first_attempt_is_closed() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.end("t0", ExitReason.SIGNAL)
    search.start("t0", attempt=1)
    search.deliver("t0", attempt=0)
    assert search.trial("t0").state is TrialState.RUNNING
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert search.trial("t0").state is TrialState.SUCCEEDED


def test_the_trial_ends_if_its_retry_could_not_start() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.9")
    search.end("t0", ExitReason.SIGNAL)
    search.end("t0", ExitReason.COULD_NOT_START, attempt=1, message="no bash")
    search.deliver("t0", attempt=1)
    trial = search.trial("t0")
    assert (trial.run.reason, trial.run.message, trial.run.final) == (
        ExitReason.COULD_NOT_START,
        "no bash",
        None,
    )


def test_repeated_reports_after_a_lost_connection_have_no_effect() -> None:
    search = new_search(concurrency=1)
    search.start(search.suggest())
    search.report("t0", "0.9")
    assert search.start("t0") == []
    search.end("t0")
    assert search.start("t0") == []
    assert search.end("t0") == []
    search.deliver("t0")
    key = AttemptKey("t0", attempt_id(0), "main")
    assert search.start("t0") == [CloseAttempt(key)]
    assert search.report("t0", "0.1") == []
    assert search.end("t0") == [CloseAttempt(key)]
    assert search.deliver("t0") == [CloseAttempt(key)]
    job = search.job("t0")
    assert search.handle(JobTerminated("t0", ExitReason.JOB_LOST, "", 50.0)) == [SaveJob(job, has_ended=True)]
    assert search.handle(JobTerminated("t0", ExitReason.JOB_LOST, "", 50.0)) == []
    assert search.tuner_results == [TellTuner(0, 0.9)]


def test_a_trial_fails_and_frees_its_slot_if_its_job_is_lost() -> None:
    search = new_search(concurrency=1)
    # The start is at 20 s of the keeper's clock, so the end below is at 50 s and not at the reported 90,000 s.
    search.start(search.suggest())
    search.now_s += 30
    search.handle(JobTerminated("t0", ExitReason.KEEPER_LOST, "the node is gone", 90_000.0))
    trial = search.trial("t0")
    assert (trial.state, trial.run.reason, trial.run.ended_at_s) == (
        TrialState.FAILED,
        ExitReason.KEEPER_LOST,
        50.0,
    )
    assert (search.tuner_results, search.requests) == ([TellTuner(0, None)], [1])


def used(search: SimulatedSearch, rss_bytes: int, attempt: int = 0) -> list[Effect]:
    return search.handle(
        UsageReported(Usage(AttemptKey("t0", attempt_id(attempt), "main"), 100.0, rss_bytes))
    )


def test_a_trial_is_stored_when_its_peak_usage_rises() -> None:
    search = new_search(concurrency=1)
    trial = search.trial(search.suggest())
    search.start("t0")
    higher = [used(search, rss_bytes) for rss_bytes in (10, 10, 5, 11)]
    assert [[type(effect) for effect in effects] for effects in higher] == [
        [SaveUsage, SaveTrial],
        [SaveUsage],
        [SaveUsage],
        [SaveUsage, SaveTrial],
    ]
    assert trial.run.peak_usage is not None
    assert trial.run.latest_usage is not None
    assert (trial.run.peak_usage.rss_bytes, trial.run.latest_usage.rss_bytes) == (11, 11)


def test_the_peak_usage_counts_only_the_current_attempt() -> None:
    search = new_search(concurrency=1)
    trial = search.trial(search.suggest())
    assert used(search, 10) == [], "no attempt of it has started"
    search.start("t0")
    used(search, 10)
    search.start("t0", attempt=1)
    assert (trial.run.peak_usage, trial.run.latest_usage) == (None, None)
    assert used(search, 99, attempt=0) == []
    used(search, 7, attempt=1)
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert used(search, 99, attempt=1) == []
    assert trial.run.peak_usage is not None
    assert trial.run.peak_usage.rss_bytes == 7


def test_a_trial_that_the_cluster_lost_is_retried_without_its_earlier_results() -> None:
    search = new_search(concurrency=1, max_retries=1)
    search.start(search.suggest())
    search.report("t0", "0.9")
    effects = search.lose_job("t0", ExitReason.KEEPER_LOST)
    trial = search.trial("t0")
    assert DetachTrial(trial, "t0") in effects
    assert (trial.state, trial.run.final, trial.retries) == (TrialState.WAITING, None, 1)
    assert "retry 1 of 1" in trial.warning
    assert search.submitted == ["t0", "t0-1"]
    # The lost attempt 0 reports late. The trial must ignore its reports.
    search.start("t0", attempt=0)
    search.report("t0", "0.8")
    assert (trial.state, trial.run.final) == (TrialState.WAITING, None)
    search.start("t0", attempt=1)
    search.report("t0", "0.5", attempt=1)
    search.end("t0", attempt=1)
    search.deliver("t0", attempt=1)
    assert search.tuner_results == [TellTuner(0, 0.5)]
    assert len(search.experiment.trials) == 1


def test_a_trial_is_retried_at_most_max_retries_times() -> None:
    search = new_search(concurrency=1, max_trials=1, max_retries=2)
    search.suggest()
    for attempt in range(3):
        assert search.trial("t0").state is TrialState.WAITING
        search.start("t0", attempt)
        search.lose_job("t0")
    assert search.trial("t0").state is TrialState.FAILED
    assert search.submitted == ["t0", "t0-1", "t0-2"]
    assert search.state is ExperimentState.DONE


@pytest.mark.parametrize(
    "reason",
    sorted(
        set(ExitReason)
        - {ExitReason.KEEPER_LOST, ExitReason.JOB_LOST, ExitReason.PREEMPTED, ExitReason.SUCCEEDED}
    ),
)
def test_a_trial_is_not_retried_if_the_cluster_did_not_cause_its_end(reason: ExitReason) -> None:
    search = new_search(concurrency=1, max_retries=3)
    search.start(search.suggest())
    search.lose_job("t0", reason)
    assert search.trial("t0").state is TERMINAL_STATE[reason]


def test_a_failed_or_stopped_trial_is_not_retried_when_its_job_is_lost() -> None:
    search = new_search(concurrency=2, max_retries=3)
    search.start(search.suggest())
    search.start(search.suggest())
    search.end("t0", ExitReason.NONZERO_EXIT)
    search.lose_job("t0")
    search.handle(TrialStopAsked("t1", ExitReason.STOPPED_BY_USER, 40.0))
    search.lose_job("t1")
    assert [search.trial(each).state for each in ("t0", "t1")] == [
        TrialState.FAILED,
        TrialState.USER_CANCELED,
    ]
