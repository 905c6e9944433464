"""OpenPAI's REST API for users, groups, machines and the job history. OpenPAI's portal and OpenPAI's API tests call these
paths.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from openpai_here import JOBS, PASSWORDS, an_openpai_here, refused
from openpai_jobs import WORKER, a_job, text_of
from prometheus_client.parser import text_string_to_metric_families
from real_experiment import wait_until

API = "/rest-server/api/v2"


@pytest.fixture
def here(tmp_path):
    with an_openpai_here(tmp_path) as here:
        yield here


def logged_in(here, name):
    """A client with the token of a login, like the portal's token."""
    return here.client(name, application=False)


def submitted(client, command, **top):
    changes = (
        ((*WORKER, "instances"), 1),
        ((*WORKER, "resourcePerInstance"), {"cpu": 0, "memoryMB": 1, "gpu": 0}),
        ((*WORKER, "commands"), [command]),
    )
    assert client.submit(text_of(a_job(*changes, **top))).status_code == 202


def test_the_job_history_lists_all_attempts_and_marks_the_newest_attempt(here):
    ada = here.client()
    submitted(ada, "exit 3", jobRetryCount=1)
    wait_until(lambda: ada.get(f"{JOBS}/ada~job").json()["jobStatus"]["completedTime"], "the job has ended")
    assert ada.get(f"{JOBS}/ada~job/job-attempts/healthz").status_code == 200
    newest, first = ada.get(f"{JOBS}/ada~job/job-attempts").json()
    assert [each["attemptIndex"] for each in (newest, first)] == [1, 0]
    assert [each["isLatest"] for each in (newest, first)] == [True, False]
    assert (first["state"], first["exitCode"], first["exitPhrase"]) == (
        "FAILED",
        255,
        "PAIRuntimeUnknownFailed",
    )
    assert first["exitDiagnostics"]["runtime"]["originUserExitCode"] == 3
    assert first["taskRoles"]["worker"]["taskStatuses"][0]["taskState"] == "FAILED"
    assert ada.get(f"{JOBS}/ada~job/job-attempts/0").json() == first
    refused(ada.get(f"{JOBS}/ada~job/job-attempts/2"), 404, "NoJobError")
    refused(ada.get(f"{JOBS}/ada~absent/job-attempts"), 404, "NoJobError")


def test_all_users_belong_to_one_group(here):
    bob = here.client("bob")
    (group,) = bob.get(f"{API}/groups").json()
    assert group["groupname"] == "default"
    assert group["extension"]["acls"]["virtualClusters"] == ["default"]
    assert bob.get(f"{API}/groups/default").json() == group
    assert bob.get(f"{API}/groups/default/userlist").json() == [
        {"username": "ada", "clusterAdmin": True},
        {"username": "bob", "clusterAdmin": False},
    ]
    refused(bob.get(f"{API}/groups/other"), 404, "NoGroupError")


def test_users_can_change_only_their_own_password_and_need_the_old_password(here):
    bob = logged_in(here, "bob")
    change = {"username": "bob", "newPassword": "another password", "oldPassword": "wrong"}
    refused(bob.put(f"{API}/users/me", json={"data": change}), 400, "IncorrectPasswordError")
    change["oldPassword"] = PASSWORDS["bob"]
    refused(
        bob.put(f"{API}/users/me", json={"data": change | {"username": "ada"}}), 403, "ForbiddenUserError"
    )
    refused(here.client("bob").put(f"{API}/users/me", json={"data": change}), 403, "ForbiddenUserError")
    refused(
        bob.put(f"{API}/users/me", json={"data": change | {"email": "b@x"}}), 400, "InvalidParametersError"
    )
    refused(bob.put(f"{API}/users/me", json=change), 400, "InvalidParametersError")
    assert bob.put(f"{API}/users/me", json={"data": change | {"email": ""}, "patch": True}).status_code == 201
    login = {"username": "bob", "password": "another password"}
    assert here.client(None).post("/api/v2/authn/basic/login", json=login).status_code == 200


