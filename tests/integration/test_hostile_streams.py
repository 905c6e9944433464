"""The keepers' gRPC server without an engine: its timeouts, its limits, and the secrecy of its errors."""

import asyncio
import contextlib
import logging
import threading
from pathlib import Path

import grpc
import grpc.aio
import pytest
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from hostile_keeper import METHOD, OPENING, PREFACE, connected, is_let_go, words

from nni_manager.domain.admission_errors import InvalidToken
from nni_manager.grpc_server import connections, servicer
from nni_manager.grpc_server.servicer import STATUS_OF, KeeperServer
from trial_keeper.wire.messages import Hello, Idle, Shutdown

HELLO = Hello("1.0", "EXPERIMT", "aBcDe", "main-0")


class OpenSession:
    """A session that has messages for its keeper when it opens."""

    def __init__(self, gate):
        self.gate = gate
        self.outgoing = asyncio.Queue()
        self.is_closed = asyncio.Event()
        for _ in range(gate.words):
            self.outgoing.put_nowait(Shutdown("x" * gate.word_characters))

    async def ready(self):
        pass

    def receive(self, message):
        if self.gate.bug == "receive":
            raise KeyError("a secret of the manager")

    def closed(self):
        self.is_closed.set()


class OpenGate:
    """An admission that accepts every keeper. `bug` names a method that raises an error."""

    most_streams_of_job = 3

    def __init__(self, bug=None, words=1, word_characters=1):
        self.bug = bug
        self.words = words
        self.word_characters = word_characters
        self.sessions = asyncio.Queue()

    def check_token(self, job_id, token):
        if token == "wrong":
            raise InvalidToken()

    def admit(self, hello, job_id, token):
        if self.bug == "admit":
            raise KeyError("a secret of the manager")
        session = OpenSession(self)
        self.sessions.put_nowait(session)
        return session


def play(scenario, gate=None):
    async def bounded():
        port = free_port_pair()
        server = KeeperServer(made := gate or OpenGate())
        await server.start("127.0.0.1", port)
        try:
            await asyncio.wait_for(scenario(made, f"127.0.0.1:{port}"), DEADLINE_S)
        finally:
            await server.stop()

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def a_call(address):
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel.stream_stream(METHOD)()


