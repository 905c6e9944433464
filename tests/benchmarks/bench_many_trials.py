"""The cost of an experiment with many trials: listing 10,000 trials, and requesting a suggestion from a tuner after
1,000 trials.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

# Make the helper modules of tests/fakes importable.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import optuna
from made_experiment import NUMBERS, made_experiment
from made_tuner import made_tuner
from real_experiment import RealExperiment
from table import Row, render

from nni_manager.store.registry import Registry
from nni_manager.tuner.base import BaseTuner, PastTrial

LISTED = 10_000
KNOWN = 1_000
ROUNDS = 9


def listing(trials: int = LISTED, rounds: int = ROUNDS) -> list[Row]:
    """Median wall time of `nnictl trial ls` on an experiment of 10,000 trials, compared with an idle interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = _an_experiment(Path(folder), trials)
        environ = os.environ | {"XDG_STATE_HOME": f"{folder}/state", "COLUMNS": "120"}
        experiment_id, bare = experiment.folder.experiment_id, [sys.executable, "-c", "pass"]
        nnictl = [sys.executable, "-c", "from nni_manager.cli.main import main; main()", "trial", "ls"]
        rows = []
        for name, options in (("trial ls", []), ("trial ls --json", ["--json"])):
            listed_s, bare_s = [], []
            for _ in range(rounds):
                took_s, said = _run([*nnictl, *options, experiment_id], environ)
                assert said.count(b"SUCCEEDED") >= trials, "not all trials are listed"
                listed_s.append(took_s)
                bare_s.append(_run(bare, environ)[0])
            wall_s, floor_s = median(listed_s), median(bare_s)
            rows.append(
                Row(
                    f"nnictl {name}, {trials:,} trials",
                    f"{wall_s:.2f} s",
                    f"python -c pass {floor_s:.3f} s",
                    f"{wall_s / floor_s:.0f} x",
                    "<= 1 s",
                    wall_s <= 1,
                )
            )
    return rows


def suggestion(trials: int = KNOWN, rounds: int = ROUNDS) -> list[Row]:
    """Median time of the next suggestion after 1,000 trials, alternately from our TPE and from Optuna's own sampler."""
    space = {name: {"_type": "uniform", "_value": [0, 1]} for name in NUMBERS}
    tuner = made_tuner("TPE", space, seed=1)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    random = made_tuner("Random", space, seed=2)
    _learn(tuner, study, random, trials)
    ours_s, theirs_s = [], []
    for key in range(trials, trials + rounds):
        began_s = time.perf_counter()
        suggested = tuner.ask(key)
        middle_s = time.perf_counter()
        trial = study.ask()
        at = [trial.suggest_float(name, 0, 1) for name in NUMBERS]
        ended_s = time.perf_counter()
        assert suggested is not None
        tuner.tell(key, sum(suggested.parameters.values()))
        study.tell(trial, sum(at))
        ours_s.append(middle_s - began_s)
        theirs_s.append(ended_s - middle_s)
    ours_ms, theirs_ms = median(ours_s) * 1e3, median(theirs_s) * 1e3
    return [
        Row(
            f"TPE's next proposal, {trials:,} trials of {len(NUMBERS)} numbers",
            f"{ours_ms:.1f} ms",
            f"Optuna's TPE {theirs_ms:.1f} ms",
            f"{ours_ms / theirs_ms:.2f} x",
            "<= 1.2 x",
            ours_ms <= 1.2 * theirs_ms,
        )
    ]


def _learn(tuner: BaseTuner, study: optuna.Study, random: BaseTuner, trials: int) -> None:
    """Report the same random trials to the tuner and to the Optuna study."""
    past = []
    distribution = optuna.distributions.FloatDistribution(0, 1)
    for key in range(trials):
        suggested = random.ask(key)
        assert suggested is not None
        value = sum(suggested.parameters.values())
        past.append(PastTrial(key, suggested.parameters, suggested.metadata, value, ended=True))
        study.add_trial(
            optuna.create_trial(
                params=suggested.parameters, distributions=dict.fromkeys(NUMBERS, distribution), value=value
            )
        )
    tuner.restore(past)


def _an_experiment(folder: Path, trials: int) -> RealExperiment:
    """A finished experiment as a manager would leave it. nnictl finds the experiment through the state folder in `folder`."""
    experiment = made_experiment(folder, trials)
    Registry(folder / "state" / "trial-keeper" / "experiments").add(experiment.folder)
    return experiment


def _run(command: list[str], environ: dict[str, str]) -> tuple[float, bytes]:
    began_s = time.perf_counter()
    said = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.perf_counter() - began_s, said.stdout


if __name__ == "__main__":
    print(render([*listing(), *suggestion()]))
