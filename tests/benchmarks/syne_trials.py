"""Runs Syne Tune trials one after another, each in a process of its own.

Each trial prints its start and its end. Usage: `syne_trials.py FOLDER TURNS [POLL_S]`, with the Python that has Syne Tune and
does not have trial-keeper. POLL_S: the interval at which Syne Tune polls its trials; without it, Syne Tune's default.
"""

import logging
import sys
from pathlib import Path

from syne_tune import StoppingCriterion, Tuner
from syne_tune.backend import LocalBackend
from syne_tune.config_space import uniform
from syne_tune.optimizer.baselines import RandomSearch

# The trial reports a value, because Syne Tune refuses trials without reports. It prints the time of its start before it imports
# Syne Tune.
TRIAL = """\
import time
print(time.time(), flush=True)
from syne_tune import Reporter
Reporter()(score=1.0)
print(time.time(), flush=True)
"""


def main(folder: Path, turns: int, **options: float) -> None:
    """One experiment with one trial at a time. `options`: those of Syne Tune's Tuner."""
    logging.disable(logging.WARNING)
    script = folder / "trial.py"
    script.write_text(TRIAL)
    Tuner(
        trial_backend=LocalBackend(entry_point=str(script)),
        scheduler=RandomSearch({"x": uniform(0, 1)}, metrics=["score"]),
        stop_criterion=StoppingCriterion(max_num_trials_finished=turns),
        n_workers=1,
        trial_backend_path=str(folder / "results"),
        save_tuner=False,
        **options,
    ).run()


main(Path(sys.argv[1]), int(sys.argv[2]), **({"sleep_time": float(sys.argv[3])} if len(sys.argv) > 3 else {}))
