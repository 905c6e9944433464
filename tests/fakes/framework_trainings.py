"""Small trainings with the real frameworks, as trials: `python framework_trainings.py xgboost` prints what each trial reported.

Runs in a Python that has the framework. A training returns the framework's own values of the metric, in order. If possible, the
values come from a source that the callback does not use. A training fails if its model cannot predict afterwards.

This file has more than 500 lines: a class for each framework, on helpers that all of them share.
"""

import contextlib
import functools
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import nni_sdk
from nni_sdk.records import decode
from nni_sdk.trial import TrialContext

ROUNDS = 6
STOP_AFTER = 2
"""The report after which the stop notice is there."""

BUDGETS = {"TRIAL_BUDGET": STOP_AFTER}, {"TRIAL_BUDGET": ROUNDS}
"""The parameters of a trial before and after its promotion."""


def rounds():
    """The number of rounds of the trial: its budget if the trial has one, as with Hyperband."""
    return (nni_sdk.get_current_parameter() or {}).get("TRIAL_BUDGET", ROUNDS)


CHILD = {"TRIAL_BUDGET": STOP_AFTER, "rate": 0.125}, {"TRIAL_BUDGET": ROUNDS, "rate": 0.0625}
"""The parameters of a member of a population, and of one that continues from it."""

rates = []
"""The rate that a training has used."""


def rate(default):
    """The learning rate of the trial, or a hyper-parameter like it."""
    return (nni_sdk.get_current_parameter() or {}).get("rate", default)


def data():
    import numpy as np

    x = np.random.default_rng(1).normal(size=(240, 4)).astype("float32")
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype("int64")
    return x[:160], y[:160], x[160:], y[160:]


def check_prediction(predicted):
    import numpy as np

    assert np.isfinite(np.asarray(predicted, dtype=float)).all()


class XGBoost:
    module, metric, names, best = "xgboost", "valid-logloss", ["train-logloss", "valid-logloss"], "min"
    other = "XGBoostPruningCallback"
    continues = True
    agrees = True

    def train(self, callback):
        import xgboost

        if "TRACKER" not in os.environ:
            return self.trained(callback)
        where = json.loads(os.environ["TRACKER"])
        with xgboost.collective.CommunicatorContext(**where, dmlc_task_id=os.environ["RANK"]):
            return self.trained(callback)

    @staticmethod
    @contextlib.contextmanager
    def coordinator():
        """Environment variables with which two processes find each other through a tracker in this process."""
        import xgboost

        tracker = xgboost.tracker.RabitTracker(2, "127.0.0.1")
        tracker.start()
        yield {"TRACKER": json.dumps(tracker.worker_args())}
        tracker.wait_for()

    def trained(self, callback):
        import xgboost

        x, y, valid_x, valid_y = data()
        train, valid = xgboost.DMatrix(x, y), xgboost.DMatrix(valid_x, valid_y)
        log = {}
        model = xgboost.train(
            {"objective": "binary:logistic", "eta": 1.5, "nthread": 1},
            train,
            rounds() - callback.training.rounds,
            xgb_model=callback.training.model,
            evals=[(train, "train"), (valid, "valid")],
            callbacks=[callback],
            evals_result=log,
            verbose_eval=False,
        )
        check_prediction(model.predict(valid))
        return log.get("valid", {}).get("logloss", [])


class LightGBM:
    module, metric, names, best = "lightgbm", "valid_0-binary_logloss", ["valid_0-binary_logloss"], "min"
    other = "LightGBMPruningCallback"
    continues = True

    def train(self, callback):
        import lightgbm

        x, y, valid_x, valid_y = data()
        log = {}
        train = lightgbm.Dataset(x, y)
        model = lightgbm.train(
            {"objective": "binary", "learning_rate": 1.5, "verbose": -1, "num_threads": 1},
            train,
            rounds() - callback.training.rounds,
            init_model=callback.training.model,
            valid_sets=[lightgbm.Dataset(valid_x, valid_y, reference=train)],
            callbacks=[lightgbm.record_evaluation(log), callback],
        )
        check_prediction(model.predict(valid_x))
        return log["valid_0"]["binary_logloss"]


