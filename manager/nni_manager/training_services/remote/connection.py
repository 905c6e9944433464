"""One SSH connection to a machine, with the program that answers on it. Runs on the loop of an `SshThread`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import asyncssh

from nni_manager.errors import UserError
from nni_manager.support.keeper_bundle import bundle_for
from nni_manager.training_services.errors import ClusterUnavailable
from nni_manager.training_services.remote import frames
from nni_manager.training_services.remote.bundle import install
from nni_manager.training_services.remote.render import NO_KEEPER, server_command
from nni_manager.training_services.remote.section import RemoteMachine
from nni_manager.training_services.ssh.client import (
    CONNECT_TIMEOUT_S,
    MachineAway,
    error_of,
    open_connection,
    words,
)
from trial_keeper import __version__
from trial_keeper.wire.versions import installation_of, versions_agree

# A login shell may load much, and a Python on NFS needs seconds to start.
_START_TIMEOUT_S = 60.0
# A disk that hangs, a driver that starts, or processes that die slowly. What waits longer is reported and tried again.
REQUEST_TIMEOUT_S = 120.0
_MAX_PREFIX_BYTES = 1 << 20
_STDERR_BYTES = 2000


class RequestFailed(ClusterUnavailable):
    """cannot carry out a request on a machine; see its message"""


class KeeperMissing(UserError):
    """cannot run trials on a machine without a trial-keeper of the manager's version; install it there"""


class Connection:
    """A machine that answers."""

    def __init__(
        self,
        machine: RemoteMachine,
        ssh: asyncssh.SSHClientConnection,
        on_event: Callable[[dict[str, Any]], None],
        folder: str = "",
    ) -> None:
        """`folder`: that of an unpacked bundle, see `render.server_command`."""
        self.machine, self.ssh, self._folder = machine, ssh, folder
        self.hello: dict[str, Any] = {}
        self._on_event = on_event
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[frames.Frame]] = {}
        self._process: asyncssh.SSHClientProcess[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self.lost = asyncio.Event()
        """Set at the end of the connection."""
        self.is_tunnelled = False
        """True if the machine forwards keepers' connections over this one."""

    async def start(self) -> None:
        """Start the program on the machine, and check its version.

        Raises:
            KeeperMissing: it is not there, or has another version.
            MachineAway: it does not start.
        """
        where = self.machine.address
        self._process = process = await self.ssh.create_process(
            server_command(self.machine, self._folder), encoding=None
        )
        try:
            await asyncio.wait_for(process.stdout.readuntil(frames.START), _START_TIMEOUT_S)
            self.hello = (await asyncio.wait_for(self._read(), _START_TIMEOUT_S)).header
        except (asyncio.IncompleteReadError, frames.FrameInvalid) as error:
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(process.wait_closed(), CONNECT_TIMEOUT_S)
            if process.returncode == NO_KEEPER:
                raise KeeperMissing(
                    f"cannot run trials on {where}: it has no trial-keeper on PATH; run "
                    f"{installation_of(__version__)} there, set pythonPath to the bin folder of the Python that has it, or "
                    "install trial-keeper-bundle in nnictl's Python"
                ) from error
            said = (await process.stderr.read(_STDERR_BYTES)).decode(errors="replace").strip()
            raise RequestFailed(
                f"cannot run trials on {where}: `trial-keeper serve-machine` ends at once: {said or 'it prints nothing'}; run "
                f"`{self.machine.command('trial-keeper --version')}`, and install trial-keeper {__version__} there"
            ) from error
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise MachineAway(
                f"cannot start trial-keeper on {where} within {_START_TIMEOUT_S:.0f} s; check the machine's load and disks"
            ) from error
        found = str(self.hello.get("version"))
        if not versions_agree(__version__, found):
            process.close()  # the program ends with its input
            raise KeeperMissing(
                f"cannot run trials on {where}: its trial-keeper is {found}, and the manager is {__version__}; run "
                f"{installation_of(__version__)} there ({self.hello.get('python')})"
            )
        self._reading = asyncio.ensure_future(self._read_all())

    async def request(self, name: str, body: bytes = b"", **arguments: Any) -> frames.Frame:
        """The answer to a request.

        Raises:
            RequestFailed: the machine cannot do it; has its words.
            MachineAway: the connection has ended, or there is no answer in time. It may have been done.
        """
        if self._process is None or self.lost.is_set():
            raise MachineAway(f"cannot reach {self.machine.address}: the connection has ended")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            async with self._writing:
                header = {"number": number, "request": name, **arguments}
                self._process.stdin.write(frames.encode(header, body))
                await self._process.stdin.drain()
            frame: frames.Frame = await asyncio.wait_for(answer, REQUEST_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError, OSError, asyncssh.Error) as error:
            raise MachineAway(f"cannot get an answer of {self.machine.address}: {words(error)}") from error
        finally:
            self._answers.pop(number, None)
        if "error" in frame.header:
            raise RequestFailed(
                f"cannot {name} on {self.machine.address}: {frame.header['error']}; free memory, disk space or processes there"
            )
        return frame

    async def close(self) -> None:
        """End the connection, and with it the program; jobs continue."""
        if self._reading is not None:
            self._reading.cancel()
        self._end()
        self.ssh.close()
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError, OSError, asyncssh.Error):
            await asyncio.wait_for(self.ssh.wait_closed(), CONNECT_TIMEOUT_S)

    async def _read(self) -> frames.Frame:
        assert self._process is not None
        source = self._process.stdout
        header_bytes, body_bytes = frames.lengths_of(await source.readexactly(frames.LENGTHS.size))
        header = frames.header_of(await source.readexactly(header_bytes))
        return frames.Frame(header, await source.readexactly(body_bytes) if body_bytes else b"")

    async def _read_all(self) -> None:
        try:
            while True:
                frame = await self._read()
                number = frame.header.get("number")
                if number is None:
                    self._on_event(frame.header)
                elif number in self._answers and not self._answers[number].done():
                    self._answers[number].set_result(frame)
        except (asyncio.IncompleteReadError, OSError, asyncssh.Error, frames.FrameInvalid):
            pass  # of which `lost` tells
        finally:
            self._end()

    def _end(self) -> None:
        self.lost.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(
                    MachineAway(f"cannot reach {self.machine.address}: the connection has ended")
                )


async def connect(machine: RemoteMachine, on_event: Callable[[dict[str, Any]], None]) -> Connection:
    """A machine that answers.

    Raises:
        UserError: the machine is not trusted, refuses the login, or cannot run trials.
        RetryableError: it cannot be reached now.
    """
    ssh = await open_connection(machine)
    connection = Connection(machine, ssh, on_event)
    try:
        try:
            await connection.start()
        except KeeperMissing:
            if (bundle := bundle_for("auto")) is None:
                raise
            connection = Connection(machine, ssh, on_event, await install(ssh, machine, bundle))
            await connection.start()
    except BaseException as error:
        await connection.close()
        if isinstance(error, asyncssh.Error | OSError):
            raise error_of(machine, error) from error
        raise
    return connection
