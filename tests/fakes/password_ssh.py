"""An asyncssh server with password login, in a thread. sshd is not used, because it checks only the passwords of system users."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncssh
from deadlines import DEADLINE_S
from ssh_machines import make_key


class _Server(asyncssh.SSHServer):
    def __init__(self, password: str) -> None:
        self._password = password

    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return password == self._password

    def unix_server_requested(self, listen_path: str) -> bool:
        return True


@contextlib.contextmanager
def a_password_machine(folder: Path, home: Path, path: str, password: str) -> Iterator[tuple[int, str]]:
    """A machine; yields its port, and its line of known_hosts. Its sessions have this home and PATH."""
    make_key(folder / "password_host_key")
    home.mkdir()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    running: set[asyncio.Task[None]] = set()

    async def run(process: asyncssh.SSHServerProcess[bytes]) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        environ = os.environ | {"HOME": str(home), "PATH": path, "MACHINE": "password"}
        child = await asyncio.create_subprocess_shell(
            process.command or "true",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environ,
        )
        await process.redirect(stdin=child.stdin, stdout=child.stdout, send_eof=False)
        waiting = asyncio.ensure_future(child.wait())
        await asyncio.wait(
            {waiting, asyncio.ensure_future(process.wait_closed())}, return_when="FIRST_COMPLETED"
        )
        process.exit(child.returncode or 0)
        # Like sshd, close the stdin of the program when the connection ends. A program that reads its stdin then exits.
        if child.stdin is not None:
            child.stdin.close()
        await waiting

    async def listen() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            *("127.0.0.1", 0),
            server_factory=lambda: _Server(password),
            server_host_keys=[str(folder / "password_host_key")],
            process_factory=run,
            encoding=None,
        )

    async def close() -> None:
        acceptor.close()
        if running:
            await asyncio.wait(running, timeout=DEADLINE_S)

    acceptor = asyncio.run_coroutine_threadsafe(listen(), loop).result()
    port = acceptor.get_port()
    kind, key, *_ = (folder / "password_host_key.pub").read_text().split()
    try:
        yield port, f"[127.0.0.1]:{port} {kind} {key}\n"
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
