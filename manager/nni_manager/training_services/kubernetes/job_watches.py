"""The watches of one experiment: its jobs' resources and pods, Kubernetes' warnings, and the scheduler's preemptions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from nni_manager.training_services.kubernetes import render
from nni_manager.training_services.kubernetes.api import Document, Kubernetes
from nni_manager.training_services.kubernetes.resources import EVENTS, PODS, Resource
from nni_manager.training_services.kubernetes.watch import Change, Watch

_WARNINGS = "type=Warning"
# Of the scheduler, about preempted pods: older clusters set no condition.
_PREEMPTIONS = "reason=Preempted"

Take = Callable[[Change], None]


def job_watches(
    cluster: Kubernetes,
    jobs: Resource,
    namespace: str,
    experiment_id: str,
    concerns: Callable[[Document], bool],
    takes: tuple[Take, Take, Take, Take],
) -> list[Watch]:
    """The watches, which are not started yet. `takes` receive the changes of resources, pods, warnings and preemptions.

    They are called on the running event loop. `concerns`: True for an event about the experiment; called on other threads.
    """
    posts = [partial(_post, asyncio.get_running_loop(), take) for take in takes]
    selector = render.selector_of(experiment_id)
    found = [
        Watch(cluster, resource, namespace, selector, post)
        for resource, post in zip((jobs, PODS), posts[:2], strict=True)
    ]
    # Events do not carry the labels of their objects.
    return found + [
        Watch(cluster, EVENTS, namespace, "", post, fields=fields, concerns=concerns, is_optional=True)
        for fields, post in zip((_WARNINGS, _PREEMPTIONS), posts[2:], strict=True)
    ]


def _post(loop: asyncio.AbstractEventLoop, take: Take, change: Change) -> None:
    # A closed event loop accepts no more calls.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(take, change)
