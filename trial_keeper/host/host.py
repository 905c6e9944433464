"""Executes the keeper's effects: the one event loop of a keeper process.

This module is one class despite its length: every effect needs the same loop, link, process and attempts. All decisions are in
`core.keeper`.
"""

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
from trial_keeper.core import events
from trial_keeper.core.environment import trial_environ
from trial_keeper.core.keeper import Keeper
from trial_keeper.core.replication import SendChunk
from trial_keeper.errors import KeeperError
from trial_keeper.exit_codes import of_signal
from trial_keeper.host.attempt_files import Tail, claim_attempt, not_writable, read_trial, try_read_trial
from trial_keeper.host.cached_listing import CachedListing
from trial_keeper.host.cgroups import MemoryCgroup
from trial_keeper.host.checkpoints import CheckpointSigner, offer_checkpoints
from trial_keeper.host.file_watcher import SLOW_POLL_S, FileWatcher
from trial_keeper.host.mount import with_code
from trial_keeper.host.orphan_reaper import OrphanReaper
from trial_keeper.host.output_forwarder import OutputForwarder, finish
from trial_keeper.host.packages import Packages
from trial_keeper.host.process import TrialProcess
from trial_keeper.host.usage import UsageSampler, UsageWatch
from trial_keeper.host.warm_starts import WarmStarts
from trial_keeper.processes import adopt_orphans, ancestors, descendants
from trial_keeper.settings import KeeperSettings, without_settings
from trial_keeper.wire.messages import (
    NO_ENVIRONMENT,
    AttemptKey,
    Chunk,
    Environment,
    Hello,
    Offsets,
    Stream,
    TrialEnded,
    Usage,
)
from trial_keeper.wire.safe_open import open_to_append
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.small_files import replace_file, write_all
from trial_keeper.wire.workspace import (
    MARKER,
    AttemptFolder,
    TrialDocument,
    Workspace,
    exit_to_bytes,
    stop_from_bytes,
    stop_notice_to_bytes,
)

if TYPE_CHECKING:
    from trial_keeper.host.link import ManagerLink

# These limit the polls of a file that grows fast; a person who follows a log does not notice the delay.
_METRICS_COOLDOWN_S = 0.01
_LOGS_COOLDOWN_S = 0.1
# Used only while a stop is in progress: no signal reports the end of a group's last process.
_GROUP_POLL_S = 0.05
# No file grows without a trial, and a new trial wakes the loop.
_IDLE_POLL_S = 3600.0
_MANAGER_POLL_S = 1.0
# Membership of a control group changes rarely, and short trials start many times a second.
_SHARED_MEMORY_POLL_S = 1.0
# The writer thread competes with the loop's thread for the interpreter, while a trial may be about to start.
_LINES_COOLDOWN_S = 0.1
_MESSAGE_BYTES = 4096
# Exit statuses of a killed command, and of a shell whose command was killed.
_KILLED = (-signal.SIGKILL, of_signal(signal.SIGKILL))
_NAMES_SHOWN = 5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class HostBaseline:
    """The host's state before a trial. The state at the end of one trial is the baseline of the next."""

    in_tmp: frozenset[str]
    """The entries of the temporary folder."""
    oom_kills: int
    pids: frozenset[int] = frozenset()
    """The processes of this machine; empty if not scanned."""


@dataclass(slots=True)
class _Attempt:
    """The resources of an attempt that is not closed."""

    key: AttemptKey
    trial: TrialDocument
    folder: AttemptFolder
    tail: Tail
    signer: CheckpointSigner
    cannot_sign: str = ""
    """Why its new checkpoints cannot be signed at present; empty if they can."""
    sizes: Offsets = field(default_factory=dict)
    shares_memory: bool = False
    found: HostBaseline = HostBaseline(frozenset(), 0)
    """The baseline at the trial's start."""
    spawned_s: float = 0.0
    """On the monotonic clock."""
    usage: UsageWatch | None = None
    environment: Environment = NO_ENVIRONMENT

    def append_to_log(self, line: str) -> None:
        path = self.folder.stream(Stream.KEEPER)
        write_all(open_to_append(self.folder.path, path), line.encode(errors="replace"))


