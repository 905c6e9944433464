"""The local OpenPAI's REST API, over real sockets."""

import base64
import contextlib
import errno
import http.client
import json
import logging
import os
import socket
import time
from urllib.parse import quote

import pytest
from deadlines import DEADLINE_S, scaled_s
from hypothesis import given
from hypothesis import strategies as st
from openpai_here import JOBS, PASSWORDS, OpenPaiHere, an_openpai_here, refused
from openpai_jobs import WORKER, a_job, text_of
from real_experiment import wait_until

from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.errors import ApiError, ClusterClosed, StateBusy
from nni_manager.local_openpai.request_bodies import MAX_BODY_BYTES
from nni_manager.local_openpai.settings import ClusterSettings


@pytest.fixture
def here(tmp_path):
    with an_openpai_here(tmp_path) as here:
        yield here


class FailingCluster(Cluster):
    """A cluster that refuses every job with the error that the test sets."""

    async def submit(self, user, config_text):
        raise self.failure


@pytest.fixture
def failing(tmp_path):
    with contextlib.closing(OpenPaiHere(FailingCluster(ClusterSettings(tmp_path)))) as here:
        yield here


# ---- logins, tokens and users


@pytest.mark.parametrize("form", ["json", "data"])
def test_every_login_path_of_every_openpai_release_returns_a_token(here, form):
    fields = {"username": "bob", "password": PASSWORDS["bob"], "expiration": 60}
    for path in (
        "/api/v2/authn/basic/login",
        "/rest-server/api/v2/tokens",
        "/rest-server/api/v1/token",
        "/api/v1/authn/basic/login",
    ):
        answer = here.client(None).post(path, **{form: fields})
        assert (answer.status_code, answer.json().keys()) == (200, {"user", "token", "admin"})
        assert (answer.json()["user"], answer.json()["admin"]) == ("bob", False)
        bob = here.client(token=answer.json()["token"])
        assert bob.get("/api/v2/tokens/check").json()["exp"] == here.now_s + 60
        here.now_s += 60
        assert refused(bob.get(JOBS), 401, "UnauthorizedUserError") == "Your token is invalid."


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        (
            {"username": "eve", "password": "whatever"},
            "IncorrectPasswordError",
            "User name or password is incorrect.",
        ),
        (
            {"username": "bob", "password": "whatever"},
            "IncorrectPasswordError",
            "User name or password is incorrect.",
        ),
        ({"username": "bob"}, "InvalidParametersError", "cannot find the text field password"),
        (
            {"username": 5, "password": "whatever"},
            "InvalidParametersError",
            "cannot find the text field username",
        ),
        (
            {"username": "bob", "password": "x" * 9, "expiration": 59},
            "InvalidParametersError",
            "60 to 604800",
        ),
        (
            {"username": "bob", "password": "x" * 9, "expiration": True},
            "InvalidParametersError",
            "expiration 'True'",
        ),
        ([], "InvalidParametersError", "not a JSON object"),
    ],
)
def test_a_failed_login_returns_the_reason_without_the_password(here, fields, code, words, caplog):
    with caplog.at_level(logging.DEBUG):
        message = refused(here.client(None).post("/api/v1/token", json=fields), 400, code)
    assert words in message
    assert "whatever" not in caplog.text + message


def test_only_the_version_and_the_login_information_are_available_without_a_token(here):
    guest = here.client(None)
    info = guest.get("/rest-server/api/v2/info").json()
    assert info["version"].startswith("v1.")
    for old in ("/rest-server/api/v1", "/api/v1", "/api/v1/"):
        answer = guest.get(old, allow_redirects=False)
        assert (answer.status_code, answer.json()) == (200, info)
    assert guest.get("/api/v2/authn/info").json()["authn_type"] == "basic"
    for method, path in [
        ("GET", JOBS),
        ("POST", JOBS),
        ("GET", f"{JOBS}/ada~job"),
        ("PUT", f"{JOBS}/ada~job/executionType"),
        ("GET", "/api/v2/tokens"),
        ("POST", "/api/v2/tokens/application"),
        ("GET", "/api/v2/users/ada"),
        ("GET", "/api/v2/storages"),
        ("GET", "/api/v2/virtual-clusters"),
        ("GET", "/rest-server/api/v1/user/ada/jobs"),
    ]:
        message = refused(guest.request(method, path), 401, "UnauthorizedUserError")
        assert message == "Guest is not allowed to do this operation."


