"""Causes that end a trial's pod or job, or prevent its start.

Every display shows the message of Kubernetes for each cause. The tests use the real nnictl and manager with the fake cluster. On
another cluster, only the causes that a test can produce there are tested. The table `CAUSES` and docs/frameworkcontroller.md list
the same causes.
"""

import contextlib
import json
import re
import time

import pytest
from deadlines import scaled_s
from kube_controllers import FRAMEWORKS
from kube_place import CLAIM, Place, surroundings, worker_role
from kube_store import PODS
from real_experiment import wait_until

pytest.importorskip("kubernetes")
import kubernetes

from nni_manager.client.manager_client import ManagerClient
from nni_manager.store.folders import ExperimentFolder
from nni_manager.training_services.frameworkcontroller.operator import FRAMEWORKS as OUR_FRAMEWORKS
from nni_manager.training_services.kubernetes.render import selector_of

pytestmark = pytest.mark.timeout(400)

# Each display must show the cause within this time after the failure in Kubernetes.
SHOWN_WITHIN_S = 10.0
# Within this time, a real cluster pulls an image or reports that the pull failed.
REAL_CLUSTER_S = 300
TRAIN = """\
import os, sys, time
import nni_sdk
nni_sdk.get_next_parameter()
if os.environ["NNI_TRIAL_SEQ_ID"] == {failing!r}:
    sys.exit(3)
time.sleep(3600)
"""


@pytest.fixture
def place(tmp_path):
    with surroundings(tmp_path) as around, contextlib.ExitStack() as stack:
        place = Place(tmp_path, around, TRAIN.format(failing="none"))
        place.uses(OUR_FRAMEWORKS)
        place.at_end = stack
        if around.double is None:
            stack.callback(place.nnictl, "stop")
        place.admin = kubernetes.config.new_client_from_config(str(around.kubeconfig))
        stack.enter_context(place.admin)
        place.config["trainingServicePlatform"] = "frameworkcontroller"
        place.config |= {"maxTrialNum": 1, "trialConcurrency": 1, "lostNodeTimeout": "3s"}
        place.config["trial"]["taskRoles"] = [worker_role("python3 train.py", around.image)]
        place.config["frameworkcontrollerConfig"] = around.storage | {"namespace": around.namespace}
        if around.service_account is not None:
            place.config["frameworkcontrollerConfig"]["serviceAccountName"] = around.service_account
        yield place


def selector(place):
    """The label selector for the objects of the experiment."""
    (path,) = (place.folder / "experiments").iterdir()
    return selector_of(path.name)


def pod_of(place):
    """The name of the trial's pod, after the pod has started."""
    core = kubernetes.client.CoreV1Api(place.admin)

    def running():
        found = core.list_namespaced_pod(place.around.namespace, label_selector=selector(place)).items
        return next((each.metadata.name for each in found if each.status.phase == "Running"), None)

    return wait_until(running, "the pod runs", patience_s(place))


def patience_s(place):
    """The seconds within which the cluster starts a pod, or shows a failure."""
    return scaled_s(40) if place.around.double is not None else REAL_CLUSTER_S


# ---- failures: those in BEFORE occur before the experiment is created, the others after the trial's pod has started


def no_image(place):
    place.config["trial"]["taskRoles"][0]["image"] = "registry.invalid/me/train:1"


def no_mount(place):
    del place.cluster.node.exports[CLAIM]


def no_node(place):
    place.config["trial"]["taskRoles"][0]["cpuNum"] = 99_999


def no_quota(place):
    core, namespace = kubernetes.client.CoreV1Api(place.admin), place.around.namespace
    quota = {"metadata": {"name": "of-the-team"}, "spec": {"hard": {"pods": "0"}}}
    core.create_namespaced_resource_quota(namespace, quota)
    place.at_end.callback(core.delete_namespaced_resource_quota, "of-the-team", namespace)


def denied(place):
    message = 'admission webhook "policy.example.com" denied the request: label team is missing'
    place.cluster.api.misbehave((403, "Forbidden", message), 9, at=("create", FRAMEWORKS.plural))


def memory_full(place):
    place.cluster.node.kill("default", pod_of(place), "OOMKilled")


def evicted(place):
    place.cluster.node.evict("default", pod_of(place))