class CatBoost:
    module, metric, names, best = (
        "catboost",
        "validation-Logloss",
        ["learn-Logloss", "validation-Logloss"],
        "min",
    )
    other = "CatBoostPruningCallback"
    continues = True

    def train(self, callback):
        import catboost

        x, y, valid_x, valid_y = data()
        model = catboost.CatBoostClassifier(
            iterations=rounds(),
            learning_rate=1.5,
            thread_count=1,
            verbose=False,
            allow_writing_files=bool(callback.snapshot),
            train_dir=tempfile.gettempdir() + f"/catboost-{os.getpid()}",
            use_best_model=False,
        )
        model.fit(x, y, eval_set=(valid_x, valid_y), callbacks=[callback], **callback.snapshot)
        callback.report_final_result()
        check_prediction(model.predict(valid_x))
        return model.get_evals_result()["validation"]["Logloss"]


class ScikitLearn:
    module, metric, names, best = "sklearn", "accuracy", ["accuracy", "neg_log_loss"], "max"
    other = "NNICallback"
    continues = True

    def train(self, callback):
        from sklearn.linear_model import SGDClassifier

        x, y, valid_x, valid_y = data()
        model, log = SGDClassifier(loss="log_loss", alpha=rate(0.0001), random_state=1), []
        for number in callback.passes(range(rounds()), model, valid_x, valid_y):
            if number > 0:
                log.append(model.score(valid_x, valid_y))
            model.partial_fit(x, y, classes=[0, 1])
        rates.append(model.alpha)
        check_prediction(model.predict_proba(valid_x))
        return [*log, model.score(valid_x, valid_y)]


class ScikitLearnFolds(ScikitLearn):
    averages = True
    continues = False

    def train(self, callback):
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import cross_val_score

        x, y, *_ = data()
        scores = callback.cross_val_score(LogisticRegression(), x, y, cv=ROUNDS)
        expected = cross_val_score(LogisticRegression(), x, y, cv=ROUNDS, scoring=self.metric)
        assert list(scores) == list(expected[: len(scores)])
        return scores


class Keras:
    module, metric, names, best = "keras", "val_loss", ["accuracy", "loss", "val_accuracy", "val_loss"], "max"
    other = "KerasPruningCallback"
    continues = True
    stops_in_a_round = True

    def train(self, callback):
        import keras

        x, y, valid_x, valid_y = data()
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(rate(1.0)), "binary_crossentropy", metrics=["accuracy"])
        history = model.fit(
            x,
            y,
            32,
            rounds(),
            verbose=0,
            shuffle=False,
            validation_data=(valid_x, valid_y),
            callbacks=[callback],
            initial_epoch=callback.training.rounds,
        )
        rates.append(float(model.optimizer.learning_rate.numpy()))
        check_prediction(model.predict(valid_x, verbose=0))
        return history.history.get("val_loss", [])


def torch_data():
    import torch

    x, y, valid_x, valid_y = map(torch.as_tensor, data())
    return torch.utils.data.TensorDataset(x, y), torch.utils.data.TensorDataset(valid_x, valid_y)


def torch_model():
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


