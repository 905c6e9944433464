"""The callback for fastai: `learn.fit(5, cbs=NNICallback("valid_loss"))`.

Source: fastai 2, fastai.callback.core.Callback and fastai.callback.tracker.TrackerCallback.
"""

from fastai.callback.core import Callback, CancelEpochException, CancelFitException
from fastai.learner import load_model, save_model
from fastai.torch_core import rank_distrib

import nni_sdk
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter
from nni_sdk.integrations.torch_ranks import on_any_rank


class NNICallback(Callback):
    """Reports a metric after each epoch and the final result after training; a stop ends training after the batch.

    `metric`: a column of fastai's table, such as `valid_loss` or `accuracy`. `best`: "min" or "max" makes the lowest or highest
    value the final result; None the last. `checkpoints`: save one after each epoch. At the start of training the model and the
    optimizer of the attempts before are loaded, and their epochs are skipped.
    """

    # After the Recorder, whose values it reads; not while predictions are made or the learning rate is searched.
    order, remove_on_fetch, _only_train_loop = 60, True, True

    def __init__(self, metric: str, best: "str | None" = None, *, checkpoints: bool = False) -> None:
        super().__init__()
        self._reporter = MetricReporter(metric, best)
        self._so_far = ContinuedTraining(self._reporter, is_saved=checkpoints)
        self._epochs_to_skip = self._so_far.rounds
        self._names = []  # type: list[str]

    def before_fit(self) -> None:
        """See fastai."""
        self.run = not hasattr(self.learn, "lr_finder")
        # Without the epoch's number, and its time if that is recorded.
        self._names = [name for name in self.recorder.metric_names[1:] if name != "time"]
        if self._reporter.metric not in self._names:
            raise self._reporter.absent(self._names)
        if self.run and self._so_far.model is not None:
            device = next(self.model.parameters()).device
            load_model(self._so_far.model, self.model, self.opt, device=device)
            self._so_far.model = None  # not again by a second call of fit

    def before_epoch(self) -> None:
        """See fastai."""
        self._is_skipped = self._epochs_to_skip > 0
        if self._is_skipped:
            self._epochs_to_skip -= 1
            raise CancelEpochException

    def after_batch(self) -> None:
        """See fastai."""
        if self.training and on_any_rank(nni_sdk.should_stop(), self.loss.device):
            raise CancelFitException

    def after_epoch(self) -> None:
        """See fastai."""
        if rank_distrib() == 0 and not self._is_skipped:
            self._reporter.report(dict(zip(self._names, self.recorder.values[-1])))
            self._so_far.round_ended(lambda path: save_model(path, self.model, self.opt))

    def after_fit(self) -> None:
        """See fastai."""
        if rank_distrib() == 0:
            self._reporter.report_final_result()


FastAIPruningCallback = FastAIV2PruningCallback = NNICallback
"""Optuna's names."""
