"""Find those processes of a site that faults may affect."""

import contextlib
import os

import psutil
from fault_site import processes_of


def running_keepers(site: str) -> list[tuple[str, psutil.Process]]:
    """The running keepers of a site, with their jobs, oldest first."""
    return _keepers_or_guards(site, are_guards=False)


def running_guards(site: str) -> list[tuple[str, psutil.Process]]:
    """The running guards of keepers, with their jobs."""
    return _keepers_or_guards(site, are_guards=True)


def running_trials(site: str) -> list[tuple[str, psutil.Process]]:
    """The running processes of training code, with their trials."""
    return _running(site, "NNI_TRIAL_JOB_ID", "train.py")


def _keepers_or_guards(site: str, *, are_guards: bool) -> list[tuple[str, psutil.Process]]:
    found = _running(site, "TRIAL_KEEPER_JOB_ID", "trial_keeper")
    pids = {process.pid for _, process in found}
    # Until it calls exec, a child of a keeper looks like a keeper. So processes whose parent is in the list are left out. A guard
    # is not a child of its keeper.
    return [
        (job_id, process)
        for job_id, process in found
        if _is_guard(process) == are_guards and _parent_of(process) not in pids
    ]


def _running(site: str, variable: str, command: str) -> list[tuple[str, psutil.Process]]:
    found = []
    for process in processes_of(site):
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ()
            if variable in environ and process.cmdline()[-1:] == [command]:
                found.append((environ[variable], process))
    return sorted(found, key=lambda each: each[1].pid)


def _is_guard(process: psutil.Process) -> bool:
    """True for a guard. Its stdin is a pipe that reports the end of its keeper; the stdin of a keeper is no pipe."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process.pid}/fd/0").startswith("pipe:")
    return False


def _parent_of(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0
