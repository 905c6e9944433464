"""Shared code of the framework callbacks: choice of the metric, and time of the final result."""

import json
import math
from pathlib import Path

import pytest

import nni_sdk
from nni_sdk.errors import MetricAbsent
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter
from nni_sdk.records import decode
from nni_sdk.trial import TrialContext


@pytest.fixture
def folder(tmp_path, monkeypatch):
    begin_attempt(tmp_path, monkeypatch, {})
    return tmp_path


def begin_attempt(folder, monkeypatch, parameters, **further):
    (folder / "parameter.cfg").write_text(json.dumps({"parameter_id": 0, "parameters": parameters}))
    environ = {"NNI_PLATFORM": "local", "NNI_SYS_DIR": str(folder), "NNI_TRIAL_JOB_ID": "tRiAl", **further}
    monkeypatch.setattr("nni_sdk.trial._trial", TrialContext(environ))
    nni_sdk.get_next_parameter()


def reported(folder):
    path = folder / ".nni/metrics"
    records = decode(path.read_bytes(), 0).records if path.exists() else []
    return [(each.type, json.loads(each.value)) for each in records]


@pytest.mark.parametrize(("best", "final"), [(None, 2.0), ("min", 1.0), ("max", 3.0)])
def test_the_final_result_is_the_last_or_best_value_and_is_reported_once(folder, best, final):
    reporter = MetricReporter("auc", best)
    for value in (3, 1, 2):
        reporter.report({"auc": value, "loss": 0})
    reporter.finish(["auc", "loss"])
    reporter.report_final_result()
    assert reported(folder) == [("PERIODICAL", 3), ("PERIODICAL", 1), ("PERIODICAL", 2), ("FINAL", final)]


@pytest.mark.parametrize(("best", "final"), [("min", 0.25), ("max", 0.75), (None, 0.75)])
def test_nan_is_never_chosen_as_the_best_value(folder, best, final):
    reporter = MetricReporter("auc", best)
    for value in (math.nan, 0.25, math.nan, 0.75):
        reporter.report({"auc": value})
    assert reporter.final == final


@pytest.mark.parametrize(
    ("later", "is_same"),
    [({"lr": 0.1, "TRIAL_BUDGET": 9}, True), ({"lr": 0.2, "TRIAL_BUDGET": 3}, False)],
    ids=["a larger budget", "other parameters"],
)
def test_a_trial_with_changed_parameters_loads_the_model_of_its_checkpoint_but_not_the_results(
    folder, monkeypatch, later, is_same
):
    begin_attempt(folder, monkeypatch, {"lr": 0.1, "TRIAL_BUDGET": 3})
    reporter = MetricReporter("auc", "max")
    training = ContinuedTraining(reporter, is_saved=True)
    reporter.report({"auc": 0.9})
    training.round_ended(lambda path: Path(path).write_text("weights"))
    begin_attempt(folder, monkeypatch, later)
    reporter = MetricReporter("auc", "max")
    training = ContinuedTraining(reporter, is_saved=True)
    assert Path(training.model).read_text() == "weights"
    assert (training.rounds, reporter.final) == ((1, 0.9) if is_same else (0, None))


def test_the_argument_best_accepts_only_min_max_and_none():
    with pytest.raises(ValueError, match=r"cannot use best='maximum'.*write 'min', 'max', or None"):
        MetricReporter("auc", "maximum")


@pytest.mark.parametrize("metric", ["valid-auc", "auc"])
def test_the_data_set_name_is_optional_if_only_one_data_set_has_the_metric(folder, metric):
    MetricReporter(metric).report({"train-loss": 0.5, "valid-auc": 0.75, "valid-loss": 1})
    assert reported(folder) == [("PERIODICAL", 0.75)]


@pytest.mark.parametrize(
    ("metric", "metrics", "remedy"),
    [
        ("loss", {"valid-loss": 1, "train-loss": 1}, "choose one of: train-loss, valid-loss"),
        ("alid-loss", {"valid-loss": 1}, "choose one of: valid-loss"),
        ("loss", {}, "evaluate the model while it is trained"),
    ],
)
def test_an_absent_or_ambiguous_metric_is_refused(folder, metric, metrics, remedy):
    with pytest.raises(MetricAbsent, match=f"cannot report the metric '{metric}'.*; {remedy}$"):
        MetricReporter(metric).report(metrics)
    assert reported(folder) == []


def test_a_history_that_is_reported_again_adds_only_its_new_values(folder):
    reporter, log = MetricReporter("auc"), []
    for value in (0.5, (0.25, 0.125), 0.75):
        log.append(value)
        reporter.report_history({"valid": {"auc": log}})
        reporter.report_history({"valid": {"auc": log}})
    assert reported(folder) == [("PERIODICAL", 0.5), ("PERIODICAL", 0.25), ("PERIODICAL", 0.75)]


def test_a_second_training_with_the_same_callback_has_its_own_values_and_final_result(folder):
    reporter = MetricReporter("auc", "max")
    for log in ([0.9, 0.5], [0.25]):
        reporter.training_starts()
        reporter.report_history({"valid": {"auc": log}})
        reporter.finish(["auc"])
    assert [value for kind, value in reported(folder) if kind == "PERIODICAL"] == [0.9, 0.5, 0.25]
    assert [value for kind, value in reported(folder) if kind == "FINAL"] == [0.9, 0.25]


def test_a_shorter_history_is_treated_as_the_history_of_a_new_training(folder):
    reporter = MetricReporter("auc")
    for log in ([0.5, 0.75], [0.125]):
        reporter.report_history({"valid": {"auc": log}})
    assert [value for _, value in reported(folder)] == [0.5, 0.75, 0.125]


@pytest.mark.parametrize("reason", ["early stopped", "stopped by user", "time limit", "job lost"])
def test_a_stopped_trial_reports_a_final_result_unless_the_assessor_stopped_it(folder, reason):
    reporter = MetricReporter("auc")
    reporter.report({"auc": 0.5})
    (folder / "stop_notice.json").write_text(json.dumps({"reason": reason}))
    reporter.finish({"auc": 0.5})
    assert reported(folder)[1:] == ([] if reason == "early stopped" else [("FINAL", 0.5)])


def test_an_error_is_raised_if_a_training_lacks_the_chosen_metric_and_its_trial_was_not_stopped(folder):
    reporter = MetricReporter("auc")
    with pytest.raises(MetricAbsent, match="choose one of: loss"):
        reporter.finish({"loss": 1})
    (folder / "stop_notice.json").write_text('{"reason": "early stopped"}')
    reporter.finish({"loss": 1})
    assert reported(folder) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["auc"], [("PERIODICAL", {"auc": 0.5}), ("FINAL", {"auc": 0.5})]),
        (["auc", "ms"], [("PERIODICAL", {"auc": 0.5})]),
        (["ms"], [("PERIODICAL", 0.5)]),
        (["default"], [("PERIODICAL", 0.5), ("FINAL", 0.5)]),
        (["default", "ms"], [("PERIODICAL", 0.5)]),
    ],
)
def test_a_callback_reports_a_final_result_only_if_it_has_the_values_of_all_objectives(
    folder, monkeypatch, names, expected
):
    begin_attempt(folder, monkeypatch, {}, NNI_RESULT_METRICS=json.dumps(names))
    reporter = MetricReporter("auc")
    reporter.report({"auc": 0.5})
    reporter.finish(["auc"])
    assert reported(folder) == expected
