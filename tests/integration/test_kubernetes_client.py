"""The official client calls a fake Kubernetes API server. The tests cover retries, errors and watches."""

import base64
import contextlib
import json
import queue
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from kube_api import TOKEN, KubeCluster
from kube_definitions import FRAMEWORK
from kube_store import ACCOUNTS, DEFINITIONS, NAMESPACES, SECRETS
from real_experiment import wait_until

pytest.importorskip("kubernetes")

from nni_manager.errors import UserError
from nni_manager.support.backoff import SMALLEST_SHARE
from nni_manager.training_services.errors import ClusterUnavailable, Unauthenticated
from nni_manager.training_services.frameworkcontroller.operator import FRAMEWORKS, FrameworkController
from nni_manager.training_services.kubernetes import errors
from nni_manager.training_services.kubernetes import watch as watching
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.login import log_in
from nni_manager.training_services.kubernetes.preflight import check
from nni_manager.training_services.kubernetes.resources import CLAIMS, PODS
from nni_manager.training_services.kubernetes.resources import SECRETS as OUR_SECRETS
from nni_manager.training_services.kubernetes.section import (
    ClaimStorage,
    KubernetesConfig,
    NfsStorage,
    RoleConfig,
)
from nni_manager.training_services.kubernetes.watch import (
    Deleted,
    Upserted,
    Watch,
    WatchFailed,
)
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from trial_keeper import __version__

QUICK = ClientRetryPolicy(tries=3, first_s=0.001, longest_s=0.01, connect_within_s=5.0, answer_within_s=20.0)
EXPORT = NfsStorage("nas", "/nni")
ROLE = RoleConfig("worker", 1, "true", "me/train:1", 0, 1, 100, None, None, 1, 1)


@pytest.fixture
def server(tmp_path):
    with KubeCluster(tmp_path) as cluster:
        (tmp_path / "kubeconfig").write_text(cluster.api.kubeconfig())
        yield cluster


@pytest.fixture
def cluster(server, tmp_path):
    cluster = Kubernetes(tmp_path / "kubeconfig", QUICK)
    yield cluster
    cluster.close()


def a_secret(name, **labels):
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {"app": "t"} | labels},
        "stringData": {"word": "x"},
    }


class RecordedWatch:
    """Records the events of a watch, in order."""

    def __init__(self, cluster, selector="app=t", **options):
        self._queue = queue.Queue()
        self._cluster = cluster
        self.watch = Watch(cluster, OUR_SECRETS, "default", selector, self._queue.put, **options)

    def __enter__(self):
        self.watch.start()
        return self

    def __exit__(self, *failure):
        self.watch.end()
        self._cluster.close()
        self.watch.join()

    def next(self):
        change = self._queue.get(timeout=DEADLINE_S)
        match change:
            case Upserted(document) | Deleted(document):
                return type(change).__name__, document["metadata"]["name"]
            case WatchFailed(message):
                return type(change).__name__, message
        return (type(change).__name__,)


# ---- login


def test_every_api_call_has_a_user_agent_header_with_the_program_version(cluster, server):
    cluster.objects(OUR_SECRETS, "default", "app=t")
    assert server.api.user_agents == {f"trial-keeper/{__version__}"}


def test_the_client_reads_the_login_from_the_same_locations_as_kubectl(server, tmp_path, monkeypatch):
    path = tmp_path / "kubeconfig"
    path.write_text(server.api.kubeconfig(namespace="team"))
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert (log_in().namespace, log_in().where) == ("team", str(path))
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".kube").mkdir()
    path.rename(tmp_path / ".kube" / "config")
    assert log_in().address == server.api.url
    (tmp_path / ".kube" / "config").unlink()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(UserError, match="cannot use the service account of this pod: "):
        log_in()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"contexts": []}'])
def test_the_error_for_an_invalid_kubeconfig_contains_a_remedy(tmp_path, content):
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"cannot use the kubeconfig file {path}: .*KUBECONFIG"):
        log_in(path)


def test_a_missing_kubeconfig_is_an_error(tmp_path):
    path = tmp_path / "kubeconfig"
    with pytest.raises(UserError, match=f"cannot log in to Kubernetes: file {path} does not exist; ask the"):
        log_in(path)


def test_the_error_for_a_missing_kubernetes_package_names_the_pip_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(UserError, match="pip install 'trial-keeper\\[kubernetes\\]'"):
        log_in()


# ---- calls


