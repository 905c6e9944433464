"""The handler for PyTorch Ignite: `evaluator.add_event_handler(Events.COMPLETED, NNICallback("accuracy", trainer))`.

Source: Ignite 0.4 and later, ignite.engine.Engine.
"""

import ignite.distributed as idist
from ignite.engine import Events

import nni_sdk
from nni_sdk.integrations.reporter import MetricReporter

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from typing import Any


class NNICallback:
    """Reports a metric after each evaluation and the final result after training; a stop ends training after the iteration.

    `metric`: a name of the evaluator's metrics, such as `accuracy`. `trainer`: the engine that trains. `best`: "min" or "max"
    makes the lowest or highest value the final result; None the last.
    """

    def __init__(self, metric: str, trainer: "Any", best: "str | None" = None) -> None:
        self._reporter = MetricReporter(metric, best)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._stop)
        trainer.add_event_handler(Events.COMPLETED, self._finish)

    def __call__(self, evaluator: "Any") -> None:
        """Report the metric of an evaluator that has completed its run."""
        if idist.get_rank() == 0:
            self._reporter.report(evaluator.state.metrics)

    def _stop(self, trainer: "Any") -> None:
        stops = nni_sdk.should_stop()
        if idist.get_world_size() > 1:  # all processes must stop after the same iteration
            stops = bool(idist.all_reduce(int(stops), "MAX"))
        if stops:
            trainer.terminate()

    def _finish(self, trainer: "Any") -> None:
        if idist.get_rank() == 0:
            self._reporter.report_final_result()


PyTorchIgnitePruningHandler = NNICallback
"""Optuna's name."""
