"""Runs the trials of a job, one at a time: prepares, starts and signals them, and reports how they end."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from trial_keeper.core import events
from trial_keeper.core.environment import trial_environ
from trial_keeper.errors import KeeperError
from trial_keeper.host.attempt_files import Tail, claim_attempt, read_trial, try_read_trial
from trial_keeper.host.checkpoints import CheckpointSigner, offer_checkpoints
from trial_keeper.host.exit_recorder import ExitRecorder
from trial_keeper.host.file_watcher import SLOW_POLL_S
from trial_keeper.host.host_monitor import SHARED_MEMORY_POLL_S, HostBaseline, HostMonitor
from trial_keeper.host.keeper_context import KeeperContext
from trial_keeper.host.mount import with_code
from trial_keeper.host.orphan_reaper import OrphanReaper
from trial_keeper.host.packages import Packages
from trial_keeper.host.process import TrialProcess
from trial_keeper.host.stream_sender import StreamSender
from trial_keeper.host.usage import UsageSampler, UsageWatch
from trial_keeper.host.warm_starts import WarmStarts
from trial_keeper.processes import adopt_orphans
from trial_keeper.settings import without_settings
from trial_keeper.wire.documents import TrialDocument, stop_from_bytes, stop_notice_to_bytes
from trial_keeper.wire.messages import NO_ENVIRONMENT, AttemptKey, Environment, Stream, Usage
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import MARKER, AttemptFolder

# Used only while a stop is in progress: no signal reports the end of a group's last process.
_GROUP_POLL_S = 0.05
# No file grows without a trial, and a new trial wakes the loop.
_IDLE_POLL_S = 3600.0
_MESSAGE_BYTES = 4096
_NAMES_SHOWN = 5


@dataclass(slots=True)
class _Running:
    """The trial that runs."""

    key: AttemptKey
    folder: AttemptFolder
    signer: CheckpointSigner
    process: TrialProcess
    usage: UsageWatch
    spawned_s: float
    """On the monotonic clock."""
    found: HostBaseline
    """The baseline at the trial's start."""
    shares_memory: bool = False
    environment: Environment = NO_ENVIRONMENT


