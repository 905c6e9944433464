"""KeeperService: passes messages between a keeper's gRPC stream and its session.

Any peer that reaches the port may connect, so nothing is stored for unauthenticated peers. The token of a stream is checked
before any message is read. Messages are decoded here, not by gRPC, so that invalid bytes get the same answer as any other error.
An error of a stream ends that stream only, with one of the statuses in `STATUS_OF`.
"""

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import replace
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from nni_manager.domain import admission_errors
from nni_manager.domain.ingest import OffsetGap
from nni_manager.errors import CANNOT_LISTEN, UserError
from nni_manager.grpc_server.connections import Connections, counted
from nni_manager.store.certificate import Certificate
from nni_manager.store.errors import StoreBusy
from trial_keeper.wire import convert
from trial_keeper.wire.messages import Chunk, Hello, KeeperMessage, ManagerMessage, Stream
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# The only mapping from our errors to gRPC statuses. ABORTED, DEADLINE_EXCEEDED and RESOURCE_EXHAUSTED may be retried, the others
# may not. gRPC itself answers RESOURCE_EXHAUSTED to messages and metadata that are too large, and UNIMPLEMENTED to calls of
# other methods.
STATUS_OF: dict[type[Exception], grpc.StatusCode] = {
    admission_errors.InvalidToken: grpc.StatusCode.UNAUTHENTICATED,
    admission_errors.VersionRefused: grpc.StatusCode.FAILED_PRECONDITION,
    admission_errors.UnknownJob: grpc.StatusCode.NOT_FOUND,
    admission_errors.ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    convert.MessageInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    OffsetGap: grpc.StatusCode.ABORTED,
    admission_errors.NotAccepting: grpc.StatusCode.ABORTED,
    StoreBusy: grpc.StatusCode.ABORTED,
    admission_errors.KeeperTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    admission_errors.TooManyStreams: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
# A keeper sends Hello together with its call. If its machine stalls for longer, the keeper reconnects.
HELLO_TIMEOUT_S = 20.0
# A keeper reads messages at once. Otherwise gRPC buffers 64 KiB, and further writes wait. A machine that swaps may need a minute.
TAKEN_TIMEOUT_S = 60.0
# Twelve times the number of keepers in load tests. Far fewer unauthenticated connections are kept, see `connections`. A flood of
# 7,000 connections a second needs over a second, four poll intervals, to reach this limit.
MAX_CONNECTIONS = 12_288
# Descriptors for other files: the database, logs, the pipes of jobs on this machine, connections of the HTTP API.
_OTHER_FILES = 256
# The maximum batch size: messages queued during one write are sent together in the next.
_MAX_BATCH = 1024
# The burst and the rate of logged refusals: a peer that connects again and again must not fill the disk.
_REFUSALS_LOGGED_AT_ONCE = 50
_REFUSALS_LOGGED_PER_S = 1.0
# With round trips of 10 ms this allows 25 MB/s from each keeper, more than can be stored.
READ_AHEAD_BYTES = 256 * 1024
# Metrics are ingested in pieces of this size, about 3 ms of work, so that other trials never wait for a whole chunk.
METRICS_AT_ONCE_BYTES = 64 * 1024
_SERVER_OPTIONS = [
    # Detects within 30 s a keeper that ended without closing its connection.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Longer than a keeper waits for the manager's answers, so that the keeper reconnects first.
    ("grpc.http2.ping_timeout_ms", 20_000),
    # Keepers ping every 10 s, even without messages.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two managers on one port must not share its keepers
    # Bounds the buffer of unread data. By default gRPC grows the buffer with the bandwidth, to 18 MB for each stream on loopback:
    # with the maximum number of keepers, these buffers would use all memory.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", READ_AHEAD_BYTES),
    # Four times what a keeper puts into one message: a chunk, and the ends of many trials.
    ("grpc.max_receive_message_length", 1024 * 1024),
    # A job id, its token, and gRPC's own metadata are below 1 KiB.
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 8 * 1024),
    # A keeper has one stream on its connection.
    ("grpc.max_concurrent_streams", 100),
    # Keepers always send the HTTP/2 handshake and open a stream; other connections are closed.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.http2.settings_timeout", 20_000),
    ("grpc.max_connection_idle_ms", 30_000),
]


