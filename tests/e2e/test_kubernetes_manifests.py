"""The manifests of deploy/kubernetes are valid. The Role grants exactly the rights that experiments need. The command and the
probes work.
"""

import functools
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from kube_api import KubeApi
from kube_containers import ContainerPod
from kube_deployments import serve
from kube_operators import LOCAL_QUEUES, PYTORCH_JOBS, TF_JOBS, TRAIN_JOBS
from kube_place import Place, our_cluster, worker_role
from kube_store import ACCOUNTS, JOBS, NAMESPACES, PODS, SECRETS
from nginx import nginx
from real_experiment import wait_until
from user_home import BIN, environ_of

kubernetes = pytest.importorskip("kubernetes")

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
DOCUMENTS = [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
MODELS = {
    "ServiceAccount": "V1ServiceAccount",
    "Role": "V1Role",
    "RoleBinding": "V1RoleBinding",
    "PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "Deployment": "V1Deployment",
    "Service": "V1Service",
    "Ingress": "V1Ingress",
}
ACCOUNT_TOKEN = "token-of-the-service-account"
TRAIN = """\
import nni_sdk
nni_sdk.report_final_result(nni_sdk.get_next_parameter()["x"])
"""


def document(kind, name="trial-keeper"):
    (found,) = (each for each in DOCUMENTS if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def container():
    (found,) = document("Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def unknown_fields(model, value, at):
    """The paths of fields that the official client's model does not define. Missing required fields are detected elsewhere, when
    the client builds the models.
    """
    if match := re.fullmatch(r"(?:list\[|dict\(str, )(.+)[\])]", model):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, each in items for found in unknown_fields(match[1], each, f"{at}.{key}")]
    kind = getattr(kubernetes.client, model, None)
    # The client has no class for numbers, texts and objects of any shape, so these have no unknown fields.
    if kind is None:
        return []
    names = {name: attribute for attribute, name in kind.attribute_map.items()}
    found = [f"{at}.{key}" for key in value.keys() - names.keys()]
    for key in value.keys() & names.keys():
        found += unknown_fields(kind.openapi_types[names[key]], value[key], f"{at}.{key}")
    return found


@pytest.mark.parametrize(
    "found", DOCUMENTS, ids=[f"{each['kind']}-{each['metadata']['name']}" for each in DOCUMENTS]
)
@pytest.mark.smoke
def test_each_manifest_has_all_required_fields_of_its_kind_and_no_unknown_fields(found):
    assert unknown_fields(MODELS[found["kind"]], found, found["kind"]) == []
    read = kubernetes.client.ApiClient().deserialize(
        json.dumps(found), MODELS[found["kind"]], "application/json"
    )
    assert kubernetes.client.ApiClient().sanitize_for_serialization(read) == found


@pytest.mark.smoke
def test_a_manifest_refers_only_to_object_names_that_exist():
    pod = document("Deployment")["spec"]["template"]
    assert pod["spec"]["serviceAccountName"] == document("ServiceAccount")["metadata"]["name"]
    for volume in pod["spec"]["volumes"]:
        if "persistentVolumeClaim" in volume:
            document("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
    mounted = {each["name"] for each in container()["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["spec"]["volumes"]}
    labels = pod["metadata"]["labels"].items()
    assert document("Service")["spec"]["selector"].items() <= labels
    assert document("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert document("Service")["spec"]["ports"][0]["targetPort"] in ports
    (path,) = document("Ingress")["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["port"]["name"] == document("Service")["spec"]["ports"][0]["name"]


@pytest.mark.any_cluster
@pytest.mark.smoke
def test_kubectl_applies_the_manifests(tmp_path):
    """On a cluster that TEST_KUBECONFIG names, a dry run applies all checks of the server, and creates nothing."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian: kubernetes-client)")
    if named := os.environ.get("TEST_KUBECONFIG"):
        how = ("--dry-run=server", "--namespace", os.environ.get("TEST_K8S_NAMESPACE", "default"))
        done = kubectl(named, "apply", "--filename", FOLDER, *how)
        assert done.returncode == 0, done.stderr
        return
    api = KubeApi(tmp_path)
    serve(api.store)
    api.start()
    try:
        (tmp_path / "kubeconfig").write_text(api.kubeconfig())
        # The fake server has no schemas of built-in kinds, so kubectl must not validate the documents.
        done = kubectl(tmp_path / "kubeconfig", "apply", "--validate=false", "--filename", FOLDER)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(" created\n") == len(DOCUMENTS)
        again = kubectl(tmp_path / "kubeconfig", "apply", "--validate=false", "--filename", FOLDER)
        assert again.stdout.count(" unchanged\n") == len(DOCUMENTS), again.stdout + again.stderr
    finally:
        api.close()


def kubectl(kubeconfig, *arguments):
    return subprocess.run(
        ["kubectl", f"--kubeconfig={kubeconfig}", *map(str, arguments)],
        # kubectl writes a cache into the home folder, so the test gives kubectl a home of its own.
        env=os.environ | {"HOME": str(kubeconfig.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


# ---- rights


RIGHTS = {
    (verb, resource)
    for rule in document("Role")["rules"]
    for verb in rule["verbs"]
    for resource in rule["resources"]
}


@pytest.fixture(scope="module")
def used():
    """The rights (verb and resource) that experiments have used or checked with the service account."""
    return set()


def grant(api, used):
    """Give the service account the rights of the Role and no others. Each right that the account requests is added to `used`."""
    api.tokens.add(ACCOUNT_TOKEN)
    all_may = api.may

    def may(token, verb, plural):
        if token != ACCOUNT_TOKEN:
            return all_may(token, verb, plural)
        used.add((verb, plural))
        return (verb, plural) in RIGHTS

    api.may = may


@pytest.fixture
def place(tmp_path, used):
    """An experiment on the fake cluster, whose manager has the rights of the Role and no others."""
    with our_cluster(tmp_path) as around:
        api = around.double.api
        kubeconfig = tmp_path / "kubeconfig-of-account"
        kubeconfig.write_text(api.kubeconfig(ACCOUNT_TOKEN))
        grant(api, used)
        made = Place(tmp_path, around, TRAIN)
        made.environ = {"KUBECONFIG": str(kubeconfig)}
        made.config |= {"maxTrialNum": 1, "trialConcurrency": 1}
        yield made


def runs_to_the_end(place):
    done = place.create("--foreground")
    assert done.returncode == 0, done.stderr
    assert "may not" not in done.stderr
    assert "forbidden" not in done.stderr
    workspace = place.workspace(done)
    results = re.findall(r"^ *\d+ +(\w+) +[\d.e-]+ ", done.stdout, re.MULTILINE)
    assert len(results) == 1
    return workspace


@pytest.mark.smoke
def test_an_experiment_on_frameworkcontroller_needs_only_the_rights_of_the_role(place):
    place.config["trainingServicePlatform"] = "frameworkcontroller"
    place.config["trial"]["taskRoles"] = [worker_role("python3 train.py", place.around.image)]
    place.cluster.store.create(ACCOUNTS, "default", {"metadata": {"name": "frameworkbarrier"}})
    section = {"namespace": place.around.namespace, "serviceAccountName": "frameworkbarrier"}
    place.config["frameworkcontrollerConfig"] = place.around.storage | section
    runs_to_the_end(place)


OPERATORS = [
    ("tf-operator", TF_JOBS, {"apiVersion": "v1"}, "worker"),
    ("pytorch-operator", PYTORCH_JOBS, {}, "master"),
    ("trainjob", TRAIN_JOBS, {}, "worker"),
    ("job", JOBS, {"queueName": "team"}, "worker"),
]


@pytest.mark.parametrize(
    ("operator", "kind", "section", "role"), OPERATORS, ids=[each[0] for each in OPERATORS]
)
def test_an_experiment_on_kubeflow_needs_only_the_rights_of_the_role(place, operator, kind, section, role):
    place.cluster.store.create(LOCAL_QUEUES, "default", {"metadata": {"name": "team"}, "spec": {}})
    place.config["trainingServicePlatform"] = "kubeflow"
    task = {"replicas": 1, "gpuNum": 0, "cpuNum": 1, "memoryMB": 256, "image": place.around.image}
    place.config["trial"][role] = task | {"command": "python3 train.py"}
    place.config["kubeflowConfig"] = (
        place.around.storage | {"namespace": "default", "operator": operator} | section
    )
    runs_to_the_end(place)
    assert place.cluster.api.counted()["create", kind.plural] == 1


def test_the_role_has_no_rights_that_experiments_do_not_use(used):
    if ("create", "frameworks") not in used or ("create", "jobs") not in used:
        pytest.skip("needs the experiments of this file, which run before it")
    assert RIGHTS - used == set()


# ---- the command of the container


def test_the_command_and_the_probes_of_the_deployment_work_behind_an_ingress(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    environ = environ_of(work)
    arguments, ports = (
        container()["args"],
        {each["name"]: each["containerPort"] for each in container()["ports"]},
    )
    port = free_port_pair()
    assert str(ports["https"]) in arguments
    arguments = [str(port) if each == str(ports["https"]) else each for each in arguments]
    process = subprocess.Popen(
        [BIN / "nnictl", *arguments],
        cwd=work,
        env=environ,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for name in ("readinessProbe", "livenessProbe"):
            probe = container()[name]["httpGet"]
            assert ports[probe["port"]] == ports["https"]
            url = f"{probe['scheme'].lower()}://127.0.0.1:{port}{probe['path']}"
            wait_until(
                lambda url=url: answer_of(url, Host=f"10.1.2.3:{port}") == (200, "ok\n"), f"{url} answers"
            )
        annotations = document("Ingress")["metadata"]["annotations"]
        (path,) = document("Ingress")["spec"]["rules"][0]["http"]["paths"]
        host = annotations["nginx.ingress.kubernetes.io/upstream-vhost"]
        assert annotations["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"
        # ingress-nginx generates these nginx settings from the annotations. The test writes them, because it runs nginx without
        # Kubernetes.
        settings = f"proxy_set_header Host {host}; proxy_set_header X-Forwarded-Host $http_host;"
        with nginx(tmp_path / "nginx", port, settings=settings, encrypts_backend=True) as front:
            code, text = answer_of(f"http://127.0.0.1:{front}{path['path']}/all", Host="lab.example")
            assert (code, "main.js" in text or "hub" in text) == (200, True)
            assert (
                answer_of(f"http://127.0.0.1:{front}{path['path']}/api/v1/nni/all", Host="lab.example")[0]
                == 401
            )
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")


# ---- the Deployment


TRAIN_AT_GATE = """\
import os, pathlib, time
import nni_sdk
folder = pathlib.Path(os.environ["NNI_SYS_DIR"])
(folder / "started").touch()
while not (folder / "go").exists():
    time.sleep(0.02)
nni_sdk.report_final_result(nni_sdk.get_next_parameter()["x"])
"""


def experiment_in_the_namespace(image):
    """An experiment file for the manager's pod, with the storage that docs/deployment.md describes."""
    return {
        "searchSpace": {"x": {"_type": "uniform", "_value": [0, 1]}},
        "trialConcurrency": 1,
        "maxTrialNumber": 1,
        "tuner": {"name": "Random"},
        "trainingService": {
            "platform": "kubeflow",
            "operator": "job",
            "storage": {"storageType": "pvc", "claimName": "trial-keeper-storage", "path": "/mnt/nni"},
            "worker": {
                "replicas": 1,
                "cpuNumber": 1,
                "memorySize": "256mb",
                "dockerImage": image,
                "command": "python3 train.py",
            },
        },
    }


@pytest.fixture
def deployed(podman, tmp_path):
    """Apply the manifests to a fake cluster whose pods are real containers; yield the cluster and the URL of the web page."""
    if shutil.which("catatonit") is None:
        pytest.skip("catatonit not installed: podman makes no pods without it")
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed (Debian: kubernetes-client)")
    account = tmp_path / "account"
    account.mkdir()
    address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1"}
    runs = functools.partial(ContainerPod, podman, accounts={"trial-keeper": (account, address)})
    with our_cluster(tmp_path, runs) as around:
        api, store, node = around.double.api, around.double.store, around.double.node
        serve(store)
        grant(api, set())
        address["KUBERNETES_SERVICE_PORT"] = str(api.port)
        for name, text in {
            "token": ACCOUNT_TOKEN,
            "ca.crt": api._certificate.certificate_pem,
            "namespace": "lab",
        }.items():
            (account / name).write_text(text)
        store.create(NAMESPACES, "", {"metadata": {"name": "lab"}})
        spec = document("Deployment")["spec"]["template"]["spec"]
        for volume in spec["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                # For fsGroup, a real kubelet changes the group and the mode of a volume. The fake node does not, so the test sets
                # them here.
                node.exports[claim["claimName"]] = folder = tmp_path / claim["claimName"]
                folder.mkdir()
                os.chown(folder, 0, spec["securityContext"]["fsGroup"])
                folder.chmod(0o2775)
        # The ports must be free, because all containers of the tests share the ports of this machine.
        port, manifests = free_port_pair(), tmp_path / "manifests.yaml"
        text = "\n---\n".join(path.read_text() for path in sorted(FOLDER.glob("*.yaml")))
        text = text.replace(container()["image"], podman.image("manager")).replace("8070", str(port))
        manifests.write_text(text)
        done = kubectl(
            around.kubeconfig, "apply", "--validate=false", "--namespace=lab", "--filename", manifests
        )
        assert done.returncode == 0, done.stderr
        yield around, f"https://127.0.0.1:{port}"
        done = kubectl(around.kubeconfig, "delete", "--namespace=lab", "--filename", manifests)
        assert done.returncode == 0, done.stderr


@pytest.mark.containers
@pytest.mark.timeout(1000)
def test_the_deployment_runs_trials_in_other_pods_and_resumes_the_experiment_after_a_restart(
    deployed, podman, tmp_path
):
    around, url = deployed
    store = around.double.store
    probe = container()["readinessProbe"]["httpGet"]
    wait_until(lambda: answer_of(url + probe["path"]) == (200, "ok\n"), "the pod is ready")

    # The documentation gives these commands for `kubectl exec`. The test runs them with `podman exec` in the container of the
    # pod.
    of_pod = f"name=-{container()['name']}$"
    (name,) = podman.run("podman", "ps", "--format", "{{.Names}}", "--filter", of_pod).split()
    who = podman.run("podman", "exec", name, "sh", "-c", "id -u; touch /x 2>/dev/null || echo read-only")
    assert who == "1000\nread-only\n"
    printed = podman.run("podman", "exec", name, "/opt/trial-keeper/bin/nnictl", "web", "--json")
    assert f"{url}/lab" in json.loads(printed)["urls"]

    storage = tmp_path / "trial-keeper-storage"
    (storage / "train.py").write_text(TRAIN_AT_GATE)
    (storage / "config.yml").write_text(json.dumps(experiment_in_the_namespace(podman.image("keeper"))))
    process = tmp_path / "trial-keeper-state/.local/state/trial-keeper/web/view-process.json"

    def call(path="", body=None):
        headers = {"Authorization": f"Bearer {json.loads(process.read_text())['token']}"}
        code, text = answer_of(f"{url}/lab/api/v1/nni/all{path}", body, **headers)
        assert code == 200, text
        return json.loads(text)

    def line():
        (found,) = call()
        return found

    def web_pod():
        return [
            each["metadata"]["uid"] for each in store.list(PODS, "lab", "app.kubernetes.io/name=trial-keeper")
        ]

    call(body=json.dumps({"config": "/mnt/nni/config.yml"}).encode())
    wait_until(lambda: list(storage.glob("*/**/started")), "the trial runs")
    (started,) = storage.glob("*/**/started")
    before = web_pod()

    done = kubectl(
        around.kubeconfig,
        "delete",
        "pod",
        "--namespace=lab",
        "--selector=app.kubernetes.io/name=trial-keeper",
    )
    assert done.returncode == 0, done.stderr
    wait_until(lambda: len(web_pod()) == 1 and web_pod() != before, "the Deployment has a new pod")
    wait_until(lambda: answer_of(url + probe["path"]) == (200, "ok\n"), "the new pod is ready")
    started.with_name("go").touch()
    call(f"/{line()['id']}/resume", b"{}")
    wait_until(lambda: line()["status"] == "DONE", "the experiment is done")
    assert (line()["succeededCount"], 0 <= line()["bestValue"] <= 1) == (1, True), line()
    wait_until(
        lambda: not store.list(JOBS, "lab") and not store.list(SECRETS, "lab"), "the trial's job is deleted"
    )


def answer_of(url, body=None, **headers):
    """Return the status code and the text of the response. The certificate is not verified, because the kubelet does not verify
    it either.
    """
    context = ssl._create_unverified_context()
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""
