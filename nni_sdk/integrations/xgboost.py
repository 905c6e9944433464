"""The callback for XGBoost: `xgboost.train(..., evals=[(valid, "valid")], callbacks=[NNICallback("valid-auc")])`.

Source: XGBoost 1.3 and later, xgboost.callback.TrainingCallback.
"""

import numpy as np
from xgboost.callback import TrainingCallback

try:
    from xgboost import collective
except ImportError:  # before XGBoost 1.7
    from xgboost import rabit as collective

import nni_sdk
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter, is_first_process

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


class NNICallback(TrainingCallback):
    """Reports a metric after each boosting round and the final result after training; a stop ends training after the round.

    `metric`: data set and metric as XGBoost prints them, such as `valid-auc`; `auc` is enough if only one data set has it.
    `best`: "min" or "max" makes the lowest or highest value the final result; None the last. `checkpoints`: save one after each
    round. `training` has the number of rounds and the model of the attempts before:
    `train(..., num_boost_round=100 - callback.training.rounds, xgb_model=callback.training.model)`.
    """

    def __init__(self, metric: str, best: "str | None" = None, *, checkpoints: bool = False) -> None:
        super().__init__()
        self._reporter = MetricReporter(metric, best)
        self.training = ContinuedTraining(self._reporter, is_saved=checkpoints)
        self._history = {}  # type: Any

    def before_training(self, model: "Any") -> "Any":
        """See XGBoost."""
        self._reporter.training_starts()
        self._history = {}
        return model

    def after_iteration(self, model: "Any", epoch: int, evals_log: "Any") -> bool:
        """See XGBoost: True ends training."""
        self._history = evals_log
        if self._is_first_process():
            self._reporter.report_history(evals_log)
            # The boosters of xgboost.cv have no save_model.
            self.training.round_ended(lambda path: model.save_model(path))  # noqa: PLW0108
        stops = nni_sdk.should_stop()
        if collective.get_world_size() == 1:
            return stops
        # All processes must end after the same round.
        return bool(collective.allreduce(np.array([stops], np.int32), collective.Op.MAX)[0])

    def after_training(self, model: "Any") -> "Any":
        """See XGBoost."""
        if self._is_first_process():
            # A callback before this one that ended training has kept the last round from it.
            if self._history or not self.training.rounds:
                self._reporter.report_history(self._history)
            self._reporter.report_final_result()
        return model

    @staticmethod
    def _is_first_process() -> bool:
        return collective.get_rank() == 0 if collective.get_world_size() > 1 else is_first_process()


XGBoostPruningCallback = NNICallback
"""Optuna's name."""
