"""The contract of all tuners, and the specific behaviour of each."""

import functools
import json
import math
import statistics
from pathlib import Path

import pytest
from amounts import amount
from built_in import names_in
from drawn_spaces import spaces_raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nni_manager.config.algorithm import CheckpointFolder
from nni_manager.config.algorithms import TUNERS
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.prior_results import PriorResult
from nni_manager.config.reader import read_experiment_file
from nni_manager.config.search_space import contains, parse_search_space
from nni_manager.domain.objectives import single
from nni_manager.errors import InternalError
from nni_manager.tuner.base import Later, Observation, PastTrial
from nni_manager.tuner.optuna_backed import OptunaTuner, Sampling
from nni_manager.tuner.registry import make_tuner
from nni_manager.tuner.tuner_session import TunerSession
from nni_manager.tuner.tuners.hyperband import Hyperband
from nni_manager.tuner.tuners.pbt import PopulationTuner

TWO_FLOATS = {
    "x": {"_type": "uniform", "_value": [-5, 5]},
    "y": {"_type": "loguniform", "_value": [0.001, 10]},
}
ALL_TYPES = {
    "choice": {"_type": "choice", "_value": [16, "a", None, [1, 2], {"k": 1}]},
    "net/work": {
        "_type": "choice",
        "_value": [
            {"_name": "none"},
            {"_name": "conv", "size": {"_type": "quniform", "_value": [1, 10, 3]}},
            {
                "_name": "deep",
                "inner": {"_type": "choice", "_value": [{"_name": "a", "n": TWO_FLOATS["x"]}, 7]},
            },
        ],
    },
    "randint": {"_type": "randint", "_value": [-2, 2]},
    "uniform": {"_type": "uniform", "_value": [0, 1]},
    "quniform": {"_type": "quniform", "_value": [0, 1, 0.1]},
    "loguniform": {"_type": "loguniform", "_value": [1e-6, 1]},
    "qloguniform": {"_type": "qloguniform", "_value": [1, 100, 7]},
    "normal": {"_type": "normal", "_value": [3, 2]},
    "qnormal": {"_type": "qnormal", "_value": [0, 5, 2]},
    "lognormal": {"_type": "lognormal", "_value": [0, 1]},
    "qlognormal": {"_type": "qlognormal", "_value": [1, 1, 0.5]},
}


ENUMERATING = ("BatchTuner", "GridSearch")
DRAWING = names_in(TUNERS, lambda each: each.name not in ENUMERATING)
CHECKPOINTS = Path("checkpoints")
GOLDEN = Path(__file__).parents[1] / "golden"


# With these small values, a dozen trials suffice to show an effect of the tuner.
SMALL = {
    "Hyperband": {"R": 9},
    "Evolution": {"population_size": 4},
    "NSGAII": {"population_size": 4},
    "CmaEs": {"popsize": 4},
    "BOHB": {"max_budget": 9, "min_points_in_model": 2},
    "PBTTuner": {"population_size": 4},
}
FEW = {"selection_num_warm_up": 50, "selection_num_starting_points": 5}
SMALL |= {"GPTuner": FEW, "MetisTuner": {"selection_num_starting_points": 5}}


def make_of(name, raw, seed=1, optimize_mode="minimize", **class_args):
    args = TUNERS[name].args.model_validate({"optimize_mode": optimize_mode, "seed": seed, **class_args})
    folder = CheckpointFolder(CHECKPOINTS)
    return TUNERS[name].make(parse_search_space(raw), args, folder, single(args.optimize_mode))


@pytest.fixture(params=DRAWING)
def a_tuner(request):
    """A factory of tuners of one kind, for any search space."""

    def make(raw=TWO_FLOATS, seed=1, optimize_mode="minimize"):
        make.name = request.param
        return make_of(request.param, raw, seed, optimize_mode, **SMALL.get(request.param, {}))

    return make


def run(tuner, keys, value_of=lambda parameters: parameters["x"] ** 2):
    """Request and report each trial in turn. Returns the history in the form that the store returns."""
    history = []
    for key in keys:
        suggestion = tuner.ask(key)
        value = value_of(suggestion.parameters)
        tuner.tell(key, value)
        history.append(PastTrial(key, suggestion.parameters, suggestion.metadata, value, ended=True))
    return history


def plain(parameters):
    """The parameters except those that some tuners add to the search space."""
    added = ("TRIAL_BUDGET", "load_checkpoint_dir", "save_checkpoint_dir")
    return {name: value for name, value in parameters.items() if name not in added}


def proposed(history):
    """The parameters of each trial, without metadata.

    CMA-ES pickles its state into the metadata, and equal objects may have different pickles.
    """
    return [past.parameters for past in history]


def stored(history):
    """The history after a round trip through JSON, as the store returns it."""
    return [
        PastTrial(past.key, past.parameters, json.loads(json.dumps(past.metadata)), past.value, past.ended)
        for past in history
    ]


def test_two_tuners_with_the_same_seed_propose_the_same_parameters(a_tuner):
    first, second, other = (run(a_tuner(seed=seed), range(15)) for seed in (4, 4, 5))
    assert proposed(first) == proposed(second)
    assert all(one.parameters != two.parameters for one, two in zip(first, other, strict=True))


def test_two_tuners_without_a_seed_propose_different_parameters(a_tuner):
    assert a_tuner(seed=None).ask(0) != a_tuner(seed=None).ask(0)