def drained(place):
    pod, namespace = pod_of(place), place.around.namespace
    core = kubernetes.client.CoreV1Api(place.admin)
    core.create_namespaced_pod_eviction(pod, namespace, {"metadata": {"name": pod, "namespace": namespace}})


def preempted(place):
    place.cluster.node.preempt(place.cluster.store.get(PODS, "default", pod_of(place)))


def pod_deleted(place):
    core = kubernetes.client.CoreV1Api(place.admin)
    core.delete_namespaced_pod(pod_of(place), place.around.namespace)


def job_deleted(place):
    pod_of(place)
    custom = kubernetes.client.CustomObjectsApi(place.admin)
    where = (OUR_FRAMEWORKS.group, OUR_FRAMEWORKS.version, place.around.namespace, OUR_FRAMEWORKS.plural)
    (framework,) = custom.list_namespaced_custom_object(*where, label_selector=selector(place))["items"]
    custom.delete_namespaced_custom_object(*where, framework["metadata"]["name"])


def node_lost(place):
    pod_of(place)
    place.cluster.node.lose()


def too_long(place):
    place.cluster.node.exceed_deadline("default", pod_of(place))


def command_fails(place):
    (place.work / "train.py").write_text(TRAIN.format(failing="0"))


BEFORE = (no_image, no_mount, no_node, no_quota, denied, command_fails)
ANYWHERE = (no_image, no_node, no_quota, drained, pod_deleted, job_deleted, command_fails)
"""The failures that a test can cause on any cluster."""
SMOKE = (no_image, evicted)
"""One reason from an event, and one from a pod."""
WAITS = "not started yet: "
DELETED = "but not by this manager"
CAUSES = {
    no_image: (
        "WAITING",
        WAITS + r'ImagePullBackOff: Back-off pulling image "registry.invalid/me/train:1"',
    ),
    no_mount: (
        "WAITING",
        WAITS + r'FailedMount: MountVolume.SetUp failed for volume "nni-vol" : .*no such export',
    ),
    no_node: ("WAITING", WAITS + r"Unschedulable: 0/(\d+) nodes are available: \1 Insufficient cpu."),
    no_quota: ("WAITING", WAITS + r'pods "\S+" is forbidden: exceeded quota: of-the-team, requested: pods=1'),
    denied: ("FAILED", r'could not start: .*"policy.example.com" denied the request: label team is missing'),
    memory_full: ("FAILED", r"out of memory: pod \S+ failed: OOMKilled, exit code 137; the memory of its"),
    evicted: ("FAILED", r"(job|keeper) lost: pod \S+ failed: Evicted: The node was low on resource: memory."),
    drained: (
        "FAILED",
        r"job lost: pod \S+ was evicted through the API, .*: EvictionByEvictionAPI: Eviction API: ev",
    ),
    preempted: (
        "FAILED",
        r"preempted: pod \S+ was preempted for one of higher priority: PreemptionByScheduler",
    ),
    pod_deleted: ("FAILED", rf"job lost: pod \S+ was deleted at \S+Z, {DELETED}; the API server's audit log"),
    job_deleted: ("FAILED", rf"job lost: Framework \S+ in namespace default was deleted, {DELETED}"),
    node_lost: ("FAILED", r"job lost: node n1 has not been ready for \d+ s"),
    too_long: (
        "FAILED",
        r"(job|keeper) lost: pod \S+ failed: DeadlineExceeded: Pod was active on the node longer",
    ),
    command_fails: ("FAILED", r"exit code 3"),
}
"""For each failure: the state of the trial, and the cause that each display shows."""


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way,
            marks=[
                mark
                for mark, ways in ((pytest.mark.any_cluster, ANYWHERE), (pytest.mark.smoke, SMOKE))
                if way in ways
            ],
        )
        for way in CAUSES
    ],
    ids=lambda way: way.__name__,
)
def test_every_display_shows_the_failure_message_of_kubernetes(place, way):
    state, cause = CAUSES[way]
    place.config["maxPreemptions"] = 0
    if way in BEFORE:
        way(place)
    # The displays need a running manager. After the failure of its only trial, an experiment would end, so a FAILED trial is
    # followed by a second trial.
    place.config["maxTrialNum"] = 2 if state == "FAILED" else 1
    done = place.create()
    assert done.returncode == 0, done.stderr
    (path,) = (place.folder / "experiments").iterdir()
    client = ManagerClient(path.name, ExperimentFolder(path).running_process())
    if way not in BEFORE:
        way(place)
    known_at_s = time.monotonic()

    def shown():
        found = client.get("/trials")
        return found and found[0]["state"] == state and re.search(cause, as_shown(found[0])) and found[0]

    try:
        trial = wait_until(shown, "the cause is shown", patience_s(place))
    except AssertionError as error:
        raise AssertionError(f"{way.__name__}: {client.get('/trials')[0]}") from error
    if place.around.double is not None:
        took_s = time.monotonic() - known_at_s
        assert took_s < scaled_s(SHOWN_WITHIN_S), took_s
    listed = place.nnictl("trial", "ls").stdout
    assert re.search(cause, listed), listed
    if state == "WAITING":
        assert re.search(cause, client.get("/summary")["clusterMessages"][trial["id"]])
    told = json.loads(place.nnictl("trial", "show", "--trial-id", trial["id"]).stdout)
    assert re.search(cause, as_shown(told)), told
    watched = lines_of(place.start("top", "--time", "0.2"), cause.removeprefix(WAITS))
    print(f"| {way.__name__} | {state} | {as_shown(trial).splitlines()[0]} | {watched[:160]} |")


