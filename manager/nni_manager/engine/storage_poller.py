"""The shared-storage transport: reads the files of keepers that have no connection.

Both transports use the same bytes, offsets and `AttemptIngest`, so they may overlap. `domain/transports.py` decides which
jobs are polled, and when.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from nni_manager.domain.admission_errors import ProtocolError
from nni_manager.domain.attempts import HAVE_STARTED, AttemptPhase
from nni_manager.domain.events import AttemptStarted, KeeperSeenOnStorage, ProblemFound
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.ingest import OffsetGap
from nni_manager.domain.trial import Trial
from nni_manager.engine.keeper_admission import KeeperAdmission
from nni_manager.engine.keeper_ingest import KeeperIngest
from nni_manager.engine.runtime import Runtime
from nni_manager.engine.shared_files import STORAGE_LAG_S, AttemptReadout, FoundAttempts, SharedFiles
from nni_manager.engine.storage_executor import THREADS, StorageExecutor
from nni_manager.errors import RetryableError, UserError
from trial_keeper.wire.limits import QUOTA_BYTES, collected
from trial_keeper.wire.messages import AttemptKey, Offsets, Stream

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# The longest pause while no poll is due: the maximum delay of a poll that becomes due meanwhile.
_MAX_PAUSE_S = 0.5
# Bounds one poll to 4 MiB of each stream, so that other jobs get their turn.
_ROUNDS_PER_POLL = 16
_RETRY_DELAY_S = 0.2
# Failing storage is polled and reported until it works again: its files are not lost.
_FAILED_POLL_RETRY_DELAY_S = 2.0
_REPORTED = float("-inf")


class StoragePermissionDenied(UserError):
    """cannot read the files of a trial; let containers leave their files readable to the manager's user"""


