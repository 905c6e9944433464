"""The process of a trial of a function: what counts as its final result, with the callbacks of real frameworks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from pythons import python_with

from nni_sdk.records import decode

ROOT = Path(__file__).parents[2]
FUNCTIONS = """\
import os
import sys

import nni_sdk
from nni_sdk.integrations.reporter import MetricReporter


def train(values=(0.5, 0.25)):
    reporter = MetricReporter("auc")
    for value in values:
        reporter.report({"auc": value})
    reporter.report_final_result()


def train_without_an_end():
    reporter = MetricReporter("auc")
    reporter.report_final_result_at_exit()
    reporter.report({"auc": 0.25})


def returns_another_number(parameters):
    for fold in (1, 2, 3):
        train([fold])
    train_without_an_end()
    return 0.75


def returns_nothing(parameters):
    train()


def returns_nothing_without_an_end(parameters):
    train_without_an_end()


def exits(parameters):
    train()
    sys.exit()


def exits_with_an_error(parameters):
    train()
    sys.exit(3)


def fails(parameters):
    train_without_an_end()
    raise ValueError


def reports_and_trains(parameters):
    train()
    nni_sdk.report_final_result(0.75)


def trains_in_a_child(parameters):
    pid = os.fork()
    if pid == 0:
        train()
        os._exit(0)
    os.waitpid(pid, 0)


def stops(parameters):
    train()
    with open(os.environ["NNI_SYS_DIR"] + "/stop_notice.json", "w") as file:
        file.write('{"reason": "early stopped"}')
    if nni_sdk.should_stop():
        return


def stops_before_the_end(parameters):
    with open(os.environ["NNI_SYS_DIR"] + "/stop_notice.json", "w") as file:
        file.write('{"reason": "early stopped"}')
    train()


def asks_for_parameters(parameters):
    nni_sdk.report_intermediate_result({"lr": 0.1, **(nni_sdk.get_next_parameter() or {})}["lr"])
    return {"default": parameters["lr"], "again": nni_sdk.get_next_parameter(), **nni_sdk.get_current_parameter()}


def nothing(parameters):
    pass
"""
# Each of these functions trains in such a way that the framework does not report the end of the training to its callbacks.
TRAININGS = """\
import numpy as np

x = np.random.default_rng(1).normal(size=(120, 2))
y = (x[:, 0] > 0).astype(int)


def xgboost(parameters):
    import xgboost
    from nni_sdk.integrations.xgboost import NNICallback

    data = xgboost.DMatrix(x, y)
    xgboost.cv({"nthread": 1}, data, 3, nfold=2, metrics="auc", callbacks=[NNICallback("test-auc")])


def lightgbm(parameters):
    import lightgbm
    from nni_sdk.integrations.lightgbm import NNICallback

    data = lightgbm.Dataset(x, y)
    callbacks = [NNICallback("auc"), lightgbm.early_stopping(1)]
    options = {"objective": "binary", "metric": "auc", "num_threads": 1}
    valid = lightgbm.Dataset(x, y[::-1], reference=data)
    lightgbm.train(options, data, 50, valid_sets=[valid], callbacks=callbacks)


def catboost(parameters):
    import catboost
    from nni_sdk.integrations.catboost import NNICallback

    model = catboost.CatBoostClassifier(iterations=3, thread_count=1, allow_writing_files=False)
    model.fit(x, y, callbacks=[NNICallback("learn-Logloss")])


def sklearn(parameters):
    from sklearn.linear_model import SGDClassifier
    from nni_sdk.integrations.sklearn import NNICallback

    model = SGDClassifier(random_state=1)
    for number in NNICallback("accuracy").passes(range(9), model, x, y):
        model.partial_fit(x, y, classes=[0, 1])
        if number == 3:
            break


def xgboost_twice(parameters):
    import xgboost
    from nni_sdk.integrations.xgboost import NNICallback

    callback = NNICallback("valid-auc")
    for rounds in (2, 3):
        data = xgboost.DMatrix(x, y)
        xgboost.train(
            {"nthread": 1, "eval_metric": "auc"}, data, rounds, evals=[(data, "valid")], callbacks=[callback], verbose_eval=False
        )


