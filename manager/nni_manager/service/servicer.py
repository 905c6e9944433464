"""KeeperService: carries messages between a keeper's stream and its session.

Anybody who reaches the port may connect, so nothing is held for a stranger. A stream's token is looked at before anything on it
is read; bytes are made messages here, not by gRPC, so that those that are none get the same answer as any other mistake; and
whatever a stream makes go wrong ends that stream alone, with one of the statuses of `STATUS_OF`.
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

from nni_manager.domain.receiving import StreamBroken
from nni_manager.domain.refusals import (
    JobUnknown,
    KeeperSilent,
    NotOpen,
    ProtocolBroken,
    TokenWrong,
    TooManyStreams,
    VersionRefused,
)
from nni_manager.errors import CANNOT_LISTEN, UserMistake
from nni_manager.store.certificate import Certificate
from nni_manager.store.store import StoreBusy
from trial_keeper.wire.convert import (
    CONNECT_METHOD,
    MessageInvalid,
    keeper_messages_from_bytes,
    manager_messages_to_bytes,
)
from trial_keeper.wire.messages import Chunk, Hello, KeeperMessage, ManagerMessage, Stream
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# The one place where our errors become gRPC's. ABORTED, DEADLINE_EXCEEDED and RESOURCE_EXHAUSTED are worth another try, the
# others are not. gRPC itself answers RESOURCE_EXHAUSTED to messages and metadata that are too large, and UNIMPLEMENTED to
# calls of something else.
STATUS_OF: dict[type[Exception], grpc.StatusCode] = {
    TokenWrong: grpc.StatusCode.UNAUTHENTICATED,
    VersionRefused: grpc.StatusCode.FAILED_PRECONDITION,
    JobUnknown: grpc.StatusCode.NOT_FOUND,
    ProtocolBroken: grpc.StatusCode.INVALID_ARGUMENT,
    MessageInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    StreamBroken: grpc.StatusCode.ABORTED,
    NotOpen: grpc.StatusCode.ABORTED,
    StoreBusy: grpc.StatusCode.ABORTED,
    KeeperSilent: grpc.StatusCode.DEADLINE_EXCEEDED,
    TooManyStreams: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
# A keeper says Hello together with its call. A machine that stands still for longer connects again.
HELLO_WITHIN_S = 20.0
# A keeper takes what it is told at once. gRPC holds 64 KiB for one that does not, and then writing waits; a minute is what a
# machine may need that swaps.
TAKEN_WITHIN_S = 60.0
# Four times the keepers that a manager is measured with; 22 kB each when they are nobody's.
MOST_CONNECTIONS = 4096
# The files that are not connections: the database, logs, the pipes of jobs on this machine, callers of the HTTP API.
_OTHER_FILES = 256
# What came while the last answer was written goes out with the next, up to what a keeper takes in one breath.
_MOST_TOLD_AT_ONCE = 1024
# Refusals that are logged at once, and how many more each second: a stranger who knocks without end must not fill the disk.
_REFUSALS_LOGGED_AT_ONCE = 50
_REFUSALS_LOGGED_PER_S = 1.0
# At 10 ms per round trip 25 MB/s of each keeper, which is more than can be stored of one.
READ_AHEAD_BYTES = 256 * 1024
# Metrics are taken in pieces of this size, about 3 ms of work, so that a report of another trial never waits for a whole chunk.
METRICS_AT_ONCE_BYTES = 64 * 1024
_SERVER_OPTIONS = [
    # A keeper that is gone without a word is noticed within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Longer than a keeper waits for the manager's answers: it is the keeper that connects again.
    ("grpc.http2.ping_timeout_ms", 20_000),
    # Keepers ping every 10 s, also when they have nothing to say.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two managers on one port must not share its keepers
    # What is received of a stream while nobody reads it. gRPC would otherwise let it grow with the speed of the link, to 18 MB of
    # each stream on this machine: with as many keepers as there may be, all of the memory.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", READ_AHEAD_BYTES),
    # Four times what a keeper puts into one message: its chunk, and the last words of many trials.
    ("grpc.max_receive_message_length", 1024 * 1024),
    # A job's id, its token, and what gRPC adds are below 1 KiB.
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 8 * 1024),
    # A keeper has one stream on its connection.
    ("grpc.max_concurrent_streams", 100),
    # A connection that says nothing of HTTP/2, and one without a stream: neither is a keeper's.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.http2.settings_timeout", 20_000),
    ("grpc.max_connection_idle_ms", 30_000),
]


class Session(Protocol):
    """What the engine keeps for an open stream."""

    @property
    def outgoing(self) -> "asyncio.Queue[ManagerMessage | None]":
        """What to send; None ends the stream."""

    async def ready(self) -> None:
        """Wait until a message may be taken. Meanwhile nothing is read from the stream, and its keeper's bytes stay in files."""

    def receive(self, message: KeeperMessage) -> None:
        """Take a message."""

    def closed(self) -> None:
        """The stream is gone."""


class Gate(Protocol):
    """Who lets keepers in."""

    @property
    def most_streams_of_job(self) -> int:
        """How many streams may be open for one job."""

    def check_token(self, job_id: str, token: str) -> None:
        """Nothing, or TokenWrong."""

    def admit(self, hello: Hello, job_id: str, token: str) -> Session:
        """A session for this keeper, or one of the errors in STATUS_OF."""


Context = grpc.aio.ServicerContext[bytes, bytes]