@pytest.mark.parametrize("way", [no_image, no_mount], ids=lambda way: way.__name__)
def test_a_pending_trial_keeps_the_pending_reason_of_kubernetes_if_the_user_kills_the_trial(place, way):
    """FrameworkController reports the manager's own deletion as an external deletion, which the message must not show."""
    _, reason = CAUSES[way]
    reason = reason.removeprefix(WAITS)
    way(place)
    assert place.create().returncode == 0
    (path,) = (place.folder / "experiments").iterdir()
    client = ManagerClient(path.name, ExperimentFolder(path).running_process())
    found = wait_until(
        lambda: next((each for each in client.get("/trials") if re.search(reason, each["message"])), None),
        "the reason is shown",
    )
    assert place.nnictl("trial", "kill", "--trial-id", found["id"]).returncode == 0
    wait_until(lambda: client.get("/trials", found["id"])["state"] == "USER_CANCELED", "the trial has ended")
    told = json.loads(place.nnictl("trial", "show", "--trial-id", found["id"]).stdout)
    assert re.match(f"stopped before it started: {reason}", told["message"]), told
    assert "ConfigMapExternalDeleted" not in told["message"]


@pytest.mark.smoke
def test_a_trial_on_a_lost_node_is_retried_and_the_job_on_the_lost_node_is_reported_as_leftover(place):
    place.config["maxTrialRetry"] = 1
    assert place.create().returncode == 0
    (path,) = (place.folder / "experiments").iterdir()
    client = ManagerClient(path.name, ExperimentFolder(path).running_process())
    lost = pod_of(place)
    place.cluster.node.lose()
    retried = "the cluster lost it (job lost); retry 1 of 1"
    trial = wait_until(
        lambda: next((each for each in client.get("/trials") if each["warning"] == retried), None),
        "it is retried",
    )
    assert (trial["state"], trial["retries"]) == ("WAITING", 1)
    wait_until(lambda: place.cluster.store.count(FRAMEWORKS) == 2, "it has a new job")
    (left,) = json.loads(place.nnictl("experiment", "status").stdout)["leftovers"]
    assert left.startswith(f"cannot confirm the end of job {trial['id']}: node n1 has not been ready for ")
    assert f"expId={path.name},trialId={trial['id']} " in left
    place.cluster.node.bury()
    wait_until(lambda: not place.cluster.store.find(PODS, "default", lost), "the old pod is gone")
    wait_until(
        lambda: not json.loads(place.nnictl("experiment", "status").stdout)["leftovers"],
        "nothing is left of it",
    )


def lines_of(process, pattern):
    """Return the first line of a running command's output that matches, and end the command."""
    try:
        return next(line for line in process.stderr if re.search(pattern, line)).strip()
    finally:
        process.terminate()
        process.communicate()


def as_shown(trial):
    """The text that the page and `trial ls` show for a trial."""
    return f"{trial['why']}\n{trial['message']}" if trial["state"] == "FAILED" else trial["message"]
