"""The client of one machine: keeps a connection up, and sends the files that the machine lacks. Runs on the SSH thread's loop."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import asyncssh

from nni_manager.errors import NniManagerError
from nni_manager.support.backoff import delay_s
from nni_manager.training_services.remote import frames, render
from nni_manager.training_services.remote.connection import Connection, connect
from nni_manager.training_services.remote.section import RemoteMachine
from nni_manager.training_services.ssh.client import MachineAway
from trial_keeper.wire.documents import ManagerDocument
from trial_keeper.wire.listener_uid import UNIX, host_and_port
from trial_keeper.wire.workspace import Workspace

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
# As long as a connection attempt takes at a machine that does not answer.
_FIRST_TRY_S = 20.0


@dataclass(frozen=True, eq=False)
class _Unsent:
    """A request to send a file. A later request for the same file replaces it."""

    is_fixed: bool
    """True if the content never changes, so that a machine that has the file needs no other."""


class MachineClient:
    """One machine. `workspace` is the manager's own; the machine has the files of the experiment's folder there."""

    def __init__(
        self,
        machine: RemoteMachine,
        workspace: Workspace,
        on_event: Callable[[MachineClient, dict[str, Any]], None],
        on_up: Callable[[MachineClient], Awaitable[None]] | None,
    ) -> None:
        """`on_event` receives the ends of jobs.

        `on_up` is awaited after each connection. None: for a program that only reads files, while a manager may run.
        """
        self.machine, self.key = machine, render.key_of(machine)
        self.root = ""
        """The experiment's folder on the machine; empty before the first connection."""
        self.problem = ""
        """Why the machine is away; empty while it answers, or during the first try."""
        self._workspace = workspace
        self._on_event, self._on_up = on_event, on_up
        self._connection: Connection | None = None
        self._was_tried = asyncio.Event()
        self._is_ready = False
        """True once the machine has all files that were queued before the connection was made."""
        self._unsent: dict[Path, _Unsent] = {}
        """The files that the machine lacks, in order."""
        self._parts = itertools.count()
        self._tunnel: tuple[str, int] | None = None
        """Where keepers' connections lead."""
        self._socket = ""
        """The end of the tunnel on the machine; always the same."""

    @property
    def is_up(self) -> bool:
        """True while the machine answers and has the files that its jobs need. Thread-safe."""
        connection = self._connection
        return connection is not None and self._is_ready and not connection.lost.is_set()

    async def keep_connected(self) -> None:
        """Connect again whenever the connection ends."""
        failures = 0
        while True:
            try:
                connection = await connect(self.machine, lambda event: self._on_event(self, event))
                try:
                    await self._open(connection)
                    failures = 0
                    await connection.lost.wait()
                    raise MachineAway(
                        f"cannot reach {self.machine.address} over SSH: the connection was lost; trying again"
                    )
                finally:
                    self._connection, self._is_ready = None, False
                    await connection.close()
            except NniManagerError as error:
                self._note_problem(str(error))
            except Exception:  # the machine's jobs are needed nevertheless
                logger.critical("a bug: please report it", exc_info=True)
                self._note_problem(
                    f"cannot use {self.machine.address} because of a bug; see the manager's log, and report it"
                )
            failures += 1
            await asyncio.sleep(delay_s(failures, _FIRST_RETRY_S, _LONGEST_RETRY_S))

    def _note_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            logger.warning("%s", problem)
        elif self.problem and not problem:
            logger.info("machine %s answers again", self.machine.address)
        self.problem = problem
        self._was_tried.set()

    async def _open(self, connection: Connection) -> None:
        whose: dict[str, Any] = {"key": self.key, "experiment_id": self._workspace.root.name}
        answer = await connection.request("open", **whose, is_manager=self._on_up is not None)
        self.root = answer.header["root"]
        self._connection = connection
        await self._open_tunnel(connection)
        while self._unsent:
            path, unsent = next(iter(self._unsent.items()))
            try:
                await self._send_now(path, is_fixed=unsent.is_fixed)
            except FileNotFoundError:
                logger.warning("cannot send %s to %s: the file was removed", path, self.machine.address)
            self._note_sent(path, unsent)
        self._is_ready = True
        self._was_tried.set()
        if self._on_up is not None:
            await self._on_up(self)
        self._note_problem("")

    async def was_tried(self) -> None:
        """Return after the first try to connect, or after some seconds."""
        if not self._was_tried.is_set():
            waiting = asyncio.ensure_future(self._was_tried.wait())
            await asyncio.wait({waiting}, timeout=_FIRST_TRY_S)
            waiting.cancel()

    async def request(self, name: str, body: bytes = b"", **arguments: Any) -> frames.Frame:
        """The answer to a request; see `Connection.request`."""
        await self.was_tried()
        return await self._current().request(name, body, **arguments)

    def _current(self) -> Connection:
        """The present connection. While a coroutine waits, it may be replaced: a file is sent over a single one."""
        if self._connection is None:
            raise MachineAway(
                self.problem or f"cannot reach {self.machine.address}: it has not answered yet; wait"
            )
        return self._connection

    # ---- files

    async def send(self, path: Path, *, is_fixed: bool = False) -> None:
        """Send a file or an empty folder now.

        Raises:
            MachineAway, RequestFailed: it is not there.
        """
        await self.was_tried()
        await self._send_now(path, is_fixed=is_fixed)

    async def send_later(self, path: Path, *, is_fixed: bool = False) -> None:
        """Send a file or an empty folder, at the latest when the machine answers again."""
        unsent = self._unsent[path] = _Unsent(is_fixed)
        if self.is_up:
            try:
                await self._send_now(path, is_fixed=is_fixed)
                self._note_sent(path, unsent)
            except NniManagerError as error:
                logger.warning("%s; sending it again after the next connection", error)

    def _note_sent(self, path: Path, unsent: _Unsent) -> None:
        if self._unsent.get(path) is unsent:  # otherwise the file has changed since, and is to be sent again
            del self._unsent[path]

    async def _send_now(self, path: Path, *, is_fixed: bool) -> None:
        connection, name = self._current(), path.relative_to(self._workspace.root).as_posix()
        if path.is_dir():
            await connection.request("mkdir", path=name)
            return
        if path == self._workspace.manager_json:
            await self._put(connection, name, await self._manager_json(connection))
            return
        content = await asyncio.to_thread(path.read_bytes)
        digest = hashlib.sha256(content).hexdigest() if is_fixed else ""
        if not is_fixed or not (await connection.request("has_code", path=name, digest=digest)).header["has"]:
            await self._put(connection, name, content, digest)

    async def _put(self, connection: Connection, name: str, content: bytes, digest: str = "") -> None:
        part = f"new-{next(self._parts)}"
        for offset in range(0, max(len(content), 1), frames.MAX_BODY_BYTES):
            piece = content[offset : offset + frames.MAX_BODY_BYTES]
            is_last = offset + len(piece) == len(content)
            where = {"path": name, "offset": offset, "part": part, "is_last": is_last, "digest": digest}
            await connection.request("put", piece, **where)

    # ---- the way of keepers to the manager

    async def _manager_json(self, connection: Connection) -> bytes:
        """The document with the addresses for this machine: the manager's own if it is reachable, and the tunnel's."""
        document = ManagerDocument.from_bytes(self._workspace.manager_json.read_bytes())
        self._tunnel = _address_here(document.addresses[0])
        await self._open_tunnel(connection)
        reachable = []
        for address in document.addresses:
            host, port = host_and_port(address)
            if _is_loopback(host):  # which would be another machine's
                continue
            if (await connection.request("probe", host=host, port=port)).header["is_reachable"]:
                reachable.append(address)
        return replace(document, addresses=(*reachable, f"{UNIX}{self._socket}")).to_bytes()

    async def _open_tunnel(self, connection: Connection) -> None:
        if self._tunnel is None or connection.is_tunnelled:
            return
        connection.is_tunnelled = True  # from now on, so that no other call opens it too
        path = self._socket = (await connection.request("free_socket")).header["path"]
        try:
            await connection.ssh.forward_remote_path_to_port(path, *self._tunnel)
        except (asyncssh.ChannelListenError, asyncssh.Error, OSError) as error:
            logger.warning(
                "cannot forward %s on %s to the manager: %s; allow it with AllowStreamLocalForwarding in sshd_config, "
                "or let the machine reach nniManagerIp",
                *(path, self.machine.address, error),
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address_here(address: str) -> tuple[str, int]:
    """Where the manager listens for this process: on loopback, or on all networks."""
    host, port = host_and_port(address)
    return (host if _is_loopback(host) else "127.0.0.1"), port
