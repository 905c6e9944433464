"""Trials that were interrupted by a stop of the whole experiment: their parameters are proposed again after a resume."""

import json
from pathlib import Path

import pytest
from real_experiment import wait_until

from nni_manager.config.algorithm import CheckpointFolder
from nni_manager.config.algorithms import TUNERS
from nni_manager.config.search_space import parse_search_space
from nni_manager.domain.objectives import single
from nni_manager.tuner.base import Later, Observation, PastTrial

ONE_CHOICE = {"x": {"_type": "choice", "_value": [1, 2, 3, 4, 5, 6, 7, 8, 9]}}
BATCH = {"combine_params": {"_type": "choice", "_value": [{"x": x} for x in range(9)]}}
ONE_FLOAT = {"x": {"_type": "uniform", "_value": [0, 1]}}
INTERRUPTED = Observation("t", None, None, False, is_void=True, is_interrupted=True)
STOPPED_ALONE = Observation("t", None, None, False, is_void=True)
TUNERS_WITH_PLANS = {
    "BatchTuner": (BATCH, {}),
    "GridSearch": (ONE_CHOICE, {}),
    "Hyperband": (ONE_FLOAT, {"R": 9}),
    "BOHB": (ONE_FLOAT, {"min_budget": 1, "max_budget": 9}),
    "PBTTuner": (ONE_FLOAT, {"population_size": 9}),
}
"""Each tuner's search space and classArgs; the first nine trials are independent of results."""


def a_result(value):
    return Observation("t", float(value), str(value), has_succeeded=True)


class Search:
    """A tuner and the outcomes of its trials. The tuner can be restored from these outcomes at any point."""

    def __init__(self, name):
        self.name, self.asked, self.outcomes = name, {}, {}
        self.tuner = self.make()

    def make(self):
        raw, class_args = TUNERS_WITH_PLANS[self.name]
        declared = TUNERS[self.name]
        seed = {"optimize_mode": "minimize", "seed": 3}
        args = declared.args.model_validate({**class_args, **(seed if declared.learns else {})})
        folder = CheckpointFolder(Path("checkpoints"))
        return declared.make(parse_search_space(raw), args, folder, single("minimize"))

    def ask(self):
        suggestion = self.tuner.ask(len(self.asked))
        if isinstance(suggestion, Later) or suggestion is None:
            return suggestion
        self.asked[len(self.asked)] = suggestion
        return suggestion.parameters

    def end(self, key, outcome):
        self.outcomes[key] = outcome
        self.tuner.tell_result(key, outcome)

    def resume(self):
        self.tuner = self.make()
        self.tuner.restore([self.past(key) for key in self.asked])

    def past(self, key):
        suggestion, outcome = self.asked[key], self.outcomes.get(key)
        metadata = json.loads(json.dumps(suggestion.metadata))
        if outcome is None:
            return PastTrial(key, suggestion.parameters, metadata, None, ended=False)
        of_user = (outcome.has_succeeded, (), outcome.is_void, outcome.is_interrupted)
        return PastTrial(
            key, suggestion.parameters, metadata, outcome.value, True, "t", outcome.metric, *of_user
        )


@pytest.fixture(params=TUNERS_WITH_PLANS)
def search(request):
    return Search(request.param)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_parameters_of_interrupted_trials_are_proposed_again_exactly_once(search, is_resumed):
    asked = [search.ask() for _ in range(5)]
    search.end(0, a_result(1))
    search.end(3, INTERRUPTED)
    search.end(1, INTERRUPTED)
    search.end(2, a_result(2))
    if is_resumed:
        search.resume()
    again = [search.ask(), search.ask()]
    assert sorted(map(str, again)) == sorted(map(str, [asked[1], asked[3]]))
    assert search.ask() not in asked


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_trial_that_is_interrupted_twice_is_proposed_three_times(search, is_resumed):
    first = search.ask()
    for key in range(2):
        search.end(key, INTERRUPTED)
        if is_resumed:
            search.resume()
        assert search.ask() == first
    search.end(2, a_result(1))
    if is_resumed:
        search.resume()
    assert search.ask() != first


def test_the_parameters_of_a_trial_are_not_proposed_again_if_a_user_stopped_only_this_trial(search):
    asked = [search.ask() for _ in range(2)]
    search.end(0, STOPPED_ALONE)
    search.resume()
    assert search.ask() not in asked


@pytest.mark.parametrize("name", ["Hyperband", "BOHB", "PBTTuner"])
def test_a_tuner_with_rounds_uses_the_result_of_the_repeated_trial_for_the_next_round(name):
    search = Search(name)
    asked = [search.ask() for _ in range(9)]
    for key in range(8):
        search.end(key, a_result(key + 1))
    search.end(8, INTERRUPTED)
    search.resume()
    assert search.ask() == asked[8]
    search.end(9, a_result(0))
    search.resume()
    following = search.ask()
    if name == "PBTTuner":
        # PBTTuner proposes the nine members of its population in order. The ninth member was the best, so it keeps its
        # parameters.
        following = [following, *(search.ask() for _ in range(8))][8]
    assert following["x"] == asked[8]["x"]


@pytest.mark.parametrize("name", ["BatchTuner", "GridSearch"])
def test_a_tuner_whose_list_is_exhausted_proposes_the_interrupted_trials_again(name):
    search = Search(name)
    asked = [search.ask() for _ in range(9)]
    assert search.ask() is None
    for key in range(9):
        search.end(key, INTERRUPTED if key in (4, 8) else a_result(key))
    search.resume()
    assert [search.ask(), search.ask(), search.ask()] == [asked[4], asked[8], None]


WAITS_UNLESS_ALLOWED = """
import signal, nni_sdk as nni
from pathlib import Path
x = nni.get_next_parameter()["x"]
if x > 2 and not Path("allowed").exists():
    nni.report_intermediate_result(x)
    signal.pause()
nni.report_final_result(x)
"""


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_resumed_grid_search_finishes_its_grid(a_real_experiment, concurrency):
    space = {"x": {"_type": "choice", "_value": [1, 2, 3, 4]}}
    experiment = a_real_experiment(
        WAITS_UNLESS_ALLOWED,
        space=space,
        trialConcurrency=concurrency,
        maxTrialNum=99,
        tuner={"builtinTunerName": "GridSearch"},
    )
    experiment.start()
    wait_until(lambda: experiment.row_count() == 2 + concurrency, "a trial waits in each job")
    experiment.delete("/experiment")
    assert experiment.manager.wait(60) == 0
    (experiment.code / "allowed").touch()
    experiment.start()
    experiment.wait_for_status("DONE")
    trials = experiment.get("/trials")
    interrupted = [trial for trial in trials if trial["state"] == "USER_CANCELED"]
    assert [trial["reason"] for trial in interrupted] == ["experiment stopped"] * concurrency
    assert sorted(trial["value"] for trial in trials if trial["state"] == "SUCCEEDED") == [1, 2, 3, 4]
    assert len(trials) == 4 + concurrency
