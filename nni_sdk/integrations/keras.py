"""The callback for Keras: `model.fit(..., validation_data=valid, callbacks=[NNICallback("val_loss")])`.

Source: Keras 2 and 3, keras.callbacks.Callback; `tf.keras` is the same Keras.
"""

from keras.callbacks import Callback

import nni_sdk
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter, is_first_process

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any

# Keras chooses the format of weights by it.
_SUFFIX = ".weights.h5"


class NNICallback(Callback):
    """Reports a metric after each epoch and the final result after training; a stop ends training after the batch.

    `metric`: a name of Keras's logs, such as `val_loss`. `best`: "min" or "max" makes the lowest or highest value the final
    result; None the last. `checkpoints`: save one after each epoch. `training.rounds` is the number of epochs of the attempts
    before, whose weights are loaded at the start of training: `fit(..., initial_epoch=callback.training.rounds)`.
    """

    def __init__(self, metric: str, best: "str | None" = None, *, checkpoints: bool = False) -> None:
        super().__init__()
        self._reporter = MetricReporter(metric, best)
        self.training = ContinuedTraining(self._reporter, is_saved=checkpoints)
        self._names = set()  # type: set[str]
        self._is_cut = False

    def on_train_begin(self, logs: "Any" = None) -> None:
        """See Keras. The model has been built by now, so that its weights and the optimizer's can be loaded."""
        self._reporter.training_starts()
        if self.training.model is not None:
            rate = self.model.optimizer.learning_rate
            # A schedule is not among the weights.
            given = rate.numpy() if self.training.is_inherited and hasattr(rate, "assign") else None
            self.model.load_weights(self.training.model + _SUFFIX)
            if given is not None:
                rate.assign(given)
            self.training.model = None  # not again by a second call of fit

    def on_train_batch_end(self, batch: int, logs: "Any" = None) -> None:
        """See Keras."""
        if nni_sdk.should_stop():
            self.model.stop_training = True
            self._is_cut = batch + 1 != self.params.get("steps")

    def on_epoch_end(self, epoch: int, logs: "Any" = None) -> None:
        """See Keras."""
        logs = logs or {}
        self._names.update(logs)
        # With `validation_freq` not every epoch is validated.
        is_awaited = self._reporter.metric.startswith("val_") and not any(
            name.startswith("val_") for name in logs
        )
        if is_first_process() and not is_awaited:
            self._reporter.report(logs)
        if not self._is_cut:  # the next attempt trains the whole epoch
            self.training.round_ended(lambda path: self.model.save_weights(path + _SUFFIX))

    def on_train_end(self, logs: "Any" = None) -> None:
        """See Keras."""
        if is_first_process():
            self._reporter.finish(self._names)


KerasPruningCallback = NNICallback
"""Optuna's name."""
ReportIntermediates = NNICallback
"""The name in NNI's examples."""