def lightgbm_twice(parameters):
    import lightgbm
    from nni_sdk.integrations.lightgbm import NNICallback

    callback = NNICallback("valid_0-auc")
    for rounds in (2, 3):
        data = lightgbm.Dataset(x, y)
        options = {"objective": "binary", "metric": "auc", "num_threads": 1, "verbose": -1}
        valid = lightgbm.Dataset(x, y, reference=data)
        lightgbm.train(options, data, rounds, valid_sets=[valid], callbacks=[callback])
"""


@pytest.fixture
def run(tmp_path):
    """Run the trial of a function of these modules; returns its process, and its records as (type, value)."""

    def ran(function, source=FUNCTIONS, python=sys.executable, **environ):
        (tmp_path / "functions.py").write_text(source)
        (tmp_path / "parameter.cfg").write_text('{"parameter_id": 0, "parameters": {"lr": 0.5}}')
        description = {"function": f"functions:{function}", "path": [str(tmp_path)], "cwd": str(tmp_path)}
        (tmp_path / "objective.json").write_text(json.dumps(description))
        outside = {name: value for name, value in os.environ.items() if not name.startswith("NNI_")}
        trial = {"NNI_PLATFORM": "local", "NNI_SYS_DIR": str(tmp_path), "NNI_TRIAL_JOB_ID": "tRiAl"}
        process = subprocess.run(
            [python, "-c", f"import nni_sdk.objective; nni_sdk.objective.run_trial({str(tmp_path)!r})"],
            env=outside | trial | environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        metrics = tmp_path / ".nni/metrics"
        found = decode(metrics.read_bytes(), 0).records if metrics.exists() else []
        return process, [(each.type, json.loads(each.value)) for each in found]

    return ran


def finals(records):
    return [value for kind, value in records if kind == "FINAL"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("returns_another_number", [0.75]),
        ("returns_nothing", [0.25]),
        ("returns_nothing_without_an_end", [0.25]),
        ("exits", [0.25]),
        ("reports_and_trains", [0.75]),
        ("stops", [0.25]),
        ("stops_before_the_end", []),
        ("nothing", [None]),
    ],
)
def test_the_final_result_of_a_callback_counts_only_if_the_function_returns_none(run, function, expected):
    process, records = run(function)
    assert (process.returncode, finals(records)) == (0, expected)
    assert "cannot replace the final result" not in process.stderr


@pytest.mark.parametrize(("function", "status"), [("exits_with_an_error", 3), ("fails", 1)])
def test_a_function_that_fails_has_no_final_result(run, function, status):
    process, records = run(function)
    assert (process.returncode, finals(records)) == (status, [])


def test_a_callback_in_a_child_process_of_the_function_reports_its_final_result(run):
    _, records = run("trains_in_a_child")
    assert finals(records)[0] == 0.25


def test_an_objective_function_can_also_request_its_parameters_from_the_sdk(run):
    _, records = run("asks_for_parameters")
    assert records == [("PERIODICAL", 0.5), ("FINAL", {"default": 0.5, "again": None, "lr": 0.5})]


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm", "catboost", "sklearn"])
def test_the_last_value_that_a_framework_reports_is_the_final_result_if_the_function_returns_none(
    run, framework
):
    process, records = run(framework, TRAININGS, python_with(framework))
    assert process.returncode == 0, process.stderr
    kinds, values = zip(*records, strict=True)
    assert len(kinds) > 2
    assert (set(kinds[:-1]), kinds[-1]) == ({"PERIODICAL"}, "FINAL")
    assert values[-1] == values[-2]


@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
def test_a_callback_reports_all_values_of_two_trainings_and_the_second_final_result_causes_a_warning(
    run, framework
):
    process, records = run(f"{framework}_twice", TRAININGS, python_with(framework))
    assert process.returncode == 0, process.stderr
    assert [kind for kind, _ in records] == 5 * ["PERIODICAL"] + 2 * ["FINAL"]
    assert "cannot replace the final result by" in process.stderr


def test_a_callback_reports_its_metric_under_the_name_of_the_objective(run):
    _, records = run("returns_nothing", NNI_RESULT_METRICS='["auc"]')
    assert records == [("PERIODICAL", {"auc": 0.5}), ("PERIODICAL", {"auc": 0.25}), ("FINAL", {"auc": 0.25})]
