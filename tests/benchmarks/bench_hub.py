"""The cost of `nnictl web` with many experiments: the time of the list, the time of a comparison, and the memory of the
server.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest import mock

# Benchmarks import helpers of the tests from tests/fakes, so this folder is added to the module search path.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import psutil
from deadlines import scaled_s
from made_experiment import made_experiment
from table import Row, render

from nni_manager.client.hub_folder import hub_folder
from nni_manager.client.manager_client import ManagerClient
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.store.folders import ManagerProcess
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry

EXPERIMENTS = 200
TRIALS = 1_000
COMPARED = 20
ROUNDS = 9
_MIB = 2**20


def all_experiments(experiments: int = EXPERIMENTS, trials: int = TRIALS, rounds: int = ROUNDS) -> list[Row]:
    """Median time to list 200 experiments with 1,000 trials each, median time to compare 20 of them, and the server's memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, XDG_STATE_HOME=f"{folder}/state"),
    ):
        ids = [f"EXPT{number:04d}" for number in range(experiments)]
        stores = []
        for name in ids:
            made = made_experiment(Path(folder) / name, trials, experiment_id=name)
            Registry.of_user().add(made.folder)
            stores.append(made.folder.database)
        nnictl = [sys.executable, "-m", "nni_manager.cli", "web"]
        subprocess.run([*nnictl, "--json"], check=True, capture_output=True, timeout=scaled_s(120))
        try:
            server = hub_folder().running_view()
            assert server is not None
            first_s, listed_s = _list_times(server, experiments, rounds)
            floor_s = _time(lambda: [_rows_of(store) for store in stores])
            client = ManagerClient("web", server)
            query = ",".join(ids[:COMPARED])
            compared_s = median(_time(lambda: client.get(f"/curves?ids={query}")) for _ in range(rounds))
            memory = psutil.Process(server.pid).memory_info().rss / _MIB
        finally:
            subprocess.run([*nnictl, "--stop"], check=True, capture_output=True, timeout=scaled_s(120))
    what = f"nnictl web, {experiments} experiments of {trials:,} trials"
    floor = f"their tables read {floor_s:.2f} s"
    return [
        Row(
            f"{what}: list, after the start",
            f"{first_s:.2f} s",
            floor,
            f"{first_s / floor_s:.1f} x",
            "",
            True,
        ),
        Row(
            f"{what}: list",
            f"{listed_s:.3f} s",
            floor,
            f"{listed_s / floor_s:.2f} x",
            "<= 0.3 s",
            listed_s <= 0.3,
        ),
        Row(
            *(
                f"{what}: comparison of {COMPARED}",
                f"{compared_s:.3f} s",
                floor,
                f"{compared_s / floor_s:.2f} x",
            ),
            *("<= 0.5 s", compared_s <= 0.5),
        ),
        Row(f"{what}: memory", f"{memory:.0f} MB", "", "", "<= 200 MB", memory <= 200),
    ]


def _list_times(server: ManagerProcess, experiments: int, rounds: int) -> tuple[float, float]:
    """Two times in seconds: the first list request, for which the server reads every store, and the median of later list
    requests.
    """
    client = ManagerClient("web", server)

    def ask() -> None:
        assert len(client.get("/all")) == experiments

    return _time(ask), median(_time(ask) for _ in range(rounds))


def _rows_of(store: Path) -> int:
    with StoreReader(store) as reader:
        return len(reader.values_over_time(MAXIMIZE))


def _time(call: Callable[[], object]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


if __name__ == "__main__":
    print(render(all_experiments()))
