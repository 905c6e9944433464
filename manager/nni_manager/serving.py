"""What every HTTP server here is made of: a socket that says why it cannot listen, and uvicorn on the loop of its process.

No client costs more than a connection and the largest request: there are so many connections and no more, a request has to come
in time, and who does not read an answer is let go. Strangers make room for each other, and never keep out who is known.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nni_manager.errors import CANNOT_LISTEN, UserMistake

# Other names of a server on loopback mean that some web page made the browser come here (DNS rebinding).
OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
# nnictl and a few browsers need a handful; the rest of the process's files are for trials.
MOST_CONNECTIONS = 200
# The request line with its query, and all headers.
MOST_HEAD_BYTES = 16 * 1024
# From when a client is accepted, or the first byte of another request, to the last one. An honest one takes a second over a bad
# network, the handshake of TLS included.
REQUEST_WITHIN_S = 15.0
# Who takes no byte of an answer for so long reads it no more.
READ_WITHIN_S = 30.0
# A client that is still sending when the connection closes never sees why. So much of the rest is read, and thrown away.
_DRAINED_BYTES = 16 * 2**20
_DRAINED_WITHIN_S = 5.0


# What requests take along, for `keep_connection` and `note_endless`.
_KEEP = "keep_connection"
_ENDLESS = "note_endless"


class PortUnusable(UserMistake):
    """cannot listen on the port; choose another"""


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a server that listens there."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def listen(host: str, port: int, way_out: str) -> socket.socket:
    """A listening socket, before anything is started. From here on a client waits instead of being refused.

    Raises:
        PortUnusable: the port is taken; the message ends with `way_out`.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READ_WITHIN_S * 1000))
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise PortUnusable(f"{CANNOT_LISTEN} on {host}:{port}: {error.strerror}; {way_out}") from error
    return listener


def keep_connection(scope: Scope) -> None:
    """Note that who asks this may be here: room for others is not made at its cost any more."""
    keep = scope.get("state", {}).get(_KEEP)
    if keep is not None:  # else this is no server of ours
        keep()


def note_endless(scope: Scope) -> None:
    """Note that the answer to this goes on until somebody leaves: a server that ends does not wait for it."""
    note = scope.get("state", {}).get(_ENDLESS)
    if note is not None:  # as above
        note()


class _Connection(H11Protocol):
    """A client since it was accepted. Without a `tls`, it speaks HTTP at once.

    It is let go when its request takes too long to come, and when it is the oldest one that nobody knows and there are too many.
    """

    _deadline: asyncio.TimerHandle | None = None
    _handshake: asyncio.Task[None] | None = None

    def __init__(self, tls: ssl.SSLContext | None, **given: Any) -> None:
        super().__init__(**given)
        self._tls = tls
        self._is_known = False
        self._is_endless = False
        self._has_begun = False  # to speak HTTP
        self._made_at_s = self.loop.time()
        self._came_early = bytearray()
        self.app_state = {**self.app_state, _KEEP: self._keep, _ENDLESS: self._note_endless}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        self._accepted = transport
        self._deadline = self.loop.call_later(REQUEST_WITHIN_S, transport.abort)
        self.connections.add(self)
        if self._tls is None:
            self._begin(transport)
        else:
            transport.pause_reading()
            self._handshake = self.loop.create_task(self._shake_hands(self._tls))
        if len(self.connections) > MOST_CONNECTIONS:
            strangers = [
                each for each in self.connections if isinstance(each, _Connection) and not each._is_known
            ]
            min(strangers, key=lambda each: each._made_at_s)._let_go()

    async def _shake_hands(self, tls: ssl.SSLContext) -> None:
        # Not asyncio's servers, which say nothing of a client before its handshake is over: it may never be.
        try:
            encrypted = await self.loop.start_tls(self._accepted, self, tls, server_side=True)
        except OSError:  # it speaks no TLS, or is gone
            self._let_go()
            return
        if encrypted is None or self._accepted.is_closing():
            self._let_go()
            return
        self._begin(encrypted)
        if self._came_early:
            self.data_received(bytes(self._came_early))

    def _begin(self, transport: asyncio.Transport) -> None:
        self._has_begun = True
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self.connections.discard(self)
        self._stop_waiting()
        if self._has_begun:
            super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends."""
        if self._has_begun and not self._is_endless:
            super().shutdown()
        else:
            self._let_go()

    def _keep(self) -> None:
        self._is_known = True

    def _note_endless(self) -> None:
        self._is_endless = True

    def _let_go(self) -> None:
        # At once, not when it is told that it is lost: others who come now find the room.
        self.connections.discard(self)
        self._stop_waiting()
        self._accepted.abort()

    def data_received(self, data: bytes) -> None:
        """More of a request."""
        if not self._has_begun:  # the first one came together with the end of the handshake
            self._came_early += data
            return
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_WITHIN_S, self._accepted.abort)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, perhaps in the middle of a request: this is its answer, and not what the application says."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        super().send_400_response(msg)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class HttpServer(uvicorn.Server):
    """HTTP on this loop, or HTTPS with the key and certificate of a file; signals are the process's own business."""

    def __init__(self, app: ASGIApp, certificate: Path | None = None) -> None:
        tls = None
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate)
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(_Connection, tls),  # type: ignore[arg-type]  # it is called, and no more
                h11_max_incomplete_event_size=MOST_HEAD_BYTES,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=2,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


class Patience:
    """Answers a client that is still sending at once, reads on for a while, and closes the connection.

    Otherwise the server would read to the end whatever is sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name for name, _ in scope["headers"]}
        was_read = names.isdisjoint({b"content-length", b"transfer-encoding"})
        # A client that waits for a word before it sends has not had it, and will not send.
        waits = b"expect" in names

        async def noticing() -> Message:
            nonlocal was_read, waits
            waits = False
            message = await receive()
            was_read = was_read or message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def sending(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start" and not was_read:
                MutableHeaders(scope=message)["connection"] = "close"
            if not is_last or was_read or waits:
                await send(message)
                return
            await send({**message, "more_body": True})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(drain(), _DRAINED_WITHIN_S)
            await send({"type": "http.response.body", "body": b""})

        async def drain() -> None:
            size = 0
            while not was_read and size < _DRAINED_BYTES:
                size += len((await noticing()).get("body", b""))

        await self._app(scope, noticing, sending)
