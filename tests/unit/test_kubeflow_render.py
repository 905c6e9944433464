"""A job rendered for each Kubeflow operator: golden files, schemas and special cases."""

import json
import os
from dataclasses import replace
from pathlib import Path

import kube_definitions as definitions
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kube_kubelet import expanded

from nni_manager.domain.completion import TaskRole
from nni_manager.startup.schema_validators import Draft202012Validator
from nni_manager.training_services.kubeflow.operators import OPERATORS
from nni_manager.training_services.kubernetes.render import as_in_containers, job_of
from nni_manager.training_services.kubernetes.section import (
    ClaimStorage,
    KubernetesConfig,
    NfsStorage,
    RoleConfig,
)
from trial_keeper.settings import KeeperSettings

GOLDEN = Path(__file__).parents[1] / "golden" / "kubeflow"
SETTINGS = as_in_containers(KeeperSettings("EXPTexpt", "tRiAl", "/data/EXPTexpt", "c0ffee", trial_id="tRiAl"))
REUSED = replace(SETTINGS, job_id="env-3", trial_id=None)
LOGIN = Path("/home/ada/.docker/config.json")
WORKER = RoleConfig("worker", 2, "torchrun train.py --lr $LR", "me/train:1", 1, 4, 8192, 512, LOGIN)
OTHER = RoleConfig("ps", 1, "python3 serve.py", "me/serve:1", 0, 1, 1024)
NFS, CLAIM = NfsStorage("10.0.0.1", "/var/nfs"), ClaimStorage(Path("/data"), "nni")
CASES = {
    "tf-operator": (KubernetesConfig("tf-operator", NFS, (WORKER, OTHER), "v1"), SETTINGS),
    "pytorch-operator": (
        KubernetesConfig(
            "pytorch-operator", CLAIM, (WORKER, replace(OTHER, name="master")), "v1beta2", queue="team"
        ),
        REUSED,
    ),
    "trainjob": (
        KubernetesConfig("trainjob", NFS, (WORKER,), "v1alpha1", runtime="torch-distributed", queue="team"),
        SETTINGS,
    ),
    "job": (KubernetesConfig("job", CLAIM, (WORKER,), "v1", queue="team"), REUSED),
}
DEFINITIONS = {
    "tf-operator": [definitions.tf_job()],
    "pytorch-operator": [definitions.pytorch_job()],
    "trainjob": [definitions.train_job("2.1"), definitions.train_job("2.2")],
    "job": [],
}


def operator(operator_name, **changed):
    return OPERATORS[operator_name](replace(CASES[operator_name][0], **changed))


def rendered(operator_name, **changed):
    return operator(operator_name, **changed).render("team-a", CASES[operator_name][1])


def pods(job):
    """The pod template of each role in a job."""
    spec = job["spec"]
    replicas = spec.get("tfReplicaSpecs") or spec.get("pytorchReplicaSpecs")
    if replicas:
        return {name.lower(): each["template"] for name, each in replicas.items()}
    if "template" in spec:
        return {"worker": spec["template"]}
    (override,) = spec["podTemplateOverrides"]
    own = {"name": "node", **{key: spec["trainer"][key] for key in ("image", "command", "env")}}
    (container,) = override["spec"]["containers"]
    return {
        "worker": {
            "metadata": override["metadata"],
            "spec": override["spec"] | {"containers": [own | container]},
        }
    }


