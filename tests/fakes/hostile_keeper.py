"""Hostile peers of a manager: calls with arbitrary bytes, and sockets with invalid HTTP/2."""

import socket
import struct
from collections.abc import Iterable, Iterator

import grpc
from attempts import attempt_id
from deadlines import DEADLINE_S
from real_experiment import RealExperiment

from nni_manager.engine.tokens import token_of
from nni_manager.store.reader import StoreReader
from trial_keeper import __version__
from trial_keeper.wire.convert import CONNECT_METHOD, keeper_messages_to_pb
from trial_keeper.wire.messages import AttemptKey, Hello, KeeperMessage
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY

SERVICE = CONNECT_METHOD.containing_service.full_name
METHOD = f"/{SERVICE}/{CONNECT_METHOD.name}"
# The manager may end a call only with one of these statuses, which the protocol and the manager's docstrings document.
DOCUMENTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4


def words(*messages: KeeperMessage) -> bytes:
    """A batch of keeper messages as bytes on the network."""
    return keeper_messages_to_pb(messages).SerializeToString()


class HostileKeeper:
    """A client that has the token of one job and can send any bytes. It claims to be a task that the job does not have."""

    def __init__(self, experiment: RealExperiment, job_id: str, task: str = "hostile-0") -> None:
        self.address = f"127.0.0.1:{experiment.port + 1}"
        self.job_id = job_id
        self.key = AttemptKey(job_id, attempt_id(0), task)
        self.hello = Hello(__version__, experiment.folder.experiment_id, job_id, task)
        with StoreReader(experiment.folder.database) as reader:
            self.token = token_of(reader.experiment().secret, job_id)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of an honest keeper."""
        return ((JOB_KEY, self.job_id), (TOKEN_KEY, self.token))

    def channel(self) -> grpc.Channel:
        """A separate connection without a limit on outgoing messages."""
        unbounded = 128 << 20
        return grpc.insecure_channel(
            self.address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", unbounded),
                ("grpc.absolute_max_metadata_size", unbounded),
            ],
        )

    def open(
        self,
        channel: grpc.Channel,
        requests: Iterable[bytes],
        metadata: Iterable[tuple[str, str]] | None = None,
        method: str = METHOD,
        timeout_s: float = DEADLINE_S,
    ) -> Iterator[bytes]:
        """A call that sends these requests; returns the responses, which may stay unread."""
        call = channel.stream_stream(
            method, request_serializer=lambda content: content, response_deserializer=lambda content: content
        )
        metadata = self.metadata if metadata is None else tuple(metadata)
        answers: Iterator[bytes] = call(iter(requests), metadata=metadata, timeout=timeout_s)
        return answers

    def answer(
        self,
        *requests: bytes,
        metadata: Iterable[tuple[str, str]] | None = None,
        method: str = METHOD,
    ) -> tuple[grpc.StatusCode, str]:
        """The status and details of a call that sends these requests and reads all responses."""
        with self.channel() as channel:
            try:
                for _ in self.open(channel, requests, metadata, method):
                    pass
            except grpc.RpcError as error:
                return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame. Source: RFC 9113, section 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """A header without indexing. Source: RFC 7541, section 6.2.2; lengths below 127."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_headers(*more: bytes) -> bytes:
    """The headers of a keeper's call, without a token."""
    return b"".join(
        [
            header(b":method", b"POST"),
            header(b":scheme", b"http"),
            header(b":path", METHOD.encode()),
            header(b":authority", b"manager"),
            header(b"te", b"trailers"),
            header(b"content-type", b"application/grpc"),
            *more,
        ]
    )


OPENING = PREFACE + frame(SETTINGS, 0, 0)


def connected(address: str, said: bytes = b"") -> socket.socket:
    """Open a connection and send these bytes; return the open connection."""
    host, port = address.rsplit(":", 1)
    peer = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    if said:
        peer.sendall(said)
    return peer


def is_let_go(peer: socket.socket, within_s: float = 30.0) -> bool:
    """True if the peer closes the connection in time. Data that arrives before the close is ignored."""
    peer.settimeout(within_s)
    try:
        while peer.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True
