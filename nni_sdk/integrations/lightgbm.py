"""The callback for LightGBM: `lightgbm.train(..., valid_sets=[valid], callbacks=[NNICallback("valid_0-auc")])`.

Source: LightGBM 3 and later, lightgbm.callback.
"""

from lightgbm.callback import EarlyStopException

import nni_sdk
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter, is_first_process

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


class NNICallback:
    """Reports a metric after each boosting round, and the final result; a stop ends training after the round.

    `metric`: data set and metric, such as `valid_0-auc`; `auc` is enough if only one data set has it. `best`: "min" or "max"
    makes the lowest or highest value the final result; None the last. `checkpoints`: save one after each round but the last.
    `training` has the number of rounds and the model of the attempts before:
    `train(..., num_boost_round=100 - callback.training.rounds, init_model=callback.training.model)`.

    The final result is reported after the last round. LightGBM does not announce that `early_stopping` ends training: the final
    result is then reported when Python exits, or by `report_final_result`.
    """

    def __init__(self, metric: str, best: "str | None" = None, *, checkpoints: bool = False) -> None:
        if isinstance(best, str) and best not in ("min", "max"):
            raise ValueError(
                f"cannot use best={best!r} for the final result; write 'min', 'max', or None for the last value. Optuna's "
                f"second argument, the data set, is part of the metric here: NNICallback({best + '-' + metric!r})"
            )
        self._reporter = MetricReporter(metric, best)
        self.training = ContinuedTraining(self._reporter, is_saved=checkpoints)
        # After `record_evaluation` (20), whose log is then complete, and before `early_stopping` (30), which ends training.
        self.order = 25
        self._is_first_process = is_first_process()
        if self._is_first_process:
            self._reporter.report_final_result_at_exit()

    def __call__(self, env: "Any") -> None:
        """See LightGBM: an `EarlyStopException` ends training."""
        results = env.evaluation_result_list or []
        if env.iteration == env.begin_iteration:
            self._reporter.training_starts()
        if self._is_first_process:
            self._reporter.report({f"{data}-{name}": value for data, name, value, *_ in results})
            # LightGBM refuses to train no round, so the last one is left to an attempt that continues.
            if env.iteration + 1 < env.end_iteration:
                self.training.round_ended(env.model.save_model)
        stops = nni_sdk.should_stop()
        if stops or env.iteration + 1 == env.end_iteration:
            self.report_final_result()
        if stops:
            raise EarlyStopException(env.iteration, results)

    def report_final_result(self) -> None:
        """Report the final result now, if it was not reported before."""
        if self._is_first_process:
            self._reporter.report_final_result()


LightGBMPruningCallback = NNICallback
"""Optuna's name."""
