"""The callback for CatBoost: `model.fit(..., eval_set=valid, callbacks=[NNICallback("validation-AUC")])`.

Source: CatBoost 1.0 and later, the argument `callbacks` of `fit`.
"""

import catboost  # noqa: F401 - a process without CatBoost learns it here

import nni_sdk
from nni_sdk.integrations.reporter import MetricReporter, is_first_process

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


class NNICallback:
    """Reports a metric after each iteration, and the final result; a stop ends training after the iteration.

    `metric`: data set and metric, such as `validation-AUC` or `learn-Logloss`; `AUC` is enough if only one data set has it.
    `best`: "min" or "max" makes the lowest or highest value the final result; None the last.

    CatBoost does not announce the end of training: the final result is reported when Python exits, or by `report_final_result`.
    """

    def __init__(self, metric: str, best: "str | None" = None) -> None:
        self._reporter = MetricReporter(metric, best)
        self._is_first_process = is_first_process()
        if self._is_first_process:
            self._reporter.report_final_result_at_exit()

    def after_iteration(self, info: "Any") -> bool:
        """See CatBoost: False ends training."""
        if self._is_first_process:
            self._reporter.report_history(info.metrics)
        return not nni_sdk.should_stop()

    def report_final_result(self) -> None:
        """Report the final result now, if it was not reported before."""
        if self._is_first_process:
            self._reporter.report_final_result()


CatBoostPruningCallback = NNICallback
"""Optuna's name."""
