"""nnictl experiment export: parameters and results, for a program or a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli.options import example, experiment_argument
from nni_manager.client import output
from nni_manager.client.experiments import resolve
from nni_manager.client.results import flat_columns

if TYPE_CHECKING:
    from nni_manager.store.store import StoreReader

Record = dict[str, Any]


@click.command(
    epilog=example(
        "nnictl experiment export --type csv --filename results.csv",
        "nnictl experiment export GvTf2bVe --type json --intermediate > results.json",
    )
)
@experiment_argument
@click.option("--filename", "-f", "target", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write it there, and not to stdout.")  # fmt: skip
@click.option("--type", "-t", "kind", type=click.Choice(["json", "csv"]), default="json", show_default=True)
@click.option(
    "--intermediate", "-i", "has_intermediates", is_flag=True, help="Also the intermediate results."
)
def export(experiment_id: str | None, target: Path | None, kind: str, has_intermediates: bool) -> None:
    """Print parameters and results of the trials that succeeded."""
    from nni_manager.store.store import StoreReader

    known = resolve(experiment_id)
    with StoreReader(known.folder.database) as reader:
        records = list(records_of(reader, has_intermediates=has_intermediates))
    text = to_csv(records) if kind == "csv" else to_json(records)
    if not records:
        name = known.experiment_id
        output.warning(
            f"experiment {name} has no result yet; `nnictl trial ls {name}` shows how its trials are"
        )
    if target is None:
        # A terminal's encoding may have no letter for what a parameter is called.
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
        return
    target.write_bytes(text.encode())
    output.info(f"Wrote the results of {len(records)} trials to {target}")


def records_of(reader: StoreReader, *, has_intermediates: bool) -> Iterator[Record]:
    """A record for each trial that succeeded, in the order they were made, with the keys of NNI's export.

    What is no JSON stays text. NaN and infinities are kept here, and what comes of them is the format's affair.
    """
    courses: dict[str, list[Any]] = {}
    if has_intermediates:
        for page in reader.metric_pages(False, 0, 2**62):
            for row in page:
                courses.setdefault(row.trial_id, []).append(_value_of(row.value))
    for trial_id, parameters, final in reader.results():
        record: Record = {"trialJobId": trial_id, "parameter": parameters, "value": _value_of(final)}
        yield record | ({"intermediate": courses.get(trial_id, [])} if has_intermediates else {})


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def to_json(records: Sequence[Record]) -> str:
    """A list with a line for each record; NaN and infinities, which JSON has not, become null."""
    lines = [json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) for record in records]
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {name: _finite(entry) for name, entry in value.items()}
        case list():
            return [_finite(entry) for entry in value]
        case float() if not math.isfinite(value):
            return None
    return value


def to_csv(records: Sequence[Record]) -> str:
    """A table with a column for each parameter, named as `flat_columns` does. What is no text is JSON text."""
    names, rows = flat_columns([(each["trialJobId"], each["parameter"], each["value"]) for each in records])
    text = io.StringIO()
    has_intermediates = any("intermediate" in record for record in records)
    # Lines end as RFC 4180 has it: with another end, a carriage return in a cell would be no text in quotes.
    writer = csv.writer(text)
    writer.writerow([*names, "intermediate"] if has_intermediates else names)
    for record, row in zip(records, rows, strict=True):
        cells = [_cell(row[name]) if name in row else "" for name in names]
        writer.writerow([*cells, _cell(record["intermediate"])] if has_intermediates else cells)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
