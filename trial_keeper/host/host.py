"""The keeper's event loop: passes events to the core, and its effects to the owners of the state that they change.

`trial_runner` runs trials, `stream_sender` sends their streams, `exit_recorder` records their ends, and `keeper_log` logs.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

from trial_keeper import __version__
from trial_keeper.core import events
from trial_keeper.core.keeper import Keeper
from trial_keeper.core.replication import SendChunk
from trial_keeper.host.exit_recorder import ExitRecorder
from trial_keeper.host.keeper_context import KeeperContext
from trial_keeper.host.keeper_log import KeeperLog
from trial_keeper.host.orphan_reaper import OrphanReaper
from trial_keeper.host.stream_sender import StreamSender
from trial_keeper.host.trial_runner import TrialRunner
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import Hello
from trial_keeper.wire.workspace import Workspace

_MANAGER_POLL_S = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Host:
    """One keeper process around one `Keeper`.

    A job without reuse starts its trial without a manager: `begin` starts it before gRPC is even imported.
    """

    def __init__(
        self, settings: KeeperSettings, workspace: Workspace, task: str, reaper: OrphanReaper | None
    ) -> None:
        self._core = Keeper(settings, time.monotonic())
        self._log = KeeperLog(settings.job_id, workspace.root)
        self._context = KeeperContext(settings, workspace, task, self._core, self._log, self._handle)
        self._streams = StreamSender(self._context)
        self._recorder = ExitRecorder(self._context)
        self._trials = TrialRunner(self._context, self._streams, self._recorder, reaper)
        self.begin = self._trials.begin
        """Start a prepared trial. In a job without reuse, called before `run` for its single trial."""
        self._performing: dict[type, Callable[[Any], None]] = {
            SendChunk: self._streams.send,
            events.Send: lambda effect: self._context.link.send(effect.message),
            events.OpenLink: self._open_link,
            events.PrepareTrial: self._trials.prepare,
            events.PrewarmTrial: self._trials.prewarm,
            events.SpawnTrial: self._trials.spawn,
            events.MeasureMetrics: self._streams.measure,
            events.WriteStopNotice: self._trials.write_stop_notice,
            events.SignalTrial: self._trials.signal,
            events.RecordExit: self._recorder.record,
            events.ReleaseAttempt: self._release,
            events.LogDecision: lambda effect: self._log.write(effect.text, effect.key),
            events.ExitKeeper: self._exit,
        }
        self._waiting_for_loop: list[events.Effect] = []
        self._early_signals: list[int] = []
        self._exit_code = 0
        self._failure: BaseException | None = None
        self._done = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_s = 0.0
        for number in STOP_SIGNALS:
            signal.signal(number, lambda received, _: self._early_signals.append(received))

    async def run(self) -> int:
        """Run until the keeper decides to exit, and return its exit code. Any exception ends the trial's processes too."""
        try:
            return await self._run()
        finally:
            self._trials.close()

    async def _run(self) -> int:
        # The import takes 80 ms; the trial runs already.
        from trial_keeper.host.link import ManagerLink

        loop, context = asyncio.get_running_loop(), self._context
        context.link = ManagerLink(context.workspace, context.settings, self._handle)
        context.is_in_loop = True
        self._trials.enter_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._trials.note_ended_child)
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._handle, events.SignalReceived(number))
        for early in self._early_signals:
            self._handle(events.SignalReceived(early))
        self._perform(self._waiting_for_loop)
        self._trials.poll()
        watchers = [loop.create_task(self._watch_files()), loop.create_task(self._watch_manager())]
        for watcher in watchers:
            watcher.add_done_callback(self._note_end_of_watcher)
        self._handle(events.TimerFired())
        try:
            await self._done.wait()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await context.link.close()
            self._streams.close()
        if self._failure is not None:
            raise self._failure
        return self._exit_code

    # ---- events

    def _handle(self, event: events.Event) -> None:
        try:
            self._perform(self._core.handle(event, time.monotonic()))
            if self._context.is_in_loop:
                self._context.link.set_coalescing(is_allowed=self._core.queue_is_deep)
                self._set_timer()
        except Exception as error:  # noqa: BLE001 - raised again by `run`
            # The event's source would only drop the exception, and the keeper would neither work nor end.
            self._fail(error)

    def _note_end_of_watcher(self, watcher: "asyncio.Task[None]") -> None:
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._done.set()

    def _set_timer(self) -> None:
        deadline_s = self._core.next_deadline_s
        if self._done.is_set() or (self._timer is not None and deadline_s == self._timer_deadline_s):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_s is not None:
            self._timer_deadline_s = deadline_s
            delay_s = max(deadline_s - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._pass_time)

    def _pass_time(self) -> None:
        self._timer = None
        self._handle(events.TimerFired())

    async def _watch_files(self) -> None:
        while not self._done.is_set():
            grew, longest_s = self._trials.poll_files()
            await self._streams.wait(grew=grew, longest_s=longest_s)
            self._trials.poll()

    async def _watch_manager(self) -> None:
        seen = self._manager_stamp()
        while True:
            await asyncio.sleep(_MANAGER_POLL_S)
            # Retry: a full disk may have space again, and without a manager exit.json is the only record of the end.
            with contextlib.suppress(OSError):
                self._recorder.retry()
            if self._core.link.is_up:
                continue
            self._trials.read_stop()
            stamp = self._manager_stamp()
            if stamp not in (None, seen):
                self._handle(events.ManagerMoved())
            seen = stamp or seen

    def _manager_stamp(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = self._context.workspace.manager_json.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    # ---- effects

    def _perform(self, effects: Iterable[events.Effect]) -> None:
        for effect in effects:
            self._performing[type(effect)](effect)

    def _open_link(self, effect: events.OpenLink) -> None:
        if not self._context.is_in_loop:
            self._waiting_for_loop.append(effect)
            return
        self._context.link.open(self._hello)

    def _hello(self) -> Hello:
        settings = self._context.settings
        return Hello(
            __version__,
            settings.experiment_id,
            settings.job_id,
            self._context.task,
            attempts=tuple(self._core.attempts),
            supports_revoke=settings.is_reused,
        )

    def _release(self, effect: events.ReleaseAttempt) -> None:
        self._recorder.release(effect.key)
        self._streams.release(effect.key)
        self._log.folders.pop(effect.key, None)

    def _exit(self, effect: events.ExitKeeper) -> None:
        self._exit_code = effect.code
        self._done.set()