def test_an_administrator_who_is_demoted_while_a_password_change_waits_stays_demoted(here):
    ada, bob = logged_in(here, "ada"), logged_in(here, "bob")
    assert ada.put(f"{API}/users", json={"data": {"username": "bob", "admin": True}}).status_code == 201

    def change_password(old):
        data = {"username": "bob", "oldPassword": old, "newPassword": "another password"}
        return bob.put(f"{API}/users/me", json={"data": data}).status_code

    assert change_password("wrong") == 400
    with ThreadPoolExecutor(1) as thread:
        # After a wrong password, the next password from the same address waits for FAILURE_COOLDOWN_S. During this wait, ada
        # demotes bob.
        changing = thread.submit(change_password, PASSWORDS["bob"])
        assert ada.put(f"{API}/users", json={"data": {"username": "bob", "admin": False}}).status_code == 201
        assert changing.result() == 201
    assert ada.get(f"{API}/users/bob").json()["admin"] is False


def test_an_administrator_changes_rights_and_passwords_but_cannot_demote_the_only_admin(here):
    ada, bob = logged_in(here, "ada"), logged_in(here, "bob")
    made = {"data": {"username": "bob", "admin": True}, "patch": True}
    refused(bob.put(f"{API}/users", json=made), 403, "ForbiddenUserError")
    alone = refused(
        ada.put(f"{API}/users", json={"data": {"username": "ada", "admin": False}}), 403, "ForbiddenUserError"
    )
    assert "the only administrator" in alone
    assert ada.put(f"{API}/users", json=made).status_code == 201
    assert bob.get(f"{API}/users").status_code == 200
    refused(ada.put(f"{API}/users", json={"data": {"username": "eve", "admin": True}}), 400, "NoUserError")
    refused(ada.delete(f"{API}/users/eve"), 404, "NoUserError")
    new = {"data": {"username": "bob", "password": "set by ada"}}
    assert ada.put(f"{API}/users", json=new).status_code == 201
    login = {"username": "bob", "password": "set by ada"}
    assert here.client(None).post("/api/v2/authn/basic/login", json=login).status_code == 200


def test_administrators_can_list_nodes_and_pods_in_the_format_of_kubernetes(here):
    ada = logged_in(here, "ada")
    nodes = ada.get(f"{API}/kubernetes/nodes").json()
    assert (nodes["kind"], [node["status"]["capacity"]["cpu"] for node in nodes["items"]]) == (
        "NodeList",
        ["4"],
    )
    submitted(ada, "sleep 1000")

    def phases(namespace="default"):
        pods = ada.get(f"{API}/kubernetes/pods", params={"namespace": namespace}).json()["items"]
        return [(pod["metadata"]["labels"]["jobName"], pod["status"]["phase"]) for pod in pods]

    wait_until(lambda: phases() == [("job", "Running")], "its task runs")
    assert phases("kube-system") == []
    for path in ("nodes", "pods"):
        refused(here.client("bob").get(f"{API}/kubernetes/{path}"), 403, "ForbiddenUserError")
    assert ada.get(f"{API}/alerts").json() == []
    assert ada.get(f"{API}/cluster/sku-types").json() == {}


def test_the_prometheus_metrics_contain_jobs_queues_and_resources_and_require_a_token(here):
    ada = here.client()
    all_cpus = ((*WORKER, "instances"), 1), ((*WORKER, "resourcePerInstance", "cpu"), 4)
    for name in ("runs", "waits"):
        ada.submit(text_of(a_job(*all_cpus, ((*WORKER, "commands"), ["sleep 600"]), name=name)))
    wait_until(lambda: ada.get(f"{JOBS}/ada~runs").json()["jobStatus"]["state"] == "RUNNING", "the job runs")
    found = {
        (sample.name.removeprefix("local_openpai_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(ada.get("/metrics").text)
        for sample in family.samples
    }
    assert (found["jobs", "RUNNING"], found["jobs", "WAITING"], found["jobs", "FAILED"]) == (1, 1, 0)
    assert found["queued_jobs", "default"] == 1
    assert (found["capacity_cpus", "default"], found["allocated_cpus", "default"]) == (4, 4)
    assert (found["capacity_memory_bytes", "default"], found["allocated_memory_bytes", "default"]) == (
        2**34,
        2**30,
    )
    assert found["allocated_gpus", "default"] == 0
    assert found[("process_resident_memory_bytes",)] > 10e6
    refused(here.client(None).get("/metrics"), 401, "UnauthorizedUserError")
