"""The gRPC stream to the manager: carries messages, knows nothing of trials.

It is encrypted where manager.json names a certificate, and then opens to the owner of that certificate only.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from trial_keeper.core.events import Event, LinkLost, LinkOpened, LinkRefused
from trial_keeper.host.trust import TLS_OPTIONS, channel_credentials, why_not_trusted
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.convert import MessageInvalid, keeper_messages_to_pb, manager_messages_from_pb
from trial_keeper.wire.messages import Chunk, Hello, KeeperMessage, Stream, TrialReturned, Usage, Welcome
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY
from trial_keeper.wire.own_port import StrangerListens, check_own
from trial_keeper.wire.v1 import keeper_pb2 as pb
from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceStub
from trial_keeper.wire.workspace import DocumentInvalid, ManagerDocument, Workspace

# gRPC itself would go on trying a silent address for 20 s.
CONNECT_TIMEOUT_S = 10.0
CHANNEL_OPTIONS = [
    # A connection whose other end is gone without a word is noticed within 20 s. The timeout of pings has to be set as well:
    # where something between the two still takes the bytes, gRPC waits a minute and more for the answer to a ping. Ten seconds,
    # because a ping waits its turn behind a window of data, also on a link of 2 Mbit/s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # One stream per channel: nothing to share, so nothing to look up in a global pool.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
# While a trial runs. 1 MB of logs costs keeper and manager 20 ms of CPU, with both on a machine of two cores: what a trial may
# write (1 GB/s) cannot be sent along without halving that, and at this rate it is as fast as without. Nobody reads 60,000 lines a
# second. Source: tests/benchmarks/bench_stdout.py.
LOG_BYTES_PER_S = 5e6
# Few large bursts need half the CPU of many small ones, and a log that is no flood never rests.
LOG_BURST_BYTES = 512 * 1024
# What another try with the same manager cannot mend.
_REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)


# What goes into one message of the stream: one chunk, and well below what a server takes. The manager holds one of each keeper
# while its disk hangs, so with 1,000 of them larger ones would be most of its memory.
MESSAGES_AT_ONCE = 64
BYTES_AT_ONCE = 256 * 1024
# For so long what is to be told is gathered, from one message of the stream to the next, while nobody waits for it: trials that
# are over in a moment would each cost keeper and manager several of them.
GATHER_S = 0.03
# Of metrics: who writes so many in a moment has more, and waits for room.
_MUCH_BYTES = 16 * 1024


def _presses(message: KeeperMessage) -> bool:
    """Whether the message, which is no log, goes at once with all that was gathered: it is large, or another job is idle."""
    return isinstance(message, TrialReturned) or _size_of(message) >= _MUCH_BYTES


def _size_of(message: KeeperMessage) -> int:
    return len(message.data) if isinstance(message, Chunk) else 0


class _Outgoing:
    """What one stream has still to send, in two lanes: messages and metrics, then logs. Order inside a lane is kept.

    The end of an attempt may so overtake its last log chunks; the manager waits for the sizes that it names. The lane of logs
    moves in bursts: after `LOG_BURST_BYTES` it rests, as long as logs are paced, until their rate is down to what it may be.

    While messages may be gathered, one goes `GATHER_S` after the one before it at the earliest, and takes along what has come,
    logs last. What comes after a longer silence does not wait, and neither does much, or what presses.
    """

    def __init__(self, logs_are_paced: Callable[[], bool]) -> None:
        self._logs_are_paced = logs_are_paced
        self._urgent: deque[KeeperMessage] = deque()
        self._logs: deque[Chunk] = deque()
        self._has_news = asyncio.Event()
        self._may_gather = False
        self._goes_now = asyncio.Event()
        self._pressing = 0
        """How many messages press, among the urgent ones."""
        self._taken_at_s = -math.inf
        self._burst_began_s = 0.0
        self._burst_bytes = 0

    def put(self, message: KeeperMessage) -> None:
        """Queue a message. The queue is as short as the replication windows are small.

        All else is said once in a link or an attempt. Of what an attempt uses only the newest waits, so that a manager which
        takes nothing for a day costs nothing.
        """
        if isinstance(message, Usage):
            self._urgent = deque(
                other for other in self._urgent if not (isinstance(other, Usage) and other.key == message.key)
            )
        if isinstance(message, Chunk) and message.stream is not Stream.METRICS:
            self._logs.append(message)
        else:
            self._urgent.append(message)
            self._pressing += _presses(message)
        self._has_news.set()
        if not self._may_wait:
            self._goes_now.set()

    def gather(self, *, may_gather: bool) -> None:
        """Whether what is put here may wait a moment for more, from now on."""
        self._may_gather = may_gather
        if not self._may_wait:
            self._goes_now.set()

    @property
    def _may_wait(self) -> bool:
        is_much = len(self._urgent) + len(self._logs) >= MESSAGES_AT_ONCE
        return self._may_gather and not self._pressing and not is_much

    def begin_burst(self) -> None:
        """Logs are paced from now on, or no more: what went before does not count."""
        self._burst_began_s, self._burst_bytes = time.monotonic(), 0
        self._has_news.set()

    async def take(self) -> KeeperMessage:
        """The next message, once there is one. Nothing is lost when the caller is cancelled."""
        while self._next() is None:
            self._has_news.clear()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), self._rest_s() if self._logs else None)
        await self._gathered()
        self._taken_at_s = time.monotonic()
        return self._pop()

    async def _gathered(self) -> None:
        """Return once the next message of the stream may go."""
        left_s = self._taken_at_s + GATHER_S - time.monotonic()
        if self._may_wait and left_s > 0:
            self._goes_now.clear()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._goes_now.wait(), left_s)

    def take_more(self, taken_bytes: int) -> list[KeeperMessage]:
        """What fits into one message of the stream with what was taken: what is urgent as well, and logs that were gathered."""
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
        self._pressing -= _presses(message)
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

    def pace_logs(self, *, are_paced: bool) -> None:
        """Whether logs go no faster than a running trial can spare, or as fast as they can: nothing runs that it could cost."""
        self._logs_are_paced = are_paced
        self._outgoing.begin_burst()

    def gather(self, *, may_gather: bool) -> None:
        """Whether what is sent may wait a moment for more, from now on: nobody waits for an answer."""
        self._outgoing.gather(may_gather=may_gather)

    def open(self, hello: Hello) -> None:
        """Connect in the background; a try that is still under way is given up."""
        if self._task is not None:
            self._task.cancel()
        # A stream keeps the queue it began with: one that is dying must neither take from its successor nor speak for it.
        self._outgoing = self._new_outgoing()
        self._outgoing.put(hello)
        self._task = asyncio.get_running_loop().create_task(self._run(self._outgoing))

    def send(self, message: KeeperMessage) -> None:
        """Queue a message: behind others of its kind, and logs behind all others."""
        self._outgoing.put(message)

    def drop(self, cause: str) -> None:
        """Let go of the stream that is up, without waiting for its end."""
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

    def _new_outgoing(self) -> _Outgoing:
        return _Outgoing(lambda: self._logs_are_paced)

    async def _run(self, outgoing: _Outgoing) -> None:
        self._post_of(outgoing, await self._outcome(outgoing))

    def _post_of(self, outgoing: _Outgoing, event: Event) -> None:
        if outgoing is self._outgoing:
            self._post(event)

    async def _outcome(self, outgoing: _Outgoing) -> LinkLost | LinkRefused:
        """Talk until the stream ends; why it did."""
        try:
            document = ManagerDocument.from_bytes(self._workspace.manager_json.read_bytes())
            # A keeper in a container may be another user than its manager, whose document it is.
            manager_uid = self._workspace.manager_json.stat().st_uid
        except (OSError, DocumentInvalid) as error:
            return LinkLost(f"cannot read {self._workspace.manager_json}: {error}")
        address = document.addresses[self._tries % len(document.addresses)]
        self._tries += 1
        async with _channel(address, document.certificate) as channel:
            try:
                await asyncio.wait_for(_connected(channel, address, document.certificate), CONNECT_TIMEOUT_S)
                if document.certificate is None:
                    # Nothing else tells whether it is still the manager that has this port.
                    host, _, port = address.rpartition(":")
                    check_own(host, int(port), [manager_uid])
                await self._talk(channel, outgoing)
            except (TimeoutError, asyncio.TimeoutError):
                return LinkLost(f"no answer from {address} within {CONNECT_TIMEOUT_S:g} s")
            except StrangerListens as error:
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

    async def _talk(self, channel: grpc.aio.Channel, outgoing: _Outgoing) -> None:
        metadata = ((JOB_KEY, self._settings.job_id), (TOKEN_KEY, self._settings.token))
        call = KeeperServiceStub(channel).Connect(_requests(outgoing), metadata=metadata)
        # An address where nobody listens fails at once; one that swallows packets takes the whole time.
        response = await asyncio.wait_for(call.read(), CONNECT_TIMEOUT_S)
        while isinstance(response, pb.ConnectResponse):
            for message in manager_messages_from_pb(response):
                self._post_of(outgoing, LinkOpened(message) if isinstance(message, Welcome) else message)
            response = await call.read()


async def _requests(outgoing: _Outgoing) -> AsyncIterator[pb.ConnectRequest]:
    while True:
        first = await outgoing.take()
        yield keeper_messages_to_pb([first, *outgoing.take_more(_size_of(first))])


def _channel(address: str, certificate: str | None) -> grpc.aio.Channel:
    if certificate is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(
        address, channel_credentials(certificate), options=[*CHANNEL_OPTIONS, *TLS_OPTIONS]
    )


async def _connected(channel: grpc.aio.Channel, address: str, certificate: str | None) -> None:
    """Wait until the channel is connected. gRPC would try again by itself; when to do so is the keeper's decision.

    Raises:
        ConnectionError: nobody listens there, or somebody else than the manager.
    """
    if certificate is not None:
        # gRPC looks at it, too, and says neither that it did nor what it saw.
        problem = await asyncio.to_thread(why_not_trusted, address, certificate, CONNECT_TIMEOUT_S / 2)
        if problem is not None:
            raise ConnectionError(problem)
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise ConnectionError(f"nobody listens at {address}")
        await channel.wait_for_state_change(state)
