"""Reads from the kernel's tables which user owns a loopback socket: another user can take over a freed port.

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
from typing import NamedTuple

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_ROOT = 0
_ANY_ADDRESS = {4: ("0.0.0.0", "::"), 6: ("::",)}


class _Socket(NamedTuple):
    """A line of the kernel's tables. `inode` 0: no process has the socket open any more, and `uid` is not its owner's."""

    local: _Address
    remote: tuple[_Address, int]
    state: str
    uid: int
    inode: int


class ClientSocket(NamedTuple):
    """The client's end of a connection. Links in `/proc/PID/fd` name its inode."""

    uid: int
    inode: int


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
    found = [(str(each.local), each.uid) for each in _sockets(port, only_listeners=True)]
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
        for each in _sockets(port):
            if each.local == address and each.state != _LISTENS and each.inode:
                return each.uid
    return None


def client_socket(client: tuple[str, int], server: tuple[str, int]) -> ClientSocket | None:
    """Return the client's end of a loopback connection; each argument is the address and port of one end.

    None: the addresses are not on loopback, the client has closed its end, or the kernel has no such list. Both ends are
    compared: a program can bind one local port to several connections.

    Source: proc_net_tcp in the kernel's documentation.
    """
    local, remote = _loopback_address(client[0]), _loopback_address(server[0])
    if local is None or remote is None:
        return None
    found = []
    with contextlib.suppress(OSError):
        for each in _sockets(client[1]):
            if each.local == local and each.remote == (remote, server[1]) and each.inode:
                found.append(ClientSocket(each.uid, each.inode))
    return found[0] if len(found) == 1 else None


def _sockets(port: int, *, only_listeners: bool = False) -> Iterator[_Socket]:
    """Yield the sockets with this local port from the kernel's tables."""
    number = f":{port:04X} "
    for table in filter(Path.exists, _TABLES):
        with table.open(encoding="ascii") as lines:
            next(lines, None)  # the heading
            for line in lines:
                if only_listeners and line.split(maxsplit=4)[3] != _LISTENS:
                    break  # listeners come first, and there may be thousands of connections
                if number not in line:
                    continue
                _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
                if f"{local} ".endswith(number):
                    peer, _, peer_port = remote.partition(":")
                    yield _Socket(
                        _address_in(local.partition(":")[0]),
                        (_address_in(peer), int(peer_port, 16)),
                        state,
                        int(uid),
                        int(inode),
                    )


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
