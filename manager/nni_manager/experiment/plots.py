"""Figures of an experiment's trials, as plotly figures. plotly is imported by the first one: the import takes a second."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nni_manager.client.results import flat
from nni_manager.errors import UserError
from nni_manager.experiment.data import TrialJob
from trial_keeper.frozen_dataclass import dataclass

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Numbers whose maximum is at least this multiple of their minimum are shown on a log scale, as on the page.
_WIDE = 100.0
_SLICES_IN_A_ROW = 4


@dataclass(frozen=True, slots=True)
class _Result:
    number: int
    value: float
    parameters: Mapping[str, Any]
    """By path: a nested parameter is "outer/inner"."""
    values: Sequence[float]
    """With several objectives, a number for each."""
    is_on_front: bool
    is_feasible: bool
    """False if the result violates a constraint."""


class Plots:
    """The figures of these trials. Trials without a result are left out."""

    def __init__(
        self,
        trials: Sequence[TrialJob],
        *,
        is_maximized: bool,
        objectives: Sequence[str] = ("default",),
        front: Collection[str] = (),
    ) -> None:
        """`objectives`: their metrics; `front`: the ids of the trials on the Pareto front of several ones."""
        self._is_maximized = is_maximized
        self._objectives = objectives
        self._all = [
            _Result(
                each.sequenceId,
                each.value,
                dict(flat(each.parameters)),
                each.values,
                each.trialJobId in front,
                not each.violates,
            )
            for each in trials
            if each.value is not None and math.isfinite(each.value)
        ]
        self._names = list(dict.fromkeys(name for each in self._all for name in each.parameters))

    def history(self) -> Figure:
        """The result of each trial, and the best one until then. A result that violates a constraint is never the best."""
        from plotly import graph_objects

        feasible = [each for each in self._all if each.is_feasible]
        others = [each for each in self._all if not each.is_feasible]
        best = itertools.accumulate((each.value for each in feasible), max if self._is_maximized else min)
        traces = [
            ("result", feasible, [each.value for each in feasible], "markers"),
            ("best so far", feasible, [*best], "lines"),
            ("violates a constraint", others, [each.value for each in others], "markers"),
        ]
        return graph_objects.Figure(
            [
                graph_objects.Scatter(x=[each.number for each in shown], y=values, mode=mode, name=name)
                for name, shown, values, mode in traces[: 3 if others else 2]
            ],
            {"xaxis": {"title": "trial"}, "yaxis": {"title": "result"}},
        )

    def importances(self, shares_by_name: Mapping[str, float]) -> Figure:
        """The importance of each parameter, the highest on top. `shares_by_name`: see `StartedExperiment.importances`."""
        from plotly import graph_objects

        names, shares = zip(*reversed([*shares_by_name.items()]), strict=True)
        return graph_objects.Figure(
            graph_objects.Bar(x=shares, y=names, orientation="h"),
            {"xaxis": {"title": "importance"}, "yaxis": {"title": "parameter"}},
        )

    def parallel(self) -> Figure:
        """A line for each trial through its parameters and its result."""
        from plotly import graph_objects

        values = self._values()
        axes = [{"label": "result", "values": values}]
        axes += [_axis(name, self._column(name)) for name in self._names]
        line = {
            "color": values,
            "colorscale": "Viridis",
            "showscale": True,
            "reversescale": not self._is_maximized,
        }
        return graph_objects.Figure(graph_objects.Parcoords(line=line, dimensions=axes))

    def slices(self) -> Figure:
        """For each parameter, its values and the results."""
        from plotly import graph_objects
        from plotly.subplots import make_subplots

        columns = max(1, min(len(self._names), _SLICES_IN_A_ROW))
        rows = max(1, math.ceil(len(self._names) / columns))
        figure = make_subplots(rows=rows, cols=columns, shared_yaxes=True)
        for index, name in enumerate(self._names):
            row, column = index // columns + 1, index % columns + 1
            found = [(each, each.parameters[name]) for each in self._all if name in each.parameters]
            texts = not all(_is_number(value) for _, value in found)
            x: list[Any] = [_text(value) if texts else value for _, value in found]
            figure.add_trace(
                graph_objects.Scatter(
                    x=x,
                    y=[each.value for each, _ in found],
                    text=[f"trial {each.number}" for each, _ in found],
                    mode="markers",
                    name=name,
                    showlegend=False,
                ),
                row=row,
                col=column,
            )
            figure.update_xaxes(
                title=name,
                type="category" if texts else "log" if _is_wide(x) else "linear",
                row=row,
                col=column,
            )
        return figure.update_yaxes(title="result", col=1)

    def front(self) -> Figure:
        """The results by their objectives, and the Pareto front: one chart of two, or one for each pair of more objectives.

        Raises:
            UserError: there is one objective.
        """
        from plotly import graph_objects

        if len(self._objectives) < 2:
            raise UserError(
                "cannot plot the Pareto front of one objective; plot_history() shows its results, and `objectives` names several"
            )
        on_front = sorted((each for each in self._all if each.is_on_front), key=lambda each: each.value)
        traces: list[tuple[str, list[_Result], dict[str, Any]]] = [
            ("result", [each for each in self._all if not each.is_on_front], {"mode": "markers"}),
            # Steps, which bound the results that a result on the front is better than.
            (
                "Pareto front",
                on_front,
                {"mode": "lines+markers", "line": {"shape": "vh" if self._is_maximized else "hv"}},
            ),
        ]
        figure = graph_objects.Figure()
        for name, shown, look in traces:
            text = [f"trial {each.number}" for each in shown]
            columns = {
                metric: [each.values[index] for each in shown]
                for index, metric in enumerate(self._objectives)
            }
            if len(columns) == 2:
                x, y = columns.values()
                figure.add_trace(graph_objects.Scatter(x=x, y=y, text=text, name=name, **look))
                figure.update_layout(xaxis_title=self._objectives[0], yaxis_title=self._objectives[1])
            else:
                axes = [{"label": metric, "values": values} for metric, values in columns.items()]
                figure.add_trace(graph_objects.Splom(dimensions=axes, text=text, name=name))
        return figure

    def _values(self) -> list[float]:
        return [each.value for each in self._all]

    def _column(self, name: str) -> list[Any]:
        return [each.parameters.get(name) for each in self._all]


def _axis(name: str, values: list[Any]) -> dict[str, Any]:
    """The axis of a parameter in parallel coordinates; a trial without this parameter has a tick of its own, or a gap."""
    if all(_is_number(value) or value is None for value in values):
        if not _is_wide([value for value in values if value is not None]):
            return {"label": name, "values": values}
        # The figure has no log axes.
        logs = [None if value is None else math.log10(value) for value in values]
        present = [value for value in logs if value is not None]
        ticks = list(range(math.floor(min(present)), math.ceil(max(present)) + 1))
        return {"label": name, "values": logs, "tickvals": ticks, "ticktext": [f"1e{tick}" for tick in ticks]}
    texts = [_text(value) for value in values]
    options = sorted(set(texts))
    return {
        "label": name,
        "values": [options.index(text) for text in texts],
        "tickvals": list(range(len(options))),
        "ticktext": options,
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _WIDE
