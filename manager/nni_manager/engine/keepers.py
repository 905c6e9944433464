"""The keepers that are connected, and the bytes they bring."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from nni_manager.domain.events import (
    AttemptDelivered,
    AttemptEnded,
    AttemptMissing,
    AttemptStarted,
    CollectionEnded,
    Event,
    KeeperCutOff,
    KeeperIdle,
    KeeperMatched,
    MetricsStored,
    TaskReported,
    TrialGivenBack,
    UsageReported,
)
from nni_manager.domain.experiment import Experiment
from nni_manager.domain.receiving import Commit, Receiver
from nni_manager.domain.refusals import JobUnknown, NotOpen, ProtocolBroken, TokenWrong, VersionRefused
from nni_manager.domain.roads import Roads
from nni_manager.domain.trial import METRICS_ARE_CUT, Trial, TrialState
from nni_manager.engine.commits import GroupCommit
from nni_manager.engine.outgoing import Outgoing
from nni_manager.engine.picture import KeeperSeen
from nni_manager.engine.probe import ProbeSession
from nni_manager.engine.tokens import is_token, token_of
from nni_manager.store.store import StoreReader
from trial_keeper import __version__
from trial_keeper.wire.limits import COLLECTED_BYTES
from trial_keeper.wire.messages import (
    AttemptKey,
    AttemptOffsets,
    Chunk,
    Durable,
    Hello,
    Idle,
    KeeperMessage,
    Leave,
    ManagerMessage,
    ReturnTrial,
    RunTrial,
    StopTrial,
    Stream,
    TrialEnded,
    TrialReturned,
    TrialStarted,
    Usage,
    Welcome,
)
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.versions import mismatch_message, versions_agree
from trial_keeper.wire.workspace import Workspace

log = logging.getLogger(__name__)

_SPARE_STREAMS = 14
# Of one task of a trial, not closed. A cluster that begins a task anew this often has a user who should look at it.
OPEN_ATTEMPTS = 1000
# What a trial keeps of its end in memory and in the list of trials: twice what a keeper sends of stderr.
MESSAGE_CHARACTERS = 8192
# One line each in the manager's log; the count of all is in the store, and `nnictl trial ls` tells it.
GARBAGE_LINES = 10


_OF_NO_ATTEMPT = (Hello, Idle, TrialReturned)


class KeeperSession:
    """One open stream of one keeper."""

    def __init__(self, keepers: "Keepers", job_id: str, task: str, version: str) -> None:
        self.job_id = job_id
        self.task = task
        self.version = version
        self.outgoing = Outgoing()
        """What to send; None ends the stream."""
        self._keepers = keepers
        self._speaks_of: set[AttemptKey] = set()
        """The attempts of which something may wait to be stored."""

    async def ready(self) -> None:
        """Wait until more of this keeper can be taken: what it has brought must be stored first, or what others have."""
        await self._keepers.commits.room(self._waiting_bytes)

    def receive(self, message: KeeperMessage) -> None:
        """Take what the keeper says.

        Raises:
            StreamBroken: bytes are missing; the keeper must connect again.
            ProtocolBroken: it speaks of another keeper's trial, or says Hello twice.
        """
        if not isinstance(message, _OF_NO_ATTEMPT):
            self._speaks_of.add(message.key)
        self._keepers.receive(self, message)

    def _waiting_bytes(self) -> int:
        waiting = {key: self._keepers.commits.waiting_bytes_of(key) for key in self._speaks_of}
        self._speaks_of = {key for key, size_bytes in waiting.items() if size_bytes}
        return sum(waiting.values())

    def closed(self) -> None:
        """The stream is gone."""
        self._keepers.forget(self)


class Keepers:
    """Lets keepers in, stores what they bring, and tells the experiment.

    One `Receiver` per attempt lives from its first byte to its close, through any number of streams.
    """

    def __init__(
        self,
        experiment: Experiment,
        secret: bytes,
        check_versions: bool,
        commits: GroupCommit,
        reader: StoreReader,
        workspace: Workspace,
        post: Callable[[Event], None],
    ) -> None:
        self._experiment = experiment
        self._secret = secret
        self._check_versions = check_versions
        self.commits = commits
        """Where all that keepers bring is stored."""
        self._reader = reader
        self._workspace = workspace
        self._post = post
        self.is_open = False
        """Whether keepers are let in, and what they say is taken: from when the experiment goes on until it is let go of."""
        self.roads = Roads()
        """How each task is heard."""
        self._sessions: dict[str, dict[str, KeeperSession]] = {}
        self._receivers: dict[AttemptKey, Receiver] = {}
        self._garbage_lines: dict[AttemptKey, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))

    def seen(self, job_id: str) -> list[KeeperSeen]:
        """Those of a job that are connected."""
        return [KeeperSeen(session.task, session.version) for session in self._of_job(job_id)]

    def token(self, job_id: str) -> str:
        """The token of a job."""
        return token_of(self._secret, job_id)

    # ---- streams

    @property
    def most_streams_of_job(self) -> int:
        """How many streams a job may have open: one for each task, and room for those that a lost link has left behind and for
        the probes of somebody who looks.
        """
        return _SPARE_STREAMS + 2 * self._experiment.completion.tasks

    def check_token(self, job_id: str, token: str) -> None:
        """See that who speaks for a job may do so, before anything else is heard.

        Raises:
            TokenWrong: it may not.
        """
        if not is_token(token.encode(), self.token(job_id)):
            raise TokenWrong()

    def admit(self, hello: Hello, job_id: str, token: str) -> KeeperSession | ProbeSession:
        """Let a keeper in; its Welcome is queued. A probe hears whether it would be, and changes nothing.

        Raises:
            TokenWrong, VersionRefused, JobUnknown: it may not come in.
            NotOpen, StoreBusy: it may later.
            ProtocolBroken: it speaks of trials that are not its own.
        """
        self.check_token(job_id, token)
        if hello.job_id != job_id:
            raise TokenWrong()
        if not self.is_open:
            raise NotOpen()
        if self._check_versions and not versions_agree(__version__, hello.version):
            message = mismatch_message(__version__, hello.version)
            log.error("job %s: %s", job_id, message)
            raise VersionRefused(message)
        if hello.experiment_id != self._experiment.experiment_id:
            raise JobUnknown()
        if hello.is_probe:
            log.info("job %s: a probe of version %s was answered", job_id, hello.version)
            return ProbeSession()
        session = KeeperSession(self, job_id, hello.task, hello.version)
        trials = [self._own_trial(session, key) for key in hello.attempts]
        is_given_up = self._is_given_up(job_id)
        attempts = tuple(
            AttemptOffsets(key, {}, closed=True)
            if is_given_up or trial.state.is_final
            else self._offsets(key, closed=False)
            for key, trial in zip(hello.attempts, trials, strict=True)
        )
        # From here on nothing is refused: a session that its stream does not know of would never end.
        of_job = self._sessions.setdefault(job_id, {})
        earlier = of_job.get(hello.task)
        if earlier is not None:
            earlier.outgoing.put_nowait(None)
        of_job[hello.task] = session
        log.info("job %s: keeper %s of %s connected", job_id, hello.version, hello.task)
        self._post(KeeperMatched(job_id, hello.returns_trials))
        if not is_given_up:
            self.roads.connected(job_id, hello.task, time.monotonic())
        session.outgoing.put_nowait(Welcome(__version__, attempts))
        for trial in trials:
            if (reason := _stopped_for(trial, session.task)) is not None:
                session.outgoing.put_nowait(StopTrial(trial.trial_id, reason))
        if is_given_up:
            session.outgoing.put_nowait(Leave("the manager gave this job up while it was out of reach"))
        else:
            self._look_for_missing(session, hello.attempts)
        return session

    def _look_for_missing(self, session: KeeperSession, attempts: Collection[AttemptKey]) -> None:
        for trial_id in self._experiment.jobs.live[session.job_id].trial_ids:
            attempt = self._experiment.trials[trial_id].attempt_of(session.task)
            key = None if attempt is None else AttemptKey(trial_id, attempt, session.task)
            if key is not None and key not in attempts:
                self._post(AttemptMissing(key))

    def forget(self, session: KeeperSession) -> None:
        """A stream is gone."""
        of_job = self._sessions.get(session.job_id, {})
        if of_job.get(session.task) is session:
            del of_job[session.task]
            self.roads.lost(session.job_id, session.task, time.monotonic())
            if not of_job:
                del self._sessions[session.job_id]
            log.info("job %s: keeper of %s disconnected", session.job_id, session.task)
            if self.is_open:
                self._post(KeeperCutOff(session.job_id))

    def receive(self, session: KeeperSession, message: KeeperMessage) -> None:
        """What a keeper says; see `KeeperSession.receive`."""
        if not self.is_open:
            return  # nothing of it is acknowledged: it is said again to the next manager
        self.roads.heard(session.job_id, session.task, time.monotonic())
        if not isinstance(message, _OF_NO_ATTEMPT) and self._is_of_before(session, message.key):
            if isinstance(message, TrialStarted | TrialEnded):
                session.outgoing.put_nowait(_closed(message.key))
            return
        match message:
            case Chunk():
                trial = self._own_trial(session, message.key)
                if not (trial.state.is_final or trial.has_delivered(message.key)):
                    self.take(message.key, message.stream, message.offset, message.data)
            case TrialStarted():
                self._own_trial(session, message.key)
                self._post(AttemptStarted(message.key, message.started_at_s))
            case TrialEnded():
                self._own_trial(session, message.key)
                self.end(replace(message, message=message.message[-MESSAGE_CHARACTERS:]))
            case Hello():
                raise ProtocolBroken(
                    "cannot take a second Hello on one stream; use the keeper that comes with the manager"
                )
            case Usage():
                self._own_trial(session, message.key)
                self._post(UsageReported(message))
            case Idle():
                self._post(KeeperIdle(session.job_id, session.task))
            case TrialReturned():
                if self._sessions.get(session.job_id, {}).get(session.task) is session:
                    # On a stream of before it would be the answer to another question.
                    self._post(TrialGivenBack(session.job_id, message.trial_id, time.time()))

    # ---- bytes, from a stream or from the workspace

    def received(self, key: AttemptKey, stream: Stream) -> int:
        """Up to where bytes of an attempt have arrived."""
        return self._receiver(key).received(stream)

    def take(self, key: AttemptKey, stream: Stream, offset: int, data: bytes) -> None:
        """Bytes of an attempt arrived.

        Raises:
            StreamBroken: bytes are missing before them.
        """
        receiver = self._receiver(key)
        commits = receiver.take(stream, offset, data)
        if commits and commits[-1].is_last_collected:
            commits[-1] = self._cut(commits[-1])
        self._store(receiver, commits)

    def end(self, ended: TrialEnded) -> None:
        """The end of an attempt is known; it is delivered when all its bytes are durable."""
        self._post(AttemptEnded(ended))
        if self._experiment.trials[ended.key.trial_id].state.is_final:
            return  # the answer was to close it
        receiver = self._receiver(ended.key)
        commits = receiver.end(ended.final_sizes)
        self._store(receiver, commits)
        if not commits and receiver.is_complete:
            self._post(AttemptDelivered(ended.key))

    # ---- words to keepers

    def run(self, job_id: str, trial_id: str, task: str | None) -> None:
        """Let the keepers of a job, or the one of a task, run a trial. Who does not listen is told when it connects again."""
        for session in self._of_job(job_id):
            if task in (None, session.task):
                session.outgoing.put_nowait(RunTrial(trial_id))

    def ask_back(self, job_id: str, trial_id: str) -> None:
        """Ask the keeper of a job for a trial. If it is cut off, the experiment hears of that."""
        self._tell(job_id, ReturnTrial(trial_id))

    def stop(self, trial: Trial, reason: ExitReason) -> bool:
        """Tell the keepers of a trial to stop it; whether one listens."""
        return self._tell(trial.job_id, StopTrial(trial.trial_id, reason))

    def leave(self, job_id: str, reason: str) -> bool:
        """Tell the keepers of a job to end; whether one listens."""
        return self._tell(job_id, Leave(reason))

    def close(self, key: AttemptKey) -> None:
        """Everything about the attempt is stored: its keeper may forget it."""
        self._send(key, Durable(self._offsets(key, closed=True)))
        if self._experiment.trials[key.trial_id].state.is_final:
            # With those that were never told to be over: nothing of them is taken any more.
            for other in self._known_attempts(key):
                self._drop(other)
        self._drop(key)

    def forget_trial(self, trial: Trial, job_id: str) -> None:
        """The job has lost the trial: nothing more of it is taken, and its keeper that still speaks of it is told so."""
        for key in [key for key in self._receivers if key.trial_id == trial.trial_id]:
            session = self._sessions.get(job_id, {}).get(key.task)
            if session is not None:
                session.outgoing.put_nowait(_closed(key))
            self._drop(key)

    def close_all(self) -> None:
        """End all streams and let nobody in; keepers will look for a manager again."""
        self.is_open = False
        for job_id in list(self._sessions):
            for session in self._of_job(job_id):
                session.outgoing.put_nowait(None)

    def _of_job(self, job_id: str) -> list[KeeperSession]:
        return list(self._sessions.get(job_id, {}).values())

    def _tell(self, job_id: str, message: ManagerMessage) -> bool:
        sessions = self._of_job(job_id)
        for session in sessions:
            session.outgoing.put_nowait(message)
        return bool(sessions)

    def _send(self, key: AttemptKey, message: ManagerMessage) -> None:
        session = self._sessions.get(self._experiment.trials[key.trial_id].job_id, {}).get(key.task)
        if session is not None:
            session.outgoing.put_nowait(message)

    # ---- inside

    def _is_given_up(self, job_id: str) -> bool:
        """Whether the job, of which a token proves that it was ours, is not there any more."""
        return job_id not in self._experiment.jobs.live

    def _is_of_before(self, session: KeeperSession, key: AttemptKey) -> bool:
        """Whether this is said for a job that was given up, of a trial that was begun again, or will be: none of it counts."""
        return self._own_trial(session, key).job_id != session.job_id

    def _own_trial(self, session: KeeperSession, key: AttemptKey) -> Trial:
        """The trial that a keeper may speak of. That of a job which was given up may have another job by now."""
        trial, job_id = self._experiment.trials.get(key.trial_id), session.job_id
        is_own = trial is not None and (trial.job_id == job_id or self._is_given_up(job_id))
        if trial is None or not is_own or key.task != session.task:
            raise ProtocolBroken(
                f"cannot take {key} from task {session.task} of job {session.job_id}: it is not that job's trial, or another "
                "task's; stop the job"
            )
        return trial

    def _store(self, receiver: Receiver, commits: list[Commit]) -> None:
        if any(commit.records for commit in commits):
            # First, so that whose records count is stored no later than they are.
            self._post(TaskReported(receiver.key))
        for commit in commits:
            self.commits.add([commit]).add_done_callback(partial(self._note_committed, receiver, commit))

    def _cut(self, commit: Commit) -> Commit:
        """Tell that nothing which follows this is collected; first, as above. The log itself says so, too."""
        key, stream = commit.key, commit.stream
        message = collection_ended(stream, self._workspace.attempt(key).stream(stream))
        log.warning("trial %s: %s", key, message)
        self._post(CollectionEnded(key, message))
        is_log = stream is not Stream.METRICS
        return replace(commit, postscript=f"\n[trial-keeper] {message}\n".encode()) if is_log else commit

    def _note_committed(self, receiver: Receiver, commit: Commit, done: "asyncio.Future[None]") -> None:
        if done.cancelled() or done.exception() is not None:
            return  # the writer's own task reports it and ends the manager; nothing is acknowledged
        key = receiver.key
        receiver.committed(commit)
        self._log_garbage(commit)
        self._send(key, Durable(AttemptOffsets(key, dict(receiver.durable))))
        records = tuple((record.type == "FINAL", record.value) for record in commit.records)
        if records:
            self._post(MetricsStored(key, records))
        if receiver.is_complete:
            self._post(AttemptDelivered(key))

    def _known_attempts(self, key: AttemptKey) -> list[AttemptKey]:
        """Of the same trial and task."""
        return [each for each in self._receivers if (each.trial_id, each.task) == (key.trial_id, key.task)]

    def _drop(self, key: AttemptKey) -> None:
        self._receivers.pop(key, None)
        self._garbage_lines.pop(key, None)

    def _log_garbage(self, commit: Commit) -> None:
        for span in commit.garbage if commit.key in self._receivers else ():
            told = self._garbage_lines[commit.key] = self._garbage_lines.get(commit.key, 0) + 1
            if told > GARBAGE_LINES:
                return
            log.warning(
                "trial %s: %d bytes of metrics at %d are no record: %s%s",
                commit.key,
                span.length,
                span.offset,
                span.reason,
                "; of more such bytes nothing is said here" if told == GARBAGE_LINES else "",
            )

    def _offsets(self, key: AttemptKey, *, closed: bool) -> AttemptOffsets:
        return AttemptOffsets(key, dict(self._receiver(key).durable), closed)

    def _receiver(self, key: AttemptKey) -> Receiver:
        receiver = self._receivers.get(key)
        if receiver is None:
            if len(self._known_attempts(key)) >= OPEN_ATTEMPTS:
                raise ProtocolBroken(
                    f"cannot take {key}: {OPEN_ATTEMPTS} attempts of this task are open already; stop the job"
                )
            receiver = self._receivers[key] = Receiver.restored(key, self._reader.offsets(key))
        return receiver


def _closed(key: AttemptKey) -> Durable:
    """The word to a keeper that nobody waits for anything of this attempt."""
    return Durable(AttemptOffsets(key, {}, closed=True))


def collection_ended(stream: Stream, whole: Path) -> str:
    """What is said of a stream of which no more is collected. `whole`: the file as the trial wrote it."""
    size_bytes = COLLECTED_BYTES[stream]
    what = METRICS_ARE_CUT if stream is Stream.METRICS else f"its {stream.value} is cut"
    return (
        f"{what} at {size_bytes} bytes ({size_bytes / (1 << 30):.3g} GiB), as much as is collected of one attempt; "
        f"all of it is in {whole}; let the training code write less"
    )


def _stopped_for(trial: Trial, task: str) -> ExitReason | None:
    """Why a task that still runs is not to: somebody stopped the trial, or other tasks have ended it."""
    if trial.state is TrialState.STOPPING:
        return trial.stop_reason
    return trial.reason_for_others if trial.ended is not None and task not in trial.ends else None
