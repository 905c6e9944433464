"""Whole experiments with the real nnictl and a real keeper per pod, on the fake cluster or any other."""

import re

import pytest
from azure_here import ACCOUNT, SECRET, SHARE, VAULT, Azure, new_key
from deadlines import DEADLINE_S
from kube_place import Place, output_of, surroundings, trials_of, worker_role
from kube_store import ACCOUNTS
from real_experiment import wait_until

pytest.importorskip("kubernetes")

from nni_manager.training_services.frameworkcontroller.operator import FRAMEWORKS

TRAIN = """\
import os
import nni_sdk
print("in", os.environ["FC_FRAMEWORK_NAME"], "of", os.environ["TEAM"])
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(x / 2)
nni_sdk.report_final_result(x)
"""


@pytest.fixture
def place(tmp_path):
    with surroundings(tmp_path) as around:
        place = Place(tmp_path, around, TRAIN)
        place.uses(FRAMEWORKS)
        place.config["trainingServicePlatform"] = "frameworkcontroller"
        place.config["trial"]["taskRoles"] = [
            worker_role("TEAM='it''s $HOME' python3 train.py", around.image)
        ]
        place.config["frameworkcontrollerConfig"] = around.storage | {"namespace": around.namespace}
        if around.service_account is not None:
            place.config["frameworkcontrollerConfig"]["serviceAccountName"] = around.service_account
        yield place


@pytest.mark.any_cluster
@pytest.mark.smoke
def test_an_experiment_creates_one_framework_object_per_trial_and_deletes_the_objects(place):
    done = place.create("--foreground")
    assert done.returncode == 0, done.stderr
    assert "run jobs on FrameworkController at https://" in done.stdout
    assert f", in namespace {place.around.namespace}" in done.stdout
    workspace = place.workspace(done)
    trials = trials_of(workspace)
    assert len(trials) == 3
    for trial in trials:
        name = f"nniexp{workspace.root.name}trial{trial}".lower()
        assert output_of(workspace, trial) == f"in {name} of it" + "s $HOME\n"
    wait_until(lambda: not place.left(workspace, FRAMEWORKS), "nothing is left", DEADLINE_S)
    if place.around.double is not None:
        asked = place.cluster.api.counted()
        assert asked["create", "frameworks"] == 3
        assert asked["watch", "frameworks"] == asked["watch", "pods"] == 1
        assert asked["watch", "events"] == 2, "warnings and preemptions"


@pytest.mark.any_cluster
def test_a_reused_job_runs_the_command_of_each_role_for_every_trial(place):
    if place.around.double is not None:
        place.cluster.store.create(ACCOUNTS, "default", {"metadata": {"name": "frameworkbarrier"}})
        place.config["frameworkcontrollerConfig"]["serviceAccountName"] = "frameworkbarrier"
        place.cluster.api.denied.add(("watch", "events"))  # the manager works without this permission
    (worker,) = place.config["trial"]["taskRoles"]
    ps = worker | {"name": "ps", "command": "echo $FB_WORKER_ADDRESSES"}
    ps["frameworkAttemptCompletionPolicy"] = {"minFailedTaskCount": 1, "minSucceededTaskCount": -1}
    place.config["trial"]["taskRoles"] = [ps, worker]
    place.config["frameworkcontrollerConfig"]["reuse"] = True
    place.config |= {"maxTrialNum": 2, "trialConcurrency": 1}
    done = place.create("--foreground")
    assert done.returncode == 0, done.stderr
    workspace = place.workspace(done)
    trials = trials_of(workspace)
    assert len(trials) == 2
    for trial in trials:
        assert re.fullmatch(r"[\d.]+:4001\n", output_of(workspace, trial, "ps-0"))
        assert f"in nniexp{workspace.root.name.lower()}env0 of" in output_of(workspace, trial)
    wait_until(lambda: not place.left(workspace, FRAMEWORKS), "nothing is left", DEADLINE_S)
    if place.around.double is not None:
        assert place.cluster.api.counted()["create", "frameworks"] == 1
        assert "this login may not list and watch events in namespace default: " in done.stderr


@pytest.mark.smoke
def test_nnictl_create_reports_all_missing_permissions_and_objects(place):
    place.config["frameworkcontrollerConfig"] |= {"serviceAccountName": "nobody", "namespace": "default"}
    place.config["frameworkcontrollerConfig"]["pvc"] = {"path": str(place.storage), "name": "other"}
    place.cluster.api.denied |= {("create", "frameworks"), ("list", "events")}
    done = place.create()
    assert done.returncode == 1
    for words in (
        "this login may not create frameworks in namespace default",
        "ServiceAccount nobody does not exist in namespace default",
        "PersistentVolumeClaim other does not exist in namespace default",
    ):
        assert words in done.stderr
    assert not (place.folder / "experiments").exists()
    assert list(place.storage.iterdir()) == []


@pytest.fixture
def azure(place):
    pytest.importorskip("azure.storage.fileshare")
    with Azure(place.folder / "azure") as azure:
        place.environ = azure.environ
        place.cluster.node.exports[ACCOUNT, SHARE, azure.key] = azure.share
        place.storage = azure.share
        section = place.config["frameworkcontrollerConfig"]
        section |= {
            "storage": "azureStorage",
            "azureStorage": {"accountName": ACCOUNT, "azureShare": SHARE},
            "keyVault": {"vaultName": VAULT, "name": SECRET},
        }
        del section["pvc"]
        yield azure


def test_pods_use_the_azure_share_and_the_account_key_is_stored_in_no_file(place, azure):
    done = place.create("--foreground")
    assert done.returncode == 0, done.stderr
    workspace = place.workspace(done)
    trials = trials_of(workspace)
    assert len(trials) == 3
    for trial in trials:
        assert output_of(workspace, trial).startswith(f"in nniexp{workspace.root.name}trial{trial}".lower())
    wait_until(lambda: not place.left(workspace, FRAMEWORKS), "nothing is left", DEADLINE_S)
    assert place.cluster.api.counted()["create", "secrets"] == 6
    here = place.folder / "experiments" / workspace.root.name
    assert not list(here.glob("trials/*/attempts/*")), "trials must write only to the share"
    for path in [*here.rglob("*"), *workspace.root.rglob("*")]:
        for secret in (azure.key, azure.environ["AZURE_CLIENT_SECRET"]):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    log = place.nnictl("log", "trial", workspace.root.name, "--trial-id", trials[0])
    assert (log.returncode, log.stdout) == (0, output_of(workspace, trials[0])), log.stderr


def test_nnictl_create_reports_azure_errors_together_with_cluster_errors(place, azure):
    azure.key = new_key("not the vault's")
    place.cluster.api.denied.add(("create", "secrets"))
    done = place.create()
    assert done.returncode == 1
    assert "this login may not create secrets in namespace default" in done.stderr
    assert "store the account's current key in the vault" in done.stderr
    assert not (place.folder / "experiments").exists()
    assert azure.writes() == []
