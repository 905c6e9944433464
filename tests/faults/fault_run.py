"""Runs experiments under fault plans and checks them: `make faults`.

fault_run.py --seeds N     the seeds 1 to N, a line for each and a table at the end
fault_run.py --seed K      only the seed K
--kinds forged,torn        only fault kinds whose names contain one of these words
--short                    faults of seconds, as in `make e2e`
"""

import argparse
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fault_checker import Verdict, checked
from fault_experiment import DONE_TIMEOUT_S, END_TIMEOUT_S, Experiment
from fault_plan import Fault, Kind, Plan, kinds_named, plan_of
from fault_site import a_site, missing_here, wait_until

TRIALS, SHORT_TRIALS = 20, 16
_AT_ONCE_S = 0.2


@dataclass(slots=True)
class Outcome:
    """A run and its result. `evidence`: the folder with all data of a failed run.

    `hit`: the faults that affected something. `missed`: the other faults, and why they affected nothing.
    """

    plan: Plan
    verdict: Verdict
    happened: list[str]
    hit: list[Fault]
    missed: list[str]
    took_s: float
    evidence: Path | None = None

    def report(self) -> str:
        """The plan, what happened, the verdict, and the command that repeats the run."""
        kinds = ",".join(kind.value for kind in self.plan.among)
        if self.plan.among == tuple(Kind):
            kinds = ""
        again = (
            f"again: PYTHONPATH=tests/fakes python tests/faults/fault_run.py --seed {self.plan.seed} --short"
            f"{kinds and f' --kinds {kinds!r}'}"
            if self.plan.is_short
            else f"again: make faults SEED={self.plan.seed}{kinds and f' KINDS={kinds!r}'}"
        )
        where = [f"evidence: {self.evidence}", again] if self.evidence else []
        return "\n".join(
            [
                *self.plan.lines(),
                "what was done:",
                *(f"  {line}" for line in self.happened),
                f"{len(self.hit)} of {len(self.plan.faults)} faults hit something",
                *(f"  hit nothing: {each}" for each in self.missed),
                f"verdict: {'good' if self.verdict.is_good else 'BAD'}, after {self.took_s:.1f} s",
                *(f"  {line}" for line in self.verdict.lines()),
                *where,
                "",
            ]
        )


def _play(experiment: Experiment, plan: Plan) -> None:
    """Run the experiment with the faults of its plan until it ends."""
    experiment.create()
    if not experiment.start_manager():
        raise RuntimeError("the first manager did not start")
    wait_until(lambda: experiment.row_count() > 0, "the first trials report", DONE_TIMEOUT_S)
    began_s = time.monotonic()
    steps = [(fault.at_s, experiment.begin, fault) for fault in plan.faults]
    # Only a fault with a duration needs a step that ends it.
    steps += [(fault.until_s, experiment.heal, fault) for fault in plan.faults if fault.lasts_s]
    for at_s, step, fault in sorted(steps, key=lambda each: each[0]):
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: False, "time", max(began_s + at_s - time.monotonic(), 0.0))
        due_s = began_s + at_s
        if step == experiment.begin or fault in experiment.hit:
            step(fault)
        # If a step takes long, such as a restart of the manager, the later steps are delayed by the same time.
        began_s += max(time.monotonic() - due_s - _AT_ONCE_S, 0.0)
    wait_until(experiment.resume, "a manager runs", DONE_TIMEOUT_S)
    wait_until(experiment.is_done, "the experiment is over", DONE_TIMEOUT_S)
    experiment.note("the experiment is over")
    experiment.end()
    wait_until(lambda: not experiment.site.leftovers(), "no process is left", END_TIMEOUT_S)