@pytest.mark.parametrize("restart_after", [1, 18])
def test_a_restored_tuner_proposes_the_same_parameters_as_an_uninterrupted_tuner(a_tuner, restart_after):
    unbroken = run(a_tuner(ALL_TYPES), range(24), lambda parameters: parameters["normal"])
    rebuilt = a_tuner(ALL_TYPES)
    rebuilt.restore(stored(unbroken[:restart_after]))
    later = run(rebuilt, range(restart_after, 24), lambda parameters: parameters["normal"])
    assert proposed(later) == proposed(unbroken[restart_after:])


def test_a_restored_tuner_accepts_the_result_of_a_trial_that_was_running_before_the_restart(a_tuner):
    tuner = a_tuner()
    history = run(tuner, range(12))
    suggestion = tuner.ask(12)
    rebuilt = a_tuner()
    rebuilt.restore(
        stored([*history, PastTrial(12, suggestion.parameters, suggestion.metadata, None, ended=False)])
    )
    assert rebuilt.ask(13).parameters == tuner.ask(13).parameters
    tuner.tell(12, 0.5)
    rebuilt.tell(12, 0.5)
    rebuilt.tell(0, 3.0)  # Trial 0 ended before the restart, so the tuner ignores this result.
    assert rebuilt.ask(14).parameters == tuner.ask(14).parameters


def test_a_tuner_restores_a_history_of_a_thousand_trials(a_tuner):
    metadata = a_tuner().ask(0).metadata
    tuner = a_tuner()
    tuner.restore(PastTrial(key, {}, metadata, float(key), ended=True) for key in range(1000))
    with pytest.raises(InternalError, match="a second time"):
        tuner.ask(999)
    assert plain(tuner.ask(1000).parameters).keys() == {"x", "y"}


def test_a_restored_tuner_regards_trials_that_failed_before_the_restart_as_failed(a_tuner):
    failing = run(a_tuner(), range(12), lambda parameters: None)
    rebuilt = a_tuner()
    rebuilt.restore(stored(failing))
    assert rebuilt.ask(12).parameters == continued(a_tuner(), [None] * 12)


def continued(tuner, values):
    """The next parameters of a tuner after these results."""
    for key, value in enumerate(values):
        tuner.ask(key)
        tuner.tell(key, value)
    return tuner.ask(len(values)).parameters


@pytest.mark.parametrize("useless", [None, math.nan, math.inf, -math.inf])
def test_a_tuner_regards_nan_and_infinite_results_as_failures(a_tuner, useless):
    good = [float(value) for value in range(12)]
    assert continued(a_tuner(), [*good, useless]) == continued(a_tuner(), [*good, None])


def test_a_tuner_proposes_valid_parameters_if_all_trials_fail(a_tuner):
    history = run(a_tuner(ALL_TYPES), range(25), lambda parameters: None)
    assert all(contains(parse_search_space(ALL_TYPES), plain(past.parameters)) == [] for past in history)


def test_a_tuner_uses_only_the_first_result_of_a_trial(a_tuner):
    tuner, other = a_tuner(), a_tuner()
    for key in range(15):
        tuner.ask(key)
        other.ask(key)
        tuner.tell(key, float(key))
        tuner.tell(key, -float(key))
        other.tell(key, float(key))
    assert tuner.ask(15) == other.ask(15)


def test_a_repeated_ask_a_result_of_an_unknown_trial_and_a_late_restore_raise_internal_error(a_tuner):
    tuner = a_tuner()
    suggestion = tuner.ask(0)
    with pytest.raises(InternalError, match="a second time"):
        tuner.ask(0)
    with pytest.raises(InternalError, match="did not propose"):
        tuner.tell(1, 0.5)
    with pytest.raises(InternalError, match="in use"):
        tuner.restore([PastTrial(1, suggestion.parameters, suggestion.metadata, None, ended=False)])


@pytest.mark.parametrize(
    "metadata", [{}, {"/x": 0.0}, {"/x": 99.0, "/y": 1.0}, {"/x": 0.0, "/y": 1.0, "/z": 1}]
)
def test_restoring_metadata_of_a_different_search_space_raises_internal_error(a_tuner, metadata):
    with pytest.raises(InternalError, match="is not of this search space"):
        a_tuner().restore([PastTrial(0, {}, metadata, 1.0, ended=True)])


def test_a_tuner_proposes_different_parameters_for_concurrent_trials(a_tuner):
    tuner = a_tuner()
    run(tuner, range(12))
    asked = [each for key in range(12, 28) if (each := tuner.ask(key)) is not Later.LATER]
    different = len({json.dumps(suggestion.parameters) for suggestion in asked})
    # Two tuners propose fewer than 16 different points. A child of NSGA-II may equal its parent. PBTTuner has four members and
    # proposes at most one trial for each of them.
    assert different == (4 if a_tuner.name == "PBTTuner" else 16) or (
        a_tuner.name == "NSGAII" and different >= 8
    )


def test_tpe_proposals_depend_on_trials_that_are_running():
    busy, idle = make_of("TPE", TWO_FLOATS), make_of("TPE", TWO_FLOATS)
    for tuner in (busy, idle):
        run(tuner, range(12))
        tuner.ask(12)
    idle.tell(12, None)
    assert busy.ask(13) != idle.ask(13)


