"""Trials of Ray Tune for comparison, with the Ray Tune that `make peers` installs. All processes of Ray are killed afterwards."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from real_experiment import wait_until

Times = list[tuple[float, ...]]

_HERE = Path(__file__).parent
_INSTALLED = _HERE.parents[1] / ".venv/peers/ray"
# Two experiments of 200 trials for each of two trial lengths take 40 s on a machine where Python starts in 50 ms.
_TIMEOUT_S = 300


class RayLacking(Exception):
    """Ray Tune cannot be measured here; the message is shown in the table."""


def ray_times(folder: Path, turns: int, *lengths_ms: int) -> list[tuple[Times, Times]]:
    """For each length, the start and end times of trials, in order: with Ray Tune's defaults, and without its
    loggers.

    `folder`: receives all files; its path must be short, since it contains sockets.

    Raises:
        RayLacking: it is not installed, or fails.
    """
    output_of(folder, _HERE / "ray_trials.py", folder, f"{turns}", *map(str, lengths_ms))
    return [
        (_read(folder / f"recording-{length_ms}"), _read(folder / f"unrecorded-{length_ms}"))
        for length_ms in lengths_ms
    ]


def output_of(folder: Path, *arguments: str | Path) -> str:
    """Run a script in the Python that has Ray Tune; return its stdout and stderr.

    `folder`: the working directory.

    Raises:
        RayLacking: Ray Tune is not installed, or fails.
    """
    if not (_INSTALLED / ".installed").exists():
        raise RayLacking("Ray Tune is not installed: make peers")
    with subprocess.Popen(
        [_INSTALLED / "bin/python", *arguments],
        cwd=folder,
        # Ray Tune runs with its defaults, without trial-keeper's modules and the user's settings.
        env={
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "RAY_", "TUNE_"))
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as ray:
        try:
            said, _ = ray.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RayLacking(f"Ray Tune took more than {_TIMEOUT_S} s") from None
        finally:
            # Ray's daemons and workers have different process groups, but one session.
            wait_until(lambda: not _kill_session(ray.pid), "Ray's processes have ended")
    if ray.returncode != 0:
        print(said, file=sys.stderr)
        raise RayLacking("Ray Tune failed, see above")
    return said


def _read(notes: Path) -> Times:
    return sorted(tuple(map(float, line.split())) for line in notes.read_text().splitlines())


def _kill_session(session: int) -> int:
    """Kill all running processes of a session; return their number."""
    killed = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
    return killed
