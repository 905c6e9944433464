"""The authentication and the limits of the HTTP server. The application behind them accepts every request."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
import requests
from deadlines import DEADLINE_S, scaled_s
from guarded_server import TOKEN, Guarded, a_session_auth
from made_experiment import made_experiment, served_view
from real_experiment import wait_until
from starlette.responses import PlainTextResponse

from nni_manager.client.manager_client import ManagerClient, ManagerUnresponsive, session_with
from nni_manager.store.certificate import Certificate
from nni_manager.store.folders import ManagerProcess
from nni_manager.support import http_server
from nni_manager.support.http_server import is_loopback
from nni_manager.web.auth_middleware import MAX_BODY_BYTES, AuthMiddleware


@pytest.fixture
def a_server():
    servers = []

    def make(*arguments, **options):
        servers.append(Guarded(*arguments, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(a_server):
    return a_server()


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server closes the connection, and ignore the data that it sends before."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


def is_done(connection: socket.socket) -> bool:
    """Wait for the application's response."""
    answer = b""
    while not answer.endswith(b"\r\n\r\ndone"):
        piece = connection.recv(65536)
        assert piece, answer
        answer += piece
    return True


# ---- authentication


def test_a_request_with_the_token_is_accepted(server):
    assert server.ask().text == "done"
    assert server.ask("DELETE").status_code == 200
    assert server.ask(token=None, headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer ü"],
)
@pytest.mark.parametrize("verb", ["GET", "DELETE"])
def test_a_request_without_the_token_is_refused_and_the_error_names_the_token_file(server, verb, header):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    answer = server.ask(verb, token=None, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"].startswith("cannot accept a request without the manager")
    assert "manager-process.json" in answer.json()["error"]
    assert TOKEN not in answer.text
    assert server.done == 0


def test_a_token_in_the_query_string_is_refused(server):
    """Browsers and proxies log URLs, so a token in a URL would leak."""
    assert server.ask(path=f"/summary?token={TOKEN}&access_token={TOKEN}", token=None).status_code == 401


# ---- requests from web pages


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "", "127.0.0.2",
             "[::1]evil", "evil.example@127.0.0.1"]
)  # fmt: skip
def test_a_foreign_host_header_is_refused(server, host):
    answer = server.ask("DELETE", headers={"Host": host})
    assert (answer.status_code, server.done) == (400, 0)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]", "[::1]:8080"])
def test_host_headers_of_loopback_are_accepted(server, host):
    assert server.ask(headers={"Host": host}).status_code == 200


def test_a_request_with_two_host_headers_is_refused(server):
    with server.connect() as connection:
        connection.sendall(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nAuthorization: Bearer the-right-token\r\n\r\n"
        )
        assert b" 400 " in connection.recv(65536).split(b"\r\n")[0]
    assert server.done == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://127.0.0.1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("verb", ["GET", "DELETE"])
def test_cross_site_requests_are_refused_even_with_the_token(server, verb, headers):
    answer = server.ask(verb, headers=headers)
    assert (answer.status_code, server.done) == (403, 0)
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_the_listening_address_of_the_server_is_accepted_as_host_header(a_server):
    for host, name in (("127.0.0.2", "127.0.0.2"), ("127.0.0.2", "127.0.0.2:8080"), ("::1", "[::1]")):
        gate = AuthMiddleware(None, a_session_auth(), host)
        assert gate._is_own(name), host
        assert not gate._is_own("127.0.0.3"), host
    assert AuthMiddleware(None, a_session_auth(), "0:0:0:0:0:0:0:1")._is_own("[0:0:0:0:0:0:0:1]:8080")
    server = a_server("127.0.0.2")
    process = ManagerProcess(1, "127.0.0.2", server.port, "0.6.0", TOKEN)
    with session_with(process) as session:
        assert session.get(f"http://127.0.0.2:{server.port}/", timeout=DEADLINE_S).text == "done"


def test_requests_from_the_page_of_the_manager_are_accepted(server):
    own = {"Origin": f"http://127.0.0.1:{server.port}", "Sec-Fetch-Site": "same-origin"}
    assert server.ask("DELETE", headers=own).status_code == 200


# ---- beyond loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.0.2.7", False), ("some.host", False)],
)  # fmt: skip
def test_only_loopback_addresses_and_localhost_are_recognised_as_loopback(host, expected):
    assert is_loopback(host) is expected


def test_a_public_server_accepts_ip_addresses_and_its_host_name_as_host_headers(a_server):
    server = a_server("0.0.0.0")
    for host in ("192.0.2.7", "192.0.2.7:8080", "[2001:db8::1]:80", socket.gethostname(), "localhost"):
        assert server.ask(headers={"Host": host}).status_code == 200, host
    assert server.ask(headers={"Host": "evil.example"}).status_code == 400


