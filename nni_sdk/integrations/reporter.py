"""What the callbacks of all frameworks do: report one metric while training runs, and its final result once."""

import atexit
import math
import os
import sys

import nni_sdk
from nni_sdk import trial
from nni_sdk.errors import MetricAbsent

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

_CHOICES = {"min": min, "max": max}

_held = {}  # type: dict[int, list[Any]]
"""The final results that the process of an objective function holds back, by its id: a child of `fork` is another process."""
_at_exit = {}  # type: dict[int, list[Any]]
"""The final results that a process reports when Python exits, by its id: a child of `fork` inherits the exit handler."""


def _report_at_exit() -> None:
    if not hasattr(sys, "last_value"):  # the exception that ends Python
        for report in _at_exit.pop(os.getpid(), ()):
            report()


def hold_final_results() -> None:
    """Hold back the final results of all callbacks in this process: they count only if the objective function returns None."""
    _held[os.getpid()] = []


def report_held_results() -> None:
    """Report the final results that this process has held back, in order."""
    for report in _held.pop(os.getpid()):
        report()


def is_first_process() -> bool:
    """True in the process of rank 0, as torchrun's variable tells it. For frameworks without ranks of their own."""
    return os.environ.get("RANK", "0") == "0"


class MetricReporter:
    """Reports one metric of one training: each value as an intermediate result, then the final result.

    `metric`: its name in the framework. `best`: "min" or "max" makes the lowest or highest value the final result; None the last.
    """

    def __init__(self, metric: str, best: "str | None" = None) -> None:
        if best is not None and best not in _CHOICES:
            raise ValueError(
                f"cannot use best={best!r} for the final result; write 'min', 'max', or None for the last value"
            )
        self.metric = metric
        self._choose = _CHOICES.get(best or "")
        self.final = None  # type: float | None
        """The last or best value so far; None: there is none."""
        self._is_finished = False
        self.reported_of_history = 0
        """The number of values of a history that were reported, by this process or an attempt before."""

    @property
    def has_reported(self) -> bool:
        """True from the first intermediate result on."""
        return self.final is not None

    def training_starts(self) -> None:
        """Start with no values if a training has ended before this one: the callback is used again.

        The final result of this training is reported as well. Only the first one of a trial counts, and the SDK warns.
        """
        if self._is_finished:
            self.final, self._is_finished, self.reported_of_history = None, False, 0

    def report(self, metrics: "Mapping[str, Any]") -> None:
        """Report the metric as an intermediate result. `metrics`: what the framework has measured, by name.

        Raises:
            MetricAbsent: `metrics` lacks it. Otherwise as `nni_sdk.report_intermediate_result`.
        """
        value = float(metrics[self._name_in(metrics)])
        nni_sdk.report_intermediate_result(self._result(value))
        if self.final is None or self._choose is None or math.isnan(self.final):
            self.final = value
        elif not math.isnan(value):
            self.final = self._choose(self.final, value)

    def report_history(self, history: "Mapping[str, Mapping[str, Sequence[Any]]]") -> None:
        """Report what was not reported before. `history`: all values so far, by data set and metric.

        Raises: as `report`.
        """
        values = {f"{data}-{name}": log for data, logs in history.items() for name, log in logs.items()}
        name = self._name_in(values)
        if len(values[name]) < self.reported_of_history:  # of another training with the same callback
            self.reported_of_history = 0
        for value in values[name][self.reported_of_history :]:
            # Cross-validation of XGBoost: mean and deviation.
            self.report({name: value[0] if isinstance(value, tuple) else value})
            self.reported_of_history += 1

    def report_final_result(self, final: "float | None" = None) -> None:
        """Report the final result once for each training; nothing as long as there is no intermediate result.

        `final`: in place of the last or best value. A trial that the assessor has stopped has none: its tuner learns from the
        intermediate results, and a value of unfinished training would count as that of a complete one. Nothing is reported
        either if objectives and constraints need more than this metric: the training code must report all their numbers.
        """
        if self.final is None or self._is_finished or nni_sdk.stop_reason() == "early stopped":
            return
        self._is_finished = True
        result = self._result(self.final if final is None else final)
        if not set(trial._trial.result_metrics) <= set(result if isinstance(result, dict) else ["default"]):
            return
        held = _held.get(os.getpid())
        if held is None:
            nni_sdk.report_final_result(result)
        else:
            held.append(lambda: nni_sdk.report_final_result(result))

    def finish(self, names: "Iterable[str]") -> None:
        """Report the final result at the end of training. `names`: the metrics that it had.

        Raises:
            MetricAbsent: the metric was never among them, and no stop was the cause.
        """
        if not (self.has_reported or nni_sdk.should_stop()):
            raise self.absent(names)
        self.report_final_result()

    def report_final_result_at_exit(self) -> None:
        """Report the final result when Python exits without an exception. For frameworks that do not announce the end.

        In the process of an objective function that is when the function has returned None.
        """
        held = _held.get(os.getpid())
        if held is None:
            if os.getpid() not in _at_exit:
                atexit.register(_report_at_exit)
            # Python calls exit handlers in reverse order, but of several trainings the first one's result counts.
            held = _at_exit.setdefault(os.getpid(), [])
        held.append(self.report_final_result)

    def _result(self, value: float) -> object:
        """Return the value under the name of its objective or constraint; without one of this name, the value."""
        return {self.metric: value} if self.metric in trial._trial.result_metrics else value

    def absent(self, names: "Iterable[str]") -> MetricAbsent:
        """Return the error for a metric that this training does not have. `names`: those that it has."""
        listed = ", ".join(sorted(names))
        remedy = f"choose one of: {listed}" if listed else "evaluate the model while it is trained"
        return MetricAbsent(
            f"cannot report the metric {self.metric!r}: training has no such metric; {remedy}"
        )

    def _name_in(self, metrics: "Mapping[str, Any]") -> str:
        """Return the metric's full name. Of `valid-auc`, `auc` is enough if only one data set has it."""
        if self.metric in metrics:
            return self.metric
        of_data_sets = [name for name in metrics if name.endswith("-" + self.metric)]
        if len(of_data_sets) == 1:
            return of_data_sets[0]
        raise self.absent(metrics)
