"""Warning events: the newest event of each object of an experiment, while the cluster stores the event.

No status contains some reasons of a pending pod: a failed mount, or a quota that keeps an operator from creating pods.

Source: Kubernetes core/v1 Event, its supported field selectors, and how recorders of client-go fill it in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.pods import reason_and_message

FIELDS = "type=Warning"
"""The field selector of warning events."""
# A scheduler event that is outdated once the pod has a node.
_NO_NODE = "FailedScheduling"
_MAX_CHARS = 500


class WarningEventCache:
    """The warnings of one experiment. Objects are identified by name, which starts with the name of their job.

    `concerns` is thread-safe.
    """

    def __init__(self, experiment_id: str) -> None:
        self._id = experiment_id.lower()
        self._newest: dict[str, Document] = {}
        """By object name and each of its prefixes: `job`, `job-worker`, `job-worker-0`."""

    def concerns(self, event: Document) -> bool:
        """True if the event's object has the experiment's id in its name."""
        return self._id in _about(event).lower()

    def take(self, event: Document) -> None:
        """Add a new or repeated event."""
        for name in self._names(_about(event)):
            if (known := self._newest.get(name)) is None or _at(known) <= _at(event):
                self._newest[name] = event

    def drop(self, event: Document) -> None:
        """Remove an event that the cluster has deleted."""
        for name in self._names(_about(event)):
            if name in self._newest and self._newest[name]["metadata"]["uid"] == event["metadata"]["uid"]:
                del self._newest[name]

    def forget(self, name: str) -> None:
        """Remove the events of a job that has ended."""
        for each in [each for each in self._newest if each == name or each.startswith(f"{name}-")]:
            del self._newest[each]

    def of(self, name: str, *, has_node: bool = False) -> str:
        """Returns the newest warning of this job or pod, for people; empty if there is none. `has_node`: the pod has a node."""
        event = self._newest.get(name)
        if event is None or (has_node and event.get("reason") == _NO_NODE):
            return ""
        return " ".join(reason_and_message(event).split())[:_MAX_CHARS]

    def _names(self, name: str) -> Iterator[str]:
        while self._id in name.lower():
            yield name
            name = name.rpartition("-")[0]


def _about(event: Document) -> str:
    return str((event.get("involvedObject") or {}).get("name", ""))


def _at(event: Document) -> str:
    """Returns the time of the last occurrence, as text that sorts by time."""
    series: dict[str, Any] = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp", "")
    )
