"""Trial data in NNI's Python classes, with NNI's field names.

Source: NNI v2.10, nni.experiment.data. Times are in milliseconds since the epoch.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_manager.client.results import entry_columns, flat_columns, parsed
from nni_manager.client.watch import why
from nni_manager.domain.metrics import reward
from nni_manager.errors import UserError
from nni_manager.experiment.python_terms import of_result
from trial_keeper.wire.attempt_ids import sort_key

if TYPE_CHECKING:
    import pandas


_WITHOUT_SUCCESS = ("FAILED", "USER_CANCELED", "SYS_CANCELED", "EARLY_STOPPED")


class PandasMissing(UserError, ImportError):
    """cannot create a data frame: pandas is not installed; run `pip install pandas`, or use list_trial_jobs() or export_data()"""


@dataclass(frozen=True)
class TrialHyperParameters:
    """The parameters of a trial and their source: `parameter_source` is algorithm or customized."""

    parameter_id: int
    parameter_source: str
    parameters: dict[str, Any]
    parameter_index: int


@dataclass(frozen=True)
class TrialMetricData:
    """One reported metric of a trial: `data` is the reported value, `type` PERIODICAL or FINAL."""

    timestamp: int | None
    trialJobId: str
    parameterId: str
    type: str
    sequence: int
    data: Any

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> TrialMetricData:
        """The metric in the manager's format, where `data` is JSON text inside JSON."""
        return cls(
            document.get("timestamp"),
            document["trialJobId"],
            document["parameterId"],
            document["type"],
            document["sequence"],
            parsed(parsed(document["data"])),
        )


@dataclass(frozen=True)
class TrialResult:
    """The final result of a trial: `value` is the argument of `report_final_result`."""

    parameter: dict[str, Any]
    value: Any
    trialJobId: str

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> TrialResult:
        """The result in the manager's format, where `value` is JSON text."""
        return cls(document["parameter"], parsed(document["value"]), document["trialJobId"])


@dataclass(frozen=True)
class TrialJob:
    """One trial. `startTime` is None until it starts, `endTime` until it is terminal.

    Our additions to NNI's fields: `value`, the number that the tuner receives, `message`, the reason of the trial's end,
    `parameters`, and `tags` and `note`, which people give it. With several objectives, `value` is the number of the first, and
    `values` has one for each, in the order of the experiment file. `violates`: the constraints that the result violates.
    """

    trialJobId: str
    status: str
    hyperParameters: list[TrialHyperParameters]
    logPath: str
    startTime: int | None
    endTime: int | None
    finalMetricData: list[TrialMetricData]
    sequenceId: int
    value: float | None = None
    message: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    note: str = ""
    values: list[float] = field(default_factory=list)
    violates: list[str] = field(default_factory=list)

    @property
    def stderrPath(self) -> str:
        """The path of stderr of the last attempt, of one task; empty if this machine has no such file."""
        found = Path(self.logPath).glob("attempts/*/*/output/stderr")
        return str(max(found, default="", key=lambda path: sort_key(path.parts[-4])))

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> TrialJob:
        """The trial in the manager's format."""
        return cls(
            trialJobId=document["trialJobId"],
            status=document["status"],
            hyperParameters=[
                TrialHyperParameters(**json.loads(each)) for each in document["hyperParameters"]
            ],
            logPath=document["logPath"],
            startTime=document.get("startTime"),
            endTime=document.get("endTime"),
            finalMetricData=[TrialMetricData.of(each) for each in document.get("finalMetricData", ())],
            sequenceId=document["sequenceId"],
            value=document["value"],
            message=of_result(document["message"])
            or (why(document) if document["status"] in _WITHOUT_SUCCESS else ""),
            parameters=document["parameters"],
            tags=document.get("tags", []),
            note=document.get("note", ""),
            values=document.get("values", []),
            violates=document.get("violates", []),
        )


def frame_of(results: Sequence[TrialResult], metrics: Sequence[str] = ("default",)) -> pandas.DataFrame:
    """A row for each result: `trialJobId`, a column for each parameter (nested ones as `layer/size`), and `value`.

    If a result is a dict with all `metrics`, `value` is the first one; `value/NAME` are all entries but `default`.

    Raises:
        PandasMissing: pandas is not installed.
    """
    rows = [(each.trialJobId, each.parameter, each.value) for each in results]
    return frame_with(*flat_columns(rows, metrics=metrics))


def curves_of(reports: Sequence[TrialMetricData], metric: str) -> pandas.DataFrame:
    """A row for each report, as described at `StartedExperiment.metrics_dataframe`.

    Raises:
        PandasMissing: pandas is not installed.
    """
    names, rows = ["trialJobId", "step", "type", "timestamp", "value"], []
    steps: Counter[str] = Counter()
    finished: set[str] = set()
    for each in reports:
        if each.type == "FINAL":
            if each.trialJobId in finished:
                continue  # only the first final result counts
            finished.add(each.trialJobId)
        row = {"trialJobId": each.trialJobId, "step": steps[each.trialJobId], "type": each.type}
        number = reward(json.dumps(each.data), metric)
        row |= {"timestamp": each.timestamp, "value": math.nan if number is None else number}
        if isinstance(each.data, dict):
            row |= entry_columns(each.data, metric)
        rows.append(row)
        steps[each.trialJobId] += 1
    return frame_with([*dict.fromkeys(chain(names, *rows))], rows)


def frame_with(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """A data frame with these columns.

    Raises:
        PandasMissing: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise PandasMissing from error
    return pandas.DataFrame([[row.get(name) for name in names] for row in rows], columns=names)