class Lightning:
    module, metric, names, best = "lightning", "val_loss", ["train_loss", "val_loss"], "max"
    other = "PyTorchLightningPruningCallback"
    continues = True
    agrees = True
    saves_together = True
    stops_in_a_round = True
    package = "lightning.pytorch"
    interval, epochs_per_validation = 1.0, 1

    def train(self, callback):
        import torch

        pl = importlib.import_module(self.package)

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.model, self.loss = torch_model(), torch.nn.CrossEntropyLoss()
                self.losses, self.values = [], {"val_loss": [], "loss": [], "late": []}

            def training_step(self, batch, _):
                loss = self.loss(self.model(batch[0]), batch[1])
                self.log("train_loss", loss, on_epoch=True, on_step=False)
                self.log("loss", loss, on_epoch=True, on_step=True)
                self.losses.append(float(loss))
                return loss

            def on_train_epoch_end(self):
                self.values["loss"].append(statistics.mean(self.losses))
                self.values["late"].append(max(self.losses))
                self.log("late", max(self.losses))
                self.losses.clear()

            def validation_step(self, batch, _):
                self.log("val_loss", self.loss(self.model(batch[0]), batch[1]), sync_dist=True)

            def on_validation_end(self):
                if not self.trainer.sanity_checking:
                    self.values["val_loss"].append(float(self.trainer.callback_metrics["val_loss"]))

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), rate(1.0))

        train, valid = (torch.utils.data.DataLoader(each, 16) for each in torch_data())
        module = Module()
        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        # torchrun starts both processes and sets WORLD_SIZE. Without torchrun, Lightning itself starts the second process if
        # `devices` is 2.
        world = int(os.environ.get("WORLD_SIZE") or os.environ.get("DEVICES", "1"))
        trainer = pl.Trainer(
            max_epochs=rounds(),
            accelerator="cpu",
            devices=world,
            strategy="ddp" if world > 1 else "auto",
            callbacks=[callback],
            **quiet,
            val_check_interval=self.interval,
            check_val_every_n_epoch=self.epochs_per_validation,
        )
        trainer.validate(module, valid, verbose=False)
        module.values["val_loss"].clear()
        trainer.fit(module, train, valid, ckpt_path=callback.training.model)
        values = list(module.values.get(self.metric, []))
        trainer.validate(module, valid, verbose=False)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        check_prediction(module.model(valid.dataset.tensors[0]).detach())
        return values


class LightningValidatedTwice(Lightning):
    interval = 0.5


class LightningValidatedRarely(Lightning):
    epochs_per_validation = 2


class LightningLossOfTraining(Lightning):
    metric = "loss"


class LightningLoggedLate(Lightning):
    metric = "late"


class LightningLoggedLateAndValidatedRarely(LightningValidatedRarely):
    metric = "late"


class PyTorchLightning(Lightning):
    module, package = "pytorch_lightning", "pytorch_lightning"


class Transformers:
    module, metric, names, best = "transformers", "eval_loss", ["eval_loss", "eval_runtime"], "max"
    other = "NNICallback"
    continues = True
    agrees = True
    stops_in_a_round = True

    def train(self, callback):
        import torch
        import transformers

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = torch_model()

            def forward(self, x, labels):
                logits = self.model(x)
                return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

        train, valid = ([{"x": x, "labels": y} for x, y in each] for each in torch_data())
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder,
                num_train_epochs=rounds(),
                per_device_train_batch_size=16,
                learning_rate=rate(0.5),
                eval_strategy="epoch",
                save_strategy="epoch",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                logging_strategy="epoch",
            )
            trainer = transformers.Trainer(
                Model(), arguments, train_dataset=train, eval_dataset=valid, callbacks=[callback]
            )
            trainer.evaluate(metric_key_prefix="untrained")
            trainer.evaluate()
            trainer.train(resume_from_checkpoint=callback.training.model)
            rates.extend(trainer.lr_scheduler.base_lrs[:1])
            values = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
            trainer.evaluate()
            check_prediction(trainer.predict(valid).predictions)
        return values


class Ignite:
    module, metric, names, best = "ignite", "loss", ["accuracy", "loss"], "max"
    other = "PyTorchIgnitePruningHandler"
    continues = True
    agrees = True
    stops_in_a_round = True

    def train(self, callback_of):
        import ignite.distributed as idist
        import torch
        from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
        from ignite.metrics import Accuracy, Loss

        if "WORLD_SIZE" in os.environ:
            idist.initialize("gloo")
        train, valid = (torch.utils.data.DataLoader(each, 16) for each in torch_data())
        loss, model, log = torch.nn.CrossEntropyLoss(), torch_model(), []
        optimizer = torch.optim.SGD(model.parameters(), rate(1.0))
        trainer = create_supervised_trainer(model, optimizer, loss)
        evaluator = create_supervised_evaluator(model, {"loss": Loss(loss), "accuracy": Accuracy()})
        callback = callback_of(trainer, {"model": model, "optimizer": optimizer})
        evaluator.add_event_handler(Events.COMPLETED, callback)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(valid))
        evaluator.add_event_handler(Events.COMPLETED, lambda: log.append(evaluator.state.metrics["loss"]))
        trainer.run(train, rounds())
        rates.append(optimizer.param_groups[0]["lr"])
        check_prediction(model(valid.dataset.tensors[0]).detach())
        return log


