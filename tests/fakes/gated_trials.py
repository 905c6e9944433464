"""An experiment whose trials wait at a gate between two results, for the fault tests of platforms.

Nothing here is a fake.
"""

from pathlib import Path

from deadlines import DEADLINE_S
from real_experiment import RealExperiment, values, wait_until

# Between its two results, a trial waits until a file with its sequence id exists. Each start of a trial adds a line to the file
# `ran`.
_TRAIN = """
import os, time
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
with open("{folder}/ran", "a") as ran:
    ran.write(f"{{nni.get_sequence_id()}} {{os.environ['WHERE']}}\\n")
nni.report_intermediate_result(x / 2)
while not os.path.exists(f"{folder}/{{nni.get_sequence_id()}}"):
    time.sleep(0.02)
nni.report_final_result(x)
"""


def gated(variable: str) -> str:
    """The training code, with a placeholder for its folder. `variable` is the environment variable that contains the name of the
    machine.
    """
    return _TRAIN.replace("WHERE", variable)


class GatedExperiment:
    """The experiment, and the folder with the gates."""

    def __init__(self, folder: Path, experiment: RealExperiment) -> None:
        self.folder, self.experiment = folder, experiment

    def ran(self) -> list[tuple[str, ...]]:
        """The number and the machine of each start of a trial."""
        return [tuple(line.split()) for line in (self.folder / "ran").read_text().splitlines()]

    def open(self, *numbers: int) -> None:
        """Let these trials report their second result."""
        for number in numbers:
            (self.folder / str(number)).touch()

    def trials(self) -> list[dict]:
        """The trials in the format of the HTTP API."""
        return self.experiment.get("/trials")

    def statuses(self) -> list[str]:
        """The status of each trial."""
        return [trial["status"] for trial in self.trials()]

    def problem(self) -> str:
        """The most urgent problem of the experiment, from its summary."""
        return self.experiment.summary()["problem"]

    def has_ended(self, *statuses: str) -> None:
        """Wait until the experiment ends. Check that its trials have these statuses, and that each result is stored once."""
        self.experiment.wait_for_status("DONE", is_stored=True, timeout_s=DEADLINE_S)
        assert self.statuses() == [*statuses]
        for trial in self.trials():
            x = trial["parameters"]["x"]
            expected = [x / 2, x] if trial["status"] == "SUCCEEDED" else [x / 2]
            assert values(self.experiment.rows(trial["id"])) == expected

    def are_stored(self, count: int) -> None:
        """Wait until at least `count` results are stored."""
        wait_until(lambda: self.experiment.row_count() >= count, "their results are stored")
