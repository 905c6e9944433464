"""Starts keepers as forks of a fork server; see `trial_keeper.host.fork_server`."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nni_manager.startup import open_files
from trial_keeper.settings import without_settings
from trial_keeper.wire.fork_requests import FORK_SERVER, MAX_REQUEST_BYTES, SPACE

logger = logging.getLogger(__name__)

# Its imports take 0.2 s, and seconds on a busy machine.
_MAX_START_S = 30.0
_MAX_DEATH_S = 5.0
_MESSAGE_BYTES = 4096


class KeeperForkServer:
    """The client of the fork server process. Used from one event loop."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the working directory of server and keepers. No process is started before `open` or the first `start`."""
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._has_answered = False
        """True once the running server has answered a request."""
        self._number = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._exit_codes: dict[int, asyncio.Future[int | None]] = {}
        self._refusals: set[str] = set()

    def open(self) -> None:
        """Start the server now, so that its imports run beside those of the manager, on another core.

        A machine that cannot start a process now reports that at `start`, which tries again.
        """
        with contextlib.suppress(OSError):
            self._open_channel()

    async def start(
        self, environ: Mapping[str, str], log: int, watch: Callable[[int, "asyncio.Future[int | None]"], None]
    ) -> bool:
        """Fork a keeper whose output goes to the descriptor `log`. False: the server cannot fork it; start it plainly.

        Before the keeper runs, `watch` is called with its pid and with the future of its exit code, which is None if the server
        ends before the keeper.

        Raises:
            OSError: the machine cannot start a process now, or the server was killed or does not respond.
        """
        gate, release = os.pipe()
        try:
            async with self._turn:
                answer = await self._request(environ, [log, gate])
                if "pid" in answer:
                    watch(answer["pid"], answer["exit_code"])
                    with contextlib.suppress(BrokenPipeError):  # it was killed, which its pidfd reports
                        os.write(release, b"\n")
                    return True
        finally:
            # Without the byte, the fork reads EOF and ends.
            os.close(gate)
            os.close(release)
        if "failed" in answer:
            raise OSError(0, answer["failed"])
        if (refusal := answer["refused"]) not in self._refusals:
            self._refusals.add(refusal)
            logger.info("cannot fork a keeper: %s; such keepers start as new processes", refusal)
        return False

    def close(self) -> None:
        """End the server. Keepers continue; their exit codes stay unknown."""
        process, self._process = self._process, None
        if process is None:
            return
        assert self._channel is not None
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        process.kill()  # it has no state that is worth a wait
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            process.wait(_MAX_DEATH_S)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError(0, "the fork server has ended"))
            self._answer.exception()  # nobody may wait yet, about which asyncio would complain
        while self._exit_codes:
            self._note_exit(self._exit_codes.popitem()[1], None)

    async def _request(self, environ: Mapping[str, str], descriptors: list[int]) -> dict[str, Any]:
        self._number += 1
        content = json.dumps({"number": self._number, "environ": dict(environ)}).encode()
        if len(content) > MAX_REQUEST_BYTES:
            return {"refused": "the environment is too large"}
        channel = self._open_channel()
        self._answer = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(channel, [content], descriptors)
            return await asyncio.wait_for(self._answer, _MAX_START_S)
        except (TimeoutError, asyncio.TimeoutError, OSError) as error:
            self.close()
            if not self._has_answered:
                # The start of a new process reports what is wrong with Python or its modules.
                return {"refused": "the fork server did not start"}
            raise OSError(0, error.args[-1] if error.args else "the fork server does not respond") from error
        finally:
            self._answer = None

    def _open_channel(self) -> socket.socket:
        if self._process is None:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "trial_keeper", FORK_SERVER],
                    cwd=self._folder,
                    env=without_settings(os.environ) | SPACE,
                    stdin=theirs.fileno(),
                    stdout=2,
                    start_new_session=True,
                )
            self._has_answered = False
            open_files.restore_limit(self._process.pid)
            self._channel.setblocking(False)
            asyncio.get_running_loop().add_reader(self._channel, self._receive)
        assert self._channel is not None
        return self._channel

    def _receive(self) -> None:
        channel = self._channel
        with contextlib.suppress(BlockingIOError):
            while self._process is not None and channel is not None:
                try:
                    content = channel.recv(_MESSAGE_BYTES)
                except ConnectionError:
                    content = b""
                if not content:
                    self.close()
                    return
                self._note(json.loads(content))

    @staticmethod
    def _note_exit(future: "asyncio.Future[int | None]", exit_code: int | None) -> None:
        if not future.done():  # nobody waits any more for a report that comes late
            future.set_result(exit_code)

    def _note(self, message: dict[str, Any]) -> None:
        if "ended" in message:
            self._note_exit(self._exit_codes.pop(message["ended"]), message["exit_code"])
            return
        self._has_answered = True
        if "pid" in message:
            exit_code = asyncio.get_running_loop().create_future()
            # Kept in both: the end may be noted before the request's coroutine continues.
            message["exit_code"] = self._exit_codes[message["pid"]] = exit_code
        # A request that was cancelled awaits no answer: its fork ends at the closed gate.
        is_awaited = self._answer is not None and not self._answer.done()
        if is_awaited and message["request"] == self._number:
            assert self._answer is not None
            self._answer.set_result(message)