class Host:
    """One keeper process around one `Keeper`.

    A job without reuse starts its trial without a manager: `begin` starts it before gRPC is even imported.
    """

    def __init__(
        self, settings: KeeperSettings, workspace: Workspace, task: str, reaper: OrphanReaper | None
    ) -> None:
        self._reaper = reaper
        self._settings = settings
        self._environ = without_settings(os.environ)
        self._workspace = workspace
        self._task = task
        self._keeper = Keeper(settings, time.monotonic())
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._unclaimed: set[AttemptKey] = set()
        """Attempts that could not be claimed, and so have no folder."""
        self._unrecorded: dict[AttemptKey, TrialEnded] = {}
        """Ends that could not be written to the workspace yet."""
        self._current: _Attempt | None = None
        self._end_baseline: HostBaseline | None = None
        """Set while the end of a trial is handled; the next trial may start meanwhile."""
        self._prewarmed: TrialDocument | None = None
        """The document of the next trial, if that trial was prewarmed."""
        self._tmp = CachedListing(tempfile.gettempdir()) if settings.is_reused else None
        self._process: TrialProcess | None = None
        self._packages = Packages(workspace, self._environ)
        self._watcher = FileWatcher()
        self._memory = MemoryCgroup.own()
        self._shared_memory = False
        self._shared_memory_at_s = -_SHARED_MEMORY_POLL_S
        self._stderr = OutputForwarder(2)
        self._forwarders: dict[Stream, OutputForwarder] = {}
        """The forwarders of the trial's output, if the keeper copies that output to its own."""
        if settings.relay_output:
            self._forwarders = {Stream.STDOUT: OutputForwarder(1), Stream.STDERR: self._stderr}
        self._showing: asyncio.TimerHandle | None = None
        self._shown_at_s = -_LINES_COOLDOWN_S
        """When the stderr thread was last woken for lines, on the loop's clock."""
        self._warm: WarmStarts | None = None
        self._warm_marker: tuple[str, ...] = ()
        if settings.warm_imports and settings.is_reused:
            # In /proc a fork shows the interpreter's environment, not the trial's.
            self._warm_marker = (workspace.warm_marker(settings.job_id),)
            environ = self._common_environ() | {MARKER: self._warm_marker[0]}
            self._warm = WarmStarts(settings.warm_imports, environ, self._log, self._register)
        self._link: ManagerLink | None = None
        self._waiting_for_loop: list[events.Effect] = []
        self._early_signals: list[int] = []
        self._exit_code: int | None = None
        self._failure: Exception | None = None
        self._done = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_s = 0.0
        self._adopts_orphans = False
        for number in STOP_SIGNALS:
            signal.signal(number, lambda received, _: self._early_signals.append(received))

    def begin(self, trial: TrialDocument, key: AttemptKey, folder: AttemptFolder) -> None:
        """Start a prepared trial. In a job without reuse, called before `run` for its single trial."""
        signer = CheckpointSigner(self._settings, key, folder)
        self._attempts[key] = _Attempt(key, trial, folder, Tail(folder), signer)
        self._writing(partial(self._offer_checkpoints, trial, key))
        self._handle(events.TrialAssigned(key))

    def _sign_checkpoints(self, attempt: _Attempt) -> None:
        """Sign the trial's new checkpoints. The next poll repeats a failed attempt; a failure is logged once."""
        before, attempt.cannot_sign = attempt.cannot_sign, ""
        try:
            attempt.signer.sign_new()
        except OSError as error:
            attempt.cannot_sign = str(error)
            if attempt.cannot_sign != before:
                text = (
                    f"cannot sign the new checkpoints, so they cannot be loaded: {error}; check the storage"
                )
                self._log(text, attempt.key)

    def _offer_checkpoints(self, trial: TrialDocument, key: AttemptKey) -> None:
        sources, refusals = offer_checkpoints(self._workspace, self._settings, trial, key)
        for refusal in refusals:
            self._log(refusal, key)
        if sources:
            newest = sources[0]
            self._log(f"the newest verified checkpoint is {newest.name} of attempt {newest.key}", key)

    async def run(self) -> int:
        """Run until the keeper decides to exit, and return its exit code. Any exception ends the trial's processes too."""
        try:
            return await self._run()
        finally:
            if self._process is not None:
                self._process.signal(kill=True)
            if self._warm is not None:
                self._warm.close()
            if self._reaper is not None:
                self._reaper.close()

    async def _run(self) -> int:
        # The import takes 80 ms; the trial runs already.
        from trial_keeper.host.link import ManagerLink

        loop = asyncio.get_running_loop()
        self._adopt_orphans()
        self._link = ManagerLink(self._workspace, self._settings, self._handle)
        self._link.limit_log_rate(are_paced=self._process is not None)
        loop.add_signal_handler(signal.SIGCHLD, self._note_ended_child)
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._handle, events.SignalReceived(number))
        for early in self._early_signals:
            self._handle(events.SignalReceived(early))
        deferred, self._waiting_for_loop = self._waiting_for_loop, []
        self._perform(deferred)
        if self._current is not None and self._current.usage is not None:
            self._current.usage.start()
        self._poll_process()
        watchers = [loop.create_task(self._watch_files()), loop.create_task(self._watch_manager())]
        self._handle(events.TimerFired())
        try:
            await self._done.wait()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await self._link.close()
            # Blocks: nothing else is left to do, and an executor would start a thread for each.
            finish({self._stderr, *self._forwarders.values()})
            for attempt in list(self._attempts.values()):
                self._release(attempt.key)
            self._watcher.close()
        if self._failure is not None:
            raise self._failure
        return self._exit_code or 0

    # ---- events

    def _handle(self, event: events.Event) -> None:
        try:
            self._perform(self._keeper.handle(event, time.monotonic()))
            if self._link is not None:
                self._link.set_coalescing(is_allowed=self._keeper.queue_is_deep)
            self._set_timer()
        except Exception as error:  # noqa: BLE001 - raised again by `run`
            # The event's source would only drop the exception, and the keeper would neither work nor end.
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
        self._handle(events.TimerFired())

    def _note_ended_child(self) -> None:
        self._poll_process()
        if self._process is not None and self._process.ends_silently:
            self._watcher.poll_now()  # poll at a short interval from now on

    def _poll_process(self) -> None:
        process, attempt = self._process, self._current
        status = process.poll() if process is not None else None
        if process is None or attempt is None or status is None:
            return
        leftovers = process.leftovers()
        self._sign_checkpoints(attempt)
        self._process = self._current = None
        if self._reaper is not None:
            # The warm interpreter continues. It detects the keeper's death only after its imports.
            self._reaper.watch(self._warm_marker, self._exempt_sessions)
        at_end = self._end_baseline = self._baseline(process.seen)
        in_tmp = at_end.in_tmp - attempt.found.in_tmp
        if leftovers or in_tmp:
            self._handle(events.CleanupFinished(attempt.key, leftovers, _listed(in_tmp)))
        attempt.tail.check(self._settings.streams)
        self._report_changes(attempt)
        self._handle(
            events.TrialExited(
                attempt.key,
                time.monotonic() - attempt.spawned_s,
                exit_code=status if status >= 0 else None,
                signal=-status if status < 0 else None,
                sizes=attempt.tail.sizes(self._settings.streams),
                stderr_tail=attempt.tail.last_text(Stream.STDERR, _MESSAGE_BYTES) if status else "",
                out_of_memory=self._memory_shortage(attempt, at_end, status),
                environment=self._packages.of(attempt.folder),
            )
        )
        self._end_baseline = None
        # The next trial may run already: calls that could block come after its start.
        if attempt.usage is not None:
            attempt.usage.stop()
        for stream in self._watched_streams:
            self._watcher.remove(attempt.folder.stream(stream))
        self._watcher.poll_now()
        if self._current is None:
            self._opened_link().limit_log_rate(are_paced=False)

    def _baseline(self, pids: frozenset[int] = frozenset()) -> HostBaseline:
        return HostBaseline(
            # Only with reuse: the job's next trial could use these entries.
            self._tmp.names() if self._tmp is not None else frozenset(),
            self._memory.oom_kills() if self._memory is not None else 0,
            pids,
        )

    def _memory_shortage(self, attempt: _Attempt, at_end: HostBaseline, status: int) -> str:
        if self._memory is None or at_end.oom_kills == attempt.found.oom_kills:
            return ""
        if status not in _KILLED and (attempt.shares_memory or self._shares_memory()):
            return (
                ""  # the killed process may belong to another job, so this trial's failure has another cause
            )
        return self._memory.shortage()

    def _shares_memory(self, longest_ago_s: float = 0.0) -> bool:
        """True if this keeper's control group also contains other processes, as on a laptop. A container has its own group.

        Returns the previous result if that is at most `longest_ago_s` old.
        """
        if self._memory is None or os.getpid() == 1:
            return False
        now_s = time.monotonic()
        if now_s < self._shared_memory_at_s + longest_ago_s:
            return self._shared_memory
        before = self._memory.pids()
        known = {os.getpid(), *ancestors(), *descendants((os.getpid(),))}
        if self._reaper is not None:
            known.add(self._reaper.pid)
        # A process that started or ended meanwhile may be the trial's: a new shell forks its command.
        others = before & (self._memory.pids() - known)
        self._shared_memory_at_s, self._shared_memory = now_s, bool(others)
        return self._shared_memory

    @property
    def _watched_streams(self) -> set[Stream]:
        return {*self._settings.streams, *self._forwarders}

    async def _watch_files(self) -> None:
        while not self._done.is_set():
            grew, longest_s, attempt = False, _IDLE_POLL_S, self._current
            if attempt is not None:
                sizes = attempt.tail.sizes(self._settings.streams)
                grew = sizes != attempt.sizes
                if grew:
                    attempt.sizes = sizes
                    self._handle(events.StreamsGrew(attempt.key, sizes))
                # The group's last process need not be the keeper's child, so no signal reports its end.
                is_silent = self._process is not None and self._process.ends_silently
                longest_s = _GROUP_POLL_S if is_silent else SLOW_POLL_S
                # A mark in the metrics precedes each checkpoint, so their growth wakes this loop.
                self._sign_checkpoints(attempt)
            for forwarder in self._forwarders.values():
                forwarder.poll()
            await self._watcher.wait(grew=grew, longest_s=longest_s)
            self._poll_process()

    def _report_usage(self, usage: Usage) -> None:
        is_current = self._current is not None and self._current.key == usage.key
        if self._current is None or not is_current:
            return
        if not self._current.environment.python:
            environment = self._packages.of(self._current.folder)
            if environment.python:
                self._current.environment = environment
                self._handle(events.EnvironmentFound(usage.key, environment))
        if self._keeper.link.is_up:
            self._opened_link().send(usage)

    async def _watch_manager(self) -> None:
        seen = self._manager_stamp()
        while True:
            await asyncio.sleep(_MANAGER_POLL_S)
            # Retry: a full disk may have space again, and without a manager exit.json is the only record of the end.
            with contextlib.suppress(OSError):
                self._record_exits()
            if self._keeper.link.is_up:
                continue
            self._read_stop()
            stamp = self._manager_stamp()
            if stamp not in (None, seen):
                self._handle(events.ManagerMoved())
            seen = stamp or seen

    def _read_stop(self) -> None:
        """Read the stop request that the manager leaves in the workspace when it has no stream to the keeper."""
        attempt = self._current
        if attempt is None:
            return
        # The file may be missing, not visible yet, or incomplete: the next poll retries.
        with contextlib.suppress(OSError, DocumentInvalid):
            path = self._workspace.trial(attempt.key.trial_id).stop_json
            self._handle(stop_from_bytes(self._workspace.read_document(path)))

    def _manager_stamp(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = self._workspace.manager_json.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    # ---- effects

    def _perform(self, effects: Iterable[events.Effect]) -> None:
        for effect in effects:
            match effect:
                case SendChunk():
                    self._send_chunk(effect)
                case events.Send():
                    self._opened_link().send(effect.message)
                case events.OpenLink():
                    self._open_link(effect)
                case events.PrepareTrial():
                    self._prepare(effect.trial_id, effect.attempt_id)
                case events.PrewarmTrial():
                    if self._warm is not None:
                        # Later: the running trial and its messages have priority.
                        asyncio.get_running_loop().call_soon(
                            self._prewarm_next, effect.trial_id, effect.attempt_id
                        )
                case events.SpawnTrial():
                    self._spawn(self._attempts[effect.key])
                case events.MeasureMetrics():
                    size = self._attempts[effect.key].tail.sizes((Stream.METRICS,))[Stream.METRICS]
                    self._handle(events.MetricsMeasured(effect.key, size))
                case events.WriteStopNotice():
                    folder = self._attempts[effect.key].folder
                    notice = stop_notice_to_bytes(effect.reason)
                    self._writing(partial(replace_file, folder.stop_notice_json, notice))
                    # After the notice: code that asks for the first time from now on finds it.
                    is_awaited = folder.stop_notice_json.exists() and folder.awaits_stop_notice.exists()
                    self._handle(events.StopNoticeWritten(effect.key, is_awaited))
                case events.SignalTrial():
                    if self._process is not None:
                        self._process.signal(kill=effect.kill)
                        self._watcher.poll_now()
                case events.RecordExit():
                    if effect.ended.key not in self._unclaimed:
                        self._unrecorded[effect.ended.key] = effect.ended
                        self._writing(self._record_exits)
                        if self._unrecorded:
                            self._handle(events.ExitNotRecorded())
                case events.ReleaseAttempt():
                    self._release(effect.key)
                case events.LogDecision():
                    self._log(effect.text, effect.key)
                case events.ExitKeeper():
                    self._exit_code = effect.code
                    self._done.set()

    def _prepare(self, trial_id: str, attempt_id: str) -> None:
        key = AttemptKey(trial_id, attempt_id, self._task)
        is_claimed = False
        prewarmed, self._prewarmed = self._prewarmed, None
        try:
            if prewarmed is not None and prewarmed.trial_id == trial_id:
                trial = prewarmed
            else:
                trial = read_trial(self._workspace, trial_id, self._settings.command)
            key, folder = claim_attempt(self._workspace, self._settings, trial_id, self._task, attempt_id)
            is_claimed = True
            trial = with_code(self._workspace, trial, folder)
        except KeeperError as error:
            if not is_claimed:
                self._unclaimed.add(key)
            self._handle(events.PreparationFailed(key, time.time(), error.exit_code, str(error)))
            return
        self.begin(trial, key, folder)

    def _prewarm_next(self, trial_id: str, attempt_id: str) -> None:
        """Prewarm the next trial's process as far as possible without its folder."""
        if self._current is not None and self._current.key.trial_id == trial_id:
            return  # the trial has started already
        trial = self._prewarmed = try_read_trial(self._workspace, trial_id, self._settings.command)
        folder = self._workspace.attempt(AttemptKey(trial_id, attempt_id, self._task))
        # A trial that unpacks a code snapshot starts without prewarming.
        if self._warm is None or trial is None or trial.code_snapshot is not None:
            return
        self._warm.prewarm(trial, folder, self._environ_of(trial, folder))

    def _environ_of(self, trial: TrialDocument, folder: AttemptFolder) -> dict[str, str]:
        return trial_environ(self._environ, self._settings.experiment_id, trial, folder, self._workspace)

    def _spawn(self, attempt: _Attempt) -> None:
        trial, folder = attempt.trial, attempt.folder
        found = attempt.found = self._end_baseline or self._baseline()
        environ = self._environ_of(trial, folder)
        stdout, stderr = folder.stream(Stream.STDOUT), folder.stream(Stream.STDERR)
        markers = (str(folder.path), *self._warm_marker)
        if self._reaper is not None:
            self._reaper.watch(markers, self._exempt_sessions)
        warm_pid = self._warm.start(trial, folder, environ) if self._warm is not None else None
        exempt_sessions = self._exempt_sessions
        began_s, began_at_s = time.monotonic(), time.time()
        try:
            if warm_pid is not None:
                self._process = TrialProcess(
                    warm_pid, exempt_sessions, sys_dir=str(folder.path), preexisting_pids=found.pids
                )
            else:
                self._process = TrialProcess.started(
                    trial.command,
                    trial.code_dir,
                    environ,
                    stdout,
                    stderr,
                    exempt_sessions,
                    found.pids,
                    self._register,
                )
                began_s, began_at_s = time.monotonic(), time.time()
        except KeeperError as error:
            self._handle(events.SpawnFailed(attempt.key, time.time(), error.exit_code, str(error)))
            return
        attempt.shares_memory = self._shares_memory(_SHARED_MEMORY_POLL_S)  # must not delay the start
        self._current = attempt
        sampler = UsageSampler(attempt.key, folder.path, trial.gpu_indices, exempt_sessions)
        attempt.usage = UsageWatch(sampler, self._report_usage)
        for stream, forwarder in self._forwarders.items():
            forwarder.follow(folder.stream(stream))
        for stream in self._watched_streams:
            cooldown_s = _METRICS_COOLDOWN_S if stream is Stream.METRICS else _LOGS_COOLDOWN_S
            self._watcher.add(folder.stream(stream), cooldown_s=cooldown_s)
        self._watcher.poll_now()
        if self._link is not None:
            self._link.limit_log_rate(are_paced=True)
        how = "the command runs" if warm_pid is None else "the command runs, as a fork of a warm interpreter"
        attempt.spawned_s = began_s
        self._handle(events.TrialSpawned(attempt.key, began_at_s, how, self._packages.here))
        # This call opens the files, so that a file that the trial replaces later is still tracked.
        attempt.tail.sizes(self._settings.streams)
        if self._link is not None:
            attempt.usage.start()

    @property
    def _exempt_sessions(self) -> tuple[int, ...]:
        """The sessions of the warm interpreter and its forks, which belong to no trial."""
        return self._warm.exempt_sessions if self._warm is not None else ()

    def _register(self, pid: int) -> None:
        """Register a process's session with the orphan reaper, before the process executes anything."""
        if self._reaper is not None:
            self._reaper.register(pid)
        self._adopt_orphans()

    def _adopt_orphans(self) -> None:
        """Adopt orphans from now on: the first registered process may leave some."""
        if not self._adopts_orphans:
            self._adopts_orphans = True
            if self._reaper is not None:
                self._reaper.wait_for_start()
            adopt_orphans()

    def _record_exits(self) -> None:
        for ended in list(self._unrecorded.values()):
            replace_file(
                self._workspace.attempt(ended.key).exit_json, exit_to_bytes(ended, self._settings.token)
            )
            del self._unrecorded[ended.key]

    def _release(self, key: AttemptKey) -> None:
        self._unrecorded.pop(key, None)  # the manager has recorded the end
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            attempt.tail.close()
            if attempt.usage is not None:
                attempt.usage.stop()

    def _common_environ(self) -> dict[str, str]:
        """Return the part of the environment that all trials of this job share."""
        nothing = TrialDocument("", 0, "", "")
        folder = AttemptFolder(self._workspace.root)
        whole = self._environ_of(nothing, folder)
        return self._environ | {"PYTHONPATH": whole["PYTHONPATH"]}

    def _opened_link(self) -> "ManagerLink":
        if self._link is None:
            raise AssertionError("a message before the link was opened")
        return self._link

    def _open_link(self, effect: events.OpenLink) -> None:
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
                supports_revoke=settings.is_reused,
            )
        )

    def _send_chunk(self, chunk: SendChunk) -> None:
        attempt = self._attempts.get(chunk.key)
        if attempt is None or not self._keeper.is_due(chunk):
            return  # an earlier chunk of this round could not be read
        data = attempt.tail.read(chunk.stream, chunk.offset, chunk.size_bytes)
        if len(data) == chunk.size_bytes:
            self._opened_link().send(Chunk(chunk.key, chunk.stream, chunk.offset, data))
        elif (size := attempt.tail.truncated_size(chunk.stream, chunk.offset + chunk.size_bytes)) is not None:
            self._handle(events.StreamTruncated(chunk.key, chunk.stream, chunk.offset, size))
        else:
            # Later chunks would leave a gap: reconnect and restart from the manager's offset.
            self._opened_link().drop(
                f"cannot read {chunk.size_bytes} bytes of {chunk.stream.value} at {chunk.offset}: "
                "the shared storage failed; check its server and the network to it"
            )
        self._report_changes(attempt)

    def _report_changes(self, attempt: _Attempt) -> None:
        while attempt.tail.changes:
            self._handle(events.StreamChanged(attempt.key, *attempt.tail.changes.popitem()))

    def _log(self, text: str, key: AttemptKey | None = None) -> None:
        attempt = self._current if key is None else self._attempts.get(key)
        whose = self._settings.job_id if attempt is None else attempt.key
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} trial-keeper [{whose}] {text}\n"
        self._stderr.buffer(line)
        if self._link is None:
            self._stderr.poll()
        elif self._showing is None:
            loop = asyncio.get_running_loop()
            self._showing = loop.call_at(
                max(loop.time(), self._shown_at_s + _LINES_COOLDOWN_S), self._show_lines
            )
        if key is not None and attempt is not None:
            self._writing(partial(attempt.append_to_log, line))

    def _show_lines(self) -> None:
        self._showing, self._shown_at_s = None, asyncio.get_running_loop().time()
        self._stderr.poll()

    def _writing(self, write: Callable[[], object]) -> None:
        """Run a write to the workspace. An error is only logged to stderr, as the link still delivers the data."""
        try:
            write()
        except OSError as error:
            self._stderr.write(f"trial-keeper: {not_writable(self._workspace.root, error)}\n")


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    more = len(known) - _NAMES_SHOWN
    return ", ".join(known[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
