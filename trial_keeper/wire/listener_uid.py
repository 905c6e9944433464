"""Asks the kernel which user owns a loopback socket: another user can take over a freed port.

A certificate authenticates an encrypted peer; without encryption the kernel's list of listeners identifies the peer's user. Check
after the connection is established and before any data is sent: this also detects a port that was taken over a moment earlier.
"""

import contextlib
import errno
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


UNIX = "unix:"
"""The start of an address that is the path of a socket on this machine."""


def connect(address: str, timeout_s: float) -> socket.socket:
    """Return a connection to HOST:PORT, or to a Unix socket.

    Raises:
        OSError: no server responds.
    """
    if not address.startswith(UNIX):
        return socket.create_connection(host_and_port(address), timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address.removeprefix(UNIX))
    except OSError:
        connection.close()
        raise
    return connection


def verify_address(address: str, others: Iterable[int] = ()) -> None:
    """Verify like `verify_listener_uid` the listener at HOST:PORT, or the owner of a Unix socket.

    Raises:
        UntrustedListener, ConnectionRefusedError: as for `verify_listener_uid`.
    """
    if not address.startswith(UNIX):
        verify_listener_uid(*host_and_port(address), others)
        return
    try:
        owner = os.lstat(address.removeprefix(UNIX)).st_uid
    except OSError as error:
        raise ConnectionRefusedError(f"no program listens at {address}") from error
    if owner not in {os.geteuid(), _ROOT, *others}:
        raise UntrustedListener(
            f"another user of this machine (uid {owner}) owns {address}, so it is not trusted"
        )


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
    found = [(str(at), uid) for at, uid in _listeners(port)]
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
        ConnectionResetError: the other end has reset the connection.
        OSError: the connection broke.
    """
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        try:
            host, port = connection.getpeername()[:2]
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            # A reset that arrives before this call.
            raise ConnectionResetError(errno.ECONNRESET, "the other end has reset the connection") from error
        verify_listener_uid(host, port)


def client_socket(client: tuple[str, int], server: tuple[str, int]) -> ClientSocket | None:
    """Return the client's end of a loopback connection; each argument is the address and port of one end.

    None: the addresses are not on loopback, the client has closed its end, or the kernel does not answer. Both ends are
    compared: a program can bind one local port to several connections.

    Source: sock_diag(7).
    """
    local, remote = _loopback_address(client[0]), _loopback_address(server[0])
    if local is None or remote is None or local.version != remote.version:
        return None
    with contextlib.suppress(OSError, struct.error):
        return _from_sock_diag((local, client[1]), (remote, server[1]))
    return None


# From linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI")  # family, protocol, extensions, states
_SOCKET_ID = struct.Struct(
    "!HH16s16s"
)  # ports and addresses of both ends; then the interface and the cookie: any
_ANY_INTERFACE_AND_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_ANSWER = struct.Struct("=BBxx48x4x4x4xII")  # family, state, uid, inode
_DIAG_TIMEOUT_S = 5.0


def _from_sock_diag(local: tuple[_Address, int], remote: tuple[_Address, int]) -> ClientSocket | None:
    """Ask the kernel for one connection. Its tables in /proc may lack a socket that others are opened or closed beside."""
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    addresses = (each[0].packed.ljust(16, b"\0") for each in (local, remote))
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    body += _SOCKET_ID.pack(local[1], remote[1], *addresses) + _ANY_INTERFACE_AND_COOKIE
    request = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_DIAG_TIMEOUT_S)
        kernel.sendto(request, (0, 0))
        answer = kernel.recv(8192)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # an error: there is no such connection
    _, state, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    # A listener is found in place of a connection that does not exist; a socket without an inode has no owner any more.
    return ClientSocket(uid, inode) if state != int(_LISTENS, 16) and inode else None


def _listeners(port: int) -> Iterator[tuple[_Address, int]]:
    """Yield address and uid of each listener at this port, from the kernel's tables."""
    number = f":{port:04X} "
    for table in filter(Path.exists, _TABLES):
        with table.open(encoding="ascii") as lines:
            next(lines, None)  # the heading
            for line in lines:
                if line.split(maxsplit=4)[3] != _LISTENS:
                    break  # listeners come first, and there may be thousands of connections
                if number not in line:
                    continue
                _, local, _, _, _, _, _, uid, *_ = line.split()
                if f"{local} ".endswith(number):
                    yield _address_in(local.partition(":")[0]), int(uid)


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
