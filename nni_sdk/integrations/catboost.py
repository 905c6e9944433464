"""The callback for CatBoost: `model.fit(..., eval_set=valid, callbacks=[NNICallback("validation-AUC")])`.

Source: CatBoost 1.0 and later, the argument `callbacks` of `fit`.
"""

import os
import shutil
import tempfile
import weakref

import catboost  # noqa: F401 - a process without CatBoost learns it here

import nni_sdk
from nni_sdk.checkpoints import remove_own_folder
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter, is_first_process

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


class NNICallback:
    """Reports a metric after each iteration, and the final result; a stop ends training after the iteration.

    `metric`: data set and metric, such as `validation-AUC` or `learn-Logloss`; `AUC` is enough if only one data set has it.
    `best`: "min" or "max" makes the lowest or highest value the final result; None the last. `checkpoints`: save one for each
    iteration, of CatBoost's own snapshot: `model.fit(..., callbacks=[callback], **callback.snapshot)`. CatBoost then continues
    after the iterations of the attempts before.

    CatBoost does not announce the end of training: the final result is reported when Python exits, or by `report_final_result`.
    """

    def __init__(self, metric: str, best: "str | None" = None, *, checkpoints: bool = False) -> None:
        self._reporter = MetricReporter(metric, best)
        self._training = ContinuedTraining(self._reporter, is_saved=checkpoints)
        self._file = ""
        self.snapshot = {}  # type: dict[str, Any]
        """Arguments of `fit`, with which CatBoost writes a snapshot before each iteration, and continues from it."""
        if checkpoints:
            folder = tempfile.mkdtemp(prefix="nni-catboost-")
            weakref.finalize(self, remove_own_folder, folder, os.getpid())
            self._file = os.path.join(folder, "snapshot")
            if self._training.model is not None:
                shutil.copyfile(self._training.model, self._file)
                self._reporter.reported_of_history = self._training.reported_of_history
            self.snapshot = {"save_snapshot": True, "snapshot_file": self._file, "snapshot_interval": 0}
        self._iterations = 0
        """The number of iterations of this process."""
        self._is_first_process = is_first_process()
        if self._is_first_process:
            self._reporter.report_final_result_at_exit()

    def after_iteration(self, info: "Any") -> bool:
        """See CatBoost: False ends training."""
        if self._is_first_process:
            # The snapshot is from before this iteration, as are the results that were reported so far.
            if self._file and self._iterations > 0:
                self._training.round_ended(lambda path: shutil.copyfile(self._file, path))
            self._iterations += 1
            self._reporter.report_history(info.metrics)
        return not nni_sdk.should_stop()

    def report_final_result(self) -> None:
        """Report the final result now, if it was not reported before."""
        if self._is_first_process:
            self._reporter.report_final_result()


CatBoostPruningCallback = NNICallback
"""Optuna's name."""