def run_plan(plan: Plan, parent: Path | None = None, *, planted: str = "", trials: int = 0) -> Outcome:
    """Run one plan and check it. The data of a failed run is kept; the data of a correct run is deleted.

    `trials`: the number of trials; 0: the default.
    """
    trials = trials or (SHORT_TRIALS if plan.is_short else TRIALS)
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"faults-{plan.seed}-", dir=parent))
    with a_site(plan, folder) as site:
        experiment = Experiment(plan, site, planted, trials)
        try:
            _play(experiment, plan)
        except (TimeoutError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            experiment.wrong.append("".join(traceback.format_exception_only(error)).strip())
            experiment.wrong += [f"still runs: {left}" for left in site.leftovers()]
            experiment.kill_manager()
        took_s = time.monotonic() - began_s
        verdict = checked(
            experiment.folder, experiment.storage, site.ledgers, experiment.harm, trials, took_s
        )
        verdict.wrong += experiment.wrong + experiment.bugs()
        if not verdict.is_good:
            _keep(experiment, folder / "evidence")
    outcome = Outcome(
        plan,
        verdict,
        experiment.happened,
        experiment.hit,
        experiment.missed,
        time.monotonic() - began_s,
    )
    if verdict.is_good:
        shutil.rmtree(folder)
    else:
        outcome.evidence = folder
        (folder / "report.txt").write_text(outcome.report())
    return outcome


def _keep(experiment: Experiment, evidence: Path) -> None:
    """Copy the evidence, because the site's disks are removed at the end."""
    evidence.mkdir()
    for disk in (experiment.site.manager_disk, experiment.site.storage):
        shutil.copytree(disk.path, evidence / disk.path.name, symlinks=True, ignore=_not_kept)


def _not_kept(folder: str, names: list[str]) -> set[str]:
    """The names of files that are not copied: the file that fills a disk, pipes and huge files. A copy of a pipe never ends, and
    the copy of a sparse file would occupy its full size.
    """
    found = {name: os.lstat(os.path.join(folder, name)) for name in names}
    return {
        name
        for name, status in found.items()
        if name == "filler" or stat.S_ISFIFO(status.st_mode) or status.st_size >= 4 << 30
    }


def _table(outcomes: list[Outcome]) -> Iterator[str]:
    yield "seed  hit of faults  reports  lost  doubled  seconds  verdict"
    for outcome in outcomes:
        verdict, hit = outcome.verdict, f"{len(outcome.hit)} of {len(outcome.plan.faults)}"
        yield (
            f"{outcome.plan.seed:4}  {hit:>13}  {verdict.reports:7}  {verdict.lost:4}  "
            f"{verdict.doubled:7}  {outcome.took_s:7.1f}  {'good' if verdict.is_good else 'BAD'}"
        )
    lost, doubled = (sum(getattr(each.verdict, name) for each in outcomes) for name in ("lost", "doubled"))
    reports = sum(each.verdict.reports for each in outcomes)
    met = {fault.kind for outcome in outcomes for fault in outcome.hit}
    yield f"{len(outcomes)} seeds, {reports} reports: {lost} lost, {doubled} doubled"
    unmet = [kind.value for kind in Kind if kind not in met]
    yield f"{len(met)} of {len(Kind)} kinds of faults hit something{f'; not: {chr(44).join(unmet)}' if unmet else ''}"
    for outcome in outcomes:
        yield from (f"seed {outcome.plan.seed} hit nothing with {each}" for each in outcome.missed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args()
    kinds = kinds_named(arguments.kinds) if arguments.kinds else tuple(Kind)
    # sys.exit raises SystemExit, so cleanup code also runs on SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seeds = [arguments.seed] if arguments.seed is not None else range(1, arguments.seeds + 1)
    outcomes = []
    for seed in seeds:
        plan = plan_of(seed, is_short=arguments.short, missing=missing_here(), kinds=kinds)
        drawn = ", ".join(fault.kind.value for fault in plan.faults)
        print(f"seed {seed}: {drawn} ...", end=" ", flush=True)
        outcome = run_plan(plan)
        outcomes.append(outcome)
        verdict = "good" if outcome.verdict.is_good else "BAD"
        print(f"{verdict}, {outcome.took_s:.1f} s", flush=True)
        if arguments.seed is not None or not outcome.verdict.is_good:
            print(textwrap.indent(outcome.report(), "    "), flush=True)
    if arguments.seed is None:
        print("\n".join(_table(outcomes)))
    return 0 if all(outcome.verdict.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
