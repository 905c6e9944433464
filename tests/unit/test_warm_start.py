"""`warmStart`: the initial points from earlier experiments, and the reasons to refuse an earlier experiment."""

import json

import pytest
from made_experiment import made_experiment, made_trial, write

from nni_manager.client.warm_start import MAX_AUTOMATIC, MAX_OF_FRONT, with_warm_start
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.reader import read_experiment_file
from nni_manager.domain.experiment import ExperimentState
from nni_manager.store.registry import Registry
from nni_manager.store.rows import experiment_row

SPACE = {
    "lr": {"_type": "uniform", "_value": [0, 1]},
    "net": {
        "_type": "choice",
        "_value": [{"_name": "deep", "layers": {"_type": "randint", "_value": [1, 9]}}],
    },
}
NET = {"_name": "deep", "layers": 2}
RESULTS = [({"lr": 0.25, "net": NET}, 3.0), ({"lr": 0.5, "net": NET}, 9.0), ({"lr": 0.75, "net": NET}, 1.0)]
OBJECTIVES = [{"metric": "accuracy", "mode": "maximize"}, {"metric": "size", "mode": "minimize"}]
MAXIMIZE = {"tuner": {"builtinTunerName": "Auto", "classArgs": {"optimize_mode": "maximize"}}}


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def an_earlier(tmp_path):
    """Store a finished experiment with these results. Returns the experiment."""
    made = []

    def make(results=RESULTS, space=SPACE, **config):
        def trial(number, now_s):
            parameters, value = results[number]
            trial = made_trial(number, now_s)
            trial.parameters, trial.run.final = parameters, json.dumps(value)
            trial.run.value = value if isinstance(value, float) else None
            return trial

        folder = tmp_path / f"earlier{len(made)}"
        config = MAXIMIZE | {"experiment_id": f"EARLIER{len(made)}", "space": space} | config
        experiment = made_experiment(folder, len(results), trial, **config)
        made.append(experiment)
        Registry.of_user().add(experiment.folder)
        return experiment

    return make


@pytest.fixture
def chosen(tmp_path):
    """Returns the initial points of a new experiment with this `warmStart`, and the warnings."""

    def choose(warm_start, space=SPACE, tuner="Auto", mode="maximize", **keys):
        (tmp_path / "space.json").write_text(json.dumps(space))
        class_args = {"warmStart": warm_start} | ({} if mode is None else {"optimize_mode": mode})
        document = {
            "experimentName": "new",
            "authorName": "ada",
            "trialConcurrency": 1,
            "trainingServicePlatform": "local",
            "searchSpacePath": "space.json",
            "tuner": {"builtinTunerName": tuner, "classArgs": class_args},
            "trial": {"command": "true", "codeDir": "."},
            **keys,
        }
        (tmp_path / "new.yml").write_text(json.dumps(document))
        config = with_warm_start(read_experiment_file(tmp_path / "new.yml"))
        return [(each.parameters["lr"], each.value) for each in config.warm_start], list(config.warnings)

    return choose


def test_warm_start_uses_the_best_point_of_each_named_experiment(an_earlier, chosen):
    one = an_earlier().folder.experiment_id
    two = an_earlier([({"lr": 0.1, "net": NET}, 4.0)]).folder.experiment_id
    assert chosen([two, one]) == ([(0.1, 4.0), (0.5, 9.0)], [])


def test_warm_start_refuses_an_earlier_experiment_with_a_different_direction(an_earlier, chosen):
    tuner = {"builtinTunerName": "Random", "classArgs": {"optimize_mode": "minimize"}}
    earlier = an_earlier(tuner=tuner).folder.experiment_id
    assert chosen([earlier], mode="minimize") == ([(0.75, 1.0)], [])
    points, (warning,) = chosen([earlier], mode="maximize")
    assert points == []
    assert f"experiment {earlier}: it has to minimize default, and this one to maximize it; " in warning


def test_warm_start_uses_points_from_the_whole_pareto_front_including_both_ends(an_earlier, chosen):
    # Of the first 40 results, a higher accuracy has a larger size, so all are on the Pareto front. All of them dominate the last
    # result.
    results = [({"lr": n / 100, "net": NET}, {"accuracy": n / 100, "size": n}) for n in range(1, 41)]
    results.append(({"lr": 0.9, "net": NET}, {"accuracy": 0.01, "size": 99}))
    tuner = {"builtinTunerName": "NSGAII"}
    earlier = an_earlier(results, tuner=tuner, objectives=OBJECTIVES).folder.experiment_id
    points, warnings = chosen([earlier], tuner="TPE", mode=None, objectives=OBJECTIVES)
    assert (len(points), warnings) == (MAX_OF_FRONT, [])
    assert (points[0], points[-1]) == ((0.4, 0.4), (0.01, 0.01))


def test_warm_start_can_use_one_of_several_objectives_of_an_earlier_experiment(an_earlier, chosen):
    results = [({"lr": n / 10, "net": NET}, {"accuracy": n / 10, "size": n}) for n in range(1, 5)]
    tuner = {"builtinTunerName": "NSGAII"}
    earlier = an_earlier(results, tuner=tuner, objectives=OBJECTIVES).folder.experiment_id
    size = [{"metric": "size", "mode": "minimize"}]
    assert chosen([earlier], mode=None, objectives=size) == ([(0.1, 1.0)], [])
    limited = {"objectives": OBJECTIVES[:1], "constraints": [{"metric": "size", "at_most": 3}]}
    assert chosen([earlier], mode=None, **limited) == ([(0.3, 0.3)], [])
    points, (warning,) = chosen([earlier])
    assert points == []
    assert "it has no result with default that counts; " in warning


