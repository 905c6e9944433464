"""The gRPC stream to the manager: transports messages, independent of trials.

If manager.json names a certificate, the stream is encrypted and connects only to the owner of that certificate.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from trial_keeper.core.events import Event, LinkLost, LinkOpened, LinkRefused
from trial_keeper.host.trust import TLS_OPTIONS, channel_credentials, verify_certificate
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.convert import MessageInvalid, keeper_messages_to_pb, manager_messages_from_pb
from trial_keeper.wire.listener_uid import UntrustedListener, host_and_port, verify_listener_uid
from trial_keeper.wire.messages import Chunk, Hello, KeeperMessage, Stream, TrialRevoked, Usage, Welcome
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.v1 import keeper_pb2 as pb
from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceStub
from trial_keeper.wire.workspace import ManagerDocument, Workspace

_Result = TypeVar("_Result")
# gRPC's own timeout for an unresponsive address is 20 s.
CONNECT_TIMEOUT_S = 10.0
CHANNEL_OPTIONS = [
    # Detects a dead peer within 20 s. The ping timeout is also needed: if a middlebox still accepts the bytes, gRPC waits over
    # a minute for a ping's answer. Ten seconds, because a ping queues behind a window of data, also on a link of 2 Mbit/s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # One stream per channel, so a shared global pool has no use.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
# While a trial runs. 1 MB of logs costs keeper and manager 20 ms of CPU. If both share two cores, sending all that a trial can
# write (1 GB/s) would halve its rate; this rate costs it nothing. It is 60,000 lines a second, more than anyone reads.
# Source: tests/benchmarks/bench_stdout.py.
LOG_BYTES_PER_S = 5e6
# Few large bursts need half the CPU of many small ones, and a log of moderate rate is never throttled.
LOG_BURST_BYTES = 512 * 1024
# Statuses that a retry with the same manager cannot fix.
_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)


# One message of the stream: a single chunk, and well below a server's limit. The manager holds one of each keeper while its disk
# hangs, so with 1,000 keepers larger ones would be most of its memory.
MESSAGES_AT_ONCE = 64
BYTES_AT_ONCE = 256 * 1024
# Messages are coalesced for this long, from one message of the stream to the next, while the queue is deep. Otherwise each very
# short trial would cost keeper and manager several stream messages.
COALESCE_S = 0.03
# Of metrics: a writer of this much in a moment has more, and is limited by its window.
_MUCH_BYTES = 16 * 1024


def _is_urgent(message: KeeperMessage) -> bool:
    """True if the message, which is no log, flushes the coalesced ones: it is large, or another job is idle."""
    return isinstance(message, TrialRevoked) or _size_of(message) >= _MUCH_BYTES


def _size_of(message: KeeperMessage) -> int:
    return len(message.data) if isinstance(message, Chunk) else 0


class _SendQueue:
    """Send queue of one stream, in two lanes: messages and metrics, then logs. Order inside a lane is kept.

    So the end of an attempt may overtake its last log chunks; the manager waits for the sizes in it. The log lane has a rate
    limit while logs are paced: after a burst of `LOG_BURST_BYTES` it pauses until the average is down to `LOG_BYTES_PER_S`.

    While coalescing is allowed, messages of the stream are at least `COALESCE_S` apart, and each takes everything queued,
    logs last. A message after a longer pause is not delayed, and neither is a large amount or an urgent message.
    """

    def __init__(self, logs_are_paced: Callable[[], bool]) -> None:
        self._logs_are_paced = logs_are_paced
        self._urgent: deque[KeeperMessage] = deque()
        self._logs: deque[Chunk] = deque()
        self._wakeup = asyncio.Event()
        self._may_gather = False
        self._flush = asyncio.Event()
        self._pressing = 0
        """Number of messages in the urgent lane that must be sent at once."""
        self._taken_at_s = -math.inf
        self._burst_began_s = 0.0
        self._burst_bytes = 0

    def put(self, message: KeeperMessage) -> None:
        """Queue a message. The replication windows bound the queue.

        All other messages occur once per link or attempt. Of an attempt's usage only the newest is kept, so a manager that reads
        nothing for a day causes no growth.
        """
        if isinstance(message, Usage):
            self._urgent = deque(
                other for other in self._urgent if not (isinstance(other, Usage) and other.key == message.key)
            )
        if isinstance(message, Chunk) and message.stream is not Stream.METRICS:
            self._logs.append(message)
        else:
            self._urgent.append(message)
            self._pressing += _is_urgent(message)
        self._wakeup.set()
        if not self._may_wait:
            self._flush.set()

    def gather(self, *, may_gather: bool) -> None:
        """Allow or forbid delaying messages to coalesce them, from now on."""
        self._may_gather = may_gather
        if not self._may_wait:
            self._flush.set()

    @property
    def _may_wait(self) -> bool:
        is_much = len(self._urgent) + len(self._logs) >= MESSAGES_AT_ONCE
        return self._may_gather and not self._pressing and not is_much

    def begin_burst(self) -> None:
        """Restart the log rate limit after it was switched on or off: earlier bytes do not count."""
        self._burst_began_s, self._burst_bytes = time.monotonic(), 0
        self._wakeup.set()

    async def take(self) -> KeeperMessage:
        """Wait for the next message and return it. Cancellation loses nothing."""
        while self._next() is None:
            self._wakeup.clear()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), self._rest_s() if self._logs else None)
        await self._gathered()
        self._taken_at_s = time.monotonic()
        return self._pop()

    async def _gathered(self) -> None:
        """Return once the next message of the stream may be sent."""
        left_s = self._taken_at_s + COALESCE_S - time.monotonic()
        if self._may_wait and left_s > 0:
            self._flush.clear()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._flush.wait(), left_s)

    def take_more(self, taken_bytes: int) -> list[KeeperMessage]:
        """Return what fits into one stream message beside `taken_bytes`: other urgent messages, and logs while coalescing."""
        more: list[KeeperMessage] = []
        while (self._urgent or self._may_gather) and 1 + len(more) < MESSAGES_AT_ONCE:
            if (following := self._next()) is None:
                break
            taken_bytes += _size_of(following)
            if taken_bytes > BYTES_AT_ONCE:
                break
            more.append(self._pop())
        return more

    def _next(self) -> KeeperMessage | None:
        if self._urgent:
            return self._urgent[0]
        return self._logs[0] if self._logs and self._rest_s() <= 0 else None

    def _pop(self) -> KeeperMessage:
        if not self._urgent:
            return self._take_log()
        message = self._urgent.popleft()
        self._pressing -= _is_urgent(message)
        return message

    def _rest_s(self) -> float:
        if self._burst_bytes < LOG_BURST_BYTES or not self._logs_are_paced():
            return 0.0
        return self._burst_began_s + self._burst_bytes / LOG_BYTES_PER_S - time.monotonic()

    def _take_log(self) -> Chunk:
        now_s = time.monotonic()
        if now_s >= self._burst_began_s + self._burst_bytes / LOG_BYTES_PER_S:
            self._burst_began_s, self._burst_bytes = now_s, 0
        chunk = self._logs.popleft()
        self._burst_bytes += len(chunk.data)
        return chunk


class ManagerLink:
    """One stream at a time. Everything that happens on it is posted as an event, in order."""

    def __init__(self, workspace: Workspace, settings: KeeperSettings, post: Callable[[Event], None]) -> None:
        self._workspace = workspace
        self._settings = settings
        self._post = post
        self._logs_are_paced = False
        self._outgoing = self._new_outgoing()
        self._task: asyncio.Task[None] | None = None
        self._tries = 0

    def limit_log_rate(self, *, are_paced: bool) -> None:
        """Switch the rate limit of logs: on while a trial runs, as sending them costs it CPU; off for full speed."""
        self._logs_are_paced = are_paced
        self._outgoing.begin_burst()

    def gather(self, *, may_gather: bool) -> None:
        """Allow delaying messages to coalesce them, from now on, if the manager waits for none of them."""
        self._outgoing.gather(may_gather=may_gather)

    def open(self, hello: Hello) -> None:
        """Connect in the background; cancels a connection attempt in progress."""
        if self._task is not None:
            self._task.cancel()
        # A stream keeps its original queue: one that is closing must neither take its successor's messages nor post events.
        self._outgoing = self._new_outgoing()
        self._outgoing.put(hello)
        self._task = asyncio.get_running_loop().create_task(self._run(self._outgoing))

    def send(self, message: KeeperMessage) -> None:
        """Queue a message: behind others of its kind, and logs behind all others."""
        self._outgoing.put(message)

    def drop(self, cause: str) -> None:
        """Cancel the current stream, without waiting for its end."""
        if self._task is not None:
            self._task.cancel()
        self._outgoing = self._new_outgoing()
        self._post(LinkLost(cause))

    async def close(self) -> None:
        """End the stream, if there is one."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _new_outgoing(self) -> _SendQueue:
        return _SendQueue(lambda: self._logs_are_paced)

    async def _run(self, outgoing: _SendQueue) -> None:
        self._post_of(outgoing, await self._outcome(outgoing))

    def _post_of(self, outgoing: _SendQueue, event: Event) -> None:
        if outgoing is self._outgoing:
            self._post(event)

    async def _outcome(self, outgoing: _SendQueue) -> LinkLost | LinkRefused:
        """Exchange messages until the stream ends. Returns the cause."""
        try:
            document = ManagerDocument.from_bytes(self._workspace.manager_json.read_bytes())
            # In a container the keeper's user may differ from the manager's, who owns the document.
            manager_uid = self._workspace.manager_json.stat().st_uid
        except (OSError, DocumentInvalid) as error:
            return LinkLost(f"cannot read {self._workspace.manager_json}: {error}")
        address = document.addresses[self._tries % len(document.addresses)]
        self._tries += 1
        async with open_channel(grpc.aio, address, document.certificate) as channel:
            try:
                await within(CONNECT_TIMEOUT_S, _connected(channel, address, document.certificate))
                if document.certificate is None:
                    # Without a certificate only the uid shows that the manager still owns this port.
                    verify_listener_uid(*host_and_port(address), [manager_uid])
                await self._talk(channel, outgoing)
            except TimeoutError:
                return LinkLost(f"no answer from {address} within {CONNECT_TIMEOUT_S:g} s")
            except UntrustedListener as error:
                return LinkLost(str(error))
            except ConnectionRefusedError:
                return LinkLost(f"nobody listens at {address}")
            except OSError as error:
                return LinkLost(str(error))
            except grpc.aio.AioRpcError as error:
                outcome = LinkRefused if error.code() in _REFUSALS else LinkLost
                return outcome(error.details() or error.code().name)
            except MessageInvalid as error:
                return LinkRefused(str(error))
            return LinkLost(f"{address} closed the stream")

    async def _talk(self, channel: grpc.aio.Channel, outgoing: _SendQueue) -> None:
        metadata = ((JOB_KEY, self._settings.job_id), (TOKEN_KEY, self._settings.token))
        call = KeeperServiceStub(channel).Connect(_requests(outgoing), metadata=metadata)
        # An address without a listener fails at once; one that drops packets takes the full timeout.
        response = await within(CONNECT_TIMEOUT_S, call.read())
        while isinstance(response, pb.ConnectResponse):
            for message in manager_messages_from_pb(response):
                self._post_of(outgoing, LinkOpened(message) if isinstance(message, Welcome) else message)
            response = await call.read()