def test_invalid_tokens_are_refused_with_the_same_message(here):
    good = here.client("ada").token
    basic = lambda text: "Basic " + base64.b64encode(text.encode()).decode()  # noqa: E731
    login = here.client("ada", application=False).token
    wrong = [
        "Bearer",
        "Bearer ",
        "Bearer x",
        f"Bearer {good[:-2]}",
        f"Bearer {good.rpartition('.')[0]}.",
        f"Bearer {good} {good}",
        f"Token {good}",
        good,
        "Basic %%%",
        basic("ada"),
        basic(f"bob:{good}"),
        basic(f"ada:{login}"),
        basic(f"ada:{PASSWORDS['ada']}"),
    ]
    for authorization in wrong:
        answer = here.client(None).get(JOBS, headers={"Authorization": authorization})
        assert refused(answer, 401, "UnauthorizedUserError") == "Your token is invalid.", authorization
    for authorization in (f"Bearer {good}", f"bearer {good}", basic(f"ada:{good}")):
        assert here.client(None).get(JOBS, headers={"Authorization": authorization}).status_code == 200


def test_tokens_are_listed_without_their_signature_and_can_be_revoked(here):
    ada = here.client("ada", application=False)
    application = ada.post("/api/v2/tokens/application").json()
    assert application["application"] is True
    listed = ada.get("/api/v2/tokens").json()["tokens"]
    assert listed == [token.rpartition(".")[0] + "." for token in (ada.token, application["token"])]
    program = here.client(token=application["token"])
    assert program.get("/api/v2/tokens/check").json()["application"] is True
    bob = here.client("bob")
    refused(bob.delete(f"/api/v2/tokens/{application['token']}"), 403, "ForbiddenUserError")
    assert ada.delete(f"/api/v2/tokens/{application['token']}").status_code == 200
    refused(program.get(JOBS), 401, "UnauthorizedUserError")
    assert ada.delete("/api/v2/authn/basic/logout").status_code == 200
    refused(ada.get(JOBS), 401, "UnauthorizedUserError")
    assert here.stored[-1] == here.accounts.to_json()


def test_a_password_change_requires_the_old_password_except_for_administrators(here):
    ada, bob, program = (
        here.client("ada", application=False),
        here.client("bob", application=False),
        here.client("bob"),
    )

    def set_password(client, name, new, old=None):
        fields = {"newPassword": new} | ({} if old is None else {"oldPassword": old})
        return client.put(f"/api/v2/users/{name}/password", json=fields)

    def can_log_in(password):
        fields = {"username": "bob", "password": password}
        return here.client(None).post("/api/v2/authn/basic/login", json=fields).status_code == 200

    refused(set_password(bob, "ada", "new password", "ada's password"), 403, "ForbiddenUserError")
    refused(set_password(program, "bob", "new password", "bob's password"), 403, "ForbiddenUserError")
    refused(set_password(bob, "bob", "new password"), 400, "InvalidParametersError")
    refused(set_password(bob, "bob", "new password", "no password"), 400, "IncorrectPasswordError")
    assert can_log_in("bob's password")
    assert set_password(bob, "bob", "new password", "bob's password").status_code == 200
    assert (can_log_in("new password"), can_log_in("bob's password")) == (True, False)
    refused(set_password(ada, "bob", "short"), 400, "InvalidParametersError")
    refused(set_password(ada, "eve", "bob's password"), 400, "NoUserError")
    assert set_password(ada, "bob", "bob's password").status_code == 200
    assert can_log_in("bob's password")
    assert not here.accounts.user("bob").is_admin
    assert here.stored[-1] == here.accounts.to_json()


def test_a_change_of_the_accounts_that_cannot_be_stored_is_refused_and_undone(here):
    ada = here.client("ada", application=False)
    before = here.accounts.to_json()
    here.disk_error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    login = {"username": "bob", "password": PASSWORDS["bob"]}
    for answer in (
        here.client(None).post("/api/v2/authn/basic/login", json=login),
        ada.post("/api/v2/users", json={"username": "eve", "password": "eve's password"}),
        ada.put("/api/v2/users/bob/password", json={"newPassword": "another password"}),
        ada.put("/api/v2/users", json={"data": {"username": "bob", "admin": True}}),
        ada.delete("/api/v2/users/bob"),
        ada.delete("/api/v2/authn/basic/logout"),
    ):
        message = refused(answer, 503, "BusyError")
        assert "cannot store the accounts: [Errno 28] No space left on device; free disk space" in message
        assert answer.headers["Retry-After"] == "1"
    assert here.accounts.to_json() == before
    here.disk_error = None
    assert ada.delete("/api/v2/users/bob").status_code == 200


