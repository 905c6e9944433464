"""A job rendered as a Framework: golden files, schemas and special cases."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kube_definitions import FRAMEWORK
from kube_kubelet import expanded

from nni_manager.config.document import read_yaml
from nni_manager.domain.completion import TaskRole
from nni_manager.startup.schema_validators import Draft202012Validator
from nni_manager.training_services.frameworkcontroller.framework_template import read_template
from nni_manager.training_services.frameworkcontroller.operator import FrameworkController
from nni_manager.training_services.kubernetes.render import (
    as_in_containers,
    azure_secret,
    job_secrets,
    labels_of,
    render_secrets,
    selector_of,
)
from nni_manager.training_services.kubernetes.section import (
    AzureStorage,
    ClaimStorage,
    KubernetesConfig,
    NfsStorage,
    RoleConfig,
)
from nni_manager.training_services.run_script import render_run_script
from trial_keeper.settings import KeeperSettings

GOLDEN = Path(__file__).parents[1] / "golden" / "frameworkcontroller"
SETTINGS = as_in_containers(KeeperSettings("EXPTexpt", "tRiAl", "/data/EXPTexpt", "c0ffee", trial_id="tRiAl"))
WORKER = RoleConfig("worker", 1, "python3 train.py --lr $LR", "me/train:1", 0, 1, 8192, None, None, 1, 1)
ONE = KubernetesConfig("frameworkcontroller", NfsStorage("10.0.0.1", "/var/nfs"), (WORKER,))
LOGIN = Path("/home/ada/.docker/config.json")
TEAM = replace(
    ONE,
    storage=ClaimStorage(Path("/data"), "nni"),
    roles=(
        replace(WORKER, name="ps", gpu=0, min_succeeded=-1, registry_login=LOGIN),
        replace(WORKER, tasks=2, gpu=2, cpu=4, shm_mb=512, registry_login=LOGIN, min_succeeded=2),
    ),
    service_account="frameworkbarrier",
)
REUSED = replace(SETTINGS, job_id="env-3", trial_id=None)
AZURE = replace(ONE, storage=AzureStorage("mystorage", "nni", "my-vault", "storage-key"))
_FILE = read_template(read_yaml(GOLDEN / "template.yml"), None)
TEMPLATE = replace(
    ONE,
    roles=_FILE.roles,
    template=GOLDEN / "template.yml",
    template_text=_FILE.text,
    service_account="frameworkbarrier",
)
CASES = {
    "template": (TEMPLATE, SETTINGS),
    "one": (ONE, SETTINGS),
    "team": (TEAM, SETTINGS),
    "reused": (ONE, REUSED),
    "azure": (AZURE, SETTINGS),
}


def rendered(name):
    config, settings = CASES[name]
    framework = FrameworkController(config).render("team-a", settings)
    made = framework | {"metadata": framework["metadata"] | {"uid": "u-1"}}
    contents = job_secrets(config, settings.token, {LOGIN: '{"auths": {}}'})
    if config is AZURE:
        contents.append(azure_secret("mystorage", "a2V5"))
    return {"framework": framework, "secrets": render_secrets(made, contents)}


def pods(framework):
    return [role["task"]["pod"] for role in framework["spec"]["taskRoles"]]


@pytest.mark.parametrize("name", CASES)
def test_a_rendered_job_matches_its_golden_file(name):
    golden = GOLDEN / f"{name}.json"
    text = json.dumps(rendered(name), indent=1) + "\n"
    if os.environ.get("WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rendered_job_has_only_fields_of_kubernetes_and_frameworkcontroller(name):
    client = pytest.importorskip("kubernetes.client")
    made = rendered(name)
    schema = FRAMEWORK["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    Draft202012Validator(schema).validate(made["framework"])
    read_and_written = client.ApiClient().sanitize_for_serialization
    for pod in pods(made["framework"]):
        assert read_and_written(client.V1PodSpec.from_dict(pod["spec"])) == pod["spec"]
        assert read_and_written(client.V1ObjectMeta.from_dict(pod["metadata"])) == pod["metadata"]
    for secret in made["secrets"]:
        assert read_and_written(client.V1Secret.from_dict(secret)) == secret


def test_job_names_and_labels_equal_the_names_and_labels_that_nni_uses():
    assert FrameworkController(ONE).name_of("xBAaCvDo", "GmSvO") == "nniexpxbaacvdotrialgmsvo"
    assert FrameworkController(ONE).name_of("xBAaCvDo", "env-12") == "nniexpxbaacvdoenv12"
    labels = rendered("one")["framework"]["metadata"]["labels"]
    assert labels == {"app": "nni-kubernetes-trial", "expId": "EXPTexpt", "trialId": "tRiAl"}
    assert selector_of("EXPTexpt") == "app=nni-kubernetes-trial,expId=EXPTexpt"


def test_the_token_is_stored_only_in_a_secret_owned_by_the_framework():
    made = rendered("one")
    assert "c0ffee" not in json.dumps(made["framework"])
    (secret,) = made["secrets"]
    assert secret["stringData"] == {"token": "c0ffee"}
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Framework", "nniexpexptexpttrialtrial", "u-1")


def test_the_azure_storage_key_is_stored_only_in_a_secret_owned_by_the_framework():
    made = rendered("azure")
    assert "a2V5" not in json.dumps(made["framework"])
    (pod,) = pods(made["framework"])
    token, key = made["secrets"]
    assert pod["spec"]["volumes"][0]["azureFile"] == {
        "secretName": key["metadata"]["name"],
        "shareName": "nni",
    }
    assert key["metadata"]["ownerReferences"] == token["metadata"]["ownerReferences"]
    assert "a2V5" not in repr(azure_secret("mystorage", "a2V5"))


def test_two_roles_with_the_same_registry_login_share_a_secret():
    made = rendered("team")
    assert [secret["type"] for secret in made["secrets"]] == ["kubernetes.io/dockerconfigjson", "Opaque"]
    names = {pod["spec"]["imagePullSecrets"][0]["name"] for pod in pods(made["framework"])}
    assert names == {made["secrets"][0]["metadata"]["name"]}


def test_only_frameworks_with_several_tasks_have_a_barrier():
    (alone,) = pods(rendered("one")["framework"])
    assert "initContainers" not in alone["spec"]
    for pod in pods(rendered("team")["framework"]):
        (barrier,) = pod["spec"]["initContainers"]
        assert barrier["image"] == "frameworkcontroller/frameworkbarrier"
        assert ". /mnt/frameworkbarrier/injector.sh" in pod["spec"]["containers"][0]["command"][2]


def test_the_termination_grace_period_leaves_time_for_the_trial_and_its_report():
    (pod,) = pods(rendered("one")["framework"])
    assert pod["spec"]["terminationGracePeriodSeconds"] >= SETTINGS.grace_s + 10


def test_an_unset_minimum_of_failed_tasks_is_rendered_as_minus_one():
    assert FrameworkController(TEAM).completion.roles == (
        TaskRole("ps", 1, 1, -1),
        TaskRole("worker", 2, 1, 2),
    )
    assert (
        FrameworkController(replace(ONE, roles=(replace(WORKER, min_failed=None),)))
        .completion.roles[0]
        .min_failed_tasks
        == -1
    )


@example("echo $$ $(TRIAL_KEEPER_JOB_ID) $$(date) $HOME")
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1))
def test_a_command_reaches_the_keeper_unchanged(command):
    config = replace(ONE, roles=(replace(WORKER, command=command),))
    (pod,) = pods(FrameworkController(config).render("default", SETTINGS))
    known = {}
    for entry in pod["spec"]["containers"][0]["env"]:
        if "value" in entry:
            known[entry["name"]] = expanded(entry["value"], known)
    known["TRIAL_KEEPER_TOKEN"] = SETTINGS.token
    assert KeeperSettings.from_environ(known) == replace(SETTINGS, command=command, role="worker")


def test_a_template_keeps_its_fields_and_gets_the_fields_that_jobs_require():
    made = rendered("template")["framework"]
    template = json.loads(TEMPLATE.template_text)
    assert made["metadata"]["annotations"] == {"owner": "ada"}
    assert made["spec"]["description"] == "two roles of my own"
    changed = {"containers", "initContainers", "volumes", "terminationGracePeriodSeconds"}
    for own, pod in zip(pods(template), pods(made), strict=True):
        for key in own["spec"].keys() - changed:
            assert pod["spec"][key] == own["spec"][key]
        (before,), (container,) = own["spec"]["containers"], pod["spec"]["containers"]
        for key in before.keys() - {"command", "args", "env", "volumeMounts"}:
            assert container[key] == before[key]
        assert pod["metadata"]["labels"].items() >= labels_of("EXPTexpt", "tRiAl").items()
    server, worker = (pod["spec"] for pod in pods(made))
    assert [each["name"] for each in server["initContainers"]] == ["frameworkbarrier", "fetch"]
    assert [pod["terminationGracePeriodSeconds"] for pod in (server, worker)] == [45, 600]
    assert [pod["serviceAccountName"] for pod in (server, worker)] == ["mine", "frameworkbarrier"]
    ports = [each["value"] for each in server["containers"][0]["env"] if each["name"] == "FB_SERVER_PORT"]
    assert ports == ["7000"], "the port that the template sets"


def test_a_template_keeps_its_own_barrier_container():
    template = json.loads(TEMPLATE.template_text)
    for pod in pods(template):
        pod["spec"]["initContainers"] = [{"name": "frameworkbarrier", "image": "mine"}]
    config = replace(TEMPLATE, template_text=json.dumps(template))
    for pod in pods(FrameworkController(config).render("default", SETTINGS)):
        assert pod["spec"]["initContainers"] == [{"name": "frameworkbarrier", "image": "mine"}]
        assert "injector.sh" not in pod["spec"]["containers"][0]["command"][2]


def test_a_template_without_a_service_account_causes_a_warning():
    assert FrameworkController(TEMPLATE).warnings == ()
    without = replace(TEMPLATE, service_account=None)
    assert "serviceAccountName" in FrameworkController(without).warnings[0]
    template = json.loads(TEMPLATE.template_text)
    for pod in pods(template):
        pod["spec"]["serviceAccountName"] = "mine"
    assert FrameworkController(replace(without, template_text=json.dumps(template))).warnings == ()


WORDS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))), max_size=4)


@example(["it's", "$HOME", "a b", "", "*", "$$(X)", "\n", "ü"])
@given(WORDS)
def test_the_command_of_a_template_gets_the_arguments_that_kubernetes_would_pass(tmp_path_factory, words):
    workspace = tmp_path_factory.getbasetemp() / "EXPTexpt"
    workspace.mkdir(exist_ok=True)
    (workspace / "run.sh").write_text('exec bash -c "$TRIAL_KEEPER_COMMAND"\n')
    template = json.loads(TEMPLATE.template_text)
    del template["spec"]["taskRoles"][1]
    (container,) = pods(template)[0]["spec"]["containers"]
    container |= {"command": ["printf", "%s\\0", "$(MODEL)"], "args": words}
    config = replace(TEMPLATE, template_text=json.dumps(template), roles=TEMPLATE.roles[:1])
    (pod,) = pods(FrameworkController(config).render("default", replace(SETTINGS, workspace=str(workspace))))
    (made,) = pod["spec"]["containers"]
    known = {each["name"]: expanded(each["value"], {}) for each in made["env"] if "value" in each}
    argv = [expanded(word, known) for word in (*made["command"], *made["args"])]
    done = subprocess.run(argv, env=os.environ | known, capture_output=True, check=True)
    wanted = ["small", *(expanded(word, known) for word in words)]
    assert done.stdout == "".join(f"{word}\0" for word in wanted).encode()


def test_the_script_run_sh_replaces_its_process_with_the_keeper():
    script = render_run_script()
    assert script.endswith('\nexec "${keeper[@]}" "$@"\n')
    assert "trap" not in script
