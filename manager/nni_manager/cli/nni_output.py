"""The output of NNI's own nnictl, for scripts that read it. Source: NNI v2.10, nni.tools.nnictl.nnictl_utils."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from nni_manager.client import output
from nni_manager.client.results import parsed


def print_trials(jobs: Sequence[Mapping[str, Any]], head: int | None, tail: int | None) -> None:
    """Print trials as `nnictl trial ls` does. `head` and `tail`: only those with the largest or smallest results."""
    if head is not None or tail is not None:
        found = [(number, job) for job in jobs if (number := _result_of(job)) is not None]
        found.sort(key=lambda each: each[0], reverse=head is not None)
        jobs = [job for _, job in found][: head or tail]
    shown = [{name: _with_date(name, value) for name, value in job.items()} for job in jobs]
    output.plain(json.dumps(shown, indent=4, sort_keys=True, separators=(",", ":")))


def _result_of(job: Mapping[str, Any]) -> float | None:
    for final in job.get("finalMetricData", ()):
        value = parsed(parsed(final["data"]))
        value = value.get("default") if isinstance(value, dict) else value
        if isinstance(value, int) or (isinstance(value, float) and not math.isnan(value)):
            return value
    return None


def _with_date(name: str, value: Any) -> Any:
    if name not in ("startTime", "endTime"):
        return value
    return datetime.fromtimestamp(value // 1000).astimezone().strftime("%Y/%m/%d %H:%M:%S")


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """A CSV table with NNI's columns: parameters, `reward` or the names of the result, `trialJobId`, `intermediate`.

    If two have the same name, the later one in this list counts. NNI writes the columns in a random order.
    """
    rows = []
    for record in records:
        value = record["value"]
        row = {**record["parameter"], **(value if isinstance(value, dict) else {"reward": value})}
        row["trialJobId"] = record["trialJobId"]
        if "intermediate" in record:
            # NNI lists the final result with the intermediate ones.
            reports = (*record["intermediate"], value)
            row["intermediate"] = f"[{','.join(map(json.dumps, reports))}]"
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