class FastAI:
    module, metric, names, best = "fastai", "valid_loss", ["accuracy", "train_loss", "valid_loss"], "max"
    other = "FastAIPruningCallback"
    continues = True
    agrees = True
    stops_in_a_round = True

    def train(self, callback):
        import torch
        from fastai.data.core import DataLoaders
        from fastai.learner import Learner
        from fastai.metrics import accuracy

        if "WORLD_SIZE" in os.environ:
            torch.distributed.init_process_group("gloo")
        train, valid = (torch.utils.data.DataLoader(each, 16) for each in torch_data())
        learner = Learner(
            DataLoaders(train, valid),
            torch_model(),
            loss_func=torch.nn.functional.cross_entropy,
            metrics=accuracy,
            lr=rate(0.05),
        )
        with learner.no_logging():
            learner.fit(rounds(), cbs=callback)
        callback.report_final_result()
        rates.append(learner.opt.hypers[0]["lr"])
        check_prediction(learner.model(valid.dataset.tensors[0]).detach())
        # If the training continued from a checkpoint, the recorder has an empty entry for each epoch before the checkpoint.
        return [values[1] for values in learner.recorder.values if values]


VARIANTS = {
    Lightning: [
        LightningValidatedTwice,
        LightningValidatedRarely,
        LightningLossOfTraining,
        LightningLoggedLate,
        LightningLoggedLateAndValidatedRarely,
    ]
}
"""Trainings that validate at other times, or report a metric of another kind."""

FRAMEWORKS = {"sklearn folds": ScikitLearnFolds} | {
    each.module: each
    for each in (
        ScikitLearn,
        XGBoost,
        LightGBM,
        CatBoost,
        Keras,
        Lightning,
        PyTorchLightning,
        Transformers,
        Ignite,
        FastAI,
    )
}


def callback_for(framework, metric, **kwargs):
    own = importlib.import_module(f"nni_sdk.integrations.{framework.module}")
    if framework is Ignite:
        saves = kwargs.pop("checkpoints", False)
        return lambda trainer, objects: own.NNICallback(
            metric, trainer, to_save=objects if saves else None, **kwargs
        )
    return own.NNICallback(metric, **kwargs)


def write_parameters(folder, parameters):
    """Write the parameters of a trial, like a keeper before it starts the trial. Several processes may then read them at the same
    time.
    """
    Path(folder, "parameter.cfg").write_text(json.dumps({"parameter_id": 0, "parameters": parameters}))


def run_as_trial(framework, folder, *, metric=None, stops=False, is_trial=True, **kwargs):
    """Train as a trial with this folder.

    Return the framework's own values, the reports, and the type and text of an exception.
    """
    environ = {"NNI_PLATFORM": "local", "NNI_SYS_DIR": folder, "NNI_TRIAL_JOB_ID": "tRiAl"}
    nni_sdk.trial._trial = TrialContext(environ if is_trial else {})
    report, reported = nni_sdk.report_intermediate_result, []

    def report_until_the_stop(value):
        report(value)
        reported.append(value)
        if len(reported) == STOP_AFTER:
            Path(folder, "stop_notice.json").write_text('{"reason": "stopped by user"}')

    if stops:
        nni_sdk.report_intermediate_result = report_until_the_stop
    values, error = [], None
    rates.clear()
    try:
        nni_sdk.get_next_parameter()
        values = framework().train(callback_for(framework, metric or framework.metric, **kwargs))
    except Exception as raised:  # noqa: BLE001 - it is a result
        traceback.print_exc()
        error = [type(raised).__name__, str(raised)]
    finally:
        nni_sdk.report_intermediate_result = report
    return {
        "values": [float(value) for value in values],
        "error": error,
        "rates": rates[:],
        **reports_in(folder),
    }


