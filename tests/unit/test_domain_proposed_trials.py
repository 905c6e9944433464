"""Trials that a user proposes, in addition to the trials of the tuner."""

from simulated_search import new_search

from nni_manager.domain.events import (
    AddObservation,
    ExperimentStopAsked,
    ManagerReady,
    TellTuner,
    TrialStopAsked,
)
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.trial import (
    TrialState,
)
from trial_keeper.wire.reasons import ExitReason


def test_the_tuner_observes_the_final_result_of_a_proposed_trial_that_was_stopped() -> None:
    search = new_search(concurrency=1, max_trials=0)
    mine = search.propose("mine")
    search.start("mine")
    search.report("mine", "0.5")
    search.handle(TrialStopAsked("mine", ExitReason.STOPPED_BY_USER, 40.0))
    search.end("mine", ExitReason.STOPPED_BY_USER)
    search.deliver("mine")
    assert mine.state is TrialState.USER_CANCELED
    assert search.observations == [AddObservation("mine", 0.5)]


def test_an_experiment_accepts_proposed_trials_until_it_stops() -> None:
    search = new_search(concurrency=1)
    assert search.experiment.accepts_trials
    search.handle(ExperimentStopAsked(40.0))
    assert not search.experiment.accepts_trials


def test_a_proposed_trial_runs_next_and_the_tuner_observes_its_result() -> None:
    search = new_search(concurrency=1, max_trials=3)
    search.start(search.suggest())
    mine = search.propose("mine")
    assert (mine.sequence_id, mine.is_customized, search.submitted) == (1, True, ["t0"])
    search.run("t0")
    assert (search.submitted, search.requests) == (["t0", "mine"], [])
    search.run("mine", "0.5")
    assert search.observations == [AddObservation("mine", 0.5)]
    assert search.tuner_results == [TellTuner(0, 1.0)]
    assert search.requests == [2], "a proposed trial counts towards maxTrialNum"
    search.run(search.suggest())
    assert search.state is ExperimentState.DONE


def test_a_proposed_trial_runs_even_if_the_maximum_number_of_trials_is_reached() -> None:
    search = new_search(concurrency=1, max_trials=1)
    search.run(search.suggest())
    assert search.state is ExperimentState.DONE
    search.propose("mine")
    assert (search.state, search.submitted) == (ExperimentState.NO_MORE_TRIAL, ["t0", "mine"])
    search.run("mine", None)
    assert (search.state, search.finishes, search.observations) == (ExperimentState.DONE, 2, [])


def test_queued_proposed_trials_can_be_stopped_and_survive_a_manager_restart() -> None:
    search = new_search(concurrency=1, max_trials=2)
    search.start(search.suggest())
    search.propose("mine")
    search.propose("other")
    search.handle(TrialStopAsked("mine", ExitReason.STOPPED_BY_USER, 40.0))
    assert search.trial("mine").state is TrialState.USER_CANCELED
    after = search.resumed()
    after.handle(ManagerReady())
    after.run("t0")
    assert after.submitted == ["other"]