def test_an_unresponsive_dns_server_delays_no_request_to_a_public_server(monkeypatch):
    def full_name():
        asked.append(1)
        assert answered.wait(DEADLINE_S)
        return "Node7.Lab.example"

    asked, answered = [], threading.Event()
    monkeypatch.setattr(socket, "getfqdn", full_name)
    gate = AuthMiddleware(None, a_session_auth(), "0.0.0.0")
    assert not gate._is_own("evil.example")
    assert not gate._is_own("node7.lab.example")
    assert gate._is_own(socket.gethostname())
    assert len(asked) == 1
    answered.set()
    wait_until(lambda: gate._is_own("node7.lab.example:8080"), "the full name is known")


def test_nnictl_connects_only_to_a_server_with_the_expected_certificate(a_server, tmp_path):
    own = Certificate.of(tmp_path / "own.pem", [])
    other = Certificate.of(tmp_path / "other.pem", ["127.0.0.1"])
    server = a_server("0.0.0.0", own)
    process = ManagerProcess(1, "0.0.0.0", server.port, "0.6.0", TOKEN, own.sha256)
    with session_with(process) as session:
        assert session.get(f"https://127.0.0.1:{server.port}/", timeout=DEADLINE_S).text == "done"
    wrong = ManagerProcess(1, "0.0.0.0", server.port, "0.6.0", TOKEN, other.sha256)
    with pytest.raises(ManagerUnresponsive, match="the server there has another certificate"):
        ManagerClient("TESTEXPT", wrong).get("/summary")
    with pytest.raises(requests.ConnectionError):
        server.ask()  # a request without TLS
    assert server.done == 1
    assert TOKEN not in repr(process)


# ---- limits of size and time


def test_a_request_body_is_refused_if_it_is_too_large_or_has_no_length(server):
    assert server.ask("PUT", data=b"x" * MAX_BODY_BYTES).status_code == 200
    assert server.ask("PUT", data=b"x" * (MAX_BODY_BYTES + 1)).status_code == 413
    assert server.ask("PUT", data=iter([b"x"])).status_code == 411
    assert server.done == 1


@pytest.mark.parametrize("request_", [{"path": "/?" + "x" * 20_000}, {"headers": {"X": "x" * 20_000}}])
def test_a_url_or_header_that_is_too_long_is_refused(server, request_):
    # The server may respond and disconnect while the client still sends.
    with contextlib.suppress(requests.ConnectionError):
        # The status depends on how many bytes the server receives in one read.
        assert server.ask(**request_).status_code in (400, 431)
    assert server.done == 0


def test_a_client_that_sends_endless_headers_is_disconnected(server):
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(b"GET / HTTP/1.1\r\n")
        for number in range(100_000):
            connection.sendall(b"X-%d: x\r\n" % number)
        raise AssertionError("the server read all headers")


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: localh",
        b"PUT / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer the-right-token\r\nContent-Length: 10\r\n\r\nx",
    ],
)
def test_an_incomplete_request_is_closed_after_the_timeout(server, monkeypatch, beginning):
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.3)
    with server.connect() as connection:
        connection.sendall(beginning)
        assert is_closed(connection)


def test_an_incomplete_second_request_on_a_connection_is_closed_after_the_timeout(server, monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.5)
    whole = b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer the-right-token\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(whole)
        assert b"200" in connection.recv(65536)
        began_s = time.monotonic()
        connection.sendall(whole[:20])
        assert is_closed(connection)
        assert time.monotonic() - began_s < scaled_s(30)


def test_a_slow_response_is_not_ended_by_the_request_timeout(server, monkeypatch):
    """The timeout covers only the time until the request is complete."""
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.3)
    never = asyncio.Event

    async def slow(_):
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(never().wait(), 1.0)
        return PlainTextResponse("late")

    monkeypatch.setattr(server, "_do", slow)
    assert server.ask().status_code == 200


def test_a_client_that_does_not_read_its_response_is_disconnected(a_server, monkeypatch):
    monkeypatch.setattr(http_server, "READ_TIMEOUT_S", 1.0)
    server = a_server(answer=b"x" * 100_000_000)
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer the-right-token\r\n\r\n"
        )
        connection.recv(1)
        deadline_s = time.monotonic() + DEADLINE_S
        while server._server.server_state.connections:
            assert time.monotonic() < deadline_s, "the server still has the connection"
            threading.Event().wait(0.05)


WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer the-right-token\r\n\r\n"


def test_authenticated_connections_stay_open_while_connections_above_the_limit_are_closed(
    server, monkeypatch
):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 5)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(5)]
        for connection in connections:
            connection.sendall(WHOLE)
            assert is_done(connection)
            connection.sendall(WHOLE[:20])
        for _ in range(20):
            assert is_closed(stack.enter_context(server.connect()))
        for connection in connections:
            connection.sendall(WHOLE[20:])
            assert is_done(connection)