def run_stopped(framework, folder):
    """Run a training that is stopped in a round, and return the number of rounds of its newest checkpoint."""
    result = run_as_trial(framework, folder, stops=True, checkpoints=True)
    newest = max(Path(folder, "checkpoints").glob("*/training.json"))
    return result | {"rounds": json.loads(newest.read_text())["rounds"]}


def run_variant(variant, folder):
    """Run a whole training, another one that is killed and continued, and one that is promoted."""
    return {
        "whole": run_as_trial(variant, folder, best=variant.best),
        "killed": run_killed(variant, folder + "/killed"),
        "promoted": run_continued(variant, folder + "/promoted", *BUDGETS),
    }


def made_attempts(folder, *parameters):
    """Return the folders of two attempts with these parameters."""
    attempts = [Path(folder, "attempts", name, "0") for name in ("01", "02")]
    for attempt, each in zip(attempts, parameters, strict=True):
        attempt.mkdir(parents=True)
        write_parameters(attempt, each)
    return attempts


def offer_checkpoints(attempts):
    """Offer the first attempt's checkpoints to the second attempt, like a keeper. Return their manifests, the newest first."""
    folder = attempts[0] / "checkpoints"
    manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), reverse=True)]
    origin = {"folder": str(folder), "trial_id": "tRiAl", "attempt_id": "01", "task": "0"}
    sources = json.dumps({"checkpoints": [manifest | origin for manifest in manifests]})
    (attempts[1] / "checkpoint_sources.json").write_text(sources)
    return manifests


def run_continued(framework, folder, *parameters, metric=None):
    """Run two attempts with these parameters, which both end by themselves; return the results of each.

    `kept`: the number of reports before the checkpoint.
    """
    attempts = made_attempts(folder, *parameters)
    first = run_as_trial(framework, str(attempts[0]), metric=metric, checkpoints=True, best=framework.best)
    kept = offer_checkpoints(attempts)[0]["reports"]
    second = run_as_trial(framework, str(attempts[1]), metric=metric, checkpoints=True, best=framework.best)
    return {"first": first, "second": second, "kept": kept}


def run_killed(framework, folder, *, at_end=False, train=run_as_trial):
    """Run two attempts; return what each has reported. The first attempt exits before its third report, or before its final
    report if `at_end`. The second attempt continues from the first one's checkpoint. `kept`: the number of reports before the
    checkpoint. `train`: the function that runs an attempt.
    """
    attempts = made_attempts(folder, {}, {})
    child = os.fork()
    if child == 0:
        report, left = nni_sdk.report_intermediate_result, iter(range(STOP_AFTER))

        def report_or_die(value):
            if next(left, None) is None:
                os._exit(9)
            report(value)

        if at_end:
            nni_sdk.report_final_result = lambda value: os._exit(9)
        else:
            nni_sdk.report_intermediate_result = report_or_die
        try:
            train(framework, str(attempts[0]), checkpoints=True, best=framework.best)
        except SystemExit as ended:
            os._exit(ended.code)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    manifests = offer_checkpoints(attempts)
    second = train(framework, str(attempts[1]), checkpoints=True, best=framework.best)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "kept": manifests[0]["reports"],
        "first": reports_in(attempts[0]),
        "second": second,
    }


def reports_in(folder):
    path = Path(folder, ".nni/metrics")
    records = decode(path.read_bytes(), 0).records if path.exists() else []
    found = {
        kind: [json.loads(each.value) for each in records if each.type == kind]
        for kind in ("PERIODICAL", "FINAL")
    }
    return {"intermediate": found["PERIODICAL"], "final": found["FINAL"]}