@dataclass(eq=False)
class SharedStoragePoller:
    """Polls the attempts whose keepers are not connected, and drains those whose keepers have ended."""

    runtime: Runtime
    experiment: ExperimentCore
    files: SharedFiles
    storage: StorageExecutor
    admission: KeeperAdmission
    ingest: KeeperIngest
    streams: tuple[Stream, ...]
    """The streams to collect, most urgent first."""
    lag_s: float
    """The time after which the storage shows what other machines have written; 0: they write nothing."""
    _failures: dict[str, str] = field(default_factory=dict)
    """Why the files of a job cannot be read at present, by job id."""
    _rejected: dict[str, tuple[str, float]] = field(default_factory=dict)
    """The message about a rejected attempt of each trial, and its time; `_REPORTED` once it is reported."""
    _polling: int = 0

    @property
    def problems(self) -> list[str]:
        """Why the workspace, or parts of it, cannot be read at present; empty if they can."""
        stalled_s = self.storage.stalled_s()
        if stalled_s:
            stalled = (
                f"cannot read {self.files.workspace.root}: the shared storage has not answered for {stalled_s:.0f} s; check "
                "its server and the network to it. Connected keepers are not affected"
            )
            return [stalled]
        live = self.experiment.jobs.live
        return list(dict.fromkeys(failure for job_id, failure in self._failures.items() if job_id in live))

    # ---- while the job runs

    async def follow(self) -> None:
        """Start due polls until cancelled."""
        while True:
            now_s = time.monotonic()
            job_id = self.experiment.transports.next_poll(now_s) if self._polling < THREADS else None
            if job_id is not None:
                self._polling += 1
                self.runtime.spawn(self._poll(job_id))
            due_at_s = self.experiment.transports.next_poll_at_s()
            pause_s = _MAX_PAUSE_S if due_at_s is None else min(due_at_s - now_s, _MAX_PAUSE_S)
            await asyncio.sleep(max(pause_s, 1e-3) if self._polling < THREADS else _RETRY_DELAY_S)

    async def _poll(self, job_id: str) -> None:
        try:
            for trial in self._trials_of(job_id):
                found = await self.storage.call(
                    self.files.find_attempts, trial.trial_id, self.admission.signer_of(trial)
                )
                self._note_rejected(trial, found)
                for key in found.newest:
                    await self._follow_attempt(job_id, trial, key)
            self._failures.pop(job_id, None)
        except (OSError, RetryableError, ProtocolError) as error:
            self._note_failure(job_id, error)
        finally:
            self._polling -= 1
            self.experiment.transports.polled(job_id, time.monotonic())

    def _trials_of(self, job_id: str) -> list[Trial]:
        job = self.experiment.jobs.live.get(job_id)
        return [] if job is None else self.experiment.scheduler.trials_of(job)

    async def _follow_attempt(self, job_id: str, trial: Trial, key: AttemptKey) -> None:
        for _ in range(_ROUNDS_PER_POLL):
            if not self._is_wanted(job_id, trial, key):
                return
            seen = await self.storage.call(
                self.files.see_attempt, key, self._offsets(key), self.admission.signer_of(trial)
            )
            if not seen.has_started or not self._is_wanted(job_id, trial, key):
                return
            has_new_data = bool(seen.pieces) or trial.phase_of(key) not in HAVE_STARTED
            self.experiment.transports.found(job_id, key.task, time.monotonic(), has_new_data=has_new_data)
            if not self.experiment.jobs.live[job_id].was_found:
                self.runtime.post(KeeperSeenOnStorage(job_id))
            self._report_start(trial, seen)
            await self._ingest_readout(seen)
            if not seen.pieces:
                return

    def _is_wanted(self, job_id: str, trial: Trial, key: AttemptKey) -> bool:
        """True if more data of the attempt is expected over this transport."""
        return (
            trial in self._trials_of(job_id)
            and trial.is_current(key)
            and trial.phase_of(key) is not AttemptPhase.DELIVERED
            and self.experiment.transports.polls_storage(job_id, key.task, time.monotonic())
        )

    def _note_rejected(self, trial: Trial, found: FoundAttempts, *, lag_has_passed: bool = False) -> None:
        """Report a rejected attempt once, after the storage lag. Until then a signed attempt may be only partly visible."""
        # During a restore, the trials are not in the experiment yet.
        if not found.rejected or trial.trial_id not in self.experiment.trials:
            return
        now_s = time.monotonic()
        message, since_s = self._rejected.get(trial.trial_id, ("", now_s))
        if since_s == _REPORTED:
            return
        if message not in found.rejected:
            message, since_s = found.rejected[0], now_s
        is_due = lag_has_passed or now_s - since_s >= self.lag_s
        self._rejected[trial.trial_id] = (message, _REPORTED if is_due else since_s)
        if is_due:
            log.warning("trial %s: %s", trial.trial_id, message)
            self.runtime.post(ProblemFound(trial.trial_id, message))

    async def report_rejected(self, trial: Trial) -> None:
        """Report rejected attempts of a trial whose job has ended."""
        try:
            found = await self.storage.call(
                self.files.find_attempts, trial.trial_id, self.admission.signer_of(trial)
            )
        except (OSError, RetryableError) as error:  # only a warning is lost
            log.info("trial %s: %s", trial.trial_id, _reason_of(error))
        else:
            self._note_rejected(trial, found, lag_has_passed=True)

    def _report_start(self, trial: Trial, seen: AttemptReadout) -> None:
        if trial.phase_of(seen.key) not in HAVE_STARTED:
            at_s = time.time() if seen.ended is None else seen.ended.started_at_s
            self.runtime.post(AttemptStarted(seen.key, at_s))

    def _offsets(self, key: AttemptKey) -> Offsets:
        received = {stream: self.ingest.received(key, stream) for stream in self.streams}
        return {stream: offset for stream, offset in received.items() if offset < QUOTA_BYTES[stream]}

    async def _ingest_readout(self, seen: AttemptReadout) -> None:
        await self.ingest.commits.wait_for_capacity()
        if self.experiment.trials[seen.key.trial_id].state.is_terminal:
            return
        try:
            for stream, offset, data in seen.pieces:
                self.ingest.take(seen.key, stream, offset, data)
        except OffsetGap as error:
            # The attempt was closed or lost while the storage was read: the next poll starts from the current offsets.
            log.info("trial %s: %s", seen.key, error)
            return
        if seen.ended is not None:
            self.ingest.end(seen.ended)
        # Backpressure: the next bytes stay in the files until these are stored.
        await asyncio.shield(self.runtime.durable())

    # ---- after the job ended

    async def scan_remaining(self, trial: Trial, *, may_be_late: bool) -> list[AttemptReadout]:
        """The state of the newest attempt of each task, without stream data; empty if no current attempt was claimed.

        `may_be_late`: wait for ends that other machines have written and that are not visible yet. Failing storage is retried
        until it works.

        Raises:
            StoragePermissionDenied: the manager has no read permission on the storage.
        """
        deadline_s = time.monotonic() + (STORAGE_LAG_S if may_be_late else 0.0)
        while True:
            signer = self.admission.signer_of(trial)
            found = await self._with_retries(trial, self.files.find_attempts, trial.trial_id, signer)
            self._note_rejected(trial, found)
            keys = [key for key in found.newest if trial.is_current(key)]
            see = partial(self.files.see_attempt, offsets={}, signer=signer, has_ended=True)
            left = [await self._with_retries(trial, see, key) for key in keys]
            if (left and all(each.ended for each in left)) or time.monotonic() >= deadline_s:
                return left
            await asyncio.sleep(_RETRY_DELAY_S)

    async def drain(
        self, trial: Trial, left: AttemptReadout, on_stored: Callable[[], None] = lambda: None
    ) -> None:
        """Ingest all data in the attempt's files, and wait for bytes within its final sizes that are not visible yet.

        `on_stored` is called after each piece is stored.

        Raises:
            StoragePermissionDenied: the manager has no read permission on the storage.
        """
        deadline_s = time.monotonic() + STORAGE_LAG_S
        while True:
            offsets = await self._with_retries_here(trial, lambda: self._offsets(left.key))
            signer = self.admission.signer_of(trial)
            see = partial(self.files.see_attempt, left.key, offsets, signer, has_ended=True)
            seen = await self._with_retries(trial, see)
            if trial.state.is_terminal:
                return
            await self._ingest_readout(AttemptReadout(seen.key, seen.has_started, seen.pieces, None))
            if seen.pieces:
                on_stored()
                deadline_s = time.monotonic() + STORAGE_LAG_S
            elif self._has_all(left) or time.monotonic() > deadline_s:
                return
            else:
                await asyncio.sleep(_RETRY_DELAY_S)

    async def drain_source(self, trial: Trial, key: AttemptKey) -> None:
        """Ingest the metrics of an earlier attempt of a trial that its keeper has not delivered.

        Raises:
            StoragePermissionDenied: the manager has no read permission on the storage.
        """
        signer = await self._with_retries(
            trial, self.files.signer_of_attempt, key, self.admission.signer_of(trial)
        )
        before = -1
        while signer is not None and not trial.state.is_terminal:
            received = await self._with_retries_here(trial, lambda: self.ingest.received(key, Stream.METRICS))
            if received in (before, QUOTA_BYTES[Stream.METRICS]):
                return
            before, offsets = received, {Stream.METRICS: received}
            see = partial(self.files.see_attempt, key, offsets, signer, has_ended=True)
            seen = await self._with_retries(trial, see)
            if not seen.pieces:
                return
            await self._ingest_readout(AttemptReadout(key, True, seen.pieces, None))

    async def missing_attempts(self, trial: Trial) -> Path | None:
        """The folder of the trial's attempts if it is gone although there were attempts; None: it is there."""
        if not trial.registered.registered:
            return None
        is_there = await self.storage.call(self.files.has_folder_of_attempts, trial.trial_id)
        return None if is_there else self.files.workspace.trial(trial.trial_id).attempts

    def _has_all(self, left: AttemptReadout) -> bool:
        sizes = {} if left.ended is None else left.ended.final_sizes
        return all(
            self.ingest.received(left.key, stream) >= collected(stream, sizes.get(stream, 0))
            for stream in self.streams
        )

    async def _with_retries(self, trial: Trial, read: Callable[..., Answer], *arguments: object) -> Answer:
        """Read the storage, on its thread."""
        return await self._retried(trial, lambda: self.storage.call(read, *arguments))

    async def _with_retries_here(self, trial: Trial, read: Callable[[], Answer]) -> Answer:
        """Read the database, whose reader belongs to the event loop's thread. Another process may keep it busy."""

        async def read_here() -> Answer:
            return read()

        return await self._retried(trial, read_here)

    async def _retried(self, trial: Trial, read: Callable[[], Awaitable[Answer]]) -> Answer:
        while True:
            try:
                answer = await read()
            except PermissionError as error:
                raise StoragePermissionDenied(_reason_of(error)) from error  # a retry would not help
            except (OSError, RetryableError) as error:
                self._note_failure(trial.job_id, error)
                await asyncio.sleep(_FAILED_POLL_RETRY_DELAY_S)
            else:
                self._failures.pop(trial.job_id, None)
                return answer

    # ---- internals

    def _note_failure(self, job_id: str, error: Exception) -> None:
        if job_id not in self._failures:
            log.warning("job %s: %s", job_id, _reason_of(error))
        self._failures[job_id] = _reason_of(error)


def _reason_of(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    remedy = (
        "let containers leave their files readable to the manager's user"
        if isinstance(error, PermissionError)
        else "check the shared storage on the manager's machine"
    )
    return f"cannot read {error.filename}: {error.strerror}; {remedy}"
