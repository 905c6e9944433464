"""Kill keepers with SIGKILL in the first moments of a trial, and check the result in the manager.

Each trial records its processes, their heartbeats and its reports in a ledger that no fault affects. A watcher thread reads
the manager's database and compares it with the ledger.
"""

import contextlib
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from deadlines import DEADLINE_S
from real_experiment import RealExperiment, values, wait_until

from nni_manager.domain.trial import TERMINAL_STATES

LATEST_KILL_S = 0.04
REPORTS = 20
_LOOK_INTERVAL_S = 0.002
_STATES_INTERVAL_S = 0.01

# Each trial starts three helper processes. The first has an empty environment, so its session identifies it. The second has its
# own session, so its environment identifies it. The third has both, so it can be found only while its parent lives. The stdin of
# the helpers is a pipe that is never closed. A trial whose keeper will be killed does not exit by itself.
TRAIN = """
import os, subprocess, time
import nni_sdk as nni

ledger = os.open({ledgers!r} + "/" + os.environ["NNI_TRIAL_JOB_ID"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

def note(text):
    os.write(ledger, f"{{time.time()}} {{os.getpid()}} {{text}}\\n".encode())

note("begun")
never, held = os.pipe()
beat = f'while :; do echo "$EPOCHREALTIME $$ beat" >&{{ledger}}; read -r -t 0.005 _; [ $? -gt 128 ] || exit; done'
for environ, is_apart in (({{}}, False), (os.environ, True), ({{}}, True)):
    subprocess.Popen(
        ["/bin/bash", "-c", beat],
        env=environ, start_new_session=is_apart, stdin=never, pass_fds=(ledger, held),
    )
for i in range({reports}):
    note(f"? {{i}}")
    nni.report_intermediate_result(i)
    note(f"+ {{i}}")
    time.sleep(0.01)
nni.report_final_result({reports})
note(f"+ {reports}")
while not (os.path.exists({ledgers!r} + "/../" + os.environ["NNI_TRIAL_JOB_ID"]) or os.path.exists({ledgers!r} + "/../all")):
    time.sleep(0.005)
"""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the processes of one trial have recorded in its ledger."""

    made: list[int]
    """The values of the reports whose calls returned."""
    pids: frozenset[int]
    last_sign_s: float
    """The wall-clock time of the newest record of any process."""
    starts: int
    """How often the command has started."""

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        made, pids, signs, starts = [], set(), [0.0], 0
        # A trial that was killed may have left an incomplete last line, so the last part is ignored.
        for line in path.read_text().split("\n")[:-1]:
            at_s, pid, mark, *value = line.split(" ")
            pids.add(int(pid))
            signs.append(float(at_s))
            starts += mark == "begun"
            if mark == "+":
                made.append(int(value[0]))
        return cls(made, frozenset(pids), max(signs), starts)


@dataclass(slots=True)
class Verdict:
    """The result of all kills; `wrong` lists all violations."""

    kills: int = 0
    reports: int = 0
    lost: int = 0
    left: int = 0
    too_early: int = 0
    """The number of trials that became terminal while one of their processes was alive."""
    wrong: list[str] = field(default_factory=list)

    def line(self, kind: str) -> str:
        return (
            f"{kind}: {self.kills} kills of a keeper, {self.reports} reports: {self.lost} lost, {self.left} processes left, "
            f"{self.too_early} trials terminal while a process of theirs lived"
        )


class KeeperKiller:
    """Run one trial after the other in one experiment, and kill keepers at random moments after the start of a trial."""

    def __init__(
        self, experiment: RealExperiment, ledgers: Path, exempt_sessions: Sequence[int], draw: random.Random
    ) -> None:
        """`exempt_sessions`: for each kill, the number of trials that the job runs to their end before the kill."""
        self._experiment = experiment
        self._ledgers = ledgers
        self._spared = exempt_sessions
        self._draw = draw
        self._begun: set[str] = set()
        self._checked: set[str] = set()
        self.killed: set[str] = set()
        self.verdict = Verdict()
        self._is_over = threading.Event()

    def run(self, timeout_s: float) -> Verdict:
        """Run all kills; the manager must be running."""
        watcher = threading.Thread(target=self._watch_states)
        watcher.start()
        try:
            self._kill_keepers(timeout_s)
            self._experiment.wait_for_status("DONE", timeout_s=timeout_s, every_s=0.5)
        finally:
            self._is_over.set()
            watcher.join()
        self._check_at_end()
        return self.verdict

    # ---- killing

    def _kill_keepers(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for exempt_sessions in self._spared:
            for _ in range(exempt_sessions):
                (self._ledgers.parent / self._next_trial(deadline_s)).touch()
            trial_id = self._next_trial(deadline_s)
            # Half of the kills wait until the command has started. On a busy machine, the other half may hit all keepers before
            # they start a command.
            if self._draw.random() < 0.5:
                wait_until(
                    (self._ledgers / trial_id).exists, "the command has started", 120, _LOOK_INTERVAL_S
                )
            self._is_over.wait(self._draw.uniform(0.0, LATEST_KILL_S))
            for pid in self._experiment.keeper_pids():
                if not _is_dead(pid):
                    os.kill(pid, signal.SIGKILL)
                    self.verdict.kills += 1
                    self.killed.add(trial_id)
        (self._ledgers.parent / "all").touch()

    def _next_trial(self, deadline_s: float) -> str:
        """Wait for a trial whose keeper has just claimed it and is about to start the command.

        A keeper claims a trial when it writes attempt.json. If it is killed earlier, the next job runs the trial.
        """
        trials = self._experiment.folder.workspace.trials
        while True:
            assert time.monotonic() < deadline_s, f"no further trial starts after {len(self._begun)} trials"
            for path in trials.glob("*/attempts/*/*/attempt.json"):
                trial_id = path.parents[3].name
                if trial_id not in self._begun:
                    self._begun.add(trial_id)
                    return trial_id
            self._is_over.wait(_LOOK_INTERVAL_S)

    # ---- checks

    def _watch_states(self) -> None:
        with contextlib.closing(sqlite3.connect(self._experiment.folder.database)) as database:
            while not self._is_over.wait(_STATES_INTERVAL_S):
                self._check_terminal(database)
            self._check_terminal(database)

    def _check_terminal(self, database: sqlite3.Connection) -> None:
        rows = database.execute("SELECT trial_id, state, message FROM trial").fetchall()
        seen_at_s = time.time()
        for trial_id, state, message in rows:
            path = self._ledgers / trial_id
            if state not in {each.value for each in TERMINAL_STATES} or trial_id in self._checked:
                continue
            self._checked.add(trial_id)
            if path.exists():
                living = [pid for pid in Ledger.read(path).pids if not _is_dead(pid)]
                if living or Ledger.read(path).last_sign_s > seen_at_s:
                    self.verdict.too_early += 1
                    self.verdict.wrong.append(f"trial {trial_id} is {state} and {living} live: {message}")

    def _check_at_end(self) -> None:
        verdict = self.verdict
        trials = {trial["id"]: trial for trial in self._experiment.get("/trials")}
        for path in self._ledgers.iterdir():
            ledger, stored = Ledger.read(path), values(self._experiment.rows(path.name))
            verdict.reports += len(ledger.made)
            # A trial notes a report after the call has returned. If it is killed before, the store may have one report more than
            # the ledger.
            if stored[: len(ledger.made)] != ledger.made or len(stored) > len(ledger.made) + 1:
                verdict.lost += len(set(ledger.made) - set(stored))
                verdict.wrong.append(f"trial {path.name} reported {ledger.made}, stored are {stored}")
            living = [pid for pid in ledger.pids if not _is_dead(pid)]
            verdict.left += len(living)
            verdict.wrong += [f"trial {path.name} has left {living}"] if living else []
        for trial_id, trial in trials.items():
            expected = {"SUCCEEDED"}
            if trial_id in self.killed:
                # A killed keeper may have claimed the trial without starting it. Then the next job runs the trial, which may
                # succeed.
                path = self._ledgers / trial_id
                is_reused = self._experiment.config.reuse_mode
                was_run_once = is_reused and path.exists() and Ledger.read(path).starts == 1
                expected = {"FAILED", "SUCCEEDED"} if was_run_once else {"FAILED"}
            if trial["status"] not in expected:
                verdict.wrong.append(f"trial {trial_id} is {trial['status']}: {trial.get('message')}")
        with contextlib.suppress(AssertionError):
            wait_until(
                lambda: not self._own_processes(),
                "no process of the experiment is left",
                timeout_s=DEADLINE_S,
            )
        left = self._own_processes()
        verdict.left += len(left)
        verdict.wrong += [f"is left: {process}" for process in left]

    def _own_processes(self) -> list[Any]:
        """The processes of the experiment, without the manager."""
        marks = (str(self._experiment.folder.path), str(self._ledgers))
        manager = self._experiment.manager
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                texts = " ".join((*process.cmdline(), *process.environ().values()))
                if any(mark in texts for mark in marks) and not _is_dead(process.pid):
                    found.append(process)
        return [each for each in found if manager is None or each.pid != manager.pid]


def _is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
