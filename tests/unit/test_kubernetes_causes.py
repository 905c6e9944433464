"""Why Kubernetes ends a pod, in one line; an end of its own has no such cause."""

from pathlib import Path

import pytest

from nni_manager.training_services.kubeflow.operators import OPERATORS
from nni_manager.training_services.kubernetes.observed import ObservedObjects
from nni_manager.training_services.kubernetes.pods import deleted_at, seconds_since, why_ended
from nni_manager.training_services.kubernetes.section import ClaimStorage, KubernetesConfig

BEFORE, AT, AFTER = (f"2026-01-01T00:00:{second}Z" for second in ("29", "30", "31"))


def a_pod(phase="Running", code=None, deleted=None, grace_s=45, conditions=(), **status):
    """`code`: that of its container, which has ended at `AT`. `deleted`: when its deletion was requested."""
    meta = {"name": "p-0", "uid": "u", "labels": {"trialId": "aB3dE"}}
    if deleted:
        # This time is 45 s later.
        ends_at = (
            deleted.replace("00:00", "00:01")
            .replace(":30Z", ":15Z")
            .replace(":29Z", ":14Z")
            .replace(":31Z", ":16Z")
        )
        meta |= {"deletionTimestamp": ends_at, "deletionGracePeriodSeconds": grace_s}
    ended = (
        {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": AT}} if code is not None else {}
    )
    return {
        "metadata": meta,
        "status": {
            "phase": phase,
            "conditions": list(conditions),
            "containerStatuses": [{"name": "c", "state": ended}],
            **status,
        },
    }


def disruption(reason, message="so"):
    return {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("PreemptionByScheduler", "was preempted for one of higher priority"),
        ("DeletionByTaintManager", "was evicted because of a taint of its node"),
        ("EvictionByEvictionAPI", "was evicted through the API, as `kubectl drain` does"),
        ("DeletionByPodGC", "was deleted because its node is gone"),
        ("TerminationByKubelet", "was evicted by its node"),
        ("ByANewerCluster", "is ended by the cluster"),
    ],
)
def test_the_cause_of_a_disrupted_pod_is_the_clusters_condition(reason, how):
    assert why_ended(a_pod(conditions=[disruption(reason)])) == f"pod p-0 {how}: {reason}: so"


def test_the_cause_of_a_pod_that_the_node_failed_is_the_pods_reason():
    pod = a_pod("Failed", reason="Evicted", message="The node was low on\n resource: memory.")
    assert why_ended(pod) == "pod p-0 failed: Evicted: The node was low on resource: memory."


@pytest.mark.parametrize("pod", [a_pod(), a_pod("Failed", 1), a_pod("Succeeded", 0), {"metadata": {}}])
def test_a_pod_that_exits_by_itself_has_no_cluster_cause(pod):
    assert (why_ended(pod), deleted_at(pod)) == ("", None)


@pytest.mark.parametrize(
    ("phase", "code", "deleted", "at"),
    [
        ("Running", None, AT, AT),
        ("Failed", 143, BEFORE, BEFORE),
        ("Failed", 1, BEFORE, BEFORE),  # the training code handles SIGTERM itself
        ("Failed", 143, AT, AT),
        # The operator deleted a pod that had ended. If both times are in the same second, only an exit code of the keeper
        # itself shows that the signal came first.
        ("Failed", 137, AT, None),
        ("Failed", 1, AT, None),
        ("Failed", 143, AFTER, None),
        ("Succeeded", 0, AFTER, None),
    ],
)
def test_a_deletion_after_the_containers_ended_is_not_a_cause(phase, code, deleted, at):
    assert deleted_at(a_pod(phase, code, deleted)) == at


def test_an_unreadable_timestamp_is_read_as_none():
    assert seconds_since("soon", 1.0) is None
    assert seconds_since("1970-01-01T00:00:40Z", 100.0) == 60.0
    assert seconds_since("1970-01-01T00:00:40Z", 0.0) == 0.0, "a clock that is behind"


def an_observer(now_s=100.0):
    config = KubernetesConfig("job", ClaimStorage(Path("/data"), "nni"), ())
    return ObservedObjects(OPERATORS["job"](config), "default", "EXPT", lambda: now_s)


def store(observed, pod, *, is_gone=False):
    observed.store_pod(pod, is_gone=is_gone, is_kept=True)


def test_the_cause_of_a_vanished_running_pod_is_its_deletion():
    observed = an_observer()
    store(observed, a_pod(), is_gone=True)
    assert observed.cause("aB3dE", None).startswith("pod p-0 was deleted, but not by this manager; ")


def test_a_pod_that_vanishes_after_its_containers_exited_has_no_cause():
    observed = an_observer()
    store(observed, a_pod("Failed", 1), is_gone=True)
    assert observed.cause("aB3dE", "p-0") == ""


def test_pods_deleted_by_the_operator_of_an_ended_job_are_no_cause():
    observed = an_observer()
    first, second = a_pod("Failed", 1), a_pod(deleted=AFTER)
    second["metadata"] |= {"name": "p-1", "uid": "u1"}
    store(observed, first)
    store(observed, second)
    assert observed.cause("aB3dE", None) == observed.cause("aB3dE", "p-0") == ""
