"""The arguments of `search`: invalid ones are refused in the terms of its signature, before anything starts."""

import re

import pytest

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.errors import UserError
from nni_manager.experiment import LocalConfig, search

SPACE = {"x": {"_type": "uniform", "_value": [0, 1]}}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["minimize", "false", 1, None])
def test_the_argument_maximize_is_refused_if_it_is_not_a_bool(value):
    with pytest.raises(UserError) as caught:
        search(len, SPACE, maximize=value)
    assert str(caught.value) == (
        f"cannot use maximize={value!r}: it is not a bool; write maximize=True or maximize=False"
    )


def test_a_search_without_a_function_is_refused():
    with pytest.raises(
        UserError, match="cannot search with function=None: it is not callable; pass a function"
    ):
        search(None, SPACE)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("maximise", "did you mean maximize?"),
        ("trails", "did you mean trials?"),
        ("tunr", "did you mean tuner?"),
        ("concurency", "did you mean concurrency?"),
        ("max_trial_durations", "did you mean max_trial_duration?"),
        ("maxTrialDurations", "did you mean max_trial_duration?"),
        ("n_trial", "use its argument `trials`"),
        ("max_trial_numbr", "use its argument `trials`"),
        ("search_alg", "use its argument `tuner`"),
        ("search_spaces", "use its argument `space`"),
        ("scheduler", "use its argument `assessor`"),
        ("metric", "the function returns its result"),
        ("stop", "start an Experiment, and call its stop() when"),
        ("show_progress_bar", "use its argument `verbose`"),
        ("reuse_mode", "write training_service=LocalConfig(reuse_mode=...)"),
        ("gc_after_trial", "there is no such argument; help(search)"),
    ],
)
def test_the_error_for_an_unknown_argument_of_search_names_the_replacement(name, remedy):
    with pytest.raises(UserError, match=re.escape(f"cannot use {name} in a search: ")) as caught:
        search(len, SPACE, **{name: 1})
    assert remedy in str(caught.value)
    assert "ExperimentConfig:" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        ({"trials": 0}, "trials", "cannot use trials: 0 is not a whole number from 1 to 999999999; write e.g. trials = 20"),
        ({"concurrency": 0}, "concurrency", "cannot use concurrency: 0 is not"),
        ({"space": None}, "space", "cannot do without space: it must be a mapping of hyper-parameters; write e.g. space = {"),
        ({"space": {"trial_concurrency": {"_type": "unifrm", "_value": [0, 1]}}}, "space.trial_concurrency._type",
         'cannot use space.trial_concurrency: "unifrm" is not a type'),
        ({"seed": -1}, "seed", "cannot use seed: -1 is not a whole number from 0 to 4294967295; write e.g. seed = 1"),
        ({"seed": -1, "advisor": "BOHB"}, "seed", "cannot use seed: -1 is not"),
        ({"tuner": {"name": "TPE", "class_args": {"seed": -1}}}, "tuner.class_args.seed",
         "cannot use tuner.class_args.seed: -1 is not a whole number from 0 to 4294967295; write e.g. class_args['seed'] = 1"),
        ({"training_service": LocalConfig(max_trial_number_per_gpu="a")}, "training_service.max_trial_number_per_gpu",
         'cannot use training_service.max_trial_number_per_gpu: "a" is not'),
    ],
)  # fmt: skip
def test_an_error_of_the_configuration_names_the_argument(arguments, key, expected):
    with pytest.raises(ConfigInvalid) as caught:
        search(len, **{"space": SPACE} | arguments)
    (error,) = caught.value.diagnostics
    assert error.key == key
    assert expected in error.message
    assert caught.value.__suppress_context__, "the traceback has one error"
