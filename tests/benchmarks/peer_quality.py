"""`make quality-peers`: the best models that `Auto` and peers (optimisers of other projects) find within 50 trials, one trial at
a time.

The problems are those of `tuner_problems` that were not used to choose the rules of `Auto`. All seeds of a slow peer take hours.
So each finished search of a peer is stored as a line of RESULTS. It is repeated only after the line was deleted or the peer was
upgraded, and an interrupted run can be continued. RESULTS is a file of the repository, so these hours are spent once.
A change of a problem or of TRIALS makes all lines invalid: delete them. CPU times are those of the machine that ran the search.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

from peer_process import PEERS, PeerFailed, PeerProcess, is_installed, version_of
from real_problems import Parameters
from tuner_problems import (
    HELD_OUT,
    REFERENCE,
    TRIALS,
    Run,
    Searches,
    Tabulated,
    problem_of,
    report,
    run,
    suggested,
)

from nni_manager.config.search_space import parse_search_space

OURS = ("Auto", REFERENCE)
RESULTS = Path(__file__).with_name("peer_results.jsonl")
SEEDS = 10

Key = tuple[str, str, int]
"""Tuner, problem and seed."""


class PeerTuner:
    """Adapts a peer to the tuner interface that `tuner_problems.run` expects."""

    def __init__(self, name: str, problem: Tabulated, seed: int) -> None:
        self._space = parse_search_space(problem.space)
        self.process = PeerProcess(name, self._space, seed)

    def ask(self) -> tuple[None, Parameters]:
        return None, suggested(self.process.ask(), self._space)

    def tell(self, _: None, value: float | None) -> None:
        self.process.tell(value)


def searched(name: str, problem: str, seed: int) -> Run:
    """Run one search.

    Raises:
        PeerFailed: the peer's process ended before the last trial.
    """
    if name not in PEERS:
        return run(name, problem, 1, seed)
    made: list[PeerTuner] = []

    def make(name: str, problem: Tabulated, seed: int) -> Any:
        made.append(PeerTuner(name, problem, seed))
        return made[0]

    try:
        found = run(name, problem, 1, seed, make=make)
    finally:
        for tuner in made:  # empty if the peer's process exited at its start
            tuner.process.close()
    return Run(found.error, 1000 * made[0].process.cpu_s / TRIALS)


def known() -> dict[Key, Run]:
    """The searches in RESULTS. For an installed peer, only the searches of the installed version."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    entries = [json.loads(line) for line in lines]
    versions = {peer: version_of(peer) for peer in PEERS if is_installed(peer)}
    return {
        (each["tuner"], each["problem"], each["seed"]): Run(each["error"], each["cpu_ms"])
        for each in entries
        if each["version"] == versions.get(each["tuner"], each["version"])
    }


def complete(tuners: Sequence[str], seeds: int, processes: int) -> tuple[dict[Key, Run], list[str]]:
    """Run the searches of `tuners` without a stored result, in order of their seeds.

    Returns all results, and the failures. Those of trial-keeper's own tuners are not stored: they take seconds.
    """
    found = known()
    missing = [
        (tuner, problem, seed)
        for seed, tuner, problem in product(range(seeds), tuners, HELD_OUT)
        if (tuner, problem, seed) not in found
    ]
    failures = []
    for name in HELD_OUT:
        # Load the problem's data before the pool forks its processes, so that they share one copy of the data.
        problem_of(name)
    with ProcessPoolExecutor(processes) as pool, RESULTS.open("a") as file:
        key_of = {pool.submit(searched, *key): key for key in missing}
        for future in as_completed(key_of):
            tuner, problem, seed = key_of[future]
            try:
                one = found[tuner, problem, seed] = future.result()
            except PeerFailed as error:
                failures.append(f"{problem}, seed {seed}: {error}")
                # The remaining searches take hours, so this failure is printed immediately.
                print(failures[-1], file=sys.stderr, flush=True)
                continue
            if tuner in PEERS:
                key = {"tuner": tuner, "version": version_of(tuner), "problem": problem, "seed": seed}
                print(json.dumps(key | {"error": one.error, "cpu_ms": one.cpu_ms}), file=file, flush=True)
    return found, failures


def main() -> int:
    """Run the searches that have no stored result, and print the table; return 1 if a search failed."""
    parser = argparse.ArgumentParser(description="Compares Auto with optimisers of other projects.")
    parser.add_argument("peers", nargs="*", help=f"of {', '.join(PEERS.values())}; without any, all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="run no peer, print what is known")
    arguments = parser.parse_args()
    asked = [peer for peer, folder in PEERS.items() if folder in (arguments.peers or PEERS.values())]
    absent = [peer for peer in asked if not is_installed(peer)]
    if absent:
        print(f"not installed, so only stored results are used: {', '.join(absent)}")
    tuners = [*OURS, *asked]
    os.nice(10)
    run_now = [*OURS] if arguments.report else [tuner for tuner in tuners if tuner not in absent]
    every, failures = complete(run_now, arguments.seeds, arguments.processes)
    found: Searches = {}
    for (tuner, problem, seed), one in sorted(every.items()):
        if seed < arguments.seeds:
            found.setdefault((tuner, problem, 1), []).append(one)
    measured = [tuner for tuner in tuners if all((tuner, problem, 1) in found for problem in HELD_OUT)]
    shown = {(tuner, *rest): runs for (tuner, *rest), runs in found.items() if tuner in measured}
    ordered = {
        (tuner, problem, 1): shown[tuner, problem, 1] for tuner, problem in product(measured, HELD_OUT)
    }
    print(f"\nheld-out, one at a time, {TRIALS} trials")
    print("\n".join(report(ordered, HELD_OUT, 1)))
    for tuner in measured:
        counts = [len(ordered[tuner, problem, 1]) for problem in HELD_OUT]
        print(
            f"{tuner}: {min(counts)} seeds of each problem"
            + (f" at least, {max(counts)} at most" if max(counts) > min(counts) else "")
        )
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