def test_a_tuner_proposes_the_same_parameters_again_if_the_search_space_has_one_point(a_tuner):
    space = {"a": {"_type": "choice", "_value": ["only"]}, "b": {"_type": "randint", "_value": [3, 4]}}
    values = iter(range(15))
    history = run(a_tuner(space), range(15), lambda parameters: float(next(values) % 4))
    assert {json.dumps(plain(past.parameters)) for past in history} == {'{"a": "only", "b": 3}'}
    rebuilt = a_tuner(space)
    rebuilt.restore(stored(history))
    assert plain(rebuilt.ask(15).parameters) == {"a": "only", "b": 3}


def test_changes_to_returned_parameters_do_not_affect_the_tuner(a_tuner):
    tuner = a_tuner({"a": {"_type": "choice", "_value": [[1]]}})
    tuner.ask(0).parameters["a"].append(2)
    assert plain(tuner.ask(1).parameters) == {"a": [1]}


def test_nested_parameter_names_and_names_with_slashes_do_not_collide(a_tuner):
    inner = {"_type": "uniform", "_value": [0, 1]}
    space = {
        "a": {"_type": "choice", "_value": [{"_name": "n", "b": inner}]},
        "a/0/b": {**inner, "_value": [5, 6]},
    }
    parameters = plain(a_tuner(space).ask(0).parameters)
    assert contains(parse_search_space(space), parameters) == []


# Hypothesis warns if examples share a function-scoped fixture. The warning is suppressed, because no example of this test changes
# the fixture.
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=spaces_raw, seed=st.integers(0, 2**32 - 1))
def test_proposed_parameters_lie_in_the_search_space_and_can_be_stored_as_json(a_tuner, raw, seed):
    space = parse_search_space(raw)
    tuner = a_tuner(raw, seed)
    history = run(tuner, range(14), lambda parameters: float(len(json.dumps(parameters))))
    for past in history:
        assert contains(space, plain(past.parameters)) == []
        assert json.loads(json.dumps(past.parameters)) == past.parameters
    rebuilt = a_tuner(raw, seed)
    rebuilt.restore(stored(history))
    assert rebuilt.ask(14).parameters == tuner.ask(14).parameters


def samples(raw, count):
    tuner = make_of("Random", {"x": raw}, 3, "maximize")
    return [tuner.ask(key).parameters["x"] for key in range(count)]


@pytest.mark.parametrize(
    ("raw", "values"),
    [
        ({"_type": "quniform", "_value": [2.5, 5.5, 1]}, {3, 4, 5}),
        ({"_type": "quniform", "_value": [1, 10, 3]}, {1, 3, 6, 9}),
        ({"_type": "qloguniform", "_value": [1, 100, 7]}, {1, *range(7, 99, 7)}),
        ({"_type": "randint", "_value": [0, 4]}, {0, 1, 2, 3}),
        ({"_type": "choice", "_value": ["a", "b", 1]}, {"a", "b", 1}),
    ],
)
def test_quantised_random_samples_have_exactly_the_documented_values(raw, values):
    assert set(samples(raw, 1000)) == values


@pytest.mark.parametrize(
    ("raw", "log"),
    [
        ({"_type": "normal", "_value": [3, 2]}, False),
        ({"_type": "qnormal", "_value": [3, 2, 0.01]}, False),
        ({"_type": "lognormal", "_value": [3, 2]}, True),
    ],
)
def test_normally_distributed_samples_have_the_configured_mean_and_deviation(raw, log):
    drawn = [math.log(value) if log else value for value in samples(raw, 2000)]
    assert statistics.mean(drawn) == pytest.approx(3, abs=0.15)
    assert statistics.stdev(drawn) == pytest.approx(2, abs=0.15)


def test_half_of_the_loguniform_samples_are_below_the_geometric_mean_of_the_bounds():
    drawn = samples({"_type": "loguniform", "_value": [1e-4, 1]}, 2000)
    assert sum(value < 1e-2 for value in drawn) / len(drawn) == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(("optimize_mode", "sign"), [("minimize", 1), ("maximize", -1)])
def test_tpe_minimises_a_quadratic_function_faster_than_random_search(optimize_mode, sign):
    space = dict.fromkeys(("x", "y"), TWO_FLOATS["x"])

    def best(name, seed):
        tuner = make_of(name, space, seed, optimize_mode)
        bowl = run(tuner, range(50), lambda at: sign * ((at["x"] - 2) ** 2 + (at["y"] + 1) ** 2))
        return min(abs(past.value) for past in bowl)

    medians = {name: statistics.median(best(name, seed) for seed in range(7)) for name in ("TPE", "Random")}
    assert medians["TPE"] < medians["Random"] / 2


@pytest.mark.parametrize("name", DRAWING)
def test_the_manager_creates_the_tuner_that_the_experiment_file_names(name, tmp_path):
    (tmp_path / "space.json").write_text(json.dumps(TWO_FLOATS))
    path = tmp_path / "experiment.yml"
    path.write_text(
        "{authorName: a, experimentName: e, trialConcurrency: 1, trainingServicePlatform: local, "
        "searchSpacePath: space.json, trial: {command: c, codeDir: .}, "
        f"tuner: {{builtinTunerName: {name}, classArgs: {{optimize_mode: minimize, seed: 9}}}}}}"
    )
    config = read_experiment_file(path)
    tuner = make_tuner(ExperimentSpec.from_json(config.to_json()))
    assert isinstance(tuner, OptunaTuner | Hyperband | PopulationTuner)
    assert tuner.ask(0) == make_of(name, TWO_FLOATS, 9).ask(0)


