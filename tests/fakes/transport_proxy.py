"""A TCP proxy process between keepers and a manager that can delay, hold and break connections.

It reads commands from its stdin, one per line, and exits at the end of stdin:

    delay SECONDS   each piece of data is delayed by this time, in both directions
    hold            nothing is forwarded, and new connections get no response
    pass            held and new data is forwarded again
    break           the current connections stop working without a notice; new connections work
    reset           the current connections are reset

After each command it prints `done` and the number of connections.
"""

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping

_READ_BYTES = 64 * 1024
# In each direction, the proxy queues up to 16 reads. They are 1 MiB, about the size of TCP buffers. With a larger queue, a keeper
# could still send data to a proxy that forwards nothing.
_MAX_QUEUE = 16


class _Connection:
    def __init__(self, proxy: "Proxy", near: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._near = near
        self.is_dead = False
        self.far: asyncio.StreamWriter | None = None

    async def serve(self, from_near: asyncio.StreamReader, to: tuple[str, int]) -> None:
        ways: list[asyncio.Task[None]] = []
        try:
            await self._proxy.is_open.wait()
            from_far, self.far = await asyncio.open_connection(*to)
            pairs = ((from_near, self.far), (from_far, self._near))
            ways = [asyncio.ensure_future(self._carry(*pair)) for pair in pairs]
            await asyncio.gather(*ways)
        except OSError:
            # One side has closed its connection. The code below also closes the connection to the other side.
            pass
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for writer in (self._near, self.far):
                if writer is not None:
                    writer.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_QUEUE)
        delivery = loop.create_task(self._deliver(queue, target))
        try:
            while not delivery.done() and (piece := await source.read(_READ_BYTES)):
                await queue.put((loop.time() + self._proxy.delay_s, piece))
            await queue.put((loop.time() + self._proxy.delay_s, b""))
            await delivery
        finally:
            delivery.cancel()

    async def _deliver(self, queue: asyncio.Queue[tuple[float, bytes]], target: asyncio.StreamWriter) -> None:
        while True:
            due_at_s, piece = await queue.get()
            await asyncio.sleep(max(due_at_s - asyncio.get_running_loop().time(), 0.0))
            await self._proxy.is_open.wait()
            if not piece:
                if not self.is_dead:
                    target.close()
                return
            if self.is_dead:
                continue
            try:
                target.write(piece)
                await target.drain()
            except OSError:
                self.is_dead = True

    def reset(self) -> None:
        """Reset the connection, like a firewall that has lost its state."""
        for writer in (self._near, self.far):
            if writer is not None:
                with contextlib.suppress(OSError):
                    connection = writer.get_extra_info("socket")
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()


class Proxy:
    """The proxy. Its current behaviour applies to all connections."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._connections: set[_Connection] = set()

    async def serve(self, at: tuple[str, int], to: tuple[str, int]) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = _Connection(self, writer)
            self._connections.add(connection)
            try:
                # The proxy may end while this connection waits. The task of the connection is then cancelled, which is no error.
                with contextlib.suppress(asyncio.CancelledError):
                    await connection.serve(reader, to)
            finally:
                self._connections.discard(connection)

        self._server = await asyncio.start_server(accept, *at)

    async def close(self) -> None:
        """Close all connections."""
        self._server.close()
        self.reset_all()
        while self._connections:
            await asyncio.sleep(0.01)

    def reset_all(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    def obey(self, order: list[str]) -> int:
        """Execute a command; return the number of connections."""
        count = len(self._connections)
        match order:
            case ["delay", seconds]:
                self.delay_s = float(seconds)
            case ["hold"]:
                self.is_open.clear()
            case ["pass"]:
                self.is_open.set()
            case ["break"]:
                for connection in self._connections:
                    connection.is_dead = True
            case ["reset"]:
                self.reset_all()
            case _:
                raise ValueError(order)
        return count


class ProxyProcess:
    """Starts and controls a proxy process. `prefix` is a command prefix, for example to start it in another network."""

    def __init__(
        self, at: str, to: str, prefix: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__, at, to],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
        )
        self._wait_for("ready")

    def order(self, text: str) -> int:
        """Send a command and wait until it is executed; return the number of connections."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        return int(self._wait_for("done"))

    def close(self) -> None:
        """Reset all connections and end."""
        self._process.communicate()

    def _wait_for(self, word: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.split()[:1] == [word], f"the proxy answered {line!r}"
        return line.removeprefix(word)


async def main(at: str, to: str) -> None:
    proxy = Proxy()
    near_host, near_port = at.rsplit(":", 1)
    far_host, far_port = to.rsplit(":", 1)
    await proxy.serve((near_host, int(near_port)), (far_host, int(far_port)))
    print("ready", flush=True)
    orders = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(orders)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await orders.readline():
        count = proxy.obey(line.decode().split())
        print("done", count, flush=True)
    await proxy.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
