"""The registry of connected keepers, and the commands to them: run, revoke, stop, shut down."""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from functools import partial

from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.trial import Trial
from nni_manager.engine.snapshot import KeeperSeen
from trial_keeper.wire.attempt_ids import new_attempt_id, sort_key
from trial_keeper.wire.messages import Ack, AttemptKey, ManagerMessage, RunTrial, StopTrial, Welcome
from trial_keeper.wire.reasons import ExitReason

# A keeper reports the attempts that it still knows when it connects: the ones that run or are not stored yet.
_RECENT = 64


class CoalescingQueue(asyncio.Queue[ManagerMessage | None]):
    """A queue of bounded size even if the keeper does not read: among equivalent messages only the newest waits.

    At most it holds one ack for each attempt of the keeper, one run, one revoke and one stop for each of its trials, one
    shutdown, and the end of the stream.
    """

    def _init(self, maxsize: int) -> None:
        self._queue: dict[Hashable, ManagerMessage | None] = {}

    def _put(self, item: ManagerMessage | None) -> None:
        match item:
            case Ack(attempt=attempt):
                earlier = self._queue.get(attempt.key)
                if isinstance(earlier, Ack) and earlier.attempt.closed:
                    return  # no ack may follow the closing one
                self._queue[attempt.key] = item
            case Welcome():
                self._queue[Welcome] = item
            case _:
                self._queue[item] = item

    def _get(self) -> ManagerMessage | None:
        return self._queue.pop(next(iter(self._queue)))


@dataclass(eq=False)
class ConnectedKeeper:
    """One keeper with an open gRPC stream."""

    job_id: str
    task: str
    version: str
    outgoing: CoalescingQueue = field(default_factory=CoalescingQueue, init=False)
    """The messages to send; None ends the stream."""
    reported: deque[AttemptKey] = field(default_factory=partial(deque, maxlen=_RECENT), init=False)
    """The attempts whose starts and ends it has reported last on this stream."""


class ConnectedKeepers:
    """The connected keepers by job and task. Commands are queued; a command to an unconnected keeper is dropped."""

    def __init__(self, experiment: ExperimentCore) -> None:
        self._experiment = experiment
        self._by_job: dict[str, dict[str, ConnectedKeeper]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_job.values()))

    def seen(self, job_id: str) -> list[KeeperSeen]:
        """The connected keepers of a job, for display."""
        return [KeeperSeen(keeper.task, keeper.version) for keeper in self._of_job(job_id)]

    # ---- registry

    def add(self, keeper: ConnectedKeeper) -> None:
        """Register a keeper, and end the stream of the keeper that it supersedes."""
        of_job = self._by_job.setdefault(keeper.job_id, {})
        if (earlier := of_job.get(keeper.task)) is not None:
            earlier.outgoing.put_nowait(None)
        of_job[keeper.task] = keeper

    def remove(self, keeper: ConnectedKeeper) -> bool:
        """Remove a keeper; False if it was superseded before."""
        if not self.has(keeper):
            return False
        del self._by_job[keeper.job_id][keeper.task]
        if not self._by_job[keeper.job_id]:
            del self._by_job[keeper.job_id]
        return True

    def has(self, keeper: ConnectedKeeper) -> bool:
        """True if the keeper is registered: it has not been superseded."""
        return self._find(keeper.job_id, keeper.task) is keeper

    def reports(self, job_id: str, key: AttemptKey) -> bool:
        """True if the connected keeper has recently reported the start or the end of this attempt."""
        keeper = self._find(job_id, key.task)
        return keeper is not None and key in keeper.reported

    # ---- commands

    def run(self, job_id: str, trial_id: str, task: str | None) -> None:
        """Send a trial to the keepers of a job, or to the keeper of `task`. Disconnected keepers get the trial on reconnect."""
        attempt_id = self._new_attempt_id(trial_id)
        for keeper in self._of_job(job_id):
            if task in (None, keeper.task):
                keeper.outgoing.put_nowait(RunTrial(trial_id, attempt_id))

    def stop(self, trial: Trial, reason: ExitReason) -> bool:
        """Ask the keepers of a trial to stop it; True if one is connected."""
        return self.send_all(trial.job_id, StopTrial(trial.trial_id, reason))

    def send_all(self, job_id: str, message: ManagerMessage | None) -> bool:
        """Send a message to the keepers of a job, or end their streams (None); True if one is connected."""
        keepers = self._of_job(job_id)
        for keeper in keepers:
            keeper.outgoing.put_nowait(message)
        return bool(keepers)

    def send(self, job_id: str, task: str, message: ManagerMessage) -> None:
        """Send a message to the keeper of one task."""
        if (keeper := self._find(job_id, task)) is not None:
            keeper.outgoing.put_nowait(message)

    def end_streams(self) -> None:
        """End all streams; keepers search for a manager again."""
        for job_id in self._by_job:
            self.send_all(job_id, None)

    # ---- internals

    def _find(self, job_id: str, task: str) -> ConnectedKeeper | None:
        return self._by_job.get(job_id, {}).get(task)

    def _of_job(self, job_id: str) -> Collection[ConnectedKeeper]:
        return self._by_job.get(job_id, {}).values()

    def _new_attempt_id(self, trial_id: str) -> str:
        """A new id that sorts after those of all attempts of the trial, even if the clock was set back."""
        ids = (each.key.attempt_id for each in self._experiment.trials[trial_id].registered.registered)
        return new_attempt_id(time.time(), max(ids, key=sort_key, default=None))
