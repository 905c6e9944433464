"""Runs experiments under fault plans and judges them: `make faults`.

fault_run.py --seeds N     the seeds 1 to N, a line for each and a table at the end
fault_run.py --seed K      one of them again
--short                    as in `make test`: faults of seconds
"""

import argparse
import contextlib
import json
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from apart import Apart
from fault_judge import Harm, Verdict, judge
from fault_plan import Fault, Kind, Plan, plan_of
from fault_site import Site, a_site, missing_here, processes_of, wait_until

from nni_manager.config.reader import read_experiment_file
from nni_manager.errors import NniManagerError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.store import Store, StoreReader
from trial_keeper.wire.workspace import Workspace

TRIALS, SHORT_TRIALS = 20, 16
REPORTS, SHORT_REPORTS = 1000, 400
_FAKES = Path(__file__).parent.parent / "fakes"
_READY_WITHIN_S = 60.0
# A keeper that has tried in vain for long tries again within a minute; a machine under load takes its time for all the rest.
_DONE_WITHIN_S = 240.0
_END_WITHIN_S = 90.0
# While trials run: nothing has to be waited for.
_LEAVES_WITHIN_S = 30.0
_RUNS_WITHIN_S = 5.0
_AT_ONCE_S = 0.2
_STORAGE_KINDS = frozenset({Kind.WORKSPACE_FULL, Kind.WORKSPACE_READ_ONLY})
_MANAGER_LEAVES_KINDS = frozenset({Kind.MANAGER_KILLED, Kind.MANAGER_MOVED, Kind.MANAGER_ENDED})
_BUG = re.compile(r"\bbug\b", re.IGNORECASE)
# One trial in two gives up when a report is refused, as most training code does. The others go on, and end well.
_TRAIN = """
import os, sys, time
import nni_sdk as nni
from nni_sdk.errors import MetricNotWritten

attempt = os.path.dirname(os.environ["NNI_SYS_DIR"])
name = os.environ["NNI_TRIAL_JOB_ID"] + "." + os.path.basename(attempt)
# No fsync: processes die here, and the machine does not.
ledger = os.open(os.path.join({ledgers!r}, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
gives_up = int(os.environ["NNI_TRIAL_SEQ_ID"]) % 2

def note(text):
    os.write(ledger, (text + "\\n").encode())

def report(call, value):
    note("? %s" % value)
    try:
        call(value)
    except MetricNotWritten:
        note("- %s" % value)
        return False
    note("+ %s" % value)
    return True

nni.get_next_parameter()
for i in range({reports}):
    while not report(nni.report_intermediate_result, i):
        if gives_up:
            note("gave up")
            sys.exit(1)
        time.sleep(0.2)
    if i % 50 == 0:
        try:
            os.write(1, b"report %d\\n" % i)
        except OSError:
            pass  # the same storage
    if i % 20 == 0:
        time.sleep({rest_s})
while not report(nni.report_final_result, {reports}):
    time.sleep(0.2)
note("end")
"""