QUNIFORM = {"_type": "quniform", "_value": [2.5, 5.5, 1]}
GRID = {
    "net": {
        "_type": "choice",
        "_value": ["plain", {"_name": "deep", "inner": {"_type": "choice", "_value": [1, 2]}}],
    },
    "size": QUNIFORM,
    "layers": {"_type": "randint", "_value": [3, 5]},
}
BATCH = {"combine_params": {"_type": "choice", "_value": [{"lr": 0.1}, {"lr": 0.2, "n": [1]}, {"lr": 0.1}]}}


# This search space has only eleven values, so the refinement of its grid ends.
REFINED = {"q": {"_type": "qloguniform", "_value": [1, 30, 3]}}


@pytest.fixture(
    params=[("GridSearch", GRID, 3 * 5 * 2), ("GridSearch", REFINED, 11), ("BatchTuner", BATCH, 3)],
    ids=["grid", "refined", "batch"],
)
def a_list(request):
    """A factory of tuners with a finite list of points, and the number of points."""
    name, raw, count = request.param
    return lambda: make_of(name, raw), count


def test_a_tuner_with_a_finite_list_of_points_proposes_each_point_once(a_list):
    make, count = a_list
    tuner = make()
    history = run(tuner, range(count), lambda parameters: None)
    assert len(history) == count
    assert tuner.ask(count) is None
    assert tuner.ask(count + 1) is None
    tuner.tell(0, math.nan)
    assert not tuner.learns


def test_a_restored_tuner_with_a_finite_list_of_points_proposes_the_remaining_points(a_list):
    make, count = a_list
    whole = run(make(), range(count), lambda parameters: 1.0)
    rebuilt = make()
    rebuilt.restore(stored([whole[0], whole[2]]))
    assert proposed(run(rebuilt, range(3, count + 1), lambda parameters: 1.0)) == proposed(
        [whole[1], *whole[3:]]
    )
    assert rebuilt.ask(count + 1) is None
    rebuilt.tell(2, 5.0)
    with pytest.raises(InternalError, match="a second time"):
        rebuilt.ask(2)
    with pytest.raises(InternalError, match="did not propose"):
        rebuilt.tell(99, 1.0)
    with pytest.raises(InternalError, match="in use"):
        rebuilt.restore([])


@pytest.mark.parametrize("metadata", [{}, {"index": -1}, {"index": 10**9}, {"index": "0"}])
def test_restoring_metadata_of_a_different_list_of_points_raises_internal_error(a_list, metadata):
    make, _ = a_list
    with pytest.raises(InternalError, match="is not of this search space"):
        make().restore([PastTrial(0, {}, metadata, 1.0, ended=True)])


def test_a_grid_contains_every_combination_including_nested_values():
    points = [past.parameters for past in run(make_of("GridSearch", GRID), range(30), lambda parameters: 0.0)]
    assert [point["size"] for point in points[:10]] == [2.5, 2.5, 3, 3, 4, 4, 5, 5, 5.5, 5.5]
    nets = ["plain", {"_name": "deep", "inner": 1}, {"_name": "deep", "inner": 2}]
    assert [point["net"] for point in points[::10]] == nets
    assert len({json.dumps(point) for point in points}) == 30


@pytest.mark.parametrize(
    "case", json.loads((GOLDEN / "refining_grid.json").read_text()), ids=lambda case: "-".join(case["space"])
)
def test_a_refining_grid_has_the_same_points_as_the_grid_search_of_nni(case):
    """Source: the output of GridSearchTuner of nni 2.10.1, in order; null marks the end."""
    tuner = make_of("GridSearch", case["space"])
    for number, expected in enumerate(case["points"]):
        suggestion = tuner.ask(number)
        if expected is None:
            assert suggestion is None
        else:
            assert suggestion.parameters == approximately(expected)


def approximately(parameters):
    return {
        name: approximately(each)
        if isinstance(each, dict)
        else pytest.approx(each, rel=1e-9)
        if isinstance(each, float)
        else each
        for name, each in parameters.items()
    }


def test_a_restored_refining_grid_continues_without_repeating_a_point():
    space = {"x": {"_type": "uniform", "_value": [0, 1]}, "y": {"_type": "normal", "_value": [0, 1]}}
    whole = run(make_of("GridSearch", space), range(60), lambda parameters: 1.0)
    assert len({json.dumps(each.parameters) for each in whole}) == 60
    for known in (1, 10, 30):
        rebuilt = make_of("GridSearch", space)
        rebuilt.restore(stored(whole[:known]))
        assert proposed(run(rebuilt, range(known, 60), lambda parameters: 1.0)) == proposed(whole[known:])


def test_a_grid_search_refuses_an_index_beyond_the_grid_without_enumerating_all_points():
    tuner = make_of("GridSearch", TWO_FLOATS)
    with pytest.raises(InternalError, match="is not of this search space"):
        tuner.restore([PastTrial(0, {}, {"index": 10**9}, 1.0, ended=True)])


def test_a_grid_of_a_quantised_normal_distribution_is_finite():
    tuner = make_of("GridSearch", {"x": {"_type": "qnormal", "_value": [0, 1, 2]}})
    points = []
    while (suggestion := tuner.ask(len(points))) is not None:
        points.append(suggestion.parameters["x"])
    assert sorted(points) == [-8, -6, -4, -2, 0, 2, 4, 6, 8]


