"""The duration of `search(f, space)` with trivial trials, compared with an Optuna study in memory that forks each trial."""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from deadlines import scaled_s
from table import Row, render

TRIALS = 100
ROUNDS = 3
# The scripts OURS (trial-keeper) and THEIRS (Optuna) minimise this function with TPE, with the same seed, and with one trial at a
# time.
_FUNCTION = """
import sys, time
def f(parameters):
    return (parameters["x"] - 0.3) ** 2
trials = int(sys.argv[1])
"""
OURS = f"""{_FUNCTION}
from nni_manager.experiment import search
began_s = time.monotonic()
found = search(f, {{"x": {{"_type": "uniform", "_value": [0, 1]}}}}, trials=trials, tuner="TPE", seed=1)
took_s = time.monotonic() - began_s
assert len(found.experiment.export_data()) == trials
print(took_s)
"""
THEIRS = f"""{_FUNCTION}
import multiprocessing, optuna
forking = multiprocessing.get_context("fork")
optuna.logging.set_verbosity(optuna.logging.WARNING)
def call(pipe, parameters):
    pipe.send(f(parameters))
def in_a_fork(trial):
    parameters = {{"x": trial.suggest_float("x", 0, 1)}}
    reader, writer = forking.Pipe(duplex=False)
    process = forking.Process(target=call, args=(writer, parameters))
    process.start()
    writer.close()
    value = reader.recv()
    process.join()
    return value
began_s = time.monotonic()
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
study.optimize(in_a_fork, n_trials=trials)
took_s = time.monotonic() - began_s
assert len(study.trials) == trials
print(took_s)
"""
_GOAL = 2.0


def search(trials: int = TRIALS, rounds: int = ROUNDS) -> list[Row]:
    """Median time of a search with trivial trials, from its start to its results, for our search and for Optuna's alternately."""
    with tempfile.TemporaryDirectory() as home:
        times = [
            (_seconds(OURS, trials, Path(home)), _seconds(THEIRS, trials, Path(home))) for _ in range(rounds)
        ]
    ours_s, theirs_s = (statistics.median(each) for each in zip(*times, strict=True))
    return [
        Row(
            f"search(f): {trials} trivial trials, a process each",
            f"{ours_s:.1f} s",
            f"Optuna in memory, {trials} forks {theirs_s:.1f} s",
            f"{ours_s / theirs_s:.1f} x",
            f"<= {_GOAL:g} x",
            ours_s <= _GOAL * theirs_s,
        )
    ]


def _seconds(script: str, trials: int, home: Path) -> float:
    path = home / "script.py"
    path.write_text(script)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NNI_")}
    ran = subprocess.run(
        [sys.executable, path, f"{trials}"],
        cwd=home,
        env=environ | {"HOME": f"{home}", "XDG_STATE_HOME": f"{home / 'state'}"},
        capture_output=True,
        text=True,
        timeout=scaled_s(60 + trials),
    )
    assert ran.returncode == 0, ran.stderr
    return float(ran.stdout.split()[-1])


if __name__ == "__main__":
    print(render(search()))
