"""The states of a job on Kubernetes: valid events of each state, and exactly one report of the job's end."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.training_services.kubernetes.job_states import (
    FOLLOW_UPS,
    TRANSITIONS,
    FollowUp,
    KubernetesJob,
    KubernetesJobEvent,
    KubernetesJobState,
)

S, E = KubernetesJobState, KubernetesJobEvent
SUBMITTING = {S.SUBMITTING, S.UNLISTED, S.GONE}


def a_job(state=S.REGISTERED):
    return KubernetesJob("trial1", "nni-trial1", 0.0, state)


def follow_up_of(*events):
    """The last follow-up action and the final state of a new job that receives these events."""
    job = a_job()
    follow_up = None
    for event in events:
        follow_up = job.apply(event)
    return follow_up, job.state


@pytest.mark.parametrize(("state", "event"), list(product(S, E)))
def test_an_event_outside_the_transition_table_raises_an_error_and_does_not_change_the_state(state, event):
    job = a_job(state)
    if (state, event) in TRANSITIONS:
        assert job.apply(event) is FOLLOW_UPS.get((state, event))
        assert job.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            job.apply(event)
        assert job.state is state


def test_an_ended_job_never_changes_its_state():
    assert {after for (state, _), after in TRANSITIONS.items() if state is S.ENDED} == {S.ENDED}


def test_a_submission_result_is_accepted_only_in_the_states_submitting_or_ending_or_ended():
    for answer in (E.SUBMITTED, E.SUBMIT_FAILED, E.REFUSED):
        assert {state for state, event in TRANSITIONS if event is answer} == SUBMITTING | {S.ENDING, S.ENDED}
    assert {state for state in S if a_job(state).is_submitting} == SUBMITTING


def test_every_follow_up_action_belongs_to_a_transition():
    assert FOLLOW_UPS.keys() <= TRANSITIONS.keys()


@pytest.mark.parametrize(
    ("events", "follow_up", "state"),
    [
        ((E.SUBMIT_STARTED, E.SUBMITTED), None, S.ACCEPTED),
        ((E.SUBMIT_STARTED, E.LISTED, E.SUBMITTED), FollowUp.VERIFY_SOON, S.ACCEPTED),
        ((E.SUBMIT_STARTED, E.LISTED, E.DELETED, E.SUBMITTED), FollowUp.VERIFY, S.ACCEPTED),
        ((E.SUBMIT_STARTED, E.COMPLETED), None, S.SUBMITTING),
        ((E.SUBMIT_STARTED, E.SUBMIT_FAILED, E.COMPLETED), FollowUp.REPORT_OUTCOME, S.ENDING),
        ((E.SUBMIT_STARTED, E.SUBMIT_FAILED, E.LISTED), None, S.REGISTERED),
        ((E.CONFIRMED, E.LISTED), FollowUp.VERIFY, S.ACCEPTED),
        ((E.CONFIRMED, E.LISTED, E.NOT_FOUND), FollowUp.REPORT_LOSS, S.ENDED),
        ((E.CONFIRMED, E.POD_STARTED, E.LISTED), FollowUp.VERIFY, S.ACCEPTED),
        ((E.CONFIRMED, E.SHOWN, E.LISTED), None, S.PENDING),
        ((E.CONFIRMED, E.SHOWN, E.NOT_FOUND), None, S.PENDING),
        ((E.CONFIRMED, E.SHOWN, E.POD_STARTED), None, S.RUNNING),
        ((E.CONFIRMED, E.STARTED, E.SHOWN), None, S.RUNNING),
        ((E.CONFIRMED, E.STARTED, E.COMPLETED, E.DELETED), None, S.ENDING),
        ((E.CONFIRMED, E.STARTED, E.DELETED), FollowUp.REPORT_LOSS, S.ENDED),
        ((E.CONFIRMED, E.SHOWN, E.DELETED), FollowUp.REPORT_PENDING_LOSS, S.ENDING),
        ((E.CONFIRMED, E.SHOWN, E.DELETED, E.POD_STARTED), None, S.ENDING),
    ],
    ids=lambda each: "-".join(event.name.lower() for event in each) if isinstance(each, tuple) else None,
)
def test_the_order_of_events_determines_the_follow_up_action(events, follow_up, state):
    assert follow_up_of(*events) == (follow_up, state)


def closing_events(state):
    """The events that a job in this state receives when its resource is deleted and all API calls have returned."""
    match state:
        case S.SUBMITTING | S.UNLISTED | S.GONE:
            return [E.SUBMITTED]
        case S.REGISTERED:
            return [E.SUBMIT_STARTED, E.REFUSED]
        case S.ACCEPTED:
            return [E.LISTED, E.NOT_FOUND]
        case S.PENDING | S.RUNNING:
            return [E.DELETED]
        case _:
            return [E.REPORTED]


@given(st.lists(st.sampled_from(E)), st.booleans())
def test_every_job_ends_and_is_reported_exactly_once(events, stop_is_asked):
    job, ends = a_job(), 0

    def apply(event):
        nonlocal ends
        before, follow_up = job.state, job.apply(event)
        if before is not S.ENDED and job.state is S.ENDED:
            ends += (follow_up is FollowUp.REPORT_LOSS) + (event in (E.REPORTED, E.REFUSED))

    for event in events:
        if (job.state, event) in TRANSITIONS:
            apply(event)
    if stop_is_asked and not job.is_submitting and job.state is not S.ENDED:
        apply(E.NOTHING_DELETED)
        assert job.state in (S.ENDING, S.ENDED)
    for _ in S:
        if job.state is not S.ENDED:
            for event in closing_events(job.state):
                apply(event)
    assert (job.state, ends) == (S.ENDED, 1)
