"""The callback for Hugging Face's Trainer: `Trainer(..., callbacks=[NNICallback("eval_loss")])`.

Source: transformers 4 and 5, transformers.TrainerCallback.
"""

import os
import shutil

from transformers import TrainerCallback

import nni_sdk
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter
from nni_sdk.integrations.torch_optimizers import hyper_parameters, set_hyper_parameters
from nni_sdk.integrations.torch_ranks import on_any_rank

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


class NNICallback(TrainerCallback):
    """Reports a metric each time it is logged and the final result after training; a stop ends training after the step.

    `metric`: a name of the Trainer's logs, such as `eval_loss` or `loss`. `best`: "min" or "max" makes the lowest or highest
    value the final result; None the last. `checkpoints`: save each checkpoint of the Trainer (`save_strategy`).
    `training.model` is the newest one of the attempts before: `trainer.train(resume_from_checkpoint=callback.training.model)`.
    """

    def __init__(self, metric: str, best: "str | None" = None, *, checkpoints: bool = False) -> None:
        self._reporter = MetricReporter(metric, best)
        self.training = ContinuedTraining(self._reporter, is_saved=checkpoints)
        self._names = set()  # type: set[str]
        self._is_training = False
        self._was_evaluated = False
        self._is_cut = False
        self._given = []  # type: list[dict[str, Any]]

    def on_init_end(
        self, args: "Any", state: "Any", control: "Any", optimizer: "Any" = None, **_: "Any"
    ) -> None:
        """See transformers. There is an optimizer only if the user has made it."""
        if optimizer is not None:
            self._given = hyper_parameters(optimizer)

    def on_train_begin(
        self,
        args: "Any",
        state: "Any",
        control: "Any",
        optimizer: "Any" = None,
        lr_scheduler: "Any" = None,
        **_: "Any",
    ) -> None:
        """See transformers. Before and after the training a user may also call Trainer.evaluate."""
        self._reporter.training_starts()
        self._is_training = True
        self._was_evaluated = self._is_cut = False
        if self.training.is_inherited and optimizer is not None:
            if self._given:
                set_hyper_parameters(optimizer, self._given)
            else:
                _set_own_parameters(args, optimizer)
            if hasattr(lr_scheduler, "base_lrs"):
                groups = optimizer.param_groups
                lr_scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
            self.training.is_inherited = False  # not again by a second call of train

    def on_log(self, args: "Any", state: "Any", control: "Any", logs: "Any" = None, **_: "Any") -> None:
        """See transformers. Results of evaluations are logged, too."""
        if not self._is_training:
            return
        logs = logs or {}
        self._names.update(logs)
        if state.is_world_process_zero and self._reporter.metric in logs:
            self._reporter.report(logs)

    def on_evaluate(self, args: "Any", state: "Any", control: "Any", **_: "Any") -> None:
        """See transformers."""
        self._was_evaluated = True

    def on_step_begin(self, args: "Any", state: "Any", control: "Any", **_: "Any") -> None:
        """See transformers. Refuses a metric that a complete evaluation, of all data sets, did not have."""
        is_late = self._was_evaluated and self._reporter.metric.startswith("eval_")
        if is_late and state.is_world_process_zero and not self._reporter.has_reported:
            raise self._reporter.absent(self._names)

    def on_step_end(self, args: "Any", state: "Any", control: "Any", **_: "Any") -> None:
        """See transformers. All processes stop after the same step."""
        if on_any_rank(nni_sdk.should_stop(), args.device):
            control.should_training_stop = True
            self._is_cut = not float(state.epoch).is_integer()

    def on_epoch_end(self, args: "Any", state: "Any", control: "Any", **_: "Any") -> None:
        """See transformers. An epoch that a stop has cut is not saved: the next attempt trains the whole epoch."""
        if self._is_cut:
            control.should_save = False

    def on_save(self, args: "Any", state: "Any", control: "Any", **_: "Any") -> None:
        """See transformers. The Trainer may remove its own copy later (`save_total_limit`)."""
        if state.is_world_process_zero:
            saved = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            self.training.round_ended(lambda path: shutil.copytree(saved, path))

    def on_train_end(self, args: "Any", state: "Any", control: "Any", **_: "Any") -> None:
        """See transformers."""
        self._is_training = False
        if state.is_world_process_zero:
            self._reporter.finish(self._names)


def _set_own_parameters(args: "Any", optimizer: "Any") -> None:
    """Undo what the Trainer has loaded into its optimizer. The schedule keeps its step, and scales the trial's own rate."""
    # Of the Trainer's two groups only the first one has a weight decay.
    for group, decay in zip(optimizer.param_groups, (args.weight_decay, 0.0)):
        inherited, rate = group.get("initial_lr", group["lr"]), optimizer.defaults["lr"]
        scale = group["lr"] / inherited if inherited else 1.0
        group.update(optimizer.defaults, weight_decay=decay, initial_lr=rate, lr=scale * rate)
