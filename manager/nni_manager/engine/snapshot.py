"""Snapshots of an experiment, taken from the engine that runs it or, without an engine, from the store."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from nni_manager.config.model import ExperimentSpec
from nni_manager.config.pruned_trials import reports_pruned
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.feedback import Feedback
from nni_manager.domain.provenance import CodeVersion
from nni_manager.domain.search_budget import Limits
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import StoredExperiment
from nni_manager.training_services.base import ManagedGpu, TrainingService
from trial_keeper.frozen_dataclass import dataclass


def snapshot_from_stored(
    stored: StoredExperiment,
    config: ExperimentSpec,
    service: TrainingService | None = None,
    *,
    may_prefetch: bool = False,
) -> ExperimentCore:
    """The stored experiment, without its trials. `service` None: for display only."""
    own = config.tuner.own if config.assessor is None else config.assessor.own
    has_advisor = config.tuner.own is not None and config.tuner.own.is_advisor
    return ExperimentCore(
        stored.experiment_id,
        limits_of(config),
        config.all_objectives,
        reuses_jobs=config.reuse_mode,
        trials_per_job=config.max_trials_per_job,
        cluster_grace_s=0.0 if service is None else service.grace_s,
        completion=None if service is None else service.completion,
        may_prefetch=may_prefetch,
        feedback=Feedback(
            config.all_objectives,
            is_assessed=config.assessor is not None or has_advisor,
            assessor_sees_all=own is not None,
            learns_from_early_stopped=config.tuner.include_intermediate_results,
            reports_pruned=reports_pruned(config),
        ),
        reports_preemption=service is not None and service.reports_preemption,
        state=stored.state,
        error=stored.error,
        active_s=stored.active_s,
        any_compatible_keeper=stored.any_compatible_keeper,
        remarks=stored.remarks,
    )


def limits_of(config: ExperimentSpec) -> Limits:
    """The current limits of an experiment; a change of limits changes its configuration."""
    return Limits(
        config.trial_concurrency,
        config.max_trial_number,
        config.max_experiment_duration,
        config.max_trial_duration,
        config.max_trial_retry,
        config.max_preemptions,
        config.fail_fast,
        config.lost_node_timeout,
    )


@dataclass(frozen=True, slots=True)
class KeeperSeen:
    """A connected keeper: its task and its version."""

    task: str
    version: str


@dataclass(frozen=True, slots=True)
class StoreLoad:
    """The work of the store since the manager's start. `problem`: why nothing can be stored at present; empty if it can."""

    pending_bytes: int
    transactions: int
    transactions_s: float
    problem: str


async def _no_gpus() -> Sequence[ManagedGpu]:
    return ()


@dataclass(frozen=True, slots=True)
class ExperimentSnapshot:
    """All data for display. `experiment` is the engine's own object if there is an engine; callers must not keep it.

    Times are in seconds since the epoch. `problems`: why nothing can be stored at present, that a job's keeper has not connected,
    and others; the most urgent first. `leftovers`: how to remove each job that could not be ended. `keepers`: the number of
    connected ones. `now_s`: the monotonic time of the snapshot. `is_view`: the source is read-only. `pending_reason` and
    `warning_of`: as `pending_reason` and `warning` of `TrainingService`; empty without a manager. `keepers_of` and `link_of`
    return the connected keepers of a job by its id, and the URL of the job on its cluster, if it has one. `gpus` and
    `job_log`: as those of `TrainingService`; `job_log` is None if no cluster keeps logs of jobs. `code`: the versions of the
    training code, in the order of time. `store`: None without a manager.
    """

    config: ExperimentSpec
    folder: ExperimentFolder
    experiment: ExperimentCore
    created_at_s: float
    ended_at_s: float | None
    duration_s: float
    problems: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    keepers: int = 0
    now_s: float = 0.0
    is_view: bool = False
    pending_reason: Callable[[str], str] = lambda job_id: ""
    warning_of: Callable[[str], str] = lambda _: ""
    keepers_of: Callable[[str], Sequence[KeeperSeen]] = lambda _: ()
    link_of: Callable[[str], str | None] = lambda _: None
    gpus: Callable[[], Awaitable[Sequence[ManagedGpu]]] = _no_gpus
    job_log: Callable[[str], Awaitable[Mapping[str, str]]] | None = None
    code: tuple[CodeVersion, ...] = ()
    store: StoreLoad | None = None

    @property
    def problem(self) -> str:
        """The most urgent problem; empty: none."""
        return self.problems[0] if self.problems else ""

    @classmethod
    def stored(cls, folder: ExperimentFolder, *, has_trials: bool = True) -> "ExperimentSnapshot":
        """The stored state of an experiment; `has_trials` includes its trials, which take most of the time.

        Raises:
            StoreUnusable: its database cannot be read.
        """
        with StoreReader(folder.database) as reader:
            stored = reader.experiment()
            config = ExperimentSpec.from_json(stored.config)
            experiment = snapshot_from_stored(stored, config)
            if has_trials:
                experiment.restore(reader.trials())
            code = tuple(reader.code())
        return cls(
            config, folder, experiment, stored.created_at_s, stored.ended_at_s, stored.active_s, code=code
        )
