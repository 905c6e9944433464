"""The road without a network: what keepers cannot tell is read from their files on the shared storage.

The same bytes, offsets and `Receiver` as on the stream, so the two may race. `domain/roads.py` decides who is looked at, and
when.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TypeVar

from nni_manager.domain.events import AttemptStarted, Event, KeeperFound
from nni_manager.domain.experiment import Experiment
from nni_manager.domain.receiving import StreamBroken
from nni_manager.domain.refusals import ProtocolBroken
from nni_manager.domain.trial import Trial
from nni_manager.engine.commits import GroupCommit
from nni_manager.engine.keepers import Keepers
from nni_manager.engine.shared_files import SharedFiles
from nni_manager.engine.storage_threads import THREADS, StorageThreads
from nni_manager.engine.trial_files import STORAGE_LAG_S, Seen
from nni_manager.errors import TryAgain, UserMistake
from trial_keeper.wire.limits import COLLECTED_BYTES, collected
from trial_keeper.wire.messages import AttemptKey, Offsets, StopTrial, Stream
from trial_keeper.wire.reasons import ExitReason

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# With nothing due. What becomes due meanwhile waits that much longer.
_LONGEST_PAUSE_S = 0.5
# 4 MiB of a stream, then it is others' turn.
_ROUNDS_PER_LOOK = 16
_LOOK_AGAIN_S = 0.2
# Storage that fails is tried again, and shown, as long as it fails: what lies there is lost to nobody.
_FAILED_LOOK_AGAIN_S = 2.0
# A word that cannot be left does not hold up the cluster's own stop for longer.
_LONGEST_WRITE_S = 5.0


class FilesClosed(UserMistake):
    """cannot read what a trial has written"""


class MountRoad:
    """Follows the attempts whose keepers are not connected, and takes what those that are gone have left."""

    def __init__(
        self,
        experiment: Experiment,
        files: SharedFiles,
        keepers: Keepers,
        commits: GroupCommit,
        streams: tuple[Stream, ...],
        post: Callable[[Event], None],
    ) -> None:
        """`streams`: what is collected of an attempt, most urgent first."""
        self.threads = StorageThreads()
        self._experiment = experiment
        self._files = files
        self._keepers = keepers
        self._commits = commits
        self._streams = streams
        self._post = post
        self._failures: dict[str, str] = {}
        """What keeps the files of a job from being read at present."""
        self._looking = 0

    @property
    def problem(self) -> str:
        """Why the workspace cannot be read at present; empty while all is well."""
        hangs_for_s = self.threads.hangs_for_s()
        if hangs_for_s:
            return (
                f"cannot read {self._files.workspace.root}: the shared storage has not answered for {hangs_for_s:.0f} s; check "
                "its server and the network to it. Keepers that are connected are not concerned"
            )
        live = self._experiment.jobs.live
        return next((failure for job_id, failure in self._failures.items() if job_id in live), "")

    # ---- while the job runs

    async def follow(self, spawn: Callable[[Coroutine[None, None, None]], object]) -> None:
        """Look at whatever is due, for ever. `spawn` runs the looks."""
        roads = self._keepers.roads
        while True:
            now_s = time.monotonic()
            job_id = roads.next_look(now_s) if self._looking < THREADS else None
            if job_id is not None:
                self._looking += 1
                spawn(self._look(job_id))
            due_at_s = roads.next_look_at_s()
            pause_s = _LONGEST_PAUSE_S if due_at_s is None else min(due_at_s - now_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(max(pause_s, 1e-3) if self._looking < THREADS else _LOOK_AGAIN_S)

    async def _look(self, job_id: str) -> None:
        try:
            for trial in self._trials_of(job_id):
                for key in await self.threads.call(self._files.newest_attempts, trial.trial_id):
                    await self._follow_attempt(job_id, trial, key)
            self._failures.pop(job_id, None)
        except (OSError, TryAgain, ProtocolBroken) as error:
            self._note_failure(job_id, error)
        finally:
            self._looking -= 1
            self._keepers.roads.looked(job_id, time.monotonic())

    def _trials_of(self, job_id: str) -> list[Trial]:
        job = self._experiment.jobs.live.get(job_id)
        return [] if job is None else self._experiment.trials_of(job)

    async def _follow_attempt(self, job_id: str, trial: Trial, key: AttemptKey) -> None:
        for _ in range(_ROUNDS_PER_LOOK):
            if not self._is_wanted(job_id, trial, key):
                return
            seen = await self.threads.call(self._files.see_attempt, key, self._offsets(key))
            if not seen.has_begun or not self._is_wanted(job_id, trial, key):
                return
            has_news = bool(seen.pieces) or not trial.knows(key)
            self._keepers.roads.found(job_id, key.task, time.monotonic(), has_news=has_news)
            if not self._experiment.jobs.live[job_id].was_found:
                self._post(KeeperFound(job_id))
            self._tell_start(trial, seen)
            await self._hand_over(seen)
            if not seen.pieces:
                return

    def _is_wanted(self, job_id: str, trial: Trial, key: AttemptKey) -> bool:
        """Whether anything of the attempt is still to come, and by this road."""
        is_told = key.task in trial.ends and key.task not in trial.undelivered
        return (
            trial in self._trials_of(job_id)
            and trial.counts(key)
            and not (is_told and trial.attempt_of(key.task) == key.attempt)
            and self._keepers.roads.uses_mount(job_id, key.task, time.monotonic())
        )

    def _tell_start(self, trial: Trial, seen: Seen) -> None:
        if not trial.knows(seen.key):
            at_s = time.time() if seen.ended is None else seen.ended.started_at_s
            self._post(AttemptStarted(seen.key, at_s))

    def _offsets(self, key: AttemptKey) -> Offsets:
        received = {stream: self._keepers.received(key, stream) for stream in self._streams}
        return {stream: offset for stream, offset in received.items() if offset < COLLECTED_BYTES[stream]}

    async def _hand_over(self, seen: Seen) -> None:
        await self._commits.room()
        if self._experiment.trials[seen.key.trial_id].state.is_final:
            return
        try:
            for stream, offset, data in seen.pieces:
                self._keepers.take(seen.key, stream, offset, data)
        except StreamBroken as error:
            # The attempt was closed, or given up, while the storage was read: the next look begins where things stand.
            log.info("trial %s: %s", seen.key, error)
            return
        if seen.ended is not None:
            self._keepers.end(seen.ended)
        # While nothing can be stored nothing more is read: it waits in the files.
        await asyncio.shield(self._commits.add([]))

    # ---- after the job ended

    async def left_behind(self, trial: Trial, *, may_be_late: bool) -> list[Seen]:
        """How the newest attempt of each task stands, without any of its bytes; empty when no keeper ever began one that counts.

        `may_be_late`: an end that is not shown is given time to appear, because another machine has written it. Storage that
        fails is asked until it answers.

        Raises:
            FilesClosed: it does not let the manager read there.
        """
        gives_up_at_s = time.monotonic() + (STORAGE_LAG_S if may_be_late else 0.0)
        while True:
            found = await self._until_it_answers(trial, self._files.newest_attempts, trial.trial_id)
            keys = [key for key in found if trial.counts(key)]
            see = partial(self._files.see_attempt, offsets={}, is_over=True)
            left = [await self._until_it_answers(trial, see, key) for key in keys]
            if (left and all(each.ended for each in left)) or time.monotonic() >= gives_up_at_s:
                return left
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def take_rest(self, trial: Trial, left: Seen) -> None:
        """Take all that the attempt's files hold. Bytes that its end promises are given time to appear.

        Raises:
            FilesClosed: the storage does not let the manager read there.
        """
        gives_up_at_s = time.monotonic() + STORAGE_LAG_S
        while True:
            see = partial(self._files.see_attempt, left.key, self._offsets(left.key), is_over=True)
            seen = await self._until_it_answers(trial, see)
            if trial.state.is_final:
                return
            await self._hand_over(Seen(seen.key, seen.has_begun, seen.pieces, None))
            if seen.pieces:
                gives_up_at_s = time.monotonic() + STORAGE_LAG_S
            elif self._has_all(left) or time.monotonic() > gives_up_at_s:
                return
            else:
                await asyncio.sleep(_LOOK_AGAIN_S)

    def _has_all(self, left: Seen) -> bool:
        sizes = {} if left.ended is None else left.ended.final_sizes
        return all(
            self._keepers.received(left.key, stream) >= collected(stream, sizes.get(stream, 0))
            for stream in self._streams
        )

    async def _until_it_answers(
        self, trial: Trial, look: Callable[..., Answer], *arguments: object
    ) -> Answer:
        while True:
            try:
                answer = await self.threads.call(look, *arguments)
            except PermissionError as error:
                raise FilesClosed(_told(error)) from error  # trying again does not open them
            except (OSError, TryAgain) as error:
                self._note_failure(trial.job_id, error)
                await asyncio.sleep(_FAILED_LOOK_AGAIN_S)
            else:
                self._failures.pop(trial.job_id, None)
                return answer

    # ---- words to keepers that no stream reaches

    async def leave_stop(self, trial_id: str, reason: ExitReason) -> None:
        """Ask the keepers of a trial to stop it. Storage that does not take the word is no reason to wait for it."""
        try:
            await asyncio.wait_for(
                self.threads.call(self._files.write_stop, StopTrial(trial_id, reason)), _LONGEST_WRITE_S
            )
        except (OSError, TryAgain, TimeoutError, asyncio.TimeoutError) as error:
            log.warning("trial %s: its keepers cannot be told to stop it: %s", trial_id, error)

    # ---- inside

    def _note_failure(self, job_id: str, error: Exception) -> None:
        if job_id not in self._failures:
            log.warning("job %s: %s", job_id, _told(error))
        self._failures[job_id] = _told(error)


def _told(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    remedy = (
        "let containers leave their files readable to the manager's user"
        if isinstance(error, PermissionError)
        else "check the shared storage on the manager's machine"
    )
    return f"cannot read {error.filename}: {error.strerror}; {remedy}"
