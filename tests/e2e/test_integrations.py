"""All callbacks behave alike, in real trainings in a Python that has the framework installed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
from deadlines import scaled_s
from framework_trainings import CHILD, FRAMEWORKS, ROUNDS, STOP_AFTER
from pythons import python_with

from nni_sdk.integrations.lightning_hooks import LightningHooks
from nni_sdk.records import decode

ROOT = Path(__file__).parents[2]

# A test waits for nine trainings and the import of a framework. They take 50 s with seven other test workers, and 150 s at a load
# average of 26.
TRAININGS_S = 500
pytestmark = pytest.mark.timeout(TRAININGS_S + 100)


def environment():
    outside = {name: value for name, value in os.environ.items() if not name.startswith("NNI_")}
    return outside | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module", params=FRAMEWORKS)
def trained(request):
    """The results that all trainings of a framework have reported, by scenario."""
    script = ROOT / "tests/fakes/framework_trainings.py"
    with subprocess.Popen(
        [python_with(FRAMEWORKS[request.param].module), script, request.param],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=scaled_s(TRAININGS_S))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return json.loads(stdout.splitlines()[-1])


def final_of(trained, values):
    """The expected final result without `best`: the last value, or the mean of all folds."""
    return pytest.approx([mean(values) if trained["averages"] else values[-1]])


def test_the_callback_reports_each_value_as_intermediate_result_and_the_last_value_as_final_result(trained):
    trial = trained["trial"]
    assert trial["error"] is None
    assert len(trial["values"]) == ROUNDS
    assert trial["intermediate"] == pytest.approx(trial["values"])
    assert trial["final"] == final_of(trained, trial["values"])


def test_the_callback_reports_the_best_value_as_final_result_if_requested(trained):
    best, choose = trained["best"], {"min": min, "max": max}[trained["mode"]]
    chosen = mean if trained["averages"] else choose
    assert best["final"] == pytest.approx([chosen(best["intermediate"])])
    assert len(best["intermediate"]) == ROUNDS


def test_a_stopped_training_ends_early_and_reports_a_final_result(trained):
    stopped = trained["stopped"]
    assert stopped["error"] is None
    # After the stop request, a framework may validate and report once more before the training ends.
    assert STOP_AFTER <= len(stopped["intermediate"]) <= STOP_AFTER + 1
    assert stopped["intermediate"] == pytest.approx(stopped["values"])
    assert stopped["final"] == final_of(trained, stopped["values"])


def test_a_round_in_which_the_training_was_stopped_is_not_saved_as_complete(trained):
    if "stopped in a round" not in trained:
        pytest.skip("its callback stops the training after a round")
    assert trained["stopped in a round"]["error"] is None
    assert trained["stopped in a round"]["rounds"] == STOP_AFTER


def test_outside_an_experiment_the_callback_reports_nothing_and_does_not_change_the_training(trained):
    alone = trained["standalone"]
    assert alone["error"] is None
    assert alone["values"] == pytest.approx(trained["trial"]["values"])
    assert (alone["intermediate"], alone["final"]) == ([], [])


def test_the_error_for_an_unknown_metric_lists_the_available_metrics(trained):
    kind, text = trained["absent"]["error"]
    # CatBoost raises an exception of its own, whose text contains MetricAbsent.
    assert "MetricAbsent" in kind + text
    assert "cannot report the metric 'no_such_metric'" in text
    listed = text.partition("choose one of: ")[2].splitlines()[0].split(", ")
    assert set(trained["names"]) <= set(listed)


def test_only_the_first_of_two_processes_reports_results(trained):
    both = trained["two ranks"]
    assert [rank["error"] for rank in both["ranks"]] == [None, None]
    assert both["intermediate"] == pytest.approx(both["ranks"][0]["values"])
    assert len(both["intermediate"]) == ROUNDS
    assert both["final"] == final_of(trained, both["intermediate"])


def test_two_processes_end_after_the_same_step_if_the_framework_synchronises_stop_requests(trained):
    both = trained["two ranks stopped"]
    assert [rank["error"] for rank in both["ranks"]] == [None, None]
    first, second = (len(rank["values"]) for rank in both["ranks"])
    assert STOP_AFTER <= first <= STOP_AFTER + 1
    assert first == second or not trained["agrees"]
    assert both["final"] == final_of(trained, both["intermediate"])


def test_the_callback_class_has_an_alias_in_the_naming_style_of_the_framework(trained):
    assert trained["alias"]


@pytest.mark.parametrize(("scenario", "reports"), [("killed", STOP_AFTER), ("killed at the end", ROUNDS)])
def test_a_killed_training_continues_from_its_checkpoint_with_the_same_results(trained, scenario, reports):
    if scenario not in trained:
        pytest.skip("its callback saves no checkpoints")
    killed, whole = trained[scenario], trained["best"]
    assert (killed["status"], killed["second"]["error"]) == (9, None)
    assert len(killed["first"]["intermediate"]) == reports
    # CatBoost calls the report before it saves the checkpoint. A process that is killed between the two leaves a checkpoint
    # without the last report. The second process then repeats this report.
    assert killed["kept"] in (reports, reports - 1)
    both = killed["first"]["intermediate"][: killed["kept"]] + killed["second"]["intermediate"]
    assert both == pytest.approx(whole["intermediate"], rel=1e-5)
    assert killed["second"]["final"] == pytest.approx(whole["final"], rel=1e-5)


def test_a_promoted_trial_trains_only_the_rounds_that_its_larger_budget_adds(trained):
    if "promoted" not in trained:
        pytest.skip("its callback saves no checkpoints")
    first, second = trained["promoted"]["first"], trained["promoted"]["second"]
    assert (first["error"], second["error"]) == (None, None)
    assert len(first["intermediate"]) == STOP_AFTER
    # CatBoost and LightGBM repeat the last iteration of the first attempt. Then the checkpoint counts one report less, so the sum
    # is the same.
    assert trained["promoted"]["kept"] + len(second["intermediate"]) == ROUNDS
    choose = {"min": min, "max": max}[trained["mode"]]
    assert second["final"] == pytest.approx([choose(first["intermediate"] + second["intermediate"])])


def test_a_trial_that_continues_the_model_of_another_trial_uses_its_own_parameters(trained):
    if not trained.get("child", {}).get("second", {}).get("rates"):
        pytest.skip("parameters are not stored with its model")
    first, second = trained["child"]["first"], trained["child"]["second"]
    assert (first["error"], second["error"]) == (None, None)
    assert [first["rates"], second["rates"]] == [[each["rate"]] for each in CHILD]
    assert second["intermediate"]


def test_the_attempts_of_a_trial_together_report_each_metric_value_exactly_once(trained):
    if not trained["variants"]:
        pytest.skip("all its metrics are reported at the same time")
    for name in trained["variants"]:
        whole, killed = trained[name]["whole"], trained[name]["killed"]
        assert whole["error"] is None, name
        assert whole["intermediate"] == pytest.approx(whole["values"]), name
        assert (killed["status"], killed["second"]["error"]) == (9, None), name
        both = killed["first"]["intermediate"][: killed["kept"]] + killed["second"]["intermediate"]
        assert both == pytest.approx(whole["intermediate"], rel=1e-5), name
        assert killed["second"]["final"] == pytest.approx(whole["final"], rel=1e-5), name
        promoted = [trained[name]["promoted"][attempt] for attempt in ("first", "second")]
        both = [value for attempt in promoted for value in attempt["intermediate"]]
        assert both == pytest.approx(whole["intermediate"], rel=1e-5), name


def test_several_processes_save_and_load_a_shared_checkpoint(trained):
    if "two ranks killed" not in trained:
        pytest.skip("only its first process saves")
    killed, whole = trained["two ranks killed"], trained["two ranks"]
    assert (killed["status"], killed["kept"]) == (9, STOP_AFTER)
    assert [rank["error"] for rank in killed["second"]["ranks"]] == [None, None]
    both = killed["first"]["intermediate"] + killed["second"]["intermediate"]
    assert both == pytest.approx(whole["intermediate"], rel=1e-5)
    assert [len(rank["values"]) for rank in killed["second"]["ranks"]] == [ROUNDS - STOP_AFTER] * 2


def test_processes_started_by_the_framework_report_results_and_save_checkpoints_only_once(trained):
    if "launched" not in trained:
        pytest.skip("it starts no processes")
    launched = trained["launched"]
    assert [rank["error"] for rank in launched["ranks"]] == [None, None]
    assert launched["intermediate"] == pytest.approx(trained["two ranks"]["intermediate"], rel=1e-5)
    assert (launched["final"], launched["saved"]) == (pytest.approx(launched["intermediate"][-1:]), ROUNDS)


def test_lightning_refuses_processes_that_continue_from_different_checkpoints():
    class Strategy:
        """A double for the process with rank 1. The process with rank 0 reports that it continues after two epochs."""

        def broadcast(self, _):
            return 2

        def reduce_boolean_decision(self, decision, all):
            return decision

    trainer = SimpleNamespace(strategy=Strategy(), global_rank=1)
    hooks = LightningHooks("val_loss", checkpoints=True)
    with pytest.raises(
        ValueError, match=r"of 2 epochs in the first process and one of 0 in this one \(rank 1\)"
    ):
        hooks.on_fit_start(trainer, None)
    hooks.training.rounds = 2
    hooks.on_fit_start(trainer, None)


def test_the_lightgbm_callback_refuses_the_name_of_a_data_set_and_suggests_the_full_metric_name():
    pytest.importorskip("lightgbm")
    from nni_sdk.integrations.lightgbm import LightGBMPruningCallback

    with pytest.raises(ValueError, match=r"cannot use best='valid_0'.*NNICallback\('valid_0-auc'\)$"):
        LightGBMPruningCallback("auc", "valid_0")


def run_in_trial(framework, folder, code, parameters=None):
    """Run code as a trial with this folder. Return the values of its intermediate and final results."""
    content = {"parameter_id": 0, "parameters": parameters or {}}
    (folder / "parameter.cfg").write_text(json.dumps(content))
    variables = {
        "NNI_PLATFORM": "local",
        "NNI_SYS_DIR": str(folder),
        "NNI_TRIAL_JOB_ID": "tRiAl",
        "KERAS_BACKEND": "torch",
    }
    subprocess.run(
        [python_with(framework), "-c", "import nni_sdk\nnni_sdk.get_next_parameter()\n" + code],
        env=environment() | variables,
        timeout=scaled_s(TRAININGS_S),
        check=True,
    )
    records = decode((folder / ".nni/metrics").read_bytes(), 0).records
    return [
        [json.loads(each.value) for each in records if each.type == kind] for kind in ("PERIODICAL", "FINAL")
    ]


KERAS_FITS = """
import keras, numpy
from nni_sdk.integrations.keras import NNICallback

