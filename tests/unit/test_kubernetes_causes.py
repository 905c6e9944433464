"""Why Kubernetes ended a pod, in one line. The line is empty for a pod that exits by itself."""

from pathlib import Path

import pytest

from nni_manager.training_services.kubeflow.operators import OPERATORS
from nni_manager.training_services.kubernetes.observed import ObservedObjects
from nni_manager.training_services.kubernetes.pods import (
    blocking_init_step,
    deleted_at,
    has_run,
    init_failure,
    seconds_since,
    why_ended,
)
from nni_manager.training_services.kubernetes.section import ClaimStorage, KubernetesConfig

BEFORE, AT, AFTER = (f"2026-01-01T00:00:{second}Z" for second in ("29", "30", "31"))


def a_pod(phase="Running", code=None, deleted=None, grace_s=45, conditions=(), **status):
    """A pod document.

    `code`: exit code of a container that ended at `AT`. `deleted`: time of the deletion request.
    """
    meta = {"name": "p-0", "uid": "u", "labels": {"trialId": "aB3dE"}}
    if deleted:
        # Kubernetes sets deletionTimestamp to the time of the deletion request plus the grace period, here 45 s.
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
def test_the_cause_of_a_disrupted_pod_contains_the_reason_and_the_message_of_the_condition(reason, how):
    assert why_ended(a_pod(conditions=[disruption(reason)])) == f"pod p-0 {how}: {reason}: so"


def test_the_cause_of_an_evicted_pod_contains_the_reason_and_the_message_of_its_status():
    pod = a_pod("Failed", reason="Evicted", message="The node was low on\n resource: memory.")
    assert why_ended(pod) == "pod p-0 failed: Evicted: The node was low on resource: memory."


@pytest.mark.parametrize("pod", [a_pod(), a_pod("Failed", 1), a_pod("Succeeded", 0), {"metadata": {}}])
def test_a_pod_that_exits_by_itself_has_no_termination_cause(pod):
    assert (why_ended(pod), deleted_at(pod)) == ("", None)


@pytest.mark.parametrize(
    ("phase", "code", "deleted", "at"),
    [
        ("Running", None, AT, AT),
        ("Failed", 143, BEFORE, BEFORE),
        # Training code may catch the SIGTERM of the deletion, and exit with its own code.
        ("Failed", 1, BEFORE, BEFORE),
        ("Failed", 143, AT, AT),
        # In the cases below, the deletion may have come after the exit, because job operators also delete pods that have ended.
        # Within one second, only exit code 143 (SIGTERM) shows that the deletion came first.
        ("Failed", 137, AT, None),
        ("Failed", 1, AT, None),
        ("Failed", 143, AFTER, None),
        ("Succeeded", 0, AFTER, None),
    ],
)
def test_a_deletion_counts_as_termination_cause_only_if_it_precedes_the_container_exit(
    phase, code, deleted, at
):
    assert deleted_at(a_pod(phase, code, deleted)) == at


def test_the_age_of_an_invalid_timestamp_is_none():
    assert seconds_since("soon", 1.0) is None
    assert seconds_since("1970-01-01T00:00:40Z", 100.0) == 60.0
    assert seconds_since("1970-01-01T00:00:40Z", 0.0) == 0.0, "a clock that is behind"


def an_observer(now_s=100.0):
    config = KubernetesConfig("job", ClaimStorage(Path("/data"), "nni"), ())
    return ObservedObjects(OPERATORS["job"](config), "default", "EXPT", lambda: now_s)


def store(observed, pod, *, is_gone=False):
    observed.store_pod(pod, is_gone=is_gone, is_kept=True)


def with_init(pod, *, exit_code=None, finished_at=AT, is_sidecar=False):
    """The pod with an init container, which has ended with an exit code, or runs."""
    running = {"running": {"startedAt": BEFORE}}
    ended = {"terminated": {"exitCode": exit_code, "reason": "Error", "finishedAt": finished_at}}
    state = running if exit_code is None else ended
    spec = {"name": "init"} | ({"restartPolicy": "Always"} if is_sidecar else {})
    status = pod["status"] | {"initContainerStatuses": [{"name": "init", "state": state}]}
    return pod | {"spec": {"initContainers": [spec]}, "status": status}


def test_only_an_init_container_that_must_end_blocks_a_pending_pod():
    assert blocking_init_step(with_init(a_pod("Pending"))) == "its init container init has not ended"
    assert blocking_init_step(with_init(a_pod("Pending"), is_sidecar=True)) == ""


