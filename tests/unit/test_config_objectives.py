"""`objectives` and `constraints` of an experiment file."""

import pytest
import yaml

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.reader import read_experiment_file
from nni_manager.domain.objectives import Constraint, Objective, Objectives

ACCURACY, LATENCY = {"metric": "accuracy", "mode": "maximize"}, {"metric": "latency_ms", "mode": "minimize"}
TWO = [ACCURACY, LATENCY]


@pytest.fixture
def read(tmp_path):
    def read_file(**keys):
        path = tmp_path / "config.yml"
        document = {
            "trialConcurrency": 1,
            "searchSpace": {"x": {"_type": "uniform", "_value": [0, 1]}},
            "trialCommand": "python3 train.py",
            "trainingService": {"platform": "local"},
        }
        path.write_text(yaml.safe_dump(document | keys))
        return read_experiment_file(path)

    return read_file


def test_objectives_and_constraints_survive_a_round_trip_through_the_store(read) -> None:
    spec = read(objectives=TWO, constraints=[{"metric": "size_mb", "at_most": 50, "atLeast": 1.5}])
    assert ExperimentSpec.from_json(spec.to_json()) == spec
    assert spec.all_objectives == Objectives(
        (Objective("accuracy", "maximize"), Objective("latency_ms", "minimize")),
        (Constraint("size_mb", 50.0, 1.5),),
    )
    assert spec.tuner.name == "TPE", "Auto, the default, has one objective only"
    assert not [each for each in spec.warnings if "default" in each], "the modes are given"


def test_the_default_objective_is_the_default_metric_with_the_optimize_mode_of_the_tuner(read) -> None:
    spec = read(
        tuner={"name": "Random", "classArgs": {"optimize_mode": "minimize"}},
        constraints=[{"metric": "size_mb", "at_least": 1}],
    )
    assert spec.all_objectives.all == (Objective("default", "minimize"),)
    assert spec.all_objectives.constraints == (Constraint("size_mb", None, 1.0),)
    assert not spec.all_objectives.is_plain
    assert read().all_objectives.is_plain


def test_a_single_objective_sets_the_mode_of_tuner_and_assessor(read) -> None:
    spec = read(objectives=[LATENCY], assessor={"name": "Medianstop"})
    assert spec.tuner.optimize_mode == "minimize"
    assert spec.assessor is not None
    assert spec.assessor.optimize_mode == "minimize", "not Medianstop's own default"
    assert not [each for each in spec.warnings if "stopped" in each]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"objectives": TWO, "tuner": {"name": "Anneal"}},
            "cannot use tuner.name: Anneal can search for one objective only; use one of TPE, NSGAII, GP, Random, BatchTuner, "
            "GridSearch, QMC, or your own class",
        ),
        (
            {"objectives": TWO, "advisor": {"name": "BOHB"}},
            "cannot use advisor.name: BOHB can search for one objective only",
        ),
        (
            {"objectives": TWO, "tuner": {"name": "TPE", "classArgs": {"optimize_mode": "minimize"}}},
            "cannot use tuner.classArgs.optimize_mode: objectives says what is maximized and minimized; remove optimize_mode",
        ),
        (
            {"objectives": TWO, "assessor": {"name": "MedianPruner"}},
            "cannot use assessor: MedianPruner compares the intermediate results of one objective, and there are 2",
        ),
        (
            {"objectives": [ACCURACY, {**ACCURACY, "mode": "minimize"}]},
            'cannot use objectives[1]: "accuracy" is an objective already; remove one of them',
        ),
        ({"objectives": [{"metric": "accuracy"}]}, "cannot do without objectives[0].mode"),
        ({"objectives": "accuracy"}, 'cannot use objectives: "accuracy" is not a list of objectives'),
        (
            {"constraints": [{"metric": "size_mb"}]},
            '"size_mb": it has no bound; write at_most, at_least or both',
        ),
        (
            {"constraints": [{"metric": "size_mb", "at_most": 1, "at_least": 2}]},
            '"size_mb": at_least 2 is above at_most 1; swap them',
        ),
        (
            {"constraints": [{"metric": "size_mb", "at_most": float("nan")}]},
            "cannot use constraints[0].atMost",
        ),
        ({"constraints": [{"metric": "size_mb", "at_most": True}]}, "cannot use constraints[0].atMost"),
    ],
)
def test_invalid_objectives_or_constraints_cause_one_error_with_a_remedy(read, keys, message: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        read(**keys)
    assert message in str(refused.value)
    assert len(refused.value.diagnostics) == 1


def test_several_objectives_are_accepted_with_a_custom_tuner_and_a_custom_assessor(read, tmp_path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    own = {"className": "mine.Mine", "codeDirectory": str(tmp_path)}
    spec = read(objectives=TWO, tuner=own | {"classArgs": {"optimize_mode": "minimize"}}, assessor=own)
    assert spec.all_objectives.has_several
    assert spec.tuner.optimize_mode == "maximize", (
        "that of the first objective; the argument is for the class"
    )
