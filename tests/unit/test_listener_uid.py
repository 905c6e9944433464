"""The uid that the kernel records for a loopback listener distinguishes this user's programs from those of other users."""

import itertools
import os
import shutil
import socket
import struct
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from strangers import NOBODY, give_away

from trial_keeper.wire import listener_uid
from trial_keeper.wire.listener_uid import (
    UntrustedListener,
    check_peer,
    client_socket,
    connect,
    verify_address,
    verify_listener_uid,
)

AT = [
    ("127.0.0.1", "127.0.0.1"),
    ("0.0.0.0", "127.0.0.1"),
    # The kernel's table shows 127.0.0.16 as 1000007F. Unlike 0100007F, which is 127.0.0.1, this has no leading zero.
    ("127.0.0.16", "127.0.0.16"),
    ("::1", "::1"),
    ("::", "::1"),
]


def a_listener(address: str, port: int = 0, **options: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, **options)
    except OSError as error:
        pytest.skip(f"cannot listen at {address}: {error}")


@pytest.mark.parametrize(("listens_at", "host"), AT)
def test_only_listeners_of_this_user_are_trusted(listens_at, host):
    with a_listener(listens_at) as listener:
        port = listener.getsockname()[1]
        verify_listener_uid(host, port)
        with socket.create_connection((host, port)) as connection:
            check_peer(connection)
            give_away(port)
            with pytest.raises(UntrustedListener, match=f"uid {NOBODY}.* listens at {host}:{port}, so it is"):
                check_peer(connection)
        verify_listener_uid(host, port, [NOBODY])