@dataclass(slots=True)
class Outcome:
    """A run and what came of it. `evidence`: where everything is kept when it did not go well.

    `hit`: the faults that something was there for. `missed`: the others, and why each hit nothing.
    """

    plan: Plan
    verdict: Verdict
    happened: list[str]
    hit: list[Fault]
    missed: list[str]
    took_s: float
    evidence: Path | None = None

    def report(self) -> str:
        """Plan, what happened, verdict, and the command that repeats it."""
        short = " --short" if self.plan.is_short else ""
        again = (
            f"again: make faults SEED={self.plan.seed}"
            if not short
            else f"again: PYTHONPATH=tests/fakes python tests/faults/fault_run.py --seed {self.plan.seed}{short}"
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


@dataclass(slots=True)
class _Experiment:
    """One experiment on a site: its manager comes and goes."""

    plan: Plan
    site: Site
    planted: str
    trials: int
    happened: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hit: list[Fault] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    trials_killed: set[str] = field(default_factory=set)
    keepers_killed: set[str] = field(default_factory=set)
    manager: subprocess.Popen[bytes] | None = None
    has_moved: bool = False
    began_s: float = field(default_factory=time.monotonic)
    _stopped: dict[Fault, list[psutil.Process]] = field(default_factory=dict)

    @property
    def folder(self) -> ExperimentFolder:
        return ExperimentFolder(self.site.manager_disk.path / "FAULTS")

    @property
    def storage(self) -> Workspace:
        return Workspace(self.site.storage.path / "FAULTS")

    def note(self, text: str) -> None:
        self.happened.append(f"{time.monotonic() - self.began_s:6.1f} s  {text}")

    # ---- the experiment

    def create(self) -> None:
        code = self.site.folder / "code"
        code.mkdir()
        reports, rest_s = (SHORT_REPORTS, 0.04) if self.plan.is_short else (REPORTS, 0.1)
        (code / "train.py").write_text(
            _TRAIN.format(ledgers=str(self.site.ledgers), reports=reports, rest_s=rest_s)
        )
        (code / "search_space.json").write_text(json.dumps({"x": {"_type": "uniform", "_value": [0, 1]}}))
        document = {
            "authorName": "tests",
            "experimentName": "faults",
            "trialConcurrency": 5,
            "maxTrialNum": self.trials,
            # Hours of a stepped wall clock must not end it.
            "maxExecDuration": "1h",
            "trainingServicePlatform": "local",
            "searchSpacePath": "search_space.json",
            "logDir": str(self.site.manager_disk.path),
            "logCollection": "http",
            "tuner": {"builtinTunerName": "Random", "classArgs": {"seed": self.plan.seed}},
            "trial": {"command": f"{sys.executable} train.py", "codeDir": "."},
            "localConfig": {"reuse": self.plan.reuses_jobs},
        }
        file = code / "config.yml"
        file.write_text(json.dumps(document))
        config = read_experiment_file(file)
        folder = self.folder
        folder.make(self.site.seen_by_manager)
        Store.create(
            folder.database,
            folder.collected_logs,
            folder.experiment_id,
            config.to_json(),
            secrets.token_bytes(32),
            time.time(),
        ).close()

    def start_manager(self) -> bool:
        """Start a manager; whether it became ready."""
        site, port = self.site, self.site.next_port()
        announced, listens_at = site.open_road(port, self.has_moved)
        apart = Apart(
            workspace=str(site.seen_by_jobs / "FAULTS"),
            announced=announced,
            listens_at=listens_at,
            prefix=site.jobs_prefix,
            environ=() if site.jobs_clock is None else tuple(site.jobs_clock.environ.items()),
            planted=self.planted,
        )
        clock = {} if site.manager_clock is None else site.manager_clock.environ
        with (site.folder / "manager.log").open("ab") as log:
            self.manager = subprocess.Popen(
                [
                    *site.manager_prefix,
                    *(sys.executable, _FAKES / "apart.py"),
                    *(f"--folder={self.folder.path}", f"--port={port}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=site.environ | clock | apart.to_environ(),
                start_new_session=True,
            )
        manager = self.manager
        with contextlib.suppress(TimeoutError):
            wait_until(
                lambda: manager.poll() is not None or self._is_ready(manager.pid), "ready", _READY_WITHIN_S
            )
        if manager.poll() is None and self._is_ready(manager.pid):
            self.note(f"a manager is ready at {announced}, port {port}")
            return True
        self.note(f"a manager did not become ready, exit code {manager.poll()}: {self._last_words()}")
        manager.kill()
        manager.wait()
        return False

    def _is_ready(self, pid: int) -> bool:
        process = self.folder.process()
        return process is not None and process.pid == pid

    def _last_words(self) -> str:
        lines = (self.site.folder / "manager.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def look_after_manager(self) -> None:
        """A manager ends by no fault but its own killing."""
        if self.manager is not None and self.manager.poll() is not None:
            self.wrong.append(
                f"the manager ended by itself, exit code {self.manager.returncode}: {self._last_words()}"
            )
            self.note("the manager has ended by itself")
            self.manager = None

    def kill_manager(self) -> None:
        if self.manager is not None:
            self.manager.kill()
            self.manager.wait()
            self.manager = None

    def resume(self) -> bool:
        """Bring a manager back, if there is none; a full disk may keep it from starting."""
        if self.manager is not None and self.manager.poll() is None:
            return True
        if self.start_manager():
            return True
        self.manager = None
        return False

    def row_count(self) -> int:
        with contextlib.suppress(NniManagerError), StoreReader(self.folder.database) as reader:
            return len(reader.metrics())
        return 0

    def is_done(self) -> bool:
        self.look_after_manager()
        if self.manager is None and not self.resume():
            return False
        return self._is_over()

    def _is_over(self) -> bool:
        with contextlib.suppress(NniManagerError), StoreReader(self.folder.database) as reader:
            return reader.experiment().state.is_over
        return False

    def end(self) -> None:
        """End the manager, as somebody who has seen enough."""
        self._tell_to_end(_END_WITHIN_S)

    def _tell_to_end(self, within_s: float) -> None:
        assert self.manager is not None
        told_s = time.monotonic()
        self.manager.terminate()
        try:
            code = self.manager.wait(within_s)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"the manager did not end within {within_s:g} s of SIGTERM")
            self.kill_manager()
            return
        self.note(f"the manager ended {time.monotonic() - told_s:.1f} s after it was told to")
        if code != 0:
            self.wrong.append(f"the manager ended with exit code {code}: {self._last_words()}")
        self.manager = None

    def bugs(self) -> list[str]:
        """What managers have called a bug of their own; one that is told to end, or killed, has none."""
        logs = [path for path in (self.folder.manager_log, self.site.folder / "manager.log") if path.exists()]
        lines = [line for path in logs for line in path.read_text(errors="replace").splitlines()]
        return [f"a manager said: {line}" for line in lines if _BUG.search(line)]

    # ---- faults

    def begin(self, fault: Fault) -> None:
        """Do it, and take note of whether anything was there for it."""
        self.look_after_manager()
        missed = "the experiment was over" if self._is_over() else self._do(fault)
        if missed:
            self.missed.append(f"{fault.kind.value}: {missed}")
            self.note(self.missed[-1])
        else:
            self.hit.append(fault)

    def _do(self, fault: Fault) -> str:
        """Why it hit nothing; empty when it hit something."""
        match fault.kind:
            case Kind.MANAGER_KILLED | Kind.MANAGER_MOVED | Kind.MANAGER_STOPPED | Kind.MANAGER_ENDED:
                return self._hit_manager(fault.kind)
            case Kind.KEEPER_KILLED | Kind.KEEPER_STOPPED | Kind.TRIAL_KILLED | Kind.TRIAL_STOPPED:
                return self._hit_process(fault)
            case _:
                # Nobody may be connected between two trials.
                try:
                    wait_until(lambda: self.site.begin(fault), "it hits something", _RUNS_WITHIN_S)
                except TimeoutError:
                    return "nobody was connected"
                self.note(str(fault).split("s  ", 1)[1])
                return ""

    def _hit_manager(self, kind: Kind) -> str:
        # It may not have come back from the last one, which met a full disk.
        if not self.resume():
            return "none ran"
        assert self.manager is not None
        self.has_moved ^= kind is Kind.MANAGER_MOVED
        self.note(kind.value)
        match kind:
            case Kind.MANAGER_STOPPED:
                self.manager.send_signal(signal.SIGSTOP)
            case Kind.MANAGER_ENDED:
                self._tell_to_end(_LEAVES_WITHIN_S)
            case _:
                self.kill_manager()
        return ""

    def heal(self, fault: Fault) -> None:
        """The end of one that hit something."""
        match fault.kind:
            case Kind.MANAGER_KILLED | Kind.MANAGER_MOVED | Kind.MANAGER_ENDED:
                self.resume()
            case Kind.MANAGER_STOPPED:
                if self.manager is not None:
                    self.manager.send_signal(signal.SIGCONT)
                self.note("the manager goes on")
            case Kind.KEEPER_STOPPED | Kind.TRIAL_STOPPED:
                for process in self._stopped.pop(fault, []):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.resume()
                self.note(f"over: {fault.kind.value}")
            case _:
                self.site.heal(fault)
                self.note(f"over: {fault.kind.value}")

    def _hit_process(self, fault: Fault) -> str:
        is_keeper = fault.kind in (Kind.KEEPER_KILLED, Kind.KEEPER_STOPPED)
        find = self._keepers if is_keeper else self._running_trials
        with contextlib.suppress(TimeoutError):
            wait_until(find, "one runs", _RUNS_WITHIN_S)  # none does between two trials
        running = find()
        if not running:
            return "none ran"
        name, process = running[int(fault.pick * len(running))]
        try:
            if fault.lasts_s:
                process.suspend()
                self._stopped[fault] = [process]
            else:
                process.kill()
                (self.keepers_killed if is_keeper else self.trials_killed).add(name)
        except psutil.NoSuchProcess:
            return f"{name}, process {process.pid}, had just ended"
        self.note(f"{fault.kind.value}: {name}, process {process.pid}")
        return ""

    def _keepers(self) -> list[tuple[str, psutil.Process]]:
        """Those that run, with their jobs."""
        found = self._running("TRIAL_KEEPER_JOB_ID", "trial_keeper")
        pids = {process.pid for _, process in found}
        # Each has a guard, which is a copy of it.
        return [(job_id, process) for job_id, process in found if _parent_of(process) not in pids]

    def _running_trials(self) -> list[tuple[str, psutil.Process]]:
        return self._running("NNI_TRIAL_JOB_ID", "train.py")

    def _running(self, variable: str, command: str) -> list[tuple[str, psutil.Process]]:
        found = []
        for process in processes_of(self.site.name):
            with contextlib.suppress(psutil.Error, OSError):
                environ = process.environ()
                if variable in environ and process.cmdline()[-1:] == [command]:
                    found.append((environ[variable], process))
        return sorted(found, key=lambda each: each[1].pid)

    @property
    def harm(self) -> Harm:
        kinds = {fault.kind for fault in self.hit}
        return Harm(
            self.trials_killed,
            self.keepers_killed,
            bool(kinds & _STORAGE_KINDS),
            bool(kinds & _MANAGER_LEAVES_KINDS),
        )


def _parent_of(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def _play(experiment: _Experiment, plan: Plan) -> None:
    """The experiment under its plan, to its end."""
    experiment.create()
    if not experiment.start_manager():
        raise RuntimeError("the first manager did not start")
    wait_until(lambda: experiment.row_count() > 0, "the first trials report", _DONE_WITHIN_S)
    began_s = time.monotonic()
    steps = [(fault.at_s, experiment.begin, fault) for fault in plan.faults]
    # What is over at once needs no healing.
    steps += [(fault.until_s, experiment.heal, fault) for fault in plan.faults if fault.lasts_s]
    for at_s, step, fault in sorted(steps, key=lambda each: each[0]):
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: False, "time", max(began_s + at_s - time.monotonic(), 0.0))
        due_s = began_s + at_s
        if step == experiment.begin or fault in experiment.hit:
            step(fault)
        # A manager needs seconds to come back: what is to follow its return then follows it.
        began_s += max(time.monotonic() - due_s - _AT_ONCE_S, 0.0)
    wait_until(experiment.resume, "a manager is back", _DONE_WITHIN_S)
    wait_until(experiment.is_done, "the experiment is over", _DONE_WITHIN_S)
    experiment.note("the experiment is over")
    experiment.end()
    wait_until(lambda: not experiment.site.leftovers(), "no process is left", _END_WITHIN_S)


def run_plan(plan: Plan, parent: Path | None = None, *, planted: str = "", trials: int = 0) -> Outcome:
    """Play one plan and judge it. What is left of a run that did not go well is kept; of another nothing is.

    `trials`: how many; 0: as many as usual.
    """
    trials = trials or (SHORT_TRIALS if plan.is_short else TRIALS)
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"faults-{plan.seed}-", dir=parent))
    with a_site(plan, folder) as site:
        experiment = _Experiment(plan, site, planted, trials)
        try:
            _play(experiment, plan)
        except (TimeoutError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            experiment.wrong.append("".join(traceback.format_exception_only(error)).strip())
            experiment.wrong += [f"still runs: {left}" for left in site.leftovers()]
            experiment.kill_manager()
        took_s = time.monotonic() - began_s
        verdict = judge(experiment.folder, experiment.storage, site.ledgers, experiment.harm, trials, took_s)
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


def _keep(experiment: _Experiment, evidence: Path) -> None:
    """The disks are gone with the site."""
    evidence.mkdir()
    for disk in (experiment.site.manager_disk, experiment.site.storage):
        shutil.copytree(
            disk.path, evidence / disk.path.name, symlinks=True, ignore=shutil.ignore_patterns("filler")
        )


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
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is ended
    seeds = [arguments.seed] if arguments.seed is not None else range(1, arguments.seeds + 1)
    outcomes = []
    for seed in seeds:
        plan = plan_of(seed, is_short=arguments.short, missing=missing_here())
        kinds = ", ".join(fault.kind.value for fault in plan.faults)
        print(f"seed {seed}: {kinds} ...", end=" ", flush=True)
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