class AdmittedStream(Protocol):
    """The engine's session of an open stream."""

    @property
    def outgoing(self) -> "asyncio.Queue[ManagerMessage | None]":
        """The messages to send; None ends the stream."""

    async def ready(self) -> None:
        """Apply backpressure: wait until a message may be received. Meanwhile the keeper's bytes stay in its files."""

    def receive(self, message: KeeperMessage) -> None:
        """Handle a message."""

    def closed(self) -> None:
        """Release the session: its stream has ended."""


class StreamAdmission(Protocol):
    """Decides which keepers are admitted."""

    @property
    def most_streams_of_job(self) -> int:
        """The maximum number of open streams of one job."""

    def check_token(self, job_id: str, token: str) -> None:
        """Raise InvalidToken unless the token belongs to the job."""

    def admit(self, hello: Hello, job_id: str, token: str) -> AdmittedStream:
        """Admit a keeper and return its session, or raise one of the errors in STATUS_OF."""


Context = grpc.aio.ServicerContext[bytes, bytes]


class KeeperServicer:
    """Serves one bidirectional call per keeper."""

    def __init__(self, gate: StreamAdmission, connections: Connections) -> None:
        self._gate = gate
        self._connections = connections
        self._streams_of_job: Counter[str] = Counter()
        self._refusals = _LogBudget(_REFUSALS_LOGGED_AT_ONCE, _REFUSALS_LOGGED_PER_S)

    async def connect(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Pass messages in both directions until either side ends the stream."""
        try:
            await self._exchange(requests, context)
        except tuple(STATUS_OF) as error:
            if self._refusals.has_capacity(time.monotonic()):
                log.warning("refused a keeper: %s", error)
            await context.abort(STATUS_OF[type(error)], str(error))
        except Exception:
            # Otherwise gRPC would show the exception to the peer, or leave the peer waiting.
            log.exception("internal error; the stream of a keeper is closed")
            await context.abort(
                grpc.StatusCode.INTERNAL,
                "cannot continue this stream: internal error; see the manager's log",
            )

    async def _exchange(self, requests: AsyncIterator[bytes], context: Context) -> None:
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        job_id, token = metadata.get(JOB_KEY, ""), metadata.get(TOKEN_KEY, "")
        self._gate.check_token(job_id, token)
        if self._streams_of_job[job_id] >= self._gate.most_streams_of_job:
            raise admission_errors.TooManyStreams()
        with counted(self._streams_of_job, job_id), self._connections.authenticated(context.peer()):
            first = await _within(HELLO_TIMEOUT_S, anext(requests, None))
            if first is not None:
                await self._serve(first, job_id, token, requests, context)

    async def _serve(
        self, first: bytes, job_id: str, token: str, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        hello, *further_messages = convert.keeper_messages_from_bytes(first)
        if not isinstance(hello, Hello):
            raise admission_errors.ProtocolError(
                "cannot accept a message before Hello; use the keeper of the manager's version"
            )
        session = self._gate.admit(hello, job_id, token)
        both: list[asyncio.Future[None]] = []
        try:
            # Sent before the first answer: gRPC cannot end a stream with a status while that write is in progress.
            await context.send_initial_metadata(())
            for message in further_messages:
                session.receive(message)
            both += [
                asyncio.ensure_future(_send(session, context)),
                asyncio.ensure_future(_receive(session, requests)),
            ]
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            # This also runs when gRPC cancels the call because the keeper has disconnected.
            session.closed()
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)


async def _within(seconds: float, step: Awaitable[_T]) -> _T:
    """Await a gRPC operation with a timeout and return its result.

    Not `asyncio.wait_for`: before Python 3.12 it loses a cancellation that coincides with the end of the operation.

    Raises:
        KeeperTimeout: the timeout has expired; the operation continues until its stream has ended.
    """
    task = asyncio.ensure_future(step)
    task.add_done_callback(
        lambda over: over.cancelled() or over.exception()
    )  # marks the exception as retrieved, even without a waiter
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        raise admission_errors.KeeperTimeout()
    return task.result()


async def _send(session: AdmittedStream, context: Context) -> None:
    while (message := await session.outgoing.get()) is not None:
        messages, is_last = [message], False
        while not session.outgoing.empty() and not is_last and len(messages) < _MAX_BATCH:
            following = session.outgoing.get_nowait()
            is_last = following is None
            if following is not None:
                messages.append(following)
        await _within(TAKEN_TIMEOUT_S, context.write(convert.manager_messages_to_bytes(messages)))
        if is_last:
            return


async def _receive(session: AdmittedStream, requests: AsyncIterator[bytes]) -> None:
    async for request in requests:
        for message in convert.keeper_messages_from_bytes(request):
            for piece in _pieces(message):
                await session.ready()
                session.receive(piece)
                if piece is not message:
                    await asyncio.sleep(0)  # let other streams run


def _pieces(message: KeeperMessage) -> Iterable[KeeperMessage]:
    """The message itself, or smaller chunks that replace it."""
    if (
        not isinstance(message, Chunk)
        or message.stream is not Stream.METRICS
        or len(message.data) <= METRICS_AT_ONCE_BYTES
    ):
        return (message,)
    return (
        replace(
            message, offset=message.offset + start, data=message.data[start : start + METRICS_AT_ONCE_BYTES]
        )
        for start in range(0, len(message.data), METRICS_AT_ONCE_BYTES)
    )


class _LogBudget:
    """Limits the rate of log lines that unauthenticated peers can cause (token bucket)."""

    def __init__(self, at_once: float, per_s: float) -> None:
        self._at_once = self._left = at_once
        self._per_s = per_s
        self._seen_at_s = 0.0

    def has_capacity(self, now_s: float) -> bool:
        """True if one more line may be written; counts that line."""
        self._left = min(self._at_once, self._left + (now_s - self._seen_at_s) * self._per_s)
        self._seen_at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


def most_connections() -> int:
    """The maximum number of connections that leaves enough file descriptors for other files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(limit // 2, limit - _OTHER_FILES))


class KeeperServer:
    """The listening gRPC server."""

    def __init__(self, gate: StreamAdmission) -> None:
        most = most_connections()
        options = [*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most)]
        self._connections = Connections(most)
        self._server = grpc.aio.server(options=options)
        # No deserializer: that of gRPC would answer invalid bytes with a traceback.
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            KeeperServicer(gate, self._connections).connect
        )
        service = convert.CONNECT_METHOD.containing_service.full_name
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {convert.CONNECT_METHOD.name: handler}),)
        )

    async def start(self, host: str, port: int, certificate: Certificate | None = None) -> None:
        """Start to listen; with a certificate only TLS is accepted.

        Raises:
            UserError: the server cannot listen there.
        """
        try:
            if certificate is None:
                self._server.add_insecure_port(f"{host}:{port}")
            else:
                pair = (certificate.key_pem, certificate.certificate_pem.encode())
                self._server.add_secure_port(f"{host}:{port}", grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise UserError(
                f"{CANNOT_LISTEN} for keepers on {host}:{port}: {error}; choose another pair of ports with --port N"
            ) from error
        await self._server.start()
        self._connections.start(port)

    async def stop(self) -> None:
        """End all streams; keepers search for a manager again."""
        await self._connections.stop()
        await self._server.stop(grace=0.5)
