"""Tests of the tuner `Auto` in addition to the contract tests of all tuners."""

import json
import math
import statistics
from pathlib import Path
from random import Random

import numpy as np
import pytest
from amounts import amount
from optuna.trial import TrialState, create_trial

from nni_manager.config.algorithms import TUNERS
from nni_manager.config.prior_results import PriorResult
from nni_manager.config.search_space import contains, parse_search_space
from nni_manager.domain.objectives import single
from nni_manager.tuner import gaussian_process
from nni_manager.tuner.base import Observation, PastTrial
from nni_manager.tuner.flat_space import FlatSpace
from nni_manager.tuner.flat_study import MAX_TRIALS, FlatStudy
from nni_manager.tuner.gaussian_process import MAX_FITTED, MaternProcess
from nni_manager.tuner.optuna_backed import Sampling
from nni_manager.tuner.tuner_session import TunerSession
from nni_manager.tuner.tuners.auto import SOBOL_TRIALS, ranked, standardised

pytestmark = pytest.mark.slow

UNIT = {"_type": "uniform", "_value": [0, 1]}
NESTED = {
    "model": {
        "_type": "choice",
        "_value": [
            {"_name": "linear", "C": UNIT},
            {"_name": "rbf", "C": UNIT, "gamma": UNIT},
            {"_name": "none"},
        ],
    },
    "n": {"_type": "randint", "_value": [1, 9]},
}


def auto(raw, seed=1, optimize_mode="minimize"):
    args = TUNERS["Auto"].args.model_validate({"optimize_mode": optimize_mode, "seed": seed})
    return TUNERS["Auto"].make(parse_search_space(raw), args, Path("checkpoints"), single(args.optimize_mode))


def run(tuner, keys, value_of):
    """Ask the tuner for the parameters of each key in turn, and report the value of these parameters to the tuner. Return the
    trials as the store would contain them.
    """
    history = []
    for key in keys:
        asked = tuner.ask(key)
        value = value_of(asked.parameters)
        tuner.tell(key, value)
        history.append(
            PastTrial(key, asked.parameters, json.loads(json.dumps(asked.metadata)), value, ended=True)
        )
    return history


def parameters_of(history):
    return [past.parameters for past in history]


def of_nested(at):
    """A loss over the space NESTED. The best point is rbf with C = gamma = 0.3."""
    model = at["model"]
    near = (model.get("C", 1) - 0.3) ** 2 + (model.get("gamma", 1) - 0.3) ** 2
    return near + {"linear": 0.5, "rbf": 0.0, "none": 1.0}[model["_name"]] + 0.01 * at["n"]


def test_the_first_trials_cover_numeric_and_choice_parameters_evenly():
    tuner = auto({"x": UNIT, "c": {"_type": "choice", "_value": list("abcd")}})
    first = [tuner.ask(key).parameters for key in range(SOBOL_TRIALS)]
    assert sorted(int(at["x"] * 8) for at in first) == list(range(8))
    assert sorted(at["c"] for at in first) == sorted("abcd" * 2)


def test_the_tuner_finds_the_best_values_of_nested_parameters():
    for seed in range(3):
        last = run(auto(NESTED, seed), range(40), of_nested)[-12:]
        best = [past.parameters["model"] for past in last if past.parameters["model"]["_name"] == "rbf"]
        assert len(best) >= 8
        assert statistics.median(abs(at["gamma"] - 0.3) for at in best) < 0.15


def test_every_point_of_a_small_search_space_is_proposed_before_a_point_is_repeated():
    raw = {"a": {"_type": "randint", "_value": [0, 5]}, "b": {"_type": "choice", "_value": list("wxyz")}}
    points = [
        json.dumps(each) for each in parameters_of(run(auto(raw), range(24), lambda at: float(at["a"])))
    ]
    after_sobol = len(set(points[:SOBOL_TRIALS])) + 20 - SOBOL_TRIALS
    assert len(set(points[:20])) >= after_sobol
    assert len(set(points)) == 20


def test_the_tuner_never_repeats_a_corner_of_a_continuous_search_space():
    """The tuner clips candidates outside the space to its bounds, so several candidates can coincide at a corner."""
    history = run(auto({"x": UNIT, "y": UNIT}), range(40), lambda at: at["x"] + at["y"])
    assert min(past.value for past in history) == 0
    assert len({json.dumps(each) for each in parameters_of(history)}) == 40


def test_the_tuner_avoids_a_region_where_trials_fail():
    def value_of(at):
        return None if at["x"] > 0.5 else 1 - at["x"]

    for seed in range(3):
        history = run(auto({"x": UNIT, "y": UNIT}, seed), range(40), value_of)
        assert sum(past.value is None for past in history[20:]) <= 6
        assert min(past.value for past in history if past.value is not None) < 0.55


