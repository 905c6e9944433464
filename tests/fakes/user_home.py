"""The home of a user of a test's own: what runs in it, and what is left of that.

Nothing here is a fake; it is kept with them because several tests share it. A test's folder lies in its home.
"""

import contextlib
import os
import select
import sys
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent


def processes_of(folder: Path) -> list[psutil.Process]:
    """Managers, keepers and trials of this home, all of which have its name in their environment."""
    home = f"{folder.parent}"
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == home and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def left_in(folder: Path) -> list[psutil.Process]:
    """What still runs, after those that are just ending had their time: a keeper outlives its manager by a moment."""
    for process in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process.pid)
            select.select([descriptor], [], [], 10)
            os.close(descriptor)
    return processes_of(folder)


def environ_of(folder: Path) -> dict[str, str]:
    """What programs of this user have in their environment."""
    # The width of whoever runs the tests is none of what is tested.
    ours = ("NNI_", "TRIAL_KEEPER_", "COLUMNS")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return outside | {
        "HOME": str(folder.parent),
        "XDG_STATE_HOME": str(folder.parent / "state"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
