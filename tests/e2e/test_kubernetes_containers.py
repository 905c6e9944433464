"""An experiment on the fake Kubernetes cluster whose pods are real containers of the keeper's image."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from bash_trial import TRAIN_SH
from deadlines import DEADLINE_S
from kube_containers import ContainerPod, specification
from kube_place import Place, our_cluster, output_of, trials_of, worker_role
from kube_store import PODS
from real_experiment import wait_until

pytest.importorskip("kubernetes")

from nni_manager.training_services.frameworkcontroller.operator import FRAMEWORKS

TRAIN = """
import os
import nni_sdk
print(os.getpid() > 1, os.path.isdir("/opt/trial-keeper"), os.environ["NNI_SYS_DIR"].startswith("/tmp/mount/"))
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(x / 2)
nni_sdk.report_final_result(x)
"""


@pytest.fixture(scope="session")
def podman(podman):
    if shutil.which("catatonit") is None:
        pytest.skip("catatonit not installed: podman makes no pods without it")
    return podman


@pytest.mark.containers
@pytest.mark.timeout(1000)
@pytest.mark.smoke
def test_an_experiment_runs_in_podman_containers_created_from_its_pods(podman, tmp_path):
    with our_cluster(tmp_path, functools.partial(ContainerPod, podman)) as ours:
        image = podman.image("keeper")
        place = Place(tmp_path, replace(ours, image=image), TRAIN)
        place.config |= {"trainingServicePlatform": "frameworkcontroller", "maxTrialNum": 2}
        place.config["trial"]["taskRoles"] = [
            worker_role("python3 train.py; exit $((NNI_TRIAL_SEQ_ID * 7))", image)
        ]
        place.config["frameworkcontrollerConfig"] = ours.storage
        done = place.create("--foreground")
        assert done.returncode == 0, done.stderr
        workspace = place.workspace(done)
        assert [output_of(workspace, trial) for trial in trials_of(workspace)] == ["True True True\n"] * 2
        # The first trial succeeds, and the second exits with 7. The exit code passes through keeper, podman, pod and Framework.
        ended = {
            entry.after["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
            for entry in place.cluster.store.history
            if entry.kind == PODS and entry.after["status"]["phase"] in ("Succeeded", "Failed")
        }
        assert ended == {0, 7}
        assert "failed: exit code 7" in done.stderr
        wait_until(
            lambda: not place.left(workspace, FRAMEWORKS),
            "all objects on the cluster are deleted",
            DEADLINE_S,
        )
        made = [path.stem for path in (tmp_path / "node").glob("trial-keeper-test-*.json")]
        assert len(made) == 2
        pods = podman.run("podman", "pod", "ps", "--format", "{{.Name}}").split()
        assert not set(made) & set(pods), "no pod may be left on this machine"


@pytest.mark.containers
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("has_python", [True, False])
def test_trials_in_images_without_a_keeper_report_the_same_metrics_as_local_trials(
    podman, tmp_path, has_python
):
    image = podman.base() if has_python else podman.without_python()
    with our_cluster(tmp_path, functools.partial(ContainerPod, podman)) as ours:
        found = {}
        for platform in ("local", "frameworkcontroller"):
            folder = tmp_path / platform
            folder.mkdir()
            place = Place(folder, replace(ours, image=image), TRAIN)
            (place.work / "train.sh").write_text(TRAIN_SH)
            place.config |= {"trainingServicePlatform": platform, "maxTrialNum": 3}
            place.config["tuner"]["classArgs"]["seed"] = 7
            command = "python3 train.py" if has_python else "bash train.sh"
            if platform == "local":
                place.config["trial"]["command"] = command
            else:
                place.config["trial"]["taskRoles"] = [worker_role(command, image)]
                place.config["frameworkcontrollerConfig"] = ours.storage | {"keeper": "bundle"}
                place.environ["PYTHONPATH"] = str(podman.bundle())
            done = place.create("--foreground")
            assert done.returncode == 0, done.stderr
            exported = json.loads(
                place.nnictl("experiment", "export", "--type", "json", "--intermediate").stdout
            )
            assert [len(trial["intermediate"]) for trial in exported] == [1 if has_python else 3] * 3
            found[platform] = sorted(
                json.dumps([trial["parameter"], trial["intermediate"], trial["value"]]) for trial in exported
            )
        assert found["frameworkcontroller"] == found["local"]


def test_variable_references_in_a_pod_are_resolved_before_podman_starts_the_container():
    container = {
        "name": "c",
        "image": "i",
        "command": ["sh", "-c", "echo $(A) $$A"],
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        "volumeMounts": [{"name": "v", "mountPath": "/m"}],
        "resources": {"limits": {"memory": "1Mi"}, "requests": {"cpu": "1"}},
    }
    made = specification("p", [(container, {"/m": Path("/here"), "/n": Path("/here")}, {"A": "a"})])
    (only,) = made["spec"]["containers"]
    assert only["command"] == ["sh", "-c", "echo a $A"]
    assert only["env"] == [{"name": "A", "value": "a"}]
    assert [each["mountPath"] for each in only["volumeMounts"]] == ["/m", "/n"]
    assert made["spec"]["volumes"] == [{"name": "volume0", "hostPath": {"path": "/here"}}]
