"""The link of a keeper, tested without a keeper against a server that breaks and delays streams."""

import asyncio
import contextlib
import time
from dataclasses import replace

import grpc.aio
import pytest
from attempts import attempt_id
from deadlines import DEADLINE_S

from nni_manager.grpc_server.servicer import _SERVER_OPTIONS
from trial_keeper.core.events import LinkLost
from trial_keeper.host import link as link_module
from trial_keeper.host.link import (
    BYTES_AT_ONCE,
    MESSAGES_AT_ONCE,
    ManagerLink,
)
from trial_keeper.settings import KeeperSettings
from trial_keeper.timeouts import within
from trial_keeper.wire.convert import keeper_messages_from_bytes, manager_messages_to_bytes
from trial_keeper.wire.documents import ManagerDocument
from trial_keeper.wire.messages import (
    AttemptKey,
    Chunk,
    Hello,
    Stream,
    TrialEnded,
    TrialRevoked,
    Welcome,
)
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.v1 import keeper_pb2
from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceServicer, add_KeeperServiceServicer_to_server
from trial_keeper.wire.workspace import Workspace

HELLO = Hello("1.0", "EXPERIMT", "aBcDe", "main-0")
ROUNDS = 30


@contextlib.asynccontextmanager
async def a_link_to(servicer, folder):
    """Yield a keeper's link to a new server, and the queue to which the link posts its events."""
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    add_KeeperServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    workspace = Workspace(folder)
    workspace.manager_json.write_bytes(ManagerDocument("EXPERIMT", "1.0", (f"127.0.0.1:{port}",)).to_bytes())
    settings = KeeperSettings("EXPERIMT", "aBcDe", str(folder), "token", "aBcDe")
    events: asyncio.Queue[object] = asyncio.Queue()
    link = ManagerLink(workspace, settings, events.put_nowait)
    yield link, events
    await link.close()
    await server.stop(None)


def a_welcome():
    return keeper_pb2.ConnectResponse.FromString(manager_messages_to_bytes([Welcome("1.0")]))


class BreakingServicer(KeeperServiceServicer):
    """Send Welcome, read some messages and abort the stream. Record the first message of each stream."""

    def __init__(self, reads_before_break):
        self.first_messages = []
        self.reads_before_break = reads_before_break

    async def Connect(self, request_iterator, context):  # noqa: N802
        first = await context.read()
        self.first_messages.append(keeper_messages_from_bytes(first.SerializeToString())[0])
        await context.write(a_welcome())
        for _ in range(self.reads_before_break):
            await context.read()
        await context.abort(grpc.StatusCode.ABORTED, "broken")


@pytest.mark.parametrize("reads_before_break", [0, 1, 7])
@pytest.mark.parametrize("size", [10, 256 * 1024])
def test_a_new_stream_sends_every_message_after_the_previous_stream_was_aborted_under_load(
    tmp_path, reads_before_break, size
):
    asyncio.run(asyncio.wait_for(talk(tmp_path, reads_before_break, size), DEADLINE_S))


async def talk(folder, reads_before_break, size):
    servicer = BreakingServicer(reads_before_break)
    async with a_link_to(servicer, folder) as (link, events):
        chunk = Chunk(AttemptKey("aBcDe", attempt_id(0), "main-0"), Stream.METRICS, 0, bytes(size))
        for _ in range(ROUNDS):
            link.open(lambda: HELLO)
            assert isinstance(await events.get(), Welcome)
            # Until the link detects the loss, send messages without pauses, like the keeper of a busy trial.
            while events.empty():
                link.send(chunk)
                await asyncio.sleep(0)
            lost = await events.get()
            assert isinstance(lost, LinkLost), lost
    assert servicer.first_messages == [HELLO] * ROUNDS
    assert events.empty()


class Recording(KeeperServiceServicer):
    """Send Welcome and record all messages. `open_streams`: the number of streams that have not ended."""

    def __init__(self):
        self.open_streams = 0
        self.streams = []
        self.requests = []
        self.most_at_once = self.most_bytes = 0

    async def Connect(self, request_iterator, context):  # noqa: N802
        brought = []
        self.streams.append(brought)
        self.open_streams += 1
        context.add_done_callback(self._count_end)
        async for request in request_iterator:
            messages = keeper_messages_from_bytes(request.SerializeToString())
            self.requests.append(messages)
            self.most_at_once = max(self.most_at_once, len(messages))
            self.most_bytes = max(self.most_bytes, request.ByteSize())
            brought.extend(messages)
            if len(brought) == 1:
                await context.write(a_welcome())

    def _count_end(self, _):
        self.open_streams -= 1


@pytest.mark.parametrize("ticks", [0, 1, 3, 10, 30, 100, 300])
def test_a_new_stream_sends_every_message_if_the_previous_stream_was_abandoned_during_its_start(
    tmp_path, ticks
):
    asyncio.run(asyncio.wait_for(reopen(tmp_path, ticks), DEADLINE_S))


