"""The NVIDIA GPUs of a machine, as its nvidia-smi prints them."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

# The driver initialises each GPU first, unless its persistence daemon runs.
_TIMEOUT_S = 60.0


class MachineGpus(NamedTuple):
    """The indices of all GPUs, and of those on which any process computes."""

    present: tuple[int, ...]
    in_use: tuple[int, ...]


def query_gpus() -> MachineGpus:
    """Ask nvidia-smi. No GPUs without it.

    Raises:
        OSError: nvidia-smi fails, with what it has printed.
    """
    try:
        return parse(_ask("--query-gpu=index,uuid"), _ask("--query-compute-apps=gpu_uuid"))
    except FileNotFoundError:
        return MachineGpus((), ())


def parse(gpus: str, apps: str) -> MachineGpus:
    """The GPUs that nvidia-smi lists as `index, uuid`, and the uuids of those with processes, one line each.

    Source: nvidia-smi --help-query-gpu, --help-query-compute-apps.
    """
    rows = [line.split(",") for line in gpus.splitlines() if line.strip()]
    indices = {uuid.strip(): int(index) for index, uuid in rows}
    used = {line.strip() for line in apps.splitlines()}
    return MachineGpus(
        tuple(sorted(indices.values())), tuple(sorted(indices[uuid] for uuid in used & indices.keys()))
    )


def _ask(query: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(0, f"nvidia-smi does not answer within {_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise OSError(0, f"nvidia-smi fails: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
