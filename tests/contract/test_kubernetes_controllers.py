"""The controllers and the node of the fake cluster make the same changes as those of a recorded real cluster, and validate
objects alike.
"""

import json
import sys
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from kube_api import KubeCluster
from kube_controllers import FRAMEWORKS
from kube_definitions import FRAMEWORK
from kube_kubelet import StillPod, expanded, seen_here
from kube_store import CONFIG_MAPS, DEFINITIONS, EVENTS, NAMESPACES, PODS, QUOTAS, SECRETS, Refused
from real_experiment import wait_until

RECORDED = Path(__file__).parents[1] / "golden" / "kubernetes" / "framework_that_fails.json"
NAME = "nniexp1env1"


@pytest.fixture
def cluster(tmp_path):
    with KubeCluster(tmp_path) as cluster:
        cluster.store.create(DEFINITIONS, "", FRAMEWORK)
        yield cluster


def role(name="worker", count=1, command="exit 3", policy=(1, 1), **spec):
    container = {"name": "framework", "image": "x", "command": ["sh", "-c", command]}
    return {
        "name": name,
        "taskNumber": count,
        "frameworkAttemptCompletionPolicy": dict(
            zip(("minFailedTaskCount", "minSucceededTaskCount"), policy, strict=True)
        ),
        "task": {"pod": {"spec": {"containers": [container], **spec}}},
    }


def run(cluster, *roles, name=NAME):
    body = {"metadata": {"name": name}, "spec": {"executionType": "Start", "taskRoles": list(roles)}}
    return cluster.store.create(FRAMEWORKS, "default", body)


def state(cluster):
    return (cluster.store.get(FRAMEWORKS, "default", NAME).get("status") or {}).get("state")


def completed(cluster):
    wait_until(lambda: state(cluster) == "Completed", "the Framework has completed", DEADLINE_S)
    return cluster.store.get(FRAMEWORKS, "default", NAME)["status"]["attemptStatus"]


def changes_of_frameworks(cluster):
    rows = []
    for entry in cluster.store.history:
        if entry.kind == FRAMEWORKS:
            status = entry.after.get("status") or {}
            attempt = status.get("attemptStatus") or {}
            tasks = [
                [task["state"], (task["attemptStatus"]["completionStatus"] or {}).get("code")]
                for each in attempt.get("taskRoleStatuses", [])
                for task in each["taskStatuses"]
            ]
            code = (attempt.get("completionStatus") or {}).get("code")
            rows.append([entry.type, status.get("state"), code, tasks])
    return [row for at, row in enumerate(rows) if at == 0 or row != rows[at - 1]]


def changes_of_pods(cluster):
    return [
        [
            entry.type,
            entry.after["status"]["phase"],
            entry.after["spec"].get("nodeName"),
            [next(iter(each["state"])) for each in entry.after["status"].get("containerStatuses", [])],
            "deletionTimestamp" in entry.after["metadata"],
        ]
        for entry in cluster.store.history
        if entry.kind == PODS
    ]


def test_a_failing_framework_has_the_same_status_changes_as_on_a_real_cluster(cluster):
    run(cluster, role())
    completed(cluster)
    cluster.store.delete(FRAMEWORKS, "default", NAME)
    recorded = json.loads(RECORDED.read_text())
    assert changes_of_frameworks(cluster) == recorded["frameworks"]
    assert changes_of_pods(cluster) == recorded["pods"]
    last = next(entry.after for entry in reversed(cluster.store.history) if entry.kind == FRAMEWORKS)
    told, wanted = last["status"]["attemptStatus"]["completionStatus"], recorded["framework_end"]
    assert {key: told[key] for key in ("code", "phrase", "trigger", "type")} == {
        key: wanted[key] for key in ("code", "phrase", "trigger", "type")
    }


def test_a_framework_ends_its_remaining_tasks_and_deletes_its_objects_when_one_role_has_succeeded(cluster):
    run(
        cluster,
        role("ps", 1, "exec sleep 100", (1, -1), terminationGracePeriodSeconds=1),
        role("worker", 2, "true", (1, 2)),
    )
    told = completed(cluster)
    assert (told["completionStatus"]["code"], told["completionStatus"]["trigger"]["taskRoleName"]) == (
        0,
        "worker",
    )
    assert [task["state"] for each in told["taskRoleStatuses"] for task in each["taskStatuses"]] == [
        "Completed"
    ] * 3
    assert cluster.store.list(PODS) == cluster.store.list(CONFIG_MAPS) == []