async def within(timeout_s: float, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`, if it finishes in time.

    Unlike asyncio.wait_for before Python 3.12, it does not lose a cancellation in the tick in which `work` ends. A cancelled
    stream would otherwise open beside its successor, and closing the link would wait for it forever.

    Raises:
        TimeoutError: `work` did not finish in time.
    Source: python/cpython issue 86296.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not done:
        raise TimeoutError
    return task.result()


async def _requests(outgoing: _SendQueue) -> AsyncIterator[pb.ConnectRequest]:
    while True:
        first = await outgoing.take()
        yield keeper_messages_to_pb([first, *outgoing.take_more(_size_of(first))])


def open_channel(api: Any, address: str, certificate: str | None) -> Any:
    """Return a channel of `grpc` or `grpc.aio` to this address, encrypted if there is a certificate."""
    if certificate is None:
        return api.insecure_channel(address, options=CHANNEL_OPTIONS)
    return api.secure_channel(
        address, channel_credentials(certificate), options=[*CHANNEL_OPTIONS, *TLS_OPTIONS]
    )


async def _connected(channel: grpc.aio.Channel, address: str, certificate: str | None) -> None:
    """Wait until the channel is connected. A failure raises, because the keeper schedules the retries, not gRPC.

    Raises:
        ConnectionError: there is no listener, or it is not the manager.
    """
    if certificate is not None:
        # gRPC verifies it too, but reports no cause.
        problem = await asyncio.to_thread(verify_certificate, address, certificate, CONNECT_TIMEOUT_S / 2)
        if problem is not None:
            raise ConnectionError(problem)
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise ConnectionError(f"nobody listens at {address}")
        await channel.wait_for_state_change(state)
