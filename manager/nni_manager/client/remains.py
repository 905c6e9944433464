"""Finds leftovers of an experiment without a manager: processes on this machine, and jobs on its cluster."""

from __future__ import annotations

import asyncio
import socket

from nni_manager.client.experiments import KnownExperiment
from nni_manager.client.stored import StoredDocuments
from nni_manager.config.model import ExperimentSpec
from nni_manager.errors import NniManagerError, RetryableError
from nni_manager.store.errors import StoreUnusable
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.training_service_factory import make_service
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.local.client import end_processes_of, processes_of

# Maximum number of process ids or jobs in a message.
_MAX_NAMED = 5


def why_unreadable(known: KnownExperiment) -> str:
    """The reason why the stored experiment is unreadable; empty if it is readable."""
    error = _read_error(known)
    return known.problem if error is None else str(error)


def is_torn(known: KnownExperiment) -> bool:
    """True if no manager runs and none could start, because the database is corrupt.

    A database that is busy, or on a full disk, is not corrupt: `resume` works later.
    """
    return not (known.is_served or known.problem) and isinstance(_read_error(known), StoreUnusable)


def _read_error(known: KnownExperiment) -> NniManagerError | None:
    try:
        known.stored.status()
    except NniManagerError as error:
        return error
    return None


def processes_left(folder: ExperimentFolder) -> str:
    """The processes of the experiment's trials on this machine, as a clause; empty: none. Needs no database."""
    pids = processes_of(folder.workspace)
    return f"{_counted('process', pids)} of its trials run" if pids else ""


def end_processes(known: KnownExperiment) -> None:
    """Kill the processes on this machine of an unreadable experiment, for which no manager can start.

    Raises:
        RetryableError: always.
    """
    name, pids = known.experiment_id, end_processes_of(known.folder.workspace)
    done = (
        f"killed {_counted('process', pids)} of its trials"
        if pids
        else "none of its trials runs on this machine"
    )
    raise RetryableError(
        f"cannot record that experiment {name} was stopped ({why_unreadable(known)}); {done}. If it has jobs "
        f"on a cluster, their names start with nni_exp_{name}: remove these jobs"
    )


def remains_of(folder: ExperimentFolder) -> str:
    """The leftovers of an experiment, as a clause of a sentence; empty: none. An unreachable cluster counts as a leftover.

    Raises:
        NniManagerError: the experiment is unreadable.
    """
    if left := processes_left(folder):
        return left
    stored = StoredDocuments(folder)
    config = stored.config()
    live, _ = stored.read(StoreReader.jobs)
    if config.pai is None and config.kubernetes is None:
        holder = folder.lease_holder()
        if holder is None or holder.host == socket.gethostname():
            return ""  # a job on this machine is a process
        return f"its processes on {holder.host} cannot be listed from this machine"
    try:
        jobs = asyncio.run(_running(config, folder, [job.job_id for job in live])) if live else []
    except NniManagerError as error:
        return f"its cluster does not report whether its jobs run ({error})"
    return f"{_counted('job', jobs)} on its cluster may run" if jobs else ""


async def _running(config: ExperimentSpec, folder: ExperimentFolder, job_ids: list[str]) -> list[str]:
    service = make_service(config, folder)(lambda _: None)
    try:
        return [each for each in job_ids if await service.adopt(each) is JobPresence.RUNNING]
    finally:
        await service.close()


def _counted(what: str, which: list[str] | list[int]) -> str:
    named = ", ".join(map(str, which[:_MAX_NAMED])) + (", ..." if len(which) > _MAX_NAMED else "")
    plural = "" if len(which) == 1 else "es" if what.endswith("s") else "s"
    return f"{len(which)} {what}{plural} ({named})"
