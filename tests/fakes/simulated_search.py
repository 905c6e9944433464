"""Whole searches without a cluster. The test itself makes the calls of the tuner, the cluster and the keepers, so a search takes
milliseconds.
"""

from dataclasses import replace
from typing import Any

from attempts import attempt_id

from nni_manager.domain.attempts import AttemptReport
from nni_manager.domain.completion import Completion
from nni_manager.domain.events import (
    AddObservation,
    AskAssessor,
    AskTuner,
    AttemptDelivered,
    AttemptEnded,
    AttemptStarted,
    CancelTrial,
    CloseAttempt,
    DetachTrial,
    DispatchTrial,
    DrainJob,
    Effect,
    Event,
    Finish,
    JobTerminated,
    KeeperConnected,
    KeeperIdle,
    LimitsChanged,
    ManagerReady,
    MetricsStored,
    ParametersSuggested,
    RevokePrefetched,
    SaveExperiment,
    SaveJob,
    SaveTrial,
    SubmitJob,
    TaskReported,
    TellAssessor,
    TellTuner,
    TrialProposed,
    TunerNotReady,
)
from nni_manager.domain.experiment import ExperimentCore, ExperimentState
from nni_manager.domain.jobs import Job
from nni_manager.domain.objectives import MAXIMIZE, Objectives
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import (
    Trial,
)
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.reasons import ExitReason


class SimulatedSearch:
    """An experiment and its effects, one trial per job. Trials are named t0, t1, … by their sequence ids."""

    def __init__(self, experiment: ExperimentCore) -> None:
        self.experiment = experiment
        self.now_s = 0.0
        self.requests: list[int] = []
        """Sequence ids of the requests that the tuner has not answered."""
        self.tuner_results: list[TellTuner] = []
        self.observations: list[AddObservation] = []
        self.assessed: list[AskAssessor | TellAssessor] = []
        self.submitted: list[str] = []
        self.canceled: list[tuple[str, ExitReason]] = []
        self.dispatched: list[tuple[str, str]] = []
        self.drained: list[str] = []
        self.closed: list[AttemptKey] = []
        self.finishes = 0

    @property
    def state(self) -> ExperimentState:
        return self.experiment.state

    @property
    def live(self) -> list[Trial]:
        return [trial for trial in self.experiment.trials.values() if not trial.state.is_terminal]

    def job(self, job_id: str) -> Job:
        return self.experiment.jobs.live[job_id]

    def handle(self, event: Event) -> list[Effect]:
        effects = self.experiment.handle(event, self.now_s)
        for effect in effects:
            match effect:
                case AskTuner():
                    self.requests.append(effect.sequence_id)
                case TellTuner():
                    self.tuner_results.append(effect)
                case AddObservation():
                    self.observations.append(effect)
                case AskAssessor() | TellAssessor():
                    self.assessed.append(effect)
                case SubmitJob():
                    self.submitted.append(effect.job.job_id)
                case CancelTrial():
                    self.canceled.append((effect.trial.trial_id, effect.reason))
                case DispatchTrial():
                    self.dispatched.append((effect.job.job_id, effect.trial.trial_id))
                case DrainJob():
                    self.drained.append(effect.job.job_id)
                case CloseAttempt():
                    self.closed.append(effect.key)
                case Finish():
                    self.finishes += 1
                case SaveTrial() | SaveExperiment() | SaveJob() | DetachTrial():
                    pass
        return effects

    def suggest(self) -> str:
        """Let the tuner answer its oldest request with parameters; return the trial id."""
        sequence_id = self.requests.pop(0)
        self.handle(ParametersSuggested(f"t{sequence_id}", sequence_id, {"lr": 0.1}, {}, 10.0))
        return f"t{sequence_id}"

    def decline(self, index: int = 0) -> None:
        """Let the tuner reply to a request that it is not ready to suggest parameters."""
        self.handle(TunerNotReady(self.requests.pop(index % len(self.requests))))

    def propose(self, trial_id: str) -> Trial:
        """A user proposes a trial."""
        self.handle(TrialProposed(trial_id, {"lr": 0.7}, 10.0))
        return self.trial(trial_id)

    def lose_job(
        self, trial_id: str, reason: ExitReason = ExitReason.JOB_LOST, message: str = "gone"
    ) -> list[Effect]:
        return self.handle(JobTerminated(self.trial(trial_id).job_id, reason, message, 60.0))

    def limit(self, **limits: Any) -> list[Effect]:
        return self.handle(LimitsChanged(replace(self.experiment.budget.limits, **limits)))

    def start(self, trial_id: str, attempt: int = 0) -> list[Effect]:
        return self.handle(AttemptStarted(AttemptKey(trial_id, attempt_id(attempt), "main"), 20.0))

    def report(
        self, trial_id: str, *values: str, final: bool = True, attempt: int = 0, offset: int = 0
    ) -> list[Effect]:
        records = tuple((final, value) for value in values)
        self.handle(TaskReported(AttemptKey(trial_id, attempt_id(attempt), "main")))
        key = AttemptKey(trial_id, attempt_id(attempt), "main")
        return self.handle(MetricsStored(key, records, offset if final else None))

    def end(
        self,
        trial_id: str,
        reason: ExitReason = ExitReason.SUCCEEDED,
        attempt: int = 0,
        message: str = "",
        **more: Any,
    ) -> list[Effect]:
        code = 0 if reason is ExitReason.SUCCEEDED else 1
        key = AttemptKey(trial_id, attempt_id(attempt), "main")
        return self.handle(AttemptEnded(TrialEnded(key, reason, code, 20.0, 30.0, {}, message, **more)))

    def deliver(self, trial_id: str, attempt: int = 0) -> list[Effect]:
        return self.handle(AttemptDelivered(AttemptKey(trial_id, attempt_id(attempt), "main")))

    def run(self, trial_id: str, value: str | None = "1", reason: ExitReason = ExitReason.SUCCEEDED) -> None:
        """A trial from its start to its terminal state."""
        self.start(trial_id)
        if value is not None:
            self.report(trial_id, value)
        self.end(trial_id, reason)
        self.deliver(trial_id)

    def trial(self, trial_id: str) -> Trial:
        return self.experiment.trials[trial_id]

    def resumed(self) -> "SimulatedSearch":
        """The same experiment in the next manager, restored from stored fields only."""
        before = self.experiment
        after = ExperimentCore(
            before.experiment_id,
            before.budget.limits,
            before.leaderboard.objectives,
            state=before.state,
            active_s=before.budget.duration_s(self.now_s),
            any_compatible_keeper=before.scheduler.any_compatible_keeper,
            reports_preemption=before.lifecycle.reports_preemption,
        )
        after.restore(before.trials.values())
        after.scheduler.restore([Job(job_id) for job_id in before.jobs.live], [])
        return SimulatedSearch(after)


