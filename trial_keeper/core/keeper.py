"""The keeper: one job's trials and the one link to the manager. Events in, effects out.

Theory of operation. A keeper is given a trial, starts its command at once, and replicates the attempt's files whenever a
manager can be reached. An end is written to exit.json before it is told, so that it is known even if nobody ever
listens. Where no network leads to a manager, that reads the same files from the shared storage, and leaves there the word to
stop a trial: who brings it makes no difference here. A job without reuse is given one trial when it starts. With reuse the
keeper says that it is idle, and is given the next trial while the last bytes of the one before may still be on their way:
attempts that have ended are kept until the manager has said that everything about them is recorded. A trial that is given to a
keeper that is busy waits here, and begins the moment the one before it is over; all that can be done before is. As long as it
waits the manager may ask for it back, for a job that has nothing to do: who then says that it does not have it never begins it.

The keeper leaves when there is nothing more for it to do: its one trial is over, or the manager says so, or it was asked by a
signal, has been idle or without any manager for too long, has run as many trials as it may, or found that a trial could not be
cleared away. It ends when the manager has everything, or when nothing has gone forward for `linger_s`: the workspace then has
all there is to know. A keeper that has never reached a manager does not wait that long for one.

All times named `now_s` are by the host's monotonic clock; `at_s` inside events are seconds since the epoch.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import replace

from trial_keeper.core.attempt import Attempt, AttemptEvent, AttemptState
from trial_keeper.core.events import (
    Effect,
    Event,
    Exit,
    ForeseeTrial,
    LinkLost,
    LinkOpened,
    LinkRefused,
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
from trial_keeper.core.link import Link, LinkEvent, LinkState, share_of
from trial_keeper.exit_codes import KeeperExit, known, of_signal
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.limits import COLLECTED_BYTES
from trial_keeper.wire.messages import (
    AttemptKey,
    AttemptOffsets,
    Durable,
    Idle,
    Leave,
    ReturnTrial,
    RunTrial,
    StopTrial,
    Stream,
    TrialEnded,
    TrialReturned,
)
from trial_keeper.wire.reasons import ExitReason

# Enough for the tries of a manager that is about to start. Behind a firewall every trial's container would stay longer by this.
LINGER_UNHEARD_S = 5.0
# A manager that is started again is there by then; a job that a firewall cuts off would hold its GPUs for nothing.
LONGEST_UNREACHED_S = 120.0
# While the last of these runs, the manager hears what is told, asks for trials and gives them. It gives so many only when trials
# are over in a moment.
PLENTY = 4


class Keeper:
    """One keeper from start to end."""

    def __init__(self, settings: KeeperSettings, now_s: float = 0.0) -> None:
        self.settings = settings
        self.link = Link(share_of(settings.job_id))
        self.current: Attempt | None = None
        """The attempt whose command has not ended."""
        self.attempts: dict[AttemptKey, Attempt] = {}
        """Those that are not closed, oldest first."""
        self._queue: deque[str] = deque()
        """The trials that follow, first come first."""
        self._served = 0
        self._was_linked = False
        self._is_leaving = not settings.is_reused
        self._is_dismissed = False
        self._was_signalled = False
        self._lingers_until_s = 0.0
        self._idle_since_s = now_s
        self._own_code: int = 0
        self._exit_code: int | None = None

    @property
    def has_plenty(self) -> bool:
        """Whether so many trials wait here that nothing has to be told at once for the next one to come in time.

        What the manager waits for besides, such as a trial that it asked back, has to all the same.
        """
        return len(self._queue) >= PLENTY

    @property
    def next_deadline_s(self) -> float | None:
        """When `TimePassed` is wanted next, by the host's clock; None when only events matter."""
        deadlines: list[float | None] = []
        if self.link.state is LinkState.WAITING:
            deadlines.append(self.link.retry_at_s)
        if self.current is not None:
            deadlines.append(self.current.kill_at_s)
        elif self._is_leaving:
            deadlines.append(self._lingers_until_s)
        else:
            deadlines.append(self._idle_until_s)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What to do about the event. Once an `Exit` was among the effects, nothing more comes."""
        if self._exit_code is not None:
            return []
        effects = self._handle(event, now_s)
        effects += self._kill_when_grace_is_over(now_s)
        effects += self._open_link_when_due(now_s)
        effects += self._chunks()
        effects += self._leave_when_idle_too_long(now_s)
        effects += self._exit_when_done(now_s)
        return effects

    def _handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case StreamsGrew():
                return self._note_growth(event)
            case StreamCut():
                return self._note_cut(event)
            case Durable():
                self.link.proved_useful()
                return self._note_durable(event.attempt, now_s)
            case RunTrial():
                return self._prepare(event.trial_id)
            case ReturnTrial():
                return self._return(event.trial_id)
            case TrialAssigned():
                return self._begin(event.key)
            case TrialUnprepared():
                self._begin(event.key)
                # The next trial would meet the same.
                why = "its trial could not be prepared, and the next one would meet the same"
                return [*self._poison(why, now_s), *self._note_end(self._never_ran(event), now_s)]
            case TrialSpawned():
                return self._note_start(event)
            case SpawnFailed():
                return self._note_end(self._never_ran(event), now_s)
            case TrialCleared():
                return self._note_leftovers(event, now_s)
            case TrialExited():
                return self._note_end(self._ended(event), now_s)
            case StopTrial():
                if event.trial_id in self._queue:
                    self._queue.remove(event.trial_id)
                    return self._foresee()  # who stops a trial that has not begun knows its end already
                is_ours = self.current is not None and self.current.key.trial_id == event.trial_id
                # Of one that it never heard of: the manager may have taken this keeper to be busy with it.
                return self._stop(event.reason, now_s) if is_ours else self._tell_idle()
            case SignalReceived():
                # Whoever signals the keeper itself ends the job: the cluster, or the manager through it. A manager that
                # asked has its own reason on record already.
                self._start_leaving(now_s)
                return [*self._stop(ExitReason.JOB_LOST, now_s), *self._note_signal()]
            case LinkOpened():
                return self._note_link(event, now_s)
            case LinkLost():
                return self._note_link_down(
                    LinkEvent.LOST, f"the link to the manager is down: {event.cause}", now_s
                )
            case LinkRefused():
                return self._note_link_down(LinkEvent.REFUSED, f"the manager refused: {event.cause}", now_s)
            case ManagerMoved():
                self.link.happened(LinkEvent.MANAGER_MOVED, now_s)
                return []
            case Leave():
                self._is_dismissed = True
                self._start_leaving(now_s)
                text = f"the manager asks to leave: {event.reason}"
                return [LogDecision(None, text), *self._stop(ExitReason.JOB_LOST, now_s)]
            case TimePassed():
                return []

    # ---- the attempt that runs

    def _prepare(self, trial_id: str) -> list[Effect]:
        if trial_id in self._queue or self._has_begun(trial_id):
            return []  # said again, because the manager could not know that it was heard
        if self._is_leaving:
            # The manager learns of this job's end, and gives the trial to whoever can run it.
            return [LogDecision(None, f"trial {trial_id} is not begun: this job is leaving")]
        if self.current is not None:
            self._queue.append(trial_id)
            return self._foresee() if len(self._queue) == 1 else []
        return [PrepareTrial(trial_id)]

    def _has_begun(self, trial_id: str) -> bool:
        return any(key.trial_id == trial_id for key in self.attempts)

    def _return(self, trial_id: str) -> list[Effect]:
        """Give a trial back. One that never came, or was given back in an answer that was lost, is not here either."""
        if self._has_begun(trial_id):
            return []  # the manager is told so anyway
        effects: list[Effect] = [Send(TrialReturned(trial_id))]
        if trial_id in self._queue:
            was_next = self._queue[0] == trial_id
            self._queue.remove(trial_id)
            effects.append(LogDecision(None, f"trial {trial_id} is given back, for a job that has none"))
            effects += self._foresee() if was_next else []
        return effects

    def _foresee(self) -> list[Effect]:
        return [ForeseeTrial(self._queue[0])] if self._queue else []

    def _begin_next(self) -> list[Effect]:
        """After a trial's end: the next one, or the word that there is none."""
        return [PrepareTrial(self._queue.popleft())] if self._queue else self._tell_idle()

    def _begin(self, key: AttemptKey) -> list[Effect]:
        attempt = self.current = self.attempts[key] = Attempt(key, self.settings.streams)
        self._served += 1
        if self.link.is_up:
            attempt.replication.link_came_up({})
        return [SpawnTrial(key)]

    def _running(self, key: AttemptKey) -> Attempt:
        if self.current is None or self.current.key != key:
            raise KeyError(key)
        return self.current

    def _note_start(self, event: TrialSpawned) -> list[Effect]:
        attempt = self._running(event.key)
        attempt.happened(AttemptEvent.SPAWNED)
        attempt.started_at_s = event.at_s
        return [*self._tell_start(attempt), LogDecision(event.key, event.how), *self._foresee()]

    def _tell_start(self, attempt: Attempt) -> list[Effect]:
        return [Send(attempt.started)] if self.link.is_up and attempt.started is not None else []

    def _tell_end(self, attempt: Attempt) -> list[Effect]:
        return [Send(attempt.ended)] if self.link.is_up and attempt.ended is not None else []

    def _tell_idle(self) -> list[Effect]:
        is_idle = self.current is None and not self._is_leaving
        return [Send(Idle())] if self.link.is_up and is_idle else []

    def _never_ran(self, event: SpawnFailed | TrialUnprepared) -> TrialEnded:
        own = known(event.exit_code)
        reason = ExitReason.COULD_NOT_START if own is None else own.reason
        sizes = dict.fromkeys(self.settings.streams, 0)
        return TrialEnded(event.key, reason, event.exit_code, event.at_s, event.at_s, sizes, event.message)

    def _note_leftovers(self, event: TrialCleared, now_s: float) -> list[Effect]:
        effects: list[Effect] = [
            LogDecision(event.key, f"cannot end process {leftover}; end it as its own user")
            for leftover in event.leftovers
        ]
        if event.in_tmp:
            effects.append(
                LogDecision(event.key, f"appeared in the temporary folder and is still there: {event.in_tmp}")
            )
        return effects + (self._poison(KeeperExit.POISONED.meaning, now_s) if event.leftovers else [])

    def _ended(self, event: TrialExited) -> TrialEnded:
        attempt = self._running(event.key)
        if event.signal is not None:
            exit_code, reason = of_signal(event.signal), ExitReason.SIGNAL
        else:
            exit_code = event.exit_code or 0
            reason = ExitReason.NONZERO_EXIT if exit_code else ExitReason.SUCCEEDED
        message = event.stderr_tail
        if event.out_of_memory is not None and exit_code:
            # Whoever was killed: a shell or a parent process passes the failure on as a code of its own.
            reason = ExitReason.OUT_OF_MEMORY
            message = f"{_told_shortage(event.out_of_memory)}\n{message}".strip()
        # A command that was asked to stop and still ended well has not failed: the reason on record says why it is over.
        reason = attempt.stop_reason or reason
        sizes = attempt.replication.final_sizes(event.sizes)
        return TrialEnded(
            event.key,
            reason,
            exit_code,
            attempt.started_at_s,
            attempt.started_at_s + event.ran_s,
            sizes,
            message if exit_code else "",
        )

    def _note_end(self, ended: TrialEnded, now_s: float) -> list[Effect]:
        attempt = self._running(ended.key)
        attempt.happened(AttemptEvent.EXITED)
        attempt.ended = ended
        attempt.kill_at_s = None
        before = attempt.replication.beyond_collection
        attempt.replication.ended(ended.final_sizes)
        self.current = None
        self._idle_since_s = now_s
        self._note_progress(now_s)
        if not self.settings.is_reused:
            self._own_code = ended.exit_code
        text = f"the command ended: {ended.reason.value}, exit code {ended.exit_code}"
        effects: list[Effect] = [
            *self._tell_limits(attempt, before, None),
            RecordExit(ended),
            LogDecision(None, text),
            *self._tell_end(attempt),
        ]
        if self.settings.max_trials and self._served >= self.settings.max_trials and not self._is_leaving:
            self._start_leaving(now_s)
            effects.append(
                LogDecision(None, f"leaving after {self._served} trials, as many as a job may run")
            )
        return effects + self._begin_next()

    def _stop(self, reason: ExitReason, now_s: float) -> list[Effect]:
        attempt = self.current
        if attempt is None:
            return []
        was_running = attempt.state is AttemptState.RUNNING
        attempt.happened(AttemptEvent.STOP_ASKED)
        if not was_running:
            return []
        attempt.stop_reason = reason
        attempt.kill_at_s = now_s + self.settings.grace_s
        return [LogDecision(attempt.key, f"stopping: {reason.value}"), SignalTrial(attempt.key, kill=False)]

    def _note_signal(self) -> list[Effect]:
        """Whoever signals twice will not wait."""
        was_signalled, self._was_signalled = self._was_signalled, True
        attempt = self.current
        if not was_signalled or attempt is None or attempt.kill_at_s is None:
            return []
        attempt.kill_at_s = None
        return [
            LogDecision(attempt.key, "signalled again: killing it at once"),
            SignalTrial(attempt.key, kill=True),
        ]

    def _kill_when_grace_is_over(self, now_s: float) -> list[Effect]:
        attempt = self.current
        if attempt is None or attempt.kill_at_s is None or now_s < attempt.kill_at_s:
            return []
        attempt.kill_at_s = None
        text = f"still there {self.settings.grace_s:g} s after the polite signal: killing it"
        return [LogDecision(attempt.key, text), SignalTrial(attempt.key, kill=True)]

    # ---- the attempts that are not closed

    def _note_growth(self, event: StreamsGrew) -> list[Effect]:
        attempt = self.attempts.get(event.key)
        if attempt is None:
            return []
        before = attempt.replication.beyond_collection
        attempt.replication.grew(event.sizes)
        return self._tell_limits(attempt, before, event.key)

    def _tell_limits(
        self, attempt: Attempt, before: Collection[Stream], key: AttemptKey | None
    ) -> list[Effect]:
        return [
            LogDecision(
                key,
                f"{stream.value} has reached the {COLLECTED_BYTES[stream]} bytes that are collected of it; "
                "what follows stays in its file and is not sent",
            )
            for stream in attempt.replication.beyond_collection
            if stream not in before
        ]

    def is_due(self, effect: SendChunk) -> bool:
        """Whether the chunk is still to be sent, after what an earlier one of the same round has met."""
        attempt = self.attempts.get(effect.key)
        return attempt is not None and attempt.replication.is_due(effect.chunk)

    def _note_cut(self, event: StreamCut) -> list[Effect]:
        attempt = self.attempts[event.key]
        end = attempt.replication.cut(event.stream, event.offset, event.size)
        text = (
            f"somebody cut the file of {event.stream.value} to {event.size} bytes: what follows byte {end} of it is not "
            "delivered, the other streams go on; let the command append to its files only"
        )
        if attempt.ended is None:
            return [LogDecision(event.key, text)]
        attempt.ended = replace(
            attempt.ended, final_sizes=attempt.replication.final_sizes(attempt.ended.final_sizes)
        )
        return [LogDecision(None, text), RecordExit(attempt.ended), *self._tell_end(attempt)]

    def _close(self, attempt: Attempt, now_s: float) -> list[Effect]:
        if attempt.ended is None:
            # Still running, although the manager has given it up: nobody waits for its results any more.
            return self._stop(ExitReason.JOB_LOST, now_s)
        attempt.happened(AttemptEvent.CLOSED)
        del self.attempts[attempt.key]
        return [ReleaseAttempt(attempt.key)]

    def _note_durable(self, entry: AttemptOffsets, now_s: float) -> list[Effect]:
        self._note_progress(now_s)
        attempt = self.attempts.get(entry.key)
        if attempt is None:
            return []
        attempt.replication.confirmed(entry.offsets)
        return self._close(attempt, now_s) if entry.closed else []

    def _chunks(self) -> list[Effect]:
        return [
            SendChunk(attempt.key, chunk)
            for attempt in self.attempts.values()
            for chunk in attempt.replication.next_chunks()
        ]

    # ---- the link

    def _open_link_when_due(self, now_s: float) -> list[Effect]:
        if not self.link.is_due(now_s):
            return []
        self.link.happened(LinkEvent.DUE, now_s)
        return [OpenLink(tuple(self.attempts))]

    def _note_link(self, event: LinkOpened, now_s: float) -> list[Effect]:
        self.link.happened(LinkEvent.OPENED, now_s)
        self._was_linked = True
        self._note_progress(now_s)
        known = {entry.key: entry for entry in event.welcome.attempts}
        effects: list[Effect] = []
        for attempt in list(self.attempts.values()):
            entry = known.get(attempt.key, AttemptOffsets(attempt.key, {}))
            attempt.replication.link_came_up(entry.offsets)
            if entry.closed:
                effects += self._close(attempt, now_s)
            else:
                effects += [*self._tell_start(attempt), *self._tell_end(attempt)]
        return effects + self._tell_idle()

    def _note_progress(self, now_s: float) -> None:
        linger_s = self.settings.linger_s
        self._lingers_until_s = now_s + (linger_s if self._was_linked else min(linger_s, LINGER_UNHEARD_S))

    def _note_link_down(self, event: LinkEvent, text: str, now_s: float) -> list[Effect]:
        self.link.happened(event, now_s)
        for attempt in self.attempts.values():
            attempt.replication.link_went_down()
        if event is LinkEvent.REFUSED and self.current is None:
            self._idle_since_s = now_s  # another manager may come, and think otherwise
        # One line for an outage, however many tries it lasts; a refusal is a decision of its own.
        is_news = self.link.state is LinkState.REFUSED or self.link.failures == 1
        return [LogDecision(None, text)] if is_news else []

    # ---- the end

    def _start_leaving(self, now_s: float) -> None:
        if not self._is_leaving:
            self._is_leaving = True
            self._queue.clear()  # the manager gives them to another job
            self._note_progress(now_s)

    def _poison(self, why: str, now_s: float) -> list[Effect]:
        if not self.settings.is_reused:
            return []
        self._start_leaving(now_s)
        self._own_code = KeeperExit.POISONED
        return [LogDecision(None, f"leaving: {why}")]

    @property
    def _idle_until_s(self) -> float:
        settings = self.settings
        if self.link.state is LinkState.REFUSED:
            return self._idle_since_s + settings.linger_s
        is_unreached = not self._was_linked
        return self._idle_since_s + (
            min(settings.idle_timeout_s, LONGEST_UNREACHED_S) if is_unreached else settings.idle_timeout_s
        )

    def _leave_when_idle_too_long(self, now_s: float) -> list[Effect]:
        if self.current is not None or self._is_leaving or now_s < self._idle_until_s:
            return []
        self._start_leaving(now_s)
        if self.link.state is LinkState.REFUSED:
            self._own_code = KeeperExit.REFUSED
            return [LogDecision(None, "leaving: the manager gives this job no trials")]
        if not self._was_linked:
            self._own_code = KeeperExit.UNREACHED
            return [LogDecision(None, f"leaving: {KeeperExit.UNREACHED.meaning}")]
        return [LogDecision(None, f"leaving: no trial has come for {self.settings.idle_timeout_s:g} s")]

    def _exit_when_done(self, now_s: float) -> list[Effect]:
        if self.current is not None or not self._is_leaving or not (self._served or self.settings.is_reused):
            return []
        if self.attempts and not self._is_dismissed and now_s < self._lingers_until_s:
            return []
        self._exit_code = self._own_code
        return [Exit(self._exit_code)]


def _told_shortage(shortage: OutOfMemory) -> str:
    if shortage.limit_bytes is not None:
        found = f"the container's memory limit of {_told_size(shortage.limit_bytes)} was reached"
    else:
        found = "the machine's memory was full"
        if shortage.peak_bytes is not None:
            found += f" (this container has used up to {_told_size(shortage.peak_bytes)} of it)"
    return (
        f"{found}, and the kernel killed a process of the trial; "
        "ask for more memory in the experiment file or use a smaller batch"
    )


def _told_size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"
