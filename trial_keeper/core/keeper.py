"""The keeper: one job's trials and the one link to the manager. Events in, effects out.

Theory of operation. A keeper is given a trial, starts its command at once, and replicates the attempt's files whenever a
manager can be reached. An end is written to exit.json before it is told, so that it is known even if nobody ever
listens. The keeper ends when the manager has said that everything about the attempt is recorded, or when nothing has gone
forward for `linger_s`: the workspace then has all there is to know.

All times named `now_s` are by the host's monotonic clock; `at_s` inside events are seconds since the epoch.
"""

from dataclasses import replace

from trial_keeper.core.attempt import Attempt, AttemptEvent, AttemptState
from trial_keeper.core.events import (
    Effect,
    Event,
    Exit,
    LinkLost,
    LinkOpened,
    LinkRefused,
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
from trial_keeper.core.link import Link, LinkEvent, LinkState
from trial_keeper.exit_codes import of_signal
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import AttemptKey, AttemptOffsets, Durable, Leave, StopTrial, TrialEnded
from trial_keeper.wire.reasons import ExitReason


class Keeper:
    """One keeper from start to end."""

    def __init__(self, settings: KeeperSettings) -> None:
        self.settings = settings
        self.link = Link()
        self.attempt: Attempt | None = None
        self._lingers_until_s: float | None = None
        self._asked_to_leave = False
        self._was_signalled = False
        self._exit_code: int | None = None

    @property
    def next_deadline_s(self) -> float | None:
        """When `TimePassed` is wanted next, by the host's clock; None when only events matter."""
        deadlines = [self._lingers_until_s]
        if self.link.state is LinkState.WAITING:
            deadlines.append(self.link.retry_at_s)
        if self.attempt is not None:
            deadlines.append(self.attempt.kill_at_s)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """What to do about the event. Once an `Exit` was among the effects, nothing more comes."""
        if self._exit_code is not None:
            return []
        effects = self._handle(event, now_s)
        effects += self._kill_when_grace_is_over(now_s)
        effects += self._open_link_when_due(now_s)
        effects += self._chunks()
        effects += self._exit_when_done(now_s)
        return effects

    def _handle(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case StreamsGrew():
                self._attempt(event.key).replication.grew(event.sizes)
                return []
            case StreamCut():
                return self._note_cut(event)
            case Durable():
                self.link.proved_useful()
                return self._note_durable(event.attempt, now_s)
            case TrialAssigned():
                self.attempt = Attempt(event.key, self.settings.streams)
                return [SpawnTrial(event.key)]
            case TrialSpawned():
                return self._note_start(event)
            case SpawnFailed():
                return self._note_end(
                    TrialEnded(
                        event.key,
                        ExitReason.COULD_NOT_START,
                        event.exit_code,
                        event.at_s,
                        event.at_s,
                        dict.fromkeys(self.settings.streams, 0),
                        event.message,
                    ),
                    now_s,
                )
            case TrialExited():
                return [*_told_leftovers(event), *self._note_end(self._ended(event), now_s)]
            case StopTrial():
                is_ours = self.attempt is not None and self.attempt.key.trial_id == event.trial_id
                return self._stop(event.reason, now_s) if is_ours else []
            case SignalReceived():
                # Whoever signals the keeper itself ends the job: the cluster, or the manager through it. A manager that
                # asked has its own reason on record already.
                return [*self._stop(ExitReason.JOB_LOST, now_s), *self._note_signal(now_s)]
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
                self._asked_to_leave = True
                text = f"the manager asks to leave: {event.reason}"
                return [LogDecision(None, text), *self._stop(ExitReason.JOB_LOST, now_s)]
            case TimePassed():
                return []

    # ---- the attempt

    def _attempt(self, key: AttemptKey) -> Attempt:
        if self.attempt is None or self.attempt.key != key:
            raise KeyError(key)
        return self.attempt

    def _note_start(self, event: TrialSpawned) -> list[Effect]:
        attempt = self._attempt(event.key)
        attempt.happened(AttemptEvent.SPAWNED)
        attempt.started_at_s = event.at_s
        return [*self._tell_start(attempt), LogDecision(event.key, "the command runs")]

    def _tell_start(self, attempt: Attempt) -> list[Effect]:
        return [Send(attempt.started)] if self.link.is_up and attempt.started is not None else []

    def _tell_end(self, attempt: Attempt) -> list[Effect]:
        return [Send(attempt.ended)] if self.link.is_up and attempt.ended is not None else []

    def _ended(self, event: TrialExited) -> TrialEnded:
        attempt = self._attempt(event.key)
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
            event.at_s,
            sizes,
            message if exit_code else "",
        )

    def _note_end(self, ended: TrialEnded, now_s: float) -> list[Effect]:
        attempt = self._attempt(ended.key)
        attempt.happened(AttemptEvent.EXITED)
        attempt.ended = ended
        attempt.kill_at_s = None
        attempt.replication.ended(ended.final_sizes)
        self._lingers_until_s = now_s + self.settings.linger_s
        text = f"the command ended: {ended.reason.value}, exit code {ended.exit_code}"
        return [RecordExit(ended), LogDecision(None, text), *self._tell_end(attempt)]

    def is_due(self, effect: SendChunk) -> bool:
        """Whether the chunk is still to be sent, after what an earlier one of the same round has met."""
        return self._attempt(effect.key).replication.is_due(effect.chunk)

    def _note_cut(self, event: StreamCut) -> list[Effect]:
        attempt = self._attempt(event.key)
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

    def _stop(self, reason: ExitReason, now_s: float) -> list[Effect]:
        attempt = self.attempt
        if attempt is None:
            self._asked_to_leave = True
            return []
        was_running = attempt.state is AttemptState.RUNNING
        attempt.happened(AttemptEvent.STOP_ASKED)
        if not was_running:
            return []
        attempt.stop_reason = reason
        attempt.kill_at_s = now_s + self.settings.grace_s
        return [LogDecision(attempt.key, f"stopping: {reason.value}"), SignalTrial(attempt.key, kill=False)]

    def _note_signal(self, now_s: float) -> list[Effect]:
        """Whoever signals twice will not wait."""
        was_signalled, self._was_signalled = self._was_signalled, True
        attempt = self.attempt
        if not was_signalled or attempt is None or attempt.kill_at_s is None:
            return []
        attempt.kill_at_s = None
        return [
            LogDecision(attempt.key, "signalled again: killing it at once"),
            SignalTrial(attempt.key, kill=True),
        ]

    def _kill_when_grace_is_over(self, now_s: float) -> list[Effect]:
        attempt = self.attempt
        if attempt is None or attempt.kill_at_s is None or now_s < attempt.kill_at_s:
            return []
        attempt.kill_at_s = None
        text = f"still there {self.settings.grace_s:g} s after the polite signal: killing it"
        return [LogDecision(attempt.key, text), SignalTrial(attempt.key, kill=True)]

    # ---- the link

    def _open_link_when_due(self, now_s: float) -> list[Effect]:
        if not self.link.is_due(now_s):
            return []
        self.link.happened(LinkEvent.DUE, now_s)
        attempt = self.attempt
        return [OpenLink((attempt.key,) if attempt is not None else ())]

    def _note_link(self, event: LinkOpened, now_s: float) -> list[Effect]:
        self.link.happened(LinkEvent.OPENED, now_s)
        self._note_progress(now_s)
        attempt = self.attempt
        if attempt is None:
            return []
        known = {entry.key: entry for entry in event.welcome.attempts}
        entry = known.get(attempt.key, AttemptOffsets(attempt.key, {}))
        attempt.replication.link_came_up(entry.offsets)
        if entry.closed:
            return self._close(attempt, now_s)
        return [*self._tell_start(attempt), *self._tell_end(attempt)]

    def _close(self, attempt: Attempt, now_s: float) -> list[Effect]:
        if attempt.ended is None:
            # Still running, although the manager has given it up: nobody waits for its results any more.
            return self._stop(ExitReason.JOB_LOST, now_s)
        attempt.happened(AttemptEvent.CLOSED)
        return []

    def _note_progress(self, now_s: float) -> None:
        if self._lingers_until_s is not None:
            self._lingers_until_s = now_s + self.settings.linger_s

    def _note_link_down(self, event: LinkEvent, text: str, now_s: float) -> list[Effect]:
        self.link.happened(event, now_s)
        attempt = self.attempt
        if attempt is not None:
            attempt.replication.link_went_down()
        # One line for an outage, however many tries it lasts; a refusal is a decision of its own.
        is_news = self.link.state is LinkState.REFUSED or self.link.failures == 1
        return [LogDecision(None, text)] if is_news else []

    def _note_durable(self, entry: AttemptOffsets, now_s: float) -> list[Effect]:
        self._note_progress(now_s)
        attempt = self.attempt
        if attempt is None or attempt.key != entry.key:
            return []
        attempt.replication.confirmed(entry.offsets)
        return self._close(attempt, now_s) if entry.closed else []

    def _chunks(self) -> list[Effect]:
        attempt = self.attempt
        if attempt is None or attempt.state is AttemptState.CLOSED:
            return []
        return [SendChunk(attempt.key, chunk) for chunk in attempt.replication.next_chunks()]

    # ---- the end

    def _exit_when_done(self, now_s: float) -> list[Effect]:
        attempt = self.attempt
        ended = attempt.ended if attempt is not None else None
        if attempt is not None and ended is None:
            return []
        closed = attempt is not None and attempt.state is AttemptState.CLOSED
        waited_enough = self._lingers_until_s is not None and now_s >= self._lingers_until_s
        if not (closed or waited_enough or self._asked_to_leave):
            return []
        self._exit_code = ended.exit_code if ended is not None else 0
        return [Exit(self._exit_code)]


def _told_leftovers(event: TrialExited) -> list[Effect]:
    return [
        LogDecision(event.key, f"cannot end process {leftover}; end it as its own user")
        for leftover in event.leftovers
    ]


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
