"""Conditions and events with which Kubernetes reports a preempted pod, and similar conditions of other disruptions."""

import pytest

from nni_manager.training_services.kubernetes.observed import ObservedObjects
from nni_manager.training_services.kubernetes.pods import is_preempted


def a_pod(uid="u1", **condition):
    return {
        "metadata": {"name": "job-worker-0", "uid": uid, "labels": {"trialId": "aB3dE"}},
        "status": {"phase": "Running", "conditions": [condition] if condition else None},
    }


def disrupted(reason, status="True"):
    return a_pod(type="DisruptionTarget", status=status, reason=reason)


@pytest.mark.parametrize(
    ("pod", "is_one"),
    [
        (disrupted("PreemptionByScheduler"), True),
        (disrupted("PreemptionByScheduler", status="False"), False),
        (disrupted("DeletionByTaintManager"), False),
        (disrupted("EvictionByEvictionAPI"), False),
        (disrupted("TerminationByKubelet"), False),
        (a_pod(type="Ready", status="True", reason="PreemptionByScheduler"), False),
        (a_pod(), False),
        ({}, False),
    ],
)
def test_a_pod_counts_as_preempted_only_if_the_scheduler_has_set_its_disruption_condition(pod, is_one):
    assert is_preempted(pod) is is_one


def test_a_preemption_event_does_not_apply_to_a_new_pod_of_the_same_name():
    observed = ObservedObjects(None, "default", "EXPT")  # type: ignore[arg-type]
    observed.store_pod(a_pod(), is_gone=False, is_kept=True)
    assert observed.preempted_pod("aB3dE") is None
    observed.note_preempted({"involvedObject": {"name": "job-worker-0", "uid": "u1"}})
    assert observed.preempted_pod("aB3dE") == "job-worker-0"
    assert observed.has_one_pod("aB3dE")
    observed.store_pod(a_pod(uid="u2"), is_gone=False, is_kept=True)
    assert observed.preempted_pod("aB3dE") is None


def test_a_preempted_job_with_several_pods_is_not_treated_as_a_single_pod_job():
    observed = ObservedObjects(None, "default", "EXPT")  # type: ignore[arg-type]
    observed.store_pod(disrupted("PreemptionByScheduler"), is_gone=False, is_kept=True)
    other = a_pod(uid="u2")
    other["metadata"]["name"] = "job-worker-1"
    observed.store_pod(other, is_gone=False, is_kept=True)
    assert observed.preempted_pod("aB3dE") == "job-worker-0"
    assert not observed.has_one_pod("aB3dE")
