"""Parts of every HTTP server here: a listening socket with clear errors, and uvicorn on the event loop of the process.

A client costs at most one connection and one request of maximum size. Connections are limited, a request must arrive in time,
and idle readers are disconnected. When the connection limit is hit, the oldest unauthenticated connection is evicted;
authenticated ones never are.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nni_manager.errors import CANNOT_LISTEN, UserError
from nni_manager.support.server_tls import RenewableCertificate
from trial_keeper.timeouts import set_within

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

# Any other host name on loopback means that a web page directed the browser here (DNS rebinding).
OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
# nnictl and a few browsers need few connections; the other descriptors of the process are for trials.
MAX_CONNECTIONS = 200
# The request line with its query, and all headers.
MAX_HEAD_BYTES = 16 * 1024
# From accept, or from the first byte of a later request, to the request's last byte. A valid client takes one second over a bad
# network, including the TLS handshake.
REQUEST_TIMEOUT_S = 15.0
# A client that accepts no byte of a response for this long is disconnected.
READ_TIMEOUT_S = 30.0
# A client that is still sending when the connection closes never sees the response. Up to this much of the rest is read and
# discarded.
_DRAINED_BYTES = 16 * 2**20
_DRAINED_TIMEOUT_S = 5.0
# The Date header has seconds.
_DATE_INTERVAL_S = 1.0
_CLOSING_POLL_S = 0.005


# The key of the connection in the request's state, for `mark_authenticated` and `mark_streaming`.
_CONNECTION = "connection"


def is_loopback(host: str) -> bool:
    """True if only programs on this machine can reach a server that listens on `host`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def metrics_response(collector: "Collector", request: Request) -> Response:
    """The metrics of this collector and of this process, in the format that the scraper accepts."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"Content-Type": media_type})


def listen(host: str, port: int, remedy: str) -> socket.socket:
    """Open a listening socket before anything else is started. From then on a client waits instead of being refused.

    Raises:
        UserError: the port is in use; the message ends with `remedy`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only for sockets that name their protocol. With it, each response on a connection that
    # stays open takes 40 ms: its body is sent when the client has acknowledged its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit the option.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READ_TIMEOUT_S * 1000))
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(f"{CANNOT_LISTEN} on {host}:{port}: {error.strerror}; {remedy}") from error
    return listener


def mark_authenticated(scope: Scope) -> None:
    """Mark the request's connection as authenticated. An authenticated connection is never evicted."""
    connection = scope.get("state", {}).get(_CONNECTION)
    if connection is not None:  # None: another server runs the application
        connection.is_authenticated = True


def mark_streaming(scope: Scope) -> None:
    """Mark the response as endless. A server that shuts down does not wait for endless responses."""
    connection = scope.get("state", {}).get(_CONNECTION)
    if connection is not None:  # as above
        connection.is_streaming = True


class _Connection(H11Protocol):
    """One accepted client. Without `tls` it uses plain HTTP.

    The client is disconnected if its request takes too long to arrive. At the connection limit, the oldest unauthenticated
    client is disconnected.
    """

    _deadline: asyncio.TimerHandle | None = None
    _handshake: asyncio.Task[None] | None = None

    def __init__(self, tls: Callable[[], ssl.SSLContext] | None, **given: Any) -> None:
        super().__init__(**given)
        self._tls = tls
        self.is_authenticated = False
        self.is_streaming = False
        self._has_started = False  # the HTTP protocol
        self._accepted_at_s = self.loop.time()
        self._early_bytes = bytearray()
        self.app_state = {**self.app_state, _CONNECTION: self}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._accepted = transport
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, transport.abort)
        self.connections.add(self)
        if self._tls is None:
            self._start(transport)
        else:
            transport.pause_reading()
            self._handshake = self.loop.create_task(self._shake_hands(self._tls()))
        if len(self.connections) > MAX_CONNECTIONS:
            evictable = [
                each
                for each in self.connections
                if isinstance(each, _Connection) and not each.is_authenticated
            ]
            min(evictable, key=lambda each: each._accepted_at_s)._disconnect()

    async def _shake_hands(self, tls: ssl.SSLContext) -> None:
        # asyncio's own TLS server reports a client only after the handshake, which may never end.
        try:
            encrypted = await self.loop.start_tls(self._accepted, self, tls, server_side=True)
        except OSError:  # not TLS, or disconnected
            self._disconnect()
            return
        if encrypted is None or self._accepted.is_closing():
            self._disconnect()
            return
        self._start(encrypted)
        if self._early_bytes:
            self.data_received(bytes(self._early_bytes))

    def _start(self, transport: asyncio.Transport) -> None:
        self._has_started = True
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        self._cancel_deadline()
        if self._has_started:
            super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._has_started and not self.is_streaming:
            super().shutdown()
        else:
            self._disconnect()

    def _disconnect(self) -> None:
        # Remove the connection now, not in connection_lost: new clients need the capacity.
        self.connections.discard(self)
        self._cancel_deadline()
        self._accepted.abort()

    def data_received(self, data: bytes) -> None:
        if not self._has_started:  # received together with the end of the handshake
            self._early_bytes += data
            return
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._accepted.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, possibly in the middle of a request, instead of the application."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        super().send_400_response(msg)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class ResponseTruncated(Exception):
    """The source of a response has ended before the response. The server closes the connection, and the client tries again."""


