"""KeeperService: carries messages between a keeper's stream and its session."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Protocol

import grpc
import grpc.aio

from nni_manager.domain.receiving import StreamBroken
from nni_manager.domain.refusals import JobUnknown, ProtocolBroken, TokenWrong, VersionRefused
from nni_manager.errors import CANNOT_LISTEN, UserMistake
from nni_manager.store.certificate import Certificate
from trial_keeper.wire.convert import MessageInvalid, keeper_messages_from_pb, manager_messages_to_pb
from trial_keeper.wire.messages import Chunk, Hello, KeeperMessage, ManagerMessage, Stream
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY
from trial_keeper.wire.v1 import keeper_pb2 as pb
from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceServicer, add_KeeperServiceServicer_to_server

log = logging.getLogger(__name__)

# The one place where our errors become gRPC's. ABORTED is worth another try, the others are not.
STATUS_OF: dict[type[Exception], grpc.StatusCode] = {
    TokenWrong: grpc.StatusCode.UNAUTHENTICATED,
    VersionRefused: grpc.StatusCode.FAILED_PRECONDITION,
    JobUnknown: grpc.StatusCode.NOT_FOUND,
    ProtocolBroken: grpc.StatusCode.INVALID_ARGUMENT,
    MessageInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    StreamBroken: grpc.StatusCode.ABORTED,
}
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

    def admit(self, hello: Hello, job_id: str, token: str) -> Session:
        """A session for this keeper, or one of the errors in STATUS_OF."""


class KeeperServicer(KeeperServiceServicer):
    """One call per keeper."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def Connect(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self,
        request_iterator: AsyncIterator[pb.ConnectRequest],
        context: "grpc.aio.ServicerContext[pb.ConnectRequest, pb.ConnectResponse]",
    ) -> None:
        """Carry messages both ways until either side ends the stream."""
        try:
            admitted = await self._admit(request_iterator, context)
            if admitted is None:
                return
            session, said_with_hello = admitted
            both: list[asyncio.Future[None]] = []
            try:
                for message in said_with_hello:
                    session.receive(message)
                both += [
                    asyncio.ensure_future(_send(session, context)),
                    asyncio.ensure_future(_receive(session, request_iterator)),
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
        except tuple(STATUS_OF) as error:
            log.warning("a keeper is turned away: %s", error)
            await context.abort(STATUS_OF[type(error)], str(error))

    async def _admit(
        self,
        requests: AsyncIterator[pb.ConnectRequest],
        context: "grpc.aio.ServicerContext[pb.ConnectRequest, pb.ConnectResponse]",
    ) -> tuple[Session, list[KeeperMessage]] | None:
        metadata = dict(context.invocation_metadata() or ())
        async for request in requests:
            hello, *others = keeper_messages_from_pb(request)
            if not isinstance(hello, Hello):
                raise ProtocolBroken(
                    "cannot take a message before Hello; use the keeper that comes with the manager"
                )
            token = str(metadata.get(TOKEN_KEY, ""))
            return self._gate.admit(hello, str(metadata.get(JOB_KEY, "")), token), others
        return None


async def _send(
    session: Session, context: "grpc.aio.ServicerContext[pb.ConnectRequest, pb.ConnectResponse]"
) -> None:
    while (message := await session.outgoing.get()) is not None:
        messages, is_last = [message], False
        while not session.outgoing.empty() and not is_last:
            following = session.outgoing.get_nowait()
            is_last = following is None
            if following is not None:
                messages.append(following)
        await context.write(manager_messages_to_pb(messages))
        if is_last:
            return


async def _receive(session: Session, requests: AsyncIterator[pb.ConnectRequest]) -> None:
    async for request in requests:
        for message in keeper_messages_from_pb(request):
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


class KeeperServer:
    """The listening gRPC server."""

    def __init__(self, gate: Gate) -> None:
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        add_KeeperServiceServicer_to_server(KeeperServicer(gate), self._server)

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