def new_search(
    *,
    concurrency: int = 2,
    max_trials: int | None = 5,
    max_duration_s: float | None = None,
    objectives: Objectives = MAXIMIZE,
    is_ready: bool = True,
    reports_preemption: bool = False,
    completion: Completion | None = None,
    **limits: Any,
) -> SimulatedSearch:
    """A search whose manager is ready. With `is_ready=False`, the manager is not ready yet."""
    limits = {"max_trials": max_trials, "max_duration_s": max_duration_s, **limits}
    experiment = ExperimentCore(
        "exp",
        Limits(concurrency, **limits),
        objectives,
        reports_preemption=reports_preemption,
        completion=completion,
    )
    search = SimulatedSearch(experiment)
    if is_ready:
        search.handle(ManagerReady())
    return search


class SimulatedReuse:
    """An experiment with reused jobs whose tuner answers at once. Trials are named t0, t1, …"""

    supports_revoke = True

    def __init__(self, **options: Any) -> None:
        limits = Limits(
            options.pop("concurrency", 1),
            options.pop("max_trials", 3),
            None,
            max_retries=options.pop("max_retries", 0),
        )
        completion = options.pop("completion", Completion())
        self.experiment = ExperimentCore(
            "exp", limits, MAXIMIZE, reuses_jobs=True, completion=completion, **options
        )
        self.experiment.jobs.tasks = completion.tasks
        self.effects: list[Effect] = []
        self.handle(ManagerReady())

    def handle(self, event: Event) -> list[Effect]:
        effects = self.experiment.handle(event, 0.0)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, AskTuner):
                number = effect.sequence_id
                self.handle(ParametersSuggested(f"t{number}", number, {}, {}, 1.0))
        return effects

    def all_of(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def submitted(self) -> list[str]:
        return [effect.job.job_id for effect in self.all_of(SubmitJob)]

    @property
    def dispatched(self) -> list[tuple[str, str, str | None]]:
        return [
            (effect.job.job_id, effect.trial.trial_id, effect.task) for effect in self.all_of(DispatchTrial)
        ]

    @property
    def revoked(self) -> list[tuple[str, str]]:
        return [(effect.job.job_id, effect.trial.trial_id) for effect in self.all_of(RevokePrefetched)]

    @property
    def drained(self) -> list[str]:
        return [effect.job.job_id for effect in self.all_of(DrainJob)]

    def trial(self, trial_id: str) -> Trial:
        return self.experiment.trials[trial_id]

    def idle(self, job_id: str = "env-0", task: str = "main-0") -> None:
        self.handle(KeeperConnected(job_id, supports_revoke=self.supports_revoke))
        self.handle(KeeperIdle(job_id, task))

    def start(self, trial_id: str, task: str = "main-0", attempt: int = 0) -> None:
        self.handle(AttemptStarted(AttemptKey(trial_id, attempt_id(attempt), task), 10.0))

    def next_attempt(self, trial_id: str, task: str = "main-0") -> AttemptKey:
        """The key of the task's running attempt. If none runs, the key of the attempt that its keeper starts next."""
        trial = self.trial(trial_id)
        known = sum(each.key.task == task for each in trial.registered.registered)
        described = trial.attempts.get(task)
        return described.key if described else AttemptKey(trial_id, attempt_id(known), task)

    def report(self, trial_id: str, value: str, task: str = "main-0") -> None:
        key = self.next_attempt(trial_id, task)
        self.handle(TaskReported(key))
        self.handle(MetricsStored(key, ((True, value),)))

    def end(self, trial_id: str, task: str = "main-0", *, succeeds: bool = True, at_s: float = 20.0) -> None:
        reason, code = (ExitReason.SUCCEEDED, 0) if succeeds else (ExitReason.NONZERO_EXIT, 1)
        self.handle(AttemptEnded(TrialEnded(self.next_attempt(trial_id, task), reason, code, 10.0, at_s)))

    def deliver(self, trial_id: str, task: str = "main-0") -> None:
        self.handle(AttemptDelivered(self.next_attempt(trial_id, task)))

    def run(self, trial_id: str, *, succeeds: bool = True) -> None:
        self.start(trial_id, attempt=int(self.next_attempt(trial_id).attempt_id))
        self.report(trial_id, "1")
        self.end(trial_id, succeeds=succeeds)
        self.deliver(trial_id)

    def lose(self, job_id: str, *unstarted: str, is_clean: bool = False) -> None:
        reason, message = ExitReason.KEEPER_LOST, "its keeper is gone"
        self.handle(JobTerminated(job_id, reason, message, 30.0, is_clean, frozenset(unstarted)))

    def resumed(self) -> "SimulatedReuse":
        """The same experiment in the next manager, restored from stored fields only."""
        before = self.experiment
        after = SimulatedReuse.__new__(SimulatedReuse)
        after.experiment = ExperimentCore(
            "exp", before.budget.limits, MAXIMIZE, reuses_jobs=True, state=before.state
        )
        after.effects = []
        for trial in before.trials.values():
            trial.run.ended = None
            for attempt in trial.attempts.values():
                attempt.apply(AttemptReport.DISCARDED)
        jobs = [type(job)(job.job_id, ever_connected=job.ever_connected) for job in before.jobs.live.values()]
        ended = [job_id for job_id in self.submitted if job_id not in before.jobs.live]
        after.experiment.jobs.max_trials = before.jobs.max_trials
        after.experiment.restore(before.trials.values())
        after.experiment.scheduler.restore(jobs, ended)
        after.handle(ManagerReady())
        return after


def search_with_revocable_trials(**options: Any) -> SimulatedReuse:
    """A search without further trials: env-0 runs t1 and holds the prefetched trials t2, t3 and t4; env-1 has finished t5."""
    search = SimulatedReuse(concurrency=2, max_trials=6, may_prefetch=True, **options)
    search.idle("env-0")
    search.start("t0")
    search.end("t0", at_s=10.5)
    search.deliver("t0")
    search.idle("env-0")
    search.start("t1")
    search.idle("env-1")
    search.start("t5")
    search.end("t5", at_s=10.5)
    search.deliver("t5")
    assert search.experiment.jobs.live["env-0"].trial_ids == ("t1", "t2", "t3", "t4")
    assert search.revoked == []
    return search