x = numpy.ones((8, 1), "float32")

def new_model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model

def fit(model, callback, until):
    seen = []
    see = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.extend(model.get_weights()))
    first = callback.training.rounds
    model.fit(x, x, epochs=until, initial_epoch=first, callbacks=[callback, see], verbose=0)
    return seen

fit(new_model(), NNICallback("loss", checkpoints=True), 1)
model, callback = new_model(), NNICallback("loss", checkpoints=True)
fit(model, callback, 2)
before = model.get_weights()
numpy.testing.assert_array_equal(fit(model, callback, 3), before)
"""


def test_a_second_fit_of_keras_does_not_load_the_checkpoint_again(tmp_path):
    assert len(run_in_trial("keras", tmp_path, KERAS_FITS)[0]) == 3


FASTAI_FITS = """
import torch
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from nni_sdk.integrations.fastai import NNICallback

data = torch.utils.data.TensorDataset(torch.randn(8, 1), torch.randn(8, 1))
loader = DataLoader(data, bs=4)
learner = Learner(
    DataLoaders(loader, loader),
    torch.nn.Linear(1, 1),
    loss_func=torch.nn.MSELoss(),
    cbs=[ProgressCallback(), NNICallback("valid_loss", checkpoints=True)],
)
learner.validate()
for epochs in EPOCHS:
    learner.fit(epochs)
    learner.validate()
    learner.get_preds()
