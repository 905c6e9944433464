"""Jobs that run many trials in sequence: dispatch, drain, and jobs that end or are lost."""

from simulated_search import SimulatedReuse

from nni_manager.domain.events import (
    CancelTrial,
    ExperimentStopAsked,
    Finish,
    JobTerminated,
    KeeperConnected,
    KeeperIdle,
    LimitsChanged,
    TrialProposed,
    TrialStopAsked,
)
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import TrialState
from trial_keeper.wire.reasons import ExitReason


def test_jobs_above_a_reduced_concurrency_are_drained_after_their_trials_have_ended() -> None:
    search = SimulatedReuse(concurrency=3, max_trials=None)
    for number in range(3):
        search.idle(f"env-{number}")
        search.start(f"t{number}")
    search.handle(LimitsChanged(Limits(1, None, None)))
    assert search.drained == [], "running trials are left to end"
    for number in range(2):
        search.end(f"t{number}")
        search.deliver(f"t{number}")
    assert search.drained == ["env-0", "env-1"]
    assert len(search.experiment.trials) == 3


def test_surplus_jobs_are_drained_even_if_trials_are_queued() -> None:
    search = SimulatedReuse(concurrency=2, max_trials=2)
    for number in range(2):
        search.idle(f"env-{number}")
        search.start(f"t{number}")
    for number in range(3):
        search.handle(TrialProposed(f"mine{number}", {}, 1.0))
    search.handle(LimitsChanged(Limits(1, 2, None)))
    search.end("t0")
    search.idle("env-0")  # a keeper may report idle before the trial's last bytes are stored
    search.deliver("t0")
    assert [each[1] for each in search.dispatched] == ["t0", "t1"], "the concurrency of one belongs to t1"
    assert search.drained == ["env-0"]
    search.run("t1")
    search.idle("env-1")
    assert search.dispatched[-1] == ("env-1", "mine0", None)


def test_a_proposed_trial_waits_for_an_idle_job() -> None:
    search = SimulatedReuse(concurrency=1, max_trials=2)
    search.idle()
    search.handle(TrialProposed("mine", {}, 1.0))
    assert search.submitted == ["env-0"]
    search.run("t0")
    search.idle()
    assert search.dispatched[-1] == ("env-0", "mine", None)
    search.run("mine")
    assert search.experiment.state is ExperimentState.DONE
    search.handle(TrialProposed("late", {}, 1.0))
    assert search.submitted == ["env-0", "env-1"], "the first job has been drained"


def test_the_trial_of_a_lost_job_is_the_first_trial_of_the_next_job() -> None:
    search = SimulatedReuse(concurrency=2, max_trials=2, max_retries=1)
    for job_id, trial_id in (("env-0", "t0"), ("env-1", "t1")):
        search.idle(job_id)
        search.start(trial_id)
    search.lose("env-0")
    assert (search.trial("t0").state, search.submitted) == (TrialState.WAITING, ["env-0", "env-1", "env-2"])
    search.idle("env-2")
    assert search.dispatched[-1] == ("env-2", "t0", None)
    search.start("t0")
    assert search.trial("t0").state is TrialState.WAITING, "this is the lost attempt"
    search.start("t0", attempt=1)
    search.lose("env-2")
    assert search.trial("t0").state is TrialState.FAILED


def test_a_reused_job_runs_all_trials_in_sequence_and_drains_after_the_last_trial() -> None:
    search = SimulatedReuse(max_trials=3)
    assert (search.submitted, search.dispatched) == (["env-0"], [])
    for number in range(3):
        search.idle()
        search.run(f"t{number}")
    assert search.submitted == ["env-0"]
    assert search.dispatched == [("env-0", f"t{number}", None) for number in range(3)]
    assert search.experiment.state is ExperimentState.DONE
    assert search.drained == ["env-0"]
    assert len(search.all_of(Finish)) == 1


def test_an_idle_keeper_gets_the_next_trial_after_all_data_of_the_previous_trial_is_stored() -> None:
    search = SimulatedReuse()
    search.idle()
    search.start("t0")
    search.end("t0")
    search.idle()
    assert search.trial("t0").state is TrialState.CLOSING
    search.deliver("t0")
    assert search.dispatched == [("env-0", "t0", None), ("env-0", "t1", None)]


