"""A program of the manager's own user on the same machine needs no token. Browsers, proxies, containers and other users need
the token.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys

import pytest
import requests
from deadlines import DEADLINE_S
from guarded_server import Guarded
from nginx import nginx
from strangers import NOBODY, session_of_another_user

from nni_manager.web import own_programs
from trial_keeper.wire import listener_uid

# This Python program sends one request and prints the status of the response.
REQUEST = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=60).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture
def a_server():
    with contextlib.ExitStack() as servers:

        def make(host="127.0.0.1", **access):
            server = Guarded(host, require_token=False, **access)
            servers.callback(server.close)
            return server

        yield make


@pytest.fixture
def server(a_server):
    return a_server()


def status_from(server, *prefix):
    """The status of a request that another Python process sends. `prefix` is the command that starts this process."""
    command = [*prefix, sys.executable, "-c", REQUEST, f"http://127.0.0.1:{server.port}/summary"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if prefix and "Operation not permitted" in done.stderr:
        pytest.skip(f"this machine does not allow {' '.join(prefix)}")
    return int(done.stdout or pytest.fail(done.stderr))


@pytest.mark.parametrize("verb", ["GET", "PUT", "DELETE"])
def test_a_program_needs_no_token_if_its_user_also_runs_the_server(server, verb):
    assert server.ask(verb, token=None).status_code == 200
    assert status_from(server) == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_needs_no_token_if_the_user_of_the_server_runs_curl(server):
    command = ["curl", "--silent", f"http://localhost:{server.port}/summary"]
    assert subprocess.run(command, capture_output=True, timeout=DEADLINE_S).stdout == b"done"


def test_a_program_of_another_user_needs_the_token(server):
    with session_of_another_user() as another:
        answer = another.get(f"http://127.0.0.1:{server.port}/", timeout=DEADLINE_S)
    assert answer.status_code == 401
    assert "manager-process.json" in answer.json()["error"]
    assert server.done == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run a program as another user")
def test_a_real_process_of_another_user_needs_the_token(server):
    """This test uses a real process. The process runs the system's Python, which other users can read."""
    python = shutil.which("python3", path="/usr/bin") or pytest.skip("no Python of the system")
    command = [python, "-I", "-c", REQUEST, f"http://127.0.0.1:{server.port}/summary"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, user=NOBODY, group=NOBODY
    )
    assert (done.stdout, server.done) == ("401\n", 0), done.stderr