def test_the_point_of_a_trial_that_a_user_or_the_cluster_has_ended_is_proposed_again():
    space = {"x": {"_type": "randint", "_value": [0, 100]}}
    tuner, history = auto(space), []
    for key in range(30):
        asked = tuner.ask(key)
        x, metadata = asked.parameters["x"], json.loads(json.dumps(asked.metadata))
        is_void = x == 37 and not any(past.is_void for past in history)
        value = None if is_void else abs(x - 37)
        metric = None if value is None else json.dumps(value)
        tuner.tell_result(key, Observation(f"t{key}", value, metric, not is_void, is_void=is_void))
        history.append(PastTrial(key, asked.parameters, metadata, value, ended=True, is_void=is_void))
        if is_void:
            tuner = auto(space)
            tuner.restore(history)
    assert any(past.is_void for past in history)
    assert min(past.value for past in history if not past.is_void) == 0


def test_the_tuner_assumes_predicted_results_for_running_trials():
    busy, idle = auto({"x": UNIT, "y": UNIT}), auto({"x": UNIT, "y": UNIT})
    for tuner in (busy, idle):
        run(tuner, range(12), lambda at: math.sin(9 * at["x"]) * math.cos(8 * at["y"]))
        tuner.ask(12)
    idle.tell(12, None)
    assert busy.ask(13) != idle.ask(13)
    asked = [busy.ask(key).parameters.values() for key in range(14, 22)]
    apart = [math.dist(one, two) for index, one in enumerate(asked) for two in asked[:index]]
    assert statistics.median(apart) > 0.1


def test_the_tuner_proposes_hundreds_of_trials_before_the_first_result():
    tuner = auto(NESTED)
    space = parse_search_space(NESTED)
    asked = [tuner.ask(key).parameters for key in range(300)]
    assert all(contains(space, at) == [] for at in asked)
    for key in range(20):
        tuner.tell(key, float(key))
    assert contains(space, tuner.ask(300).parameters) == []


def test_a_resumed_search_with_imports_proposes_the_same_trials_as_an_uninterrupted_search():
    """The resumed tuner restores all trials first and imports all results afterwards. The uninterrupted search alternated trials
    and imports.
    """
    raw = {**NESTED, "q": {"_type": "qlognormal", "_value": [0, 1, 0.5]}}

    def value_of(at):
        return None if at["n"] == 8 else of_nested(at) + 0.1 * at["q"]

    random = Random(4)
    points = [auto(raw, seed).ask(0).parameters for seed in range(100, 106)]
    known = [PriorResult(at, value := random.random(), json.dumps(value)) for at in points]
    unbroken = auto(raw)
    history = run(unbroken, range(5), value_of)
    unbroken.import_results(known[:3])
    history += run(unbroken, range(5, 14), value_of)
    unbroken.import_results(known[3:])
    later = run(unbroken, range(14, 22), value_of)
    resumed = auto(raw)
    resumed.restore(history)
    resumed.import_results(reversed(known))
    assert parameters_of(run(resumed, range(14, 22), value_of)) == parameters_of(later)


def test_a_resume_does_not_change_the_proposals_if_there_are_more_trials_than_the_model_uses():
    count = MAX_TRIALS + 8
    unbroken = auto({"x": UNIT, "y": UNIT})
    donor = auto({"x": UNIT, "y": UNIT}, seed=9)
    trials = [donor.ask(key) for key in range(count)]
    history = [
        PastTrial(key, each.parameters, each.metadata, abs(each.parameters["x"] - 0.2), ended=True)
        for key, each in enumerate(trials)
    ]
    unbroken.restore(history)
    later = run(unbroken, range(count, count + 3), lambda at: abs(at["x"] - 0.2))
    resumed = auto({"x": UNIT, "y": UNIT})
    resumed.restore([*history, later[0]])
    again = run(resumed, range(count + 1, count + 3), lambda at: abs(at["x"] - 0.2))
    assert parameters_of(again) == parameters_of(later[1:])


def test_proposals_do_not_depend_on_whether_results_are_imported_before_or_after_a_restore():
    raw, random = {"x": UNIT, "y": UNIT}, Random(5)
    points = [{"x": random.random(), "y": random.random()} for _ in range(260)]
    values = [abs(at["x"] - 0.2) + random.random() for at in points]
    history = [
        PastTrial(key, at, {f"/{name}": drawn for name, drawn in at.items()}, value, ended=True)
        for key, (at, value) in enumerate(zip(points[:150], values, strict=False))
    ]
    known = [PriorResult(*each, "") for each in zip(points[150:], values[150:], strict=True)]
    before, after = auto(raw), auto(raw)
    before.import_results(known)
    before.restore(history)
    after.restore(history)
    after.import_results(reversed(known))
    assert [before.ask(key) for key in range(150, 154)] == [after.ask(key) for key in range(150, 154)]


