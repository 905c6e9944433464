"""`search(f, space)`: from a function to its results in one call, with a real experiment."""

import contextlib
import math
import os
import socket
import time

import psutil
import pytest
from deadlines import scaled_s
from plotly.graph_objects import Figure
from user_home import environ_of, left_in, processes_of

import nni_sdk
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.errors import UserError
from nni_manager.experiment import AlgorithmConfig, CustomAlgorithmConfig, Experiment, LocalConfig, search

SPACE = {
    "x": {"_type": "uniform", "_value": [0, 1]},
    "lr": {"_type": "loguniform", "_value": [0.0001, 1]},
    "kind": {"_type": "choice", "_value": ["a", "b"]},
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory, below a home folder of its own."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("NNI_")]:
        monkeypatch.delenv(name)
    for name, value in environ_of(folder).items():
        monkeypatch.setenv(name, value)
    yield folder
    for process in processes_of(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def traces_of(figure):
    assert isinstance(figure, Figure)
    # plotly checks the properties of a figure only when it converts the figure, so the figure is converted to HTML.
    assert figure.to_html(include_plotlyjs=False)
    return figure.data


@pytest.mark.smoke
def test_search_returns_the_best_trial_and_a_data_frame_and_figures(place):
    def loss(parameters):
        if parameters["x"] > 0.95:
            raise ValueError("too large")
        return (parameters["x"] - 0.3) ** 2 + (parameters["kind"] == "b") + abs(math.log10(parameters["lr"]))

    found = search(loss, SPACE, trials=12, seed=3, concurrency=2)

    frame = found.trials
    assert len(frame) == 12
    assert {"x", "lr", "kind", "value", "state", "durationS", "trialJobId"} <= {*frame.columns}
    done = frame[frame.state == "SUCCEEDED"]
    assert (done.durationS > 0).all()
    assert [loss(each) for each in done[["x", "lr", "kind"]].to_dict("records")] == pytest.approx(
        list(done.value)
    )
    best = done.loc[done.value.idxmin()]
    assert found.best.value == best.value == pytest.approx(loss(found.best.parameters))
    assert found.best.trial_id == best.trialJobId
    assert f"12 trials of experiment {found.experiment.id}, best {best.value:g}" in repr(found)

    result, best_so_far = traces_of(found.plot_history())
    assert list(result.x) == list(done.number)
    assert list(best_so_far.y) == list(done.value.cummin())
    (importances,) = traces_of(found.plot_importances())
    assert {*importances.y} == {"x", "lr", "kind"}
    assert dict(zip(importances.y, importances.x, strict=True)) == found.importances
    assert sum(found.importances.values()) == pytest.approx(1)
    (lines,) = traces_of(found.plot_parallel())
    assert [axis.label for axis in lines.dimensions] == ["result", *SPACE]
    assert all(len(axis.values) == len(done) for axis in lines.dimensions)
    slices = found.plot_slices()
    assert {trace.name: list(trace.x) for trace in traces_of(slices)} == {
        name: list(done[name]) for name in SPACE
    }
    assert found.experiment.get_status() == "DONE"
    assert left_in(place) == []


def test_search_prints_nothing_to_stdout_and_prints_only_warnings_to_stderr_if_verbose_is_off(place, capsys):
    space = {"x": {"_type": "choice", "_value": [1]}}
    search(lambda parameters: parameters["x"], space, trials=1)
    out, err = capsys.readouterr()
    assert out == ""
    assert "is served at http://" in err
    assert "1/1 ended" in err
    search(lambda parameters: parameters["x"], space, trials=1, verbose=False)
    assert capsys.readouterr() == ("", "")
    search(lambda parameters: {"loss": 1}, space, trials=1, verbose=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(":")[0] for line in err.splitlines()] == ["WARNING"] * 2
    assert err.count('such as objectives=[{"metric": "loss", "mode": "minimize"}]') == 2


def test_search_with_maximize_finds_the_largest_value_and_search_without_results_finds_no_best_trial(place):
    tuner = AlgorithmConfig(name="gridsearch", class_args=None)
    space = {"x": {"_type": "choice", "_value": [1, 2, 3]}}
    found = search(
        lambda parameters: parameters["x"], space, tuner=tuner, maximize=True, experiment_name="three"
    )
    assert (found.best.parameters, found.best.value) == ({"x": 3}, 3)
    assert tuner.class_args is None, "the caller's object is not changed"
    assert found.experiment.get_experiment_profile()["params"]["experimentName"] == "three"
    with pytest.raises(
        UserError, match="cannot evaluate the importance of parameters: 3 trials have a number"
    ):
        found.plot_importances()

    none = search(lambda parameters: 1 / 0, space, trials=1)
    assert (none.best, list(none.trials.state)) == (None, ["FAILED"])
    assert none.experiment.get_experiment_profile()["params"]["tuner"]["name"] == "Auto", (
        "as in a file that names none"
    )
    assert "1 trials of experiment" in repr(none)
    assert "no result" in repr(none)
    assert list(traces_of(none.plot_history())[0].y) == []
    traces_of(none.plot_parallel())
    traces_of(none.plot_slices())


@pytest.mark.parametrize(
    "assessor", ["medianstop", AlgorithmConfig(name="Medianstop", class_args=None)], ids=["name", "config"]
)
def test_an_assessor_stops_the_trials_with_larger_losses_if_search_minimizes(place, assessor):
    most_s = scaled_s(20.0)

    def loss(parameters):
        deadline_s = time.monotonic() + most_s
        nni_sdk.report_intermediate_result(parameters["x"])
        while parameters["x"] == 9 and not nni_sdk.should_stop() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return parameters["x"]

    found = search(
        loss, {"x": {"_type": "choice", "_value": [1, 9]}}, trials=2, tuner="GridSearch", assessor=assessor
    )
    assert dict(zip(found.trials.x, found.trials.state, strict=True)) == {1: "SUCCEEDED", 9: "EARLY_STOPPED"}
    if isinstance(assessor, AlgorithmConfig):
        assert assessor.class_args is None, "the caller's object is not changed"


def test_search_uses_another_port_if_8080_is_taken(place):
    experiment = Experiment("local")
    experiment.config.search_space = SPACE
    experiment.config.tuner.name = "Random"
    experiment.config.trial_concurrency = experiment.config.max_trial_number = 1
    with socket.socket() as other, experiment:
        with contextlib.suppress(OSError):  # the bind fails if another program already uses port 8080
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 8080))
            other.listen()
        assert experiment.run(objective=len)
        assert experiment.port > 8080


