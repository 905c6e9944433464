"""The uid that owns a loopback listener, read from the kernel, distinguishes this user's programs from another user's."""

import os
import socket
from pathlib import Path

import pytest
from strangers import NOBODY, give_away

from trial_keeper.wire import listener_uid
from trial_keeper.wire.listener_uid import UntrustedListener, check_peer, verify_listener_uid

AT = [
    ("127.0.0.1", "127.0.0.1"),
    ("0.0.0.0", "127.0.0.1"),
    ("127.0.0.2", "127.0.0.2"),
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
def test_a_listener_of_this_user_is_trusted_and_one_of_another_user_is_not(listens_at, host):
    with a_listener(listens_at) as listener:
        port = listener.getsockname()[1]
        verify_listener_uid(host, port)
        with socket.create_connection((host, port)) as connection:
            check_peer(connection)
            give_away(port)
            with pytest.raises(UntrustedListener, match=f"uid {NOBODY}.* listens at {host}:{port}, so it is"):
                check_peer(connection)
        verify_listener_uid(host, port, [NOBODY])


def test_a_dual_stack_listener_is_found_at_both_addresses():
    with a_listener("::", dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        verify_listener_uid("127.0.0.1", port)
        verify_listener_uid("::1", port)
        give_away(port)
        for host in ("127.0.0.1", "[::1]", "::ffff:127.0.0.1"):
            with pytest.raises(UntrustedListener):
                verify_listener_uid(host, port)


def test_another_users_listener_at_a_different_address_does_not_matter():
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


def test_no_listener_is_verified_where_the_kernel_has_no_list_of_them(monkeypatch, tmp_path: Path):
    with a_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        give_away(port)
        with pytest.raises(UntrustedListener):
            verify_listener_uid("127.0.0.1", port)
        monkeypatch.setattr(listener_uid, "_TABLES", (tmp_path / "tcp", tmp_path / "tcp6"))
        verify_listener_uid("127.0.0.1", port)
