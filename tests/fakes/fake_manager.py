"""A fake manager: a gRPC server with faults that a test controls, and the workspace of its experiment.

The manager's real ingest code processes received bytes. Committed bytes survive a restart of the fake manager, as in a database.
Other bytes are lost.
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
from forked_programs import ForkedProcess, Program
from free_ports import free_port_pair

from nni_manager.domain.admission_errors import InvalidToken
from nni_manager.domain.ingest import AttemptIngest, StreamWrite
from nni_manager.engine.keeper_admission import ProbeSession
from nni_manager.grpc_server.servicer import KeeperServer
from nni_manager.store.certificate import Certificate
from nni_sdk.records import Record
from trial_keeper import __version__
from trial_keeper.settings import KeeperSettings, without_settings
from trial_keeper.wire.documents import ManagerDocument, TrialDocument, exit_from_bytes
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
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import AttemptFolder, Workspace

T = TypeVar("T")
TOKEN = "a-very-secret-token"
EXPERIMENT = "TESTEXPT"
TRIAL = "trial1"
TASK = "main-0"
KEY = AttemptKey(TRIAL, attempt_id(0), TASK)


class _LoopThread:
    """One event loop in a thread for all fakes of the process, because gRPC's asyncio support allows only
    one.
    """

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
        """Run the coroutine on the shared event loop and wait for its result."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(DEADLINE_S)


class Store:
    """The data that survives the manager's death."""

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
        """The number of bytes after which the stream breaks; None for never."""

    async def ready(self) -> None:
        """Always ready."""

    def receive(self, message: KeeperMessage) -> None:
        """Called by the servicer for each message of the keeper."""
        self.manager.take(self, message)

    def closed(self) -> None:
        """Called by the servicer at the end of the stream."""
        self.manager.forget(self)


