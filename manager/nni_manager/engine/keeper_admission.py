"""Decides which keepers may connect, and opens and closes their sessions."""

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from nni_manager.domain import admission_errors
from nni_manager.domain.attempts import HAVE_ENDED
from nni_manager.domain.events import AttemptOrphaned, KeeperConnected, KeeperDisconnected
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.connected_keepers import ConnectedKeeper, ConnectedKeepers
from nni_manager.engine.keeper_ingest import KeeperIngest
from nni_manager.engine.runtime import Runtime
from nni_manager.engine.shared_files import Signer
from nni_manager.engine.tokens import is_token, token_of
from trial_keeper import __version__
from trial_keeper.wire import messages
from trial_keeper.wire.messages import AttemptKey, AttemptOffsets, Hello
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.versions import mismatch_message, versions_agree

log = logging.getLogger(__name__)

_SPARE_STREAMS = 14


class KeeperSession(ConnectedKeeper):
    """One open gRPC stream of one keeper."""

    def __init__(
        self, admission: "KeeperAdmission", ingest: KeeperIngest, job_id: str, task: str, version: str
    ) -> None:
        super().__init__(job_id, task, version)
        self._admission = admission
        self._ingest = ingest
        self._reported_keys: set[AttemptKey] = set()
        """The attempts that may have data waiting to be stored."""

    async def ready(self) -> None:
        """Apply backpressure: wait until the store has capacity for more data of this keeper."""
        await self._ingest.commits.wait_for_capacity(self._waiting_bytes)

    def receive(self, message: messages.KeeperMessage) -> None:
        """Handle a message of the keeper.

        Raises:
            OffsetGap: bytes are missing; the keeper must reconnect.
            ProtocolError: the message concerns another keeper's trial, or is a second Hello.
        """
        if isinstance(message, messages.TrialStarted | messages.TrialEnded):
            self.reported.append(message.key)
        if hasattr(message, "key"):
            self._reported_keys.add(message.key)
        if self._admission.is_open:  # unacknowledged messages are resent to the next manager
            self._ingest.receive(self, message)

    def _waiting_bytes(self) -> int:
        waiting = {key: self._ingest.commits.waiting_bytes_of(key) for key in self._reported_keys}
        self._reported_keys = {key for key, size_bytes in waiting.items() if size_bytes}
        return sum(waiting.values())

    def closed(self) -> None:
        """Remove the session: its stream has ended."""
        self._admission.forget(self)


