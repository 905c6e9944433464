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
    """Reports a metric after each epoch, and the final result; a stop ends training after the batch.

    `metric`: a column of fastai's table, such as `valid_loss` or `accuracy`. `best`: "min" or "max" makes the lowest or highest
    value the final result; None the last. `checkpoints`: save one after each epoch. At the start of training the model and the
    optimizer of the attempts before are loaded, and their epochs are skipped.

    All calls of `fit` with this callback, such as the two of `fine_tune`, are one training. fastai does not announce its end. The
    final result is reported after a stop, when Python exits, or by `report_final_result`.
    """

    # After the Recorder, whose values it reads; not while predictions are made or the learning rate is searched.
    order, remove_on_fetch, _only_train_loop = 60, True, True

    def __init__(self, metric: str, best: "str | None" = None, *, checkpoints: bool = False) -> None:
        super().__init__()
        self._reporter = MetricReporter(metric, best)
        self._so_far = ContinuedTraining(self._reporter, is_saved=checkpoints)
        self._epochs_to_skip = self._so_far.rounds
        self._names = []  # type: list[str]
        self._is_trained = False
        """True after the training of an epoch. An epoch of `validate` or `get_preds` has none, nor has a skipped one."""
        if rank_distrib() == 0:
            self._reporter.report_final_result_at_exit()

    def before_fit(self) -> None:
        """See fastai."""
        self.run = not hasattr(self.learn, "lr_finder")
        # Without the epoch's number, and its time if that is recorded.
        self._names = [name for name in self.recorder.metric_names[1:] if name != "time"]
        if self._reporter.metric not in self._names:
            raise self._reporter.absent(self._names)
        # `validate` before `fit` has no optimizer yet.
        if self.run and self.opt is not None and self._so_far.model is not None:
            device = next(self.model.parameters()).device
            given = [dict(group) for group in self.opt.hypers]
            load_model(self._so_far.model, self.model, self.opt, device=device)
            if self._so_far.is_inherited:
                for name in given[0]:
                    self.opt.set_hyper(name, [group[name] for group in given])
            self._so_far.model = None  # not again by a second call of fit

    def before_epoch(self) -> None:
        """See fastai."""
        self._is_trained = False

    def before_train(self) -> None:
        """See fastai. Unlike `before_epoch`, it is not called by `validate`."""
        if self._epochs_to_skip > 0:
            self._epochs_to_skip -= 1
            raise CancelEpochException

    def after_batch(self) -> None:
        """See fastai."""
        if self.training and on_any_rank(nni_sdk.should_stop(), self.loss.device):
            raise CancelFitException

    def after_train(self) -> None:
        """See fastai."""
        self._is_trained = True

    def after_epoch(self) -> None:
        """See fastai."""
        if rank_distrib() == 0 and self._is_trained:
            self._reporter.report(dict(zip(self._names, self.recorder.values[-1])))
            self._so_far.round_ended(lambda path: save_model(path, self.model, self.opt))

    def after_fit(self) -> None:
        """See fastai."""
        if nni_sdk.should_stop():  # SIGTERM may come before Python exits
            self.report_final_result()

    def report_final_result(self) -> None:
        """Report the final result now, if it was not reported before."""
        if rank_distrib() == 0:
            self._reporter.report_final_result()


FastAIPruningCallback = FastAIV2PruningCallback = NNICallback
"""Optuna's names."""