def test_objects_can_be_created_and_read_and_listed_and_deleted(cluster, server):
    made = cluster.create(OUR_SECRETS, "default", a_secret("a"))
    assert cluster.get(OUR_SECRETS, "default", "a") == made
    cluster.create(OUR_SECRETS, "default", a_secret("b", app="other"))
    found, version = cluster.objects(OUR_SECRETS, "default", "app=t")
    assert [each["metadata"]["name"] for each in found] == ["a"]
    assert int(version) >= int(made["metadata"]["resourceVersion"])
    with pytest.raises(errors.NotFound):
        cluster.delete(OUR_SECRETS, "default", "c")
    with pytest.raises(errors.NotFound, match="another object has that name now"):
        cluster.delete(OUR_SECRETS, "default", "a", uid="another")
    cluster.delete(OUR_SECRETS, "default", "a", uid=made["metadata"]["uid"])
    with pytest.raises(errors.NotFound):
        cluster.get(OUR_SECRETS, "default", "a")


def test_a_404_response_for_an_existing_object_is_reported_as_an_unavailable_cluster(cluster, server):
    """A gateway, or an API server that is still starting, may answer 404 for a path that exists."""
    cluster.create(OUR_SECRETS, "default", a_secret("a"))
    server.api.misbehave(404, 2)
    with pytest.raises(ClusterUnavailable, match="list the served kinds"):
        cluster.delete(OUR_SECRETS, "default", "a")
    with pytest.raises(ClusterUnavailable):
        cluster.get(OUR_SECRETS, "default", "a")
    cluster.delete(OUR_SECRETS, "default", "a")


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (200, "log in to the gateway in front of it"),
        (403, "a server in front of Kubernetes answers 403, <html>"),
    ],
)
def test_an_error_page_of_a_proxy_does_not_count_as_a_refusal_by_the_cluster(cluster, server, status, told):
    """A firewall, or a proxy whose login has expired, answers with a web page instead of a Status object."""
    server.api.misbehave(f"page {status}", 3)
    with pytest.raises(ClusterUnavailable, match=told):
        cluster.create(OUR_SECRETS, "default", a_secret("a"))
    cluster.create(OUR_SECRETS, "default", a_secret("a"))


def test_long_lists_are_read_page_by_page(cluster, server, monkeypatch):
    monkeypatch.setattr("nni_manager.training_services.kubernetes.api.PAGE_OBJECTS", 2)
    for number in range(5):
        server.store.create(SECRETS, "default", a_secret(f"s{number}"))
    found, _ = cluster.objects(OUR_SECRETS, "default", "app=t")
    assert len(found) == 5
    assert server.api.counted()["list", "secrets"] == 3


@pytest.mark.parametrize("how", [429, 500, 503, "conflict", "drop"])
def test_transient_errors_are_retried_at_most_twice(cluster, server, how):
    server.api.misbehave(how, 2)
    cluster.create(OUR_SECRETS, "default", a_secret("a"))
    server.api.misbehave(how, 3)
    with pytest.raises((ClusterUnavailable, errors.Conflict)):
        cluster.get(OUR_SECRETS, "default", "a")
    assert server.api.counted()["get", "secrets"] == 3


def test_the_client_waits_for_the_time_given_in_the_retry_after_header(server, tmp_path):
    patient = Kubernetes(tmp_path / "kubeconfig", ClientRetryPolicy(tries=2, first_s=0.001, longest_s=5.0))
    server.api.misbehave(429, 1, retry_after=1)
    began_at_s = time.monotonic()
    patient.serves(PODS)
    assert time.monotonic() - began_at_s >= 1
    patient.close()


def test_the_error_for_an_unreachable_server_contains_its_address(cluster, server):
    server.api.stop()
    with pytest.raises(ClusterUnavailable, match=rf"{server.api.url} does not answer \(Connection refused\)"):
        cluster.serves(PODS)
    server.api.start()
    assert cluster.serves(PODS)


@pytest.mark.parametrize(
    ("document", "kind", "told"),
    [
        (a_secret("Bad_Name"), errors.RequestInvalid, "RFC 1123"),
        (a_secret("a"), errors.AlreadyExists, 'secrets "a" already exists'),
    ],
)
def test_the_error_of_a_refused_call_contains_the_message_of_the_server(
    cluster, server, document, kind, told
):
    server.store.create(SECRETS, "default", a_secret("a"))
    with pytest.raises(kind, match=told):
        cluster.create(OUR_SECRETS, "default", document)


def test_a_call_that_the_cluster_forbids_raises_the_error_forbidden(cluster, server):
    server.api.denied.add(("list", "pods"))
    with pytest.raises(errors.Forbidden, match='cannot list resource "pods"'):
        cluster.objects(PODS, "default", "")