def test_a_connection_that_was_reset_before_the_check_is_reported_as_reset():
    with a_listener("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as connection:
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        with pytest.raises(ConnectionResetError, match="the other end has reset the connection"):
            check_peer(connection)


def test_an_ipv6_listener_at_an_ipv4_address_is_found():
    with a_listener("::ffff:127.0.0.1", dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        verify_listener_uid("127.0.0.1", port)
        give_away(port)
        with pytest.raises(UntrustedListener):
            verify_listener_uid("127.0.0.1", port)


def test_a_dual_stack_listener_is_found_at_its_ipv4_and_its_ipv6_address():
    with a_listener("::", dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        verify_listener_uid("127.0.0.1", port)
        verify_listener_uid("::1", port)
        give_away(port)
        for host in ("127.0.0.1", "[::1]", "::ffff:127.0.0.1"):
            with pytest.raises(UntrustedListener):
                verify_listener_uid(host, port)


def test_another_users_listener_is_ignored_if_it_has_the_same_port_but_another_address():
    with a_listener("127.0.0.1") as ours:
        port = ours.getsockname()[1]
        with a_listener("127.0.0.3", port), a_listener("::", port):
            give_away(port)
            os.fchown(ours.fileno(), os.geteuid(), -1)
            verify_listener_uid("127.0.0.1", port)
            with pytest.raises(UntrustedListener):
                verify_listener_uid("127.0.0.3", port)


def test_a_port_without_a_listener_refuses_the_connection():
    with a_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match=f"no program listens at 127.0.0.1:{port}"):
        verify_listener_uid("127.0.0.1", port)


def test_addresses_outside_loopback_are_not_verified():
    verify_listener_uid("192.0.2.1", 9)
    verify_listener_uid("2001:db8::1", 9)
    verify_listener_uid("a.name.example", 9)


def test_listeners_are_not_verified_if_the_kernel_has_no_socket_tables(monkeypatch, tmp_path: Path):
    with a_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        give_away(port)
        with pytest.raises(UntrustedListener):
            verify_listener_uid("127.0.0.1", port)
        monkeypatch.setattr(listener_uid, "_TABLES", (tmp_path / "tcp", tmp_path / "tcp6"))
        verify_listener_uid("127.0.0.1", port)


def test_listeners_are_verified_on_a_machine_without_ipv6(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(listener_uid, "_TABLES", (Path("/proc/net/tcp"), tmp_path / "tcp6"))
    with a_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        give_away(port)
        with pytest.raises(UntrustedListener):
            verify_listener_uid("127.0.0.1", port)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_with_a_host_and_a_port_is_connected_and_verified(host):
    with a_listener(host) as listener:
        port = listener.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with connect(address, 5.0) as connection:
            assert connection.getpeername()[:2] == (host, port)
            assert connection.gettimeout() == 5.0
        verify_address(address)
        give_away(port)
        with pytest.raises(UntrustedListener):
            verify_address(address)
        verify_address(address, [NOBODY])


def test_a_connection_that_this_process_has_closed_is_not_reported_as_reset_by_the_other_end():
    with a_listener("127.0.0.1") as listener:
        connection = socket.create_connection(listener.getsockname())
        connection.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            check_peer(connection)


# ---- the client side of a connection


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_uid_and_inode_of_a_local_client_socket_are_found(host):
    with a_listener(host) as listener:
        server = listener.getsockname()[:2]
        with socket.create_connection(server) as client:
            accepted, address = listener.accept()
            accepted.close()
            inode = os.fstat(client.fileno()).st_ino
            assert client_socket(address[:2], server) == (os.geteuid(), inode)
            if os.geteuid() == 0:
                os.fchown(client.fileno(), NOBODY, NOBODY)
                assert client_socket(address[:2], server) == (NOBODY, inode)
            other = server[0], server[1] - 1
            assert client_socket(address[:2], other) is None
            assert client_socket(server, other) is None, "a listener has no client"
        assert client_socket(address[:2], server) is None, "the client has closed its end"


def test_the_socket_of_a_client_with_an_ipv4_mapped_address_is_found():
    with a_listener("127.0.0.1") as listener, socket.socket(socket.AF_INET6) as client:
        client.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        client.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        connection, address = listener.accept()
        with connection:
            assert client_socket(address, listener.getsockname()).uid == os.geteuid()


@pytest.mark.parametrize("client", [("192.0.2.1", 80), ("no address", 80), ("::1", 80)])
def test_a_client_on_another_machine_has_no_local_owner(client):
    assert client_socket(client, ("127.0.0.1", 80)) is None


def test_the_socket_of_a_client_is_found_while_other_connections_open_and_close():
    """The lookup uses netlink, because half of all reads of /proc/net/tcp missed the socket in this test."""
    has_ended = threading.Event()

    def connect_and_close():
        with a_listener("127.0.0.1") as listener:
            while not has_ended.is_set():
                pairs = [
                    (socket.create_connection(listener.getsockname()), listener.accept()[0])
                    for _ in range(40)
                ]
                for each in itertools.chain(*pairs):
                    each.close()

    with a_listener("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as client:
        threads = [threading.Thread(target=connect_and_close) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            found = {client_socket(client.getsockname(), listener.getsockname()) for _ in range(300)}
        finally:
            has_ended.set()
            for thread in threads:
                thread.join()
        assert found == {(os.geteuid(), os.fstat(client.fileno()).st_ino)}


def test_the_client_uid_is_unknown_if_the_kernel_does_not_support_socket_queries(monkeypatch):
    monkeypatch.setattr(listener_uid, "_NETLINK_SOCK_DIAG", 99)
    with a_listener("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as client:
        assert client_socket(client.getsockname(), listener.getsockname()) is None


# ---- Unix sockets


@pytest.fixture
def unix_address(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        # A path below `tmp_path` may be too long for a Unix socket.
        folder = Path(tempfile.mkdtemp(dir="/tmp"))
        listener.bind(str(folder / "socket"))
        listener.listen()
        yield f"unix:{folder}/socket"
    shutil.rmtree(folder)


def test_a_unix_socket_whose_file_belongs_to_this_user_is_trusted(unix_address):
    verify_address(unix_address)
    with connect(unix_address, 5.0) as connection:
        assert connection.family == socket.AF_UNIX
        assert connection.gettimeout() == 5.0


def test_a_unix_socket_of_another_user_is_not_trusted(unix_address, monkeypatch):
    monkeypatch.setattr(os, "lstat", lambda path: SimpleNamespace(st_uid=NOBODY))
    with pytest.raises(UntrustedListener, match=f"uid {NOBODY}"):
        verify_address(unix_address)
    verify_address(unix_address, [NOBODY])


def test_an_absent_unix_socket_has_no_listener(tmp_path):
    with pytest.raises(ConnectionRefusedError):
        verify_address(f"unix:{tmp_path}/socket")
    with pytest.raises(FileNotFoundError):
        connect(f"unix:{tmp_path}/socket", 5.0)
