"""The keeper: one job's trials and the one link to the manager. Events in, effects out.

Theory of operation. The keeper starts a trial's command as soon as it receives the trial, and replicates the attempt's files
whenever a manager is reachable. The keeper writes an end to exit.json before it reports the end, so a record exists even without
a connection. If no network connects keeper and manager, the manager reads the same files from the shared storage, and writes its
stop request there.

A job without reuse receives one trial when it starts. With reuse the keeper reports that it is idle, and may receive the next
trial while the last bytes of the previous trial are in transit. The keeper keeps ended attempts until the manager has
acknowledged all their data. A prefetched trial waits in the keeper's queue, is prewarmed, and starts as soon as the previous
trial ends. A queued trial can be revoked for an idle job; a keeper that acknowledges the revoke never starts the trial.

The keeper drains when its single trial has ended, or when it has run the maximum number of trials. It also drains on `Shutdown`,
on a signal, after a trial that could not be cleaned up, and after too long a time without a trial or without any manager. The
keeper exits when the manager has everything, or after `linger_s` without progress: the workspace then has the complete record.
A keeper that never connected, or that a signal ends without its manager, lingers less, unless exit.json could not be written.

All times named `now_s` are on the host's monotonic clock; `at_s` inside events are seconds since the epoch.
"""

from itertools import islice

from trial_keeper.core import events
from trial_keeper.core.attempt import Attempt, AttemptEvent, AttemptState, never_started
from trial_keeper.core.events import Effect, LogDecision, Send
from trial_keeper.core.link import Link, LinkEvent, LinkState, jitter
from trial_keeper.core.replication import Replication, SendChunk
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire import messages as m
from trial_keeper.wire.file_changes import FileChange, file_warning
from trial_keeper.wire.messages import AttemptKey, Stream, TrialEnded
from trial_keeper.wire.reasons import ExitReason

# Enough to connect to a manager that is starting. Behind a firewall every trial's container lingers this long.
SHORT_LINGER_S = 5.0
# Covers a manager's restart; a job behind a firewall would otherwise hold its GPUs for nothing.
MAX_UNREACHABLE_S = 120.0
# While the last of these trials runs, the manager receives the reports and dispatches more. The manager prefetches as many only
# if trials are very short.
PLENTY = 4