def test_search_names_an_invalid_argument_in_its_error(place):
    with pytest.raises(ConfigInvalid, match=r"cannot use space\.x: \"unifrm\" is not a type"):
        search(len, {"x": {"_type": "unifrm", "_value": [0, 1]}})
    with pytest.raises(ConfigInvalid, match=r"cannot use concurrency"):
        search(len, SPACE, concurrency=0)
    with pytest.raises(UserError, match="cannot use seed=1 together with a configured tuner"):
        search(len, SPACE, tuner=AlgorithmConfig(name="TPE"), seed=1)
    with pytest.raises(UserError, match="cannot use seed=1 together with a configured advisor"):
        search(len, SPACE, advisor=AlgorithmConfig(name="BOHB"), seed=1)
    for field, remedy in (
        ({"n_trials": 3}, "its argument `trials`"),
        ({"maxTrialNumber": 3}, "its argument `trials`"),
        ({"num_samples": 3}, "its argument `trials`"),
        ({"timeout": 60}, "max_experiment_duration='10m' limits the search"),
        ({"sampler": "TPE"}, "its argument `tuner`"),
        ({"pruner": "MedianPruner"}, "its argument `assessor`"),
        ({"max_concurrent_trials": 2}, "its argument `concurrency`"),
        ({"trial_concurrency": 2}, "its argument `concurrency`"),
        ({"trial_code_directory": "/tmp"}, "the function runs in the current directory"),
        ({"training_service": {"platform": "slurm"}}, "cannot run the function builtins:len on slurm"),
        (
            {
                "tuner": AlgorithmConfig(name="TPE", class_args={"optimize_mode": "minimize"}),
                "maximize": True,
            },
            "remove one",
        ),
    ):
        with pytest.raises(UserError, match=remedy):
            search(len, SPACE, **field)
    for wrong in (
        {"objectives": ["loss"]},
        {"objectives": {"metric": "a", "mode": "minimize"}},
        {"assessor": 5},
    ):
        with pytest.raises(ConfigInvalid, match=rf"cannot use {next(iter(wrong))}"):
            search(len, SPACE, **wrong)
    with pytest.raises(ConfigInvalid, match="a name must be text"):
        search(len, {1: {"_type": "uniform", "_value": [0, 1]}})
    for other in ({"tuner": "TPE"}, {"assessor": "Medianstop"}):
        (name,) = other
        with pytest.raises(
            UserError, match=f"cannot use {name}='.*' together with advisor='BOHB'.*remove {name} or"
        ):
            search(len, SPACE, advisor="BOHB", **other)


