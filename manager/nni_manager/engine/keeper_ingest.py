"""Ingests what keepers deliver over gRPC and what the storage poller reads: starts, stream data and ends of attempts."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

from nni_manager.domain import events
from nni_manager.domain.admission_errors import ProtocolError
from nni_manager.domain.attempts import AttemptPhase
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.ingest import AttemptIngest, StreamWrite
from nni_manager.domain.learning_curve import (
    InheritedResults,
    LearningCurve,
    Segment,
    StoredMark,
    curve_of,
    first_of_load,
)
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import METRICS_ARE_CUT
from nni_manager.engine.commits import GroupCommit
from nni_manager.engine.connected_keepers import ConnectedKeeper, ConnectedKeepers
from nni_manager.engine.provenance import ProvenanceRecorder
from nni_manager.engine.runtime import Runtime
from nni_manager.store.reader import StoreReader
from nni_sdk.records import Mark
from trial_keeper.wire import messages
from trial_keeper.wire.limits import QUOTA_BYTES
from trial_keeper.wire.messages import AttemptKey, AttemptOffsets, Stream
from trial_keeper.wire.workspace import Workspace

log = logging.getLogger(__name__)

# The maximum number of attempts of one trial. A cluster that restarts a task more often needs its user's attention.
MAX_ATTEMPTS = 1000
# Characters kept of a trial's exit message, in memory and in lists: twice the stderr tail that a keeper sends.
MESSAGE_CHARACTERS = 8192
# Corrupt spans of an attempt that get a line in the manager's log. The store has the total, which `nnictl trial ls` shows.
GARBAGE_LINES = 10


@dataclass(eq=False)
class KeeperIngest:
    """The attempts whose data is being received. Stores the data and reports to the experiment.

    One `AttemptIngest` per attempt exists from its first byte to its close, across any number of gRPC streams.
    """

    runtime: Runtime
    experiment: ExperimentCore
    commits: GroupCommit
    """Stores the data of all keepers."""
    reader: StoreReader
    workspace: Workspace
    keepers: ConnectedKeepers
    provenance: ProvenanceRecorder
    _open: dict[AttemptKey, AttemptIngest] = field(default_factory=dict)
    _garbage_lines: dict[AttemptKey, int] = field(default_factory=dict)
    _awaiting: dict[AttemptKey, AttemptKey] = field(default_factory=dict)
    """Attempts that continue from a checkpoint whose mark is not stored yet, by the attempt that saved it."""
    _reading: set[AttemptKey] = field(default_factory=set)
    """Those of the attempts that saved it whose metrics are being read from the workspace."""

    # ---- messages of keepers

    def receive(self, keeper: ConnectedKeeper, message: messages.KeeperMessage) -> None:
        """Handle a message of an admitted keeper; see `KeeperSession.receive`."""
        self.experiment.transports.received(keeper.job_id, keeper.task, time.monotonic())
        match message:
            case messages.Hello():
                raise ProtocolError(
                    "cannot accept a second Hello on one stream; use the keeper of the manager's version"
                )
            case messages.Idle():
                self.runtime.post(events.KeeperIdle(keeper.job_id, keeper.task))
            case messages.TrialRevoked():
                if self.keepers.has(keeper):
                    # An answer on a superseded stream may belong to an earlier revoke.
                    self.runtime.post(events.TrialReclaimed(keeper.job_id, message.trial_id, time.time()))
            case _:
                self._receive_of_attempt(keeper, message)

    def _receive_of_attempt(
        self,
        keeper: ConnectedKeeper,
        message: messages.Chunk | messages.TrialStarted | messages.TrialEnded | messages.Usage,
    ) -> None:
        key = message.key
        trial = self.own_trial(keeper, key)
        if trial.job_id != keeper.job_id:
            # The keeper's job was abandoned, and the trial is reassigned or waits for a new job: ignore the message.
            if isinstance(message, messages.TrialStarted | messages.TrialEnded):
                keeper.outgoing.put_nowait(_closed(key))
            return
        match message:
            case messages.Chunk():
                if not (trial.state.is_terminal or trial.phase_of(key) is AttemptPhase.DELIVERED):
                    self.take(key, message.stream, message.offset, message.data)
            case messages.TrialStarted():
                self.runtime.post(events.AttemptStarted(key, message.started_at_s))
                self.provenance.note(key, message.environment)
            case messages.TrialEnded():
                self.end(replace(message, message=message.message[-MESSAGE_CHARACTERS:]))
            case messages.Usage():
                self.runtime.post(events.UsageReported(message))

    def own_trial(self, keeper: ConnectedKeeper, key: AttemptKey) -> Trial:
        """The trial of a message that the keeper may send. A trial of an abandoned job may have another job by now.

        Raises:
            ProtocolError: the trial belongs to another job or task, or has too many attempts.
        """
        trial, job_id = self.experiment.trials.get(key.trial_id), keeper.job_id
        is_own = trial is not None and (trial.job_id == job_id or job_id not in self.experiment.jobs.live)
        if trial is None or not is_own or key.task != keeper.task:
            raise ProtocolError(
                f"cannot accept {key} from task {keeper.task} of job {keeper.job_id}: the attempt belongs to another job or "
                "task; stop the job"
            )
        self._check_count(trial, key)
        return trial

    # ---- data, over gRPC or from the workspace

    def received(self, key: AttemptKey, stream: Stream) -> int:
        """The offset up to which bytes of a stream of an attempt have arrived."""
        return self._ingest_of(key).received(stream)

    def offsets(self, key: AttemptKey) -> AttemptOffsets:
        """The durable offsets of an attempt."""
        return AttemptOffsets(key, dict(self._ingest_of(key).durable))

    def take(self, key: AttemptKey, stream: Stream, offset: int, data: bytes) -> None:
        """Ingest bytes of an attempt.

        Raises:
            OffsetGap: bytes are missing before them.
        """
        ingest = self._ingest_of(key)
        commits = ingest.take(stream, offset, data)
        if commits and commits[-1].is_last_collected:
            commits[-1] = self._truncate(commits[-1])
        self._store(ingest, commits)

    def end(self, ended: messages.TrialEnded) -> None:
        """Record the end of an attempt. The attempt is delivered when all its bytes are durable."""
        self.runtime.post(events.AttemptEnded(ended))
        self.provenance.note(ended.key, ended.environment)
        if self.experiment.trials[ended.key.trial_id].state.is_terminal:
            return  # the experiment has already closed the attempt
        ingest = self._ingest_of(ended.key)
        commits = ingest.end(ended.final_sizes)
        self._store(ingest, commits)
        if not commits:
            self._report_delivered(ingest)

    def close(self, key: AttemptKey) -> None:
        """Close an attempt whose data is stored completely, so that its keeper may discard the data."""
        state = self.experiment.trials[key.trial_id].state
        self._ack(replace(self.offsets(key), closed=True, trial_succeeded=state is TrialState.SUCCEEDED))
        if state.is_terminal:
            # Also drop attempts of this task without a reported end: no more of their data is accepted.
            for other in [
                each for each in self._open if (each.trial_id, each.task) == (key.trial_id, key.task)
            ]:
                self._drop(other)
        self._drop(key)

    def forget_trial(self, trial: Trial, job_id: str) -> None:
        """Accept no more data of a trial that the job has lost, and notify the keepers that still report it."""
        for key in [key for key in self._open if key.trial_id == trial.trial_id]:
            self.keepers.send(job_id, key.task, _closed(key))
            self._drop(key)

    # ---- internals

    def _ack(self, attempt: AttemptOffsets) -> None:
        job_id = self.experiment.trials[attempt.key.trial_id].job_id
        self.keepers.send(job_id, attempt.key.task, messages.Ack(attempt))

    def _check_count(self, trial: Trial, key: AttemptKey) -> None:
        if len(trial.registered.registered) >= MAX_ATTEMPTS and trial.registered.find(key) is None:
            raise ProtocolError(
                f"cannot accept {key}: the trial already has {MAX_ATTEMPTS} attempts; stop the job"
            )

    def _store(self, ingest: AttemptIngest, commits: list[StreamWrite]) -> None:
        if any(commit.records or any(map(_is_continuation, commit.marks)) for commit in commits):
            # Posted first, so that the task whose metrics count is stored no later than its records.
            self.runtime.post(events.TaskReported(ingest.key))
        for commit in commits:
            self.commits.add([commit]).add_done_callback(partial(self._note_committed, ingest, commit))

    def _truncate(self, commit: StreamWrite) -> StreamWrite:
        """Report the truncation of a stream before its last write is stored, and note it at the end of a log."""
        key, stream = commit.key, commit.stream
        message = quota_message(stream, self.workspace.attempt(key).stream(stream))
        log.warning("trial %s: %s", key, message)
        self.runtime.post(events.ProblemFound(key.trial_id, message, key))
        is_log = stream is not Stream.METRICS
        return replace(commit, postscript=f"\n[trial-keeper] {message}\n".encode()) if is_log else commit

    def _note_committed(
        self, ingest: AttemptIngest, commit: StreamWrite, done: "asyncio.Future[None]"
    ) -> None:
        if done.cancelled() or done.exception() is not None:
            return  # no ack; the writer's own task reports the error and ends the manager
        try:
            self._report_stored(ingest, commit)
        except Exception as error:  # noqa: BLE001 - the loop would only log it, and these results would never be reported
            self.runtime.fail(error)

    def _report_stored(self, ingest: AttemptIngest, commit: StreamWrite) -> None:
        key = ingest.key
        ingest.committed(commit)
        self._log_garbage(commit)
        self._ack(AttemptOffsets(key, dict(ingest.durable)))
        first = self._note_marks(commit) if commit.marks else 0
        counted = [record for record in commit.records if record.offset >= first]
        records = tuple((record.type == "FINAL", record.value) for record in counted)
        if records:
            final_offset = next((record.offset for record in counted if record.type == "FINAL"), None)
            self.runtime.post(events.MetricsStored(key, records, final_offset))
        self._report_delivered(ingest)

    def _report_delivered(self, ingest: AttemptIngest) -> None:
        """Report a completely stored attempt, unless the results before its checkpoint are still being read."""
        key = ingest.key
        if ingest.is_complete and not any(self._awaiting.get(source) == key for source in self._reading):
            self.runtime.post(events.AttemptDelivered(key))

    # ---- checkpoints

    @property
    def awaited(self) -> tuple[AttemptKey, ...]:
        """The attempts from whose checkpoints others continue, and whose marks are not stored."""
        return tuple(self._awaiting)

    def restore_source(self, trial: Trial) -> None:
        """Await again the results before the checkpoint from which a restored trial continues, unless they are stored."""
        attempt, task = trial.run.attempt, trial.run.reporter
        if attempt is None or task is None:
            return  # it has reported nothing
        curve = curve_of(trial.trial_id, self.reader.marks(trial.trial_id), attempt, task)
        if curve.missing is not None:
            self._awaiting[curve.missing] = trial.attempts[task].key

    def awaits_source(self, key: AttemptKey) -> bool:
        """True if the results before the checkpoint from which the attempt continues are not stored."""
        return key in self._awaiting.values()

    def begin_source(self, source: AttemptKey) -> None:
        """Delay the delivery of the attempt that continues from this one until `end_source`."""
        self._reading.add(source)

    def end_source(self, source: AttemptKey) -> None:
        """Note that the workspace has no further metrics of the attempt."""
        self._reading.discard(source)
        if (successor := self._awaiting.get(source)) in self._open:
            self._report_delivered(self._open[successor])

    def is_awaited(self, source: AttemptKey) -> bool:
        """True if an attempt continues from a checkpoint of this one whose mark is not stored."""
        return source in self._awaiting

    def _note_marks(self, commit: StreamWrite) -> int:
        """Report the last continuation in a stored write; returns the offset from which the records of the write count."""
        key = commit.key
        marks = self.reader.marks(key.trial_id)
        number = _number_of(key, marks)
        first = None
        for mark in filter(_is_continuation, commit.marks):
            if first_of_load(marks, number, key.task, mark.load) == mark.offset:
                first = mark.offset
        if first is not None:
            curve = curve_of(key.trial_id, marks, number, key.task, first + 1)
            self._report_continuation(key, curve, curve.segments[:-1])
        if (successor := self._awaiting.get(key)) is not None:
            curve = curve_of(key.trial_id, marks, _number_of(successor, marks), successor.task)
            if curve.missing != key:
                del self._awaiting[key]
                # The results after those of this attempt have been reported.
                self._report_continuation(successor, curve, curve.up_to(number, key.task), is_late=True)
                if successor in self._open:
                    self._report_delivered(self._open[successor])
        return first or 0

    def _report_continuation(
        self, key: AttemptKey, curve: LearningCurve, new: Sequence[Segment], *, is_late: bool = False
    ) -> None:
        """`curve`: that of the attempt. `new`: its segments of earlier results that have not been reported for the attempt."""
        if curve.missing is not None:
            self._awaiting[curve.missing] = key
        inherited = self._inherited(key.trial_id, new)
        self.runtime.post(events.AttemptContinued(key, inherited, is_late, curve.missing))

    def _inherited(self, trial_id: str, segments: Sequence[Segment]) -> InheritedResults:
        newest, count = self.reader.progress_of(trial_id, segments)
        pages = partial(self.reader.segment_pages, trial_id)
        finals = chain.from_iterable(pages(segment, True) for segment in segments)
        final = next((page[0].value for page in finals), None)
        numbers: list[float] = []
        feedback = self.experiment.feedback
        # The assessor of a run that has reported intermediate results has those before its checkpoint.
        if feedback.is_assessed and not self.experiment.trials[trial_id].run.intermediate_count:
            rows = chain.from_iterable(chain.from_iterable(pages(segment, False) for segment in segments))
            seen = (feedback.seen_by_assessor(row.value) for row in rows)
            numbers = [number for number in seen if number is not None]
        return InheritedResults(count, None if newest is None else newest["value"], tuple(numbers), final)

    def _drop(self, key: AttemptKey) -> None:
        self._open.pop(key, None)
        self._garbage_lines.pop(key, None)
        self.provenance.forget(key)

    def _log_garbage(self, commit: StreamWrite) -> None:
        for span in commit.garbage if commit.key in self._open else ():
            logged = self._garbage_lines[commit.key] = self._garbage_lines.get(commit.key, 0) + 1
            if logged > GARBAGE_LINES:
                return
            log.warning(
                "trial %s: %d bytes of metrics at offset %d are not a record: %s%s",
                commit.key,
                span.length,
                span.offset,
                span.reason,
                "; further corrupt spans are not logged" if logged == GARBAGE_LINES else "",
            )

    def _ingest_of(self, key: AttemptKey) -> AttemptIngest:
        ingest = self._open.get(key)
        if ingest is None:
            trial = self.experiment.trials[key.trial_id]
            self._check_count(trial, key)
            if trial.registered.find(key) is None:
                # Posted first, so that the attempt's number is stored no later than its data.
                self.runtime.post(events.AttemptSeen(key))
            ingest = self._open[key] = AttemptIngest.restored(key, self.reader.offsets(key))
        return ingest


def _number_of(key: AttemptKey, marks: Sequence[StoredMark]) -> int:
    """The number of an attempt that has marks; 0 if it has none."""
    numbers = (mark.attempt for mark in marks if (mark.attempt_id, mark.task) == (key.attempt_id, key.task))
    return next(numbers, 0)


def _is_continuation(mark: Mark) -> bool:
    return mark.attempt_id is not None


def _closed(key: AttemptKey) -> messages.Ack:
    """The ack that closes an attempt: the manager needs no more of its data."""
    return messages.Ack(AttemptOffsets(key, {}, closed=True))


def quota_message(stream: Stream, whole: Path) -> str:
    """The warning about a stream that has reached its quota. `whole`: the complete file of the trial."""
    size_bytes = QUOTA_BYTES[stream]
    what = METRICS_ARE_CUT if stream is Stream.METRICS else f"its {stream.value} is cut"
    return (
        f"{what} at {size_bytes} bytes ({size_bytes / (1 << 30):.3g} GiB), the quota of one attempt; "
        f"the complete file is {whole}; let the training code write less"
    )
