"""The cost of a framework callback: short boosting rounds of XGBoost with our callback, with Optuna's, with W&B's, and without a
callback.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from table import Row, render

import nni_sdk

_HERE = Path(__file__).parent
_PEERS = _HERE.parents[1] / ".venv/peers/callbacks"


def callback_cost(rounds: int = 200, turns: int = 9) -> list[Row]:
    """The time that our callback adds to a round. Optuna's and W&B's callbacks are measured too if `make peers` has installed
    them.
    """
    has_peers = (_PEERS / ".installed").exists()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                _PEERS / "bin/python" if has_peers else sys.executable,
                _HERE / "callback_costs.py",
                folder,
                f"{rounds}",
                f"{turns}",
            ],
            env=os.environ | {"PYTHONPATH": str(Path(nni_sdk.__file__).parents[1])},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    times_us = json.loads(done.stdout.splitlines()[-1])
    none_us = times_us.pop("none")
    added_us = {name: time_us - none_us for name, time_us in times_us.items()}
    ours_us = added_us.pop("ours")
    beside = ", ".join(f"{name} +{us:.0f} µs" for name, us in added_us.items()) or "make peers for others"
    return [
        Row(
            "XGBoost's NNICallback, a round",
            f"+{ours_us:.0f} µs",
            f"no callback {none_us:.0f} µs; {beside}",
            f"{ours_us / none_us + 1:.2f} x",
            "<= 100 µs and <= others",
            ours_us <= min([100, *added_us.values()]),
        )
    ]


if __name__ == "__main__":
    print(render(callback_cost()))
