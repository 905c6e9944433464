"""The problem that the jobs of an experiment have on Kubernetes, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nni_manager.training_services.kubernetes.job_states import KubernetesJob
from nni_manager.training_services.kubernetes.observed import ObservedObjects

# After this time, a user who watches a pending trial should see the reason.
_MAX_QUEUE_S = 60.0


def job_problem(
    jobs: Sequence[KubernetesJob],
    observed: ObservedObjects,
    pending_reason: Callable[[KubernetesJob], str],
    now_s: float,
) -> str:
    """Which nodes are not ready, or what the longest pending job waits for; empty if there is no problem. `now_s`: monotonic."""
    running = [job for job in jobs if not job.is_waiting]
    if endangered := list(filter(None, (observed.node_warning(job.job_id) for job in running))):
        return f"{endangered[0]}; {len(endangered)} of {len(jobs)} jobs run on nodes that are not ready"
    waiting = sorted((job for job in jobs if job.is_waiting), key=lambda job: job.waits_since_s)
    for job in waiting:
        if why := pending_reason(job):
            return (
                f"Kubernetes has not started {len(waiting)} of {len(jobs)} jobs; {job.name} is pending: {why}"
            )
    if not waiting or now_s - waiting[0].waits_since_s < _MAX_QUEUE_S:
        return ""
    return (
        f"{observed.title} has not started {len(waiting)} of {len(jobs)} jobs, {waiting[0].name} the longest; "
        f"find the reason with {observed.how_to_find_reasons()}"
    )
