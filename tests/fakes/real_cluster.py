"""Real local OpenPAI clusters for tests, and the processes that they have started."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from openpai_jobs import WORKER, a_job, text_of

from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.local_openpai.logs import read_log
from nni_manager.local_openpai.settings import ClusterSettings
from nni_manager.local_openpai.store import JobStore

LARGE = {"default": ResourceCounts(cpu=64, memory_mb=1_000_000, gpu=4)}


def settings(folder, **changes):
    """Settings of a cluster with ample resources and short delays."""
    return ClusterSettings(
        **{"state_dir": folder / "state", "virtual_clusters": LARGE, "grace_s": 5.0, **changes}
    )


def commands(*lines, instances=1, name="job", **top):
    """The text of a job with one role, `worker`, that runs these lines."""
    return text_of(
        a_job(((*WORKER, "commands"), list(lines)), ((*WORKER, "instances"), instances), name=name, **top)
    ).encode()


def roles(name="job", top=None, **by_name):
    """The text of a job with these roles. Each value is a list of commands, or a dict of fields that replace defaults."""
    base = a_job()["taskRoles"]["worker"]
    made = {
        role: {**base, "instances": 1, **(it if isinstance(it, dict) else {"commands": it})}
        for role, it in by_name.items()
    }
    return text_of(a_job(name=name, taskRoles=made, **(top or {}))).encode()


@contextlib.asynccontextmanager
async def running(cluster_settings):
    """A started cluster; at the end its jobs are stopped and it is closed."""
    cluster = Cluster(cluster_settings)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()


async def over(cluster, name="job", user="alice"):
    """Wait until the job has ended; return its detail."""
    while (detail := await cluster.read(JobStore.detail, user, name)).job.completed_at_s is None:
        await asyncio.sleep(0.01)
    return detail


async def run(cluster, text, user="alice"):
    """Submit a job and wait until it has ended; return its detail."""
    return await over(cluster, await cluster.submit(user, text), user)


async def summary(cluster, name="job", user="alice"):
    """The job's entry in the list of jobs."""
    return await cluster.read(JobStore.summary, user, name)


async def stop(cluster, name="job"):
    """Request the end of a job."""
    await cluster.stop(await summary(cluster, name))


async def until(is_true):
    """Return once it is true."""
    while not await is_true():
        await asyncio.sleep(0.01)


async def log(cluster, name="job", role="worker", index=0, file="stdout", attempt=0, task_attempt=0):
    """A whole log as text."""
    logs = await cluster.logs_of("alice", name, attempt, role, index, task_attempt)
    return read_log(logs, file, 0, 10**7).data.decode()


def states(detail):
    """The states of the tasks by role."""
    return {tasks[0].role: [task.state.value for task in tasks] for tasks in detail.tasks.values()}


def processes_of(folder):
    """The pids of all processes of clusters below this folder, supervisors included."""
    mark = os.fsencode(f"{folder}/")
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            process = Path("/proc", name)
            stat = (process / "stat").read_text().rpartition(")")[2].split()[0]
            environ = (process / "environ").read_bytes()
            is_task = b"FC_POD_UID=" in environ and mark in environ
            is_supervisor = os.fsencode(os.readlink(process / "cwd")).startswith(mark)
            if (is_task or is_supervisor) and stat not in "ZX":
                found.append(int(name))
    return found


def end_processes_of(folder):
    """Kill all processes of clusters below this folder."""
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
