"""Does what the keeper decides: the one loop of a keeper's process."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from trial_keeper import __version__
from trial_keeper.core.environment import trial_environ
from trial_keeper.core.events import (
    Effect,
    Event,
    Exit,
    LogDecision,
    ManagerMoved,
    OpenLink,
    OutOfMemory,
    RecordExit,
    Send,
    SendChunk,
    SignalReceived,
    SignalTrial,
    SpawnFailed,
    SpawnTrial,
    StreamCut,
    StreamsGrew,
    TimePassed,
    TrialAssigned,
    TrialExited,
    TrialSpawned,
)
from trial_keeper.core.keeper import Keeper
from trial_keeper.errors import KeeperError
from trial_keeper.host.attempt_files import Tail, not_writable
from trial_keeper.host.cgroups import MemoryCgroup
from trial_keeper.host.file_news import SLOW_LOOK_S, FileNews
from trial_keeper.host.guard import Guard
from trial_keeper.host.process import TrialProcess, adopt_orphans
from trial_keeper.host.relay import Relay
from trial_keeper.host.usage import UsageWatch
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import AttemptKey, Chunk, Hello, Offsets, Stream, Usage
from trial_keeper.wire.workspace import AttemptFolder, TrialDocument, Workspace, exit_to_bytes, replace_file

if TYPE_CHECKING:
    from trial_keeper.host.link import ManagerLink

# While a stop is under way only: nobody tells when the last process of a group has ended.
_GROUP_LOOK_S = 0.05
_MANAGER_LOOK_S = 1.0
_MESSAGE_BYTES = 4096
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Host:
    """One keeper process around one `Keeper`.

    The trial is started by `begin`, before asyncio and gRPC are even imported: a job without reuse needs nobody's word to start.
    """

    def __init__(
        self,
        settings: KeeperSettings,
        workspace: Workspace,
        trial: TrialDocument,
        key: AttemptKey,
        folder: AttemptFolder,
    ) -> None:
        # Before any thread runs. Process 1 needs none: all of its namespace ends with it.
        self._guard = Guard() if os.getpid() != 1 else None
        self._settings = settings
        self._workspace = workspace
        self._trial = trial
        self._key = key
        self._folder = folder
        self._keeper = Keeper(settings)
        self._tail = Tail(folder, tuple(Stream))
        self._news = FileNews()
        self._process: TrialProcess | None = None
        self._memory = MemoryCgroup.own()
        self._oom_kills = 0
        self._stdout = Relay(1, folder.stream(Stream.STDOUT)) if settings.relay_output else None
        self._stderr = Relay(2, folder.stream(Stream.STDERR) if settings.relay_output else None)
        self._link: ManagerLink | None = None
        self._waiting_for_loop: list[Effect] = []
        self._early_signals: list[int] = []
        self._exit_code: int | None = None
        self._failure: Exception | None = None
        self._done = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._sizes: Offsets = {}

    def begin(self) -> None:
        """Start the trial."""
        adopt_orphans()
        for number in STOP_SIGNALS:
            signal.signal(number, lambda received, _: self._early_signals.append(received))
        self._handle(TrialAssigned(self._key))

    async def run(self) -> int:
        """Go on until the keeper decides to end; its exit code. Whatever is raised, the trial is gone afterwards."""
        try:
            return await self._run()
        finally:
            if self._process is not None:
                self._process.signal(kill=True)

    async def _run(self) -> int:
        # gRPC takes 80 ms to import, while the trial already runs.
        from trial_keeper.host.link import ManagerLink

        loop = asyncio.get_running_loop()
        self._link = ManagerLink(self._workspace, self._settings, self._handle)
        loop.add_signal_handler(signal.SIGCHLD, self._look_at_process)
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._handle, SignalReceived(number))
        for early in self._early_signals:
            self._handle(SignalReceived(early))
        deferred, self._waiting_for_loop = self._waiting_for_loop, []
        self._perform(deferred)
        self._look_at_process()
        watchers = [loop.create_task(self._watch_files()), loop.create_task(self._watch_manager())]
        usage = UsageWatch(
            self._key,
            self._folder.path,
            self._trial.gpu_indices,
            lambda seen: loop.call_soon_threadsafe(self._tell_usage, seen),
        )
        self._set_timer()
        try:
            await self._done.wait()
        finally:
            usage.stop()
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await self._link.close()
            relays = [relay for relay in (self._stdout, self._stderr) if relay is not None]
            await asyncio.gather(*(loop.run_in_executor(None, relay.finish) for relay in relays))
            self._tail.close()
            self._news.close()
        if self._failure is not None:
            raise self._failure
        return self._exit_code or 0

    # ---- events

    def _handle(self, event: Event) -> None:
        try:
            self._perform(self._keeper.handle(event, time.monotonic()))
            self._set_timer()
        except Exception as error:  # noqa: BLE001 - raised again by `run`
            # Whoever posted the event could only lose it, and leave a keeper that neither works nor ends.
            self._failure = self._failure or error
            self._done.set()

    def _set_timer(self) -> None:
        if self._link is None or self._done.is_set():
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_s = self._keeper.next_deadline_s
        if deadline_s is not None:
            delay_s = max(deadline_s - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle, TimePassed())

    def _look_at_process(self) -> None:
        status = self._process.poll() if self._process is not None else None
        if self._process is None or status is None:
            return
        leftovers = self._process.leftovers()
        self._process = None
        self._news.look_now()
        if self._guard is not None:
            self._guard.rest()
        self._handle(
            TrialExited(
                self._key,
                time.time(),
                exit_code=status if status >= 0 else None,
                signal=-status if status < 0 else None,
                sizes=self._tail.sizes(self._settings.streams),
                stderr_tail=self._tail.last_text(Stream.STDERR, _MESSAGE_BYTES),
                out_of_memory=self._memory_shortage(),
                leftovers=tuple(f"{leftover.pid} ({leftover.command})" for leftover in leftovers),
            )
        )

    def _memory_shortage(self) -> OutOfMemory | None:
        memory = self._memory
        if memory is None or memory.oom_kills() == self._oom_kills:
            return None
        return OutOfMemory(memory.limit_bytes(), memory.peak_bytes())

    async def _watch_files(self) -> None:
        relays = [relay for relay in (self._stdout, self._stderr) if relay is not None]
        relayed = (Stream.STDOUT, Stream.STDERR) if self._settings.relay_output else ()
        for stream in {*self._settings.streams, *relayed}:
            self._news.add(self._folder.stream(stream))
        while self._process is not None:
            sizes = self._tail.sizes(self._settings.streams)
            grew = sizes != self._sizes
            if grew:
                self._sizes = sizes
                self._handle(StreamsGrew(self._key, sizes))
            for relay in relays:
                relay.look()
            # The last process of a group need not be a child of this one, so its end comes without a signal.
            await self._news.wait(
                grew=grew, longest_s=_GROUP_LOOK_S if self._process.ends_silently else SLOW_LOOK_S
            )
            self._look_at_process()
        for relay in relays:
            relay.look()

    def _tell_usage(self, usage: Usage) -> None:
        if self._keeper.link.is_up and self._process is not None:
            self._opened_link().send(usage)

    async def _watch_manager(self) -> None:
        seen = self._manager_stamp()
        while True:
            await asyncio.sleep(_MANAGER_LOOK_S)
            if self._keeper.link.is_up:
                continue
            stamp = self._manager_stamp()
            if stamp not in (None, seen):
                self._handle(ManagerMoved())
            seen = stamp or seen

    def _manager_stamp(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = self._workspace.manager_json.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    # ---- effects

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendChunk():
                    self._send_chunk(effect)
                case Send():
                    self._opened_link().send(effect.message)
                case OpenLink():
                    self._open_link(effect)
                case SpawnTrial():
                    self._spawn()
                case SignalTrial():
                    if self._process is not None:
                        self._process.signal(kill=effect.kill)
                        self._news.look_now()
                case RecordExit():
                    self._writing(partial(replace_file, self._folder.exit_json, exit_to_bytes(effect.ended)))
                case LogDecision():
                    self._log(effect)
                case Exit():
                    self._exit_code = effect.code
                    self._done.set()

    def _spawn(self) -> None:
        self._oom_kills = self._memory.oom_kills() if self._memory is not None else 0
        if self._guard is not None:
            self._guard.watch(str(self._folder.path))
        try:
            self._process = TrialProcess.started(
                self._trial.command,
                self._trial.code_dir,
                trial_environ(
                    os.environ, self._settings.experiment_id, self._trial, self._folder, self._workspace
                ),
                self._folder.stream(Stream.STDOUT),
                self._folder.stream(Stream.STDERR),
            )
        except KeeperError as error:
            self._handle(SpawnFailed(self._key, time.time(), error.exit_code, str(error)))
            return
        if self._guard is not None:
            self._guard.watch(str(self._folder.path), self._process.pid)
        self._handle(TrialSpawned(self._key, time.time()))

    def _opened_link(self) -> "ManagerLink":
        if self._link is None:
            raise AssertionError("a message before the link was opened")
        return self._link

    def _open_link(self, effect: OpenLink) -> None:
        if self._link is None:
            self._waiting_for_loop.append(effect)
            return
        settings = self._settings
        self._link.open(
            Hello(
                __version__, settings.experiment_id, settings.job_id, self._key.task, attempts=effect.attempts
            )
        )

    def _send_chunk(self, effect: SendChunk) -> None:
        chunk = effect.chunk
        if not self._keeper.is_due(effect):
            return  # an earlier chunk of the same round could not be read
        data = self._tail.read(chunk.stream, chunk.offset, chunk.size_bytes)
        if len(data) == chunk.size_bytes:
            self._opened_link().send(Chunk(effect.key, chunk.stream, chunk.offset, data))
        elif (size := self._tail.cut_size(chunk.stream, chunk.offset + chunk.size_bytes)) is not None:
            self._handle(StreamCut(effect.key, chunk.stream, chunk.offset, size))
        else:
            # What follows would leave a hole: begin again from what the manager has.
            self._opened_link().drop(
                f"cannot read {chunk.size_bytes} bytes of {chunk.stream.value} at {chunk.offset}: "
                "the shared storage fails; check it"
            )

    def _log(self, effect: LogDecision) -> None:
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} trial-keeper [{self._key}] {effect.text}\n"
        self._stderr.say(line)
        if effect.key is not None:
            self._writing(partial(_append, self._folder.stream(Stream.KEEPER), line))

    def _writing(self, write: Callable[[], None]) -> None:
        """A full disk ends no keeper: what cannot be written is still told over the link."""
        try:
            write()
        except OSError as error:
            self._stderr.say(f"trial-keeper: {not_writable(self._workspace.root, error)}\n")


def _append(path: os.PathLike[str], line: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)