async def reopen(folder, ticks):
    servicer = Recording()
    async with a_link_to(servicer, folder) as (link, events):
        chunks = [
            Chunk(AttemptKey("aBcDe", attempt_id(0), "main-0"), Stream.METRICS, number, b"x")
            for number in range(50)
        ]
        for _ in range(ROUNDS):
            link.open(lambda: replace(HELLO, task="given-up"))
            for _ in range(ticks):
                await asyncio.sleep(0)
            while not events.empty():
                events.get_nowait()
            # The first connection may be incomplete at this moment. A keeper calls open() a second time if the manager has a new
            # address.
            link.open(lambda: HELLO)
            assert isinstance(await events.get(), Welcome)
            for chunk in chunks:
                link.send(chunk)
                await asyncio.sleep(0)
            brought = next(stream for stream in reversed(servicer.streams) if HELLO in stream)
            while len(brought) < 1 + len(chunks) or servicer.open_streams > 1:
                await asyncio.sleep(0)
            assert brought == [HELLO, *chunks]
            link._drop(link._outgoing, "enough")


def test_a_link_that_is_closed_while_it_opens_leaves_no_stream(tmp_path):
    asyncio.run(asyncio.wait_for(close_early(tmp_path), DEADLINE_S))


async def close_early(folder):
    servicer = Recording()
    async with a_link_to(servicer, folder) as (link, _):
        for ticks in range(10 * ROUNDS):
            link.open(lambda: HELLO)
            for _ in range(ticks % ROUNDS):
                await asyncio.sleep(0)
            await link.close()
        while servicer.open_streams:
            await asyncio.sleep(0)


# The numbers of ticks cover every order of completion and cancellation. They start at 1, because a coroutine needs one tick for
# its first step.
TICKS = range(1, 10)


@pytest.mark.parametrize("cancelled_after", TICKS)
@pytest.mark.parametrize("done_after", TICKS)
def test_a_cancelled_call_with_a_timeout_raises_cancelled_error_and_cancels_its_coroutine(
    done_after, cancelled_after
):
    async def work():
        for _ in range(done_after):
            await asyncio.sleep(0)

    async def play():
        waiting = asyncio.create_task(within(60, work()))
        for _ in range(cancelled_after):
            await asyncio.sleep(0)
        is_under_way = waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() == is_under_way
        assert len(asyncio.all_tasks()) == 1, "the work must have ended as well"

    asyncio.run(play())


def test_a_call_that_exceeds_its_timeout_is_cancelled():
    async def play():
        with pytest.raises(TimeoutError):
            await within(0.01, asyncio.Event().wait())
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())


def test_the_hello_message_names_a_trial_that_starts_while_the_keeper_connects(tmp_path):
    asyncio.run(asyncio.wait_for(start_while_connecting(tmp_path), DEADLINE_S))


async def start_while_connecting(folder):
    servicer, running = Recording(), []
    is_accepted, may_continue = asyncio.Event(), asyncio.Event()
    accepted = []

    async def copy(source, target):
        while data := await source.read(1024):
            target.write(data)
        target.close()

    async def accept(reader, writer):
        accepted.append(asyncio.current_task())
        is_accepted.set()
        await may_continue.wait()
        host, _, port = address.rpartition(":")
        others = await asyncio.open_connection(host, port)
        try:
            await asyncio.gather(copy(reader, others[1]), copy(others[0], writer))
        finally:
            others[1].transport.abort()
            writer.transport.abort()

    async with a_link_to(servicer, folder) as (link, events):
        workspace = Workspace(folder)
        document, _ = workspace.read_manager_json()
        (address,) = document.addresses
        slow = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = slow.sockets[0].getsockname()[1]
        workspace.manager_json.write_bytes(replace(document, addresses=(f"127.0.0.1:{port}",)).to_bytes())
        link.open(lambda: replace(HELLO, attempts=tuple(running)))
        await is_accepted.wait()
        running.append(AttemptKey("aBcDe", attempt_id(0), "main-0"))
        may_continue.set()
        assert isinstance(await events.get(), Welcome)
        slow.close()
        for task in accepted:
            task.cancel()
        await asyncio.gather(*accepted, return_exceptions=True)
        await asyncio.sleep(0)  # the connections are closed in the next iteration of the loop
    assert servicer.streams == [[replace(HELLO, attempts=tuple(running))]]


def test_messages_and_metrics_are_sent_before_queued_logs(tmp_path):
    asyncio.run(asyncio.wait_for(overtake(tmp_path), DEADLINE_S))


