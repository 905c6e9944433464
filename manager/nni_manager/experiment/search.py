"""`search(f, space)`: an experiment that calls a function, from its start to its results, in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nni_manager.config.algorithms import ASSESSOR_ARGS, CLASS_ARGS, DEFAULT_TUNER, name_of
from nni_manager.config.diagnostics import folded
from nni_manager.errors import UserError
from nni_manager.experiment.config import ExperimentConfig
from nni_manager.experiment.data import TrialJob
from nni_manager.experiment.experiment import Experiment, Function
from nni_manager.experiment.plots import Plots
from nni_manager.experiment.search_arguments import check_arguments, in_search_terms
from nni_manager.experiment.sections import AlgorithmConfig
from nni_manager.experiment.start_arguments import Port
from trial_keeper.frozen_dataclass import dataclass

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure


Algorithm: TypeAlias = "str | AlgorithmConfig | Mapping[str, Any]"
"""A tuner, assessor or advisor: its name, or its configuration."""


@dataclass(frozen=True, slots=True)
class Best:
    """One of the best results: the parameters, the result's number, and the id of the trial.

    With several objectives, `value` is the number of the first one, and `values` has one for each.
    """

    parameters: dict[str, Any]
    value: float
    trial_id: str
    values: tuple[float, ...] = ()


class SearchResult:
    """The results of `search`. The experiment is stored and ended: `experiment` answers any other query."""

    def __init__(self, experiment: Experiment) -> None:
        """Read the trials of an experiment whose trials have all ended."""
        self.experiment = experiment
        self._jobs: list[TrialJob] = experiment.list_trial_jobs()
        self.front = [
            Best(each.parameters, each.value, each.trialJobId, tuple(each.values))
            for each in experiment.best_trials
            if each.value is not None
        ]
        """With several objectives the results on the Pareto front, in the order of the first one; else `best`, if any."""
        self._has_several = any(each.values for each in self.front)
        self.best = self.front[0] if self.front and not self._has_several else None
        """None if no trial has a result, or if there are several objectives: see `front`."""
        objectives = experiment.objectives
        self._plots = Plots(
            self._jobs,
            is_maximized=objectives[0]["mode"] == "maximize",
            objectives=[each["metric"] for each in objectives],
            front={each.trial_id for each in self.front},
        )

    def __repr__(self) -> str:
        if self._has_several:
            return f"<{len(self._jobs)} trials of experiment {self.experiment.id}, {len(self.front)} on the Pareto front>"
        best = "no result" if self.best is None else f"best {self.best.value:g} with {self.best.parameters}"
        return f"<{len(self._jobs)} trials of experiment {self.experiment.id}, {best}>"

    @cached_property
    def trials(self) -> pandas.DataFrame:
        """All trials, also failed ones: see `Experiment.trials_dataframe`.

        Raises:
            PandasMissing: pandas is not installed.
        """
        return self.experiment.trials_dataframe()

    @cached_property
    def importances(self) -> dict[str, float]:
        """The share of each parameter in whether a trial is among the best tenth, highest first: see `Experiment.importances`.

        Raises:
            UserError: fewer than 10 trials have results, or all have the same parameters or results.
        """
        return self.experiment.importances()

    def plot_history(self) -> Figure:
        """The result of each trial, and the best one until then."""
        return self._plots.history()

    def plot_importances(self) -> Figure:
        """`importances` as bars.

        Raises:
            UserError: see `importances`.
        """
        return self._plots.importances(self.importances)

    def plot_parallel(self) -> Figure:
        """A line for each trial through the values of its parameters and its result."""
        return self._plots.parallel()

    def plot_slices(self) -> Figure:
        """For each parameter, its values and the results of the trials."""
        return self._plots.slices()

    def plot_front(self) -> Figure:
        """With several objectives: the results, and the Pareto front among them.

        Two objectives are the axes of one chart; with more there is a chart for each pair.

        Raises:
            UserError: there is one objective.
        """
        return self._plots.front()


def search(
    function: Function,
    space: Mapping[str, Any],
    trials: int = 50,
    *,
    concurrency: int = 1,
    tuner: Algorithm | None = None,
    assessor: Algorithm | None = None,
    advisor: Algorithm | None = None,
    maximize: bool = False,
    seed: int | None = None,
    port: Port = "auto",
    verbose: bool = True,
    **fields: Any,
) -> SearchResult:
    """Call a function with parameters from the search space, each time in a process of its own, and return the results.

    `space`: NNI's search space. `tuner` None: the default one of an experiment. `advisor`: `Hyperband`, `BOHB` or your own, in
    place of tuner and assessor; the parameters then have a `TRIAL_BUDGET`. `maximize`: whether larger results are better; a
    tuner or advisor with an `optimize_mode` says so itself. A built-in assessor without `optimize_mode` gets the direction of the
    search. `fields`: further fields of `ExperimentConfig`, such as
    `max_trial_duration="10m"`. With the field `objectives`, the function returns a dict with their metrics. With the same `seed`
    and a `concurrency` of 1 the tuner repeats its choices, as long as the results are the same. After Ctrl-C the results until
    then are returned. The experiment is stored, as any other, and its manager has ended. `verbose`: see `Experiment`.

    Raises:
        ConfigInvalid, UserError, RetryableError: see `Experiment.run`.
    """
    check_arguments(function, maximize, fields, own=("space", "trials", *(search.__kwdefaults__ or ())))
    with in_search_terms(seed):
        config = _config(space, trials, concurrency, fields)
        if advisor is not None:
            for name, value in (("tuner", tuner), ("assessor", assessor)):
                if value is not None:
                    raise UserError(
                        f"cannot use {name}={_shown(value)} together with advisor={_shown(advisor)}: an advisor replaces both "
                        f"tuner and assessor; remove {name} or advisor"
                    )
            proposer = config.advisor = _proposer("advisor", advisor, seed)
        else:
            proposer = config.tuner = _proposer("tuner", tuner, seed)
        if assessor is not None:
            config.assessor = _copied(assessor)
        _set_direction(config, proposer, maximize=maximize)
        with Experiment(config) as experiment:
            experiment.verbose = verbose
            experiment.run(port, objective=function)
            # Before the manager ends: it answers sooner than the store is opened here.
            return SearchResult(experiment)


def _config(
    space: Mapping[str, Any], trials: int, concurrency: int, fields: Mapping[str, Any]
) -> ExperimentConfig:
    has_service = any(folded(name) == "trainingservice" for name in fields)
    config = ExperimentConfig(None if has_service else "local", **fields)  # `run` refuses other platforms
    config.search_space, config.max_trial_number, config.trial_concurrency = space, trials, concurrency
    return config


def _set_direction(config: ExperimentConfig, proposer: AlgorithmConfig, *, maximize: bool) -> None:
    """Give the direction of the search to the algorithms that have none."""
    if config.objectives:
        if maximize:
            raise UserError(
                "cannot use maximize=True together with objectives; each objective has its own mode"
            )
        return
    mode = "maximize" if maximize else "minimize"
    if isinstance(proposer.class_args, Mapping):
        given = proposer.class_args.get("optimize_mode")
        if maximize and given == "minimize":
            raise UserError(
                "cannot use maximize=True together with the tuner's optimize_mode 'minimize'; remove one of them"
            )
        mode = given or mode
        if proposer.class_name is None and _is_built_in("tuner", proposer, CLASS_ARGS):
            proposer.class_args = {**proposer.class_args, "optimize_mode": mode}
        elif not given:
            # The arguments of a user's own class are its own.
            config.objectives = [{"metric": "default", "mode": mode}]
    if isinstance(config.assessor.class_args, Mapping) and _is_built_in(
        "assessor", config.assessor, ASSESSOR_ARGS
    ):
        # Medianstop and Curvefitting would otherwise maximize, as in NNI, and stop the best trials.
        config.assessor.class_args = {"optimize_mode": mode, **config.assessor.class_args}


def _is_built_in(
    kind: Literal["tuner", "assessor"], algorithm: AlgorithmConfig, known: Collection[str]
) -> bool:
    """True if the name is one of `known`, in any spelling that the reader accepts."""
    name = (algorithm.name or DEFAULT_TUNER) if kind == "tuner" else algorithm.name
    return isinstance(name, str) and name_of(kind, name, algorithm.class_args) in known


def _proposer(kind: str, chosen: Algorithm | None, seed: int | None) -> AlgorithmConfig:
    """The configuration of a tuner or an advisor."""
    copied = _copied(chosen)
    if seed is not None:
        if isinstance(chosen, AlgorithmConfig | Mapping):
            raise UserError(
                f"cannot use seed={seed} together with a configured {kind}; write class_args={{'seed': {seed}}} in it"
            )
        copied.class_args = {"seed": seed}
    return copied


def _copied(chosen: Algorithm | None) -> AlgorithmConfig:
    """The configuration of an algorithm: a copy, since the direction of the search is added to it."""
    match chosen:
        case AlgorithmConfig():
            copied = dataclasses.replace(chosen)
        case Mapping():
            copied = AlgorithmConfig(**chosen)
        case _:
            copied = AlgorithmConfig(name=chosen)
    copied.class_args = copied.class_args or {}  # None is how many write "no arguments"
    return copied


def _shown(algorithm: Algorithm) -> str:
    """What the user wrote, without the unset fields."""
    if isinstance(algorithm, AlgorithmConfig):
        return f"AlgorithmConfig({algorithm.name or algorithm.class_name!r})"
    return repr(algorithm)