def test_the_number_of_submitted_jobs_equals_the_concurrency() -> None:
    search = SimulatedReuse(concurrency=3, max_trials=10)
    assert search.submitted == ["env-0", "env-1", "env-2"]
    search.idle("env-1")
    search.run("t0")
    assert search.submitted == ["env-0", "env-1", "env-2"]


def test_jobs_that_never_connected_are_drained_when_no_trials_remain() -> None:
    search = SimulatedReuse(concurrency=2, max_trials=2)
    for number in range(2):
        search.idle("env-0")
        search.run(f"t{number}")
    assert search.drained in (["env-1", "env-0"], ["env-0", "env-1"])


def test_a_trial_of_a_reused_job_has_its_own_start_and_end_times() -> None:
    search = SimulatedReuse()
    search.idle()
    search.start("t0")
    search.end("t0", at_s=25.0)
    search.deliver("t0")
    search.lose("env-0")
    assert (search.trial("t0").run.started_at_s, search.trial("t0").run.ended_at_s) == (10.0, 25.0)


def test_a_queued_trial_that_is_stopped_is_canceled_immediately_and_never_dispatched() -> None:
    search = SimulatedReuse(max_trials=2)
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 15.0))
    assert (search.trial("t0").state, search.trial("t0").run.ended_at_s) == (TrialState.USER_CANCELED, 15.0)
    search.idle()
    assert search.dispatched == [("env-0", "t1", None)]


def test_a_dispatched_trial_that_has_not_started_is_canceled_through_its_keeper() -> None:
    search = SimulatedReuse()
    search.idle()
    search.handle(TrialStopAsked("t0", ExitReason.STOPPED_BY_USER, 15.0))
    assert [effect.trial.trial_id for effect in search.all_of(CancelTrial)] == ["t0"]
    assert search.trial("t0").state is TrialState.STOPPING


def test_stopping_the_experiment_stops_its_trials_and_drains_its_jobs() -> None:
    search = SimulatedReuse(concurrency=3, max_trials=None)
    search.idle("env-1")
    search.start("t0")
    search.handle(ExperimentStopAsked(16.0))
    assert [effect.trial.trial_id for effect in search.all_of(CancelTrial)] == ["t0"]
    assert sorted(search.drained) == ["env-0", "env-2"]
    search.end("t0", succeeds=False)
    search.deliver("t0")
    assert search.experiment.state is ExperimentState.STOPPED
    assert sorted(search.drained) == ["env-0", "env-1", "env-2"]


def test_the_loss_of_a_job_during_a_trial_fails_only_that_trial() -> None:
    search = SimulatedReuse()
    search.idle()
    search.start("t0")
    search.lose("env-0")
    assert (search.trial("t0").state, search.trial("t0").run.reason) == (
        TrialState.FAILED,
        ExitReason.KEEPER_LOST,
    )
    assert search.submitted == ["env-0", "env-1"]
    search.idle("env-1")
    assert search.dispatched[-1] == ("env-1", "t1", None)


def test_a_trial_that_was_dispatched_to_an_exited_job_goes_to_the_next_job() -> None:
    search = SimulatedReuse()
    search.idle()
    search.lose("env-0", is_clean=True)
    assert search.trial("t0").state is TrialState.WAITING
    search.idle("env-1")
    assert search.dispatched == [("env-0", "t0", None), ("env-1", "t0", None)]


def test_no_trial_fails_if_an_idle_job_exits() -> None:
    search = SimulatedReuse()
    search.idle()
    search.run("t0")
    search.lose("env-0", is_clean=True)
    assert search.trial("t1").state is TrialState.WAITING
    assert search.submitted == ["env-0", "env-1"]


def test_one_queued_trial_fails_if_a_job_dies_before_it_connects() -> None:
    search = SimulatedReuse(max_trials=2)
    search.lose("env-0")
    assert (search.trial("t0").state, search.trial("t0").run.message) == (
        TrialState.FAILED,
        "its keeper is gone",
    )
    search.lose("env-1")
    assert search.experiment.state is ExperimentState.DONE


def test_no_trial_fails_if_a_connected_job_dies_while_it_is_idle() -> None:
    search = SimulatedReuse()
    search.idle()
    search.run("t0")
    search.lose("env-0")
    assert search.trial("t1").state is TrialState.WAITING