def test_the_first_point_of_a_huge_grid_is_proposed_without_enumerating_the_grid():
    raw = {name: {"_type": "randint", "_value": [0, 10**15]} for name in ("a", "b")}
    assert make_of("GridSearch", raw).ask(0).parameters == {"a": 0, "b": 0}


def test_batch_tuner_proposes_unchanged_copies_of_its_entries():
    tuner = make_of("BatchTuner", BATCH)
    first, second = tuner.ask(0).parameters, tuner.ask(1).parameters
    assert (first, second) == ({"lr": 0.1}, {"lr": 0.2, "n": [1]})
    second["n"].append(2)
    again = make_of("BatchTuner", BATCH)
    assert [again.ask(key).parameters for key in range(2)][1] == {"lr": 0.2, "n": [1]}


@pytest.mark.parametrize("name", names_in(TUNERS))
def test_the_table_of_tuners_states_correctly_whether_a_tuner_learns(name):
    tuner = make_of(name, BATCH if name == "BatchTuner" else TWO_FLOATS)
    assert tuner.learns == TUNERS[name].learns


@pytest.mark.parametrize("name", names_in(TUNERS, lambda each: each.learns and not each.adds_parameters))
def test_every_tuner_that_learns_from_results_minimises_a_quadratic_function_faster_than_random_search(name):
    # NSGAII needs several generations before it is better than random search, so it runs more trials than the other tuners.
    trials = 150 if name == "NSGAII" else 50
    assert best_of_bowl(name, trials, seeds=3) < best_of_bowl("Random", trials, seeds=9)


@pytest.mark.parametrize(
    "name", names_in(TUNERS, lambda each: each.name in ("GPTuner", "MetisTuner", "SMAC"))
)
def test_a_nested_parameter_that_occurs_in_two_options_is_modelled_as_one_parameter(name):
    """The optimum is rbf with C = gamma = 0.3. With random nested parameters, the median distance to the optimum would be 0.4."""
    unit = {"_type": "uniform", "_value": [0, 1]}
    options = [{"_name": "linear", "C": unit}, {"_name": "rbf", "C": unit, "gamma": unit}]
    raw = {"model": {"_type": "choice", "_value": options}, "n": {"_type": "randint", "_value": [1, 9]}}

    def value_of(at):
        model = at["model"]
        return abs(model["C"] - 0.3) + abs(model.get("gamma", 1) - 0.3) + 0.01 * at["n"]

    few = {"selection_num_starting_points": 20} | (
        {"selection_num_warm_up": 500} if name == "GPTuner" else {}
    )
    away = []
    for seed in range(3):
        tuner = make_of(name, raw, seed, **({} if name == "SMAC" else few))
        last = [past.parameters["model"] for past in run(tuner, range(40), value_of)][-15:]
        away += [max(abs(at["C"] - 0.3), abs(at.get("gamma", 1) - 0.3)) for at in last]
    assert statistics.median(away) < 0.2


@functools.cache
def best_of_bowl(name, trials, seeds):
    """The best value of a quadratic function of four parameters: the median over `seeds` seeds."""
    space = dict.fromkeys("wxyz", TWO_FLOATS["x"])

    def best(tuner):
        bowl = run(tuner, range(trials), lambda at: sum((value - 2) ** 2 for value in at.values()))
        return min(past.value for past in bowl)

    return statistics.median(best(make_of(name, space, seed, **SMALL.get(name, {}))) for seed in range(seeds))


def budgets(history):
    return [past.parameters["TRIAL_BUDGET"] for past in history]


@pytest.mark.parametrize(("optimize_mode", "best"), [("minimize", min), ("maximize", max)])
def test_hyperband_promotes_the_best_trials_of_a_round_to_a_larger_budget(optimize_mode, best):
    tuner = make_of("Hyperband", TWO_FLOATS, 1, optimize_mode, R=9)
    history = run(tuner, range(22), lambda at: at["x"])
    assert budgets(history) == [1] * 9 + [3] * 3 + [9] + [3] * 5 + [9] + [9] * 3
    first, second, third = (
        [past.value for past in part] for part in (history[:9], history[9:12], history[12:13])
    )
    assert second == sorted(first, reverse=best is max)[:3]
    assert third == [best(first)]


def continued_parents(tuner, keys):
    """Run trials. Returns the key of each trial that continues a parent trial, with the key of its parent."""
    pairs = []
    for key in keys:
        suggestion = tuner.ask(key)
        if suggestion.continues is not None:
            pairs.append((key, int(suggestion.continues.removeprefix("trial"))))
        tuner.tell_result(key, Observation(f"trial{key}", float(key % 5), None, has_succeeded=True))
    return pairs


def test_a_promoted_trial_continues_its_parent_trial_from_the_previous_round():
    tuner = make_of("Hyperband", TWO_FLOATS, 1, "minimize", R=9)
    # The nine trials of the first round report the values 0 1 2 3 4 0 1 2 3. Trial 10 is the best trial of the second round.
    assert continued_parents(tuner, range(13)) == [(9, 0), (10, 5), (11, 1), (12, 10)]


def test_a_population_member_continues_the_trial_of_the_previous_generation():
    tuner = a_population()
    assert continued_parents(tuner, range(8)) == [(4, 0), (5, 1), (6, 2), (7, 0)]