class Keeper:
    """One keeper from start to end."""

    def __init__(self, settings: KeeperSettings, now_s: float = 0.0) -> None:
        self.settings = settings
        self.link = Link(jitter(settings.job_id))
        self.current: Attempt | None = None
        """The attempt whose command has not ended."""
        self.attempts: dict[AttemptKey, Attempt] = {}
        """Attempts that are not closed, oldest first."""
        self._queue: dict[str, m.RunTrial] = {}
        """Prefetched trials by id, in dispatch order."""
        self._served = 0
        self._was_linked = False
        self._is_draining = not settings.is_reused
        self._received_shutdown = False
        self._was_signalled = False
        self._lingers_until_s = 0.0
        self._record_is_incomplete = False
        self._idle_since_s = now_s
        self._own_code: int = 0
        self._exit_code: int | None = None

    @property
    def queue_is_deep(self) -> bool:
        """True when the local queue is deep enough that messages may be batched without idling.

        Messages that the manager waits for, such as the ack of a revoke, are still sent at once.
        """
        return len(self._queue) >= PLENTY

    @property
    def next_deadline_s(self) -> float | None:
        """When `TimerFired` is due next, on the host's clock; None if no timer is needed."""
        retry_at_s = self.link.retry_at_s if self.link.state is LinkState.WAITING else None
        own_s: tuple[float | None, ...]
        if self.current is not None:
            own_s = self.current.terminate_at_s, self.current.kill_at_s
        else:
            own_s = (self._lingers_until_s if self._is_draining else self._idle_until_s,)
        return min((each for each in (retry_at_s, *own_s) if each is not None), default=None)

    def handle(self, event: events.Event, now_s: float) -> list[Effect]:
        """Return the effects of an event; none after `ExitKeeper`."""
        if self._exit_code is not None:
            return []
        effects = self._handle(event, now_s)
        effects += self._signal_when_due(now_s)
        effects += self._open_link_when_due(now_s)
        effects += self._chunks()
        effects += self._drain_when_idle_too_long(now_s)
        effects += self._exit_when_done(now_s)
        return effects

    def _handle(self, event: events.Event, now_s: float) -> list[Effect]:
        match event:
            case events.StreamsGrew():
                return self._note_growth(event)
            case events.StreamTruncated():
                return self._note_truncation(event)
            case events.StreamChanged():
                return self._note_change(event)
            case events.MetricsMeasured():
                return self._note_size_at_stop(event)
            case events.StopNoticeWritten():
                return self._note_notice(event, now_s)
            case events.ExitNotRecorded():
                self._record_is_incomplete = True
                self._note_progress(now_s)
                limit = f"for {self.settings.linger_s:g} s without a manager"
                return [LogDecision(None, f"exit.json could not be written; retrying, {limit}")]
            case m.Ack():
                self.link.reset_backoff()
                return self._note_durable(event.attempt, now_s)
            case m.RunTrial():
                return self._prepare(event, now_s)
            case m.RevokeTrial():
                return self._revoke(event.trial_id)
            case events.TrialAssigned():
                return self._start_attempt(event.key)
            case events.PreparationFailed():
                self._start_attempt(event.key)
                # The cause is in the container, so the next trial would fail too.
                why = "the trial could not be prepared, and the next trial would fail the same way"
                return [*self._taint(why, now_s), *self._note_end(self._never_ran(event), now_s)]
            case events.TrialSpawned():
                return self._note_start(event)
            case events.EnvironmentFound():
                attempt = self._running(event.key)
                attempt.environment = event.environment
                return self._report(attempt.started)
            case events.SpawnFailed():
                return self._note_end(self._never_ran(event), now_s)
            case events.CleanupFinished():
                return self._note_leftovers(event, now_s)
            case events.TrialExited():
                warnings = self._warn_of_truncation(self._running(event.key), event.sizes)
                return [*warnings, *self._note_end(self._running(event.key).end_of(event), now_s)]
            case m.StopTrial(reason=ExitReason.PREEMPTED):
                # The cluster's signal follows, or has been received: then the stop has its reason.
                if self.current is None or self.current.key.trial_id != event.trial_id:
                    return []
                self._start_draining(now_s)
                return self._stop(event.reason, now_s)
            case m.StopTrial():
                if event.trial_id in self._queue:
                    del self._queue[event.trial_id]
                    return self._prewarm_next()  # no report: the manager records the end
                is_ours = self.current is not None and self.current.key.trial_id == event.trial_id
                # Report idle for an unknown trial: the manager's record may still assign that trial to this keeper.
                return self._stop(event.reason, now_s) if is_ours else self._report_idle()
            case events.SignalReceived():
                # A signal to the keeper ends the job. It comes from the cluster, sometimes on a request of the manager, which has
                # then recorded its own reason.
                self._start_draining(now_s)
                return [*self._stop(ExitReason.JOB_LOST, now_s), *self._note_signal(now_s)]
            case m.Welcome():
                return self._note_link(event, now_s)
            case events.LinkLost():
                return self._note_link_down(LinkEvent.LOST, "the link to the manager is down", event, now_s)
            case events.LinkRefused():
                return self._note_link_down(LinkEvent.REFUSED, "the manager refused", event, now_s)
            case events.ManagerMoved():
                self.link.apply(LinkEvent.MANAGER_MOVED, now_s)
                return []
            case m.Shutdown():
                self._received_shutdown = True
                self._start_draining(now_s)
                text = f"the manager sent Shutdown: {event.reason}"
                return [LogDecision(None, text), *self._stop(ExitReason.JOB_LOST, now_s)]
            case events.TimerFired():
                return []

    # ---- the attempt that runs

    def _prepare(self, run: m.RunTrial, now_s: float) -> list[Effect]:
        trial_id = run.trial_id
        if trial_id in self._queue or self._has_started(trial_id):
            return []  # a resend: the manager has no proof that the first message arrived
        if self._is_draining:
            # The manager detects this job's end and dispatches the trial to another one.
            return [LogDecision(None, f"trial {trial_id} is not started: this job is draining")]
        if self.current is not None:
            self._queue[trial_id] = run
            return self._prewarm_next() if len(self._queue) == 1 else []
        # The idle timeout may be over, and the keeper must not exit before the trial starts.
        self._idle_since_s = now_s
        return [events.PrepareTrial(trial_id, run.attempt_id)]

    def _has_started(self, trial_id: str) -> bool:
        return any(key.trial_id == trial_id for key in self.attempts)

    def _revoke(self, trial_id: str) -> list[Effect]:
        """Acknowledge a revoke. A trial that never arrived, or whose acknowledgement was lost, is acknowledged as well."""
        if self._has_started(trial_id):
            return []  # the manager receives its start anyway
        effects: list[Effect] = [Send(m.TrialRevoked(trial_id))]
        if trial_id in self._queue:
            was_next = next(iter(self._queue)) == trial_id
            del self._queue[trial_id]
            effects.append(LogDecision(None, f"trial {trial_id} is revoked, for an idle job"))
            effects += self._prewarm_next() if was_next else []
        return effects

    def _prewarm_next(self) -> list[Effect]:
        return [events.PrewarmTrial(run.trial_id, run.attempt_id) for run in islice(self._queue.values(), 1)]

    def _start_next(self) -> list[Effect]:
        """Start the next queued trial, or report that the keeper is idle."""
        if not self._queue:
            return self._report_idle()
        run = self._queue.pop(next(iter(self._queue)))
        return [events.PrepareTrial(run.trial_id, run.attempt_id)]

    def _start_attempt(self, key: AttemptKey) -> list[Effect]:
        attempt = self.current = self.attempts[key] = Attempt(key, Replication(self.settings.streams))
        self._served += 1
        if self.link.is_up:
            attempt.replication.link_came_up({})
        return [events.SpawnTrial(key)]

    def _running(self, key: AttemptKey) -> Attempt:
        if self.current is None or self.current.key != key:
            raise KeyError(key)
        return self.current

    def _note_start(self, event: events.TrialSpawned) -> list[Effect]:
        attempt = self._running(event.key)
        attempt.apply(AttemptEvent.SPAWNED)
        attempt.started_at_s, attempt.environment = event.at_s, event.environment
        return [*self._report(attempt.started), LogDecision(event.key, event.how), *self._prewarm_next()]

    def _report(self, message: m.TrialStarted | TrialEnded | m.Idle | None) -> list[Effect]:
        return [Send(message)] if self.link.is_up and message is not None else []

    def _report_idle(self) -> list[Effect]:
        return self._report(m.Idle() if self.current is None and not self._is_draining else None)

    def _never_ran(self, event: events.SpawnFailed) -> TrialEnded:
        return never_started(event.key, self.settings.streams, event.exit_code, event.at_s, event.message)

    def _note_leftovers(self, event: events.CleanupFinished, now_s: float) -> list[Effect]:
        effects: list[Effect] = [
            LogDecision(event.key, f"cannot kill process {leftover}; kill it as its own user")
            for leftover in event.leftovers
        ]
        if event.in_tmp:
            effects.append(
                LogDecision(event.key, f"the trial left files in the temporary folder: {event.in_tmp}")
            )
        return effects + (self._taint(KeeperExit.TAINTED.meaning, now_s) if event.leftovers else [])

    def _note_end(self, ended: TrialEnded, now_s: float) -> list[Effect]:
        attempt = self._running(ended.key)
        attempt.apply(AttemptEvent.EXITED)
        attempt.ended = ended
        attempt.terminate_at_s = attempt.kill_at_s = None
        attempt.replication.ended(ended.final_sizes)
        self.current = None
        self._idle_since_s = now_s
        self._note_progress(now_s)
        if not self.settings.is_reused:
            # Where other tasks have ended the trial, the cluster must not count this task as the one that failed.
            self._own_code = 0 if ended.reason is ExitReason.TRIAL_OVER else ended.exit_code
        effects: list[Effect] = [
            *self._report_limits(attempt, None),
            events.RecordExit(ended),
            LogDecision(None, f"the command ended: {ended.reason.value}, exit code {ended.exit_code}"),
            *self._report(attempt.ended),
        ]
        if self.settings.max_trials and self._served >= self.settings.max_trials and not self._is_draining:
            self._start_draining(now_s)
            effects.append(LogDecision(None, f"draining after {self._served} trials, the maximum of a job"))
        return effects + self._start_next()

    def _stop(self, reason: ExitReason, now_s: float) -> list[Effect]:
        attempt = self.current
        if attempt is None:
            return []
        was_running = attempt.state is AttemptState.RUNNING
        attempt.apply(AttemptEvent.STOP_ASKED)
        if not was_running:
            return []
        attempt.stop_reason = reason
        attempt.kill_at_s = now_s + self.settings.grace_s
        return [
            LogDecision(attempt.key, f"stopping: {reason.value}"),
            events.MeasureMetrics(attempt.key),
            events.WriteStopNotice(attempt.key, reason),
        ]

    def _note_size_at_stop(self, event: events.MetricsMeasured) -> list[Effect]:
        attempt = self._running(event.key)
        # A size that was measured before counts as written even if the file is shorter now.
        attempt.metrics_size_at_stop = max(event.size, attempt.replication.size_of(Stream.METRICS))
        return []

    def _note_notice(self, event: events.StopNoticeWritten, now_s: float) -> list[Effect]:
        """Give training code that awaits the notice half of the grace period before SIGTERM."""
        attempt = self._running(event.key)
        if not event.is_awaited:
            return [events.SignalTrial(attempt.key, kill=False)]
        delay_s = self.settings.grace_s / 2
        attempt.terminate_at_s = now_s + delay_s
        return [
            LogDecision(attempt.key, f"the training code awaits the stop notice: SIGTERM in {delay_s:g} s")
        ]

    def _note_signal(self, now_s: float) -> list[Effect]:
        """Kill the trial at once on a second signal."""
        was_signalled, self._was_signalled = self._was_signalled, True
        self._lingers_until_s = min(self._lingers_until_s, now_s + self._linger_s)
        attempt = self.current
        if not was_signalled or attempt is None or attempt.kill_at_s is None:
            return []
        return self._kill(attempt, "received a second signal: killing the trial at once")

    def _signal_when_due(self, now_s: float) -> list[Effect]:
        attempt = self.current
        if attempt is None:
            return []
        if attempt.kill_at_s is not None and now_s >= attempt.kill_at_s:
            return self._kill(
                attempt, f"the trial still runs {self.settings.grace_s:g} s after the stop: killing it"
            )
        if attempt.terminate_at_s is None or now_s < attempt.terminate_at_s:
            return []
        attempt.terminate_at_s = None
        text = "the trial still runs after half of the grace period: sending SIGTERM"
        return [LogDecision(attempt.key, text), events.SignalTrial(attempt.key, kill=False)]

    def _kill(self, attempt: Attempt, text: str) -> list[Effect]:
        attempt.terminate_at_s = attempt.kill_at_s = None
        return [LogDecision(attempt.key, text), events.SignalTrial(attempt.key, kill=True)]

    # ---- the attempts that are not closed

    def _note_growth(self, event: events.StreamsGrew) -> list[Effect]:
        attempt = self.attempts.get(event.key)
        if attempt is None:
            return []
        effects = self._warn_of_truncation(attempt, event.sizes)
        attempt.replication.grew(event.sizes)
        return effects + self._report_limits(attempt, event.key)

    def _warn_of_truncation(self, attempt: Attempt, sizes: m.Offsets) -> list[Effect]:
        truncated = attempt.replication.truncated(sizes)
        return [
            effect for stream in truncated for effect in self._warn(attempt, stream, FileChange.TRUNCATED)
        ]

    def _warn(self, attempt: Attempt, stream: Stream, change: FileChange) -> list[Effect]:
        if stream in attempt.warnings:
            return []
        text = attempt.warnings[stream] = file_warning(stream, change)
        return self._amend(attempt, text)

    def _amend(self, attempt: Attempt, text: str) -> list[Effect]:
        """Log a change to the attempt's files. If the attempt has ended, record and report its end again."""
        if attempt.ended is None:
            return [LogDecision(attempt.key, text)]
        ended = attempt.amend(attempt.ended)
        return [LogDecision(None, text), events.RecordExit(ended), *self._report(ended)]

    def _note_change(self, event: events.StreamChanged) -> list[Effect]:
        attempt = self.attempts.get(event.key)
        if attempt is None or event.stream not in self.settings.streams:
            return []
        return self._warn(attempt, event.stream, event.change)

    def _report_limits(self, attempt: Attempt, key: AttemptKey | None) -> list[Effect]:
        return [LogDecision(key, text) for text in attempt.new_limits()]

    def is_due(self, chunk: SendChunk) -> bool:
        """True if the chunk is still to be sent after the earlier chunks of the same round."""
        attempt = self.attempts.get(chunk.key)
        return attempt is not None and attempt.replication.is_due(chunk)

    def _note_truncation(self, event: events.StreamTruncated) -> list[Effect]:
        attempt = self.attempts[event.key]
        end = attempt.replication.cut(event.stream, event.offset, event.size)
        text = (
            f"the {event.stream.value} file was truncated to {event.size} bytes: bytes after {end} are not delivered, "
            "other streams continue; let the command only append to its files"
        )
        attempt.warnings.setdefault(event.stream, file_warning(event.stream, FileChange.TRUNCATED))
        return self._amend(attempt, text)

    def _close(self, attempt: Attempt, entry: m.AttemptOffsets, now_s: float) -> list[Effect]:
        if attempt.ended is None:
            # The attempt still runs, but the manager needs no results: other tasks have ended the trial, or it is abandoned.
            return self._stop(ExitReason.TRIAL_OVER if entry.trial_succeeded else ExitReason.JOB_LOST, now_s)
        attempt.apply(AttemptEvent.CLOSED)
        del self.attempts[attempt.key]
        return [events.ReleaseAttempt(attempt.key)]

    def _note_durable(self, entry: m.AttemptOffsets, now_s: float) -> list[Effect]:
        self._note_progress(now_s)
        attempt = self.attempts.get(entry.key)
        if attempt is None:
            return []
        attempt.replication.confirmed(entry.offsets)
        return self._close(attempt, entry, now_s) if entry.closed else []

    def _chunks(self) -> list[Effect]:
        return [
            chunk
            for attempt in self.attempts.values()
            for chunk in attempt.replication.next_chunks(attempt.key)
        ]

    # ---- the link

    def _open_link_when_due(self, now_s: float) -> list[Effect]:
        if not self.link.is_due(now_s):
            return []
        self.link.apply(LinkEvent.DUE, now_s)
        return [events.OpenLink()]

    def _note_link(self, welcome: m.Welcome, now_s: float) -> list[Effect]:
        self.link.apply(LinkEvent.OPENED, now_s)
        self._was_linked = True
        self._note_progress(now_s)
        known = {entry.key: entry for entry in welcome.attempts}
        effects: list[Effect] = []
        for attempt in list(self.attempts.values()):
            entry = known.get(attempt.key, m.AttemptOffsets(attempt.key, {}))
            attempt.replication.link_came_up(entry.offsets)
            if entry.closed:
                effects += self._close(attempt, entry, now_s)
            else:
                effects += [*self._report(attempt.started), *self._report(attempt.ended)]
        return effects + self._report_idle()

    def _note_progress(self, now_s: float) -> None:
        self._lingers_until_s = now_s + self._linger_s

    @property
    def _linger_s(self) -> float:
        is_away = not self._was_linked or (self._was_signalled and self.link.state is not LinkState.UP)
        # Without exit.json and a manager, the trial's result would be lost with the keeper.
        is_needed = self._record_is_incomplete or not is_away
        return self.settings.linger_s if is_needed else min(self.settings.linger_s, SHORT_LINGER_S)

    def _note_link_down(
        self, change: LinkEvent, what: str, event: events.LinkLost | events.LinkRefused, now_s: float
    ) -> list[Effect]:
        self.link.apply(change, now_s)
        for attempt in self.attempts.values():
            attempt.replication.link_went_down()
        if change is LinkEvent.REFUSED and self.current is None:
            self._idle_since_s = now_s  # another manager may accept this job
        # One log line per outage, however many attempts it lasts; each refusal is logged.
        is_new = self.link.state is LinkState.REFUSED or self.link.failures == 1
        return [LogDecision(None, f"{what}: {event.cause}")] if is_new else []

    # ---- the end

    def _start_draining(self, now_s: float) -> None:
        if not self._is_draining:
            self._is_draining = True
            self._queue.clear()  # the manager assigns these trials to another job
            self._note_progress(now_s)

    def _drain(self, code: int, why: str, now_s: float) -> list[Effect]:
        self._start_draining(now_s)
        self._own_code = code
        return [LogDecision(None, f"draining: {why}")]

    def _taint(self, why: str, now_s: float) -> list[Effect]:
        return self._drain(KeeperExit.TAINTED, why, now_s) if self.settings.is_reused else []

    @property
    def _idle_until_s(self) -> float:
        timeout_s = self.settings.idle_timeout_s
        if self.link.state is LinkState.REFUSED:
            timeout_s = self.settings.linger_s
        elif not self._was_linked:
            timeout_s = min(timeout_s, MAX_UNREACHABLE_S)
        return self._idle_since_s + timeout_s

    def _drain_when_idle_too_long(self, now_s: float) -> list[Effect]:
        if self.current is not None or self._is_draining or now_s < self._idle_until_s:
            return []
        if self.link.state is LinkState.REFUSED:
            return self._drain(KeeperExit.REFUSED, "the manager refuses this job", now_s)
        if not self._was_linked:
            code = KeeperExit.MANAGER_UNREACHABLE
            return self._drain(code, code.meaning, now_s)
        why = f"no trial was received for {self.settings.idle_timeout_s:g} s"
        return self._drain(self._own_code, why, now_s)

    def _exit_when_done(self, now_s: float) -> list[Effect]:
        if self.current is not None or not self._is_draining or not (self._served or self.settings.is_reused):
            return []
        if self.attempts and not self._received_shutdown and now_s < self._lingers_until_s:
            return []
        self._exit_code = self._own_code
        return [events.ExitKeeper(self._exit_code)]
