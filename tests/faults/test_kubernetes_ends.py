"""For each cause that ends a trial's pod or job, or prevents its start: every display shows the cause in the words of
Kubernetes.

The real nnictl and manager use the fake cluster. docs/frameworkcontroller.md lists the same causes as the table `CAUSES`.
"""

import json
import os
import re
import time

import pytest
from deadlines import scaled_s
from kube_controllers import FRAMEWORKS
from kube_place import CLAIM, Place, our_cluster, worker_role
from kube_store import PODS, QUOTAS
from real_experiment import wait_until

pytest.importorskip("kubernetes")

from nni_manager.client.manager_client import ManagerClient
from nni_manager.store.folders import ExperimentFolder

pytestmark = pytest.mark.timeout(400)

# Each display must show the cause within this time after the failure in Kubernetes.
SHOWN_WITHIN_S = 10.0
TRAIN = """\
import sys, pathlib
import nni_sdk
nni_sdk.get_next_parameter()
# A named pipe: the trial waits for a writer.
sys.exit(int(pathlib.Path({code!r}).read_text()))
"""


@pytest.fixture
def place(tmp_path):
    os.mkfifo(tmp_path / "code")
    with our_cluster(tmp_path) as around:
        place = Place(tmp_path, around, TRAIN.format(code=str(tmp_path / "code")))
        place.config["trainingServicePlatform"] = "frameworkcontroller"
        place.config |= {"maxTrialNum": 1, "trialConcurrency": 1, "lostNodeTimeout": "3s"}
        place.config["trial"]["taskRoles"] = [worker_role("python3 train.py", around.image)]
        place.config["frameworkcontrollerConfig"] = around.storage | {"namespace": around.namespace}
        yield place


def pod_of(place):
    """The name of the trial's pod, once it runs."""

    def running():
        found = [each for each in place.cluster.store.list(PODS) if each["status"]["phase"] == "Running"]
        return found and found[0]["metadata"]["name"]

    return wait_until(running, "the pod runs")


# ---- failures: before the experiment is created (BEFORE), or after its pod has started


def no_image(place):
    place.cluster.node.missing_images.add("me/train:1")


def no_mount(place):
    del place.cluster.node.exports[CLAIM]


def no_node(place):
    place.cluster.node.is_full = True


def no_quota(place):
    quota = {"metadata": {"name": "of-the-team"}, "spec": {"hard": {"pods": "0"}}}
    place.cluster.store.create(QUOTAS, "default", quota)


def denied(place):
    message = 'admission webhook "policy.example.com" denied the request: label team is missing'
    place.cluster.api.misbehave((403, "Forbidden", message), 9, at=("create", FRAMEWORKS.plural))


def memory_full(place):
    place.cluster.node.kill("default", pod_of(place), "OOMKilled")


def evicted(place):
    place.cluster.node.evict("default", pod_of(place))


def drained(place):
    place.cluster.node.drain("default", pod_of(place))


def preempted(place):
    place.cluster.node.preempt(place.cluster.store.get(PODS, "default", pod_of(place)))


def pod_deleted(place):
    place.cluster.store.delete(PODS, "default", pod_of(place))


def job_deleted(place):
    pod_of(place)
    (framework,) = place.cluster.store.list(FRAMEWORKS)
    place.cluster.store.delete(FRAMEWORKS, "default", framework["metadata"]["name"])


def node_lost(place):
    pod_of(place)
    place.cluster.node.lose()


def too_long(place):
    place.cluster.node.exceed_deadline("default", pod_of(place))


def command_fails(place):
    pod_of(place)
    (place.folder / "code").write_text("3")


BEFORE = (no_image, no_mount, no_node, no_quota, denied)
WAITS = "not started yet: "
DELETED = "but not by this manager"
CAUSES = {
    no_image: ("WAITING", WAITS + r'ImagePullBackOff: Back-off pulling image "me/train:1": not found'),
    no_mount: (
        "WAITING",
        WAITS + r'FailedMount: MountVolume.SetUp failed for volume "nni-vol" : .*no such export',
    ),
    no_node: ("WAITING", WAITS + r"Unschedulable: 0/1 nodes are available: 1 Insufficient cpu."),
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


@pytest.mark.parametrize("way", CAUSES, ids=lambda way: way.__name__)
def test_every_display_shows_the_cause_of_a_failure_in_the_words_of_kubernetes(place, way):
    state, cause = CAUSES[way]
    place.config["maxPreemptions"] = 0
    if way in BEFORE:
        way(place)
    # With a second trial, the experiment continues after the first failure, so its manager still serves the displays.
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
        trial = wait_until(shown, "the cause is shown", scaled_s(40))
    except AssertionError as error:
        raise AssertionError(f"{way.__name__}: {client.get('/trials')[0]}") from error
    took_s = time.monotonic() - known_at_s
    assert took_s < scaled_s(SHOWN_WITHIN_S), took_s
    listed = place.nnictl("trial", "ls").stdout
    assert re.search(cause, listed), listed
    told = json.loads(place.nnictl("trial", "show", "--trial-id", trial["id"]).stdout)
    assert re.search(cause, as_shown(told)), told
    watched = lines_of(place.start("top", "--time", "0.2"), cause.removeprefix(WAITS))
    print(f"| {way.__name__} | {state} | {as_shown(trial).splitlines()[0]} | {watched[:160]} |")


@pytest.mark.parametrize("way", [no_image, no_mount], ids=lambda way: way.__name__)
def test_a_pending_trial_that_the_user_kills_keeps_the_pending_reason_of_kubernetes(place, way):
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


def test_a_trial_of_a_lost_node_is_retried_and_its_old_job_is_reported_as_leftover(place):
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
