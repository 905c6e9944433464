"""Limits unauthenticated connections: if there are too many, the oldest without an authenticated stream are closed.

gRPC limits the connections of a server and refuses new ones beyond the limit. Unauthenticated peers could use up the limit and
keep out keepers that must reconnect. gRPC has no call that closes one connection. But its sockets are files of this process:
after the shutdown of a socket, gRPC behaves as if the peer had closed the connection.

Connections are identified by the address of their peer, which gRPC reports for every stream and the kernel for every socket.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from trial_keeper.frozen_dataclass import dataclass

log = logging.getLogger(__name__)

_FILES = Path("/proc/self/fd")
POLL_INTERVAL_S = 0.25
# The poll interval while there are too many connections. A flood on loopback opens up to 7,000 connections a second.
POLL_RETRY_DELAY_S = 0.05
# Twice the number of keepers in load tests, all of which connect at once after a resume. An unauthenticated connection costs
# 22 kB.
MAX_STRANGERS = 2048
# An eviction leaves this share of the limit: the fewer connections remain, the later the next eviction.
_KEPT_SHARE = 1 / 4
# The number of stored hosts of keepers. A host costs 100 bytes, and only authenticated peers add one.
_MAX_HOSTS = 10_000

Peer = tuple[str, int]
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class _Socket:
    """A connection of this server: its peer, and its descriptor, which may be reused after the connection has closed."""

    descriptor: int
    peer: Peer


class Connections:
    """The connections of the server that listens on a port. Runs on the server's loop."""

    def __init__(self, most: int) -> None:
        """`most`: the connections that gRPC accepts; at most a quarter of them may be unauthenticated."""
        self._most_strangers = min(MAX_STRANGERS, most // 4)
        self._known: Counter[Peer] = Counter()
        """The number of authenticated streams of each peer that has any."""
        self._hosts: dict[str, None] = {}
        """Hosts that have or had keepers, the latest last."""
        self._seen: dict[Peer, int] = {}
        """The number of the poll in which each peer was first seen, while there are too many connections."""
        self._polls = 0
        self._watch: asyncio.Task[None] | None = None

    def start(self, port: int) -> None:
        """Start to watch the connections. Without a list of open files, gRPC's limit is the only one."""
        if _FILES.is_dir():
            self._watch = asyncio.get_running_loop().create_task(self._watch_connections(port))

    async def stop(self) -> None:
        """Stop to watch the connections."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    @contextlib.contextmanager
    def authenticated(self, peer_uri: str) -> Iterator[None]:
        """Protect the connection of a peer (as gRPC names it) from being closed within the context."""
        peer = peer_of(peer_uri)
        if peer is None:
            yield
            return
        self._hosts.pop(peer[0], None)
        self._hosts[peer[0]] = None
        if len(self._hosts) > _MAX_HOSTS:
            del self._hosts[next(iter(self._hosts))]
        with counted(self._known, peer):
            yield

    async def _watch_connections(self, port: int) -> None:
        while True:
            await asyncio.sleep(POLL_RETRY_DELAY_S if self._seen else POLL_INTERVAL_S)
            try:
                if len(os.listdir(_FILES)) - len(self._known) <= self._most_strangers:
                    self._seen.clear()
                    continue
                # In a thread: 4,000 files take about 20 ms.
                sockets = await asyncio.to_thread(lambda: list(_sockets_at(port)))
            except OSError as error:  # this process is out of file descriptors
                log.warning("cannot list the connections of keepers: %s; trying again", error.strerror)
                continue
            self.make_room(sockets)

    def make_room(self, sockets: list[_Socket]) -> None:
        """Close unauthenticated connections if there are too many. `sockets`: all connections of the server."""
        leaving = set(self.strangers_to_close([each.peer for each in sockets]))
        for each in sockets:
            if each.peer in leaving:
                _shut_down(each)

    def strangers_to_close(self, peers: list[Peer]) -> list[Peer]:
        """The peers to disconnect: peers from hosts that never had a keeper first, then the oldest first."""
        self._polls += 1
        self._seen = {peer: self._seen.get(peer, self._polls) for peer in peers}
        strangers = [peer for peer in peers if peer not in self._known]
        if len(strangers) <= self._most_strangers:
            return []
        strangers.sort(key=lambda peer: (peer[0] in self._hosts, self._seen[peer]))
        return strangers[: len(strangers) - int(self._most_strangers * _KEPT_SHARE)]


@contextlib.contextmanager
def counted(counter: Counter[_Key], key: _Key) -> Iterator[None]:
    """Count a key within the context. Keys with no count are removed."""
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]


def peer_of(uri: str) -> Peer | None:
    """The address and port in gRPC's name of a peer, `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`; None: another form."""
    _, _, address = uri.partition(":")
    host, _, port = unquote(address).rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if host and port.isdecimal() else None


def _plain(host: str) -> str:
    # The ipaddress module would double the time of a poll with 4,000 addresses.
    return host.removeprefix("::ffff:") if "." in host else host.partition("%")[0]


def _sockets_at(port: int) -> Iterator[_Socket]:
    """The connections of this process on its own port."""
    for name in os.listdir(_FILES):
        with contextlib.suppress(OSError):  # the descriptor is closed by now, or not a connection
            peer = _peer_at(int(name), port)
            if peer is not None:
                yield _Socket(int(name), peer)


def _peer_at(descriptor: int, port: int) -> Peer | None:
    """The peer of a connection of our port; None: the socket is another one.

    Raises:
        OSError: the descriptor is not a socket, or is not connected.
    """
    borrowed = _socket_of(descriptor)
    try:
        here = borrowed.getsockname()
        if not isinstance(here, tuple) or not isinstance(here[0], str) or here[1] != port:
            return None
        host, peer_port, *_ = borrowed.getpeername()
        return _plain(host), peer_port
    finally:
        borrowed.detach()


def _copy_of(descriptor: int) -> socket.socket:
    """A socket with a duplicate of the descriptor.

    Raises:
        OSError: the descriptor is no longer a socket.
    """
    copy = os.dup(descriptor)
    try:
        return _socket_of(copy)
    except BaseException:
        os.close(copy)
        raise


def _socket_of(descriptor: int) -> socket.socket:
    # The family only affects the size of addresses, and IPv6 fits all; querying the real family costs more system calls.
    return socket.socket(socket.AF_INET6, socket.SOCK_STREAM, fileno=descriptor)


def _shut_down(connection: _Socket) -> None:
    # The listed descriptor may be another file by now: check the peer of a duplicate, whose number cannot be reused.
    with contextlib.suppress(OSError), _copy_of(connection.descriptor) as copy:
        host, port, *_ = copy.getpeername()
        if (_plain(host), port) == connection.peer:
            copy.shutdown(socket.SHUT_RDWR)
