"""Experiments end while Kubernetes cannot report or delete resources. Every possible leftover is reported, with a command
that removes it.

The real nnictl and manager use the fake cluster.
"""

import json
import random
import re
import time

import pytest
from amounts import amount
from deadlines import DEADLINE_S
from kube_controllers import FRAMEWORKS
from kube_place import Place, our_cluster, worker_role
from kube_store import CONFIG_MAPS, PODS, SECRETS
from real_experiment import wait_until

pytest.importorskip("kubernetes")

from nni_manager.client.manager_client import ManagerClient
from nni_manager.store.folders import ExperimentFolder

pytestmark = pytest.mark.timeout(300)

# Each trial waits until the test creates the gate file.
TRAIN = """\
import os, time
import nni_sdk
nni_sdk.get_next_parameter()
nni_sdk.report_intermediate_result(1)
while not os.path.exists({gate!r}):
    time.sleep(0.05)
nni_sdk.report_final_result(1)
"""
KINDS = (FRAMEWORKS, SECRETS, PODS, CONFIG_MAPS)


@pytest.fixture
def place(tmp_path):
    with our_cluster(tmp_path) as around:
        place = Place(tmp_path, around, TRAIN.format(gate=str(tmp_path / "gate")))
        place.gate = tmp_path / "gate"
        place.config["trainingServicePlatform"] = "frameworkcontroller"
        place.config["maxTrialNum"] = 2
        place.config["trial"]["taskRoles"] = [worker_role("python3 train.py", around.image)]
        place.config["frameworkcontrollerConfig"] = around.storage | {"namespace": around.namespace}
        yield place


def left(place):
    return [found["metadata"]["name"] for kind in KINDS for found in place.cluster.store.list(kind)]


def both_run(place, *options):
    """Create the experiment and wait until both trials run; return the process of `nnictl create`."""
    creating = place.start("create", "--config", "config.yml", "--port", "auto", *options)
    wait_until(
        lambda: (
            place.cluster.store.count(PODS, lambda pod: pod.get("status", {}).get("phase") == "Running") == 2
        ),
        "both trials run",
    )
    return creating


def without_a_server(place, moment_s):
    """The API server dies after the trials have ended, before Kubernetes reports their ends."""
    creating = both_run(place, "--foreground")
    place.gate.touch()
    time.sleep(moment_s)
    place.cluster.api.stop()
    return place.completed(creating)


def during_an_outage(place, moment_s):
    """The user stops the experiment while its trials run and the API server is down."""
    place.completed(both_run(place))
    time.sleep(moment_s)
    place.cluster.api.stop()
    return place.nnictl("stop")


def have_ended(place):
    """Wait until both keepers have reported to the manager that their trials have ended."""
    (path,) = (place.folder / "experiments").iterdir()
    client = ManagerClient(path.name, ExperimentFolder(path).running_process())
    wait_until(
        lambda: [trial["status"] for trial in client.get("/trials")] == ["SUCCEEDED"] * 2,
        "both trials have ended",
    )


def soon_after_an_outage(place, moment_s):
    """The trials end during an outage of the API server, and the user stops the experiment soon after the outage."""
    place.completed(both_run(place))
    place.cluster.api.stop()
    place.gate.touch()
    have_ended(place)
    place.cluster.api.start()
    time.sleep(moment_s)
    return place.nnictl("stop")


def without_the_controller(place, moment_s):
    """FrameworkController is dead when the trials end, so no Framework completes."""
    place.completed(both_run(place))
    place.cluster.controllers.stopped.add(FRAMEWORKS)
    place.gate.touch()
    have_ended(place)
    time.sleep(moment_s)
    return place.nnictl("stop")


def with_a_server_that_deletes_nothing(place, moment_s):
    """Kubernetes reports the ends of the jobs, but can delete no resource."""
    creating = both_run(place, "--foreground")
    place.gate.touch()
    time.sleep(moment_s)
    place.cluster.api.misbehave(503, 1000, at=("delete", FRAMEWORKS.plural))
    return place.completed(creating)


def without_the_right_to_delete(place, moment_s):
    place.completed(both_run(place))
    place.cluster.api.denied.add(("delete", FRAMEWORKS.plural))
    place.gate.touch()
    (path,) = (place.folder / "experiments").iterdir()
    manager = ExperimentFolder(path).running_process()
    client = ManagerClient(path.name, manager)
    wait_until(lambda: "is forbidden" in client.get("/summary")["problem"], "the refusal is a problem")
    time.sleep(moment_s)
    return place.nnictl("stop")


# Each scenario sleeps until a random moment, because there is no event to wait for. In the slow scenarios, which come last, a
# manager waits a minute for a job that has not ended.
LEAVING = (with_a_server_that_deletes_nothing, without_the_right_to_delete, without_a_server)
"""These leave a job if they have no delay."""
WAYS = (*LEAVING, during_an_outage, soon_after_an_outage, without_the_controller)
MOMENTS = 20


@pytest.mark.parametrize(
    ("way", "number"),
    amount(
        [(way, 0) for way in (*LEAVING, without_the_controller)],
        [(way, number) for number in range(MOMENTS) for way in WAYS],
    ),
)
def test_leftover_jobs_are_reported_with_a_removal_command_until_the_jobs_are_removed(place, way, number):
    """Case 0 has no delay. It leaves a job behind if LEAVING contains its scenario. The other cases have a random delay."""
    latest_s = 9.0 if way is soon_after_an_outage else 2.0
    done = way(place, random.Random(f"{way.__name__} {number}").uniform(0, latest_s) if number else 0.0)
    found = place.cluster.store.list(FRAMEWORKS)
    assert found or number or way not in LEAVING
    for framework in found:
        labels = framework["metadata"]["labels"]
        command = rf"`kubectl delete frameworks,pods -n default -l \S*expId={labels['expId']},trialId={labels['trialId']} "
        assert re.search(command, done.stderr), done.stderr

    (path,) = (place.folder / "experiments").iterdir()
    status = json.loads(place.nnictl("experiment", "status").stdout)
    # Without the API server, the manager cannot check whether a resource is deleted, so it may list more than is left.
    left_over = status["leftovers"]
    assert len(left_over) >= len(found)
    assert all(len(re.findall("`kubectl delete ", each)) == 1 for each in left_over)
    assert done.returncode == (1 if left_over else 0), done.stderr
    if found:
        kept = place.nnictl("experiment", "delete", path.name)
        assert kept.returncode == 1
        assert f"run `nnictl stop {path.name}` first, or use --force" in kept.stderr

    if way in (without_a_server, during_an_outage):
        place.cluster.api.start()
    place.cluster.api.stop_misbehaving(("delete", FRAMEWORKS.plural))
    place.cluster.api.denied.clear()
    place.cluster.controllers.stopped.clear()
    assert place.nnictl("stop", path.name).returncode == (0 if left_over else 1), (
        "without leftovers it is over"
    )
    wait_until(lambda: not left(place), "nothing is left", DEADLINE_S)
    assert json.loads(place.nnictl("experiment", "status").stdout)["leftovers"] == []
    assert place.nnictl("experiment", "delete", path.name, "--yes").returncode == 0
