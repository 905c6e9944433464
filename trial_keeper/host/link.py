"""The gRPC stream to the manager: transports messages, independent of trials.

If manager.json names a certificate, the stream is encrypted and connects only to the owner of that certificate.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from trial_keeper.core.events import Event, LinkLost, LinkRefused
from trial_keeper.host.trust import TLS_OPTIONS, verify_certificate
from trial_keeper.settings import KeeperSettings
from trial_keeper.timeouts import set_within, within
from trial_keeper.wire.convert import MessageInvalid, keeper_messages_to_pb, manager_messages_from_pb
from trial_keeper.wire.listener_uid import UntrustedListener, verify_address
from trial_keeper.wire.messages import Chunk, Hello, KeeperMessage, Stream, TrialRevoked, Usage
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.v1 import keeper_pb2 as pb
from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceStub
from trial_keeper.wire.workspace import Workspace

# gRPC's own timeout for an unresponsive address is 20 s.
CONNECT_TIMEOUT_S = 10.0
CHANNEL_OPTIONS = [
    # Detect a dead peer within 20 s. The ping timeout is also needed: if a middlebox still accepts the bytes, gRPC waits over
    # a minute for a ping's reply. It is ten seconds, because a ping queues behind a window of data, also on a link of 2 Mbit/s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # One stream per channel, so a shared global pool has no use.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
# The limit while a trial runs, about 60,000 lines a second. 1 MB of logs costs keeper and manager 20 ms of CPU. If both share two
# cores with a trial that writes at full speed (1 GB/s), sending all of it would halve the trial's rate; this limit costs nothing.
# Source: tests/benchmarks/bench_stdout.py.
LOG_BYTES_PER_S = 5e6
# Few large bursts need half the CPU of many small ones. A log of moderate rate is never throttled.
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
# The limits of one stream message: a single chunk fits, and gRPC's own limit is far. While its disk hangs, the manager holds one
# message of each keeper, so with 1,000 keepers larger messages would occupy most of its memory.
MESSAGES_AT_ONCE = 64
BYTES_AT_ONCE = 256 * 1024
# The minimum time between two stream messages while the queue is deep. Without coalescing, each very short trial would cost
# keeper and manager several stream messages.
COALESCE_S = 0.03
# The time in which metrics are sent before the keeper connects again, because it cannot read a log.
DROP_DELAY_S = 1.0
# A chunk of metrics of this size comes from a bulk writer, whose window already limits its rate.
_MUCH_BYTES = 16 * 1024


def _is_urgent(message: KeeperMessage) -> bool:
    """True if the message flushes the coalesced messages: it is large, or another job is idle. Never called for logs."""
    return isinstance(message, TrialRevoked) or _size_of(message) >= _MUCH_BYTES


def _size_of(message: KeeperMessage) -> int:
    return len(message.data) if isinstance(message, Chunk) else 0


class _SendQueue:
    """The send queue of one stream, in two lanes: messages and metrics first, then logs. Order inside a lane is kept.

    So the end of an attempt may overtake its last log chunks; the end has the final sizes, for which the manager waits. The log
    lane has a rate limit while logs are paced: after a burst of `LOG_BURST_BYTES` it pauses until the average is down to
    `LOG_BYTES_PER_S`.

    While coalescing is allowed, stream messages are at least `COALESCE_S` apart, and each contains everything queued, logs last.
    A message after a longer pause, a large amount and an urgent message are not delayed.
    """

    def __init__(self, logs_are_paced: Callable[[], bool]) -> None:
        self._logs_are_paced = logs_are_paced
        self._urgent: deque[KeeperMessage] = deque()
        self._logs: deque[Chunk] = deque()
        self._wakeup = asyncio.Event()
        self._may_coalesce = False
        self._flush = asyncio.Event()
        self._urgent_count = 0
        """Number of messages in the urgent lane that must be sent at once."""
        self._taken_at_s = -math.inf
        self._burst_began_s = 0.0
        self._burst_bytes = 0

    def put(self, message: KeeperMessage) -> None:
        """Queue a message. The queue is bounded, even if the manager reads nothing for a day.

        The replication windows bound the chunks, and of an attempt's usage only the newest is kept. All other messages occur once
        per link or attempt.
        """
        if isinstance(message, Usage):
            self._urgent = deque(
                other for other in self._urgent if not (isinstance(other, Usage) and other.key == message.key)
            )
        if isinstance(message, Chunk) and message.stream is not Stream.METRICS:
            self._logs.append(message)
        else:
            self._urgent.append(message)
            self._urgent_count += _is_urgent(message)
        self._wakeup.set()
        if not self._may_wait:
            self._flush.set()

    def set_coalescing(self, *, is_allowed: bool) -> None:
        """Allow or forbid delaying messages to coalesce them, from now on."""
        self._may_coalesce = is_allowed
        if not self._may_wait:
            self._flush.set()

    @property
    def _may_wait(self) -> bool:
        is_much = len(self._urgent) + len(self._logs) >= MESSAGES_AT_ONCE
        return self._may_coalesce and not self._urgent_count and not is_much

    def begin_burst(self) -> None:
        """Restart the log rate limit after it was switched on or off: earlier bytes do not count."""
        self._burst_began_s, self._burst_bytes = time.monotonic(), 0
        self._wakeup.set()

    async def take(self) -> KeeperMessage:
        """Wait for the next message and return it. Cancellation loses nothing."""
        while self._next() is None:
            self._wakeup.clear()
            await set_within(self._wakeup, self._pause_s() if self._logs else None)
        await self._wait_for_interval()
        self._taken_at_s = time.monotonic()
        return self._pop()

    async def _wait_for_interval(self) -> None:
        """Return once the next message of the stream may be sent."""
        left_s = self._taken_at_s + COALESCE_S - time.monotonic()
        if self._may_wait and left_s > 0:
            self._flush.clear()
            await set_within(self._flush, left_s)

    def take_more(self, taken_bytes: int) -> list[KeeperMessage]:
        """Return the messages that fit into one stream message beside `taken_bytes`; logs only while coalescing."""
        more: list[KeeperMessage] = []
        while (self._urgent or self._may_coalesce) and 1 + len(more) < MESSAGES_AT_ONCE:
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
        return self._logs[0] if self._logs and self._pause_s() <= 0 else None

    def _pop(self) -> KeeperMessage:
        if not self._urgent:
            return self._take_log()
        message = self._urgent.popleft()
        self._urgent_count -= _is_urgent(message)
        return message

    def _pause_s(self) -> float:
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
    """The stream to the manager, one at a time. Posts the stream's events in order."""

    def __init__(self, workspace: Workspace, settings: KeeperSettings, post: Callable[[Event], None]) -> None:
        self._workspace = workspace
        self._settings = settings
        self._post = post
        self._logs_are_paced = False
        self._outgoing = self._new_outgoing()
        self._task: asyncio.Task[None] | None = None
        self._tries = 0
        self.streams = 0
        """The number of streams opened so far."""

    def limit_log_rate(self, *, are_paced: bool) -> None:
        """Switch the rate limit of logs: on while a trial runs, as sending logs takes CPU time from the trial; else off."""
        self._logs_are_paced = are_paced
        self._outgoing.begin_burst()

    def set_coalescing(self, *, is_allowed: bool) -> None:
        """Allow delaying messages to coalesce them, from now on, if the manager waits for none of them."""
        self._outgoing.set_coalescing(is_allowed=is_allowed)

    def open(self, hello: Callable[[], Hello]) -> None:
        """Connect in the background; cancels a connection attempt in progress.

        `hello` is called after that: a trial that starts in the meantime would otherwise seem lost to the manager.
        """
        if self._task is not None:
            self._task.cancel()
        # Each stream has its own queue: a closing stream must neither send its successor's messages nor post events.
        self._outgoing = self._new_outgoing()
        self.streams += 1
        self._task = asyncio.get_running_loop().create_task(self._run(self._outgoing, hello))

    def send(self, message: KeeperMessage) -> None:
        """Queue a message after the others of its lane; see `_SendQueue`."""
        self._outgoing.put(message)

    def drop_later(self, cause: str) -> None:
        """Cancel the current stream after a second, in which what is queued is sent."""
        asyncio.get_running_loop().call_later(DROP_DELAY_S, self._drop, self._outgoing, cause)

    def _drop(self, outgoing: _SendQueue, cause: str) -> None:
        # A stream that has ended meanwhile has reported that.
        if outgoing is self._outgoing and self._task is not None and not self._task.done():
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

    async def _run(self, outgoing: _SendQueue, hello: Callable[[], Hello]) -> None:
        try:
            outcome: LinkLost | LinkRefused = await self._outcome(outgoing, hello)
        except Exception as error:  # noqa: BLE001 - such as: no thread can be started, because the trial has used up all pids
            # Otherwise nobody would notice the end of this task, and the keeper would never connect again.
            outcome = LinkLost(
                f"cannot connect: {error!r}; free memory or processes in the container, or report a bug of trial-keeper"
            )
        self._post_of(outgoing, outcome)

    def _post_of(self, outgoing: _SendQueue, event: Event) -> None:
        if outgoing is self._outgoing:
            self._post(event)

    async def _outcome(self, outgoing: _SendQueue, hello: Callable[[], Hello]) -> LinkLost | LinkRefused:
        """Exchange messages until the stream ends. Returns the cause."""
        try:
            document, manager_uid = self._workspace.read_manager_json()
        except (OSError, DocumentInvalid) as error:
            return LinkLost(f"cannot read {self._workspace.manager_json}: {error}")
        address = document.addresses[self._tries % len(document.addresses)]
        self._tries += 1
        async with open_channel(grpc.aio, address, document.certificate) as channel:
            try:
                await within(CONNECT_TIMEOUT_S, _connected(channel, address, document.certificate))
                if document.certificate is None:
                    # Without a certificate only the uid shows that the manager still owns this port.
                    verify_address(address, [manager_uid])
                await self._exchange(channel, outgoing, hello)
            except TimeoutError:
                return LinkLost(f"{address} does not respond within {CONNECT_TIMEOUT_S:g} s")
            except UntrustedListener as error:
                return LinkLost(str(error))
            except ConnectionRefusedError:
                return LinkLost(f"no program listens at {address}")
            except OSError as error:
                return LinkLost(str(error))
            except grpc.aio.AioRpcError as error:
                outcome = LinkRefused if error.code() in _REFUSALS else LinkLost
                return outcome(error.details() or error.code().name)
            except MessageInvalid as error:
                return LinkRefused(str(error))
            return LinkLost(f"{address} closed the stream")

    async def _exchange(
        self, channel: grpc.aio.Channel, outgoing: _SendQueue, hello: Callable[[], Hello]
    ) -> None:
        metadata = ((JOB_KEY, self._settings.job_id), (TOKEN_KEY, self._settings.token))
        call = KeeperServiceStub(channel).Connect(metadata=metadata)
        # A task of our own: gRPC leaves the one that reads an iterator of requests pending when a stream ends, and asyncio
        # then complains on stderr.
        sending = asyncio.ensure_future(_send(call, outgoing, hello))
        try:
            # An address without a listener fails at once; a firewall that drops packets causes the full timeout.
            response = await within(CONNECT_TIMEOUT_S, call.read())
            while isinstance(response, pb.ConnectResponse):
                for message in manager_messages_from_pb(response):
                    self._post_of(outgoing, message)
                response = await call.read()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def _send(call: Any, outgoing: _SendQueue, hello: Callable[[], Hello]) -> None:
    """Send Hello, and what is queued until the stream ends. The reader of the stream reports why it has ended."""
    outgoing.put(hello())
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            first = await outgoing.take()
            await call.write(keeper_messages_to_pb([first, *outgoing.take_more(_size_of(first))]))


def open_channel(api: Any, address: str, certificate: str | None) -> Any:
    """Return a channel of `grpc` or `grpc.aio` to this address.

    With a certificate it is encrypted, and connects only to the owner of the certificate.
    """
    if certificate is None:
        return api.insecure_channel(address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(root_certificates=certificate.encode())
    return api.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, *TLS_OPTIONS])


async def _connected(channel: grpc.aio.Channel, address: str, certificate: str | None) -> None:
    """Wait until the channel is connected. A failure raises, because the keeper schedules the retries, not gRPC.

    Raises:
        ConnectionError: there is no listener, or the listener is not the manager.
    """
    if certificate is not None:
        # gRPC verifies the certificate too, but reports no cause.
        problem = await asyncio.to_thread(verify_certificate, address, certificate, CONNECT_TIMEOUT_S / 2)
        if problem is not None:
            raise ConnectionError(problem)
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise ConnectionError(f"no program listens at {address}")
        await channel.wait_for_state_change(state)
