"""The state machine of a job on Kubernetes: which calls, and which changes from the watches, lead to its end.

A submit, the watches, and direct reads and deletes report on the same resource from several threads, in any order. While a
submit is in progress its answer decides, so changes from the watches only leave a mark (UNLISTED, GONE); the latest document is
applied after the answer. A stop request does not change the state: the job may still start or complete.
"""

from dataclasses import dataclass
from enum import Enum


class KubernetesJobState(Enum):
    """The state of a job of this experiment, by what is known of its resource."""

    REGISTERED = "no submit has succeeded; a failed one may have created the resource"
    SUBMITTING = "a submit is in progress"
    UNLISTED = "a submit is in progress, and a list has not shown the resource"
    GONE = "a submit is in progress, and the resource was deleted meanwhile"
    ACCEPTED = "the resource was created or adopted, and no watch has shown it"
    PENDING = "a watch has shown the resource, and no task has started"
    RUNNING = "a task has started"
    ENDING = "the resource is terminal or deleted; the end of the job is not reported yet"
    ENDED = "the end was reported, or the cluster has refused the job"


class KubernetesJobEvent(Enum):
    """What can happen to a job."""

    SUBMIT_STARTED = "submit started"
    SUBMITTED = "submitted"
    SUBMIT_FAILED = "submit failed, and may be repeated"
    REFUSED = "submit refused permanently"
    CONFIRMED = "adopted, read, or its delete accepted: the resource exists"
    SHOWN = "a watch has shown the resource, not started"
    STARTED = "a watch has shown the resource, started"
    POD_STARTED = "a watch has shown a started pod"
    COMPLETED = "a watch has shown the terminal resource"
    TASKS_ENDED = "the tasks have ended, and only sidecars keep the pods running"
    DELETED = "a watch has shown the deletion"
    LISTED = "a list of all resources is complete"
    NOT_FOUND = "a read has not found the resource"
    NOTHING_DELETED = "a delete has not found the resource"
    REPORTED = "end reported"


class FollowUp(Enum):
    """What a transition requires."""

    REPORT_OUTCOME = "wait for the pods' messages, report the end, and delete the resource"
    REPORT_LOSS = "report that the resource is gone"
    REPORT_PENDING_LOSS = (
        "wait until the pods show whether a task has started, and report that the resource is gone"
    )
    VERIFY = "read the resource directly: it may be newer than the list"
    VERIFY_SOON = "read the resource directly unless a watch shows it first"


