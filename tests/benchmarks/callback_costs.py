"""The time of a boosting round of XGBoost with each callback, in µs: `python callback_costs.py FOLDER ROUNDS TURNS` prints JSON.

Requires a Python with XGBoost. Optuna's and W&B's callbacks are measured if that Python has them. Each callback is used as its
manual shows, W&B's in offline mode. The trainings with different callbacks alternate.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import xgboost

import nni_sdk.integrations.xgboost


def our_callback():
    """Our callback in a new trial context, because a trial has only one final result."""
    nni_sdk.trial._trial = nni_sdk.trial.TrialContext(os.environ)
    nni_sdk.get_next_parameter()
    return [nni_sdk.integrations.xgboost.NNICallback("valid-auc")]


def makers(folder):
    """Functions that create each callback, by the callback's name. A callback whose library is not installed is omitted."""
    os.environ |= {"NNI_PLATFORM": "local", "NNI_SYS_DIR": folder, "NNI_TRIAL_JOB_ID": "aBcDe"}
    Path(folder, "parameter.cfg").write_text(json.dumps({"parameter_id": 0, "parameters": {}}))
    found = {"none": list, "ours": our_callback}
    with contextlib.suppress(ImportError):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruning = importlib.import_module("optuna_integration").XGBoostPruningCallback
        study = optuna.create_study(direction="maximize")
        found["Optuna"] = lambda: [pruning(study.ask(), "valid-auc")]
    with contextlib.suppress(ImportError):
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": folder}
        import wandb
        from wandb.integration.xgboost import WandbCallback

        wandb.init(project="callbacks")
        found["W&B"] = lambda: [WandbCallback(log_feature_importance=False)]
    return found


def main(folder, rounds, turns):
    """Train `turns` times for `rounds` rounds with each callback."""
    x = np.random.default_rng(1).normal(size=(64, 4))
    train = xgboost.DMatrix(x, x[:, 0] > 0)
    callbacks = makers(folder)
    times_us = {name: [] for name in callbacks}
    for _ in range(turns):
        for name, make in callbacks.items():
            chosen = make()
            begin = time.perf_counter()
            xgboost.train(
                {"objective": "binary:logistic", "eval_metric": "auc", "nthread": 1, "max_depth": 1},
                train,
                rounds,
                evals=[(train, "valid")],
                verbose_eval=False,
                callbacks=chosen,
            )
            times_us[name].append((time.perf_counter() - begin) / rounds * 1e6)
    print("\n" + json.dumps({name: median(times) for name, times in times_us.items()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
