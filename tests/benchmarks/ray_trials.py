"""Runs Ray Tune trials one after another in one process.

Each trial records its start and end. Usage: `ray_trials.py FOLDER TURNS LENGTH_MS...`, with the Python that has Ray Tune and does
not have trial-keeper. The script writes two files per length. `recording-LENGTH` is from Ray Tune with its default loggers, which
write each trial's results to a CSV file, a JSON file and a TensorBoard file. `unrecorded-LENGTH` is from Ray Tune without these
loggers.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

# Ray reads both variables when it is imported, so they are set before the import. Without the second variable, Ray listens on the
# network even if its address is loopback.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray
from ray import tune


class Noting(tune.Trainable):
    """Ray Tune's fastest kind of trial: one object runs all trials with new parameters."""

    def setup(self, config: dict[str, Any]) -> None:
        # The file is opened once and not in each trial, so that the comparison is fair: trial-keeper's trials write to their
        # stdout, which is already open.
        self.notes = os.open(config["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.length_s = config["length_s"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        return True

    def step(self) -> dict[str, Any]:
        began_at_s = time.time()
        if self.length_s:
            time.sleep(self.length_s)
        os.write(self.notes, f"{began_at_s} {time.time()} {os.getpid()}\n".encode())
        return {"score": 1.0, "done": True}


def run(notes: Path, turns: int, length_s: float) -> None:
    """One experiment with one trial at a time."""
    tune.Tuner(
        Noting,
        param_space={"x": tune.uniform(0, 1), "notes": str(notes), "length_s": length_s},
        tune_config=tune.TuneConfig(num_samples=turns, max_concurrent_trials=1, reuse_actors=True),
        run_config=tune.RunConfig(
            # Checkpoints are off, because the compared trials of trial-keeper write none either.
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            storage_path=str(notes.parent / "results"),
            verbose=0,
        ),
    ).fit()
    processes = {line.split()[2] for line in notes.read_text().splitlines()}
    assert len(processes) == 1, "more than one process ran"


def main(folder: Path, turns: int, *lengths_ms: str) -> None:
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
    )
    for length_ms in lengths_ms:
        for name, are_off in (("recording", "0"), ("unrecorded", "1")):
            os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = are_off
            run(folder / f"{name}-{length_ms}", turns, float(length_ms) / 1e3)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