def test_the_client_reads_the_kubeconfig_again_after_an_expired_login(cluster, server, tmp_path):
    server.api.tokens = {"newer"}
    with pytest.raises(Unauthenticated, match="renew the login in your kubeconfig file"):
        cluster.serves(PODS)
    (tmp_path / "kubeconfig").write_text(server.api.kubeconfig("newer"))
    assert cluster.serves(PODS)


def test_the_token_is_absent_from_errors_and_reprs_and_logs(cluster, server, caplog):
    caplog.set_level("DEBUG")
    server.api.misbehave(500, 3)
    with pytest.raises(ClusterUnavailable) as failure:
        cluster.serves(PODS)
    for text in (str(failure.value), repr(cluster), repr(cluster.login), caplog.text):
        assert TOKEN not in text


# ---- watches


def test_a_watch_reports_the_existing_objects_and_then_each_change(cluster, server):
    server.store.create(SECRETS, "default", a_secret("a"))
    with RecordedWatch(cluster) as told:
        assert [told.next(), told.next()] == [("Upserted", "a"), ("Synced",)]
        server.store.create(SECRETS, "default", a_secret("b"))
        server.store.create(SECRETS, "default", a_secret("other", app="other"))
        server.store.delete(SECRETS, "default", "a")
        assert [told.next(), told.next()] == [("Upserted", "b"), ("Deleted", "a")]
    assert server.api.counted()["list", "secrets"] == 1


def test_a_broken_watch_continues_without_a_new_list_or_duplicate_events(cluster, server):
    with RecordedWatch(cluster) as told:
        assert told.next() == ("Synced",)
        for number in range(3):
            server.api.drop_watches()
            server.store.create(SECRETS, "default", a_secret(f"s{number}"))
            seen = [told.next()]
            while seen[-1] != ("Upserted", f"s{number}"):
                seen.append(told.next())
            assert {each[0] for each in seen[:-1]} <= {"WatchFailed"}
    assert server.api.counted()["list", "secrets"] == 1


def test_a_watch_lists_objects_again_after_a_410_and_reports_missed_deletions(cluster, server):
    server.store.create(SECRETS, "default", a_secret("a"))
    server.store.create(SECRETS, "default", a_secret("b"))
    with RecordedWatch(cluster) as told:
        assert [told.next() for _ in range(3)] == [("Upserted", "a"), ("Upserted", "b"), ("Synced",)]
        # While the test holds this lock, the watch receives nothing, so both changes arrive together.
        with server.store.changed:
            server.store.delete(SECRETS, "default", "a")
            server.store.create(SECRETS, "default", a_secret("c"))
            server.api.forget_history()
        assert [told.next() for _ in range(3)] == [("Deleted", "a"), ("Upserted", "c"), ("Synced",)]
        server.store.delete(SECRETS, "default", "b")
        assert told.next() == ("Deleted", "b")


def test_a_watch_lists_objects_without_a_second_pause_if_it_receives_a_410_after_an_outage(
    cluster, server, monkeypatch
):
    def watches():
        return server.api.counted()["watch", "secrets"]

    def pauses(*_):
        # The server answers the fifth watch request with 410. If the watch paused after this response, the pause would last 1e6 s
        # and the test would fail.
        while True:
            yield 1e6 if watches() == 5 else 0.0

    monkeypatch.setattr(watching, "delays_s", pauses)
    server.api.misbehave(503, 3, at=("watch", "secrets"))
    server.api.misbehave("hang", 1, at=("watch", "secrets"))
    with RecordedWatch(cluster) as told:
        assert told.next() == ("Synced",)
        assert told.next()[0] == "WatchFailed"
        wait_until(lambda: watches() == 4, "the fourth watch hangs", DEADLINE_S)
        server.store.create(NAMESPACES, "", {"metadata": {"name": "team"}})
        server.store.oldest = server.store.version
        server.api.is_hung.set()
        seen = [told.next()]
        while seen[-1] != ("Synced",):
            seen.append(told.next())
        assert seen[-2] == ("WatchFailed", "")


def test_a_watch_reports_an_outage_and_the_recovery_of_the_server(cluster, server):
    with RecordedWatch(cluster) as told:
        assert told.next() == ("Synced",)
        server.api.stop()
        kind, message = told.next()
        assert kind == "WatchFailed"
        assert "secrets in namespace default" in message
        server.store.create(SECRETS, "default", a_secret("a"))
        server.api.start()
        seen = [told.next()]
        while seen[-1] != ("Upserted", "a"):
            seen.append(told.next())
        assert ("WatchFailed", "") in seen
    assert server.api.counted()["list", "secrets"] == 1


