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


# The short cases come first, because a manager waits a minute before it gives up a job that has not ended.
WAYS = (with_a_server_that_deletes_nothing, without_the_right_to_delete, without_a_server, during_an_outage)
MOMENTS = 20


@pytest.mark.parametrize(
    ("way", "number"),
    amount([(way, 0) for way in WAYS[:3]], [(way, number) for number in range(MOMENTS) for way in WAYS]),
)
def test_leftover_jobs_are_reported_with_a_removal_command_until_the_jobs_are_removed(place, way, number):
    """Case number 0 has no delay and always leaves a job. The other cases have a random delay, so they may leave none."""
    done = way(place, random.Random(f"{way.__name__} {number}").uniform(0, 2) if number else 0.0)
    found = place.cluster.store.list(FRAMEWORKS)
    assert found or number
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
    assert place.nnictl("stop", path.name).returncode == (0 if left_over else 1), (
        "without leftovers it is over"
    )
    wait_until(lambda: not left(place), "nothing is left", DEADLINE_S)
    assert json.loads(place.nnictl("experiment", "status").stdout)["leftovers"] == []
    assert place.nnictl("experiment", "delete", path.name, "--yes").returncode == 0