def test_a_foreground_deletion_of_a_framework_deletes_its_pods_and_secrets(cluster):
    made = run(cluster, role(command="trap 'exit 9' TERM; sleep 100 & wait"))
    owner = {
        "apiVersion": made["apiVersion"],
        "kind": "Framework",
        "name": NAME,
        "uid": made["metadata"]["uid"],
    }
    cluster.store.create(SECRETS, "default", {"metadata": {"name": "s", "ownerReferences": [owner]}})
    wait_until(lambda: state(cluster) == "AttemptRunning", "the Framework runs", DEADLINE_S)
    (process,) = cluster.node.processes("default", f"{NAME}-worker-0")
    cluster.store.delete(FRAMEWORKS, "default", NAME, {"propagationPolicy": "Foreground"})
    wait_until(
        lambda: not cluster.store.find(FRAMEWORKS, "default", NAME), "the Framework is deleted", DEADLINE_S
    )
    assert process.wait(DEADLINE_S) == 9, "the process must end by SIGTERM"
    assert cluster.store.list(PODS) == cluster.store.list(CONFIG_MAPS) == []
    wait_until(lambda: not cluster.store.list(SECRETS), "the secret is deleted", DEADLINE_S)


def test_deleting_a_namespace_deletes_all_objects_in_the_namespace(cluster):
    cluster.store.create(NAMESPACES, "", {"metadata": {"name": "team"}})
    cluster.store.create(SECRETS, "team", {"metadata": {"name": "s"}})
    cluster.store.delete(NAMESPACES, "", "team")
    wait_until(lambda: not cluster.store.find(NAMESPACES, "", "team"), "the namespace is deleted", DEADLINE_S)
    assert cluster.store.list(SECRETS) == []


def test_the_framework_definition_refuses_invalid_frameworks(cluster):
    for wrong in ({"taskNumber": 10001}, {"name": "Worker"}, {"taskCount": 1}):
        with pytest.raises(Refused, match="Invalid"):
            run(cluster, role() | wrong)


def test_a_pending_container_shows_the_missing_secret_and_starts_once_the_secret_exists(cluster):
    variables = [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "t"}}}]
    spec = role(command="test $T = told")
    spec["task"]["pod"]["spec"]["containers"][0]["env"] = variables
    run(cluster, spec)
    assert pending_reason(cluster) == (
        *("CreateContainerConfigError", 'secret "s" not found'),
        [("Failed", 'Error: secret "s" not found')],
    )
    cluster.store.create(SECRETS, "default", {"metadata": {"name": "s"}, "stringData": {"t": "told"}})
    assert completed(cluster)["completionStatus"]["code"] == 0


def pending_reason(cluster, reason=None):
    """Wait for a warning event, with this reason if one is given. Returns the reason and message of the pod's status, and its
    warning events.
    """
    warnings = "type=Warning,involvedObject.kind=Pod"
    wait_until(
        lambda: any(
            reason in (None, each["reason"]) for each in cluster.store.list(EVENTS, "default", "", warnings)
        ),
        *("a warning is reported", 20),
    )
    status = cluster.store.get(PODS, "default", f"{NAME}-worker-0")["status"]
    (scheduled,) = status["conditions"]
    (state,) = (each["state"] for each in status.get("containerStatuses", [{"state": {"waiting": {}}}]))
    said = scheduled if scheduled["status"] == "False" else state["waiting"]
    events = cluster.store.list(EVENTS, "default", "", warnings)
    return (
        *(said.get("reason"), said.get("message")),
        [
            (each["reason"], each["message"])
            for each in sorted(events, key=lambda it: it["metadata"]["resourceVersion"])
        ],
    )


def test_a_failed_mount_is_reported_only_in_an_event(cluster):
    volume = {"name": "v", "nfs": {"server": "nas", "path": "/none"}}
    run(cluster, role(volumes=[volume]))
    reason, message, ((kind, text),) = pending_reason(cluster)
    assert (reason, message, kind) == ("ContainerCreating", None, "FailedMount")
    assert text.startswith('MountVolume.SetUp failed for volume "v" : ')


def test_an_unschedulable_pod_is_reported_in_its_status_and_in_an_event(cluster):
    run(cluster, role(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "none"}}]))
    text = '0/1 nodes are available: persistentvolumeclaim "none" not found.'
    assert pending_reason(cluster) == ("Unschedulable", text, [("FailedScheduling", text)])