async def overtake(folder):
    servicer = Recording()
    async with a_link_to(servicer, folder) as (link, events):
        link.open(lambda: HELLO)
        assert isinstance(await events.get(), Welcome)
        key = AttemptKey("aBcDe", attempt_id(0), "main-0")
        logs = [
            Chunk(key, stream, number * 64 * 1024, bytes(64 * 1024))
            for number in range(8)
            for stream in (Stream.STDOUT, Stream.STDERR, Stream.KEEPER)
        ]
        urgent = [
            Chunk(key, Stream.METRICS, 0, b"a metric"),
            TrialEnded(key, ExitReason.SUCCEEDED, 0, 1.0, 2.0, {Stream.METRICS: 18}),
            Chunk(key, Stream.METRICS, 8, b"the last 1"),
        ]
        # These calls do not yield to the event loop. So the link has queued a whole window of logs before the urgent messages.
        for message in (
            *logs,
            *urgent,
        ):
            link.send(message)
        (brought,) = servicer.streams
        while len(brought) < 1 + len(logs) + len(urgent):
            await asyncio.sleep(0)
        assert brought == [HELLO, *urgent, *logs]


def test_messages_sent_together_are_batched_up_to_the_request_limits(tmp_path):
    asyncio.run(asyncio.wait_for(send_batches(tmp_path), DEADLINE_S))


