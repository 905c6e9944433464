"""A manager that only listens: our own gRPC server, whose faults a test decides; and the workspace of its experiment.

The bytes go through the manager's real half of replication. What is committed survives a restart, as a database would; what
is not is lost.
"""

import asyncio
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from attempts import AttemptNumbers, attempt_id
from deadlines import DEADLINE_S
from free_ports import free_port_pair

from nni_manager.domain.admission_errors import InvalidToken
from nni_manager.domain.ingest import AttemptIngest, StreamWrite
from nni_manager.engine.keeper_admission import ProbeSession
from nni_manager.grpc_server.servicer import KeeperServer
from nni_manager.store.certificate import Certificate
from nni_sdk.records import Record
from trial_keeper import __version__
from trial_keeper.settings import KeeperSettings, without_settings
from trial_keeper.wire.messages import (
    Ack,
    AttemptKey,
    AttemptOffsets,
    Chunk,
    Hello,
    Idle,
    KeeperMessage,
    ManagerMessage,
    Stream,
    TrialEnded,
    TrialRevoked,
    TrialStarted,
    Usage,
    Welcome,
)
from trial_keeper.wire.workspace import (
    AttemptFolder,
    ManagerDocument,
    TrialDocument,
    Workspace,
    exit_from_bytes,
    replace_file,
)

T = TypeVar("T")
TOKEN = "a-very-secret-token"
EXPERIMENT = "TESTEXPT"
TRIAL = "trial1"
TASK = "main-0"
KEY = AttemptKey(TRIAL, attempt_id(0), TASK)


class _LoopThread:
    """One event loop in a thread, for every fake of the process: gRPC's asyncio side likes to have only one."""

    _instance: "_LoopThread | None" = None

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="fake managers", daemon=True).start()

    @classmethod
    def get(cls) -> "_LoopThread":
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there, wait for it here."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(DEADLINE_S)


class Store:
    """What survives the manager's death."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[AttemptKey, Stream], bytearray] = {}
        self.records: dict[AttemptKey, list[Record]] = {}
        self.ended: dict[AttemptKey, TrialEnded] = {}
        self.closed: set[AttemptKey] = set()

    def offsets(self, key: AttemptKey) -> dict[Stream, int]:
        """Durable bytes of each stream."""
        return {stream: len(content) for (owner, stream), content in self.bytes.items() if owner == key}


class Connection:
    """One keeper's stream."""

    def __init__(self, manager: "FakeManager", hello: Hello) -> None:
        self.manager = manager
        self.hello = hello
        self.outgoing: asyncio.Queue[ManagerMessage | None] = asyncio.Queue()
        self.bytes_left = manager.drop_after_bytes.pop(0) if manager.drop_after_bytes else None
        """The stream breaks instead of carrying more than this; None for never."""

    async def ready(self) -> None:
        """At any time."""

    def receive(self, message: KeeperMessage) -> None:
        """The servicer's word for what the keeper says."""
        self.manager.take(self, message)

    def closed(self) -> None:
        """The servicer's word for the end of the stream."""
        self.manager.forget(self)


