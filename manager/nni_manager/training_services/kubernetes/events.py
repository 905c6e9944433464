"""What a cluster warns of: the newest warning of each object of an experiment, for as long as the cluster itself keeps it.

Some of what keeps a pod from starting is in no status: a mount that fails, or a quota that lets an operator make no pod.

Source: Kubernetes core/v1 Event, its supported field selectors, and how recorders of client-go fill it in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nni_manager.training_services.kubernetes.api import Document

FIELDS = "type=Warning"
"""What chooses warnings among events."""
# Of the scheduler: not true any more once a node has the pod.
_NO_NODE = "FailedScheduling"
_LONGEST = 500


class Warnings:
    """Those that concern one experiment. Objects are known by their names, which begin with that of their job.

    `concerns` may be asked from any thread.
    """

    def __init__(self, experiment_id: str) -> None:
        self._id = experiment_id.lower()
        self._newest: dict[str, Document] = {}
        """By the name of an object, and by every name that this one is made of: `job`, `job-worker`, `job-worker-0`."""

    def concerns(self, event: Document) -> bool:
        """Whether it is of an object of this experiment, which has its id in its name."""
        return self._id in _about(event).lower()

    def take(self, event: Document) -> None:
        """One that is new, or has happened again."""
        for name in self._names(_about(event)):
            if (known := self._newest.get(name)) is None or _at(known) <= _at(event):
                self._newest[name] = event

    def drop(self, event: Document) -> None:
        """The cluster has forgotten it."""
        for name in self._names(_about(event)):
            if name in self._newest and self._newest[name]["metadata"]["uid"] == event["metadata"]["uid"]:
                del self._newest[name]

    def forget(self, name: str) -> None:
        """The job of this name is over."""
        for each in [each for each in self._newest if each == name or each.startswith(f"{name}-")]:
            del self._newest[each]

    def of(self, name: str, *, has_node: bool = False) -> str:
        """The newest of this job or pod, for people; empty where there is none. `has_node`: its pod is on a node."""
        event = self._newest.get(name)
        if event is None or (has_node and event.get("reason") == _NO_NODE):
            return ""
        told = ": ".join(str(event[key]) for key in ("reason", "message") if event.get(key))
        return " ".join(told.split())[:_LONGEST]

    def _names(self, name: str) -> Iterator[str]:
        while self._id in name.lower():
            yield name
            name = name.rpartition("-")[0]


def _about(event: Document) -> str:
    return str((event.get("involvedObject") or {}).get("name", ""))


def _at(event: Document) -> str:
    """When it happened last; as text, which is in the order of time."""
    series: dict[str, Any] = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp", "")
    )
