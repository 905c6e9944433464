"""The handler for PyTorch Ignite: `evaluator.add_event_handler(Events.COMPLETED, NNICallback("accuracy", trainer))`.

Source: Ignite 0.4 and later, ignite.engine.Engine.
"""

import ignite.distributed as idist
import torch
from ignite.engine import Events
from torch.nn.parallel import DataParallel, DistributedDataParallel

import nni_sdk
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter
from nni_sdk.integrations.torch_optimizers import hyper_parameters, set_hyper_parameters

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class NNICallback:
    """Reports a metric after each evaluation and the final result after training; a stop ends training after the iteration.

    `metric`: a name of the evaluator's metrics, such as `accuracy`. `trainer`: the engine that trains. `best`: "min" or "max"
    makes the lowest or highest value the final result; None the last. `to_save`: save a checkpoint of these objects and the
    trainer after each evaluation, as with Ignite's `Checkpoint`: `{"model": model, "optimizer": optimizer}`. They are loaded
    here, and `trainer.run` continues; call it with the same number of epochs, or a larger one.
    """

    def __init__(
        self,
        metric: str,
        trainer: "Any",
        best: "str | None" = None,
        *,
        to_save: "Mapping[str, Any] | None" = None,
    ) -> None:
        self._reporter = MetricReporter(metric, best)
        self._objects = dict(to_save or {}, trainer=trainer)
        self.training = ContinuedTraining(self._reporter, is_saved=to_save is not None)
        if self.training.model is not None:
            self._load(self.training.model)
            self._iterations_before = trainer.state.iteration
            trainer.add_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._stop)
        trainer.add_event_handler(Events.COMPLETED, self._finish)

    def __call__(self, evaluator: "Any") -> None:
        """Report the metric of an evaluator that has completed its run, and save a checkpoint."""
        if idist.get_rank() == 0:
            self._reporter.report(evaluator.state.metrics)
            self.training.round_ended(self._save)

    def _save(self, path: str) -> None:
        torch.save({name: _unwrapped(each).state_dict() for name, each in self._objects.items()}, path)

    def _load(self, path: str) -> None:
        states = torch.load(path, map_location="cpu", weights_only=True)
        for name, each in self._objects.items():
            given = hyper_parameters(each) if hasattr(each, "param_groups") else []
            _unwrapped(each).load_state_dict(states[name])
            if given and self.training.is_inherited:
                set_hyper_parameters(each, given)

    def _stop(self, trainer: "Any") -> None:
        stops = nni_sdk.should_stop()
        if idist.get_world_size() > 1:  # all processes must stop after the same iteration
            stops = bool(idist.all_reduce(int(stops), "MAX"))
        if stops:
            trainer.terminate()

    def _start(self, trainer: "Any") -> None:
        """Train nothing if earlier attempts have trained all epochs: Ignite would start again at the first one."""
        if trainer.state.max_epochs * trainer.state.epoch_length <= self._iterations_before:
            trainer.terminate()
        self._iterations_before = 0  # a second run of the trainer is another training

    def _finish(self, trainer: "Any") -> None:
        if idist.get_rank() == 0:
            self._reporter.report_final_result()


def _unwrapped(each: "Any") -> "Any":
    return each.module if isinstance(each, (DataParallel, DistributedDataParallel)) else each


PyTorchIgnitePruningHandler = NNICallback
"""Optuna's name."""
