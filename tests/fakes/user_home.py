"""A separate home for a test, and the processes that run in it or that remain after the test.

Nothing here is a fake; several tests share it. The folder of a test lies in the test's home.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from deadlines import scaled_s

BIN = Path(sys.executable).parent


def processes_of(folder: Path) -> list[psutil.Process]:
    """Managers, keepers and trials of this home. Their variable HOME is the path of the home."""
    home = f"{folder.parent}"
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == home and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def processes_with(folder: Path, module: str) -> list[psutil.Process]:
    """The processes of this home that run a module by `python -m`, the latest last."""
    found = []
    for process in processes_of(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[2:3] == [module]:
                found.append((process.create_time(), process.pid, process))
    return [process for *_, process in sorted(found)]


def left_in(folder: Path) -> list[psutil.Process]:
    """The processes of this home that still run after a short wait. The wait is necessary, because a keeper exits shortly after
    its manager.
    """
    for process in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process.pid)
            select.select([descriptor], [], [], 10)
            os.close(descriptor)
    return processes_of(folder)


def environ_of(folder: Path) -> dict[str, str]:
    """The environment of this user's programs."""
    # Omit the settings and the terminal width of the person who runs the tests, so that test results do not depend on them.
    ours = ("NNI_", "TRIAL_KEEPER_", "COLUMNS")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return outside | {
        "HOME": str(folder.parent),
        "XDG_STATE_HOME": str(folder.parent / "state"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }


def run_nnictl(folder: Path, variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run nnictl in this folder and wait until it exits. `variables`: additional environment variables."""
    return subprocess.run(
        [BIN / "nnictl", *arguments],
        cwd=folder,
        env=environ_of(folder) | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled_s(240),
        check=False,
    )


def metrics_of(nnictl: Callable[..., Any], experiment_id: str) -> list[tuple[Any, ...]]:
    """The parameters, the intermediate results and the result of each trial, independent of the order of the trials."""
    done = nnictl("experiment", "export", experiment_id, "--type", "json", "--intermediate")
    found = [(each["parameter"], each["intermediate"], each["value"]) for each in json.loads(done.stdout)]
    assert all(intermediate for _, intermediate, _ in found)
    return sorted(found, key=str)