async def ending(call):
    """The status and details with which a call ended."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


def test_a_stream_without_hello_is_closed_after_the_timeout(monkeypatch):
    monkeypatch.setattr(servicer, "HELLO_TIMEOUT_S", 0.2)

    async def scenario(gate, address):
        async with a_call(address) as call:
            code, details = await ending(call)
            assert (code, details.startswith("cannot finish the keeper's request")) == (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                True,
            )
        assert gate.sessions.empty()

    play(scenario)


def test_the_session_of_a_keeper_is_closed_if_the_keeper_does_not_read_its_messages(monkeypatch):
    monkeypatch.setattr(servicer, "TAKEN_TIMEOUT_S", 0.5)

    async def scenario(gate, address):
        async with a_call(address) as call:
            await call.write(words(HELLO))
            session = await gate.sessions.get()
            await session.is_closed.wait()
            # The manager has ended the call, although the peer has not read all messages.
            assert not session.outgoing.empty()

    play(scenario, OpenGate(words=20_000, word_characters=2000))


def test_streams_above_the_stream_limit_of_a_job_are_refused_until_an_earlier_stream_of_the_job_ends():
    async def scenario(gate, address):
        async with contextlib.AsyncExitStack() as stack:
            calls, sessions = [], []
            for _ in range(gate.most_streams_of_job):
                call = await stack.enter_async_context(a_call(address))
                await call.write(words(HELLO))
                assert isinstance(await call.read(), bytes)
                calls.append(call)
                sessions.append(await gate.sessions.get())
            async with a_call(address) as call:
                assert (await ending(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            calls[0].cancel()
            await sessions[0].is_closed.wait()
            async with a_call(address) as call:
                await call.write(words(HELLO))
                assert isinstance(await call.read(), bytes)

    play(scenario)


@pytest.mark.parametrize("place", ["admit", "receive"])
def test_an_exception_in_the_server_ends_the_stream_and_is_not_shown_to_the_client(place, caplog):
    async def scenario(gate, address):
        async with a_call(address) as call:
            await call.write(words(HELLO, Idle()))
            code, details = await ending(call)
        assert code is grpc.StatusCode.INTERNAL
        assert details.startswith("cannot continue this stream")
        assert "secret" not in details

    with caplog.at_level(logging.ERROR):
        play(scenario, OpenGate(bug=place))
    assert "a secret of the manager" in caplog.text
    # Records of the logger `asyncio` are ignored. gRPC has one poller per process, which may log an error because the event loop
    # of an earlier test is closed.
    names = [record.name for record in caplog.records if record.name != "asyncio"]
    assert names == ["nni_manager.grpc_server.servicer"]


@pytest.mark.parametrize(
    "said", [b"", PREFACE[:5], PREFACE, OPENING], ids=["nothing", "half", "preface", "settings"]
)
def test_a_connection_without_a_call_is_closed_after_the_idle_timeout(monkeypatch, said):
    short = {
        "grpc.server_handshake_timeout_ms": 500,
        "grpc.http2.settings_timeout": 500,
        "grpc.max_connection_idle_ms": 500,
    }
    options = dict(servicer._SERVER_OPTIONS)
    assert options.keys() >= short.keys()
    monkeypatch.setattr(servicer, "_SERVER_OPTIONS", list((options | short).items()))

    async def scenario(_, address):
        with connected(address, said) as peer:
            assert await asyncio.to_thread(is_let_go, peer)

    play(scenario)


def without_grpc_timeouts(monkeypatch):
    """During the test, disable the timeouts with which gRPC itself closes silent connections."""
    silent = {
        "grpc.server_handshake_timeout_ms": 600_000,
        "grpc.http2.settings_timeout": 600_000,
        "grpc.max_connection_idle_ms": 600_000,
    }
    monkeypatch.setattr(servicer, "_SERVER_OPTIONS", list((dict(servicer._SERVER_OPTIONS) | silent).items()))


def test_connections_above_the_limit_are_closed_while_an_authenticated_keeper_stays_connected(monkeypatch):
    without_grpc_timeouts(monkeypatch)
    monkeypatch.setattr(servicer, "MAX_CONNECTIONS", 10)
    # If the manager cannot read /proc, it cannot evict peers, and only gRPC's own limit applies. A wrong path simulates this.
    monkeypatch.setattr(connections, "_FILES", Path("/nowhere"))

    async def scenario(gate, address):
        async with a_call(address) as call:
            await call.write(words(HELLO))
            assert isinstance(await call.read(), bytes)
            session = await gate.sessions.get()
            with contextlib.ExitStack() as stack:
                peers = [stack.enter_context(connected(address, OPENING)) for _ in range(20)]
                assert await asyncio.to_thread(is_let_go, peers[-1])
                session.outgoing.put_nowait(Shutdown("still here"))
                assert isinstance(await call.read(), bytes)

    play(scenario)


async def until_admitted(address):
    """Open one call after another until the manager responds, like a keeper that connects."""
    while True:
        async with a_call(address) as call:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.write(words(HELLO))
                if isinstance(await call.read(), bytes):
                    return
        await asyncio.sleep(0.05)


def test_a_keeper_can_connect_while_unauthenticated_peers_hold_every_connection(monkeypatch):
    without_grpc_timeouts(monkeypatch)
    monkeypatch.setattr(servicer, "MAX_CONNECTIONS", 40)
    # The manager evicts peers only every 2 s, so the peers reach the limit before the first eviction.
    monkeypatch.setattr(connections, "POLL_INTERVAL_S", 2.0)

    async def scenario(gate, address):
        # This keeper connects before the peers, but an authenticated connection must not be evicted as the oldest one.
        async with a_call(address) as call:
            await call.write(words(HELLO))
            assert isinstance(await call.read(), bytes)
            session = await gate.sessions.get()
            with contextlib.ExitStack() as stack:
                peers = [stack.enter_context(connected(address, OPENING)) for _ in range(60)]
                await until_admitted(address)
                assert await asyncio.to_thread(is_let_go, peers[0])
                session.outgoing.put_nowait(Shutdown("still here"))
                assert isinstance(await call.read(), bytes)

    play(scenario)


def test_a_keeper_can_connect_while_evicted_peers_reconnect_immediately(monkeypatch):
    without_grpc_timeouts(monkeypatch)
    monkeypatch.setattr(servicer, "MAX_CONNECTIONS", 400)
    over = threading.Event()

    def storm(address):
        peers = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                peers.append(connected(address, OPENING))
            if len(peers) > 1000:
                peers.pop(0).close()
        for peer in peers:
            peer.close()

    async def scenario(gate, address):
        async with a_call(address) as call:
            await call.write(words(HELLO))
            assert isinstance(await call.read(), bytes)
            session = await gate.sessions.get()
            attackers = asyncio.create_task(asyncio.to_thread(storm, address))
            try:
                for _ in range(10):
                    # The connection of this new keeper may be evicted before its hello arrives. Then the keeper tries again.
                    await until_admitted(address)
                    session.outgoing.put_nowait(Shutdown("still here"))
                    assert isinstance(await call.read(), bytes)
            finally:
                over.set()
                await attackers

    play(scenario)


def test_the_connection_limit_is_lower_than_the_limit_of_open_files(monkeypatch):
    for limit, most in [
        (20_000, 12_288),
        (1024, 768),
        (256, 128),
        (servicer.resource.RLIM_INFINITY, 12_288),
    ]:
        monkeypatch.setattr(servicer.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert servicer.most_connections() == most


def test_refusals_use_no_status_code_that_grpc_uses_for_internal_errors():
    assert grpc.StatusCode.INTERNAL not in STATUS_OF.values()
    assert grpc.StatusCode.UNKNOWN not in STATUS_OF.values()


def test_the_number_of_logged_refusals_is_limited_per_second():
    budget = servicer._LogBudget(at_once=3, per_s=1)
    assert [budget.has_capacity(100.0) for _ in range(5)] == [True, True, True, False, False]
    assert [budget.has_capacity(101.5) for _ in range(2)] == [True, False]
    assert [budget.has_capacity(1000.0) for _ in range(4)] == [True, True, True, False]