@pytest.mark.parametrize(
    "namespace",
    [
        ["--user", "--map-root-user"],
        ["--user", "--map-current-user"],
        ["--pid", "--fork"],
        ["--mount"],
        ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc"],
    ],
    ids=" ".join,
)
def test_a_process_needs_the_token_if_its_namespaces_differ_from_those_of_the_manager(server, namespace):
    """A container in the host's network has the host's loopback, and may have the uid of the user."""
    assert status_from(server, "unshare", *namespace) == 401
    assert server.done == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Referer": "http://localhost/"},
        {"Cookie": "a=b"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Mode": "navigate"},
        {"Sec-Fetch-Dest": "image"},
        {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/605.1.15 (KHTML, like Gecko) Safari/605.1.15"},
        {"Forwarded": "for=192.0.2.1"},
        {"Via": "1.1 proxy"},
        {"X-Forwarded-For": "192.0.2.1"},
        {"X-Forwarded-Anything": ""},
        {"X-Real-IP": "192.0.2.1"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic YTpi"},
    ],
    ids=str,
)  # fmt: skip
def test_a_local_request_with_browser_headers_or_proxy_headers_or_a_wrong_login_is_refused(server, headers):
    with requests.Session() as session:
        session.trust_env = False
        answer = session.delete(f"http://127.0.0.1:{server.port}/", headers=headers, timeout=DEADLINE_S)
    assert (answer.status_code in (401, 403), server.done) == (True, 0)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.2", "192.0.2.1"])
def test_a_request_for_another_host_name_is_refused(server, host):
    assert server.ask(token=None, headers={"Host": host}).status_code == 400


def test_the_creation_of_a_login_link_requires_the_token(a_server):
    server = a_server(for_programs={("POST", "/entrance")})
    assert server.ask("POST", "/entrance", token=None).status_code == 401
    assert server.ask("POST", "/entrance").status_code == 200
    assert server.ask("POST", "/other", token=None).status_code == 200


def test_requests_without_the_token_are_refused_by_a_server_outside_loopback_or_with_require_token(a_server):
    beyond = Guarded("0.0.0.0", require_token=False)
    strict = Guarded(require_token=True)
    try:
        for server in (beyond, strict):
            assert server.ask(token=None).status_code == 401
            assert server.ask().status_code == 200
    finally:
        beyond.close()
        strict.close()


# ---- clients that the kernel cannot identify


def test_the_client_check_compares_the_local_and_the_remote_address_of_a_connection(server):
    """A program of the user is connected to another server. From the same local port, a program of another user connects to this
    server.
    """
    with socket.create_server(("127.0.0.1", 0)) as elsewhere, contextlib.ExitStack() as sockets:
        pair = []
        for target in (("127.0.0.1", server.port), elsewhere.getsockname()):
            each = sockets.enter_context(socket.socket())
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(pair[0].getsockname() if pair else ("127.0.0.1", 0))
            each.settimeout(DEADLINE_S)
            each.connect(target)
            pair.append(each)
        client, at = pair[0].getsockname(), ("127.0.0.1", server.port)
        assert own_programs.is_own_program(client, at)
        if os.geteuid() == 0:
            os.fchown(pair[0].fileno(), NOBODY, -1)
            assert not own_programs.is_own_program(client, at)
        pair[0].close()
        # After close(), the kernel lists the socket as TIME_WAIT, without a uid.
        assert not own_programs.is_own_program(client, at)


def test_a_client_that_has_closed_its_socket_is_not_accepted_as_a_program_of_the_user(server):
    with server.connect() as client, server.connect() as other:
        addresses = client.getsockname(), ("127.0.0.1", server.port)
        assert own_programs.is_own_program(*addresses)
        client.close()
        assert not own_programs.is_own_program(*addresses)
        assert own_programs.is_own_program(other.getsockname(), addresses[1])


def test_a_client_needs_the_token_if_its_socket_is_shared_with_a_process_in_other_namespaces(server):
    with server.connect() as client:
        client.setblocking(True)
        command = ["unshare", "--pid", "--fork", sys.executable, "-c", "print(flush=True); input()"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[client.fileno()]
        ) as sharing:
            if not sharing.stdout.readline():
                pytest.skip("this machine does not allow unshare --pid")
            addresses = client.getsockname(), ("127.0.0.1", server.port)
            assert not own_programs.is_own_program(*addresses)
            sharing.communicate(b"\n")
        assert own_programs.is_own_program(*addresses)


def test_the_token_is_required_if_the_kernel_does_not_return_the_uid_of_the_client(server, monkeypatch):
    monkeypatch.setattr(listener_uid, "_NETLINK_SOCK_DIAG", 99)
    assert server.ask(token=None).status_code == 401


def test_a_client_with_the_overflow_uid_needs_the_token(server, monkeypatch):
    """In a user namespace, the kernel shows the same overflow uid for all users without a mapped uid."""
    with server.connect() as client:
        addresses = client.getsockname(), ("127.0.0.1", server.port)
        monkeypatch.setattr(own_programs, "_overflow_uid", os.geteuid)
        assert not own_programs.is_own_program(*addresses)


# ---- proxies


BROWSERS = {"Sec-Fetch-Site": "none", "User-Agent": "Mozilla/5.0"}
FORWARDS = "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;"


def test_nginx_needs_the_token_if_another_user_runs_nginx_or_if_nginx_sends_forwarding_headers(
    server, tmp_path
):
    for name, user, headers in (("other", "nobody nogroup", ""), ("named", "root", FORWARDS)):
        with nginx(tmp_path / name, server.port, user, headers) as port:
            answer = requests.get(f"http://127.0.0.1:{port}/", timeout=DEADLINE_S)
        assert (answer.status_code, server.done) == (401, 0), name


def test_a_request_through_the_users_nginx_needs_the_token_only_if_a_browser_sent_it(server, tmp_path):
    """SECURITY.md documents this: a proxy of the same user is a program of the user. It forwards the headers of browsers, and the
    server refuses requests with these headers.
    """
    with nginx(tmp_path / "own", server.port, "root") as port:
        url = f"http://127.0.0.1:{port}/"
        for headers in (BROWSERS, {"Origin": "http://evil.example"}, {"Sec-Fetch-Mode": "no-cors"}):
            answer = requests.delete(url, headers=headers, timeout=DEADLINE_S)
            assert (answer.status_code in (401, 403), server.done) == (True, 0), headers
        assert requests.get(url, timeout=DEADLINE_S).text == "done"
