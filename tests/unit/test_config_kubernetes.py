"""Experiment files for FrameworkController and Kubeflow, and the errors of invalid files."""

import json
import re
from pathlib import Path

import pytest
import yaml
from config_corpus import CORPUS

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.reader import read_experiment_file
from nni_manager.training_services.kubernetes.section import (
    AzureStorage,
    ClaimStorage,
    KubernetesConfig,
    NfsStorage,
    RoleConfig,
)

FILES = CORPUS / "files"


def kubernetes_of(name):
    config = read_experiment_file(FILES / f"{name}.yml")
    assert ExperimentSpec.from_json(config.to_json()) == config
    assert (config.trial_command, config.trial_gpu_number) == ("", None)
    return config.cluster


@pytest.fixture
def diagnostics(tmp_path):
    """The errors of a corpus file after the function `change` has edited its content. Paths to other files stay valid."""

    def changed(name, change):
        value = yaml.safe_load((FILES / f"{name}.yml").read_text())
        change(value)
        for key in ("searchSpacePath", "searchSpaceFile"):
            if key in value:
                value[key] = str(FILES / value[key])
        (tmp_path / "exp.yml").write_text(yaml.safe_dump(value))
        with pytest.raises(ConfigInvalid) as caught:
            read_experiment_file(tmp_path / "exp.yml")
        return [error.message.replace(f"{tmp_path}/", "") for error in caught.value.diagnostics]

    return changed


def test_the_example_file_of_nnis_kubeflow_page_has_one_worker_role_and_nfs_storage():
    assert kubernetes_of("v1_kubeflow_page") == KubernetesConfig(
        "tf-operator",
        NfsStorage("210.28.132.167", "/data/nfs/nni_storage"),
        (RoleConfig("worker", 1, "python3 mnist_tf.py", "msranni/nni:latest", 1, 1, 8192),),
        api_version="v1",
    )


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        ({"path": str(FILES), "claimName": "nni"}, ClaimStorage(FILES, "nni")),
        ({"path": "/nni", "server": "10.1.1.1"}, NfsStorage("10.1.1.1", "/nni")),
    ],
)
def test_the_type_of_a_storage_section_without_a_type_is_derived_from_its_keys(tmp_path, storage, expected):
    value = yaml.safe_load((FILES / "v2_kubeflow_job.yml").read_text())
    value["searchSpaceFile"] = str(FILES / value["searchSpaceFile"])
    value["trainingService"]["storage"] = storage
    (tmp_path / "exp.yml").write_text(yaml.safe_dump(value))
    assert read_experiment_file(tmp_path / "exp.yml").cluster.storage == expected


def test_a_kubernetes_file_may_have_two_roles_and_azure_storage_and_a_private_registry():
    login = FILES / "docker.json"
    image = "registry.example.com/me/train:1"
    found = kubernetes_of("v1_frameworkcontroller_azure")
    assert found == KubernetesConfig(
        "frameworkcontroller",
        AzureStorage("mystorage", "nni-share", "my-vault", "storage-key", 3),
        (
            RoleConfig("worker", 2, "python3 mnist.py --role worker", image, 1, 4, 16384, 1024, login, 1, 2),
            RoleConfig("ps", 1, "python3 mnist.py --role ps", image, 0, 2, 4096, None, None, -1, -1),
        ),
        namespace="team-a",
    )
    config = read_experiment_file(FILES / "v1_frameworkcontroller_azure.yml")
    assert config.secret_files == (config.config_path, login), "no code snapshot contains them"


def test_a_framework_template_is_stored_with_the_experiment():
    found = kubernetes_of("v1_frameworkcontroller_template")
    assert found.template == FILES / "framework.yml"
    assert json.loads(found.template_text) == yaml.safe_load((FILES / "framework.yml").read_text())
    worker = RoleConfig(
        "worker", 1, "python3 train.py", "registry.example.com/me/train:1", 0, 0, 0, None, None, 1, -1
    )
    assert (found.storage, found.roles) == (ClaimStorage(FILES / "storage", "nni"), (worker,))


def test_a_frameworkcontroller_v2_file_sets_the_storage_and_the_roles_and_the_account_and_the_namespace(
    tmp_path,
):
    found = kubernetes_of("v2_frameworkcontroller")
    assert found.storage == AzureStorage("mystorage", "nni-share", "my-vault", "storage-key")
    assert found.roles == (
        RoleConfig(
            "worker", 1, "python3 mnist.py", "msranni/nni:latest", 1, 1, 4096, min_failed=1, min_succeeded=1
        ),
    )
    assert (found.service_account, found.namespace) == ("frameworkcontroller", "nni")


def test_reuse_is_off_by_default_in_a_v1_file_and_on_in_a_v2_file():
    assert not read_experiment_file(FILES / "v1_kubeflow_page.yml").reuse_mode
    assert read_experiment_file(FILES / "v2_kubeflow.yml").reuse_mode


