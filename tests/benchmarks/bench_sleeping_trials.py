"""The memory of 500 local trials that sleep, each with a keeper of its own."""

import os
import sys
import tempfile
import time
from pathlib import Path

from deadlines import scaled_s

# Modules that tests and benchmarks share, such as real_experiment, are in tests/fakes.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import psutil
from real_experiment import RealExperiment, wait_until
from table import Row, render

TRIALS = 500
# All processes of the experiment inherit this variable, by which the measurement finds them.
MARK = "BENCH_SLEEPING_TRIALS"
_GOAL_GB = 6.0
_MANAGER_GOAL_MB = 300.0


def sleeping_trials(trials: int = TRIALS) -> list[Row]:
    """Proportional set size (PSS) of all processes while 500 trials sleep, compared with that of their commands alone."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = RealExperiment(
            Path(folder),
            "",
            trialConcurrency=trials,
            maxTrialNum=trials,
            localConfig={},
            trial={"command": "exec sleep 1000", "codeDir": "."},
            environ={MARK: folder},
        )
        experiment.create()
        try:
            began_s = time.monotonic()
            experiment.start()
            claimed = experiment.folder.workspace.trials
            wait_until(
                lambda: len(list(claimed.glob("*/attempts/*/*/attempt.json"))) == trials,
                "all trials run",
                scaled_s(180),
                every_s=1.0,
            )
            took_s = time.monotonic() - began_s
            assert experiment.manager is not None
            manager = experiment.manager.pid
            found = {pid: pss for pid, pss in map(_pss_of, _marked(folder)) if pss}
            sleeps = sum(pss for pid, pss in found.items() if _is_sleep(pid))
        finally:
            experiment.close()
    whole = sum(found.values())
    return [
        Row(
            f"memory of {trials} local trials that sleep, started in {took_s:.0f} s",
            f"{whole / 1e9:.2f} GB",
            f"{trials} x sleep {sleeps / 1e9:.2f} GB",
            f"{whole / trials / 1e6:.1f} MB each",
            f"<= {_GOAL_GB * trials / TRIALS:.1f} GB",
            whole <= _GOAL_GB * 1e9 * trials / TRIALS,
        ),
        Row(
            "of these, the manager",
            f"{found[manager] / 1e6:.0f} MB",
            "-",
            "-",
            f"<= {_MANAGER_GOAL_MB:.0f} MB",
            found[manager] <= _MANAGER_GOAL_MB * 1e6,
        ),
    ]


def _marked(folder: str) -> list[int]:
    marked = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == folder:
                marked.append(process.pid)
        except psutil.Error:
            continue
    return marked


def _pss_of(pid: int) -> tuple[int, int]:
    try:
        return pid, psutil.Process(pid).memory_full_info().pss
    # The process has exited since it was listed.
    except (psutil.Error, OSError):
        return pid, 0


def _is_sleep(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in ("sleep", "coreutils")
    except OSError:
        return False


if __name__ == "__main__":
    print(render(sleeping_trials(*map(int, sys.argv[1:]))))
