"""nnictl experiment export: parameters and results as JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nni_manager.cli.experiment_commands import experiment
from nni_manager.cli.options import example, experiment_argument
from nni_manager.client import output
from nni_manager.client.experiments import resolve
from nni_manager.client.results import finite, flat_columns, parsed

if TYPE_CHECKING:
    from nni_manager.store.reader import StoreReader

Record = dict[str, Any]


@experiment.command(
    epilog=example(
        "nnictl experiment export --type csv --filename results.csv",
        "nnictl experiment export GvTf2bVe --type json --intermediate > results.json",
    )
)
@experiment_argument
@click.option("--filename", "-f", "target", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write to this file instead of stdout.")  # fmt: skip
@click.option("--type", "-t", "kind", type=click.Choice(["json", "csv"]), default="json", show_default=True)
@click.option(
    "--intermediate", "-i", "has_intermediates", is_flag=True, help="Also export intermediate results."
)
def export(experiment_id: str | None, target: Path | None, kind: str, has_intermediates: bool) -> None:
    """Print parameters and final results of the trials."""
    known = resolve(experiment_id)
    records = known.stored.read(lambda reader: list(records_of(reader, has_intermediates=has_intermediates)))
    text = to_csv(records) if kind == "csv" else to_json(records)
    if not records:
        name = known.experiment_id
        output.warning(
            f"experiment {name} has no result yet; `nnictl trial ls {name}` shows the state of its trials"
        )
    if target is None:
        # Write bytes: a terminal's encoding may lack characters of a parameter's name.
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
        return
    target.write_bytes(text.encode())
    output.info(f"Wrote the results of {len(records)} trials to {target}")


def records_of(reader: StoreReader, *, has_intermediates: bool) -> Iterator[Record]:
    """A record for each trial with a counted final result, in order of creation, with the keys of NNI's export.

    A result that is not JSON stays text. NaN and infinities are kept here; each format converts them.
    """
    intermediates: dict[str, list[Any]] = {}
    if has_intermediates:
        for page in reader.metric_pages(False, 0, 2**62):
            for row in page:
                intermediates.setdefault(row.trial_id, []).append(parsed(row.value))
    for trial_id, parameters, final in reader.results():
        record: Record = {"trialJobId": trial_id, "parameter": parameters, "value": parsed(final)}
        yield record | ({"intermediate": intermediates.get(trial_id, [])} if has_intermediates else {})


def to_json(records: Sequence[Record]) -> str:
    """A JSON list with one record per line. NaN and infinities become null, because JSON does not have them."""
    lines = [json.dumps(finite(record), ensure_ascii=False, allow_nan=False) for record in records]
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"


def to_csv(records: Sequence[Record]) -> str:
    """A CSV table with a column for each parameter, named as in `flat_columns`. Values that are not text are JSON."""
    names, rows = flat_columns([(each["trialJobId"], each["parameter"], each["value"]) for each in records])
    text = io.StringIO()
    has_intermediates = any("intermediate" in record for record in records)
    # Lines end with CRLF (RFC 4180). With another line end, csv would not quote a cell with a carriage return.
    writer = csv.writer(text)
    writer.writerow([*names, "intermediate"] if has_intermediates else names)
    for record, row in zip(records, rows, strict=True):
        cells = [_cell(row[name]) if name in row else "" for name in names]
        writer.writerow([*cells, _cell(record["intermediate"])] if has_intermediates else cells)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