def test_warm_start_uses_the_best_point_inside_the_search_space(an_earlier, chosen):
    earlier = an_earlier().folder.experiment_id
    narrow = SPACE | {"lr": {"_type": "uniform", "_value": [0, 0.4]}}
    points, (warning,) = chosen([earlier], space=narrow)
    assert points == [(0.25, 3.0)]
    assert (
        "lie outside the search space and are not used (warmStart): lr: 0.5 is outside uniform [0, 0.4]"
        in warning
    )
    points, (warning,) = chosen([earlier], space=SPACE | {"lr": {"_type": "uniform", "_value": [2, 3]}})
    assert points == []
    assert "no result lies in the search space (lr: 0.5 is outside uniform [2, 3]); " in warning


@pytest.mark.parametrize("warm_start", ["auto", None])
def test_warm_start_refuses_an_earlier_experiment_with_different_parameters(an_earlier, chosen, warm_start):
    other = {"lr": SPACE["lr"], "depth": {"_type": "randint", "_value": [1, 9]}}
    earlier = an_earlier([({"lr": 0.1, "depth": 3}, 1.0)], space=other).folder.experiment_id
    points, warnings = chosen(warm_start or [earlier])
    assert points == []
    expected = (
        f"cannot start with results of experiment {earlier}: its search space has other parameters: it lacks net, "
        "net.layers, this one lacks depth; name one with the same parameters; the search starts without it (warmStart)"
    )
    assert warnings == ([] if warm_start else [expected])


@pytest.mark.parametrize("warm_start", ["auto", None])
def test_warm_start_refuses_an_experiment_that_has_not_ended(an_earlier, chosen, warm_start):
    running = an_earlier()
    write(running.folder, experiment_row(ExperimentState.RUNNING, "", 1.0, None, any_compatible_keeper=True))
    points, warnings = chosen(warm_start or [running.folder.experiment_id])
    assert points == []
    assert ["it is RUNNING; wait for its end" in each for each in warnings] == ([] if warm_start else [True])


@pytest.mark.parametrize("warm_start", ["auto", None])
def test_warm_start_reports_a_damaged_experiment_and_uses_the_remaining_experiments(
    an_earlier, chosen, warm_start
):
    damaged, good = an_earlier(), an_earlier()
    database = damaged.folder.database
    database.write_bytes(b"no database" * 1000)
    points, (warning,) = chosen(warm_start or [damaged.folder.experiment_id, good.folder.experiment_id])
    assert points == [(0.5, 9.0)]
    assert warning.startswith("cannot ")
    assert str(database) in warning
    assert warning.endswith("; the search starts without it (warmStart)")


def test_warm_start_reports_an_unknown_experiment(chosen):
    points, (warning,) = chosen(["nowhere"])
    assert points == []
    assert "cannot find experiment 'nowhere'" in warning


def test_automatic_warm_start_uses_the_newest_finished_experiments(an_earlier, chosen):
    for number in range(MAX_AUTOMATIC + 2):
        an_earlier([({"lr": number / 10, "net": NET}, float(number))])
    assert [lr for lr, _ in chosen("auto")[0]] == [number / 10 for number in range(MAX_AUTOMATIC + 1, 1, -1)]


def test_a_warm_start_point_is_used_only_once(an_earlier, chosen):
    earlier = [an_earlier().folder.experiment_id for _ in range(2)]
    assert chosen(earlier) == ([(0.5, 9.0)], [])
    assert chosen([earlier[0], earlier[0]]) == ([(0.5, 9.0)], [])
    assert chosen(earlier, initialTrials=[{"lr": 0.5, "net": NET}]) == ([], [])


def test_warm_start_uses_results_in_an_exported_file(tmp_path, chosen):
    entries = [{"trialJobId": "a", "parameter": each, "value": value} for each, value in RESULTS]
    entries.append({"parameter": {"lr": 5}, "value": 2})
    (tmp_path / "results.json").write_text(json.dumps(entries))
    assert chosen(["results.json"]) == ([(0.5, 9.0)], [])
    assert chosen([str(tmp_path / "results.json")], mode="minimize") == ([(0.75, 1.0)], [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "results.json: there is no such file"),
        ("[1", "not JSON"),
        ('{"lr": 1}', "is not a list of results; write it with `nnictl experiment export ID`"),
        ('[{"parameter": {"lr": 1}}]', "is not a list of results"),
        ("[]", "it has no result with default that counts"),
    ],
)
def test_warm_start_reports_a_file_without_results(tmp_path, chosen, text, why):
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    points, (warning,) = chosen(["./results.json"])
    assert points == []
    assert why in warning


def test_warm_start_omits_the_parameters_that_hyperband_adds(an_earlier, chosen, tmp_path):
    results = [({"lr": 0.5, "net": NET, "TRIAL_BUDGET": 3}, 1.0)]
    advisor = {"builtinAdvisorName": "Hyperband", "classArgs": {"optimize_mode": "maximize"}}
    earlier = an_earlier(results, tuner=None, advisor=advisor).folder.experiment_id
    assert chosen([earlier]) == ([(0.5, 1.0)], [])
    exported = [{"trialJobId": "a", "parameter": results[0][0], "value": 1.0}]
    (tmp_path / "results.json").write_text(json.dumps(exported))
    assert chosen(["results.json"]) == ([(0.5, 1.0)], [])


@pytest.mark.parametrize("tuner", ["Hyperband", "BOHB", "PBTTuner"])
def test_warm_start_is_refused_for_tuners_that_add_parameters(chosen, tuner):
    with pytest.raises(ConfigInvalid, match=rf"{tuner} adds parameters to those of the search space"):
        chosen("auto", tuner=tuner)


def test_warm_start_is_off_by_default(an_earlier, chosen):
    an_earlier()
    assert chosen([]) == chosen(None) == ([], [])