OWN = """
import nni_sdk.tuner

class Own(nni_sdk.tuner.Tuner):
    def __init__(self, first):
        self.next = first

    def update_search_space(self, space):
        pass

    def generate_parameters(self, parameter_id, **kwargs):
        self.next += 1
        return {"x": self.next}

    def receive_trial_result(self, parameter_id, parameters, value, **kwargs):
        pass
"""


def test_search_uses_the_optimize_mode_of_a_built_in_tuner_and_passes_its_arguments_to_a_custom_tuner(place):
    space = {"x": {"_type": "choice", "_value": [1, 2, 3]}}
    largest = AlgorithmConfig(name="GridSearch", class_args={"optimize_mode": "maximize"})
    found = search(
        lambda parameters: parameters["x"],
        space,
        tuner=largest,
        training_service=LocalConfig(reuse_mode=False),
    )
    assert found.best.value == 3
    assert list(traces_of(found.plot_history())[1].y) == sorted(found.trials.value)
    assert found.experiment.config.training_service.reuse_mode is False

    (place / "own.py").write_text(OWN)
    own = CustomAlgorithmConfig(class_name="own.Own", class_args={"first": 0})
    for maximize, best in ((False, 1), (True, 3)):
        found = search(lambda parameters: parameters["x"], space, trials=3, tuner=own, maximize=maximize)
        assert (list(found.trials.value), found.best.value) == ([1, 2, 3], best)


@pytest.mark.parametrize(
    "advisor", ["BOHB", AlgorithmConfig(name="Hyperband", class_args={"R": 3, "seed": 1})]
)
def test_search_with_an_advisor_passes_budgets_to_trials(place, advisor):
    seed = 1 if isinstance(advisor, str) else None
    found = search(
        lambda parameters: parameters["x"] * parameters["TRIAL_BUDGET"],
        {"x": {"_type": "uniform", "_value": [0, 1]}},
        trials=4,
        advisor=advisor,
        seed=seed,
        maximize=True,
    )
    assert {*found.trials.state} == {"SUCCEEDED"}
    assert {*found.trials.TRIAL_BUDGET} <= {1, 3}
    assert found.best.value == found.trials.value.max()
    assert found.experiment.config.advisor.class_args["optimize_mode"] == "maximize"
    if isinstance(advisor, AlgorithmConfig):
        assert "optimize_mode" not in advisor.class_args, "the caller's object is not changed"


def test_search_with_several_objectives_returns_the_pareto_front(place):
    def both(parameters):
        return {"gain": parameters["x"], "cost": parameters["x"] ** 2}

    objectives = [{"metric": "gain", "mode": "maximize"}, {"metric": "cost", "mode": "minimize"}]
    space = {"x": {"_type": "uniform", "_value": [0, 1]}}
    found = search(both, space, trials=4, seed=3, concurrency=2, objectives=objectives)
    assert found.best is None
    assert [each.values for each in found.front] == [
        (each.value, pytest.approx(each.value**2)) for each in found.front
    ]
    assert [each.value for each in found.front] == sorted((each.value for each in found.front), reverse=True)
    assert "4 on the Pareto front" in repr(found)
    assert len(found.plot_history().data) == 2
    others, front = traces_of(found.plot_front())
    assert (len(others.x), list(zip(front.x, front.y, strict=True))) == (
        0,
        [each.values for each in reversed(found.front)],
    )
    assert list(found.trials["value"]) == list(found.trials["value/gain"])