@pytest.mark.parametrize(
    ("pod", "cause"),
    [
        (
            with_init(a_pod("Failed"), exit_code=1),
            "pod p-0 failed: init container init failed: exit code 1, Error",
        ),
        (with_init(a_pod("Failed", 1), exit_code=0), ""),
        (with_init(a_pod("Failed", 1), exit_code=143, is_sidecar=True), ""),
        # FrameworkController deletes the pods of a failed job, so a deletion after the failure is not the cause.
        (
            with_init(a_pod("Failed", deleted=AFTER), exit_code=1),
            "pod p-0 failed: init container init failed: exit code 1, Error",
        ),
        (with_init(a_pod("Failed", deleted=BEFORE), exit_code=143), ""),
        (
            with_init(a_pod("Failed", conditions=[disruption("TerminationByKubelet")]), exit_code=143),
            "pod p-0 was evicted by its node: TerminationByKubelet: so",
        ),
    ],
)
def test_the_cause_of_a_pod_names_the_init_container_that_failed_by_itself(pod, cause):
    assert why_ended(pod) == cause
    assert bool(init_failure(pod)) is ("init container" in cause)


def test_a_pod_has_not_run_if_its_init_container_failed():
    assert not has_run(with_init(a_pod("Failed"), exit_code=1))
    assert has_run(with_init(a_pod("Failed", 1), exit_code=0))


UNREADY = {"type": "Ready", "status": "False", "lastTransitionTime": "1970-01-01T00:01:00Z"}
TAINTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}


@pytest.mark.parametrize(
    ("pod", "is_lost"),
    [
        # A failing readiness probe also makes a pod unready, so its node need not be lost.
        (a_pod(conditions=[UNREADY]), False),
        (a_pod(conditions=[UNREADY, TAINTED]), True),
        # The pod is ready, so its node still reports. The node ends the pod itself.
        (a_pod(conditions=[TAINTED]), False),
        (a_pod(conditions=[UNREADY, disruption("EvictionByEvictionAPI")]), False),
        (a_pod("Failed", 143, conditions=[UNREADY, TAINTED]), False),
        # The deadline of the deletion was 1970-01-01 00:01:15, and now it is 00:01:40.
        (a_pod(conditions=[UNREADY], deleted="1970-01-01T00:00:30Z"), True),
        # The deadline of the deletion is in 2026, and now it is 1970.
        (a_pod(conditions=[UNREADY], deleted=AT), False),
    ],
)
def test_a_node_counts_as_lost_without_an_event_if_its_pod_should_have_ended(pod, is_lost):
    observed = an_observer(now_s=100.0)
    store(observed, pod | {"spec": {"nodeName": "n1"}})
    assert observed.node_warning("aB3dE") == ("node n1 has not been ready for 40 s" if is_lost else "")


@pytest.mark.parametrize(
    ("pod", "is_lost"),
    [
        (a_pod("Pending"), False),
        (a_pod("Pending", conditions=[TAINTED]), True),
        (a_pod("Pending", conditions=[UNREADY, TAINTED]), True),
        (a_pod("Pending", deleted="1970-01-01T00:00:30Z"), True),
        (a_pod("Pending", deleted=AT), False),
    ],
)
def test_a_node_that_fails_while_it_pulls_the_image_of_a_pod_counts_as_lost(pod, is_lost):
    observed = an_observer(now_s=100.0)
    store(observed, pod | {"spec": {"nodeName": "n1"}})
    assert observed.node_warning("aB3dE") == ("node n1 is not ready" if is_lost else "")


def test_an_event_about_the_node_of_a_deleted_pod_does_not_affect_a_pending_pod_with_the_same_name():
    observed = an_observer(now_s=100.0)
    event = {"reason": "NodeNotReady", "involvedObject": {"name": "EXPT-worker-0", "uid": "earlier"}}
    observed.warnings.take(event | {"metadata": {"uid": "e"}})
    pod = a_pod("Pending") | {"spec": {"nodeName": "n2"}}
    pod["metadata"]["name"] = "EXPT-worker-0"
    store(observed, pod)
    assert observed.node_warning("aB3dE") == ""


def test_the_end_of_a_pending_pod_that_another_client_deleted_is_not_attributed_to_a_lost_node():
    observed = an_observer(now_s=100.0)
    pod = a_pod("Pending", deleted="1970-01-01T00:00:30Z") | {"spec": {"nodeName": "n1"}}
    store(observed, pod)
    assert observed.cause("aB3dE", "p-0") == "node n1 is not ready", "it should have ended"
    store(observed, pod, is_gone=True)
    assert observed.node_warning("aB3dE") == ""
    assert observed.cause("aB3dE", "p-0").startswith(
        "pod p-0 was deleted at 1970-01-01T00:00:30Z, but not by"
    )