def test_results_survive_a_search_space_change_and_the_same_trials_are_proposed_after_a_resume():
    wide = {**NESTED, "n": {"_type": "randint", "_value": [1, 20]}}

    class Config:
        def __init__(self, raw, revision):
            self.raw, self.search_space_revision = raw, revision

    def session(raw, revision):
        return TunerSession(Config(raw, revision), lambda config: auto(config.raw))

    def tell(tuner, key, parameters):
        tuner.tell_result(key, Observation("aB3dE", value := of_nested(parameters), json.dumps(value), True))

    unbroken, history = session(wide, 0), []
    for key in range(30):
        if key == 20:
            known = [PriorResult(past.parameters, past.value, json.dumps(past.value)) for past in history]
            unbroken.change_space(Config(NESTED, 1), known, over=set(range(20)))
        asked = unbroken.ask(key)
        tell(unbroken, key, asked.parameters)
        value = of_nested(asked.parameters)
        metadata = json.loads(json.dumps(asked.metadata))
        history.append(
            PastTrial(key, asked.parameters, metadata, value, ended=True, metric=json.dumps(value))
        )
    assert all(contains(parse_search_space(NESTED), past.parameters) == [] for past in history[20:])
    assert statistics.median(past.value for past in history[20:]) < 0.3
    resumed = session(NESTED, 1)
    resumed.restore(history[:25], [])
    for past in history[25:]:
        asked = resumed.ask(past.key)
        assert asked.parameters == past.parameters
        tell(resumed, past.key, asked.parameters)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
@pytest.mark.parametrize("optimize_mode", ["minimize", "maximize"])
def test_scaling_all_results_does_not_change_the_proposals(scale, optimize_mode):
    sign = 1 if optimize_mode == "minimize" else -1
    tuner = auto({"x": UNIT, "y": UNIT}, 3, optimize_mode)
    history = run(tuner, range(30), lambda at: sign * scale * ((at["x"] - 0.7) ** 2 + at["y"]))
    assert min(abs(past.value) / scale for past in history) < 0.02


def test_standardised_losses_compress_outliers_and_treat_failures_as_worst():
    losses = standardised(np.array([1.0, 2.0, 3.0, 4.0, 1e9, np.nan, 2.5]))
    assert losses.argmin() == 0
    assert losses[5] == losses[4] == losses.max()
    assert losses[4] - losses[3] < 20 * (losses[3] - losses[0])
    assert abs(losses.mean()) < 1e-9


def test_ranked_results_keep_small_differences_between_the_best_results_visible():
    losses = ranked(np.array([0.0, 1e-9, 5.0, 5.0, np.nan, 1e9]))
    assert losses[1] - losses[0] > 0.3
    assert losses[2] == losses[3]
    assert losses[4] == losses[5] == losses.max()


@pytest.mark.parametrize(
    "values", [[5.0], [2.0, 2.0], [0.0, 0.0, np.nan], [1.0, 1.0, 1.0, 3.0], [-1e308, 1e308]]
)
def test_standardised_results_are_finite_if_values_are_equal_missing_or_huge(values):
    for losses in (standardised(np.array(values)), ranked(np.array(values))):
        assert np.all(np.isfinite(losses))
        assert np.abs(losses).max() < 10


@pytest.mark.parametrize(("width", "results"), [(50, 300), (3, amount(1_000, 10_000))])
def test_proposals_stay_valid_with_many_dimensions_and_results(width, results):
    names = [f"x{number}" for number in range(width)]
    tuner, donor = auto(dict.fromkeys(names, UNIT)), Random(1)
    draws = [{f"/{name}": donor.random() for name in names} for _ in range(results)]
    tuner.restore(PastTrial(key, {}, each, each["/x0"], ended=True) for key, each in enumerate(draws))
    asked = [tuner.ask(key).parameters for key in range(results, results + 3)]
    assert not any(contains(parse_search_space(dict.fromkeys(names, UNIT)), each) for each in asked)


def test_a_pruned_trial_counts_as_failed_whatever_result_was_reported():
    """The last intermediate result of a pruned trial may be better than final results. It must not attract the search."""

    def proposals(curve):
        tuner, at = auto({"x": UNIT}), []
        for key in range(16):
            at.append(tuner.ask(key).parameters["x"])
            value = (at[-1] - 0.2) ** 2 if at[-1] < 0.5 else None
            tuner.tell_result(key, Observation(str(key), value, None, False, () if value else curve))
        return at

    assert proposals((-9.0,)) == proposals((9.0, 1e-9)) == proposals(())