@pytest.mark.parametrize("name", names_in(TUNERS, lambda each: each.adds_parameters))
def test_a_restored_tuner_keeps_the_parent_trials_of_continued_trials(name):
    def new():
        return (
            a_population()
            if name == "PBTTuner"
            else make_of(name, TWO_FLOATS, R=9)
            if name == "Hyperband"
            else (make_of(name, TWO_FLOATS, min_budget=1, max_budget=9))
        )

    tuner, past = new(), []
    for key in range(12):
        suggestion = tuner.ask(key)
        tuner.tell_result(key, Observation(f"trial{key}", float(key % 5), None, has_succeeded=True))
        past.append(
            PastTrial(key, suggestion.parameters, suggestion.metadata, float(key % 5), True, f"trial{key}")
        )
    rebuilt = new()
    rebuilt.restore(past)
    following = tuner.ask(12)
    assert following.continues is not None
    assert rebuilt.ask(12) == following


def test_hyperband_starts_the_next_bracket_while_trials_of_the_first_bracket_run():
    tuner = make_of("Hyperband", TWO_FLOATS, R=9)
    asked = [tuner.ask(key).parameters for key in range(20)]
    assert [each["TRIAL_BUDGET"] for each in asked] == [1] * 9 + [3] * 5 + [9] * 3 + [1] * 3
    for key in range(9):
        tuner.tell(key, float(key))
    assert tuner.ask(20).parameters == {**asked[0], "TRIAL_BUDGET": 3}


def test_hyperband_promotes_no_trial_if_all_trials_of_a_round_failed():
    tuner = make_of("Hyperband", TWO_FLOATS, R=9)
    history = run(tuner, range(12), lambda at: None)
    assert budgets(history) == [1] * 9 + [3] * 3
    assert len({past.parameters["x"] for past in history}) == 12


def test_hyperband_with_a_maximum_budget_of_one_is_random_search():
    history = run(make_of("Hyperband", TWO_FLOATS, R=1), range(5))
    assert budgets(history) == [1] * 5
    assert len({past.parameters["x"] for past in history}) == 5


def test_qmc_points_are_evenly_distributed():
    tuner = make_of("QMC", {"x": {"_type": "uniform", "_value": [0, 1]}})
    assert sorted(int(tuner.ask(key).parameters["x"] * 16) for key in range(16)) == list(range(16))


@pytest.mark.parametrize(
    "a", [{"_type": "choice", "_value": list(range(30))}, {"_type": "quniform", "_value": [0, 29, 1]}]
)
def test_smac_repeats_fewer_points_with_config_dedup_than_without(a):
    raw = {"a": a}

    def modelled(**class_args):
        history = run(make_of("SMAC", raw, 2, **class_args), range(24), lambda at: float(at["a"]))
        return {past.parameters["a"] for past in history}

    assert len(modelled(config_dedup=True)) > len(modelled()) + 2


# ---- population based training


def checkpoints_of(suggestion):
    return tuple(
        str(Path(suggestion.parameters[f"{verb}_checkpoint_dir"]).relative_to(CHECKPOINTS))
        for verb in ("load", "save")
    )


def a_population(raw=TWO_FLOATS, seed=1, **class_args):
    return make_of("PBTTuner", raw, seed, **{"population_size": 4, "fraction": 0.25, **class_args})


def a_generation(tuner, first_key, values):
    """Request a whole generation, then report these values. Returns the suggestions."""
    asked = [tuner.ask(first_key + number) for number in range(len(values))]
    assert tuner.ask(first_key + len(values)) is Later.LATER
    for number, value in enumerate(values):
        tuner.tell(first_key + number, value)
    return asked


def test_the_worst_member_of_a_generation_continues_from_the_best_members_checkpoint():
    tuner = a_population()
    first = a_generation(tuner, 0, [0.5, 0.1, 0.9, 0.3])
    assert [checkpoints_of(each) for each in first] == [(str(member), f"{member}/0") for member in range(4)]
    second = [tuner.ask(key) for key in range(4, 8)]
    assert [checkpoints_of(each) for each in second] == [
        ("0/0", "0/1"), ("1/0", "1/1"), ("1/0", "2/1"), ("3/0", "3/1"),
    ]  # fmt: skip
    for member in (0, 1, 3):
        assert plain(second[member].parameters) == plain(first[member].parameters)
    assert plain(second[2].parameters) not in [plain(each.parameters) for each in first]


@pytest.mark.parametrize("own", [None, "/mnt/checkpoints"])
def test_trials_have_separate_checkpoint_folders_after_a_change_of_the_search_space(own):
    args = TUNERS["PBTTuner"].args(all_checkpoint_dir=own)
    folders = set()
    for revision in range(3):
        tuner = PopulationTuner(parse_search_space(TWO_FLOATS), args, CheckpointFolder(CHECKPOINTS, revision))
        asked = tuner.ask(0).parameters
        folders |= {asked["save_checkpoint_dir"], asked["load_checkpoint_dir"]}
    assert len(folders) == 6
    assert {Path(each).is_relative_to(own or CHECKPOINTS) for each in folders} == {True}


def test_parameters_copied_from_the_best_member_are_perturbed():
    raw = {
        "x": {"_type": "uniform", "_value": [1, 100]},
        "n": {"_type": "randint", "_value": [0, 50]},
        "c": {"_type": "choice", "_value": list("abcdefgh")},
        "g": {"_type": "normal", "_value": [0, 1]},
    }
    for seed in range(8):
        tuner = a_population(raw, seed, resample_probability=0)
        best = a_generation(tuner, 0, [0.5, 0.1, 0.9, 0.3])[1].parameters
        moved = [tuner.ask(key) for key in range(4, 8)][2].parameters
        assert moved["x"] in (
            pytest.approx(min(best["x"] * 1.2, 100)), pytest.approx(max(best["x"] * 0.8, 1)),
        )  # fmt: skip
        assert abs(moved["n"] - best["n"]) <= 1
        assert abs(ord(moved["c"]) - ord(best["c"])) <= 1
        assert contains(parse_search_space(raw), plain(moved)) == []