def test_a_template_that_is_not_a_framework_is_an_error(diagnostics, tmp_path):
    (tmp_path / "wrong.yml").write_text("kind: Pod\nspec: {containers: []}\n")

    def name_it(value, template="wrong.yml"):
        value["frameworkcontrollerConfig"] |= {
            "configPath": template,
            "pvc": {"path": str(FILES / "storage"), "name": "nni"},
        }

    (message,) = diagnostics("v1_frameworkcontroller_template", name_it)
    assert message == (
        "cannot use this template: it is not a Framework; write apiVersion: frameworkcontroller.microsoft.com/v1 and "
        "kind: Framework"
    )
    (message,) = diagnostics("v1_frameworkcontroller_template", lambda value: name_it(value, "none.yml"))
    assert (
        message
        == "cannot use frameworkcontrollerConfig.configPath: there is no file none.yml; create it or fix the path"
    )


def remove(section, key):
    return lambda value: value[section].pop(key)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("v1_frameworkcontroller", remove("trial", "taskRoles"),
         "cannot do without trial.taskRoles: it must be a list of roles; write e.g. taskRoles: [{name: worker"),
        ("v1_frameworkcontroller", remove("frameworkcontrollerConfig", "nfs"),
         "cannot do without frameworkcontrollerConfig.nfs.server: it must be the address of an NFS server; write e.g. server: 1"),
        ("v1_frameworkcontroller", lambda value: value.pop("frameworkcontrollerConfig"),
         "cannot do without frameworkcontrollerConfig: it must be a mapping; write e.g. frameworkcontrollerConfig: {storage"),
        ("v1_kubeflow_page", remove("trial", "worker"), "cannot do without trial.worker: tf-operator requires this "
        "role; write e.g. worker"),
        ("v1_kubeflow_pytorch", remove("trial", "master"), "cannot do without trial.master: pytorch-operator requires this role"),
        ("v1_kubeflow_page", lambda value: value["kubeflowConfig"].update(storage="azureStorage", nfs=None),
         "cannot do without kubeflowConfig.keyVault.vaultName: it must be the name of a vault; write e.g. vaultName: my-vault"),
        ("v2_kubeflow", lambda value: value["trainingService"]["storage"].pop("server"),
         "cannot do without trainingService.storage.server: it must be the address of an NFS server; write e.g. server: "),
        ("v2_kubeflow", lambda value: value["trainingService"].pop("storage"),
         "cannot do without trainingService.storage.storageType: trials require a storage that all machines share; write e.g. s"),
    ],
)  # fmt: skip
def test_the_error_for_a_missing_kubernetes_key_contains_an_example(diagnostics, name, change, expected):
    found = diagnostics(name, change)
    assert [message for message in found if message.startswith(expected)], found


def test_an_invalid_storage_section_does_not_hide_other_errors(diagnostics):
    def change(value):
        value["kubeflowConfig"] |= {"nfs": 3, "namespace": "Team A"}

    assert diagnostics("v1_kubeflow_page", change) == [
        'cannot use kubeflowConfig.namespace: "Team A" is not the name of a namespace; write e.g. namespace: default',
        "cannot use kubeflowConfig.nfs: 3 is not a mapping; write e.g. nfs: {server: 10.10.10.10, path: /var/nfs/nni}",
    ]
    (message,) = diagnostics("v1_kubeflow_page", lambda value: value["kubeflowConfig"].update(storage=[1]))
    assert message.startswith("cannot use kubeflowConfig.storage: [1] is not one of nfs, azureStorage, pvc")


def test_a_code_directory_that_is_set_for_a_single_role_causes_a_warning(tmp_path):
    value = yaml.safe_load((FILES / "v2_kubeflow.yml").read_text())
    value |= {"trialCodeDirectory": str(FILES), "searchSpaceFile": str(FILES / "search_space.json")}
    (tmp_path / "exp.yml").write_text(yaml.safe_dump(value))
    config = read_experiment_file(tmp_path / "exp.yml")
    assert config.code_dir == Path(FILES)
    assert (
        "trainingService.master.codeDirectory has no effect: every role runs the code of trialCodeDirectory"
        in config.warnings
    )


FRAMEWORK = "apiVersion: frameworkcontroller.microsoft.com/v1\nkind: Framework\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (FRAMEWORK, "cannot use spec: it is missing"),
        (FRAMEWORK + "spec: {taskRoles: []}", "cannot use spec.taskRoles: it must be a list of roles"),
        (FRAMEWORK + "spec: {taskRoles: worker}", "cannot use spec.taskRoles: it must be a list of roles"),
        (FRAMEWORK + "spec: {taskRoles: [worker]}", 'taskRoles[0]: "worker" is not a mapping'),
        (
            FRAMEWORK + "spec: {taskRoles: [{name: a, taskNumber: 1, task: {pod: {}}}]}",
            "cannot use spec.taskRoles[0].task.pod",
        ),
        (
            FRAMEWORK
            + "spec: {taskRoles: [{name: a, taskNumber: 1, task: {pod: {spec: {initContainers: [wait]}}}}]}",
            'spec.initContainers[0]: "wait" is not a mapping',
        ),
        (
            FRAMEWORK
            + "spec: {taskRoles: [{name: a, taskNumber: 1, task: {pod: {spec: {terminationGracePeriodSeconds: 1m}}}}]}",
            'spec.terminationGracePeriodSeconds: "1m" is not a number of seconds; write e.g. 60, or remove it',
        ),
        ("[1, 2]", "cannot use this template: it is not a Framework"),
        (FRAMEWORK + "kind: Pod", "cannot use kind: line 2 has the same key"),
        ("{", "cannot read wrong.yml"),
    ],
)
def test_the_error_for_an_invalid_template_contains_the_key_and_a_reason(
    diagnostics, tmp_path, template, expected
):
    (tmp_path / "wrong.yml").write_text(template)

    def name_it(value):
        value["frameworkcontrollerConfig"] |= {
            "configPath": "wrong.yml",
            "pvc": {"path": str(FILES / "storage"), "name": "nni"},
        }

    assert expected in "\n".join(diagnostics("v1_frameworkcontroller_template", name_it))