class Work:
    """Counts the work of a proposal: kernel elements, converted points, and the size of the largest factorised matrix."""

    def __init__(self, monkeypatch):
        self.kernel_elements = self.points = self.largest = self.likelihoods = 0
        real_kernel, real_positions = MaternProcess._kernel, FlatSpace.positions_of
        real_cholesky, real_density = gaussian_process._cholesky, gaussian_process._Density.negated

        def kernel(process, points):
            found = real_kernel(process, points)
            self.kernel_elements += found.size
            return found

        def positions_of(space, draws):
            self.points += 1
            return real_positions(space, draws)

        def cholesky(matrix):
            self.largest = max(self.largest, len(matrix))
            return real_cholesky(matrix)

        def negated(density, logarithms):
            self.likelihoods += 1
            assert len(density._losses) <= MAX_FITTED
            return real_density(density, logarithms)

        monkeypatch.setattr(MaternProcess, "_kernel", kernel)
        monkeypatch.setattr(FlatSpace, "positions_of", positions_of)
        monkeypatch.setattr(gaussian_process, "_cholesky", cholesky)
        monkeypatch.setattr(gaussian_process._Density, "negated", negated)


def restored(raw, results, running=0):
    """A tuner that has restored this number of results and this number of running trials."""
    space, tuner, random = parse_search_space(raw), auto(raw), Random(1)
    sampling = Sampling(space)
    trials = [sampling.complete({}, random) for _ in range(results + running)]
    tuner.restore(
        PastTrial(key, at, draws, random.random() if key < results else None, ended=key < results)
        for key, (at, draws) in enumerate(trials)
    )
    return tuner


# Each option contains a continuous parameter x, so no point occurs more than once.
WITH_X = {
    "c": {"_type": "choice", "_value": [{"_name": "a", "x": UNIT}, {"_name": "b", "x": UNIT}]},
    "y": UNIT,
}


@pytest.mark.parametrize("raw", [WITH_X, {"n": {"_type": "randint", "_value": [0, 99999]}}])
def test_a_proposal_takes_no_more_computation_after_10_000_results_than_after_400(raw, monkeypatch):
    needed = {}
    for results in (400, 10_000):
        tuner = restored(raw, results, running=300)
        for first in (True, False):
            with monkeypatch.context() as patch:
                work = Work(patch)
                assert tuner.ask(results + 300 + (not first)) is not None
            needed[results, first] = work
    for first in (True, False):
        few, many = needed[400, first], needed[10_000, first]
        assert (few.kernel_elements, few.largest) == (many.kernel_elements, many.largest)
        assert few.largest == 2 * MAX_TRIALS
        assert many.likelihoods <= 50
    # The second proposal reuses the points of the first one. It converts only running trials and trials that have ended since
    # then.
    assert needed[10_000, False].points <= 3


def test_the_tuner_keeps_only_a_few_hundred_points_in_memory_after_10_000_trials():
    mixed = {
        "c": {"_type": "choice", "_value": [{"_name": "a", "n": NESTED["n"]}, {"_name": "b", "z": UNIT}]}
    }
    for raw, most in (({"x": UNIT}, 0), (NESTED, 8), (mixed, 8)):
        study, random = FlatStudy(parse_search_space(raw)), Random(2)
        sampling = Sampling(parse_search_space(raw))
        trials = []
        for number in range(10_000):
            _, draws = sampling.complete({}, random)
            made = create_trial(
                state=TrialState.COMPLETE,
                value=0.0,
                params=draws,
                distributions=sampling.distributions_of(draws),
            )
            made.number = number
            trials.append(made)
        for first in range(0, 10_000, 1_000):
            study.note_tried(trials[: first + 1_000])
            assert len(study.points_of(trials[first : first + 200])) == 200
        assert len(study.points) == 200
        # The parameters x, C and z are continuous. A point that contains one of them never recurs, so `tried` omits such points.
        # Only points without these parameters remain, at most one for each value of n.
        assert len(study.tried) == most


def test_an_imported_result_outside_the_search_space_does_not_attract_the_search():
    raw = {"x": UNIT, "y": UNIT}
    tuners = [auto(raw, seed=5) for _ in range(3)]
    for tuner in tuners:
        run(tuner, range(12), lambda at: 1 + at["x"] + at["y"])
    alone, helped, misled = tuners
    assert helped.import_results([PriorResult({"x": 0.77, "y": 0.61}, -9.0, "-9")]) == 1
    assert misled.import_results([PriorResult({"x": 7, "y": 0.61}, -9.0, "-9")]) == 0

    def following(tuner):
        return parameters_of(run(tuner, range(12, 22), lambda at: 1 + at["x"] + at["y"]))

    near = [math.dist((at["x"], at["y"]), (0.77, 0.61)) < 0.15 for at in following(helped)]
    expected = following(alone)
    assert sum(near) >= 5 > sum(math.dist((at["x"], at["y"]), (0.77, 0.61)) < 0.15 for at in expected)
    assert following(misled) == expected