def test_only_administrators_with_a_login_token_can_manage_users(here):
    ada, bob, program = (
        here.client("ada", application=False), here.client("bob", application=False), here.client("ada")
    )  # fmt: skip
    eve = {"username": "eve", "password": "eve's password"}
    for client, words in ((bob, "Non-admin"), (program, "Applications")):
        assert words in refused(client.post("/api/v2/users", json=eve), 403, "ForbiddenUserError")
        assert words in refused(client.get("/api/v2/users"), 403, "ForbiddenUserError")
        assert words in refused(client.delete("/api/v2/users/bob"), 403, "ForbiddenUserError")
    assert ada.post("/api/v2/users", json=eve).status_code == 201
    refused(ada.post("/api/v2/users", json=eve), 409, "ConflictUserError")
    refused(ada.post("/api/v2/users", json={**eve, "username": "a~b"}), 400, "InvalidParametersError")
    assert [user["username"] for user in ada.get("/api/v2/users").json()] == ["ada", "bob", "eve"]
    assert here.client(None).post("/api/v1/token", json=eve).status_code == 200
    document = bob.get("/api/v2/users/eve").json()
    assert (document["admin"], document["virtualCluster"], document["storageConfig"]) == (
        False,
        ["default"],
        ["team", "data"],
    )
    assert document == bob.get("/api/v1/user/eve").json()
    assert ada.delete("/api/v2/users/eve").status_code == 200
    refused(bob.get("/api/v2/users/eve"), 400, "NoUserError")


# ---- refused requests


def test_the_refusal_names_the_expected_content_type_if_a_job_has_a_wrong_content_type(here):
    for headers in ({"Content-Type": "application/json"}, {"Content-Type": "application/x-yaml; a=b"}, {}):
        answer = here.client().post(JOBS, data=text_of(a_job()).encode(), headers=headers)
        assert "Content-Type: text/yaml" in refused(answer, 400, "InvalidProtocolError")
    assert (
        here.client().post(JOBS, data=text_of(a_job()), headers={"Content-Type": "text/plain"}).status_code
        == 202
    )


def test_a_request_is_refused_before_its_body_is_sent_if_its_content_length_exceeds_the_limit(here):
    connection = http.client.HTTPConnection(here.address, timeout=DEADLINE_S)
    connection.putrequest("POST", JOBS)
    connection.putheader("Authorization", f"Bearer {here.client().token}")
    connection.putheader("Content-Type", "text/yaml")
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())) == (413, {"message": "request entity too large"})
    connection.close()


def _sent_until_refused(connection):
    sent = 0
    with contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(b"10000\r\n%s\r\n" % (b"#" * 0x10000))
            sent += 0x10000
    return sent


def test_a_chunked_body_is_refused_as_soon_as_it_exceeds_the_limit(here):
    started = time.monotonic()
    with socket.create_connection(here.address.split(":"), timeout=DEADLINE_S) as connection:
        head = f"POST {JOBS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/yaml\r\nTransfer-Encoding: chunked\r\n"
        connection.sendall(f"{head}Authorization: Bearer {here.client().token}\r\n\r\n".encode())
        sent = _sent_until_refused(connection)
        assert connection.recv(12) == b"HTTP/1.1 413"
    assert sent < 64 * 2**20
    assert time.monotonic() - started < scaled_s(20)


@pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, 2**20, 8 * 2**20])
def test_a_client_that_sends_an_oversized_body_receives_the_413_response(here, size):
    for verb, path in (("POST", JOBS), ("POST", "/api/v1/token"), ("PUT", f"{JOBS}/ada~job/executionType")):
        for data in (b"#" * size, iter([b"#" * size])):
            answer = here.client().request(verb, path, data=data, headers={"Content-Type": "text/yaml"})
            assert (answer.status_code, answer.json()) == (413, {"message": "request entity too large"})
    wrong = here.client(token="x").request("POST", JOBS, data=b"#" * size)
    refused(wrong, 401, "UnauthorizedUserError")