class KeeperServicer:
    """One call per keeper."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._streams_of_job: Counter[str] = Counter()
        self._refusals = _LogBudget(_REFUSALS_LOGGED_AT_ONCE, _REFUSALS_LOGGED_PER_S)

    async def connect(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Carry messages both ways until either side ends the stream."""
        try:
            await self._talk(requests, context)
        except tuple(STATUS_OF) as error:
            if self._refusals.has_room(time.monotonic()):
                log.warning("a keeper is turned away: %s", error)
            await context.abort(STATUS_OF[type(error)], str(error))
        except Exception:
            # gRPC would show the peer what was raised, or leave it waiting.
            log.exception("a bug ends the stream of a keeper")
            await context.abort(
                grpc.StatusCode.INTERNAL,
                "cannot go on with this stream: the manager has a bug; its log says more",
            )

    async def _talk(self, requests: AsyncIterator[bytes], context: Context) -> None:
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        job_id, token = metadata.get(JOB_KEY, ""), metadata.get(TOKEN_KEY, "")
        self._gate.check_token(job_id, token)
        if self._streams_of_job[job_id] >= self._gate.most_streams_of_job:
            raise TooManyStreams()
        self._streams_of_job[job_id] += 1
        try:
            first = await _within(HELLO_WITHIN_S, anext(requests, None))
            if first is not None:
                await self._serve(first, job_id, token, requests, context)
        finally:
            self._streams_of_job[job_id] -= 1
            if not self._streams_of_job[job_id]:
                del self._streams_of_job[job_id]

    async def _serve(
        self, first: bytes, job_id: str, token: str, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        hello, *said_with_it = keeper_messages_from_bytes(first)
        if not isinstance(hello, Hello):
            raise ProtocolBroken(
                "cannot take a message before Hello; use the keeper that comes with the manager"
            )
        session = self._gate.admit(hello, job_id, token)
        both: list[asyncio.Future[None]] = []
        try:
            # Not with the first answer: gRPC could not end a stream with a status while that is on its way.
            await context.send_initial_metadata(())
            for message in said_with_it:
                session.receive(message)
            both += [
                asyncio.ensure_future(_send(session, context)),
                asyncio.ensure_future(_receive(session, requests)),
            ]
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            # Also when gRPC cancels this call because the keeper is gone.
            session.closed()
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)


async def _within(seconds: float, step: Awaitable[_T]) -> _T:
    """What a step of gRPC gives.

    Not `asyncio.wait_for`: before Python 3.12 it forgets that it was cancelled when the step ends at that moment.

    Raises:
        KeeperSilent: it takes longer; the step goes on until its stream has ended.
    """
    task = asyncio.ensure_future(step)
    task.add_done_callback(
        lambda over: over.cancelled() or over.exception()
    )  # heard, also when nobody waits any more
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        raise KeeperSilent()
    return task.result()


async def _send(session: Session, context: Context) -> None:
    while (message := await session.outgoing.get()) is not None:
        messages, is_last = [message], False
        while not session.outgoing.empty() and not is_last and len(messages) < _MOST_TOLD_AT_ONCE:
            following = session.outgoing.get_nowait()
            is_last = following is None
            if following is not None:
                messages.append(following)
        await _within(TAKEN_WITHIN_S, context.write(manager_messages_to_bytes(messages)))
        if is_last:
            return


async def _receive(session: Session, requests: AsyncIterator[bytes]) -> None:
    async for request in requests:
        for message in keeper_messages_from_bytes(request):
            for piece in _pieces(message):
                await session.ready()
                session.receive(piece)
                if piece is not message:
                    await asyncio.sleep(0)  # the others' turn


def _pieces(message: KeeperMessage) -> Iterable[KeeperMessage]:
    """The message, or what to take one after another instead of it."""
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
    """How much may be logged of what strangers can bring about as often as they like."""

    def __init__(self, at_once: float, per_s: float) -> None:
        self._at_once = self._left = at_once
        self._per_s = per_s
        self._seen_at_s = 0.0

    def has_room(self, now_s: float) -> bool:
        """Whether one more line may be written; it counts then."""
        self._left = min(self._at_once, self._left + (now_s - self._seen_at_s) * self._per_s)
        self._seen_at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


def most_connections() -> int:
    """How many connections this process takes: so many that files are left for all the rest."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(limit // 2, limit - _OTHER_FILES))


class KeeperServer:
    """The listening gRPC server."""

    def __init__(self, gate: Gate) -> None:
        options = [*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most_connections())]
        self._server = grpc.aio.server(options=options)
        # Without gRPC's own conversion: what it cannot read it would answer with a traceback.
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            KeeperServicer(gate).connect
        )
        service = CONNECT_METHOD.containing_service.full_name
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {CONNECT_METHOD.name: handler}),)
        )

    async def start(self, host: str, port: int, certificate: Certificate | None = None) -> None:
        """Listen; with a certificate for TLS only.

        Raises:
            UserMistake: it cannot.
        """
        try:
            if certificate is None:
                self._server.add_insecure_port(f"{host}:{port}")
            else:
                pair = (certificate.key_pem, certificate.certificate_pem.encode())
                self._server.add_secure_port(f"{host}:{port}", grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise UserMistake(
                f"{CANNOT_LISTEN} for keepers on {host}:{port}: {error}; choose another pair of ports with --port N"
            ) from error
        await self._server.start()

    async def stop(self) -> None:
        """End all streams; keepers look for a manager again."""
        await self._server.stop(grace=0.5)