def test_a_watch_continues_from_its_bookmark_after_a_timeout(cluster, server, monkeypatch):
    monkeypatch.setattr("nni_manager.training_services.kubernetes.api.WATCH_S", 1)

    def watches(more):
        wanted = server.api.counted()["watch", "secrets"] + more
        wait_until(
            lambda: server.api.counted()["watch", "secrets"] >= wanted, "a new watch starts", DEADLINE_S
        )

    with RecordedWatch(cluster) as told:
        assert told.next() == ("Synced",)
        # The watch does not receive events of namespaces, so only a bookmark can move its position beyond this change. Below, the
        # server drops its history up to this change.
        server.store.create(NAMESPACES, "", {"metadata": {"name": "team"}})
        watches(2)
        server.store.oldest = server.store.version
        watches(1)
        server.store.create(SECRETS, "default", a_secret("a"))
        assert told.next() == ("Upserted", "a")
    assert server.api.counted()["list", "secrets"] == 1


def test_a_watch_continues_after_the_renewal_of_a_rejected_login(cluster, server, tmp_path):
    with RecordedWatch(cluster) as told:
        assert told.next() == ("Synced",)
        server.api.tokens = {"newer"}
        server.api.drop_watches()
        kind, message = told.next()
        while "rejects the login; renew the login in your kubeconfig file" not in message:
            kind, message = told.next()
        assert kind == "WatchFailed"
        (tmp_path / "kubeconfig").write_text(server.api.kubeconfig("newer"))
        assert told.next() == ("WatchFailed", "")
        server.store.create(SECRETS, "default", a_secret("a"))
        assert told.next() == ("Upserted", "a")


def test_a_watch_continues_after_a_response_that_cannot_be_parsed(cluster, server):
    # The fake server answers the list call with a Status document, which contains no objects.
    server.api.misbehave(200, 1, at=("list", "secrets"))
    with RecordedWatch(cluster) as told:
        kind, message = told.next()
        assert kind == "WatchFailed"
        assert message.startswith(
            f"cannot watch secrets: the answer of {cluster.login.address} cannot be parsed "
        )
        assert told.next() == ("Synced",)
        assert told.next() == ("WatchFailed", "")


def test_a_watch_pauses_before_the_retry_if_it_fails_immediately(cluster, server, monkeypatch):
    monkeypatch.setattr(watching, "_FIRST_PAUSE_S", 0.5)
    server.api.misbehave(500, 100, at=("watch", "secrets"))
    with RecordedWatch(cluster) as told:
        assert told.next() == ("Synced",)
        assert told.next()[0] == "WatchFailed"
        with server.store.changed:
            server.store.changed.wait(1.0)
        assert server.api.counted()["watch", "secrets"] <= 4


def test_a_watch_reports_only_objects_that_match_its_field_selector_and_predicate(cluster, server):
    made = {each: server.store.create(SECRETS, "default", a_secret(each)) for each in ("a", "b", "c")}
    with RecordedWatch(
        *(cluster, ""),
        fields="metadata.name!=a",
        concerns=lambda document: document["metadata"]["name"] != "b",
    ) as told:
        assert [told.next(), told.next()] == [("Upserted", "c"), ("Synced",)]
        for each in made:
            server.store.delete(SECRETS, "default", each)
        assert told.next() == ("Deleted", "c")
        assert told.watch._known == {}


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_an_optional_watch_without_permission_reports_one_failure_and_is_retried(
    cluster, server, verb, monkeypatch
):
    monkeypatch.setattr("nni_manager.training_services.kubernetes.watch._DENIED_RETRY_DELAY_S", 0.01)
    server.api.denied.add((verb, "secrets"))
    with RecordedWatch(cluster, is_optional=True) as told:
        if verb == "watch":
            assert told.next() == ("Synced",)
        kind, message = told.next()
        assert kind == "WatchFailed"
        assert f'cannot {verb} resource "secrets"' in message
        wait_until(lambda: server.api.counted()[verb, "secrets"] > 3, "it asks again", DEADLINE_S)
        server.api.denied.clear()
        server.store.create(SECRETS, "default", a_secret("a"))
        while (change := told.next()) != ("Upserted", "a"):
            assert change in [("Synced",), ("WatchFailed", "")]


