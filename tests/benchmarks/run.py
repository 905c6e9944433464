"""`make bench`: all measurements in one table. Fails when a goal is missed."""

import sys

from bench_callbacks import callback_cost
from bench_checkpoints import checkpoint_cost
from bench_experiment import at_rest, report_to_row, report_to_row_in_a_flood, report_to_row_of_many
from bench_kubernetes import calls_of_jobs
from bench_local_cluster import keeper_connected, submission
from bench_many_keepers import cost_of_trials, ingest, many_idle
from bench_many_trials import listing, suggestion
from bench_neighbours import neighbours
from bench_outage import catching_up, reconnection
from bench_page import page
from bench_sdk import decode_cost, import_cost, report_cost, should_stop_cost
from bench_search import search
from bench_sleeping_trials import sleeping_trials
from bench_stdout import stdout_rate
from bench_turnaround import turnaround
from table import render

MEASUREMENTS = (
    report_cost,
    should_stop_cost,
    callback_cost,
    checkpoint_cost,
    import_cost,
    decode_cost,
    turnaround,
    sleeping_trials,
    search,
    report_to_row,
    report_to_row_of_many,
    report_to_row_in_a_flood,
    neighbours,
    ingest,
    catching_up,
    reconnection,
    cost_of_trials,
    listing,
    suggestion,
    page,
    stdout_rate,
    submission,
    keeper_connected,
    at_rest,
    many_idle,
    calls_of_jobs,
)


def main() -> int:
    """Measure and print; return 1 when a goal is missed."""
    rows = []
    for measure in MEASUREMENTS:
        print(f"measuring: {(measure.__doc__ or '').splitlines()[0]}", file=sys.stderr, flush=True)
        rows += measure()
    print(render(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
