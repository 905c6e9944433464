"""Queries of the Python API, on stored experiments that never ran."""

import json
import math
import random

import pytest
from made_experiment import made_experiment, made_trial

from nni_manager.errors import UserError
from nni_manager.experiment import Experiment, TrialMetricData
from nni_manager.experiment.data import curves_of
from nni_manager.store.registry import Registry

pandas = pytest.importorskip("pandas")


@pytest.fixture
def an_experiment(tmp_path, monkeypatch):
    """Creates an experiment whose trials have these final results; None: the trial has failed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def make(*results, parameters=None, **config):
        def trial(number, now_s):
            made, result = made_trial(number, now_s), results[number]
            if parameters is not None:
                made.parameters = parameters[number]
            made.run.final = None if result is None else json.dumps(result)
            # `value` is the number that the tuner receives. In a real experiment, the manager computes it from the final result.
            made.run.value = result if result in (0.5, 0.25) else None
            if isinstance(result, dict):
                made.run.value = result.get("loss")
            return made

        folder = made_experiment(tmp_path / "made", len(results), trial, **config).folder
        Registry.of_user().add(folder)
        return Experiment(id=folder.experiment_id)

    return make


@pytest.mark.parametrize(
    ("results", "values"),
    [
        ((0.5, [1, 2], "text", float("-inf"), None, 0.25), [0.5, 0.25]),
        ((None, None), []),
        ((), []),
    ],
)
def test_the_column_named_value_of_a_data_frame_has_the_numbers_that_the_tuner_receives(
    an_experiment, results, values
):
    frame = an_experiment(*results).trials_dataframe()
    assert frame.value.dtype == float
    assert len(frame) == len(results)
    assert list(frame.nlargest(9, "value").value.dropna()) == values
    assert not {"onFront", "violates"} & {*frame.columns}


def test_a_data_frame_shows_the_pareto_front_and_the_violated_constraints(an_experiment):
    experiment = an_experiment(
        {"loss": 0.5, "size": 3}, {"loss": 0.25, "size": 4}, {"loss": 0.5, "size": 9}, None,
        objectives=[{"metric": "loss", "mode": "minimize"}, {"metric": "size", "mode": "minimize"}],
        constraints=[{"metric": "size", "atMost": 5}],
    )  # fmt: skip
    frame = experiment.trials_dataframe()
    assert list(frame.onFront) == [True, True, False, False]
    assert list(frame.violates) == [[], [], ["size ≤ 5"], []]
    assert list(frame.columns[-3:]) == ["note", "onFront", "violates"]


def test_importances_refer_to_the_best_results_of_the_selected_objective(an_experiment):
    numbers = random.Random(1)
    drawn = [{"a": numbers.uniform(-1, 1), "net": {"b": numbers.uniform(-1, 1)}} for _ in range(60)]
    # The values are made so that the highest depend on `a` only, and the lowest on `b` only.
    values = [max(each["a"], 0) + min(each["net"]["b"], 0) for each in drawn]
    experiment = an_experiment(
        *[{"loss": value, "gain": value, "other": value} for value in values],
        parameters=drawn,
        objectives=[{"metric": "loss", "mode": "minimize"}, {"metric": "gain", "mode": "maximize"}],
    )
    shares = experiment.importances()
    assert [*shares] == ["net/b", "a"]
    assert sum(shares.values()) == pytest.approx(1)
    assert experiment.importances("loss") == shares
    assert [*experiment.importances("gain")] == ["a", "net/b"]
    assert experiment.importances("other") == shares, (
        "a metric that is no objective has the first one's direction"
    )
    with pytest.raises(
        UserError, match="0 trials have a number 'speed'; 10 are needed; name one of gain, loss, other"
    ):
        experiment.importances("speed")


def test_a_data_frame_has_a_column_for_the_metric_named_default_if_it_is_not_the_first_objective(
    an_experiment,
):
    results = [{"loss": 0.5, "default": 3}, {"loss": 0.25, "default": 4}]
    both = [{"metric": "loss", "mode": "minimize"}, {"metric": "default", "mode": "maximize"}]
    experiment = an_experiment(*results, objectives=both)
    for frame in (experiment.trials_dataframe(), experiment.export_data(as_frame=True)):
        assert [list(frame[name]) for name in ("value", "value/loss", "value/default")] == [
            [0.5, 0.25],
            [0.5, 0.25],
            [3, 4],
        ]


@pytest.mark.parametrize(
    ("results", "why"),
    [
        ((*range(9), None), "9 trials have a number 'default'; 10 are needed"),
        (range(10), "all trials had the same parameters"),
    ],
)
def test_importances_require_ten_results_and_a_parameter_with_different_values(an_experiment, results, why):
    experiment = an_experiment(*results, parameters=[{"a": 1}] * 10)
    with pytest.raises(
        UserError, match=f"cannot evaluate the importance of parameters: {why}; run more trials"
    ):
        experiment.importances()


def test_the_learning_curves_of_a_data_frame_have_a_row_for_each_report():
    def report(trial_id, kind, data, at=1000):
        return TrialMetricData(at, trial_id, "0", kind, 0, data)

    frame = curves_of(
        [
            report("a", "PERIODICAL", {"default": 0.5, "loss": 2}),
            report("a", "FINAL", {"default": float("inf"), "loss": 1}),
            report("a", "FINAL", 7),
            report("a", "PERIODICAL", 0.25),
            report("b", "PERIODICAL", 3, None),
            report("b", "PERIODICAL", "text"),
        ],
        "default",
    )
    assert list(frame.columns) == ["trialJobId", "step", "type", "timestamp", "value", "value/loss"]
    assert list(zip(frame.trialJobId, frame.step, frame.type, strict=True)) == [
        ("a", 0, "PERIODICAL"),
        ("a", 1, "FINAL"),
        ("a", 2, "PERIODICAL"),
        ("b", 0, "PERIODICAL"),
        ("b", 1, "PERIODICAL"),
    ]
    assert frame.value.dtype == float
    assert [None if math.isnan(each) else each for each in frame.value] == [0.5, None, 0.25, 3, None]
    assert list(frame["value/loss"].dropna()) == [2, 1]
    assert list(curves_of([report("a", "FINAL", {"default": 1, "loss": 2})], "loss").value) == [2]
    assert list(curves_of([], "default").columns) == ["trialJobId", "step", "type", "timestamp", "value"]
