"""`make bench`: all measurements in one table. Fails when a goal is missed."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import results
from bench_bundle import bundled_start
from bench_callbacks import callback_cost
from bench_checkpoints import checkpoint_cost
from bench_experiment import at_rest, report_to_row, report_to_row_in_a_flood, report_to_row_of_many
from bench_hub import all_experiments
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
from results import Results, ResultsInvalid
from table import Row, render

MEASUREMENTS: tuple[Callable[[], list[Row]], ...] = (
    report_cost,
    should_stop_cost,
    callback_cost,
    checkpoint_cost,
    import_cost,
    decode_cost,
    turnaround,
    bundled_start,
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
    all_experiments,
    stdout_rate,
    submission,
    keeper_connected,
    at_rest,
    many_idle,
    calls_of_jobs,
)
BY_NAME = {measure.__name__: measure for measure in MEASUREMENTS}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Return 1 if a goal is missed in the last round, and 2 if a file to compare is invalid."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.names if name not in BY_NAME]:
        parser.error(f"unknown measurement {unknown[0]!r}; choose from {', '.join(BY_NAME)}")
    if asked.rounds < 1:
        parser.error(f"cannot measure {asked.rounds} rounds; --rounds is at least 1")
    if asked.compare:
        try:
            print(results.compare(*map(Results.read, asked.compare)))
        except ResultsInvalid as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    machine = results.machine()
    chosen = [BY_NAME[name] for name in asked.names or BY_NAME]
    rounds: list[list[Row]] = []
    for number in range(1, asked.rounds + 1):
        rounds.append([row for measure in chosen for row in _measured(measure, number)])
        print(render(rounds[-1]), flush=True)
        if asked.json:
            # The file is written after each round, so that an interrupted run keeps the results of its complete rounds.
            Results(machine, rounds).write(asked.json)
    return 0 if all(row.holds for row in rounds[-1]) else 1


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, BY_NAME))
    parser = argparse.ArgumentParser(
        prog="make bench",
        description="Measures the budgets. Each figure stands beside a floor of the same run. A bare Python start and a durable "
        "write of 4 KB before and after each measurement tell a slow program from a slow machine.",
        epilog="measurements:\n"
        + "\n".join(f"  {name:{width}}  {_summary(measure)}" for name, measure in BY_NAME.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a measurement; without names, all")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="measure everything N times (1)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rows of each round and the machine to FILE"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("BEFORE", "AFTER"),
        help="measure nothing; compare two of these files, round by round",
    )
    return parser


def _summary(measure: Callable[[], list[Row]]) -> str:
    return " ".join((measure.__doc__ or "").split("\n\n")[0].split())


def _measured(measure: Callable[[], list[Row]], number: int) -> list[Row]:
    print(f"measuring, round {number}: {_summary(measure)}", file=sys.stderr, flush=True)
    before = results.probe()
    rows = measure()
    return [replace(row, probe=f"{before}; {results.probe()}") for row in rows]


if __name__ == "__main__":
    sys.exit(main())