_S, _E = KubernetesJobState, KubernetesJobEvent
_SUBMITS = (_S.SUBMITTING, _S.UNLISTED, _S.GONE)
_STARTABLE = (_S.ACCEPTED, _S.PENDING, _S.RUNNING)
_CHANGES_BY_EVENT: dict[KubernetesJobEvent, dict[KubernetesJobState, tuple[KubernetesJobState, ...]]] = {
    _E.SUBMIT_STARTED: {_S.SUBMITTING: (_S.REGISTERED, *_STARTABLE)},
    # In GONE, the submit may have created another resource.
    _E.SUBMITTED: {_S.ACCEPTED: _SUBMITS},
    _E.SUBMIT_FAILED: {_S.REGISTERED: _SUBMITS},
    _E.REFUSED: {_S.ENDED: (*_SUBMITS, _S.ENDING)},
    _E.CONFIRMED: {_S.ACCEPTED: (_S.REGISTERED,)},
    _E.SHOWN: {_S.PENDING: (_S.ACCEPTED,)},
    _E.STARTED: {_S.RUNNING: (_S.ACCEPTED, _S.PENDING)},
    _E.POD_STARTED: {_S.RUNNING: (_S.PENDING,)},
    _E.COMPLETED: {_S.ENDING: (_S.REGISTERED, *_STARTABLE)},
    _E.TASKS_ENDED: {_S.ENDING: (_S.RUNNING,)},
    _E.DELETED: {
        _S.ENDED: (_S.REGISTERED, _S.RUNNING),
        _S.ENDING: (_S.ACCEPTED, _S.PENDING),  # the watch of pods may lag behind
        _S.GONE: (_S.SUBMITTING, _S.UNLISTED),
    },
    _E.LISTED: {_S.UNLISTED: (_S.SUBMITTING,)},  # deleted before the list, or created after it
    _E.NOT_FOUND: {_S.ENDED: (_S.REGISTERED, _S.ACCEPTED)},
    _E.NOTHING_DELETED: {_S.ENDED: (_S.REGISTERED, *_SUBMITS, *_STARTABLE)},
    _E.REPORTED: {_S.ENDED: (_S.ENDING,)},
}
"""The new state for each event, and the states in which the event leads to it."""
CHANGES: dict[tuple[KubernetesJobState, KubernetesJobEvent], KubernetesJobState] = {
    (before, event): after
    for event, changes in _CHANGES_BY_EVENT.items()
    for after, befores in changes.items()
    for before in befores
}
_WHILE_SUBMITTING = (_E.CONFIRMED, _E.SHOWN, _E.STARTED, _E.POD_STARTED, _E.COMPLETED, _E.NOT_FOUND)
# Events that leave the state as it is.
_IGNORED_IN: dict[KubernetesJobState, tuple[KubernetesJobEvent, ...]] = {
    # A resource that a failed submit has created does not count before it ends.
    _S.REGISTERED: (_E.SHOWN, _E.STARTED, _E.POD_STARTED, _E.LISTED),
    # The answer to the submit decides.
    _S.SUBMITTING: _WHILE_SUBMITTING,
    _S.UNLISTED: (*_WHILE_SUBMITTING, _E.LISTED),
    _S.GONE: (*_WHILE_SUBMITTING, _E.LISTED, _E.DELETED),
    _S.ACCEPTED: (_E.CONFIRMED, _E.POD_STARTED, _E.LISTED),
    # A 404 of a read is ignored: the watch is newer, and reports deletions itself.
    _S.PENDING: (_E.CONFIRMED, _E.SHOWN, _E.LISTED, _E.NOT_FOUND),
    # An operator may start its pods again.
    _S.RUNNING: (_E.CONFIRMED, _E.SHOWN, _E.STARTED, _E.POD_STARTED, _E.LISTED, _E.NOT_FOUND),
    # The outcome is known.
    _S.ENDING: tuple(event for event in _E if event not in (_E.REFUSED, _E.REPORTED)),
    # Calls in progress outlast the job; the watches no longer concern it.
    _S.ENDED: (
        *(_E.SUBMITTED, _E.SUBMIT_FAILED, _E.REFUSED, _E.REPORTED),
        *(_E.CONFIRMED, _E.NOT_FOUND, _E.NOTHING_DELETED),
        *(_E.SHOWN, _E.STARTED, _E.COMPLETED),  # the latest document, after the answer to a submit
    ),
}
IGNORED: frozenset[tuple[KubernetesJobState, KubernetesJobEvent]] = frozenset(
    (state, event) for state, events in _IGNORED_IN.items() for event in events
)
TRANSITIONS: dict[tuple[KubernetesJobState, KubernetesJobEvent], KubernetesJobState] = CHANGES | {
    (state, event): state for state, event in IGNORED
}
_LOSSES = (_E.DELETED, _E.NOT_FOUND, _E.NOTHING_DELETED)
FOLLOW_UPS: dict[tuple[KubernetesJobState, KubernetesJobEvent], FollowUp] = {
    **{pair: FollowUp.REPORT_OUTCOME for pair in CHANGES if pair[1] in (_E.COMPLETED, _E.TASKS_ENDED)},
    **{
        pair: FollowUp.REPORT_PENDING_LOSS
        for pair in CHANGES
        if CHANGES[pair] is _S.ENDING and pair[1] is _E.DELETED
    },
    **{pair: FollowUp.REPORT_LOSS for pair in CHANGES if CHANGES[pair] is _S.ENDED and pair[1] in _LOSSES},
    (_S.UNLISTED, _E.SUBMITTED): FollowUp.VERIFY_SOON,
    (_S.GONE, _E.SUBMITTED): FollowUp.VERIFY,
    (_S.ACCEPTED, _E.LISTED): FollowUp.VERIFY,
}


@dataclass(slots=True)
class KubernetesJob:
    """One job. `uid`: the uid of its resource. `waits_since_s` is monotonic."""

    job_id: str
    name: str
    waits_since_s: float
    state: KubernetesJobState = KubernetesJobState.REGISTERED
    uid: str | None = None
    stop_is_asked: bool = False
    pending_reason_at_stop: str = ""
    """Why the job had not started when its stop was requested."""
    node_is_ready: bool = True
    is_preempted: bool = False
    """True once the cluster has reported that it preempts the job."""
    awaits_sidecars: bool = False
    """True while only sidecars run, which may still end by themselves."""

    def apply(self, event: KubernetesJobEvent) -> FollowUp | None:
        """Change the state by the table. Returns the follow-up that the transition requires.

        Raises:
            KeyError: the event cannot happen in this state; a bug.
        """
        before, self.state = self.state, TRANSITIONS[self.state, event]
        return FOLLOW_UPS.get((before, event))

    @property
    def is_waiting(self) -> bool:
        """True if the cluster has the job and has not started it."""
        return self.state in (_S.ACCEPTED, _S.PENDING)

    @property
    def is_submitting(self) -> bool:
        """True while a submit is in progress."""
        return self.state in _SUBMITS
