"""Ends the processes that a job has left on this machine, where no container ends them.

The guard of a killed keeper stores the sessions of the trial, so the guard gets time to end them. Remaining processes are found
by environment, by ancestry, and by the session of a found process.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from functools import partial

from trial_keeper import processes
from trial_keeper.errors import SettingsInvalid
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.workspace import MARKER, Workspace

logger = logging.getLogger(__name__)

# Within this time after SIGCONT, a frozen keeper ends its trial.
_WAKES_TIMEOUT_S = 2.0
Predicate = Callable[[dict[str, str]], bool]
"""A test of a process's environment."""

# A guard ends within milliseconds. One that takes longer is stopped, or waits for a process that hangs in the kernel: kill it.
_MAX_GUARD_S = 5.0
_SCAN_INTERVAL_S = 0.5
# In this time after its keeper, a guard that nobody has stopped has ended.
_GUARD_EXIT_S = 0.5


def reap_orphans(is_leftover: Predicate, is_guard: Predicate = lambda _: False) -> None:
    """Kill these processes and their descendants, and wait until they and their guards have ended.

    `is_guard`: a guard of a keeper that has ended; it is killed only if it takes long. Processes that cannot be ended, because
    they belong to another user or hang in the kernel, are logged.
    """
    began_s = time.monotonic()
    guards: set[int] = set()

    def find() -> set[int]:
        guards.clear()
        leftovers = set()
        for pid in processes.all_pids():
            environ = processes.environ_of(pid)
            if is_guard(environ):
                guards.add(pid)
            elif is_leftover(environ):
                leftovers.add(pid)
        found = processes.families(leftovers) - guards
        return found if time.monotonic() < began_s + _MAX_GUARD_S else found | guards

    while True:
        processes.end_all(find)
        left = [pid for pid in find() | guards if not processes.is_dead(pid)]
        if not left:
            return
        if time.monotonic() > began_s + processes.MAX_DEATH_S:
            logger.warning("cannot end processes %s; end them as their user", sorted(left))
            return
        processes.wait_for_ends(left, time.monotonic() + _SCAN_INTERVAL_S)


def kill_keeper(pid: int, workspace: Workspace, job_id: str) -> None:
    """Kill a keeper that ignores SIGTERM, with its descendants, its trial's sessions, and its guard. Blocks for some seconds.

    While the keeper lives, everything it started is its descendant.
    """
    keeper = processes.ProcessIdentity.of(pid)
    processes.wait_for_ends([pid], time.monotonic() + _WAKES_TIMEOUT_S)
    if keeper is not None and keeper.is_alive:
        sessions = {processes.session_of(each) for each in (pid, *processes.descendants((pid,)))} - {None}
        # The keeper is killed last: orphans that it adopted would lose their last known ancestor.
        processes.end_below(pid)
        processes.end_all(
            lambda: [each for each in processes.all_pids() if processes.session_of(each) in sessions]
        )
    reap_orphans(partial(is_keeper_of, workspace, job_id))


def reap_job(workspace: Workspace, job_id: str, trial_ids: Collection[str]) -> None:
    """Kill the remaining processes of the trials of a job, and of its killed keeper, and wait until they have ended."""
    folders = tuple(str(workspace.trial(trial_id).path) + os.sep for trial_id in trial_ids)
    warm = workspace.warm_marker(job_id)

    def is_of_trial(environ: dict[str, str]) -> bool:
        marker = environ.get(MARKER, "")
        return marker == warm or marker.startswith(folders)

    is_guard = partial(is_keeper_of, workspace, job_id)
    # A stopped guard gets SIGCONT: it also knows processes by their sessions, which `reap_orphans` does not.
    for pid in processes.pids_where(is_guard):
        processes.is_sent(pid, signal.SIGCONT)
    reap_orphans(is_of_trial, is_guard)


def is_keeper_of(workspace: Workspace, job_id: str, environ: dict[str, str]) -> bool:
    """True for the initial environment of a keeper of this job, or of its guard."""
    settings = settings_in(environ)
    return settings is not None and settings.job_id == job_id and settings.workspace == str(workspace.root)


def processes_of(workspace: Workspace) -> list[int]:
    """Returns the pids of the workspace's experiment on this machine: keepers, and processes that trials started."""
    return processes.pids_where(partial(_is_of, workspace))


def end_processes_of(workspace: Workspace) -> list[int]:
    """Kill the experiment's processes without grace. Returns the pids found, without guards, which end with their keepers."""
    processes.wait_for_ends(processes_of(workspace), time.monotonic() + _GUARD_EXIT_S)
    found = processes_of(workspace)
    if found:
        reap_orphans(partial(_is_of, workspace))
    return found


def _is_of(workspace: Workspace, environ: dict[str, str]) -> bool:
    if environ.get(MARKER, "").startswith(str(workspace.root) + os.sep):
        return True
    settings = settings_in(environ)
    return settings is not None and settings.workspace == str(workspace.root)


def settings_in(environ: dict[str, str]) -> KeeperSettings | None:
    """A keeper's settings in the environment of a process; None if there are none."""
    with contextlib.suppress(SettingsInvalid):
        return KeeperSettings.from_environ(environ)
    return None