async def send_batches(folder):
    servicer = Recording()
    async with a_link_to(servicer, folder) as (link, events):
        link.open(lambda: HELLO)
        assert isinstance(await events.get(), Welcome)
        (brought,) = servicer.streams
        key = AttemptKey("aBcDe", attempt_id(0), "main-0")
        small = [Chunk(key, Stream.METRICS, number, b"x") for number in range(3 * MESSAGES_AT_ONCE)]
        large = [Chunk(key, Stream.METRICS, number, bytes(BYTES_AT_ONCE * 2 // 5)) for number in range(8)]
        for message in (*small, *large):
            link.send(message)
        while len(brought) < 1 + len(small) + len(large):
            await asyncio.sleep(0)
        assert brought == [HELLO, *small, *large]
        assert 1 < servicer.most_at_once <= MESSAGES_AT_ONCE
        assert servicer.most_bytes < BYTES_AT_ONCE * 1.1


LOG = Chunk(AttemptKey("aBcDe", attempt_id(0), "main-0"), Stream.STDOUT, 0, b"a line of a log")


def metric(number, size=1):
    return Chunk(AttemptKey("aBcDe", attempt_id(0), "main-0"), Stream.METRICS, number, bytes(size))


@contextlib.asynccontextmanager
async def a_coalescing_link(folder):
    """Yield a connected link that coalesces messages, and its server."""
    servicer = Recording()
    async with a_link_to(servicer, folder) as (link, events):
        link.open(lambda: HELLO)
        assert isinstance(await events.get(), Welcome)
        link.set_coalescing(is_allowed=True)
        yield link, servicer


async def until(servicer, requests):
    while len(servicer.requests) < requests:
        await asyncio.sleep(0)


@pytest.fixture
def no_coalesce_timeout(monkeypatch):
    """Prevent the timer from sending coalesced messages."""
    monkeypatch.setattr(link_module, "COALESCE_S", 1000.0)


def test_messages_are_coalesced_until_coalescing_is_switched_off(tmp_path, no_coalesce_timeout):
    async def work():
        async with a_coalescing_link(tmp_path) as (link, servicer):
            for message in (LOG, metric(1), metric(2)):
                link.send(message)
                await asyncio.sleep(0)
            link.set_coalescing(is_allowed=False)
            await until(servicer, 3)
            assert servicer.requests == [[HELLO], [metric(1), metric(2)], [LOG]]
            link.send(metric(3))  # From here on, the link sends every message immediately.
            await until(servicer, 4)

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


@pytest.mark.parametrize("at_once", [True, False])
def test_the_response_to_a_revoke_is_sent_immediately_with_all_coalesced_messages(
    tmp_path, no_coalesce_timeout, at_once
):
    async def work():
        async with a_coalescing_link(tmp_path) as (link, servicer):
            for trial_id in ("aBcDe", "fGhIj"):
                for message in (metric(1), LOG, metric(2)):
                    link.send(message)
                    await asyncio.sleep(0 if at_once else 0.001)
                link.send(TrialRevoked(trial_id))
                await until(servicer, len(servicer.requests) + 1)
                assert servicer.requests[-1] == [metric(1), metric(2), TrialRevoked(trial_id), LOG]

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


@pytest.mark.parametrize(
    "much", [[metric(1, 64 * 1024)], [metric(number) for number in range(1, 1 + MESSAGES_AT_ONCE)]]
)
@pytest.mark.parametrize("at_once", [True, False])
def test_coalesced_messages_are_sent_when_their_number_or_size_reaches_the_limit(
    tmp_path, no_coalesce_timeout, much, at_once
):
    async def work():
        async with a_coalescing_link(tmp_path) as (link, servicer):
            for message in much:
                link.send(message)
                await asyncio.sleep(0 if at_once else 0.001)
            await until(servicer, 2)
            assert servicer.requests == [[HELLO], much]

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_coalesced_messages_are_sent_after_the_timeout(tmp_path, monkeypatch):
    async def work():
        async with a_coalescing_link(tmp_path) as (link, servicer):
            # The first message starts a timer; the last message follows long after the timer has expired.
            for number in range(1, 4):
                monkeypatch.setattr(link_module, "COALESCE_S", 0.001 if number == 3 else 0.05)
                link.send(metric(number))
                await until(servicer, 1 + number)
            assert servicer.requests == [[HELLO], [metric(1)], [metric(2)], [metric(3)]]

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


@pytest.fixture
def slow_logs(monkeypatch):
    """Limit the logs to a burst of 1,000 bytes a second. A thousand bursts then take longer than any deadline."""
    monkeypatch.setattr(link_module, "LOG_BURST_BYTES", 1000)
    monkeypatch.setattr(link_module, "LOG_BYTES_PER_S", 1000.0)
    assert len(BURSTS) > DEADLINE_S


BURSTS = [
    Chunk(AttemptKey("aBcDe", attempt_id(0), "main-0"), Stream.STDOUT, n * 1000, bytes(1000))
    for n in range(1000)
]


@pytest.mark.usefixtures("slow_logs")
def test_logs_of_a_running_trial_are_rate_limited_and_delay_no_metric(tmp_path):
    asyncio.run(asyncio.wait_for(pace(tmp_path), DEADLINE_S))


async def pace(folder):
    servicer = Recording()
    async with a_link_to(servicer, folder) as (link, events):
        link.limit_log_rate(are_paced=True)
        link.open(lambda: HELLO)
        assert isinstance(await events.get(), Welcome)
        (brought,) = servicer.streams

        async def arrived(count):
            while len(brought) < count:
                await asyncio.sleep(0)

        began_s = time.monotonic()
        for chunk in BURSTS[:2]:
            link.send(chunk)
        await arrived(1 + 2)
        assert time.monotonic() - began_s >= 1.0
        for chunk in BURSTS[2:]:
            link.send(chunk)
        metric = Chunk(BURSTS[0].key, Stream.METRICS, 0, b"a metric")
        link.send(metric)
        await arrived(1 + 2 + 1)
        assert brought == [HELLO, *BURSTS[:2], metric]
        link.limit_log_rate(are_paced=False)  # the keeper does this when the trial has ended
        await arrived(1 + len(BURSTS) + 1)


@pytest.mark.usefixtures("slow_logs")
def test_logs_that_are_sent_without_a_rate_limit_do_not_delay_the_logs_of_the_next_trial(tmp_path):
    asyncio.run(asyncio.wait_for(next_trial(tmp_path), DEADLINE_S))


async def next_trial(folder):
    servicer = Recording()
    async with a_link_to(servicer, folder) as (link, events):
        link.open(lambda: HELLO)
        assert isinstance(await events.get(), Welcome)
        (brought,) = servicer.streams
        for chunk in BURSTS:
            link.send(chunk)
        while len(brought) < 1 + len(BURSTS):
            await asyncio.sleep(0)
        link.limit_log_rate(are_paced=True)
        line = Chunk(BURSTS[0].key, Stream.STDOUT, 0, b"the first line of the next trial")
        link.send(line)
        while brought[-1] != line:
            await asyncio.sleep(0)


def test_the_grpc_server_accepts_any_number_of_pings_on_a_connection_without_a_stream():
    """By gRPC's default, the third ping within 5 min makes the server end the connection with GOAWAY "too_many_pings"."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _http2_frame(_SETTINGS)

    async def ping_in_a_row():
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(preface)
        kinds = []
        # Send each ping only after the response to the previous ping. Otherwise, gRPC may drop pings because there are too many
        # at once, which this test does not check.
        for number in range(20):
            writer.write(_http2_frame(_PING, payload=number.to_bytes(8, "big")))
            while True:
                header = await reader.readexactly(9)
                kind, flags = header[3], header[4]
                payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
                assert kind != _GOAWAY, payload
                if kind == _PING and flags & _ACK:
                    kinds.append(int.from_bytes(payload, "big"))
                    break
        writer.close()
        await server.stop(None)
        return kinds

    assert asyncio.run(asyncio.wait_for(ping_in_a_row(), DEADLINE_S)) == [*range(20)]


# Three types and one flag of HTTP/2 frames. Source: RFC 9113, section 6.
_SETTINGS, _PING, _GOAWAY, _ACK = 4, 6, 7, 1


def _http2_frame(kind, payload=b""):
    """A frame of stream 0, which represents the connection."""
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload
