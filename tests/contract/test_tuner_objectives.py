"""Tuners with several objectives and with constraints: tests for all tuners that support these, and a comparison with Optuna."""

import json
from pathlib import Path

import optuna
import pytest
from built_in import names_in

from nni_manager.config.algorithms import TUNERS
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.reader import read_experiment_file
from nni_manager.domain.objectives import Constraint, Objective, Objectives
from nni_manager.tuner.base import BaseTuner, Observation, PastTrial
from nni_manager.tuner.registry import make_tuner
from nni_manager.tuner.tuner_session import TunerSession

UNIT = {name: {"_type": "uniform", "_value": [0, 1]} for name in ("x", "y")}
CHOICES = {name: {"_type": "choice", "_value": [0.0, 0.25, 0.5, 0.75]} for name in ("x", "y")}
TWO = (Objective("gain", "maximize"), Objective("cost", "minimize"))
BOUND = (Constraint("size", at_most=0.5),)
FEW = {"NSGAII": {"population_size": 4}}


def spec_of(folder: Path, name: str, objectives: Objectives, space: object = UNIT) -> ExperimentSpec:
    mode = {} if len(objectives.all) > 1 else {"optimize_mode": objectives.first.mode}
    args = mode if name in ("BatchTuner", "GridSearch") else mode | {"seed": 7, **FEW.get(name, {})}
    document = {
        "trialConcurrency": 1,
        "searchSpace": space,
        "trialCommand": "true",
        "tuner": {"name": name, "classArgs": args},
        "objectives": [{"metric": each.metric, "mode": each.mode} for each in objectives.all]
        if len(objectives.all) > 1
        else [],
        "constraints": [{"metric": each.metric, "at_most": each.at_most} for each in objectives.constraints],
        "trainingService": {"platform": "local"},
    }
    path = folder / "config.yml"
    path.write_text(json.dumps(document))
    return read_experiment_file(path)


def result_of(parameters: dict[str, float]) -> str:
    """The metrics of a trial.

    The Pareto front is where y is 0. A trial is feasible if x is at most 0.5.
    """
    x, y = parameters["x"], parameters["y"]
    return json.dumps({"gain": x - y, "cost": x + y, "size": x, "default": x})


def play(tuner: BaseTuner | TunerSession, keys: range, objectives: Objectives) -> list[PastTrial]:
    past = []
    for key in keys:
        asked = tuner.ask(key)
        metric = result_of(asked.parameters)
        value = objectives.value_of(metric)
        tuner.tell_result(key, Observation(f"t{key}", value, metric, True))
        past.append(
            PastTrial(
                key, asked.parameters, asked.metadata, value, True, f"t{key}", metric, has_succeeded=True
            )
        )
    return past


@pytest.fixture(
    params=names_in(TUNERS, lambda each: each.has_several_objectives and each.name != "BatchTuner")
)
def name(request):
    return request.param


@pytest.mark.parametrize("constraints", [(), BOUND], ids=["free", "constrained"])
def test_a_restored_tuner_with_several_objectives_proposes_the_same_parameters_as_an_uninterrupted_tuner(
    name, constraints, tmp_path
) -> None:
    objectives = Objectives(TWO, constraints)
    spec = spec_of(tmp_path, name, objectives, CHOICES if name == "GridSearch" else UNIT)
    tuner = TunerSession(spec, make_tuner)
    past = play(tuner, range(12), objectives)
    restored = TunerSession(spec, make_tuner)
    restored.restore(past, [])
    further = [tuner.ask(key) for key in range(12, 15)]
    assert [restored.ask(key) for key in range(12, 15)] == further
    assert len({json.dumps(each.parameters) for each in past}) > 6


@pytest.mark.parametrize("name", names_in(TUNERS, lambda each: each.learns_constraints))
def test_the_optuna_study_contains_all_objective_values_and_constraint_violations(name, tmp_path) -> None:
    objectives = Objectives(TWO, BOUND)
    spec = spec_of(tmp_path, name, objectives)
    tuner = make_tuner(spec)
    past = play(tuner, range(3), objectives)
    fresh = make_tuner(spec)
    fresh.restore(past)
    for each in (tuner, fresh):
        for trial, earlier in zip(each._study.get_trials(), past, strict=True):
            x, y = earlier.parameters["x"], earlier.parameters["y"]
            assert trial.values == [x - y, x + y]
            assert trial.constraints == {"0": x - 0.5}
            assert trial.state is optuna.trial.TrialState.COMPLETE


def test_a_tuner_regards_a_trial_as_failed_if_its_result_lacks_an_objective(tmp_path) -> None:
    tuner = make_tuner(spec_of(tmp_path, "TPE", Objectives(TWO)))
    for key, metric in enumerate(['{"gain": 1}', None, "0.5"]):
        tuner.ask(key)
        tuner.tell_result(key, Observation("t", 0.5, metric, True))
    assert {each.state for each in tuner._study.get_trials()} == {optuna.trial.TrialState.FAIL}


@pytest.mark.parametrize("name", ["TPE", "NSGAII"])
def test_the_pareto_front_of_a_tuner_is_as_good_as_the_pareto_front_of_an_optuna_study(
    name, tmp_path
) -> None:
    """The tuner and the Optuna study use the same sampler, settings and budget. The measure is the area that the front
    dominates.
    """
    objectives, count = Objectives(TWO, BOUND), 60
    tuner = make_tuner(spec_of(tmp_path, name, objectives))
    ours = [json.loads(each.metric or "") for each in play(tuner, range(count), objectives)]
    sampler = (
        optuna.samplers.TPESampler(seed=7, multivariate=True, constant_liar=True)
        if name == "TPE"
        else optuna.samplers.NSGAIISampler(seed=7, population_size=4)
    )
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    theirs = []
    for _ in range(count):
        trial = study.ask()
        result = json.loads(result_of({each: trial.suggest_float(each, 0, 1) for each in UNIT}))
        trial.set_constraint("size", result["size"] - 0.5)
        study.tell(trial, [result["gain"], result["cost"]])
        theirs.append(result)
    found = [area(objectives, results) for results in (ours, theirs, random_results(count))]
    assert found[0] > found[2], "better than at random"
    assert found[0] >= 0.9 * found[1], "as good as Optuna's"
    front = objectives.ranked((index, json.dumps(each)) for index, each in enumerate(theirs))
    assert {id(theirs[index]) for index in front} == {
        id(theirs[each.number]) for each in study.best_trials
    }, "our front of Optuna's results is Optuna's"


def random_results(count: int) -> list[dict[str, float]]:
    import random

    drawn = random.Random(7)
    return [json.loads(result_of({"x": drawn.random(), "y": drawn.random()})) for _ in range(count)]


def area(objectives: Objectives, results: list[dict[str, float]]) -> float:
    """The area that the Pareto front dominates, with the reference point gain -1 and cost 1.5."""
    ranked = objectives.ranked((each, json.dumps(each)) for each in results)
    total, covered = 0.0, -1.0
    for each in reversed(ranked):  # The loop starts with the trial of the lowest cost.
        total += max(0.0, each["gain"] - covered) * max(0.0, 1.5 - each["cost"])
        covered = max(covered, each["gain"])
    return total


@pytest.mark.parametrize("name", names_in(TUNERS, lambda each: each.name not in ("BatchTuner", "PBTTuner")))
def test_every_tuner_proposes_feasible_parameters_for_one_objective_with_a_constraint(name, tmp_path) -> None:
    """The parameters with the best objective values violate the constraint.

    Tuners that support constraints must prefer feasible parameters. Other tuners receive infeasible trials as failed trials.
    """
    objectives = Objectives((Objective("default", "maximize"),), BOUND)
    spec = spec_of(tmp_path, name, objectives, CHOICES if name == "GridSearch" else UNIT)
    tuner = TunerSession(spec, make_tuner)
    past = play(tuner, range(30 if TUNERS[name].learns_constraints else 12), objectives)
    assert any(each.parameters["x"] <= 0.5 for each in past)
    if TUNERS[name].learns_constraints:
        late = [each.parameters["x"] for each in past[15:]]
        assert sum(x <= 0.5 for x in late) > len(late) / 2
    TunerSession(spec, make_tuner).restore(past, [])
