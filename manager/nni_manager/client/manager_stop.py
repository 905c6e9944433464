"""Stops the process of a manager or of a view, and waits until it has exited."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from nni_manager.client import hub_folder, output
from nni_manager.client.experiments import KnownExperiment, known_experiment
from nni_manager.client.manager_client import ConnectionClosed, ManagerClient, ManagerUnresponsive
from nni_manager.client.manager_process import READY_TIMEOUT_S, reap
from nni_manager.domain.stop_escalation import MAX_STOP_S
from nni_manager.errors import NniManagerError, RetryableError, UserError
from nni_manager.store.folders import ExperimentFolder, ManagerProcess
from nni_manager.store.registry import Registry
from trial_keeper.processes import ProcessIdentity, open_pidfd, terminate

_POLL_S = 0.05
_LEFT_TIMEOUT_S = 10.0
_REPORT_INTERVAL_S = 5.0
# A manager with leftovers to report waits longer than this before it exits.
_SUMMARY_INTERVAL_S = 0.5


def when_started(known: KnownExperiment) -> KnownExperiment:
    """The experiment once no manager of it starts: only a manager that is ready can be stopped."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while known.manager_is_starting() and time.monotonic() < deadline_s:
        time.sleep(_SUMMARY_INTERVAL_S)
        known = known_experiment(known.folder) or known
    return known


def stop_experiment(known: KnownExperiment) -> None:
    """Stop a running experiment: cancel its trials, keep its data, and wait until its manager has exited.

    The number of unfinished trials, or the current storage problem, is printed whenever it changes.

    Raises:
        RetryableError: some jobs may still run; the message names each with the command that removes it.
        RetryableError: nothing runs, but the stop is not in the database.
    """
    process = known.manager
    if process is None:
        raise UserError(f"cannot stop experiment {known.experiment_id}: it does not run; nothing to do")
    client = ManagerClient(known.experiment_id, process)
    _wake(known, process)
    try:
        _request_stop(client)
    except ManagerUnresponsive:
        if known.running_process() or not _is_recorded(known):
            _end_without_manager(known, "did not answer")
        return
    progress = _StopProgress(client)
    if not _wait_until_gone(known, MAX_STOP_S, progress.poll):
        _end_without_manager(known, f"did not end within {MAX_STOP_S:.0f} s")
        return
    reap()
    if progress.leftovers:
        raise RetryableError("; ".join(progress.leftovers))
    if not known.folder.path.exists():
        Registry.of_user().remove(known.experiment_id)
    elif progress.problem and not _is_recorded(known):
        raise RetryableError(
            f"cannot record that experiment {known.experiment_id} was stopped, although all of its processes have ended: "
            f"{progress.problem}; fix that problem, then `nnictl resume {known.experiment_id}` continues from the stored data"
        )


def _end_without_manager(known: KnownExperiment, why: str) -> None:
    # Imported here: it needs the clients of all platforms.
    from nni_manager.client.remains import end_without_manager

    output.warning(
        f"the manager of experiment {known.experiment_id} {why}; terminating it, and ending its jobs"
    )
    leave(known)
    output.info(end_without_manager(known))


def _wake(known: KnownExperiment, process: ManagerProcess) -> None:
    """Send SIGCONT: a manager that a debugger or a batch system has stopped never answers."""
    descriptor = _descriptor_of(process, known.folder, is_view=False)
    if descriptor is not None:
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        finally:
            os.close(descriptor)


def _is_recorded(known: KnownExperiment) -> bool:
    try:
        return bool(known.stored.status()["isTerminal"])
    except NniManagerError:
        return False  # a database on a full disk may be unreadable


def _request_stop(client: ManagerClient) -> None:
    deadline_s = time.monotonic() + _LEFT_TIMEOUT_S
    while True:
        try:
            client.summary()
            client.delete("/experiment")
        except ConnectionClosed:
            # The manager may be at its connection limit. Retry: a signal would leave the trials running.
            if time.monotonic() > deadline_s:
                raise
        else:
            return
        time.sleep(_POLL_S)


def leave(known: KnownExperiment) -> None:
    """Terminate the manager's process. Trials continue, and `resume` finds them.

    Raises:
        RetryableError: the process does not exit.
    """
    process = known.running_process()
    if process is None:
        return
    # Without such a process here, the manager is exiting, or runs on another machine; its pid may belong to any process here.
    if not (_terminate(known, process, is_view=False) or _wait_until_gone(known, _LEFT_TIMEOUT_S)):
        holder = known.folder.lease_holder() or "another process"
        raise RetryableError(
            f"cannot end the manager of experiment {known.experiment_id}: {holder} owns it, which does not run on "
            f"this machine; run `nnictl stop {known.experiment_id}` on that machine"
        )