class ProbeSession:
    """Sends Welcome and ends the stream, without effect on the session of the job's real keeper."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[messages.ManagerMessage | None] = asyncio.Queue()
        """The messages to send; None ends the stream."""
        self.outgoing.put_nowait(messages.Welcome(__version__))
        self.outgoing.put_nowait(None)

    async def ready(self) -> None:
        """Return at once."""

    def receive(self, message: messages.KeeperMessage) -> None:
        """Refuse the message: nothing may follow the Hello of a probe.

        Raises:
            ProtocolError: always.
        """
        raise admission_errors.ProtocolError(
            f"cannot accept {type(message).__name__} from a probe; use the doctor of the manager's version"
        )

    def closed(self) -> None:
        """Do nothing: a probe has no state."""


@dataclass(eq=False)
class KeeperAdmission:
    """Admits keepers of this experiment's jobs and reports their connections to the experiment."""

    runtime: Runtime
    experiment: ExperimentCore
    keepers: ConnectedKeepers
    ingest: KeeperIngest
    secret: bytes
    """The secret of the experiment, from which the tokens of jobs are derived."""
    checks_versions: bool
    is_open: bool = False
    """True while connections and messages are accepted: from the start of the experiment to `close`."""

    @property
    def most_streams_of_job(self) -> int:
        """The maximum number of open streams of a job: one for each task, plus stale streams of lost connections and probes."""
        return _SPARE_STREAMS + 2 * self.experiment.jobs.tasks

    def token(self, job_id: str) -> str:
        """The token of a job."""
        return token_of(self.secret, job_id)

    def signer_of(self, trial: Trial) -> Signer:
        """The valid signer of the trial's attempts: the keepers of its job."""
        experiment_id, unsigned_ids = self.experiment.experiment_id, trial.registered.unsigned_ids
        return Signer(experiment_id, trial.job_id, self.token, unsigned_ids)

    def check_token(self, job_id: str, token: str) -> None:
        """Authenticate a keeper by its job's token, before any message is read.

        Raises:
            InvalidToken: the token does not belong to the job.
        """
        if not is_token(token.encode(), self.token(job_id)):
            raise admission_errors.InvalidToken()

    def admit(self, hello: Hello, job_id: str, token: str) -> KeeperSession | ProbeSession:
        """Admit a keeper and queue its Welcome. A probe gets an answer but changes no state.

        Raises:
            InvalidToken, VersionRefused, UnknownJob: the keeper is refused.
            NotAccepting, StoreBusy: the keeper may connect again later.
            ProtocolError: its Hello names trials of other jobs.
        """
        self._check(hello, job_id, token)
        if hello.is_probe:
            log.info("job %s: a probe of version %s was answered", job_id, hello.version)
            return ProbeSession()
        session = KeeperSession(self, self.ingest, job_id, hello.task, hello.version)
        trials = [self.ingest.own_trial(session, key) for key in hello.attempts]
        is_abandoned = job_id not in self.experiment.jobs.live
        attempts = tuple(
            AttemptOffsets(key, {}, closed=True, trial_succeeded=trial.state is TrialState.SUCCEEDED)
            if is_abandoned or trial.state.is_terminal or trial.registered.is_lost(key)
            else self.ingest.offsets(key)
            for key, trial in zip(hello.attempts, trials, strict=True)
        )
        # Nothing below may raise: a registered session that is not returned would never be closed.
        self.keepers.add(session)
        log.info("job %s: keeper %s of %s connected", job_id, hello.version, hello.task)
        self.runtime.post(KeeperConnected(job_id, hello.supports_revoke))
        if not is_abandoned:
            self.experiment.transports.connected(job_id, hello.task, time.monotonic())
        session.outgoing.put_nowait(messages.Welcome(__version__, attempts))
        for trial in trials:
            if (reason := _stopped_for(trial, session.task)) is not None:
                session.outgoing.put_nowait(messages.StopTrial(trial.trial_id, reason))
        if is_abandoned:
            session.outgoing.put_nowait(
                messages.Shutdown("the manager abandoned this job while its keeper was disconnected")
            )
        else:
            self._report_orphaned(session, hello.attempts)
        return session

    def _check(self, hello: Hello, job_id: str, token: str) -> None:
        self.check_token(job_id, token)
        if hello.job_id != job_id:
            raise admission_errors.InvalidToken()
        if not self.is_open:
            raise admission_errors.NotAccepting()
        if self.checks_versions and not versions_agree(__version__, hello.version):
            message = mismatch_message(__version__, hello.version)
            log.error("job %s: %s", job_id, message)
            raise admission_errors.VersionRefused(message)
        if hello.experiment_id != self.experiment.experiment_id:
            raise admission_errors.UnknownJob()

    def _report_orphaned(self, session: KeeperSession, attempts: Collection[AttemptKey]) -> None:
        for trial_id in self.experiment.jobs.live[session.job_id].trial_ids:
            attempt = self.experiment.trials[trial_id].attempts.get(session.task)
            if attempt is not None and attempt.key not in attempts:
                self.runtime.post(AttemptOrphaned(attempt.key))

    def forget(self, session: KeeperSession) -> None:
        """Remove a session whose stream has ended."""
        if self.keepers.remove(session):
            self.experiment.transports.lost(session.job_id, session.task, time.monotonic())
            log.info("job %s: keeper of %s disconnected", session.job_id, session.task)
            if self.is_open:
                self.runtime.post(KeeperDisconnected(session.job_id))

    def close(self) -> None:
        """End all streams and refuse new ones; keepers search for a manager again."""
        self.is_open = False
        self.keepers.end_streams()


def _stopped_for(trial: Trial, task: str) -> ExitReason | None:
    """The reason to stop a running task: a stopped trial, or the end of another task. None: the task may run."""
    if trial.state is TrialState.STOPPING:
        return trial.stop_reason
    must_end = trial.run.ended is not None and trial.phase_in(task) not in HAVE_ENDED
    return trial.reason_for_others if must_end else None
