"""Finds and ends leftovers of an experiment without a manager: processes on this machine, and jobs on its cluster."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

from nni_manager.client.experiments import KnownExperiment
from nni_manager.client.stored import StoredDocuments
from nni_manager.config.model import ExperimentSpec
from nni_manager.domain.stop_escalation import StopEscalation, StopStage
from nni_manager.errors import NniManagerError, RetryableError
from nni_manager.store import leftover_jobs
from nni_manager.store.errors import StoreUnusable
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.support.leftovers import end_processes_of, processes_of
from nni_manager.training_services.base import JobEnded, JobPresence, TrainingService
from nni_manager.training_services.platform import platform_of
from trial_keeper.timeouts import set_within

# Maximum number of process ids or jobs in a message.
_MAX_NAMED = 5


def why_unreadable(known: KnownExperiment) -> str:
    """The reason why the stored experiment is unreadable; empty if it is readable."""
    return known.problem or str(_read_error(known) or "")


def is_unusable(known: KnownExperiment) -> bool:
    """True if no manager runs and none could start, because the database is corrupt or a file cannot be used.

    A database that is busy, or on a full disk, is not corrupt: `resume` works later.
    """
    return not known.is_served and (bool(known.problem) or isinstance(_read_error(known), StoreUnusable))


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


def end_without_manager(known: KnownExperiment) -> str:
    """Stop the jobs of an experiment whose manager has exited, with grace. Needs no file of its workspace; takes up to 100 s.

    Returns:
        What has ended, for people.

    Raises:
        RetryableError: some jobs may still run, and the message says how to end each; or the experiment is unreadable.
        NniManagerError: its cluster cannot be reached.
    """
    if is_unusable(known):
        _end_processes(known)
    name, folder = known.experiment_id, known.folder
    config, job_ids = known.stored.config(), _jobs_of(folder)
    if holder := _other_machine(config, folder):
        raise RetryableError(
            f"cannot stop experiment {name}: its processes are on {holder}; run `nnictl stop {name}` there"
        )
    with contextlib.ExitStack() as stack:
        # Holding the lease keeps managers from starting. If the lock cannot be opened, no manager holds it.
        with contextlib.suppress(OSError):
            stack.enter_context(folder.owned())
        ended, problems = asyncio.run(_end_jobs(config, folder, job_ids))
        with contextlib.suppress(OSError):  # on a full disk, the message below is all there is
            leftover_jobs.write(folder, problems)
        pids = end_processes_of(folder.workspace)
    if problems:
        raise RetryableError(f"cannot stop all jobs of experiment {name}: {'; '.join(problems.values())}")
    what = [_counted("job", ended)] * bool(ended) + [_counted("process", pids)] * bool(pids)
    done = f"Ended {' and '.join(what)} without a manager" if what else "Nothing of it runs"
    return f"{done}; `nnictl resume {name}` records what its trials reported, and continues the experiment"


async def _end_jobs(
    config: ExperimentSpec, folder: ExperimentFolder, job_ids: list[str]
) -> tuple[list[str], dict[str, str]]:
    """End those of the jobs that run: the ended ones, and a message for each of which the cluster may still have something."""
    if not job_ids:
        return [], {}
    changed, gone, problems = asyncio.Event(), set[str](), dict[str, str]()

    def note_end(job: JobEnded) -> None:
        gone.add(job.job_id)
        changed.set()

    service = platform_of(config).make_service(folder)(note_end)
    stops = StopEscalation(service.grace_s, is_stopping=True)
    try:
        asked = [each for each in job_ids if await _is_asked_to_end(service, each)]
        for job_id in asked:
            stops.stop_asked(job_id, time.monotonic(), ends_job=True)
        while waiting := set(asked) - gone - set(problems):
            assert stops.next_deadline_s is not None, waiting
            await set_within(changed, max(stops.next_deadline_s - time.monotonic(), 0))
            changed.clear()
            for job_id in gone:
                stops.forget(job_id)
            for job_id, _, stage in stops.overdue(time.monotonic()):
                if stage is StopStage.KILLED:
                    await service.kill(job_id)
                else:
                    problems[job_id] = f"remove job {job_id} with `{service.removal_command(job_id)}`"
        await service.settle()
        return [each for each in asked if each in gone], problems | service.leftovers()
    finally:
        await service.close()


async def _is_asked_to_end(service: TrainingService, job_id: str) -> bool:
    if await service.adopt(job_id) is not JobPresence.RUNNING:
        return False
    service.wake(job_id)
    return await service.stop(job_id)


def _end_processes(known: KnownExperiment) -> None:
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
    job_ids = _jobs_of(folder)
    if holder := _other_machine(config, folder):
        return f"its processes on {holder} cannot be listed from this machine"
    if config.cluster.is_this_machine:
        return ""  # a job on this machine is a process
    try:
        jobs = asyncio.run(_remaining(config, folder, job_ids)) if job_ids else []
    except NniManagerError as error:
        return f"its cluster does not report whether its jobs run ({error})"
    return f"{_counted('job', jobs)} may be left on its cluster" if jobs else ""


def has_ended(known: KnownExperiment) -> bool:
    """True if the experiment is terminal and no job of it may be left, such as one of a trial that ran when it failed."""
    return bool(known.stored.status()["isTerminal"]) and not _jobs_of(known.folder)


def _jobs_of(folder: ExperimentFolder) -> list[str]:
    """The jobs that may run, and those that a manager may have left behind."""
    live, _ = StoredDocuments(folder).read(StoreReader.jobs)
    return list(dict.fromkeys([*(job.job_id for job in live), *leftover_jobs.read(folder)]))


def _other_machine(config: ExperimentSpec, folder: ExperimentFolder) -> str:
    """The machine whose processes are the experiment's jobs; empty: this one, or a cluster runs them."""
    holder = folder.lease_holder() if config.cluster.is_this_machine else None
    return "" if holder is None or holder.host == socket.gethostname() else holder.host


async def _remaining(config: ExperimentSpec, folder: ExperimentFolder, job_ids: list[str]) -> list[str]:
    """The jobs that run, and the ended ones that the cluster does not delete."""
    service = platform_of(config).make_service(folder)(lambda _: None)
    try:
        running = [each for each in job_ids if await service.adopt(each) is JobPresence.RUNNING]
        await service.settle()
        return [*running, *service.leftovers()]
    finally:
        await service.close()


def _counted(what: str, which: list[str] | list[int]) -> str:
    named = ", ".join(map(str, which[:_MAX_NAMED])) + (", ..." if len(which) > _MAX_NAMED else "")
    plural = "" if len(which) == 1 else "es" if what.endswith("s") else "s"
    return f"{len(which)} {what}{plural} ({named})"
