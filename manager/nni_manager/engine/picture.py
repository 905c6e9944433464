"""An experiment at one moment, taken from the engine that runs it or, when none does, from what is stored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nni_manager.config.model import ExperimentConfig
from nni_manager.domain.experiment import Experiment
from nni_manager.domain.limits import Limits
from nni_manager.domain.roads import Roads
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.store import StoredExperiment, StoreReader


def experiment_of(stored: StoredExperiment, config: ExperimentConfig) -> Experiment:
    """The experiment as it was stored, before its trials are restored."""
    return Experiment(
        stored.experiment_id,
        limits_of(config),
        maximize=config.tuner.optimize_mode == "maximize",
        reuses_jobs=config.reuse.is_on,
        is_assessed=config.assessor is not None,
        assessor_sees_all=config.assessor is not None and config.assessor.own is not None,
        learns_from_early_stopped=config.tuner.include_intermediate_results,
        state=stored.state,
        error=stored.error,
        active_s=stored.active_s,
        keeper_has_matched=stored.keeper_has_matched,
    )


def limits_of(config: ExperimentConfig) -> Limits:
    """The limits that an experiment has now: changes to them are changes of its configuration."""
    return Limits(
        config.trial_concurrency,
        config.max_trial_number,
        config.max_exec_duration_s,
        config.max_trial_duration_s,
        config.max_trial_retry,
    )


@dataclass(frozen=True, slots=True)
class KeeperSeen:
    """A keeper that is connected: of which task it is, and its version."""

    task: str
    version: str


@dataclass(frozen=True, slots=True)
class Picture:
    """All that views show. `experiment` is the engine's own when there is one: look, do not keep.

    Times in seconds since the epoch. `problem`: why nothing can be stored at present, or that a job's keeper
    has not been heard. `keepers`: how many are connected. `roads`: how each job is heard, at `now_s` of the monotonic
    clock; without a manager none is. `is_view`: nothing can be changed where this comes from. `why_it_waits`: as
    `TrainingService` has it; empty without a manager. `keepers_of` and `link_of` tell of a job, by its id, which keepers of it
    are connected, and where people find it on its cluster, if they do.
    """

    config: ExperimentConfig
    folder: ExperimentFolder
    experiment: Experiment
    created_at_s: float
    ended_at_s: float | None
    duration_s: float
    problem: str = ""
    keepers: int = 0
    roads: Roads = field(default_factory=Roads)
    now_s: float = 0.0
    is_view: bool = False
    why_it_waits: Callable[[str], str] = lambda job_id: ""
    keepers_of: Callable[[str], Sequence[KeeperSeen]] = lambda _: ()
    link_of: Callable[[str], str | None] = lambda _: None

    @classmethod
    def stored(cls, folder: ExperimentFolder, *, has_trials: bool = True) -> "Picture":
        """The last that was stored of an experiment; without its trials, which cost most, unless `has_trials`.

        Raises:
            StoreUnusable: its database cannot be read.
        """
        with StoreReader(folder.database) as reader:
            stored = reader.experiment()
            config = ExperimentConfig.from_json(stored.config)
            experiment = experiment_of(stored, config)
            if has_trials:
                experiment.restore(reader.trials())
        return cls(config, folder, experiment, stored.created_at_s, stored.ended_at_s, stored.active_s)
