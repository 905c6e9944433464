"""The operators of the fake cluster make the changes that were recorded from real operators, or that are documented."""

import copy
import json
from pathlib import Path

import kube_definitions as definitions
import pytest
from deadlines import DEADLINE_S
from kube_api import KubeCluster
from kube_operators import LOCAL_QUEUES, PYTORCH_JOBS, QUEUE, RUNTIMES, TF_JOBS, TRAIN_JOBS
from kube_store import DEFINITIONS, JOBS, PODS, Refused
from real_experiment import wait_until

GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes"


@pytest.fixture
def cluster(tmp_path):
    with KubeCluster(tmp_path) as cluster:
        for each in (definitions.tf_job(), definitions.pytorch_job(), definitions.LOCAL_QUEUE):
            cluster.store.create(DEFINITIONS, "", each)
        yield cluster


def recorded(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def changes_of_jobs(cluster, kind):
    rows = []
    for entry in cluster.store.history:
        if entry.kind == kind:
            status = entry.after.get("status") or {}
            said = [
                [each[key] for key in ("type", "status", "reason", "message")]
                for each in status.get("conditions", [])
            ]
            rows.append([entry.type, said, status.get("replicaStatuses"), "completionTime" in status])
    return rows


def made(cluster, name):
    """The labels and environment that a pod had at its creation."""
    entry = next(
        each for each in cluster.store.history if each.kind is PODS and each.after["metadata"]["name"] == name
    )
    return {
        "labels": entry.after["metadata"]["labels"],
        "env": entry.after["spec"]["containers"][0]["env"],
    }


def conditions(cluster, kind, name):
    found = cluster.store.get(kind, "default", name).get("status") or {}
    return {each["type"]: each["status"] for each in found.get("conditions", [])}


def until_met(cluster, kind, name, type_):
    wait_until(lambda: conditions(cluster, kind, name).get(type_) == "True", f"{type_} is met", DEADLINE_S)
    return cluster.store.get(kind, "default", name)["status"]


def waits_for(path, code):
    """A command that waits until a file exists, then exits with this code."""
    return ["sh", "-c", f"until [ -e {path} ]; do sleep 0.02; done; exit {code}"]


def test_a_failing_pytorchjob_has_the_same_status_changes_as_on_a_real_cluster(cluster, tmp_path):
    wanted = recorded("pytorchjob_that_fails")
    spec = copy.deepcopy(wanted["spec"])
    container = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    container["command"] = waits_for(tmp_path / "end", 4)
    cluster.store.create(PYTORCH_JOBS, "default", {"metadata": {"name": "pt1"}, "spec": spec})
    until_met(cluster, PYTORCH_JOBS, "pt1", "Running")
    (tmp_path / "end").touch()
    until_met(cluster, PYTORCH_JOBS, "pt1", "Failed")
    cluster.store.delete(PYTORCH_JOBS, "default", "pt1")
    wait_until(lambda: not cluster.store.list(PODS), "its pod is deleted", DEADLINE_S)
    assert changes_of_jobs(cluster, PYTORCH_JOBS) == wanted["jobs"]
    assert {"pt1-master-0": made(cluster, "pt1-master-0")} == wanted["made"]
    pods = [
        [
            entry.type,
            entry.after["status"]["phase"],
            entry.after["spec"].get("nodeName"),
            [next(iter(each["state"])) for each in entry.after["status"].get("containerStatuses", [])],
            "deletionTimestamp" in entry.after["metadata"],
        ]
        for entry in cluster.store.history
        if entry.kind is PODS
    ]
    assert pods == wanted["pods"]


def test_a_succeeding_tfjob_has_the_same_status_changes_as_on_a_real_cluster(cluster, tmp_path):
    wanted = recorded("tfjob_that_succeeds")
    spec = copy.deepcopy(wanted["spec"])
    for type_ in ("PS", "Worker"):
        container = spec["tfReplicaSpecs"][type_]["template"]["spec"]["containers"][0]
        container |= {"command": waits_for(tmp_path / type_, 0), "image": type_}
    # The worker's image is missing at first, so that the parameter server starts first, as in the recording.
    cluster.node.missing_images.add("Worker")
    cluster.store.create(TF_JOBS, "default", {"metadata": {"name": "tf1"}, "spec": spec})

    def replicas():
        return (cluster.store.get(TF_JOBS, "default", "tf1").get("status") or {}).get("replicaStatuses", {})

    wait_until(lambda: replicas().get("PS"), "the parameter server runs", DEADLINE_S)
    cluster.node.missing_images.clear()
    cluster.node.look_again()
    until_met(cluster, TF_JOBS, "tf1", "Running")
    (tmp_path / "Worker").touch()
    until_met(cluster, TF_JOBS, "tf1", "Succeeded")
    (tmp_path / "PS").touch()
    wait_until(lambda: replicas()["PS"] == {"succeeded": 1}, "the parameter server has ended", DEADLINE_S)
    cluster.store.delete(TF_JOBS, "default", "tf1")
    assert changes_of_jobs(cluster, TF_JOBS) == wanted["jobs"]
    assert {name: made(cluster, name) for name in wanted["made"]} == wanted["made"]


def test_a_killed_replica_is_restarted_if_its_restart_policy_permits_it(cluster):
    container = {"name": "tensorflow", "image": "x", "command": ["sleep", "100"]}
    worker = {"replicas": 1, "restartPolicy": "ExitCode", "template": {"spec": {"containers": [container]}}}
    body = {"metadata": {"name": "tf1"}, "spec": {"tfReplicaSpecs": {"Worker": worker}}}
    cluster.store.create(TF_JOBS, "default", body)
    until_met(cluster, TF_JOBS, "tf1", "Running")
    cluster.node.kill("default", "tf1-worker-0")
    wait_until(
        lambda: any(row[1] and row[1][-1][0] == "Restarting" for row in changes_of_jobs(cluster, TF_JOBS)),
        "the job restarts",
        DEADLINE_S,
    )
    until_met(cluster, TF_JOBS, "tf1", "Running")
    assert conditions(cluster, TF_JOBS, "tf1") == {"Created": "True", "Running": "True"}
    cluster.store.delete(TF_JOBS, "default", "tf1")


def a_job(name="j1", count=2, command="test $JOB_COMPLETION_INDEX -lt 2", **labels):
    container = {"name": "trial", "image": "x", "command": ["sh", "-c", command]}
    pod = {"restartPolicy": "Never", "containers": [container]}
    spec = {"completions": count, "parallelism": count, "completionMode": "Indexed", "backoffLimit": 0}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec | {"template": {"spec": pod}}}