"""


def test_fastai_reports_several_fits_as_one_training_without_the_validations_between_the_fits(tmp_path):
    run_in_trial("fastai", tmp_path, FASTAI_FITS.replace("EPOCHS", "(1, 1)"))
    # This call continues from the checkpoint of the call above: it skips the first fit and one epoch of the second fit.
    values, final = run_in_trial("fastai", tmp_path, FASTAI_FITS.replace("EPOCHS", "(1, 2)"))
    assert (len(values), final) == (3, values[1:])


CATBOOST_FIT = """
import os, catboost, numpy
from nni_sdk.integrations.catboost import NNICallback

x = numpy.arange(20).reshape(20, 1)
y = x[:, 0] > 9
given = nni_sdk.get_current_parameter()
callback = NNICallback("validation-Logloss", checkpoints=True)
model = catboost.CatBoostClassifier(
    **given,
    metric_period=PERIOD,
    thread_count=1,
    verbose=False,
    train_dir=os.environ["NNI_SYS_DIR"],
)
model.fit(x, y, eval_set=(x, y), callbacks=[callback], **callback.snapshot)
"""


@pytest.mark.parametrize("period", [1, 2])
def test_a_trial_that_continues_a_snapshot_of_catboost_reports_only_its_own_values(tmp_path, period):
    code = CATBOOST_FIT.replace("PERIOD", str(period))
    values, finals = [], []
    # The second and the third trial continue the snapshot of the trial before, and repeat its last iteration.
    for generation in 1, 2, 3:
        parameters = {"iterations": 5 * generation, "learning_rate": 0.1 * generation}
        values, finals = run_in_trial("catboost", tmp_path, code, parameters)
        assert finals[-1] == values[-1]
    # Each iteration lowers the loss, so no value may occur twice. A repeated value would be a report of an earlier trial.
    assert len(set(values)) == len(values) == {1: 5 + 6 + 6, 2: 3 + 4 + 3}[period]


def test_a_forked_child_that_exits_does_not_remove_the_snapshot_of_catboost():
    pytest.importorskip("catboost")
    code = """
import os, sys
from nni_sdk.integrations.catboost import NNICallback
callback = NNICallback("Logloss", checkpoints=True)
folder = os.path.dirname(callback.snapshot["snapshot_file"])
if os.fork() == 0:
    sys.exit(0)
os.wait()
assert os.path.exists(folder)
del callback
assert not os.path.exists(folder)
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), timeout=scaled_s(60), check=True)
