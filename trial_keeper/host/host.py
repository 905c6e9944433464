"""Does what the keeper decides: the one loop of a keeper's process."""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from trial_keeper import __version__
from trial_keeper.core.environment import trial_environ
from trial_keeper.core.events import (
    Effect,
    Event,
    Exit,
    ForeseeTrial,
    LogDecision,
    ManagerMoved,
    OpenLink,
    OutOfMemory,
    PrepareTrial,
    RecordExit,
    ReleaseAttempt,
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
    TrialCleared,
    TrialExited,
    TrialSpawned,
    TrialUnprepared,
)
from trial_keeper.core.keeper import Keeper
from trial_keeper.errors import KeeperError
from trial_keeper.exit_codes import of_signal
from trial_keeper.host.attempt_files import (
    Tail,
    claim_attempt,
    glimpse_trial,
    not_writable,
    read_trial,
)
from trial_keeper.host.cgroups import MemoryCgroup
from trial_keeper.host.file_news import SLOW_LOOK_S, FileNews
from trial_keeper.host.folder_names import FolderNames
from trial_keeper.host.guard import Guard
from trial_keeper.host.mount import with_code
from trial_keeper.host.process import TrialProcess, adopt_orphans, ancestors, descendants
from trial_keeper.host.relay import Relay
from trial_keeper.host.usage import UsageSampler, UsageWatch
from trial_keeper.host.warm_starts import WarmStarts
from trial_keeper.settings import KeeperSettings, without_settings
from trial_keeper.wire.messages import AttemptKey, Chunk, Hello, Offsets, Stream, TrialEnded, Usage
from trial_keeper.wire.own_files import open_inside
from trial_keeper.wire.small_files import write_all
from trial_keeper.wire.workspace import (
    MARKER,
    AttemptFolder,
    DocumentInvalid,
    TrialDocument,
    Workspace,
    exit_to_bytes,
    replace_file,
    stop_from_bytes,
)

if TYPE_CHECKING:
    from trial_keeper.host.link import ManagerLink