@contextlib.contextmanager
def torch_coordinator():
    """The environment variables that torchrun sets for two processes. The first process listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "one",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def write_rank(framework, folder, **kwargs):
    result = run_as_trial(framework, folder, **kwargs)
    Path(folder, f"rank{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(result))


def run_on_two_ranks(framework, folder, **kwargs):
    """Like `run_as_trial`, but one training runs in two processes. Return the results of both."""
    with getattr(framework, "coordinator", torch_coordinator)() as variables:
        children = []
        for rank in "0", "1":
            child = os.fork()
            if child == 0:
                os.environ |= variables | {"RANK": rank, "LOCAL_RANK": rank}
                try:
                    write_rank(framework, folder, **kwargs)
                finally:
                    os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(max(codes))
    return {"error": None, **results_of_ranks(folder)}


def run_launched(name, folder, **kwargs):
    """Like `run_on_two_ranks`, but the framework starts the second process with the command line of the first one."""
    command = [sys.executable, __file__, name, folder, json.dumps(kwargs)]
    subprocess.run(command, check=True, env={**os.environ, "DEVICES": "2"}, stdout=subprocess.DEVNULL)
    return {"saved": len(list(Path(folder, "checkpoints").glob("*.json"))), **results_of_ranks(folder)}


def results_of_ranks(folder):
    ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in "01"]
    return {"ranks": ranks, **reports_in(folder)}


def main(name, launched_in=None, arguments="{}"):
    os.environ["KERAS_BACKEND"] = "torch"
    os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "OMP_NUM_THREADS"), "1")
    framework = FRAMEWORKS[name]
    if launched_in is not None:
        write_rank(framework, launched_in, **json.loads(arguments))
        import torch.distributed

        # If the process group remains, its threads may abort the exiting Python with "terminate called without an active
        # exception".
        torch.distributed.destroy_process_group()
        return
    own = importlib.import_module(f"nni_sdk.integrations.{framework.module}")
    scenarios = {
        "two ranks": lambda folder: run_on_two_ranks(framework, folder),
        "two ranks stopped": lambda folder: run_on_two_ranks(framework, folder, stops=True),
        "trial": lambda folder: run_as_trial(framework, folder),
        "best": lambda folder: run_as_trial(framework, folder, best=framework.best),
        "stopped": lambda folder: run_as_trial(framework, folder, stops=True),
        "standalone": lambda folder: run_as_trial(framework, folder, is_trial=False),
        "absent": lambda folder: run_as_trial(framework, folder, metric="no_such_metric"),
    }
    found = {
        "names": framework.names,
        "variants": [each.__name__ for each in VARIANTS.get(framework, [])],
        "mode": framework.best,
        "averages": hasattr(framework, "averages"),
        "agrees": hasattr(framework, "agrees"),
        "alias": getattr(own, framework.other) is own.NNICallback,
    }
    if getattr(framework, "continues", False):
        scenarios["killed"] = lambda folder: run_killed(framework, folder)
        scenarios["killed at the end"] = lambda folder: run_killed(framework, folder, at_end=True)
        scenarios["child"] = lambda folder: run_continued(framework, folder, *CHILD)
        scenarios["promoted"] = lambda folder: run_continued(framework, folder, *BUDGETS)
    if hasattr(framework, "saves_together"):
        scenarios["two ranks killed"] = lambda folder: run_killed(framework, folder, train=run_on_two_ranks)
        scenarios["launched"] = lambda folder: run_launched(name, folder, checkpoints=True)
    if hasattr(framework, "stops_in_a_round"):
        scenarios["stopped in a round"] = lambda folder: run_stopped(framework, folder)
    variants = VARIANTS.get(framework, [])
    scenarios |= {each.__name__: functools.partial(run_variant, each) for each in variants}
    for scenario, run in scenarios.items():
        with tempfile.TemporaryDirectory() as folder:
            # A killed training leaves its temporary files. They are created in this folder, which is removed after the scenario.
            tempfile.tempdir = folder
            write_parameters(folder, {})
            found[scenario] = run(folder)
        tempfile.tempdir = None
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