class FakeManager:
    """Listens on 127.0.0.1, at a new port each time it is started, and writes manager.json.

    Attributes that a test sets are looked at when the next thing happens. `messages` are all of every keeper, in order.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.store = Store()
        self.numbers = AttemptNumbers(workspace)
        """Tests see keys with ids that they can spell; keepers, their own."""
        self.version = __version__
        self.certificate: Certificate | None = None
        """With which it listens, and which manager.json names."""
        self.messages: list[KeeperMessage] = []
        self.hellos = 0
        """Connections asked for, the refused ones included."""
        self.refuse_with: Exception | None = None
        self.drop_after_bytes: list[int] = []
        """For each of the next connections, after how many bytes of chunks it breaks."""
        self.commits = True
        """Whether bytes become durable and are acknowledged."""
        self.swallow_chunks = 0
        """So many of the next chunks get lost between the stream and the store."""
        self.closes = True
        """Whether attempts that are complete are closed."""
        self.address: str | None = None
        self._connections: list[Connection] = []
        self._receivers: dict[AttemptKey, AttemptIngest] = {}
        self._uncommitted: list[tuple[StreamWrite, bytes]] = []
        self._arrived: dict[tuple[AttemptKey, Stream], bytearray] = {}
        self._server: KeeperServer | None = None
        self._changed = threading.Condition()

    # ---- for the test

    def start(self) -> None:
        """Listen at a new address."""
        port = free_port_pair()
        _LoopThread.get().call(self._start(port))
        self.address = f"127.0.0.1:{port}"
        self.write_document()

    def write_document(self, *addresses: str) -> None:
        """manager.json, with these addresses or its own."""
        pem = None if self.certificate is None else self.certificate.certificate_pem
        document = ManagerDocument(EXPERIMENT, self.version, addresses or (str(self.address),), pem)
        replace_file(self.workspace.manager_json, document.to_bytes())

    def die(self) -> None:
        """Stop listening; forget everything that is not committed."""
        _LoopThread.get().call(self._stop())
        with self._changed:
            self._receivers.clear()
            self._uncommitted.clear()
            self._arrived = {owner: bytearray(content) for owner, content in self.store.bytes.items()}

    def close(self) -> None:
        """Release the port."""
        _LoopThread.get().call(self._stop())

    def send(self, message: ManagerMessage) -> None:
        """Say something to every connected keeper."""
        _LoopThread.get().loop.call_soon_threadsafe(self._send, message)

    def break_streams(self) -> None:
        """End every stream as if the network had."""
        _LoopThread.get().loop.call_soon_threadsafe(self._send, None)

    def commit_again(self) -> None:
        """Make durable what has arrived, and go on doing so."""
        with self._changed:
            self.commits = True
        _LoopThread.get().loop.call_soon_threadsafe(self._commit, KEY)

    def wait_for(self, is_true: Callable[[], T], what: str) -> T:
        """Wait until something that happens here makes it true; what it returned."""
        with self._changed:
            if not self._changed.wait_for(is_true, DEADLINE_S):
                kinds = [type(message).__name__ for message in self.messages]
                raise AssertionError(f"still not: {what}; messages: {kinds[-20:]}")
            return is_true()

    def wait_for_message(self, kind: type[T], what: str = "") -> T:
        """The first message of a kind."""
        return self.wait_for(lambda: self.all_of(kind) and self.all_of(kind)[0], what or kind.__name__)  # type: ignore[return-value]

    def wait_for_bytes(self, wanted: bytes, stream: Stream = Stream.METRICS, key: AttemptKey = KEY) -> None:
        """Wait until these bytes are in what arrived."""
        self.wait_for(lambda: wanted in self._arrived.get((key, stream), b""), f"{wanted!r} in {stream}")

    def arrived(self, stream: Stream = Stream.METRICS, key: AttemptKey = KEY) -> int:
        """How many bytes arrived, committed or not."""
        return len(self._arrived.get((key, stream), b""))

    def all_of(self, kind: type[T]) -> list[T]:
        """All messages of a kind, in order."""
        return [message for message in self.messages if isinstance(message, kind)]

    def stored(self, stream: Stream = Stream.METRICS, key: AttemptKey = KEY) -> bytes:
        """What was committed of a stream."""
        return bytes(self.store.bytes.get((key, stream), b""))

    # ---- for the servicer, in the loop's thread

    most_streams_of_job = 100

    def check_token(self, job_id: str, token: str) -> None:
        """Nothing: `admit` looks at the token, so that a Hello that is refused is seen as well."""

    def admit(self, hello: Hello, job_id: str, token: str) -> Connection | ProbeSession:
        """Let a keeper in, or raise what the test wants."""
        hello = replace(hello, attempts=tuple(map(self.numbers.spelled, hello.attempts)))
        with self._changed:
            self.hellos += 1
            self.messages.append(hello)
            self._changed.notify_all()
            if self.refuse_with is not None:
                raise self.refuse_with
            if token != TOKEN or job_id != hello.job_id:
                raise InvalidToken()
            if hello.is_probe:
                return ProbeSession()
            connection = Connection(self, hello)
            self._connections.append(connection)
            attempts = tuple(self._offsets(key) for key in hello.attempts)
            connection.outgoing.put_nowait(Welcome(self.version, attempts))
            return connection

    def take(self, connection: Connection, message: KeeperMessage) -> None:
        """A message arrived."""
        if isinstance(message, TrialStarted | Chunk | TrialEnded | Usage):
            message = replace(message, key=self.numbers.spelled(message.key))
        with self._changed:
            if connection not in self._connections:
                return
            if isinstance(message, Chunk) and connection.bytes_left is not None:
                connection.bytes_left -= len(message.data)
                if connection.bytes_left < 0:
                    self._end(connection)
                    return
            self.messages.append(message)
            match message:
                case Chunk() if self.swallow_chunks:
                    self.swallow_chunks -= 1
                case Chunk():
                    self._take_chunk(message)
                case TrialEnded():
                    self.store.ended[message.key] = message
                    receiver = self._receiver(message.key)
                    self._uncommitted += [
                        (commit, self._raw(commit)) for commit in receiver.end(message.final_sizes)
                    ]
                    self._commit(message.key)
                case TrialStarted() | Usage() | Idle() | TrialRevoked():
                    pass
                case _:
                    raise AssertionError(f"no keeper says {message} here")
            self._changed.notify_all()

    def forget(self, connection: Connection) -> None:
        """A stream is gone."""
        with self._changed:
            if connection in self._connections:
                self._connections.remove(connection)
            self._changed.notify_all()

    @property
    def connections(self) -> int:
        """Streams that are open."""
        return len(self._connections)

    # ---- inside

    async def _start(self, port: int) -> None:
        self._server = KeeperServer(self)
        await self._server.start("127.0.0.1", port, self.certificate)

    async def _stop(self) -> None:
        self._send(None)
        if self._server is not None:
            await self._server.stop()
            self._server = None

    def _send(self, message: ManagerMessage | None) -> None:
        if isinstance(message, Ack):
            own = replace(message.attempt, key=self.numbers.real(message.attempt.key))
            message = replace(message, attempt=own)
        with self._changed:
            for connection in list(self._connections):
                if message is None:
                    self._end(connection)
                else:
                    connection.outgoing.put_nowait(message)

    def _end(self, connection: Connection) -> None:
        connection.outgoing.put_nowait(None)
        self._connections.remove(connection)

    def _take_chunk(self, chunk: Chunk) -> None:
        receiver = self._receiver(chunk.key)
        before = receiver.received(chunk.stream)
        commits = receiver.take(chunk.stream, chunk.offset, chunk.data)
        self._arrived.setdefault((chunk.key, chunk.stream), bytearray()).extend(
            chunk.data[before - chunk.offset :]
        )
        self._uncommitted += [(commit, self._raw(commit)) for commit in commits]
        self._commit(chunk.key)

    def _raw(self, commit: StreamWrite) -> bytes:
        return bytes(self._arrived[commit.key, commit.stream][commit.offset : commit.new_offset])

    def _commit(self, key: AttemptKey) -> None:
        with self._changed:
            if self.commits:
                self._commit_all(key)
                self._changed.notify_all()

    def _commit_all(self, key: AttemptKey) -> None:
        receiver = self._receiver(key)
        for commit, raw in self._uncommitted:
            content = self.store.bytes.setdefault((commit.key, commit.stream), bytearray())
            assert len(content) == commit.offset, "a commit that does not follow the last one"
            content += raw
            self.store.records.setdefault(commit.key, []).extend(commit.records)
            self._receiver(commit.key).committed(commit)
        self._uncommitted.clear()
        if self.closes and receiver.is_complete:
            self.store.closed.add(key)
        self._send(Ack(self._offsets(key)))

    def _offsets(self, key: AttemptKey) -> AttemptOffsets:
        durable = dict(self._receiver(key).durable)
        return AttemptOffsets(self.numbers.real(key), durable, key in self.store.closed)

    def _receiver(self, key: AttemptKey) -> AttemptIngest:
        receiver = self._receivers.get(key)
        if receiver is None:
            receiver = self._receivers[key] = AttemptIngest.restored(key, self.store.offsets(key))
        return receiver


class KeeperProcess:
    """A real keeper."""

    def __init__(
        self,
        folder: Path,
        settings: KeeperSettings,
        environ: dict[str, str],
        prefix: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """Its output goes to files in `folder`. `prefix` is a command that runs the keeper's, `options` are Popen's."""
        self.settings = settings
        self.stdout_file, self.stderr_file = folder / "keeper-stdout", folder / "keeper-stderr"
        with self.stdout_file.open("ab") as stdout, self.stderr_file.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "trial_keeper", *arguments],
                **{
                    "stdin": subprocess.DEVNULL,
                    "stdout": stdout,
                    "stderr": stderr,
                    "env": environ | settings.to_environ(),
                }
                | options,
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(DEADLINE_S)

    @property
    def stderr(self) -> str:
        """What it has said."""
        return self.stderr_file.read_text()

    def kill(self) -> None:
        """Leave nothing of it, in case a test failed."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class Site:
    """A mount with the workspace of one experiment, its code, its manager, and the keepers a test starts."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder / EXPERIMENT)
        self.workspace.trials.mkdir(parents=True)
        self.code = folder / "code"
        self.code.mkdir()
        self.manager = FakeManager(self.workspace)
        # What a container has of its own; the coverage and the cluster of whoever runs the tests are none of it.
        self.environ = {
            name: value
            for name, value in without_settings(os.environ).items()
            if not name.startswith(("NNI_", "PAI_", "FC_", "CUDA_"))
        }
        self._keepers: list[KeeperProcess] = []

    def add_trial(self, command: str, *, trial_id: str = TRIAL, **fields: Any) -> None:
        """What the manager writes for a trial."""
        folder = self.workspace.trial(trial_id)
        folder.path.mkdir()
        folder.parameter_cfg.write_text('{"parameter_id": 0, "parameters": {"x": 1}}')
        document = TrialDocument(
            **{
                "trial_id": trial_id,
                "sequence_id": 7,
                "command": command,
                "code_dir": str(self.code),
            }
            | fields
        )
        folder.trial_json.write_bytes(document.to_bytes())

    def add_python_trial(self, script: str, **fields: Any) -> None:
        """A trial that runs this program."""
        (self.code / "train.py").write_text(script)
        self.add_trial(f"{shlex.quote(sys.executable)} train.py", **fields)

    def settings(self, **overrides: Any) -> KeeperSettings:
        """The settings of the keeper of the trial."""
        return KeeperSettings(
            **{
                "experiment_id": EXPERIMENT,
                "job_id": TRIAL,
                "workspace": str(self.workspace.root),
                "token": TOKEN,
                "trial_id": TRIAL,
            }
            | overrides
        )

    def start_keeper(self, *, options: dict[str, Any] | None = None, **overrides: Any) -> KeeperProcess:
        """Start a keeper; `overrides` are settings, `options` are KeeperProcess's."""
        keeper = KeeperProcess(self.code.parent, self.settings(**overrides), self.environ, **(options or {}))
        self._keepers.append(keeper)
        return keeper

    def attempt(self, key: AttemptKey = KEY) -> AttemptFolder:
        """The folder of an attempt."""
        return self.manager.numbers.folder(key)

    def has_ended(self, key: AttemptKey = KEY) -> bool:
        """True once exit.json is there."""
        return self.attempt(key).exit_json.exists()

    def exit(self, key: AttemptKey = KEY) -> TrialEnded:
        """What exit.json says, which the keeper has signed."""
        ended = exit_from_bytes(self.attempt(key).exit_json.read_bytes(), TOKEN)
        return replace(ended, key=self.manager.numbers.spelled(ended.key))

    def file(self, stream: Stream = Stream.METRICS, key: AttemptKey = KEY) -> bytes:
        """What the trial wrote."""
        return self.attempt(key).stream(stream).read_bytes()

    def gate(self, name: str) -> Path:
        """A closed gate. A trial waits at it by opening it for reading, a test opens it with `open_gate`."""
        path = self.code / name
        os.mkfifo(path)
        return path

    def open_gate(self, name: str) -> None:
        """Wait until the trial is at the gate, and let it through."""
        with (self.code / name).open("w"):
            pass

    def close(self) -> None:
        """End every process and free the port."""
        for keeper in self._keepers:
            keeper.kill()
        self.manager.close()