def test_failed_population_members_continue_from_a_successful_member_or_restart_if_all_members_failed():
    tuner = a_population()
    a_generation(tuner, 0, [None, 0.1, None, math.nan])
    second = [tuner.ask(key) for key in range(4, 8)]
    assert {checkpoints_of(each)[0] for each in second} == {"1/0"}
    for key in range(4, 8):
        tuner.tell(key, None)
    third = [tuner.ask(key) for key in range(8, 12)]
    assert [checkpoints_of(each) for each in third] == [(str(member), f"{member}/2") for member in range(4)]
    assert len({json.dumps(plain(each.parameters)) for each in third}) == 4


def test_a_restored_population_waits_for_trials_that_were_running_before_the_restart():
    tuner = a_population()
    a_generation(tuner, 0, [0.5, 0.1, 0.9, 0.3])
    asked = [tuner.ask(key) for key in range(4, 7)]
    tuner.tell(5, 0.2)
    past = [
        PastTrial(key, {}, suggestion.metadata, value, value is not None)
        for key, (suggestion, value) in enumerate(
            zip(
                [*a_generation(a_population(), 0, [0.5, 0.1, 0.9, 0.3]), *asked],
                [0.5, 0.1, 0.9, 0.3, None, 0.2, None],
                strict=True,
            )
        )
    ]
    rebuilt = a_population()
    rebuilt.restore(reversed(stored(past)))
    last = tuner.ask(7)
    assert last.metadata["member"] == 3
    assert rebuilt.ask(7) == last
    for each in (tuner, rebuilt):
        assert each.ask(8) is Later.LATER
        for key in (4, 6, 7):
            each.tell(key, float(key))
    assert [tuner.ask(key) for key in range(8, 12)] == [rebuilt.ask(key) for key in range(8, 12)]


def test_a_normally_distributed_parameter_is_perturbed_by_a_fraction_of_its_sigma():
    tuner = a_population(
        {"x": {"_type": "normal", "_value": [10, 2]}},
        resample_probability=0,
        population_size=30,
        optimize_mode="maximize",
    )
    first = [tuner.ask(key).parameters["x"] for key in range(30)]
    for key, value in enumerate(first):
        tuner.tell(key, value)
    for key in range(30, 60):
        value = tuner.ask(key).parameters["x"]
        assert min(abs(value - each) for each in first) < 0.2 * 2 + 1e-6


def test_the_checkpoint_folder_of_a_population_can_be_configured():
    tuner = a_population(all_checkpoint_dir="/mnt/mine")
    assert tuner.ask(0).parameters["save_checkpoint_dir"] == "/mnt/mine/0/0"


# ---- BOHB


def test_bohb_has_the_same_budget_schedule_as_hyperband():
    bohb, hyperband = (
        make_of("BOHB", TWO_FLOATS, max_budget=18, min_budget=2),
        make_of("Hyperband", TWO_FLOATS, R=9),
    )
    of_bohb, of_hyperband = (
        budgets(run(tuner, range(22), lambda at: at["x"])) for tuner in (bohb, hyperband)
    )
    assert of_bohb == [2 * budget for budget in of_hyperband]


@pytest.mark.parametrize(
    ("least", "most", "expected"), [(4, 6, {6}), (3, 100, {3, 11, 33, 100}), (5, 5, {5}), (1, 3, {1, 3})]
)
def test_bohb_budgets_range_from_min_budget_to_max_budget(least, most, expected):
    tuner = make_of("BOHB", TWO_FLOATS, max_budget=most, min_budget=least)
    assert set(budgets(run(tuner, range(amount(40, 120)), lambda at: at["x"]))) == expected


def test_bohb_samples_near_good_results_unless_random_fraction_is_one():
    raw = {"x": {"_type": "uniform", "_value": [0, 1]}}

    def later(**class_args):
        tuner = make_of("BOHB", raw, 3, max_budget=9, **class_args)
        history = run(tuner, range(60), lambda at: abs(at["x"] - 0.25))
        return statistics.median(past.value for past in history[30:] if past.metadata["round"] == 0)

    assert later(random_fraction=0) < later(random_fraction=1) / 2


# ---- results of parameters that the tuner did not propose


def known_to_be(parameters, value):
    return PriorResult(parameters, value, json.dumps(value))


# The population of each of these tuners consists only of its own trials, so the tuner cannot use imported results.
LEARN_FROM_OWN_TRIALS = ("CmaEs", "NSGAII")


def learns_from_others(declared):
    """True if the tuner uses imported results."""
    return declared.learns and not declared.adds_parameters and declared.name not in LEARN_FROM_OWN_TRIALS