def _is_failure(record: logging.LogRecord) -> bool:
    """False for responses that end early by design, which uvicorn logs as failures of the application.

    These are truncated responses, and requests that `HttpServer.shutdown` cancelled.
    """
    ends_early = (asyncio.CancelledError, ResponseTruncated)
    return record.exc_info is None or not isinstance(record.exc_info[1], ends_early)


class HttpServer(uvicorn.Server):
    """HTTP on this event loop, or HTTPS with the key and certificate of a file. The process handles signals itself."""

    def __init__(self, app: ASGIApp, certificate: Path | RenewableCertificate | None = None) -> None:
        """`certificate`: a file with key and certificate that never changes, or files that may be renewed; None: HTTP."""
        self._renewable = certificate if isinstance(certificate, RenewableCertificate) else None
        tls: Callable[[], ssl.SSLContext] | None = None
        if isinstance(certificate, RenewableCertificate):
            tls = partial(_context_of, certificate)
        elif certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            tls = partial(_same, context)
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(_Connection, tls),  # type: ignore[arg-type]  # uvicorn only calls it
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=2,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_failure)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = asyncio.Event()

    def end(self) -> None:
        """End the server: `serve` returns when the responses are complete, after a timeout at the latest. From any thread."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ends.set)

    async def main_loop(self) -> None:
        """Update the Date header, and renewed certificates, until `end` is called. uvicorn polls ten times a second."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            await set_within(self._ends, _DATE_INTERVAL_S)
            if self._renewable is not None:
                await self._renewable.refresh()
        self._loop = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the server as uvicorn does, without its pauses of 0.1 s, which a short search would wait for."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        state, loop = self.server_state, asyncio.get_running_loop()
        for connection in list(state.connections):
            connection.shutdown()
        deadline_s = loop.time() + (self.config.timeout_graceful_shutdown or 0)
        while (state.connections or state.tasks) and loop.time() < deadline_s:
            await asyncio.sleep(_CLOSING_POLL_S)
        for task in state.tasks:
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers unchanged."""
        yield


def _context_of(certificate: RenewableCertificate) -> ssl.SSLContext:
    return certificate.current.context


def _same(context: ssl.SSLContext) -> ssl.SSLContext:
    return context


class LingeringCloseMiddleware:
    """Sends the response while the client still sends, discards the rest for a limited time, and closes the connection.

    Without this middleware the server would read the whole request body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name for name, _ in scope["headers"]}
        was_read = names.isdisjoint({b"content-length", b"transfer-encoding"})
        # A client that waits for `100 Continue` sends no body before that response.
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
                await asyncio.wait_for(drain(), _DRAINED_TIMEOUT_S)
            await send({"type": "http.response.body", "body": b""})

        async def drain() -> None:
            size = 0
            while not was_read and size < _DRAINED_BYTES:
                size += len((await noticing()).get("body", b""))

        await self._app(scope, noticing, sending)
