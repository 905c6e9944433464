"""Recognizes requests of the user's own programs on this machine, such as NNI's client, which know no token.

Three things must hold. The kernel says that the client's socket belongs to the manager's user. Each process that has the
socket open is in the manager's own namespaces, so a container on the host's network is not one of these programs. And nothing
in the request is from a browser or a proxy. Whatever is unclear counts as foreign.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from starlette.datastructures import Headers

from trial_keeper.wire.listener_uid import client_socket

_PROC = Path("/proc")
# A container has its own file systems, and usually its own process ids; a rootless one has its own users.
_NAMESPACES = ("user", "pid", "mnt")
_BROWSER_HEADERS = ("origin", "referer", "cookie")
_PROXY_HEADERS = ("forwarded", "via", "x-real-ip")
_PREFIXES = ("sec-fetch-", "x-forwarded-")
# Every browser's User-Agent starts with this, also where its version sends none of the other headers.
_BROWSER = "mozilla/"


def is_direct(headers: Headers) -> bool:
    """True if a program may have sent the request itself: it has no header of a browser, of a proxy or of a login."""
    names = headers.keys()
    return not (
        any(name in (*_BROWSER_HEADERS, *_PROXY_HEADERS, "authorization") for name in names)
        or any(name.startswith(_PREFIXES) for name in names)
        or headers.get("user-agent", "").lower().startswith(_BROWSER)
    )


def is_own_program(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """True if this user's processes alone, in this process's namespaces, have the client's end of the connection open.

    Each argument is the address and port of one end. Blocks for the time of a scan of this user's processes.

    Source: sock_diag(7), proc(5), namespaces(7).
    """
    found = client_socket(client, server)
    if found is None or found.uid != os.geteuid() or found.uid == _overflow_uid():
        return False
    own = _namespaces_of("self")
    holders = [_namespaces_of(pid) for pid in _processes_with(f"socket:[{found.inode}]")]
    return own is not None and bool(holders) and all(each == own for each in holders)


def _overflow_uid() -> int | None:
    """The uid by which the kernel names each user who does not exist in this user namespace."""
    try:
        return int((_PROC / "sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def _namespaces_of(pid: str) -> tuple[str, ...] | None:
    """The process's namespaces; None: the process has exited, or may not be inspected."""
    try:
        return tuple(os.readlink(_PROC / pid / "ns" / name) for name in _NAMESPACES)
    except OSError:
        return None


def _processes_with(link: str) -> Iterator[str]:
    """Yield the ids of this user's processes that have a file open to which such a link points."""
    for process in os.scandir(_PROC):
        if process.name.isdecimal() and _has_open(process, link):
            yield process.name


def _has_open(process: os.DirEntry[str], link: str) -> bool:
    # The process, or a file of it, may be gone by now.
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        files = os.listdir(f"{process.path}/fd")
    except OSError:
        return False
    for file in files:
        try:
            if os.readlink(f"{process.path}/fd/{file}") == link:
                return True
        except OSError:
            continue
    return False