def test_the_error_for_a_date_in_a_template_suggests_quotes(diagnostics, tmp_path):
    text = (FILES / "framework.yml").read_text()
    (tmp_path / "wrong.yml").write_text(
        text.replace("{name: template}", "{name: template, annotations: {on: 2026-01-01}}")
    )

    def name_it(value):
        value["frameworkcontrollerConfig"] |= {
            "configPath": "wrong.yml",
            "pvc": {"path": str(FILES / "storage"), "name": "nni"},
        }

    (message,) = diagnostics("v1_frameworkcontroller_template", name_it)
    assert (
        message
        == "cannot use this template: it contains a date or a number that is not finite; put such text in quotes"
    )


# ---- pod templates of Kubeflow's jobs

POD = """\
metadata: {annotations: {note: mine}}
spec:
  tolerations: [{key: gpus, operator: Exists}]
  containers: [{name: trial, env: [{name: A, value: b}]}]
"""


def with_pod_template(folder, text, **changed):
    (folder / "pod.yml").write_text(text)

    def name_it(value):
        value["trainingService"] |= {"podTemplate": "pod.yml", **changed}

    return name_it


def test_a_pod_template_is_stored_with_the_experiment_and_listed_as_a_secret_file(tmp_path):
    value = yaml.safe_load((FILES / "v2_kubeflow_storage.yml").read_text())
    with_pod_template(tmp_path, POD)(value)
    value["searchSpaceFile"] = str(FILES / value["searchSpaceFile"])
    value["trainingService"]["storage"] = {"storageType": "nfs", "server": "10.10.10.10", "path": "/var/nfs"}
    (tmp_path / "exp.yml").write_text(yaml.safe_dump(value))
    config = read_experiment_file(tmp_path / "exp.yml")
    assert json.loads(config.cluster.template_text) == yaml.safe_load(POD)
    assert tmp_path / "pod.yml" in config.cluster.secret_files
    assert ExperimentSpec.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("[1]", "this template: [1] is not a mapping with keys; write a mapping"),
        ("kind: Pod", "kind: a pod template has only metadata and spec; remove it"),
        ("metadata: {name: a}", "metadata.name: jobs set it; write only labels and annotations"),
        ("metadata: {labels: {expId: a}}", "metadata.labels.expId: this label identifies jobs; rename your label"),
        ("spec: {restartPolicy: Always}", "spec.restartPolicy: a job never restarts a task that has ended"),
        ("spec: {volumes: [{name: nni-vol}]}", "spec.volumes[0].name: the volume of the experiment's storage has this name"),
        ("spec: {containers: [{name: a}, {name: b}]}", "spec.containers: there are 2 containers; write only the trial's"),
        ("spec: {containers: [{image: a}]}", "spec.containers[0].image: the roles of the experiment file have it"),
        ("spec: {containers: [{volumeMounts: [{mountPath: /tmp/mount/}]}]}", "the experiment's storage is mounted there"),
        ("spec: {containers: [{env: [{name: TRIAL_KEEPER_TOKEN}]}]}", "the prefix TRIAL_KEEPER_ is reserved for keepers"),
        ("spec: {containers: [{resources: {limits: 1}}]}", "spec.containers[0].resources.limits: 1 is not a mapping with keys"),
        ("metadata: {annotations: {on: 2026-01-01}}", "this template: it contains a date or a number that is not finite"),
    ],
)  # fmt: skip
def test_the_error_for_an_invalid_pod_template_contains_the_key_and_a_reason(
    diagnostics, tmp_path, template, expected
):
    found = diagnostics("v2_kubeflow_storage", with_pod_template(tmp_path, template))
    assert re.search(f"cannot use .*{re.escape(expected)}", "\n".join(found))


def test_a_pod_template_is_refused_for_a_trainjob(diagnostics, tmp_path):
    found = diagnostics("v2_kubeflow_storage", with_pod_template(tmp_path, POD, operator="trainjob"))
    why = "the pods of a TrainJob are those of its runtime; write it into the runtime, and remove it here"
    assert f"cannot use trainingService.podTemplate: {why}" in found
