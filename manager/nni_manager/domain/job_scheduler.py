"""Decides when to submit jobs, which job runs which trial, and how jobs end. The jobs and their states: `jobs`.

Each trial gets its own job or, with reuse, is dispatched to an idle job.

With reuse and a tuner that does not learn from results, short trials are prefetched: each busy job gets one more trial, or
several very short ones. Its keeper starts them without waiting for the manager. If another job is idle and no trial is coming
for it, a prefetched trial is revoked; see `jobs`.

A stop ends even if a job ignores it: a job that misses a deadline meets the next, harder step; see `stop_escalation`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from nni_manager.domain import events
from nni_manager.domain.attempts import HAVE_STARTED, AttemptPhase
from nni_manager.domain.events import Effect
from nni_manager.domain.jobs import MAX_PREFETCH, Job, Jobs, JobState
from nni_manager.domain.lost_jobs import LossEvent, LostJobs
from nni_manager.domain.search_budget import SearchBudget
from nni_manager.domain.stop_escalation import StopEscalation, StopEvent, StopStage
from nni_manager.domain.transports import TransportTracker
from nni_manager.domain.trial import Trial, TrialState
from trial_keeper.wire.reasons import ExitReason

# (longest duration, prefetched trials per job), by the duration of the last trial that succeeded. Several short trials end while
# one trial is requested, stored and dispatched, so more of them are prefetched. Longer trials gain nothing from prefetching. If
# prefetched trials take longer than expected, they are revoked and dispatched to idle jobs.
_PREFETCH_BY_DURATION_S = ((0.1, MAX_PREFETCH), (1.0, 3), (60.0, 1))


@dataclass(slots=True)
class JobScheduler:
    """Submits, fills, drains and ends the jobs."""

    trials: dict[str, Trial]
    """The trials by id; `TrialLifecycle` owns them."""
    jobs: Jobs
    stops: StopEscalation
    transports: TransportTracker
    budget: SearchBudget
    reuses_jobs: bool
    may_prefetch: bool
    """True if parameters may be requested before earlier results are known: the tuner does not learn from results."""
    any_compatible_keeper: bool
    lost: LostJobs = field(default_factory=LostJobs)
    _prefetch_limit: int = 0
    """The number of prefetched trials per job, derived from recent trial durations."""

    # ---- queries

    @property
    def runs_jobs(self) -> bool:
        """True while processes of a job may run and the experiment waits for them."""
        return len(self.jobs.live) > (len(self.stops.stalled) if self.stops.is_stopping else 0)

    @property
    def is_stalled(self) -> bool:
        """True if the experiment stops and all unfinished trials belong to jobs whose files can be neither read nor stored."""
        if not self.stops.is_stopping or self.budget.asked:
            return False
        stalled = [self.jobs.live[job_id] for job_id in self.stops.stalled if job_id in self.jobs.live]
        return 0 < self.budget.unfinished == sum(len(self.trials_of(job)) for job in stalled)

    @property
    def prefetch_room(self) -> int:
        """The number of trials that all busy jobs together may have prefetched."""
        return self.jobs.busy * self._most_ahead

    @property
    def _most_ahead(self) -> int:
        return self._prefetch_limit if self.may_prefetch and self.reuses_jobs and self.jobs.tasks == 1 else 0

    @property
    def trials_with_jobs(self) -> list[Trial]:
        """The trials that are assigned to a job."""
        return [trial for job in self.jobs.live.values() for trial in self.trials_of(job)]

    def trials_of(self, job: Job) -> list[Trial]:
        """The unfinished trials of the job, in the order in which the job runs them."""
        trials = [self.trials[trial_id] for trial_id in job.trial_ids]
        return [trial for trial in trials if not trial.state.is_terminal]

    def restore(self, jobs: Iterable[Job], ended: Iterable[str]) -> None:
        """Restore the unfinished jobs of an earlier manager, after the trials.

        `ended`: the ids of its other jobs, which are not reused.
        """
        for job_id in ended:
            self.jobs.remember(job_id)
        for job in jobs:
            self.jobs.add(job)
        # Approximates the order of dispatch: started trials come first.
        for trial in sorted(self.trials.values(), key=_may_be_queued):
            if not trial.state.is_terminal and (given := self.jobs.live.get(trial.job_id)) is not None:
                give = self.jobs.give if given.trial_id is None else self.jobs.prefetch
                give(given, trial.trial_id)
                if not _may_be_queued(trial):
                    self.jobs.note_started(given.job_id, trial.trial_id)
        for trial in self.trials.values():
            if trial.state.is_terminal and (had := self.jobs.live.get(trial.job_id)) is not None:
                had.taken += 1
        if not self.reuses_jobs:
            for job in self.jobs.unassigned:  # its trial has ended
                self.jobs.dismiss(job)

    # ---- keepers

    def note_connected(self, event: events.KeeperConnected) -> list[Effect]:
        """Record that a keeper of a compatible version has connected."""
        self.any_compatible_keeper = True
        if (job := self.jobs.live.get(event.job_id)) is None:
            return []
        self.jobs.note_link(job, is_up=True, supports_revoke=event.supports_revoke)
        return [*_note_ever_connected(job), *self.revoke_stopped(job)]

    def note_disconnected(self, job_id: str) -> None:
        """Record that a keeper of the job has lost its connection."""
        if (job := self.jobs.live.get(job_id)) is not None:
            self.jobs.note_link(job, is_up=False)

    def note_found(self, job_id: str) -> list[Effect]:
        """Record that a keeper of the job was found on the shared storage."""
        if (job := self.jobs.live.get(job_id)) is None:
            return []
        job.was_found = True
        # At its start the keeper compared its version with the one in the workspace.
        self.any_compatible_keeper = True
        return _note_ever_connected(job)

    def note_idle(self, event: events.KeeperIdle, now_s: float) -> list[Effect]:
        """Record that a keeper is idle, or repeat the command that it has not received."""
        if (job := self.jobs.live.get(event.job_id)) is None:
            return []
        if job.state is JobState.DRAINING:
            return [events.DrainJob(job)]  # the drain command was lost with a connection
        revoked = self.revoke_stopped(job)
        for trial in self.trials_of(job):
            if trial.trial_id in job.revoking_ids:
                continue  # the answer to the revoke, which the keeper sends next, decides
            if trial.was_cut_off(event.task):
                # A keeper that the cluster ends is never idle, so this is its successor: the cluster has started the job again.
                self.lost.apply(job.job_id, LossEvent.KEEPER_RETURNED, now_s)
                trial.discard_attempts()
                waiting = [event.task, *sorted(job.idle_tasks)]  # tasks that the end of this one had stopped
                job.idle_tasks.clear()
                return [*revoked, *(events.DispatchTrial(job, trial, task) for task in waiting)]
            if trial.phase_in(event.task) not in HAVE_STARTED:
                # The keeper has not received the trial: the dispatch was lost with a connection or a manager, or is in transit.
                return [*revoked, events.DispatchTrial(job, trial, event.task)]
        self.jobs.note_idle(job, event.task)
        return revoked

    # ---- trials to jobs

    def schedule(self, trial: Trial) -> list[Effect]:
        """Queue a new trial or, without reuse, submit a job for it. It is queued if the concurrency was lowered meanwhile."""
        has_room = self.budget.unfinished - len(self.jobs.queue) <= self.budget.limits.concurrency
        if has_room and not self.reuses_jobs:
            return self._submit_for(trial)
        self.enqueue(trial)
        return [events.SaveTrial(trial)]

    def enqueue(self, trial: Trial) -> None:
        """Queue a trial that has no job."""
        self.jobs.queue.append(trial.trial_id)

    def requeue_first(self, trial: Trial) -> None:
        """Queue a trial first, which its job has returned or lost."""
        trial.job_id = ""
        self.jobs.queue.appendleft(trial.trial_id)

    def reclaim(self, job: Job, trial: Trial) -> None:
        """Queue a revoked trial first, which the keeper of its job has returned."""
        self.jobs.reclaim(job, trial.trial_id)
        self.requeue_first(trial)

    def remove(self, trial: Trial) -> None:
        """Remove a trial without a job from the queue."""
        self.jobs.queue.remove(trial.trial_id)

    def take_first(self) -> Trial | None:
        """Remove the first trial of the queue and return it; None: the queue is empty."""
        return self.trials[self.jobs.queue.popleft()] if self.jobs.queue else None

    def assign(self) -> list[Effect]:
        """Drain surplus jobs, dispatch queued trials to idle jobs, then prefetch for busy jobs."""
        effects: list[Effect] = []
        jobs = self.jobs
        excess = jobs.active - self.budget.limits.concurrency if self.reuses_jobs else 0
        if excess > 0:
            effects += self._drain(jobs.unassigned[:excess])
        while (job := jobs.next_idle()) is not None and (trial := self.take_first()) is not None:
            jobs.give(job, trial.trial_id)
            effects += self._dispatch(job, trial)
        while (
            excess <= 0
            and jobs.shortfall > 0
            and (job := jobs.next_for_prefetch(self._most_ahead)) is not None
            and (trial := self.take_first()) is not None
        ):
            jobs.prefetch(job, trial.trial_id)
            effects += self._dispatch(job, trial)
        return effects

    def _dispatch(self, job: Job, trial: Trial) -> list[Effect]:
        trial.job_id = job.job_id
        return [events.SaveTrial(trial), events.DispatchTrial(job, trial)]

    def revoke(self) -> list[Effect]:
        """Revoke prefetched trials for idle jobs that get no trial from the tuner."""
        asked = self.jobs.revoke(self.budget.asked) if self.reuses_jobs else []
        return [events.RevokePrefetched(job, self.trials[trial_id]) for job, trial_id in asked]

    def is_queued_in_job(self, trial: Trial) -> bool:
        """True if the trial waits in its job behind another one, as far as the manager knows."""
        job = self.jobs.live.get(trial.job_id)
        return job is not None and trial.trial_id in job.waiting_ids

    def revoke_stopped(self, job: Job) -> list[Effect]:
        """Revoke the trials that were stopped before their start was reported. The answer decides; see `jobs`."""
        stopped = [trial for trial in self.trials_of(job) if trial.state is TrialState.STOPPING]
        asked = [trial for trial in stopped if self.jobs.revoke_one(job, trial.trial_id)]
        return [events.RevokePrefetched(job, trial) for trial in asked]

    def fit_jobs(self, *, is_asking: bool) -> list[Effect]:
        """Submit the missing jobs, or drain the surplus ones. `is_asking`: the tuner may be asked for more trials."""
        effects: list[Effect] = []
        jobs, asked, concurrency = self.jobs, self.budget.asked, self.budget.limits.concurrency
        if not self.reuses_jobs:
            # The queue holds trials that a user proposed or the cluster lost.
            while self.budget.unfinished - len(jobs.queue) + asked < concurrency and (
                trial := self.take_first()
            ):
                effects += self._submit_for(trial)
            return effects
        for _ in range(min(jobs.shortfall, concurrency - jobs.active)):
            job = jobs.add(Job(jobs.new_id()))
            effects += [events.SaveJob(job), events.SubmitJob(job)]
        if not is_asking and not asked and not jobs.queue and jobs.surplus > 0:
            effects += self._drain(jobs.unassigned[: jobs.surplus])
        return effects

    def _submit_for(self, trial: Trial) -> list[Effect]:
        """Submit a job for one trial. Without reuse the job id equals the trial id, plus a suffix for restarts."""
        trial.job_id = f"{trial.trial_id}-{trial.restarts}" if trial.restarts else trial.trial_id
        job = self.jobs.add(Job(trial.job_id))
        self.jobs.give(job, trial.trial_id)
        return [events.SaveTrial(trial), events.SaveJob(job), events.SubmitJob(job)]

    def _drain(self, jobs: Iterable[Job]) -> list[Effect]:
        effects: list[Effect] = []
        for job in jobs:
            self.jobs.dismiss(job)
            effects.append(events.DrainJob(job))
        return effects

    def free(self, trial: Trial, now_s: float) -> None:
        """Remove a terminal trial from its job."""
        self.note_stopped(trial, now_s)
        if self.reuses_jobs:
            self.jobs.free(trial.job_id, trial.trial_id)
            if (
                trial.run.ended is not None
                and trial.run.started_at_s is not None
                and trial.run.ended_at_s is not None
            ):
                lasted_s = trial.run.ended_at_s - trial.run.started_at_s
                most = next((most for below_s, most in _PREFETCH_BY_DURATION_S if lasted_s < below_s), 0)
                # A failed trial is no evidence that the others are short, so it may only lower the limit.
                self._prefetch_limit = (
                    most if trial.state is TrialState.SUCCEEDED else min(most, self._prefetch_limit)
                )
        elif (job := self.jobs.live.get(trial.job_id)) is not None:
            self.transports.expect_no_keeper(job.job_id)
            self.jobs.dismiss(job)  # the keeper ends by itself

    # ---- the end of jobs

    def end(self, job_id: str) -> Job | None:
        """Remove a job that has ended and return it; None if it was removed before."""
        self.stops.forget(job_id)
        self.lost.forget(job_id)
        self.transports.forget(job_id)
        return self.jobs.end(job_id)

    def cancel(self, trial: Trial, reason: ExitReason, now_s: float) -> events.CancelTrial:
        """Cancel a trial. The job ends as well if the experiment stops or jobs are not reused."""
        ends_job = self.stops.is_stopping or not self.reuses_jobs
        self.stops.stop_asked(trial.job_id, now_s, ends_job=ends_job)
        return events.CancelTrial(trial, reason, ends_job)

    def note_stopped(self, trial: Trial, now_s: float) -> None:
        """Update the job's stop stage after the last command of the trial has ended: the keeper has received the stop.

        If no command of the whole job runs and the experiment stops, the job has to end.
        """
        job = self.jobs.live.get(trial.job_id)
        is_asked = self.stops.is_stopping or self.stops.stage(trial.job_id) is not None
        if job is None or not is_asked or _may_run(trial):
            return
        others = [each for each in self.trials_of(job) if each is not trial]
        if self.stops.is_stopping and not any(map(_may_run, others)):
            self.stops.apply(job.job_id, StopEvent.DRAIN_ASKED, now_s)
        elif not any(each.state is TrialState.STOPPING for each in others) and (
            self.stops.stage(job.job_id) in (StopStage.STOP_SENT, StopStage.ENDING)
        ):
            self.stops.forget(job.job_id)

    def note_node(self, event: events.NodeReadinessChanged, now_s: float) -> None:
        """Record that a node of a job is not ready, or ready again."""
        if event.job_id in self.jobs.live:
            what = LossEvent.NODE_RETURNED if event.is_ready else LossEvent.NODE_LOST
            self.lost.apply(event.job_id, what, now_s, self.budget.limits.lost_node_timeout_s)

    def note_processes_ended(self, job_id: str, now_s: float) -> None:
        """Record that no process of the job runs any more."""
        if job_id in self.jobs.live:
            self.stops.apply(job_id, StopEvent.ENDED, now_s)
            self.lost.forget(job_id)  # its end is reported when its files are read

    def end_all(self, now_s: float) -> list[Effect]:
        """End every job of a stopping experiment, after its trials were stopped."""
        effects: list[Effect] = []
        for job in self.jobs.live.values():
            match self.stops.stage(job.job_id):
                case None:
                    self.stops.apply(job.job_id, StopEvent.DRAIN_ASKED, now_s)
                case StopStage.STOP_SENT:
                    self.stops.stop_asked(job.job_id, now_s, ends_job=True)
                    effects.append(events.EscalateStop(job, StopStage.ENDING))
        return effects

    def escalate(self, now_s: float) -> list[Effect]:
        """Take the next step for jobs that missed a deadline."""
        effects: list[Effect] = []
        for job_id, before, after in self.stops.overdue(now_s):
            job = self.jobs.live.get(job_id)
            if job is None:
                self.stops.forget(job_id)
                continue
            if before is StopStage.SHUTDOWN_SENT:
                effects.append(events.DrainJob(job))
            if after is not StopStage.STALLED:
                effects.append(events.EscalateStop(job, after))
        node_timeout_s = self.budget.limits.lost_node_timeout_s
        for job_id in self.lost.overdue(
            now_s, node_timeout_s, lambda job_id: self.transports.last_seen(job_id).at_s
        ):
            if (job := self.jobs.live.get(job_id)) is not None:
                effects.append(events.GiveUpJob(job))
        return effects


def _note_ever_connected(job: Job) -> list[Effect]:
    if job.ever_connected:
        return []
    job.ever_connected = True
    return [events.SaveJob(job)]


def _may_be_queued(trial: Trial) -> bool:
    """True if an unfinished trial has not started in its job, as far as the manager knows."""
    is_stopping = trial.state is TrialState.STOPPING and trial.run.started_at_s is None
    return trial.state is TrialState.WAITING or is_stopping


def _may_run(trial: Trial) -> bool:
    """True if a task of the trial has not reported its end."""
    return not trial.state.is_terminal and (
        trial.run.ended is None or trial.has_task_in(AttemptPhase.RUNNING)
    )