def test_a_missing_image_is_reported_in_the_status_of_the_pod_and_in_events(cluster):
    cluster.node.missing_images.add("x")
    run(cluster, role())
    reason, message, events = pending_reason(cluster)
    assert (reason, message) == ("ImagePullBackOff", 'Back-off pulling image "x": not found')
    assert events[0] == ("Failed", 'Failed to pull image "x": not found')


def test_pods_above_a_quota_are_created_later_without_a_warning(cluster):
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}}
    cluster.store.create(QUOTAS, "default", quota)
    run(cluster, role(count=2, command="true", policy=(1, 2)))
    assert completed(cluster)["completionStatus"]["code"] == 0
    assert cluster.store.list(EVENTS, "default", "", "type=Warning") == []
    made = [
        entry.after["metadata"]["name"]
        for entry in cluster.store.history
        if entry.kind == PODS and entry.type == "ADDED"
    ]
    assert made == [f"{NAME}-worker-0", f"{NAME}-worker-1"]


def test_pods_of_a_lost_node_end_when_the_node_is_deleted(cluster):
    run(cluster, role(command="exec sleep 100"))
    wait_until(lambda: state(cluster) == "AttemptRunning", "the Framework runs", DEADLINE_S)
    (process,) = cluster.node.processes("default", f"{NAME}-worker-0")
    cluster.node.lose()
    assert process.wait(DEADLINE_S) == -9
    assert ("NodeNotReady", "Node is not ready") in [
        (each["reason"], each["message"]) for each in cluster.store.list(EVENTS)
    ]
    pod = cluster.store.get(PODS, "default", f"{NAME}-worker-0")
    assert pod["status"]["phase"] == "Running", "the lost node cannot report another phase"
    assert "deletionTimestamp" in pod["metadata"]
    cluster.node.bury()
    assert completed(cluster)["completionStatus"]["phrase"] == "PodExternalDeleted"


def test_simulated_pods_complete_without_real_processes(tmp_path):
    with KubeCluster(tmp_path, runs=StillPod) as still:
        still.store.create(DEFINITIONS, "", FRAMEWORK)
        run(still, role(command="exit 3"))
        wait_until(lambda: state(still) == "AttemptRunning", "the Framework runs", DEADLINE_S)
        (nothing,) = still.node.processes("default", f"{NAME}-worker-0")
        nothing.send_signal(0)
        assert completed(still)["completionStatus"]["code"] == 0


def test_a_barrier_blocks_every_task_until_all_tasks_have_an_address(cluster):
    barrier = {
        "name": "b",
        "image": "frameworkcontroller/frameworkbarrier",
        "volumeMounts": [{"name": "v", "mountPath": "/mnt/frameworkbarrier"}],
    }
    each = role(
        count=2,
        command=". /mnt/frameworkbarrier/injector.sh; test $FB_WORKER_IPS = 127.0.0.1,127.0.0.1",
        policy=(1, 2),
        initContainers=[barrier],
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    each["task"]["pod"]["spec"]["containers"][0]["volumeMounts"] = barrier["volumeMounts"]
    run(cluster, each)
    assert completed(cluster)["completionStatus"]["code"] == 0
    initialising = [
        entry.after["status"]["initContainerStatuses"][0]["state"]
        for entry in cluster.store.history
        if entry.kind == PODS and "initContainerStatuses" in entry.after["status"]
    ]
    assert "running" in initialising[0]
    assert "terminated" in initialising[-1]


def test_variable_references_and_mounted_paths_in_commands_are_resolved():
    assert expanded("$$ $(A) $(B) $$(A) $A", {"A": "a"}) == "$ a $(B) $(A) $A"
    mounts = {"/tmp/mount": "/here", "/dev/shm": "/there"}
    assert seen_here("cd '/tmp/mount/x'; ls /tmp/mounted /my/tmp/mount", mounts) == (
        "cd '/here/x'; ls /tmp/mounted /my/tmp/mount"
    )


def test_containers_run_real_processes(cluster, tmp_path):
    run(cluster, role(command=f"exec {sys.executable} -c 'print(6 * 7)'"))
    completed(cluster)
    assert (tmp_path / f"default-{NAME}-worker-0.log").read_text() == "42\n"