def test_a_pending_pod_without_a_node_has_no_lost_node():
    observed = an_observer(now_s=100.0)
    store(observed, a_pod("Pending", conditions=[TAINTED]))
    assert observed.node_warning("aB3dE") == ""


def test_the_cause_for_a_running_pod_that_disappears_is_a_deletion_by_another_client():
    observed = an_observer()
    store(observed, a_pod(), is_gone=True)
    assert observed.cause("aB3dE", None).startswith("pod p-0 was deleted, but not by this manager; ")


def test_a_pod_that_disappears_after_its_exit_has_no_termination_cause():
    observed = an_observer()
    store(observed, a_pod("Failed", 1), is_gone=True)
    assert observed.cause("aB3dE", "p-0") == ""


def test_pods_have_no_termination_cause_if_an_operator_deletes_them_together_with_a_failed_job():
    observed = an_observer()
    first, second = a_pod("Failed", 1), a_pod(deleted=AFTER)
    second["metadata"] |= {"name": "p-1", "uid": "u1"}
    store(observed, first)
    store(observed, second)
    assert observed.cause("aB3dE", None) == observed.cause("aB3dE", "p-0") == ""


def of_task(pod, name, created, index="0"):
    """The pod of a task of an indexed Job, under its own name."""
    annotations = {"batch.kubernetes.io/job-completion-index": index}
    labels = {"trialId": "aB3dE", "job-name": "job"}
    meta = {"name": name, "uid": name, "creationTimestamp": created}
    return pod | {"metadata": pod["metadata"] | meta | {"annotations": annotations, "labels": labels}}


@pytest.mark.parametrize("is_gone_first", [True, False])
def test_a_replaced_pod_does_not_determine_the_end_of_its_job(is_gone_first):
    observed = an_observer()
    old = of_task(a_pod("Failed", 143, deleted=BEFORE), "p-a", BEFORE)
    # The operator deletes both pods. So the deletion must not be the sign by which the manager finds the old pod.
    new = of_task(a_pod("Failed", 3, deleted=AFTER), "p-b", AFTER)
    store(observed, old, is_gone=is_gone_first)
    store(observed, new)
    if not is_gone_first:
        assert not observed.has_one_pod("aB3dE")
        store(observed, old, is_gone=True)
    assert observed.has_one_pod("aB3dE")
    ended = {"conditions": [{"type": "Failed", "status": "True"}]}
    end = observed.end_of("aB3dE", {"metadata": {"name": "job"}, "status": ended})
    assert (end.exit_code, end.is_explained) == (3, False)


def test_a_deleted_pod_still_counts_if_the_newer_pod_belongs_to_another_task():
    observed = an_observer()
    store(observed, of_task(a_pod("Failed", 3), "p-0-a", BEFORE), is_gone=True)
    store(observed, of_task(a_pod(), "p-1-a", AFTER, index="1"))
    assert not observed.has_one_pod("aB3dE")


RUNS = {"metadata": {"name": "job", "uid": "j"}, "status": {}}
FAILED = RUNS | {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}


@pytest.mark.parametrize(
    ("pod", "resource", "has_new"),
    [
        (a_pod("Pending"), RUNS, True),
        (a_pod(), RUNS, True),
        (a_pod("Failed", 3), RUNS, False),
        (a_pod(deleted=AFTER), RUNS, False),
        # These conditions mean that the node of the pod is lost.
        (a_pod(conditions=[UNREADY, TAINTED]), RUNS, False),
        (a_pod("Pending"), FAILED, False),
    ],
)
def test_a_replacement_pod_counts_as_new_only_if_it_can_run(pod, resource, has_new):
    observed = an_observer()
    observed.resources["job"] = resource
    store(observed, of_task(a_pod("Failed", 143, deleted=BEFORE), "p-a", BEFORE))
    assert not observed.has_new_pod("aB3dE", "job")
    store(observed, of_task(pod, "p-b", AFTER) | {"spec": {"nodeName": "n1"}})
    assert observed.has_new_pod("aB3dE", "job") is has_new


def test_the_only_pod_of_a_task_does_not_count_as_new():
    observed = an_observer()
    observed.resources["job"] = RUNS
    store(observed, of_task(a_pod(), "p-a", BEFORE))
    store(observed, of_task(a_pod(), "p-a", BEFORE))
    store(observed, of_task(a_pod(), "p-1", AFTER, index="1"))
    assert not observed.has_new_pod("aB3dE", "job")