class SteppedEvent:
    """Replaces the event that a thread waits on. Each wait returns immediately. When the durations of the requested waits add up
    to a minute, a callback runs once.
    """

    def __init__(self, after_a_minute):
        self.waits_s, self._after = [], after_a_minute
        self._is_set = threading.Event()
        self.set, self.is_set = self._is_set.set, self._is_set.is_set

    def wait(self, seconds):
        self.waits_s.append(seconds)
        if self._after is not None and sum(self.waits_s) >= 60:
            self._after()
            self._after = None
        return self.is_set()


def double_with_jitter(waits_s, nominal_s):
    """True if each wait equals its nominal wait, shortened by at most the jitter."""
    pairs = zip(waits_s, nominal_s, strict=True)
    return all(SMALLEST_SHARE * each_s <= wait_s <= each_s for wait_s, each_s in pairs)


def test_a_failing_watch_doubles_its_pauses_to_at_most_20_s_and_recovers(cluster, server):
    with contextlib.ExitStack() as stack:
        told = RecordedWatch(cluster)
        event = told.watch._must_end = SteppedEvent(server.api.start)
        server.store.create(SECRETS, "default", a_secret("a"))
        server.api.stop()
        stack.enter_context(told)
        assert told.next()[0] == "WatchFailed"
        assert told.next() == ("Upserted", "a")
    assert double_with_jitter(event.waits_s[:7], [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0])
    assert max(event.waits_s) <= 20.0
    assert len(event.waits_s) <= 10


def test_a_call_to_an_unreachable_server_fails_after_a_bounded_number_of_retries(server, tmp_path):
    patient = Kubernetes(tmp_path / "kubeconfig")
    event = patient._is_closed = SteppedEvent(None)
    server.api.stop()
    with pytest.raises(ClusterUnavailable, match="does not answer"):
        patient.get(OUR_SECRETS, "default", "a")
    assert double_with_jitter(event.waits_s, [0.5, 1.0, 2.0, 4.0])
    server.api.start()
    patient.close()


# ---- preflight


def checked(cluster, *, operator=FrameworkController, namespace="default", storage=EXPORT, account=None):
    config = KubernetesConfig("frameworkcontroller", storage, (ROLE,), service_account=account)
    return check(cluster, operator(config), namespace)


def test_a_complete_cluster_passes_the_preflight_check(cluster, server):
    server.store.create(DEFINITIONS, "", FRAMEWORK)
    server.store.create(ACCOUNTS, "default", {"metadata": {"name": "fc"}})
    assert checked(cluster, account="fc") == ()


def test_a_login_without_permission_for_events_passes_the_preflight_check_with_a_warning(cluster, server):
    server.store.create(DEFINITIONS, "", FRAMEWORK)
    server.api.denied.add(("watch", "events"))
    (warning,) = checked(cluster)
    assert warning.startswith("this login may not list and watch events in namespace default: ")


def test_all_missing_parts_of_a_cluster_are_reported_in_one_error(cluster, server):
    server.api.denied |= {("create", "frameworks"), ("watch", "pods")}
    with pytest.raises(UserError) as failure:
        checked(cluster, storage=ClaimStorage(Path("/mnt/data"), "data"), account="fc")
    for words in (
        "it does not serve frameworks.frameworkcontroller.microsoft.com; install FrameworkController there",
        "this login may not create frameworks in namespace default",
        "this login may not watch pods in namespace default",
        "ServiceAccount fc does not exist in namespace default",
        "PersistentVolumeClaim data does not exist in namespace default",
    ):
        assert words in str(failure.value)


def test_the_error_of_an_unsupported_operator_version_lists_the_served_versions(cluster, server):
    server.store.create(DEFINITIONS, "", FRAMEWORK)

    class Newer(FrameworkController):
        resource = replace(FRAMEWORKS, version="v2")

    with pytest.raises(UserError, match=r"/v2 \(served: v1\); install FrameworkController for v2"):
        checked(cluster, operator=Newer)


def test_the_preflight_check_refuses_a_missing_namespace_but_accepts_an_unreadable_namespace(cluster, server):
    server.store.create(DEFINITIONS, "", FRAMEWORK)
    with pytest.raises(UserError, match="namespace team does not exist; correct the name"):
        checked(cluster, namespace="team")
    server.api.denied.add(("get", "namespaces"))
    checked(cluster)


def test_the_kubeconfig_of_the_fake_server_contains_its_certificate(server):
    config = json.loads(server.api.kubeconfig())
    authority = config["clusters"][0]["cluster"]["certificate-authority-data"]
    assert base64.b64decode(authority).startswith(b"-----BEGIN CERTIFICATE-----")
    assert CLAIMS.path("a", "b") == "/api/v1/namespaces/a/persistentvolumeclaims/b"