def test_a_dispatch_message_is_sent_again_if_it_was_lost_with_the_connection() -> None:
    search = SimulatedReuse()
    search.idle()
    search.idle()
    assert search.dispatched == [("env-0", "t0", None), ("env-0", "t0", "main-0")]
    search.start("t0")
    search.handle(KeeperConnected("env-0"))
    assert len(search.dispatched) == 2


def test_an_unstarted_trial_survives_one_job_crash_and_fails_after_two_crashes() -> None:
    search = SimulatedReuse()
    search.idle("env-0")
    search.lose("env-0", "t0")
    assert search.trial("t0").state is TrialState.WAITING
    search.idle("env-1")
    assert search.dispatched[-1] == ("env-1", "t0", None)
    search.lose("env-1", "t0")
    assert (search.trial("t0").state, search.trial("t0").run.reason) == (
        TrialState.FAILED,
        ExitReason.KEEPER_LOST,
    )


def test_a_clean_exit_of_a_job_is_not_charged_to_the_trial_that_it_has_not_started() -> None:
    search = SimulatedReuse()
    search.idle("env-0")
    search.lose("env-0", "t0", is_clean=True)
    search.idle("env-1")
    search.lose("env-1", "t0")
    assert search.trial("t0").state is TrialState.WAITING, "this is the first crash"


def test_a_retried_trial_survives_another_job_crash_before_it_starts() -> None:
    search = SimulatedReuse(max_retries=1)
    search.idle("env-0")
    search.lose("env-0", "t0")
    search.idle("env-1")
    search.start("t0")
    search.lose("env-1")
    assert (search.trial("t0").state, search.trial("t0").retries) == (TrialState.WAITING, 1)
    search.idle("env-2")
    search.lose("env-2", "t0")
    assert search.trial("t0").state is TrialState.WAITING


def test_one_queued_trial_fails_if_a_job_exits_cleanly_without_ever_connecting() -> None:
    search = SimulatedReuse()
    search.lose("env-0", is_clean=True)
    assert search.trial("t0").state is TrialState.FAILED, "the number of submitted jobs is bounded"


def test_no_trial_fails_if_a_job_ended_while_no_manager_ran() -> None:
    search = SimulatedReuse()
    gone = JobTerminated(
        "env-0", ExitReason.JOB_LOST, "it ended while no manager was there", 50.0, True, was_supervised=False
    )
    search.handle(gone)
    assert search.trial("t0").state is TrialState.WAITING
    assert search.submitted == ["env-0", "env-1"]


def test_an_idle_report_of_a_job_that_has_ended_has_no_effect() -> None:
    search = SimulatedReuse(max_trials=1)
    assert search.handle(KeeperIdle("env-7", "main-0")) == []


def test_a_drain_message_is_sent_again_if_it_was_lost_with_the_connection() -> None:
    search = SimulatedReuse(max_trials=1)
    search.idle()
    search.run("t0")
    assert search.drained == ["env-0"]
    search.idle()
    assert search.drained == ["env-0", "env-0"]


def test_the_jobs_and_the_queued_trials_are_restored_after_a_manager_restart() -> None:
    search = SimulatedReuse(concurrency=2, max_trials=4)
    search.idle("env-0")
    search.start("t0")
    after = search.resumed()
    assert after.submitted == []
    after.handle(KeeperConnected("env-0"))
    after.start("t0")
    after.idle("env-1")
    assert after.dispatched == [("env-1", "t1", None)]


def test_new_jobs_have_new_ids_after_a_manager_restart() -> None:
    after = SimulatedReuse().resumed()
    after.lose("env-0", is_clean=True)
    assert after.submitted == ["env-1"]


def test_a_new_job_does_not_get_the_id_of_a_job_that_ended_before_a_manager_restart() -> None:
    search = SimulatedReuse(concurrency=2, max_trials=2, max_retries=1)
    for job_id, trial_id in (("env-0", "t0"), ("env-1", "t1")):
        search.idle(job_id)
        search.start(trial_id)
    search.end("t1")
    search.deliver("t1")
    search.idle("env-1")
    search.lose("env-1", is_clean=True)
    after = search.resumed()
    after.lose("env-0")
    assert after.submitted == ["env-2"]