class TrialRunner:
    """The trial that runs, and what all trials of the job share: a warm interpreter, the environment, the orphan reaper."""

    def __init__(
        self,
        context: KeeperContext,
        streams: StreamSender,
        recorder: ExitRecorder,
        reaper: OrphanReaper | None,
    ) -> None:
        self._context, self._streams, self._recorder, self._reaper = context, streams, recorder, reaper
        settings, workspace = context.settings, context.workspace
        self._environ = without_settings(os.environ)
        self._packages = Packages(workspace, self._environ)
        self._monitor = HostMonitor(reaper, is_reused=settings.is_reused)
        self._prepared: dict[AttemptKey, tuple[TrialDocument, AttemptFolder]] = {}
        """The trial that starts next, once its attempt is claimed."""
        self._prewarmed: tuple[str, TrialDocument | None] = "", None
        """The id of the next attempt and its trial's document, if that was read for prewarming."""
        self._running: _Running | None = None
        self._end_baseline: HostBaseline | None = None
        """Set while the end of a trial is handled; the next trial may start meanwhile."""
        self._adopts_orphans = False
        self._warm: WarmStarts | None = None
        self._warm_marker: tuple[str, ...] = ()
        if settings.warm_imports and settings.is_reused:
            # In /proc a fork shows the interpreter's environment, not the trial's.
            self._warm_marker = (workspace.warm_marker(settings.job_id),)
            environ = self._common_environ() | {MARKER: self._warm_marker[0]}
            self._warm = WarmStarts(settings.warm_imports, environ, context.log.write, self._register)

    # ---- the next trial

    def prepare(self, effect: events.PrepareTrial) -> None:
        """Claim the attempt of a trial that the manager has dispatched, and start it."""
        context, trial_id = self._context, effect.trial_id
        workspace, settings = context.workspace, context.settings
        key = AttemptKey(trial_id, effect.attempt_id, context.task)
        is_claimed = False
        (attempt_id, prewarmed), self._prewarmed = self._prewarmed, ("", None)
        try:
            # A trial that was revoked meanwhile and is dispatched again has another document.
            if prewarmed is not None and attempt_id == effect.attempt_id:
                trial = prewarmed
            else:
                trial = read_trial(workspace, trial_id, settings.command)
            key, folder = claim_attempt(workspace, settings, trial_id, context.task, effect.attempt_id)
            is_claimed = True
            trial = with_code(workspace, trial, folder)
        except KeeperError as error:
            if not is_claimed:
                self._recorder.unclaimed.add(key)
            context.handle(events.PreparationFailed(key, time.time(), error.exit_code, str(error)))
            return
        self.begin(trial, key, folder)

    def begin(self, trial: TrialDocument, key: AttemptKey, folder: AttemptFolder) -> None:
        """Start a trial whose attempt is claimed."""
        self._prepared = {key: (trial, folder)}
        self._context.log.folders[key] = folder
        self._streams.tails[key] = Tail(folder, self._context.workspace.trials)
        self._context.log.writing(partial(self._offer_checkpoints, trial, key))
        self._context.handle(events.TrialAssigned(key))

    def _offer_checkpoints(self, trial: TrialDocument, key: AttemptKey) -> None:
        log, workspace = self._context.log, self._context.workspace
        sources, refusals = offer_checkpoints(workspace, self._context.settings, trial, key)
        for refusal in refusals:
            log.write(refusal, key)
        if sources:
            newest = sources[0]
            log.write(f"the newest verified checkpoint is {newest.name} of attempt {newest.key}", key)

    def prewarm(self, effect: events.PrewarmTrial) -> None:
        """Prewarm the next trial's process as far as possible without its folder."""
        if self._warm is not None:
            # Later: the running trial and its messages have priority.
            asyncio.get_running_loop().call_soon(self._prewarm_now, self._warm, effect)

    def _prewarm_now(self, warm: WarmStarts, effect: events.PrewarmTrial) -> None:
        workspace, trial_id = self._context.workspace, effect.trial_id
        if self._running is not None and self._running.key.trial_id == trial_id:
            return  # the trial has started already
        trial = try_read_trial(workspace, trial_id, self._context.settings.command)
        self._prewarmed = effect.attempt_id, trial
        # A trial that unpacks a code snapshot starts without prewarming.
        if trial is not None and trial.code_snapshot is None:
            folder = workspace.attempt(AttemptKey(trial_id, effect.attempt_id, self._context.task))
            warm.prewarm(trial, folder, self._environ_of(trial, folder))

    def _environ_of(self, trial: TrialDocument, folder: AttemptFolder) -> dict[str, str]:
        settings, workspace = self._context.settings, self._context.workspace
        return trial_environ(self._environ, settings.experiment_id, trial, folder, workspace)

    def _common_environ(self) -> dict[str, str]:
        """Return the part of the environment that all trials of this job share."""
        whole = self._environ_of(TrialDocument("", 0, "", ""), AttemptFolder(self._context.workspace.root))
        return self._environ | {"PYTHONPATH": whole["PYTHONPATH"]}

    # ---- the trial that runs

    def spawn(self, effect: events.SpawnTrial) -> None:
        """Start the command of the prepared trial."""
        context, streams, key = self._context, self._streams, effect.key
        trial, folder = self._prepared.pop(key)
        found = self._end_baseline or self._monitor.baseline()
        environ = self._environ_of(trial, folder)
        self._watch_markers(str(folder.path))
        warm_pid = self._warm.start(trial, folder, environ) if self._warm is not None else None
        exempt_sessions = self._exempt_sessions
        began_s, began_at_s = time.monotonic(), time.time()
        try:
            if warm_pid is not None:
                process = TrialProcess(
                    warm_pid, exempt_sessions, sys_dir=str(folder.path), preexisting_pids=found.pids
                )
            else:
                process = TrialProcess.started(
                    trial.command,
                    trial.code_dir,
                    environ,
                    folder.stream(Stream.STDOUT),
                    folder.stream(Stream.STDERR),
                    exempt_sessions,
                    found.pids,
                    self._register,
                )
                began_s, began_at_s = time.monotonic(), time.time()
        except KeeperError as error:
            context.handle(events.SpawnFailed(key, time.time(), error.exit_code, str(error)))
            return
        signer = CheckpointSigner(context.settings, key, folder)
        sampler = UsageSampler(key, folder.path, trial.gpu_indices, exempt_sessions)
        usage = UsageWatch(sampler, self._report_usage)
        running = self._running = _Running(key, folder, signer, process, usage, began_s, found)
        context.log.current = key
        running.shares_memory = self._monitor.shares_memory(SHARED_MEMORY_POLL_S)  # must not delay the start
        streams.follow(folder)
        how = "the command runs" if warm_pid is None else "the command runs, as a fork of a warm interpreter"
        context.handle(events.TrialSpawned(key, began_at_s, how, self._packages.here))
        # This call opens the files, so that a file that the trial replaces later is still tracked.
        streams.tails[key].sizes(context.settings.streams)
        if context.is_in_loop:
            usage.start()

    def enter_loop(self) -> None:
        """Continue in the event loop, which runs from now on."""
        self._adopt_orphans()
        self._context.link.limit_log_rate(are_paced=self._running is not None)
        if self._running is not None:
            self._running.usage.start()

    def poll_files(self) -> tuple[bool, float]:
        """Poll the files of the trial. Returns whether they grew, and after how long they are to be polled at the latest."""
        running = self._running
        if running is None:
            return False, _IDLE_POLL_S
        grew = self._streams.poll(running.key)
        # A mark in the metrics precedes each checkpoint, so their growth wakes this loop.
        self._sign_checkpoints(running)
        return grew, _GROUP_POLL_S if self._ends_silently else SLOW_POLL_S

    @property
    def _ends_silently(self) -> bool:
        """The group's last process need not be the keeper's child, so no signal reports its end."""
        return self._running is not None and self._running.process.ends_silently

    def _sign_checkpoints(self, running: _Running) -> None:
        if problem := running.signer.problem():
            text = f"cannot sign the new checkpoints, so they cannot be loaded: {problem}; check the storage"
            self._context.log.write(text, running.key)

    def _report_usage(self, usage: Usage) -> None:
        running = self._running
        if running is None or running.key != usage.key:
            return
        if not running.environment.python:
            environment = self._packages.of(running.folder)
            if environment.python:
                running.environment = environment
                self._context.handle(events.EnvironmentFound(usage.key, environment))
        if self._context.core.link.is_up:
            self._context.link.send(usage)

    def write_stop_notice(self, effect: events.WriteStopNotice) -> None:
        """Write the notice that training code may ask for."""
        folder = self._context.workspace.attempt(effect.key)
        notice = stop_notice_to_bytes(effect.reason)
        self._context.log.writing(partial(replace_file, folder.stop_notice_json, notice))
        # After the notice: code that asks for the first time from now on finds it.
        # False also if the storage fails: the trial then gets its signal at once. Before 3.14, `Path.exists` raises.
        is_awaited = all(map(os.path.exists, (folder.stop_notice_json, folder.awaits_stop_notice)))
        self._context.handle(events.StopNoticeWritten(effect.key, is_awaited))

    def read_stop(self) -> None:
        """Read the stop request that the manager leaves in the workspace when it has no stream to the keeper."""
        if self._running is None:
            return
        workspace = self._context.workspace
        # The file may be missing, not visible yet, or incomplete: the next poll retries.
        with contextlib.suppress(OSError, DocumentInvalid):
            path = workspace.trial(self._running.key.trial_id).stop_json
            self._context.handle(stop_from_bytes(workspace.read_document(path)))

    def signal(self, effect: events.SignalTrial) -> None:
        """Send a signal to every process of the trial."""
        if self._running is not None:
            self._running.process.signal(kill=effect.kill)
            self._streams.watcher.poll_now()

    # ---- its end

    def note_ended_child(self) -> None:
        """Handle SIGCHLD."""
        self.poll()
        if self._ends_silently:
            self._streams.watcher.poll_now()  # poll at a short interval from now on

    def poll(self) -> None:
        """Report the end of the trial, if it has ended."""
        context, running = self._context, self._running
        status = running.process.poll() if running is not None else None
        if running is None or status is None:
            return
        key, process = running.key, running.process
        leftovers = process.leftovers()
        self._sign_checkpoints(running)
        self._running = context.log.current = None
        # The warm interpreter continues. It detects the keeper's death only after its imports.
        self._watch_markers()
        at_end = self._end_baseline = self._monitor.baseline(process.seen)
        in_tmp = at_end.in_tmp - running.found.in_tmp
        if leftovers or in_tmp:
            context.handle(events.CleanupFinished(key, leftovers, _listed(in_tmp)))
        tail = self._streams.check(key)
        context.handle(
            events.TrialExited(
                key,
                time.monotonic() - running.spawned_s,
                exit_code=status if status >= 0 else None,
                signal=-status if status < 0 else None,
                sizes=tail.sizes(context.settings.streams),
                stderr_tail=tail.last_text(Stream.STDERR, _MESSAGE_BYTES) if status else "",
                out_of_memory=self._monitor.memory_shortage(
                    running.found, at_end, status, shares_memory=running.shares_memory
                ),
                environment=self._packages.of(running.folder),
            )
        )
        self._end_baseline = None
        # The next trial may run already: calls that could block come after its start.
        running.usage.stop()
        self._streams.unfollow(running.folder)
        if self._running is None:
            context.link.limit_log_rate(are_paced=False)

    def close(self) -> None:
        """Kill the trial, and end the warm interpreter."""
        if self._running is not None:
            self._running.usage.stop()
            self._running.process.signal(kill=True)
        if self._warm is not None:
            self._warm.close()
        if self._reaper is not None:
            self._reaper.close()

    # ---- the death of the keeper

    @property
    def _exempt_sessions(self) -> tuple[int, ...]:
        """The sessions of the warm interpreter and its forks, which belong to no trial."""
        return self._warm.exempt_sessions if self._warm is not None else ()

    def _watch_markers(self, *of_trial: str) -> None:
        """Set the processes that the orphan reaper ends: those of this trial and of the warm interpreter."""
        if self._reaper is not None:
            self._reaper.watch((*of_trial, *self._warm_marker), self._exempt_sessions)

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
                self._reaper.detach()
            adopt_orphans()


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    more = len(known) - _NAMES_SHOWN
    return ", ".join(known[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
