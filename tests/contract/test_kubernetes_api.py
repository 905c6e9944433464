"""Behaviour of a Kubernetes API server that this project relies on, tested with the official client.

The fake server must behave like a real server. With TEST_KUBECONFIG=<file>, the tests use a real server (`make test-k8s`). They
create their own kinds and objects in the namespace TEST_K8S_NAMESPACE, and delete them.
"""

import contextlib
import json
import os
import threading
import uuid

import pytest
from deadlines import DEADLINE_S
from kube_api import LOW_TOKEN, KubeCluster
from kube_definitions import definition
from real_experiment import wait_until

client = pytest.importorskip("kubernetes.client")
config = pytest.importorskip("kubernetes.config")
watching = pytest.importorskip("kubernetes.watch")

pytestmark = pytest.mark.any_cluster
NAMESPACE = os.environ.get("TEST_K8S_NAMESPACE", "default")
# The tests use their own API group, so that no installed operator reacts to their objects.
GROUP = "probe.trial-keeper.example"
KINDS = {"frameworks": "Framework", "tfjobs": "TFJob", "pytorchjobs": "PyTorchJob"}
FRAMEWORKS = (GROUP, "v1", NAMESPACE, "frameworks")


def a_framework(name, **labels):
    role = {
        "name": "worker",
        "taskNumber": 1,
        "frameworkAttemptCompletionPolicy": {"minFailedTaskCount": 1, "minSucceededTaskCount": 1},
        "task": {"pod": {"spec": {"containers": [{"name": "c", "image": "x"}]}}},
    }
    retry = {"fancyRetryPolicy": False, "maxRetryCount": 0}
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "Framework",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": {"executionType": "Create", "retryPolicy": retry, "taskRoles": [role]},
    }


class Asked:
    """A server, and the official client's API objects for this server."""

    def __init__(self, kubeconfig):
        self.kubeconfig = kubeconfig
        self.api = config.new_client_from_config(str(kubeconfig))
        self.custom = client.CustomObjectsApi(self.api)
        self.core = client.CoreV1Api(self.api)
        self.definitions = client.ApiextensionsV1Api(self.api)
        self.run = uuid.uuid4().hex[:6]
        self.count = 0

    def made(self, **labels):
        """Create a Framework of this test run. Returns its name and the object."""
        self.count += 1
        name = f"probe{self.run}n{self.count}"
        return name, self.custom.create_namespaced_custom_object(
            *FRAMEWORKS, body=a_framework(name, run=self.run, **labels)
        )

    def get(self, name):
        return self.custom.get_namespaced_custom_object(*FRAMEWORKS, name=name)

    def list(self, **options):
        return self.custom.list_namespaced_custom_object(*FRAMEWORKS, **options)

    def watched(self, seconds, **options):
        """The types and objects of all events that a watch of `seconds` receives."""
        stream = watching.Watch().stream(
            self.custom.list_namespaced_custom_object, *FRAMEWORKS, timeout_seconds=seconds, **options
        )
        return [(event["type"], event["object"]) for event in stream]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        if (real := os.environ.get("TEST_KUBECONFIG")) is None:
            folder = tmp_path_factory.mktemp("cluster")
            cluster = stack.enter_context(KubeCluster(folder))
            (folder / "kubeconfig").write_text(cluster.api.kubeconfig())
            real = folder / "kubeconfig"
        asked = Asked(real)
        for plural, kind in KINDS.items():
            asked.definitions.create_custom_resource_definition(
                definition(GROUP, plural, kind, has_status=True)
            )
            stack.callback(asked.definitions.delete_custom_resource_definition, f"{plural}.{GROUP}")

            def is_established(name=f"{plural}.{GROUP}"):
                found = asked.definitions.read_custom_resource_definition(name).status.conditions or []
                return any(each.type == "Established" and each.status == "True" for each in found)

            wait_until(is_established, f"{plural} are served", DEADLINE_S)
        yield asked
    asked.api.close()


@contextlib.contextmanager
def refused(status, reason):
    with pytest.raises(client.ApiException) as failure:
        yield
    assert failure.value.status == status
    assert reason is None or json.loads(failure.value.body)["reason"] == reason


def test_a_server_reports_its_version(asked):
    assert client.VersionApi(asked.api).get_code().git_version.startswith("v1.")


def test_a_new_object_has_a_uid_a_resource_version_and_a_generation(asked):
    _, made = asked.made()
    meta = made["metadata"]
    assert meta["uid"]
    assert meta["resourceVersion"]
    assert meta["creationTimestamp"]
    assert meta["generation"] == 1


