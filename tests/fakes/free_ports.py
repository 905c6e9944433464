"""Free ports for servers of tests that run at the same time."""

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

# The kernel takes ports for outgoing connections from ip_local_port_range. Tests use lower ports, so that no outgoing connection
# takes the port of a server that restarts.
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# nnictl tries ports from 8080 upwards and does not reach this port, so it takes no port of a test.
_LOWEST_PORT = 12000


def _own_ports() -> Iterator[int]:
    """The first ports of port pairs, in a cycle that starts at a random pair.

    No other process of this test run uses these pairs.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first_given = int(_GIVEN_PORTS.read_text().split()[0])
    own = range(_LOWEST_PORT + 2 * number, first_given - 1, 2 * processes)
    begin = random.randrange(len(own))
    return itertools.cycle((*own[begin:], *own[:begin]))


_PORTS = _own_ports()


def free_port_pair() -> int:
    """A free port whose next one is free too; no other test gets them at the same time."""
    while True:
        port = next(_PORTS)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
