"""Trials of Ray Tune and of Syne Tune for comparison, with the versions that `make peers` installs. All their processes are
killed afterwards.
"""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
from real_experiment import wait_until

Times = list[tuple[float, ...]]

_HERE = Path(__file__).parent
_INSTALLED = _HERE.parents[1] / ".venv/peers"
# The timeout leaves time for Ray Tune, which runs two experiments of 200 trials for each of two trial lengths. They take 40 s on
# a machine where Python starts in 50 ms.
_TIMEOUT_S = 300
# With this interval, Syne Tune polls its trials almost continuously, so its results hardly depend on the interval.
_SHORTEST_POLL_S = 0.001


class PeerLacking(Exception):
    """A peer cannot be measured here; the message is shown in the table."""


@dataclass(frozen=True)
class Peer:
    """A tool with an environment of its own, `folder`. `settings`: the prefixes of its environment variables."""

    name: str
    folder: str
    settings: tuple[str, ...]


RAY_TUNE = Peer("Ray Tune", "ray", ("RAY_", "TUNE_"))
SYNE_TUNE = Peer("Syne Tune", "syne-tune", ("SYNETUNE_", "SYNE_"))


def ray_times(folder: Path, turns: int, *lengths_ms: int) -> list[tuple[Times, Times]]:
    """For each length, the start and end times of trials, in order: with Ray Tune's defaults, and without its
    loggers.

    `folder`: receives all files; its path must be short, since it contains sockets.

    Raises:
        PeerLacking: it is not installed, or fails.
    """
    output_of(RAY_TUNE, folder, _HERE / "ray_trials.py", folder, f"{turns}", *map(str, lengths_ms))
    return [
        (_read(folder / f"recording-{length_ms}"), _read(folder / f"unrecorded-{length_ms}"))
        for length_ms in lengths_ms
    ]


def syne_times(folder: Path, turns: int, *, has_default_poll: bool) -> Times:
    """The start and end times of Syne Tune's trials, in order: with its default poll, or with the shortest.

    `folder`: receives all files.

    Raises:
        PeerLacking: it is not installed, or fails.
    """
    poll = () if has_default_poll else (f"{_SHORTEST_POLL_S}",)
    output_of(SYNE_TUNE, folder, _HERE / "syne_trials.py", folder, f"{turns}", *poll)
    # A complete output of a trial has three lines: the start time, the result as Syne Tune prints it, and the end time.
    shown = [path.read_text().splitlines() for path in folder.glob("results/*/std.out")]
    ended = [(float(lines[0]), float(lines[-1])) for lines in shown if len(lines) == 3]
    return sorted(ended)[:turns]


def output_of(peer: Peer, folder: Path, *arguments: str | Path) -> str:
    """Run a script in the Python that has the peer; return its stdout and stderr.

    `folder`: the working directory, and the home.

    Raises:
        PeerLacking: the peer is not installed, or fails.
    """
    installed = _INSTALLED / peer.folder
    if not (installed / ".installed").exists():
        raise PeerLacking(f"{peer.name} is not installed: make peers")
    # Remove variables from the environment, so that the peer runs with its defaults and without the modules of trial-keeper.
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", *peer.settings))
    }
    with subprocess.Popen(
        [installed / "bin/python", *arguments],
        cwd=folder,
        env={**kept, "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as running:
        try:
            said, _ = running.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise PeerLacking(f"{peer.name} took more than {_TIMEOUT_S} s") from None
        finally:
            # Ray's daemons and workers have different process groups but the same session, so all processes of the session are
            # killed.
            wait_until(lambda: not _kill_session(running.pid), f"the processes of {peer.name} have ended")
    if running.returncode != 0:
        print(said, file=sys.stderr)
        raise PeerLacking(f"{peer.name} failed, see above")
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
