"""The changes of an experiment that cause a notification."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.notifications import NotificationEvent, Notifications
from nni_manager.domain.trial import Trial, TrialState
from trial_keeper.wire.reasons import ExitReason

E = ExperimentState


def a_trial(state, number=0, message=""):
    trial = Trial(f"trial{number}", number, {}, {}, 0.0, None)
    trial.state = state
    trial.run.reason = ExitReason.NONZERO_EXIT
    trial.run.exit_code = 1
    trial.run.message = message
    return trial


@pytest.mark.parametrize(
    ("state", "error", "event", "text"),
    [
        (E.DONE, "", NotificationEvent.END, "is done"),
        (E.STOPPED, "", NotificationEvent.END, "was stopped"),
        (
            E.ERROR,
            "the cluster refused 3 jobs",
            NotificationEvent.ERROR,
            "has failed: the cluster refused 3 jobs",
        ),
    ],
)
def test_each_end_of_an_experiment_causes_one_notification_even_after_a_resume(state, error, event, text):
    notifications = Notifications((), E.INITIALIZED)
    assert notifications.of_state(E.RUNNING, "") is None
    for _ in range(2):
        notification = notifications.of_state(state, error)
        assert (notification.event, notification.text, notification.failures) == (event, text, 0)
        assert notifications.of_state(state, error) is None
        assert notifications.of_state(E.RUNNING, "") is None


@pytest.mark.parametrize("state", E)
def test_a_manager_sends_no_notification_of_the_state_it_starts_with(state):
    assert Notifications((), state).of_state(state, "") is None


def test_a_notification_of_failures_names_the_latest_trial_and_its_cause():
    notifications = Notifications((2,), E.RUNNING)
    assert notifications.of_end(a_trial(TrialState.FAILED)) is None
    notification = notifications.of_end(a_trial(TrialState.FAILED, 1, "Traceback …\nKeyError: 'lr'"))
    assert notification.event is NotificationEvent.FAILURES
    assert notification.failures == 2
    assert "2 trials in a row have failed; the latest is trial1: " in notification.text
    assert notification.text.endswith(": exit code 1: KeyError: 'lr'")


@given(st.lists(st.sampled_from(sorted(TrialState))), st.sets(st.integers(1, 5)))
def test_a_notification_is_sent_once_when_consecutive_failures_reach_a_limit(states, limits):
    notifications = Notifications(limits, E.RUNNING)
    row = 0
    for number, state in enumerate(states):
        row = row + 1 if state is TrialState.FAILED else 0
        notification = notifications.of_end(a_trial(state, number))
        assert (notification.failures if notification else 0) == (row if row in limits else 0)
