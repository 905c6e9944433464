"""The cost of `save_checkpoint` and `load_checkpoint`, compared with a bare write, fsync and rename of the same bytes."""

import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from table import Row, render

import nni_sdk

SMALL_BYTES, LARGE_BYTES = 10_000, 64 << 20
_SMALL_ROUNDS, _LARGE_ROUNDS = 100, 7


def checkpoint_cost(
    large_bytes: int = LARGE_BYTES, small_rounds: int = _SMALL_ROUNDS, large_rounds: int = _LARGE_ROUNDS
) -> list[Row]:
    """Median time to save and to load a checkpoint of one file, compared with bare calls in the same folder. The calls
    alternate.
    """
    # Saving a small checkpoint syncs four times (content, folder, manifest, and the manifest's folder). The goal therefore
    # permits 5 times the duration of a bare write, which syncs once.
    return _rows(SMALL_BYTES, small_rounds, goal=5.0) + _rows(large_bytes, large_rounds, goal=2.0)


def _rows(size: int, rounds: int, *, goal: float) -> list[Row]:
    content = os.urandom(size)
    saves_s, writes_s, loads_s = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "parameter.cfg").write_text(json.dumps({"parameter_id": 3, "parameters": {}}))
        os.environ |= {"NNI_PLATFORM": "local", "NNI_TRIAL_JOB_ID": "aBcDe", "NNI_SYS_DIR": folder}
        nni_sdk.trial._trial = nni_sdk.trial.TrialContext(os.environ)

        def save(into: str) -> None:
            Path(into, "model").write_bytes(content)

        for _ in range(rounds):
            begin_s = time.perf_counter()
            saved = nni_sdk.save_checkpoint(save)
            middle_s = time.perf_counter()
            _write(content, folder)
            end_s = time.perf_counter()
            saves_s.append(middle_s - begin_s)
            writes_s.append(end_s - middle_s)
            begin_s = time.perf_counter()
            loaded = nni_sdk.load_checkpoint()
            loads_s.append(time.perf_counter() - begin_s)
            if loaded != saved or Path(saved, "model").read_bytes() != content:
                raise AssertionError(
                    "another checkpoint was loaded than saved, so the comparison means nothing"
                )
    name = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size // 1000} kB"
    return [
        _row(f"save_checkpoint, {name}, p50", saves_s, writes_s, goal),
        # Loads have the same goal as saves: at most this multiple of the time of a bare write. An attempt loads a checkpoint only
        # once, so a faster load is not needed.
        _row(f"load_checkpoint, {name}, p50", loads_s, writes_s, goal),
    ]


def _write(content: bytes, folder: str) -> None:
    new = os.path.join(folder, "bare.new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, os.path.join(folder, "bare"))


def _row(what: str, ours_s: list[float], bare_s: list[float], goal: float) -> Row:
    our_ms, bare_ms = median(ours_s) * 1e3, median(bare_s) * 1e3
    ratio = our_ms / bare_ms
    return Row(
        what,
        f"{our_ms:.2f} ms",
        f"write, fsync, rename {bare_ms:.2f} ms",
        f"{ratio:.1f} x",
        f"<= {goal:g} x",
        ratio <= goal,
    )


if __name__ == "__main__":
    print(render(checkpoint_cost()))
