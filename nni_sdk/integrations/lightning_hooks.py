"""The callback for Lightning, without its base class: `lightning` and `pytorch_lightning` each have their own.

Source: Lightning 2.0 and later, lightning.pytorch.callbacks.Callback.
"""

import nni_sdk
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter
from nni_sdk.integrations.torch_optimizers import hyper_parameters, set_hyper_parameters

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


class LightningHooks:
    """Reports a metric after each epoch and the final result after training; a stop ends training after the batch.

    `metric`: a name that the LightningModule logs, such as `val_loss`. A metric of validation is reported after each validation.
    `best`: "min" or "max" makes the lowest or highest value the final result; None the last. `checkpoints`: save one after each
    epoch; several processes save it together. `training.model` is that of the attempts before:
    `trainer.fit(..., ckpt_path=callback.training.model)`.
    """

    def __init__(self, metric: str, best: "str | None" = None, *, checkpoints: bool = False) -> None:
        super().__init__()
        self._reporter = MetricReporter(metric, best)
        self.training = ContinuedTraining(self._reporter, is_saved=checkpoints)
        self._is_of_validation = False
        self._was_validated = False
        self._names_before = set()  # type: set[str]

    def on_fit_start(self, trainer: "Any", pl_module: "Any") -> None:
        """See Lightning. Refuses processes that continue from different checkpoints: training would hang.

        Raises:
            ValueError: another process than the first one has loaded another checkpoint, or none.
        """
        self._reporter.training_starts()
        own = self.training.rounds
        first = trainer.strategy.broadcast(own)
        if trainer.strategy.reduce_boolean_decision(own != first, all=False):
            raise ValueError(
                f"cannot continue with a checkpoint of {first} epochs in the first process and one of {own} in this one "
                f"(rank {trainer.global_rank}); let all processes see the storage of the first one"
            )
        self.training.continue_in_this_process()
        # Lightning loads the optimizers' state after this hook.
        self._given = [hyper_parameters(each) for each in getattr(trainer, "optimizers", [])]
        self._given_rates = [
            getattr(each.scheduler, "base_lrs", None) for each in getattr(trainer, "lr_scheduler_configs", [])
        ]

    def on_train_start(self, trainer: "Any", pl_module: "Any") -> None:
        """See Lightning. A trial that has inherited its model trains with its own parameters."""
        if not self.training.is_inherited:
            return
        for optimizer, given in zip(trainer.optimizers, self._given):
            set_hyper_parameters(optimizer, given)
        for config, rates in zip(trainer.lr_scheduler_configs, self._given_rates):
            if rates is not None:
                config.scheduler.base_lrs = rates
        self.training.is_inherited = False  # not again by a second call of fit

    def on_train_batch_end(self, trainer: "Any", *_: "Any") -> None:
        """See Lightning. All processes stop after the same batch."""
        if trainer.strategy.reduce_boolean_decision(nni_sdk.should_stop(), all=False):
            trainer.should_stop = True

    def on_validation_start(self, trainer: "Any", pl_module: "Any") -> None:
        """See Lightning. Training may have logged a value of the last batch under the metric's name."""
        self._names_before = set(trainer.callback_metrics)

    def on_validation_end(self, trainer: "Any", pl_module: "Any") -> None:
        """See Lightning."""
        # A user may also call trainer.validate.
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        self._was_validated = True
        if self._reporter.metric not in self._names_before:
            self._is_of_validation = self._reporter.metric in trainer.callback_metrics
        if self._is_of_validation:
            self._reporter.report(trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: "Any", pl_module: "Any") -> None:
        """See Lightning, which calls the module's own hook after this one. The epoch ends after that: it may log the metric.

        At the start of the next epoch it would be too late for a checkpoint: a training that continues from there skips an epoch.
        """
        hook, patch = pl_module.on_train_epoch_end, vars(pl_module).get("on_train_epoch_end")

        def call_and_end() -> None:
            if patch is None:
                del pl_module.on_train_epoch_end
            else:  # of another callback
                pl_module.on_train_epoch_end = patch
            hook()
            self._end_epoch(trainer)

        pl_module.on_train_epoch_end = call_and_end

    def _end_epoch(self, trainer: "Any") -> None:
        if trainer.is_global_zero and not self._is_of_validation:
            metrics = trainer.callback_metrics
            is_awaited = trainer.enable_validation and not self._was_validated
            if self._reporter.metric in metrics or not is_awaited:
                self._reporter.report(metrics)

        progress = trainer.fit_loop.epoch_loop.batch_progress
        is_whole = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
        if trainer.should_stop and not is_whole:
            return  # the next attempt trains the whole epoch

        def save(path: str) -> None:
            trainer.save_checkpoint(trainer.strategy.broadcast(path))  # returns when all processes have saved

        self.training.round_ended(save, is_first=trainer.is_global_zero, takes_all=True)

    def on_train_end(self, trainer: "Any", pl_module: "Any") -> None:
        """See Lightning."""
        if trainer.is_global_zero:
            self._reporter.finish(trainer.callback_metrics)

    def on_fit_end(self, trainer: "Any", pl_module: "Any") -> None:
        """See Lightning, which calls no hook of training if the checkpoint is from after the last epoch."""
        if trainer.is_global_zero:
            self._reporter.report_final_result()