def test_at_the_connection_limit_the_oldest_unauthenticated_connection_is_evicted(server, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 5)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(server.connect()) for _ in range(5)]
        for peer in peers:
            peer.sendall(b"GET / HTTP/1.1\r\n")
        assert server.ask().text == "done"
        assert is_closed(peers[0])  # the oldest connection
        peers[-1].sendall(b"Host: localhost\r\nAuthorization: Bearer the-right-token\r\n\r\n")
        assert is_done(peers[-1])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Host": "evil.example"}, 400),
        ({"Origin": "http://evil.example"}, 403),
        ({"Content-Length": "70000"}, 413),
    ],
)
def test_the_server_closes_a_connection_after_it_refuses_a_request(server, headers, status):
    server.config.timeout_keep_alive = 1000  # The idle timeout must not close the connection first.
    headers = {"Host": "localhost", "Authorization": f"Bearer {TOKEN}"} | headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with server.connect() as connection:
        connection.sendall(f"PUT / HTTP/1.1\r\nExpect: 100-continue\r\n{lines}\r\n".encode())
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert f" {status} ".encode() in answer.split(b"\r\n")[0]
    assert answer.lower().count(b"connection: close") == 1


# ---- limits before the TLS handshake


@pytest.fixture
def tls_server(a_server, tmp_path):
    """A server with TLS, and a function that sends an authenticated request to the server."""
    own = Certificate.of(tmp_path / "own.pem", [])
    server = a_server("0.0.0.0", own)
    process = ManagerProcess(1, "0.0.0.0", server.port, "0.6.0", TOKEN, own.sha256)

    def ask():
        with session_with(process) as session:
            return session.get(f"https://127.0.0.1:{server.port}/", timeout=DEADLINE_S).text

    return server, ask


def test_at_the_connection_limit_connections_without_a_tls_handshake_are_evicted(tls_server, monkeypatch):
    server, ask = tls_server
    # With a long timeout, only the connection limit closes connections.
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 1000.0)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 5)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(server.connect()) for _ in range(30)]
        assert all(is_closed(peer) for peer in peers[:25])
        assert ask() == "done"
        assert len(server._server.server_state.connections) <= 5
        assert is_closed(peers[25])


def test_a_connection_without_a_tls_handshake_is_closed_after_the_timeout(tls_server, monkeypatch):
    server, ask = tls_server
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.3)
    for beginning in (b"", b"\x16\x03\x01"):
        with server.connect() as peer:
            peer.sendall(beginning)
            began_s = time.monotonic()
            assert is_closed(peer)
            assert time.monotonic() - began_s < scaled_s(30)
    monkeypatch.undo()
    assert ask() == "done"


def test_failed_tls_connections_do_not_count_towards_the_limit(tls_server):
    server, ask = tls_server
    with server.connect() as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert is_closed(peer)
    server.connect().close()
    assert ask() == "done"
    deadline_s = time.monotonic() + DEADLINE_S
    while server._server.server_state.connections:
        assert time.monotonic() < deadline_s, "a connection is still counted"
        threading.Event().wait(0.05)


def test_a_server_shuts_down_although_a_tls_handshake_is_unfinished(a_server, tmp_path):
    server = a_server("0.0.0.0", Certificate.of(tmp_path / "own.pem", []))
    with server.connect() as peer:
        peer.sendall(b"\x16")
        deadline_s = time.monotonic() + DEADLINE_S
        while not server._server.server_state.connections:
            assert time.monotonic() < deadline_s, "no connection was accepted"
            threading.Event().wait(0.01)
        server.close()
        assert is_closed(peer)


def test_responses_on_a_keepalive_connection_are_sent_without_delay(server):
    took_s = []
    with requests.Session() as session:
        session.trust_env = False
        session.headers["Authorization"] = f"Bearer {TOKEN}"
        for _ in range(60):
            began_s = time.monotonic()
            session.get(f"http://127.0.0.1:{server.port}/summary", timeout=DEADLINE_S)
            took_s.append(time.monotonic() - began_s)
    # A response that waits for a TCP acknowledgement takes 40 ms, because the kernel delays acknowledgements. The kernel does not
    # delay the first acknowledgements of a connection, so only the last requests are measured.
    assert min(took_s[-20:]) < 0.03


def test_the_shutdown_of_a_server_without_open_connections_takes_less_than_80_ms():
    took_s = []
    for _ in range(5):
        server = Guarded()
        server.ask()
        began_s = time.monotonic()
        server.close()
        took_s.append(time.monotonic() - began_s)
    assert min(took_s) < 0.08


def test_a_request_that_the_shutdown_cancels_is_not_logged_as_a_failure(server, caplog, monkeypatch):
    arrived = threading.Event()

    async def endless(_):
        arrived.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(server, "_do", endless)
    with server.connect() as connection:
        connection.sendall(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer the-right-token\r\n\r\n"
        )
        assert arrived.wait(DEADLINE_S)
        server.close()
        assert is_closed(connection)
    assert caplog.text == ""


# ---- another manager at the port of an exited manager


@pytest.mark.parametrize("call", [ManagerClient.summary, lambda client: client.get("/trials")])
def test_a_client_reports_an_error_if_another_manager_has_taken_the_port_of_an_exited_manager(tmp_path, call):
    with served_view(made_experiment(tmp_path, 1).folder) as view:
        exited = ManagerProcess(1, "127.0.0.1", view.port, "0.7.0", TOKEN)
        with pytest.raises(ManagerUnresponsive, match="another manager answers there; wait and try again"):
            call(ManagerClient("TESTEXPT", exited))