class FakeManager:
    """Listens on 127.0.0.1, at a new port after each start, and writes manager.json.

    Changed attributes take effect at the next event. `messages` contains the messages of all keepers, in
    order.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.store = Store()
        self.numbers = AttemptNumbers(workspace)
        """Tests see readable attempt ids; keepers see their own."""
        self.version = __version__
        self.certificate: Certificate | None = None
        """The certificate for TLS, which manager.json names."""
        self.messages: list[KeeperMessage] = []
        self.hellos = 0
        """The number of requested connections, refused ones included."""
        self.refuse_with: Exception | None = None
        self.drop_after_bytes: list[int] = []
        """For each of the next connections, the number of chunk bytes after which it breaks."""
        self.commits = True
        """Whether bytes are stored and acknowledged."""
        self.swallow_chunks = 0
        """The number of next chunks that are lost between stream and store."""
        self.closes = True
        """Whether complete attempts are closed."""
        self.address: str | None = None
        self._connections: list[Connection] = []
        self._receivers: dict[AttemptKey, AttemptIngest] = {}
        self._uncommitted: list[tuple[StreamWrite, bytes]] = []
        self._arrived: dict[tuple[AttemptKey, Stream], bytearray] = {}
        self._server: KeeperServer | None = None
        self._changed = threading.Condition()
        self._unknown = ""
        """What to do about a message that this class does not know."""

    # ---- methods for tests

    def start(self) -> None:
        """Listen at a new address."""
        port = free_port_pair()
        _LoopThread.get().call(self._start(port))
        self.address = f"127.0.0.1:{port}"
        self.write_document()

    def write_document(self, *addresses: str) -> None:
        """Write manager.json with these addresses, or with the fake manager's own address if none is given."""
        pem = None if self.certificate is None else self.certificate.certificate_pem
        document = ManagerDocument(EXPERIMENT, self.version, addresses or (str(self.address),), pem)
        replace_file(self.workspace.manager_json, document.to_bytes())

    def die(self) -> None:
        """Stop listening, and drop everything that is not committed."""
        _LoopThread.get().call(self._stop())
        with self._changed:
            self._receivers.clear()
            self._uncommitted.clear()
            self._arrived = {owner: bytearray(content) for owner, content in self.store.bytes.items()}

    def close(self) -> None:
        """Release the port."""
        _LoopThread.get().call(self._stop())

    def send(self, message: ManagerMessage) -> None:
        """Send a message to every connected keeper."""
        _LoopThread.get().loop.call_soon_threadsafe(self._send, message)

    def break_streams(self) -> None:
        """End every stream, like a network failure."""
        _LoopThread.get().loop.call_soon_threadsafe(self._send, None)

    def commit_again(self) -> None:
        """Commit all received bytes, and from now on also all bytes that arrive."""
        with self._changed:
            self.commits = True
        _LoopThread.get().loop.call_soon_threadsafe(self._commit, KEY)

    def wait_for(self, is_true: Callable[[], T], what: str) -> T:
        """Wait until `is_true` returns a true value, and return that value. `is_true` is called again after each event."""
        with self._changed:
            has_ended = self._changed.wait_for(lambda: self._unknown or is_true(), DEADLINE_S)
            if self._unknown:
                raise AssertionError(self._unknown)
            if not has_ended:
                kinds = [type(message).__name__ for message in self.messages]
                raise AssertionError(f"still not: {what}; messages: {kinds[-20:]}")
            return is_true()

    def wait_for_message(self, kind: type[T], what: str = "") -> T:
        """Wait for the first message of a kind, and return it."""
        return self.wait_for(lambda: self.all_of(kind) and self.all_of(kind)[0], what or kind.__name__)  # type: ignore[return-value]

    def wait_for_bytes(self, wanted: bytes, stream: Stream = Stream.METRICS, key: AttemptKey = KEY) -> None:
        """Wait until the received bytes of a stream contain `wanted`."""
        self.wait_for(lambda: wanted in self._arrived.get((key, stream), b""), f"{wanted!r} in {stream}")

    def arrived(self, stream: Stream = Stream.METRICS, key: AttemptKey = KEY) -> int:
        """The number of received bytes, committed or not."""
        return len(self._arrived.get((key, stream), b""))

    def all_of(self, kind: type[T]) -> list[T]:
        """All messages of a kind, in order."""
        return [message for message in self.messages if isinstance(message, kind)]

    def stored(self, stream: Stream = Stream.METRICS, key: AttemptKey = KEY) -> bytes:
        """The committed bytes of a stream."""
        return bytes(self.store.bytes.get((key, stream), b""))

    # ---- methods that the servicer calls in the thread of the event loop

    most_streams_of_job = 100

    def check_token(self, job_id: str, token: str) -> None:
        """No check here: `admit` checks the token, so that refused Hellos are recorded too."""

    def admit(self, hello: Hello, job_id: str, token: str) -> Connection | ProbeSession:
        """Admit a keeper, or raise the error that the test has set."""
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
        """Handle a received message."""
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
                    self._unknown = f"add a case for {type(message).__name__} to FakeManager.take"
            self._changed.notify_all()

    def forget(self, connection: Connection) -> None:
        """Remove a closed stream."""
        with self._changed:
            if connection in self._connections:
                self._connections.remove(connection)
            self._changed.notify_all()

    @property
    def connections(self) -> int:
        """The number of open streams."""
        return len(self._connections)

    # ---- internal methods

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
    """A real keeper process."""

    def __init__(
        self,
        folder: Path,
        settings: KeeperSettings,
        environ: dict[str, str],
        prefix: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
        *,
        is_forked: bool = False,
        **options: Any,
    ) -> None:
        """The output of the keeper goes to files in `folder`. `prefix` is the command that runs the keeper. `options` are
        arguments of Popen. If `is_forked` is true and none of these is given, the keeper is a fork (see `forked_programs`).
        """
        self.settings = settings
        self.stdout_file, self.stderr_file = folder / "keeper-stdout", folder / "keeper-stderr"
        environ = environ | settings.to_environ()
        # The dynamic linker reads variables such as LD_PRELOAD only when a program starts. A fork would ignore them, so the
        # keeper is started as a new program.
        is_new = prefix or arguments or options or any(name.startswith("LD_") for name in environ)
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with self.stdout_file.open("ab") as stdout, self.stderr_file.open("ab") as stderr:
            if is_forked and not is_new:
                self.process = ForkedProcess(Program.KEEPER, stdout=stdout, stderr=stderr, environ=environ)
            else:
                self.process = subprocess.Popen(
                    [*prefix, sys.executable, "-m", "trial_keeper", *arguments],
                    **{"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr, "env": environ}
                    | options,
                )

    @property
    def pid(self) -> int:
        """The process id of the keeper."""
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the keeper."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(DEADLINE_S)

    @property
    def stderr(self) -> str:
        """The standard error output."""
        return self.stderr_file.read_text()

    def kill(self) -> None:
        """Kill the keeper if it still runs after a failed test."""
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
    """A storage folder with the workspace of one experiment, its code, a fake manager, and the keepers that a test starts."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder / EXPERIMENT)
        self.workspace.trials.mkdir(parents=True)
        self.code = folder / "code"
        self.code.mkdir()
        self.manager = FakeManager(self.workspace)
        # A container does not have the variables of the person who runs the tests, for example those of coverage or of a cluster.
        self.environ = {
            name: value
            for name, value in without_settings(os.environ).items()
            if not name.startswith(("NNI_", "PAI_", "FC_", "CUDA_"))
        }
        self.forks_keepers = True
        """Whether keepers are forks if they can be; otherwise they are children of this process."""
        self._keepers: list[KeeperProcess] = []

    def add_trial(self, command: str, *, trial_id: str = TRIAL, **fields: Any) -> None:
        """Write the files that the manager writes for a trial."""
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
        """Add a trial that runs this Python program."""
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
        """Start a keeper. `overrides` replace settings of the keeper; `options` are arguments of `KeeperProcess`."""
        keeper = KeeperProcess(
            self.code.parent,
            self.settings(**overrides),
            self.environ,
            is_forked=self.forks_keepers,
            **(options or {}),
        )
        self._keepers.append(keeper)
        return keeper

    def attempt(self, key: AttemptKey = KEY) -> AttemptFolder:
        """The folder of an attempt."""
        return self.manager.numbers.folder(key)

    def has_ended(self, key: AttemptKey = KEY) -> bool:
        """True if exit.json exists."""
        return self.attempt(key).exit_json.exists()

    def exit(self, key: AttemptKey = KEY) -> TrialEnded:
        """The signed content of exit.json."""
        ended = exit_from_bytes(self.attempt(key).exit_json.read_bytes(), TOKEN)
        return replace(ended, key=self.manager.numbers.spelled(ended.key))

    def file(self, stream: Stream = Stream.METRICS, key: AttemptKey = KEY) -> bytes:
        """The bytes that the trial wrote."""
        return self.attempt(key).stream(stream).read_bytes()

    def gate(self, name: str) -> Path:
        """Create a closed gate, which is a FIFO. A trial waits at the gate by opening the FIFO for reading. A test opens the gate
        with `open_gate`.
        """
        path = self.code / name
        os.mkfifo(path)
        return path

    def open_gate(self, name: str) -> None:
        """Wait until the trial is at the gate, and open it."""
        with (self.code / name).open("w"):
            pass

    def close(self) -> None:
        """End every process and release the port."""
        for keeper in self._keepers:
            keeper.kill()
        self.manager.close()
