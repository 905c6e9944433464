"""Whose a port of this machine's loopback is: anybody may listen on one that its last owner has let go of.

Encryption tells who answers; where there is none, the kernel does: it lists who listens. Ask once the connection is there and
before anything is said on it: whoever took the port a moment earlier is seen then.
"""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
_ROOT = 0
_ANY_ADDRESS = {4: ("0.0.0.0", "::"), 6: ("::",)}


class StrangerListens(ConnectionRefusedError):
    """A program of another user listens there."""


def check_own(host: str, port: int, others: Iterable[int] = ()) -> None:
    """Nothing, if whoever listens at this address is this user, root or one of `others`.

    `host` is an address. One that is not on loopback is not looked at, nor is any where the kernel has no such list.

    Raises:
        StrangerListens: it is somebody else.
        ConnectionRefusedError: by now nobody listens there.
    Source: proc_net_tcp in the kernel's documentation.
    """
    try:
        address = _plain(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return  # a name: ours are numbers
    if not address.is_loopback or not _TABLES[0].exists():
        return
    found = [each for table in _TABLES if table.exists() for each in _listeners(table, port)]
    # The kernel prefers who listens at the address itself to who listens at all of them.
    groups = (
        [uid for at, uid in found if at == one] for one in (str(address), *_ANY_ADDRESS[address.version])
    )
    uids = next(filter(None, groups), None)
    if uids is None:
        raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
    strangers = {*uids} - {os.geteuid(), _ROOT, *others}
    if strangers:
        raise StrangerListens(
            f"another user of this machine (uid {min(strangers)}) listens at {host}:{port}, so it is not trusted"
        )


def check_peer(connection: socket.socket) -> None:
    """As `check_own`, for the other end of a connection.

    Raises:
        StrangerListens, ConnectionRefusedError: as for `check_own`.
        OSError: the connection broke.
    """
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        host, port = connection.getpeername()[:2]
        check_own(host, port)


def _listeners(table: Path, port: int) -> Iterator[tuple[str, int]]:
    """The address and the user of each who listens on a port, as a table of the kernel has them."""
    with table.open(encoding="ascii") as lines:
        next(lines, None)  # the heading
        for line in lines:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            if state != _LISTENS:
                return  # those who listen come first, and of connections there may be thousands
            words, _, number = local.partition(":")
            if int(number, 16) == port:
                yield str(_address_in(words)), int(uid)


def _address_in(words: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # In words of 32 bits, each of them printed as a number of this machine.
    numbers = [int(words[start : start + 8], 16) for start in range(0, len(words), 8)]
    return _plain(ipaddress.ip_address(struct.pack(f"={len(numbers)}I", *numbers)))


def _plain(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address in the form of an IPv6 one is that IPv4 address."""
    return getattr(address, "ipv4_mapped", None) or address
