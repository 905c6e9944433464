"""Queries of the Python API, on stored experiments that never ran."""

import json

import pytest
from made_experiment import made_experiment, made_trial

from nni_manager.experiment import Experiment
from nni_manager.store.registry import Registry

pandas = pytest.importorskip("pandas")


@pytest.fixture
def an_experiment(tmp_path, monkeypatch):
    """Creates an experiment whose trials have these final results; None: the trial has failed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def make(*results, **config):
        def trial(number, now_s):
            made, result = made_trial(number, now_s), results[number]
            made.run.final = None if result is None else json.dumps(result)
            # The tuner's number; the domain decides what has one.
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
def test_the_values_of_trials_in_a_data_frame_are_the_numbers_of_the_tuner(an_experiment, results, values):
    frame = an_experiment(*results).trials_dataframe()
    assert frame.value.dtype == float
    assert len(frame) == len(results)
    assert list(frame.nlargest(9, "value").value.dropna()) == values
    assert not {"onFront", "violates"} & {*frame.columns}


def test_a_data_frame_shows_the_front_of_several_objectives_and_the_violated_constraints(an_experiment):
    experiment = an_experiment(
        {"loss": 0.5, "size": 3}, {"loss": 0.25, "size": 4}, {"loss": 0.5, "size": 9}, None,
        objectives=[{"metric": "loss", "mode": "minimize"}, {"metric": "size", "mode": "minimize"}],
        constraints=[{"metric": "size", "atMost": 5}],
    )  # fmt: skip
    frame = experiment.trials_dataframe()
    assert list(frame.onFront) == [True, True, False, False]
    assert list(frame.violates) == [[], [], ["size ≤ 5"], []]
    assert list(frame.columns[-3:]) == ["note", "onFront", "violates"]