def test_a_job_of_the_maximum_size_is_accepted(here):
    text = text_of(a_job())
    text += "\n" + "#" * (MAX_BODY_BYTES - len(text) - 1)
    assert here.client().submit(text).status_code == 202
    assert here.client().submit(text + "#").status_code == 413


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/api/v3/jobs"),
        ("GET", "/rest-server/"),
        ("DELETE", JOBS),
        ("PATCH", f"{JOBS}/ada~job"),
        ("GET", f"{JOBS}/ada~job/attempts/x"),
        ("GET", f"{JOBS}/ada~job/attempts/-1"),
        ("GET", f"{JOBS}/../../../etc/passwd"),
        ("GET", f"{JOBS}/ada~job/attempts/0/taskRoles/..%2f..%2fx/taskIndex/0/attempts/0/logs"),
    ],
)
def test_the_response_for_an_unknown_path_has_status_404_and_the_error_code_of_openpai(here, method, path):
    refused(here.client().request(method, path), 404, "NoApiError")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StateBusy("cannot write; wait"), 503, "BusyError"),
        (ClusterClosed(), 503, "BusyError"),
        (ApiError("NoStorageError", "cannot find storage x; use team"), 404, "NoStorageError"),
        (ApiError("NoVirtualClusterError", "cannot find it; use default"), 404, "NoVirtualClusterError"),
    ],
)
def test_an_error_of_the_cluster_is_returned_with_its_status_and_message(failing, error, status, code):
    failing.cluster.failure = error
    answer = failing.client().submit(text_of(a_job()))
    assert refused(answer, status, code) == str(error)
    assert ("Retry-After" in answer.headers) == (status == 503)


def test_an_unexpected_error_is_logged_and_its_text_is_not_returned(failing, caplog):
    failing.cluster.failure = RuntimeError("the inside of it")
    answer = failing.client().submit(text_of(a_job()))
    assert "the inside" not in refused(answer, 500, "UnknownError")
    wait_until(lambda: "the inside of it" in caplog.text, "the error is logged")


def test_a_request_with_a_foreign_host_header_is_refused(here):
    assert here.client().get(JOBS, headers={"Host": "evil.example"}).status_code == 400