# A trial that floods one of its files costs this many looks at most; a person who reads a log along does not notice.
_METRICS_REST_S = 0.01
_LOGS_REST_S = 0.1
# While a stop is under way only: nobody tells when the last process of a group has ended.
_GROUP_LOOK_S = 0.05
# Without a trial nothing grows; whatever brings one says so.
_IDLE_LOOK_S = 3600.0
_MANAGER_LOOK_S = 1.0
# Who else is counted in a control group changes seldom, and short trials begin many times a second.
_SHARED_MEMORY_LOOK_S = 1.0
# The thread that writes them takes turns with this one, while a trial may be about to start.
_LINES_REST_S = 0.1
_MESSAGE_BYTES = 4096
# How a command ends that was killed, and a shell whose command was.
_KILLED = (-signal.SIGKILL, of_signal(signal.SIGKILL))
_NAMES_SHOWN = 5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What was there before a trial, and is not its doing. The end of one trial is the beginning of the next."""

    in_tmp: frozenset[str]
    """What lies in the temporary folder."""
    oom_kills: int
    pids: frozenset[int] = frozenset()
    """The processes of this machine; empty if nobody looked."""


@dataclass(slots=True)
class _Attempt:
    """What this process holds of an attempt until it is closed."""

    key: AttemptKey
    trial: TrialDocument
    folder: AttemptFolder
    tail: Tail = field(init=False)
    sizes: Offsets = field(default_factory=dict)
    shares_memory: bool = False
    found: _Surroundings = _Surroundings(frozenset(), 0)
    """When it began."""
    spawned_s: float = 0.0
    """By the monotonic clock."""
    sampler: UsageSampler | None = None
    usage: UsageWatch | None = None

    def __post_init__(self) -> None:
        self.tail = Tail(self.folder, tuple(Stream))


class Host:
    """One keeper process around one `Keeper`.

    A job without reuse needs nobody's word to start: its trial is started by `begin`, before asyncio and gRPC are even imported.
    """

    def __init__(self, settings: KeeperSettings, workspace: Workspace, task: str) -> None:
        # Before any thread runs. Process 1 needs none: all of its namespace ends with it.
        self._guard = Guard() if os.getpid() != 1 else None
        self._settings = settings
        self._environ = without_settings(os.environ)
        self._workspace = workspace
        self._task = task
        self._keeper = Keeper(settings, time.monotonic())
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._unclaimed: set[AttemptKey] = set()
        """Those that could not even be claimed: a folder of that name would be another's."""
        self._unrecorded: dict[AttemptKey, TrialEnded] = {}
        """Ends that the workspace did not take yet."""
        self._current: _Attempt | None = None
        self._at_end: _Surroundings | None = None
        """While the end of a trial is handled, and perhaps the next one begins."""
        self._foreseen: TrialDocument | None = None
        """The next trial, as it was given."""
        self._tmp = FolderNames(tempfile.gettempdir()) if settings.is_reused else None
        self._process: TrialProcess | None = None
        self._news = FileNews()
        self._memory = MemoryCgroup.own()
        self._shared_memory = False
        self._shared_memory_at_s = -_SHARED_MEMORY_LOOK_S
        self._stdout = Relay(1) if settings.relay_output else None
        self._stderr = Relay(2)
        self._showing: asyncio.TimerHandle | None = None
        self._shown_at_s = -_LINES_REST_S
        """When its thread was last told of lines, by the loop's clock."""
        self._warm: WarmStarts | None = None
        self._warm_marker: tuple[str, ...] = ()
        if settings.warm_imports and settings.is_reused:
            # A fork of it shows the interpreter's environment to whoever looks, not the trial's.
            self._warm_marker = (workspace.warm_marker(settings.job_id),)
            environ = self._common_environ() | {MARKER: self._warm_marker[0]}
            self._warm = WarmStarts(settings.warm_imports, environ, self._say)
        self._link: ManagerLink | None = None
        self._waiting_for_loop: list[Effect] = []
        self._early_signals: list[int] = []
        self._exit_code: int | None = None
        self._failure: Exception | None = None
        self._done = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_s = 0.0
        adopt_orphans()
        for number in STOP_SIGNALS:
            signal.signal(number, lambda received, _: self._early_signals.append(received))

    def begin(self, trial: TrialDocument, key: AttemptKey, folder: AttemptFolder) -> None:
        """Start the one trial of a job without reuse."""
        self._attempts[key] = _Attempt(key, trial, folder)
        self._handle(TrialAssigned(key))

    async def run(self) -> int:
        """Go on until the keeper decides to end; its exit code. Whatever is raised, no trial is left afterwards."""
        try:
            return await self._run()
        finally:
            if self._process is not None:
                self._process.signal(kill=True)
            if self._warm is not None:
                self._warm.close()

    async def _run(self) -> int:
        # gRPC takes 80 ms to import, while the trial already runs.
        from trial_keeper.host.link import ManagerLink

        loop = asyncio.get_running_loop()
        self._link = ManagerLink(self._workspace, self._settings, self._handle)
        self._link.pace_logs(are_paced=self._process is not None)
        loop.add_signal_handler(signal.SIGCHLD, self._note_ended_child)
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._handle, SignalReceived(number))
        for early in self._early_signals:
            self._handle(SignalReceived(early))
        deferred, self._waiting_for_loop = self._waiting_for_loop, []
        self._perform(deferred)
        self._watch_usage()
        self._look_at_process()
        watchers = [loop.create_task(self._watch_files()), loop.create_task(self._watch_manager())]
        self._handle(TimePassed())
        try:
            await self._done.wait()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await self._link.close()
            relays = [relay for relay in (self._stdout, self._stderr) if relay is not None]
            await asyncio.gather(*(loop.run_in_executor(None, relay.finish) for relay in relays))
            for attempt in list(self._attempts.values()):
                self._release(attempt.key)
            self._news.close()
        if self._failure is not None:
            raise self._failure
        return self._exit_code or 0

    # ---- events

    def _handle(self, event: Event) -> None:
        try:
            self._perform(self._keeper.handle(event, time.monotonic()))
            if self._link is not None:
                self._link.gather(may_gather=self._keeper.has_plenty)
            self._set_timer()
        except Exception as error:  # noqa: BLE001 - raised again by `run`
            # Whoever posted the event could only lose it, and leave a keeper that neither works nor ends.
            self._failure = self._failure or error
            self._done.set()

    def _set_timer(self) -> None:
        if self._link is None or self._done.is_set():
            return
        deadline_s = self._keeper.next_deadline_s
        if self._timer is not None:
            if deadline_s == self._timer_deadline_s:
                return
            self._timer.cancel()
            self._timer = None
        if deadline_s is not None:
            self._timer_deadline_s = deadline_s
            delay_s = max(deadline_s - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._pass_time)

    def _pass_time(self) -> None:
        self._timer = None
        self._handle(TimePassed())

    def _note_ended_child(self) -> None:
        self._look_at_process()
        if self._process is not None and self._process.ends_silently:
            self._news.look_now()  # from now on every moment

    def _look_at_process(self) -> None:
        process, attempt = self._process, self._current
        status = process.poll() if process is not None else None
        if process is None or attempt is None or status is None:
            return
        leftovers = tuple(f"{leftover.pid} ({leftover.command})" for leftover in process.leftovers())
        self._process = self._current = None
        if self._guard is not None:
            self._guard.rest()
        at_end = self._at_end = self._surroundings(process.seen)
        in_tmp = at_end.in_tmp - attempt.found.in_tmp
        if leftovers or in_tmp:
            self._handle(TrialCleared(attempt.key, leftovers, _listed(in_tmp)))
        self._handle(
            TrialExited(
                attempt.key,
                time.monotonic() - attempt.spawned_s,
                exit_code=status if status >= 0 else None,
                signal=-status if status < 0 else None,
                sizes=attempt.tail.sizes(self._settings.streams),
                stderr_tail=attempt.tail.last_text(Stream.STDERR, _MESSAGE_BYTES) if status else "",
                out_of_memory=self._memory_shortage(attempt, at_end, status),
            )
        )
        self._at_end = None
        # The next trial may run by now: what could wait comes after its start.
        if attempt.usage is not None:
            attempt.usage.stop()
        for stream in self._watched_streams:
            self._news.remove(attempt.folder.stream(stream))
        self._news.look_now()
        if self._current is None:
            self._opened_link().pace_logs(are_paced=False)

    def _surroundings(self, pids: frozenset[int] = frozenset()) -> _Surroundings:
        return _Surroundings(
            # Where the next trial of the job could find it.
            self._tmp.names() if self._tmp is not None else frozenset(),
            self._memory.oom_kills() if self._memory is not None else 0,
            pids,
        )

    def _memory_shortage(self, attempt: _Attempt, at_end: _Surroundings, status: int) -> OutOfMemory | None:
        memory = self._memory
        if memory is None or at_end.oom_kills == attempt.found.oom_kills:
            return None
        if status not in _KILLED and (attempt.shares_memory or self._shares_memory()):
            return None  # it may have been another's process, and this trial failed by itself
        return OutOfMemory(memory.limit_bytes(), memory.peak_bytes())

    def _shares_memory(self, longest_ago_s: float = 0.0) -> bool:
        """Whether others are counted in this keeper's control group, as on a laptop; in a container it has one of its own.

        As it was when that was last looked at, if that is no longer ago.
        """
        if self._memory is None or os.getpid() == 1:
            return False
        now_s = time.monotonic()
        if now_s < self._shared_memory_at_s + longest_ago_s:
            return self._shared_memory
        before = self._memory.pids()
        known = {os.getpid(), *ancestors(), *descendants((os.getpid(),))}
        if self._guard is not None:
            known.add(self._guard.pid)
        # Who came or went meanwhile may be the trial's own: a shell that has just begun starts its command.
        others = before & (self._memory.pids() - known)
        self._shared_memory_at_s, self._shared_memory = now_s, bool(others)
        return self._shared_memory

    @property
    def _watched_streams(self) -> set[Stream]:
        relayed = (Stream.STDOUT, Stream.STDERR) if self._settings.relay_output else ()
        return {*self._settings.streams, *relayed}

    async def _watch_files(self) -> None:
        relays = (self._stdout, self._stderr) if self._settings.relay_output else ()
        while not self._done.is_set():
            grew, longest_s, attempt = False, _IDLE_LOOK_S, self._current
            if attempt is not None:
                sizes = attempt.tail.sizes(self._settings.streams)
                grew = sizes != attempt.sizes
                if grew:
                    attempt.sizes = sizes
                    self._handle(StreamsGrew(attempt.key, sizes))
                # The last process of a group need not be a child of this one, so its end comes without a signal.
                is_silent = self._process is not None and self._process.ends_silently
                longest_s = _GROUP_LOOK_S if is_silent else SLOW_LOOK_S
            for relay in relays:
                if relay is not None:
                    relay.look()
            await self._news.wait(grew=grew, longest_s=longest_s)
            self._look_at_process()

    def _tell_usage(self, usage: Usage) -> None:
        is_current = self._current is not None and self._current.key == usage.key
        if self._keeper.link.is_up and is_current:
            self._opened_link().send(usage)

    async def _watch_manager(self) -> None:
        seen = self._manager_stamp()
        while True:
            await asyncio.sleep(_MANAGER_LOOK_S)
            # A disk that was full may not be any more, and nobody else can tell the end should the manager never be reached.
            with contextlib.suppress(OSError):
                self._record_exits()
            if self._keeper.link.is_up:
                continue
            self._look_for_stop()
            stamp = self._manager_stamp()
            if stamp not in (None, seen):
                self._handle(ManagerMoved())
            seen = stamp or seen

    def _look_for_stop(self) -> None:
        """What no stream can tell, the manager leaves in the workspace."""
        attempt = self._current
        if attempt is None:
            return
        # Not there, or not shown yet, or not whole: there is another look.
        with contextlib.suppress(OSError, DocumentInvalid):
            stop = stop_from_bytes(self._workspace.trial(attempt.key.trial_id).stop_json.read_bytes())
            self._handle(stop)

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
                case PrepareTrial():
                    self._prepare(effect.trial_id)
                case ForeseeTrial():
                    if self._warm is not None:
                        # The trial that runs comes first, and what is to be told of it.
                        asyncio.get_running_loop().call_soon(self._foresee, effect.trial_id)
                case SpawnTrial():
                    self._spawn(self._attempts[effect.key])
                case SignalTrial():
                    if self._process is not None:
                        self._process.signal(kill=effect.kill)
                        self._news.look_now()
                case RecordExit():
                    if effect.ended.key not in self._unclaimed:
                        self._unrecorded[effect.ended.key] = effect.ended
                        self._writing(self._record_exits)
                case ReleaseAttempt():
                    self._release(effect.key)
                case LogDecision():
                    self._log(effect)
                case Exit():
                    self._exit_code = effect.code
                    self._done.set()

    def _prepare(self, trial_id: str) -> None:
        key = unclaimed = AttemptKey(trial_id, 0, self._task)
        foreseen, self._foreseen = self._foreseen, None
        try:
            if foreseen is not None and foreseen.trial_id == trial_id:
                trial = foreseen
            else:
                trial = read_trial(self._workspace, trial_id, self._settings.command)
            key, folder = claim_attempt(self._workspace, trial_id, self._task)
            trial = with_code(self._workspace, trial, folder)
        except KeeperError as error:
            if key is unclaimed:
                self._unclaimed.add(key)
            self._handle(TrialUnprepared(key, time.time(), error.exit_code, str(error)))
            return
        self._attempts[key] = _Attempt(key, trial, folder)
        self._handle(TrialAssigned(key))

    def _foresee(self, trial_id: str) -> None:
        """Let the next trial's process get ready as far as that can be done without its folder."""
        if self._current is not None and self._current.key.trial_id == trial_id:
            return  # it was quicker
        trial = self._foreseen = glimpse_trial(self._workspace, trial_id, self._settings.command)
        folder = self._workspace.attempt(AttemptKey(trial_id, 0, self._task))
        # One that is begun anew, or unpacks its code first, starts without.
        if (
            self._warm is None
            or trial is None
            or trial.code_snapshot is not None
            or os.path.lexists(folder.path)
        ):
            return
        self._warm.foresee(trial, folder, self._environ_of(trial, folder))

    def _environ_of(self, trial: TrialDocument, folder: AttemptFolder) -> dict[str, str]:
        return trial_environ(self._environ, self._settings.experiment_id, trial, folder, self._workspace)

    def _spawn(self, attempt: _Attempt) -> None:
        trial, folder = attempt.trial, attempt.folder
        found = attempt.found = self._at_end or self._surroundings()
        environ = self._environ_of(trial, folder)
        stdout, stderr = folder.stream(Stream.STDOUT), folder.stream(Stream.STDERR)
        markers = (str(folder.path), *self._warm_marker)
        if self._guard is not None:
            self._guard.watch(markers)
        spared: tuple[int, ...] = ()
        warm_pid: int | None = None
        if self._warm is not None:
            self._warm.prepare(trial.command)
            spared, warm_pid = self._warm.spared, self._warm.start(trial, folder, environ)
        began_s, began_at_s = time.monotonic(), time.time()
        try:
            if warm_pid is not None:
                self._process = TrialProcess.of(
                    warm_pid, spared, sys_dir=str(folder.path), bystanders=found.pids
                )
            else:
                self._process = TrialProcess.started(
                    trial.command, trial.code_dir, environ, stdout, stderr, spared, found.pids
                )
                began_s, began_at_s = time.monotonic(), time.time()
        except KeeperError as error:
            self._handle(SpawnFailed(attempt.key, time.time(), error.exit_code, str(error)))
            return
        if self._guard is not None:
            self._guard.watch(markers, self._process.pid)
        attempt.shares_memory = self._shares_memory(_SHARED_MEMORY_LOOK_S)  # only now: the trial runs already
        self._current = attempt
        attempt.sampler = UsageSampler(
            attempt.key,
            folder.path,
            trial.gpu_indices,
            self._warm.spared if self._warm is not None else (),
        )
        if self._settings.relay_output:
            for relay, path in ((self._stdout, stdout), (self._stderr, stderr)):
                if relay is not None:
                    relay.follow(path)
        for stream in self._watched_streams:
            rest_s = _METRICS_REST_S if stream is Stream.METRICS else _LOGS_REST_S
            self._news.add(folder.stream(stream), rest_s=rest_s)
        self._news.look_now()
        if self._link is not None:
            self._link.pace_logs(are_paced=True)
        how = "the command runs" if warm_pid is None else "the command runs, as a fork of a warm interpreter"
        attempt.spawned_s = began_s
        self._handle(TrialSpawned(attempt.key, began_at_s, how))
        self._watch_usage()

    def _watch_usage(self) -> None:
        """Once there is a loop to tell."""
        attempt = self._current
        if self._link is None or attempt is None or attempt.sampler is None or attempt.usage is not None:
            return
        attempt.usage = UsageWatch(attempt.sampler, self._tell_usage)

    def _record_exits(self) -> None:
        for ended in list(self._unrecorded.values()):
            replace_file(self._workspace.attempt(ended.key).exit_json, exit_to_bytes(ended))
            del self._unrecorded[ended.key]

    def _release(self, key: AttemptKey) -> None:
        self._unrecorded.pop(key, None)  # it is known where it matters
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            attempt.tail.close()
            if attempt.usage is not None:
                attempt.usage.stop()

    def _common_environ(self) -> dict[str, str]:
        """What the trials of this job have in common of their environment."""
        nothing = TrialDocument("", 0, "", "")
        folder = AttemptFolder(self._workspace.root)
        whole = self._environ_of(nothing, folder)
        return self._environ | {"PYTHONPATH": whole["PYTHONPATH"]}

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
                __version__,
                settings.experiment_id,
                settings.job_id,
                self._task,
                attempts=effect.attempts,
                returns_trials=settings.is_reused,
            )
        )

    def _send_chunk(self, effect: SendChunk) -> None:
        chunk, attempt = effect.chunk, self._attempts.get(effect.key)
        if attempt is None or not self._keeper.is_due(effect):
            return  # an earlier chunk of the same round could not be read
        data = attempt.tail.read(chunk.stream, chunk.offset, chunk.size_bytes)
        if len(data) == chunk.size_bytes:
            self._opened_link().send(Chunk(effect.key, chunk.stream, chunk.offset, data))
        elif (size := attempt.tail.cut_size(chunk.stream, chunk.offset + chunk.size_bytes)) is not None:
            self._handle(StreamCut(effect.key, chunk.stream, chunk.offset, size))
        else:
            # What follows would leave a hole: begin again from what the manager has.
            self._opened_link().drop(
                f"cannot read {chunk.size_bytes} bytes of {chunk.stream.value} at {chunk.offset}: "
                "the shared storage fails; check it"
            )

    def _say(self, text: str) -> None:
        self._log(LogDecision(None, text))

    def _log(self, effect: LogDecision) -> None:
        attempt = self._current if effect.key is None else self._attempts.get(effect.key)
        whose = self._settings.job_id if attempt is None else attempt.key
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} trial-keeper [{whose}] {effect.text}\n"
        self._stderr.hold(line)
        if self._link is None:
            self._stderr.look()
        elif self._showing is None:
            loop = asyncio.get_running_loop()
            self._showing = loop.call_at(max(loop.time(), self._shown_at_s + _LINES_REST_S), self._show_lines)
        if effect.key is not None and attempt is not None:
            self._writing(partial(_append, attempt.folder, line))

    def _show_lines(self) -> None:
        self._showing, self._shown_at_s = None, asyncio.get_running_loop().time()
        self._stderr.look()

    def _writing(self, write: Callable[[], None]) -> None:
        """A full disk ends no keeper: what cannot be written is still told over the link."""
        try:
            write()
        except OSError as error:
            self._stderr.say(f"trial-keeper: {not_writable(self._workspace.root, error)}\n")


def _append(folder: AttemptFolder, line: str) -> None:
    path = folder.stream(Stream.KEEPER)
    descriptor = open_inside(folder.path, path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    write_all(descriptor, line.encode(errors="replace"))


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    more = len(known) - _NAMES_SHOWN
    return ", ".join(known[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
