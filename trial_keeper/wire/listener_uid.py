"""Verifies which uid owns a loopback listener: another user can take over a freed port.

A certificate authenticates an encrypted peer; without encryption the kernel's list of listeners identifies the peer's user. Check
after the connection is established and before any data is sent: this also detects a port that was taken over a moment earlier.
"""

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_ROOT = 0
_ANY_ADDRESS = {4: ("0.0.0.0", "::"), 6: ("::",)}


class UntrustedListener(ConnectionRefusedError):
    """A program of another user listens at the address."""


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 address may have brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def verify_listener_uid(host: str, port: int, others: Iterable[int] = ()) -> None:
    """Verify that the listener at this address belongs to this user, to root or to one of `others`.

    `host` is an address. Addresses outside loopback are not checked, and none is checked if the kernel has no such list.

    Raises:
        UntrustedListener: the listener belongs to another user.
        ConnectionRefusedError: there is no listener any more.
    Source: proc_net_tcp in the kernel's documentation.
    """
    address = _loopback_address(
        host
    )  # None for a host name too: the manager's loopback addresses are numeric
    if address is None or not _TABLES[0].exists():
        return
    found = [(str(at), uid) for at, _, uid, _ in _sockets(port, only_listeners=True)]
    # The kernel prefers a listener at the exact address to one at the wildcard address.
    groups = (
        [uid for at, uid in found if at == one] for one in (str(address), *_ANY_ADDRESS[address.version])
    )
    uids = next(filter(None, groups), None)
    if uids is None:
        raise ConnectionRefusedError(f"no program listens at {host}:{port}")
    strangers = {*uids} - {os.geteuid(), _ROOT, *others}
    if strangers:
        raise UntrustedListener(
            f"another user of this machine (uid {min(strangers)}) listens at {host}:{port}, so it is not trusted"
        )


def check_peer(connection: socket.socket) -> None:
    """Verify the other end of a connection like `verify_listener_uid`.

    Raises:
        UntrustedListener, ConnectionRefusedError: as for `verify_listener_uid`.
        OSError: the connection broke.
    """
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        host, port = connection.getpeername()[:2]
        verify_listener_uid(host, port)


def uid_of_peer(host: str, port: int) -> int | None:
    """Return the owner of the socket with this local address on loopback.

    None: the address is not on loopback, the socket is gone, or the kernel has no such list.

    Source: proc_net_tcp in the kernel's documentation.
    """
    address = _loopback_address(host)
    with contextlib.suppress(OSError):
        for at, state, uid, inode in _sockets(port):
            # An orphaned socket has no inode, and its uid is 0 instead of its last owner's.
            if at == address and state != _LISTENS and inode != "0":
                return uid
    return None


def _sockets(port: int, *, only_listeners: bool = False) -> Iterator[tuple[_Address, str, int, str]]:
    """Yield local address, state, uid and inode of the sockets with this local port, from the kernel's tables."""
    number = f":{port:04X} "
    for table in filter(Path.exists, _TABLES):
        with table.open(encoding="ascii") as lines:
            next(lines, None)  # the heading
            for line in lines:
                if only_listeners and line.split(maxsplit=4)[3] != _LISTENS:
                    break  # listeners come first, and there may be thousands of connections
                if number not in line:
                    continue
                _, local, _, state, _, _, _, uid, _, inode, *_ = line.split()
                if f"{local} ".endswith(number):
                    yield _address_in(local.partition(":")[0]), state, int(uid), inode


def _loopback_address(host: str) -> _Address | None:
    with contextlib.suppress(ValueError):
        address = _plain(ipaddress.ip_address(host.strip("[]")))
        return address if address.is_loopback else None
    return None


def _address_in(words: str) -> _Address:
    # 32-bit words, each printed as a number in the machine's byte order.
    numbers = [int(words[start : start + 8], 16) for start in range(0, len(words), 8)]
    return _plain(ipaddress.ip_address(struct.pack(f"={len(numbers)}I", *numbers)))


def _plain(address: _Address) -> _Address:
    """Convert an IPv4-mapped IPv6 address to IPv4."""
    return getattr(address, "ipv4_mapped", None) or address