def test_a_second_object_with_the_same_name_is_refused(asked):
    name, _ = asked.made()
    with refused(409, "AlreadyExists"):
        asked.custom.create_namespaced_custom_object(*FRAMEWORKS, body=a_framework(name))


def test_the_server_returns_404_for_missing_objects_and_unknown_kinds(asked):
    with refused(404, "NotFound"):
        asked.get("nope")
    with refused(404, None):
        asked.custom.list_namespaced_custom_object("nope.example", "v1", NAMESPACE, "nopes")


@pytest.mark.parametrize("change", [{"metadata": {"name": "Bad_Name"}}, {"kind": "TFJob"}])
def test_an_object_with_an_invalid_name_or_kind_is_refused_with_422(asked, change):
    with refused(422, "Invalid"):
        asked.custom.create_namespaced_custom_object(*FRAMEWORKS, body=a_framework("x1") | change)


def test_replacing_an_object_with_an_outdated_resource_version_is_refused_as_a_conflict(asked):
    name, old = asked.made()
    newer = asked.get(name)
    newer["spec"]["description"] = "a"
    done = asked.custom.replace_namespaced_custom_object(*FRAMEWORKS, name=name, body=newer)
    assert done["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]
    with refused(409, "Conflict"):
        asked.custom.replace_namespaced_custom_object(*FRAMEWORKS, name=name, body=old)


def test_only_a_request_to_the_status_subresource_changes_the_status(asked):
    name, _ = asked.made()
    both = {"status": {"state": "AttemptRunning"}, "spec": {"executionType": "Stop"}}
    asked.custom.patch_namespaced_custom_object_status(*FRAMEWORKS, name=name, body=both)
    found = asked.get(name)
    assert (found["status"]["state"], found["spec"]["executionType"]) == ("AttemptRunning", "Create")
    other = {"status": {"state": "Hacked"}, "spec": {"executionType": "Stop"}}
    asked.custom.patch_namespaced_custom_object(*FRAMEWORKS, name=name, body=other)
    found = asked.get(name)
    assert (found["status"]["state"], found["spec"]["executionType"]) == ("AttemptRunning", "Stop")
    assert found["metadata"]["generation"] == 2


def test_a_json_patch_sent_as_a_merge_patch_is_refused(asked):
    name, _ = asked.made()
    operations = [{"op": "replace", "path": "/spec/executionType", "value": "Stop"}]
    with pytest.raises(client.ApiException) as failure:
        asked.custom.patch_namespaced_custom_object(*FRAMEWORKS, name=name, body=operations)
    assert failure.value.status in (400, 422)


def test_objects_are_selected_by_labels_and_fields(asked):
    name, _ = asked.made(colour="red")
    asked.made(colour="blue")
    run = f"run={asked.run},"
    assert [each["metadata"]["name"] for each in asked.list(label_selector=run + "colour=red")["items"]] == [
        name
    ]
    assert asked.list(label_selector=run + "colour=none")["items"] == []
    assert len(asked.list(label_selector=run + "colour in (red, blue)")["items"]) == 2
    assert len(asked.list(field_selector=f"metadata.name={name}")["items"]) == 1
    assert asked.list(field_selector="metadata.name=zz")["items"] == []


def test_a_long_list_is_returned_in_pages(asked):
    for _ in range(3):
        asked.made(page="yes")
    chosen = {"label_selector": f"run={asked.run},page=yes", "limit": 2}
    first = asked.list(**chosen)
    assert len(first["items"]) == 2
    second = asked.list(**chosen, _continue=first["metadata"]["continue"])
    assert len(second["items"]) == 1
    assert not second["metadata"].get("continue")


def test_a_watch_reports_all_changes_since_a_list_and_ends_at_its_timeout(asked):
    since = asked.list()["metadata"]["resourceVersion"]
    seen = []
    thread = threading.Thread(
        target=lambda: seen.extend(
            asked.watched(2, resource_version=since, label_selector=f"run={asked.run},seen=yes")
        )
    )
    thread.start()
    name, _ = asked.made(seen="yes")
    asked.custom.patch_namespaced_custom_object_status(
        *FRAMEWORKS, name=name, body={"status": {"state": "Completed"}}
    )
    asked.custom.delete_namespaced_custom_object(*FRAMEWORKS, name=name)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert [(kind, found["metadata"]["name"]) for kind, found in seen] == [
        ("ADDED", name),
        ("MODIFIED", name),
        ("DELETED", name),
    ]


def test_a_watch_from_an_earlier_resource_version_reports_the_changes_since_that_version(asked):
    name, made = asked.made()
    asked.custom.patch_namespaced_custom_object_status(
        *FRAMEWORKS, name=name, body={"status": {"state": "R1"}}
    )
    seen = asked.watched(
        1,
        resource_version=made["metadata"]["resourceVersion"],
        field_selector=f"metadata.name={name}",
    )
    assert [(kind, found["status"]["state"]) for kind, found in seen] == [("MODIFIED", "R1")]


def test_a_watch_from_an_expired_resource_version_is_refused_with_410(asked):
    with refused(410, None):
        asked.watched(1, resource_version="1")


def test_a_foreground_deletion_deletes_an_object_after_its_dependents(asked):
    tfjobs = (GROUP, "v1", NAMESPACE, "tfjobs")
    job, pod = f"probe{asked.run}tf", f"probe{asked.run}tf-worker-0"
    made = asked.custom.create_namespaced_custom_object(
        *tfjobs,
        body={
            "apiVersion": f"{GROUP}/v1",
            "kind": "TFJob",
            "metadata": {"name": job},
            "spec": {"tfReplicaSpecs": {}},
        },
    )
    owner = {
        "apiVersion": f"{GROUP}/v1",
        "kind": "TFJob",
        "name": job,
        "uid": made["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    # No scheduler has this name, so the pod never runs.
    asked.core.create_namespaced_pod(
        NAMESPACE,
        {
            "metadata": {"name": pod, "ownerReferences": [owner]},
            "spec": {"containers": [{"name": "c", "image": "x"}], "schedulerName": "nobody"},
        },
    )
    asked.custom.delete_namespaced_custom_object(
        *tfjobs,
        name=job,
        body=client.V1DeleteOptions(propagation_policy="Foreground", grace_period_seconds=0),
    )

    def is_gone(read):
        try:
            read()
        except client.ApiException as error:
            return error.status == 404
        return False

    wait_until(
        lambda: is_gone(lambda: asked.custom.get_namespaced_custom_object(*tfjobs, name=job)),
        "the job is deleted",
        DEADLINE_S,
    )
    assert is_gone(lambda: asked.core.read_namespaced_pod(pod, NAMESPACE))


def test_the_deletion_of_an_object_without_finalizers_returns_the_status_success(asked):
    where = (GROUP, "v1", NAMESPACE, "pytorchjobs")
    name = f"probe{asked.run}pt"
    body = {
        "apiVersion": f"{GROUP}/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {"pytorchReplicaSpecs": {}},
    }
    asked.custom.create_namespaced_custom_object(*where, body=body)
    assert asked.custom.delete_namespaced_custom_object(*where, name=name)["status"] == "Success"


def with_token(asked, token):
    own = client.Configuration(host=asked.api.configuration.host, api_key={"authorization": token})
    own.api_key_prefix = {"authorization": "Bearer"}
    own.ssl_ca_cert, own.verify_ssl = asked.api.configuration.ssl_ca_cert, asked.api.configuration.verify_ssl
    return client.ApiClient(own)


@pytest.mark.parametrize(
    ("token", "status", "reason"),
    [
        ("wrong", 401, "Unauthorized"),
        (LOW_TOKEN if "TEST_KUBECONFIG" not in os.environ else None, 403, "Forbidden"),
    ],
)
def test_a_request_with_an_invalid_token_or_without_permission_is_refused(asked, token, status, reason):
    if token is None:
        pytest.skip("no token of a user without permissions is available")
    with with_token(asked, token) as api, refused(status, reason):
        client.CustomObjectsApi(api).list_namespaced_custom_object(*FRAMEWORKS)


def test_string_data_of_a_secret_is_stored_as_base64(asked):
    name = f"probe{asked.run}"
    made = asked.core.create_namespaced_secret(
        NAMESPACE, {"metadata": {"name": name}, "stringData": {"a": "b"}}
    )
    asked.core.delete_namespaced_secret(name, NAMESPACE)
    assert made.data == {"a": "Yg=="}


def test_all_objects_with_given_labels_can_be_deleted_in_one_request(asked):
    for _ in range(2):
        asked.made(gone="yes")
    chosen = {"label_selector": f"run={asked.run},gone=yes"}
    asked.custom.delete_collection_namespaced_custom_object(*FRAMEWORKS, **chosen)
    assert asked.list(**chosen)["items"] == []


def test_a_self_subject_access_review_reports_permissions(asked):
    attributes = {"namespace": NAMESPACE, "verb": "create", "group": "", "resource": "secrets"}
    review = client.AuthorizationV1Api(asked.api).create_self_subject_access_review(
        {"spec": {"resourceAttributes": attributes}}
    )
    assert review.status.allowed