def test_an_indexed_job_gives_each_pod_an_index_and_completes_when_all_pods_have_succeeded(cluster):
    cluster.store.create(JOBS, "default", a_job())
    status = until_met(cluster, JOBS, "j1", "Complete")
    assert (status["succeeded"], status["active"]) == (2, 0)
    cluster.store.delete(JOBS, "default", "j1")
    wait_until(lambda: not cluster.store.list(PODS), "its pods are deleted", DEADLINE_S)
    cluster.store.create(
        JOBS, "default", a_job(command="[ $JOB_COMPLETION_INDEX = 1 ] && exit 7; exec sleep 100")
    )
    until_met(cluster, JOBS, "j1", "Failed")
    assert conditions(cluster, JOBS, "j1") == {"FailureTarget": "True", "Failed": "True"}


def test_a_job_with_a_queue_is_suspended_until_the_queue_admits_the_job(cluster):
    queue = {"metadata": {"name": "team"}, "spec": {"clusterQueue": "all", "stopPolicy": "Hold"}}
    cluster.store.create(LOCAL_QUEUES, "default", queue)
    cluster.store.create(JOBS, "default", a_job(**{QUEUE: "team"}))
    until_met(cluster, JOBS, "j1", "Suspended")
    assert not cluster.store.list(PODS)
    cluster.store.change(LOCAL_QUEUES, "default", "team", lambda it: it["spec"].update(stopPolicy="None"))
    until_met(cluster, JOBS, "j1", "Complete")
    assert conditions(cluster, JOBS, "j1")["Suspended"] == "False"


@pytest.mark.parametrize("release", ["2.1", "2.2"])
def test_a_trainjob_can_override_the_pod_template_of_its_training_runtime(cluster, release):
    definitions_of = (definitions.train_job(release), definitions.CLUSTER_RUNTIME)
    for each in definitions_of:
        cluster.store.create(DEFINITIONS, "", each)
    cluster.store.create(RUNTIMES, "", definitions.TORCH_DISTRIBUTED)
    volumes = [{"name": "v", "emptyDir": {}}]
    mounts = [{"name": "node", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]
    pod = {"metadata": {"labels": {"mine": "yes"}}, "spec": {"volumes": volumes, "containers": mounts}}
    node = {"name": "node", "template": {"spec": {"template": pod}}}
    patch = {"manager": "me", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
    spec = {
        "runtimeRef": {"kind": "ClusterTrainingRuntime", "name": "torch-distributed"},
        "trainer": {"numNodes": 2, "command": ["sh", "-c", "test $PET_NNODES = 2 && touch /v/x"]},
        "podTemplateOverrides": [{"targetJobs": [{"name": "node"}], **pod}],
        "runtimePatches": [patch],
    }
    cluster.store.create(TRAIN_JOBS, "default", {"metadata": {"name": "t1"}, "spec": spec})
    status = until_met(cluster, TRAIN_JOBS, "t1", "Complete")
    (told,) = status["jobsStatus"]
    assert (told["name"], told["succeeded"]) == ("node", 1)
    pods = cluster.store.list(PODS)
    assert len(pods) == 2
    assert all(each["metadata"]["labels"]["mine"] == "yes" for each in pods)
    assert [len(each["spec"]["volumes"]) for each in pods] == [1, 1], "each release must read its own field"
    other = {"metadata": {"name": "t2"}, "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "none"}}}
    cluster.store.create(TRAIN_JOBS, "default", other)
    until_met(cluster, TRAIN_JOBS, "t2", "Failed")


def test_the_resource_definitions_refuse_invalid_jobs(cluster):
    container = {"name": "pytorch", "image": "x"}
    spec = {
        "pytorchReplicaSpecs": {"Chief": {"replicas": 1, "template": {"spec": {"containers": [container]}}}}
    }
    with pytest.raises(Refused, match="Chief"):
        cluster.store.create(PYTORCH_JOBS, "default", {"metadata": {"name": "pt1"}, "spec": spec})
