"""The end of what each task of a job has written, for people."""

from __future__ import annotations

import time

from nni_manager.errors import RetryableError
from nni_manager.training_services.openpai.connection import JobNotOnCluster
from nni_manager.training_services.openpai.rest import JobStatus, OpenPai, TaskStatus
from nni_manager.training_services.retry_policy import ClientRetryPolicy

# A person waits. A node that is down does not answer, so a job with many tasks must not wait for each.
_TIMEOUT_S = 10.0
_ONCE = ClientRetryPolicy(tries=1, connect_within_s=2.0, answer_within_s=5.0)
_MAX_TASKS = 20
_MAX_BYTES = 16_384


def ends_of_logs(cluster: OpenPai, name: str) -> dict[str, str]:
    """Returns the last 16 kB of each task of the job, by the task's name; of at most 20 tasks.

    Raises:
        UserError: the cluster has no such job, or refuses the request.
        RetryableError: the cluster cannot be reached.
    """
    cluster, deadline_s = cluster.within(_ONCE), time.monotonic() + _TIMEOUT_S
    job = cluster.job(name)
    return {task.name: _end_of_log(cluster, job, task, deadline_s) for task in job.tasks[:_MAX_TASKS]}


def _end_of_log(cluster: OpenPai, job: JobStatus, task: TaskStatus, deadline_s: float) -> str:
    if time.monotonic() > deadline_s:
        return f"(not read: the other tasks took {_TIMEOUT_S:g} s)"
    try:
        locations = cluster.log_locations(job, task, is_tail=True)
        return cluster.log_tail(locations["all"], _MAX_BYTES, deadline_s).decode(errors="replace")
    except (JobNotOnCluster, KeyError):
        return "(no log yet)"
    except RetryableError as error:  # the node of one task may be down
        return f"({error})"