@pytest.mark.parametrize("operator_name", CASES)
def test_a_rendered_job_matches_its_golden_file(operator_name):
    golden = GOLDEN / f"{operator_name}.json"
    text = json.dumps(rendered(operator_name), indent=1) + "\n"
    if os.environ.get("WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("operator_name", CASES)
def test_a_rendered_job_has_only_fields_of_kubernetes_and_the_operator(operator_name):
    client = pytest.importorskip("kubernetes.client")
    job = rendered(operator_name)
    for each in DEFINITIONS[operator_name]:
        (version,) = each["spec"]["versions"]
        Draft202012Validator(version["schema"]["openAPIV3Schema"]).validate(job)
    read_and_written = client.ApiClient().sanitize_for_serialization
    for pod in pods(job).values():
        assert read_and_written(client.V1PodSpec.from_dict(pod["spec"])) == pod["spec"]
        assert read_and_written(client.V1ObjectMeta.from_dict(pod["metadata"])) == pod["metadata"]
    if operator_name == "job":
        assert read_and_written(client.V1Job.from_dict(job)) == job


@pytest.mark.parametrize("operator_name", CASES)
def test_names_and_labels_identify_the_job_and_contain_no_token(operator_name):
    job, settings = rendered(operator_name), CASES[operator_name][1]
    name = "nni-exp-exptexpt-trial-trial" if settings is SETTINGS else "nni-exp-exptexpt-env-3"
    assert job["metadata"]["name"] == operator(operator_name).name_of("EXPTexpt", settings.job_id) == name
    assert job_of(job) == settings.job_id
    assert {job_of(pod) for pod in pods(job).values()} == {settings.job_id}
    assert "c0ffee" not in json.dumps(job)


@pytest.mark.parametrize(
    "operator_name", [operator_name for operator_name in CASES if CASES[operator_name][0].queue]
)
def test_a_queue_in_the_experiment_file_adds_a_job_label_and_requires_a_local_queue_object(operator_name):
    assert rendered(operator_name)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "kueue.x-k8s.io/queue-name" not in rendered(operator_name, queue=None)["metadata"]["labels"]
    assert ("LocalQueue", "team") in [
        (resource.kind, name) for resource, name in operator(operator_name).required_objects
    ]


def test_the_runtime_kind_trainingruntime_selects_a_runtime_of_the_namespace():
    (_, (of_all, name)), ((own, own_name),) = (
        operator("trainjob").required_objects,
        operator("trainjob", runtime="TrainingRuntime/mine", queue=None).required_objects,
    )
    assert (of_all.path("a", name), own.path("a", own_name)) == (
        "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes/torch-distributed",
        "/apis/trainer.kubeflow.org/v1alpha1/namespaces/a/trainingruntimes/mine",
    )
    job = rendered("trainjob", runtime="TrainingRuntime/mine")
    assert job["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"


def test_a_rendered_job_has_the_api_version_of_the_experiment_file():
    assert rendered("pytorch-operator")["apiVersion"] == "kubeflow.org/v1beta2"
    assert rendered("tf-operator")["apiVersion"] == "kubeflow.org/v1"
    assert rendered("job")["apiVersion"] == "batch/v1"


@pytest.mark.parametrize(
    ("operator_name", "roles"),
    [
        ("tf-operator", (TaskRole("worker", 2, 1, 2), TaskRole("ps", 1, 1, -1))),
        ("pytorch-operator", (TaskRole("worker", 2, 1, -1), TaskRole("master", 1, 1, 1))),
        ("trainjob", (TaskRole("worker", 2, 1, 2),)),
        ("job", (TaskRole("worker", 2, 1, 2),)),
    ],
)
def test_each_operator_has_its_own_completion_policy(operator_name, roles):
    assert operator(operator_name).completion.roles == roles


@pytest.mark.parametrize("operator_name", CASES)
def test_the_termination_grace_period_leaves_time_for_the_trial_and_its_report(operator_name):
    for pod in pods(rendered(operator_name)).values():
        known = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        grace_s = float(known["TRIAL_KEEPER_GRACE_S"])
        assert pod["spec"].get("terminationGracePeriodSeconds", 30) >= grace_s + 15


@example("echo $$ $(TRIAL_KEEPER_JOB_ID) $$(date) $HOME")
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1))
def test_the_command_of_each_role_reaches_its_keeper_unchanged(command):
    for operator_name, (config, settings) in CASES.items():
        roles = tuple(replace(role, command=f"{role.name}{command}") for role in config.roles)
        for name, pod in pods(rendered(operator_name, roles=roles)).items():
            known = {}
            for entry in pod["spec"]["containers"][0]["env"]:
                if "value" in entry:
                    known[entry["name"]] = expanded(entry["value"], known)
            known["TRIAL_KEEPER_TOKEN"] = settings.token
            read = KeeperSettings.from_environ(known)
            assert (read.command, read.role) == (f"{name}{command}", name)


TEMPLATE = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"sidecar.istio.io/inject": "false"}},
    "spec": {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpus", "operator": "Exists", "effect": "NoSchedule"}],
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 1,
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "imagePullSecrets": [{"name": "mine"}],
        "initContainers": [{"name": "sidecar", "image": "proxy:1", "restartPolicy": "Always"}],
        "containers": [
            {
                "name": "any",
                "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "POD_NAME", "value": "mine"}],
                "terminationMessagePolicy": "File",
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                "resources": {"limits": {"rdma/hca": "1", "cpu": "99"}},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            }
        ],
    },
}


@pytest.mark.parametrize("operator_name", ["tf-operator", "pytorch-operator", "job"])
def test_a_template_adds_fields_to_pods_and_keeps_the_fields_that_trials_need(operator_name):
    client = pytest.importorskip("kubernetes.client")
    plain, made = rendered(operator_name), rendered(operator_name, template_text=json.dumps(TEMPLATE))
    for each in DEFINITIONS[operator_name]:
        (version,) = each["spec"]["versions"]
        Draft202012Validator(version["schema"]["openAPIV3Schema"]).validate(made)
    for name, pod in pods(made).items():
        before, spec = pods(plain)[name]["spec"], pod["spec"]
        assert job_of(pod) == job_of(pods(plain)[name])
        assert pod["metadata"]["labels"]["team"] == "a"
        assert pod["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
        for key in ("nodeSelector", "tolerations", "hostNetwork", "initContainers"):
            assert spec[key] == TEMPLATE["spec"][key]
        for key in ("volumes", "imagePullSecrets"):
            assert spec[key] == [*before.get(key, []), *TEMPLATE["spec"][key]]
        assert spec["terminationGracePeriodSeconds"] == before["terminationGracePeriodSeconds"] > 1
        (container,), (own,) = spec["containers"], before["containers"]
        for key in ("name", "image", "command"):
            assert container[key] == own[key]
        ours = [each for each in own["env"] if each["name"] != "POD_NAME"]
        assert len(ours) == len(own["env"]) - 1
        assert container["env"] == [*TEMPLATE["spec"]["containers"][0]["env"], *ours]
        assert container["terminationMessagePolicy"] == "File"
        assert container["volumeMounts"][-1] == {"name": "data", "mountPath": "/data"}
        assert container["resources"]["requests"] == own["resources"]["requests"]
        assert container["resources"]["limits"] == own["resources"]["limits"] | {"rdma/hca": "1"}
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        read_and_written = client.ApiClient().sanitize_for_serialization
        assert read_and_written(client.V1PodSpec.from_dict(spec)) == spec


def test_an_empty_template_leaves_the_rendered_job_unchanged():
    assert rendered("job", template_text="{}") == rendered("job", template_text=None)
    assert rendered("job", template_text='{"spec": {"containers": []}}') == rendered("job")