def end_view(known: KnownExperiment) -> None:
    """Terminate the process that serves a view of the experiment; does nothing if there is none.

    Raises:
        RetryableError: the process does not exit.
    """
    if known.view is not None:
        _terminate(known, known.view, is_view=True)


def _terminate(known: KnownExperiment, process: ManagerProcess, *, is_view: bool) -> bool:
    """Terminate the manager or the view; False if no process of this machine is the given one."""
    descriptor = _descriptor_of(process, known.folder, is_view=is_view)
    if descriptor is not None and not terminate(descriptor, _LEFT_TIMEOUT_S):
        what, safe = (
            ("view", "a view stores no data")
            if is_view
            else ("manager", "no stored data is lost, and `nnictl resume` continues the experiment")
        )
        raise RetryableError(
            f"cannot end the {what} of experiment {known.experiment_id}: process {process.pid} ignores SIGTERM; "
            f"end it with `kill -9 {process.pid}`: {safe}"
        )
    return descriptor is not None


def wait_for_view(known: KnownExperiment) -> None:
    """Block until the process that serves this view has exited."""
    descriptor = None if known.view is None else _descriptor_of(known.view, known.folder, is_view=True)
    if descriptor is not None:
        _wait_for_exit(descriptor)


def _wait_for_exit(descriptor: int, within_s: float | None = None) -> None:
    try:
        select.select([descriptor], [], [], within_s)
    finally:
        os.close(descriptor)


def _descriptor_of(process: ManagerProcess, folder: ExperimentFolder, *, is_view: bool) -> int | None:
    """A pidfd of the process; None if it has exited. Its command line is verified, because the pid may be reused."""
    identity = ProcessIdentity.of(process.pid)
    if identity is None:
        return None
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        arguments = psutil.Process(process.pid).cmdline()
        if str(folder.path) in arguments and bool({"--view", hub_folder.PROGRAM} & {*arguments}) is is_view:
            return identity.open_pidfd()
    return None


def _wait_until_gone(
    known: KnownExperiment, within_s: float, poll: Callable[[], None] = lambda: None
) -> bool:
    process = known.running_process()
    descriptor = None if process is None else open_pidfd(process.pid)
    try:
        deadline_s, has_exited = time.monotonic() + within_s, False
        while known.running_process() is not None:
            if time.monotonic() > deadline_s:
                return False
            poll()
            if descriptor is None or has_exited:
                # The lease counts: another process may still have it.
                time.sleep(_POLL_S)
            else:
                has_exited = bool(select.select([descriptor], [], [], _POLL_S)[0])
        if descriptor is not None:
            # The manager has released its lease, but the interpreter needs a moment to exit.
            select.select([descriptor], [], [], _LEFT_TIMEOUT_S)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


class _StopProgress:
    """Polls a stopping manager until its exit. Keeps the last answer, because an exited manager sends none."""

    def __init__(self, client: ManagerClient) -> None:
        self.leftovers: list[str] = []
        self.problem = ""
        self._client = client
        self._polls_at_s = time.monotonic() + _SUMMARY_INTERVAL_S
        self._reports_at_s = time.monotonic() + _REPORT_INTERVAL_S
        self._reported = ""

    def poll(self) -> None:
        """Poll the manager if the interval has passed, and print changes."""
        now_s = time.monotonic()
        if now_s < self._polls_at_s:
            return
        self._polls_at_s = now_s + _SUMMARY_INTERVAL_S
        try:
            summary = self._client.summary()
        except ManagerUnresponsive:
            return  # the manager is about to exit
        # Managers of older versions do not report leftovers.
        self.leftovers, self.problem = summary.get("leftovers", []), str(summary["problem"])
        if now_s > self._reports_at_s:
            self._reports_at_s = now_s + _REPORT_INTERVAL_S
            waited_for = _waited_for(summary)
            if waited_for != self._reported:
                self._reported = waited_for
                output.info(waited_for)


def _waited_for(summary: Mapping[str, Any]) -> str:
    # A trial is terminal once its end is stored, so a full disk blocks the end of all trials.
    problem = str(summary["problem"])
    if problem:
        return problem.strip().splitlines()[0]
    count = summary["counts"]["RUNNING"] + summary["counts"]["WAITING"]
    return "1 trial has not ended yet" if count == 1 else f"{count} trials have not ended yet"