def test_no_log_line_contains_a_secret(here, caplog):
    ada = here.client("ada", application=False)
    with caplog.at_level(logging.DEBUG):
        login = ada.post("/api/v1/token", json={"username": "ada", "password": PASSWORDS["ada"]}).json()[
            "token"
        ]
        ada.post("/api/v1/token", json={"username": "ada", "password": PASSWORDS["ada"] + "!"})
        ada.submit(text_of(a_job(secrets={"key": "s3cr3t"})))
        ada.submit(text_of(a_job(secrets={"key": "s3cr3t"})) + ":")
        ada.get(f"{JOBS}?token={login}&limit=x")
        ada.delete(f"/api/v2/tokens/{login}")
        ada.delete(f"/api/v2/tokens/{login}")
        ada.delete(f"/api/v2/tokens/{login}/%0aforged")
        ada.get(f"/log-manager/x/api/v1/logs/stdout?token={login}")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("nni_manager")]
    assert any(line.startswith("ada DELETE /api/v2/tokens/%2A%2A%2A 200 ") for line in lines), lines
    for secret in (login, ada.token, login.rpartition(".")[2], PASSWORDS["ada"], "s3cr3t", "forged"):
        assert secret not in "\n".join(lines)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["username", "password", "expiration", "value", "admin"]), inner, max_size=5
        )
    ),
    max_leaves=8,
)
BODIES = (
    st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | VALUES.map(json.dumps).map(str.encode)
)
WORDS = st.sampled_from(["ada", "job", "ada~job", "~", "0", "-1", "team", "default", "stdout"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=10
)
PATHS = [
    "/api/v2/authn/basic/login",
    "/api/v1/token",
    "/api/v2/users",
    "/api/v2/users/{}",
    "/api/v2/tokens/{}",
    "/api/v2/jobs",
    "/api/v2/jobs/{}",
    "/api/v2/jobs/{}/executionType",
    "/api/v2/jobs/{}/tag",
    "/api/v2/jobs/{}/events",
    "/api/v2/jobs/{}/attempts/{}",
    "/api/v2/jobs/{}/attempts/0/taskRoles/{}/taskIndex/0/attempts/0/logs",
    "/api/v1/user/{}/jobs/{}",
    "/api/v2/virtual-clusters/{}",
    "/api/v2/storages/{}",
    "/log-manager/{}/api/v1/logs/{}",
]
QUERIES = st.dictionaries(
    st.sampled_from(
        [
            "limit",
            "offset",
            "order",
            "state",
            "tagsContain",
            "type",
            "username",
            "attempt",
            "token",
            "expires",
            "taskindex",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
    max_size=4,
)


def test_random_requests_cause_no_server_error(here):
    here.client().submit(text_of(a_job()))
    admin = here.client("ada", application=False)

    @given(
        st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
        st.sampled_from(PATHS),
        st.lists(WORDS, min_size=2, max_size=2),
        QUERIES,
        st.sampled_from(["application/json", "text/yaml", "application/x-www-form-urlencoded", "x"]),
        BODIES,
    )
    def is_answered(method, path, words, query, kind, body):
        path = path.format(*(quote(word, safe="") for word in words))
        answer = admin.request(method, path, params=query, data=body, headers={"Content-Type": kind})
        assert answer.status_code < 500, (method, path, query, kind, body, answer.text)

    is_answered()


# ---- jobs


def test_only_the_owner_or_an_administrator_may_change_a_job(here):
    ada, bob = here.client("ada"), here.client("bob")
    for name, client in (("hers", ada), ("his", bob)):
        running = a_job(((*WORKER, "commands"), ["sleep 1000"]), name=name)
        assert client.submit(text_of(running)).status_code == 202
    for method, path, body in [
        ("PUT", "executionType", {"value": "STOP"}),
        ("PUT", "tag", {"value": "t"}),
        ("DELETE", "tag", {"value": "t"}),
    ]:
        answer = bob.request(method, f"{JOBS}/ada~hers/{path}", json=body)
        message = refused(answer, 403, "ForbiddenUserError")
        assert message == "User bob is not allowed to execute job ada~hers."
        assert ada.request(method, f"{JOBS}/bob~his/{path}", json=body).ok
        assert bob.get(f"{JOBS}/ada~hers").status_code == 200
    refused(bob.delete(f"{JOBS}/ada~hers"), 403, "ForbiddenUserError")
    refused(
        bob.put("/api/v1/user/ada/jobs/hers/executionType", json={"value": "STOP"}), 403, "ForbiddenUserError"
    )
    assert ada.get(f"{JOBS}/ada~hers").json()["jobStatus"]["executionType"] == "START"
    assert ada.get(f"{JOBS}/bob~his").json()["jobStatus"]["executionType"] == "STOP"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("GET", "/config", None),
        ("GET", "/ssh", None),
        ("GET", "/events", None),
        ("GET", "/attempts/0", None),
        ("DELETE", "", None),
        ("PUT", "/executionType", {"value": "STOP"}),
        ("PUT", "/tag", {"value": "t"}),
        ("DELETE", "/tag", {"value": "t"}),
    ],
)
def test_a_request_for_an_unknown_job_is_refused_with_the_error_code_nojoberror(here, method, path, body):
    for name in ("ada~nope", "nobody~job", "nope", "~", "ada~", "a~b~c", "%00~%ff"):
        answer = here.client().request(method, f"{JOBS}/{name}{path}", json=body)
        assert "job" in refused(answer, 404, "NoJobError").lower()


def test_every_execution_type_except_start_and_stop_is_refused(here):
    here.client().submit(text_of(a_job()))
    for body in ({"value": "PAUSE"}, {"value": None}, {}, {"value": ["STOP"]}, [], "STOP"):
        answer = here.client().put(f"{JOBS}/ada~job/executionType", json=body)
        assert refused(answer, 400, "InvalidParametersError").startswith("cannot use ")


def test_a_tag_that_cannot_be_used_in_a_filter_is_refused(here):
    here.client().submit(text_of(a_job()))
    for tag in ("", "a,b", " a", "a\n", "x" * 65, "\ud800", 5, None):
        answer = here.client().put(f"{JOBS}/ada~job/tag", json={"value": tag})
        assert refused(answer, 400, "InvalidParametersError").startswith("cannot ")
    assert here.client().get(f"{JOBS}/ada~job").json()["tags"] == []


# ---- resources of the cluster


def test_virtual_clusters_nodes_and_storages_can_be_listed_and_requested_by_name(here):
    client = here.client("bob")
    clusters = client.get("/rest-server/api/v2/virtual-clusters").json()
    assert clusters["default"] == client.get("/api/v1/virtual-clusters/default").json()
    assert client.get("/api/v2/virtual-clusters/default/nodes").json() == ["localhost"]
    assert client.get("/api/v2/virtual-clusters?nodes").json().keys() == {"localhost"}
    refused(client.get("/api/v2/virtual-clusters/nope"), 404, "NoVirtualClusterError")
    assert [each["name"] for each in client.get("/api/v2/storages").json()["storages"]] == ["team", "data"]
    defaults = client.get("/api/v2/storages?default=true").json()["storages"]
    assert defaults == [{"name": "team", "share": True, "volumeName": "team", "default": True}]
    assert client.get("/api/v2/storages/data").json()["data"]["path"].endswith("/data")
    refused(client.get("/api/v2/storages/nope"), 404, "NoStorageError")