def test_a_tuner_uses_imported_results_only_if_it_learns_from_results(a_tuner):
    tuner = a_tuner(ALL_TYPES)
    donor = make_of("Random", ALL_TYPES, seed=7)
    known = [known_to_be(donor.ask(key).parameters, float(key)) for key in range(12)]
    outside = known_to_be({**known[0].parameters, "randint": 2}, 1.0)
    less = known_to_be({"uniform": 0.5}, 1.0)
    used = tuner.import_results([*known, outside, less])
    assert used == (len(known) if learns_from_others(TUNERS[a_tuner.name]) else 0)
    history = run(tuner, range(8), lambda parameters: parameters["normal"])
    again = a_tuner(ALL_TYPES)
    again.restore(stored(history))
    again.import_results(known)
    assert contains(parse_search_space(ALL_TYPES), plain(again.ask(8).parameters)) == []


def test_a_tuner_with_imported_results_proposes_the_same_parameters_after_a_restart(a_tuner):
    donor = make_of("Random", TWO_FLOATS, seed=7)
    known = [known_to_be(donor.ask(key).parameters, float(key % 3)) for key in range(12)]
    unbroken, rebuilt = a_tuner(), a_tuner()
    unbroken.import_results(known)
    history = run(unbroken, range(30), lambda parameters: round(parameters["x"], 1))
    rebuilt.import_results(known)
    rebuilt.restore(stored(history))
    later = [run(each, range(30, 36)) for each in (unbroken, rebuilt)]
    assert proposed(later[0]) == proposed(later[1])


@pytest.mark.parametrize("name", names_in(TUNERS, learns_from_others))
def test_a_tuner_with_imported_results_searches_near_the_best_results(name):
    space = {each: {"_type": "uniform", "_value": [0, 1]} for each in "xy"}
    tuner = make_of(name, space, **SMALL.get(name, {}))
    known = [known_to_be({"x": each / 40, "y": 0.5}, abs(each / 40 - 0.8)) for each in range(41)]
    assert tuner.import_results(known) == 41
    near = [abs(past.parameters["x"] - 0.8) for past in run(tuner, range(15), lambda parameters: 1.0)]
    assert statistics.quantiles(near)[0] < 0.08, "random search has a first quartile of 0.125"


@given(raw=spaces_raw, seed=st.integers(0, 1000))
def test_parameters_are_unchanged_after_a_conversion_to_draws_and_back(raw, seed):
    space = parse_search_space(raw)
    parameters = make_of("Random", raw, seed=seed).ask(0).parameters
    sampling = Sampling(space)
    draws = sampling.draws_of(parameters)
    assert contains(space, sampling.sample(lambda name, _: draws[name])) == []
    again = sampling.sample(lambda name, _: draws[name])
    assert flat(again) == pytest.approx(flat(parameters), rel=1e-6, abs=1e-6)


def flat(value):
    """The leaves of nested parameters by path. A number is the value of its path. Any other value is appended to the path, whose
    value is then 0.
    """
    if isinstance(value, dict):
        return {f"{key}.{inner}": leaf for key, each in value.items() for inner, leaf in flat(each).items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"": value} if is_number else {json.dumps(value): 0}


def test_a_tuner_with_a_finite_list_of_points_does_not_propose_imported_points(a_list):
    make, count = a_list
    everything = proposed(run(make(), range(count), lambda parameters: 1.0))
    known = [known_to_be(point, 1.0) for point in everything[1::2]]
    tuner = make()
    assert tuner.import_results(known) == len(known)
    left = range(count - len(known))
    assert proposed(run(tuner, left, lambda parameters: 1.0)) == everything[::2]
    assert tuner.ask(count) is None


RESULT_OF_ONE = Observation("aB3dE", 1.0, "1.0", has_succeeded=True)


def test_a_tuner_with_a_changed_search_space_keeps_results_inside_the_new_space(tmp_path):
    wide = {"x": {"_type": "quniform", "_value": [0, 9, 1]}}
    narrow = {"x": {"_type": "quniform", "_value": [5, 9, 1]}}

    class Config:
        def __init__(self, raw, revision):
            self.raw, self.search_space_revision = raw, revision

    def make(config):
        return make_of("GridSearch", config.raw)

    proposer = TunerSession(Config(wide, 0), make)
    asked = [proposer.ask(key) for key in range(7)]
    assert [each.parameters["x"] for each in asked] == [0, 1, 2, 3, 4, 5, 6]
    for key in range(5):
        proposer.tell_result(key, RESULT_OF_ONE)
    history = [
        PastTrial(key, asked[key].parameters, asked[key].metadata, 1.0, ended=True) for key in range(6)
    ]
    # The history already contains the result of trial 5, but the tuner has not received it yet. Trial 6 is running.
    known = [known_to_be(past.parameters, 1.0) for past in history]
    proposer.change_space(Config(narrow, 1), known, over=set(range(6)))
    proposer.tell_result(5, RESULT_OF_ONE)
    first = proposer.ask(7)
    assert first.parameters == {"x": 6.0}, "5 has a result already"
    proposer.tell_result(6, RESULT_OF_ONE)
    second = proposer.ask(8)
    assert second.parameters == {"x": 7.0}

    history += [
        PastTrial(6, asked[6].parameters, asked[6].metadata, None, ended=False),
        PastTrial(7, first.parameters, first.metadata, 1.0, ended=True),
        PastTrial(8, second.parameters, second.metadata, None, ended=False),
    ]
    after = TunerSession(Config(narrow, 1), make)
    after.restore(stored(history), [known_to_be({"x": 8.0}, 2.0)])
    assert after.ask(9).parameters == {"x": 9.0}
    after.tell_result(6, RESULT_OF_ONE)
    after.tell_result(8, RESULT_OF_ONE)
    assert after.ask(10) is None
