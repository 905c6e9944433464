"""Simulates another user of this machine, who takes over a listener of a test or connects to a test's server."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

NOBODY = 65534


class _Connection(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        # From now on, the kernel reports user nobody as the owner of the connection.
        os.fchown(self.sock.fileno(), NOBODY, -1)


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


def session_of_another_user() -> requests.Session:
    """A requests session. The kernel reports another user as the owner of its connections."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a socket to another user")
    session, adapter = requests.Session(), HTTPAdapter()
    adapter.poolmanager.pool_classes_by_scheme = {"http": _Pool}
    session.mount("http://", adapter)
    session.trust_env = False
    return session


def give_away(port: int, uid: int = NOBODY) -> None:
    """Change the owner of this process's sockets that listen at a port. The kernel then reports the other user as their owner."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a socket to another user")
    given = [descriptor for descriptor in map(int, os.listdir("/proc/self/fd")) if _listens(descriptor, port)]
    assert given, f"nothing of this process listens at {port}"
    for descriptor in given:
        os.fchown(descriptor, uid, uid)


def _listens(descriptor: int, port: int) -> bool:
    with contextlib.suppress(OSError), _borrowed(descriptor) as candidate:
        return (
            candidate.family in (socket.AF_INET, socket.AF_INET6)
            and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            and candidate.getsockname()[1] == port
        )
    return False


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    candidate = socket.socket(fileno=descriptor)
    try:
        yield candidate
    finally:
        candidate.detach()
