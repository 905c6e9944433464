"""Auto: the most promising points of a Gaussian process over the whole space, nested parameters included.

The first trials are points of a scrambled Sobol sequence. Then a model is fitted to the results, and the most promising of
many candidates is proposed. What counts as promising alternates from trial to trial, because no acquisition function is best
everywhere. A trial that failed or was stopped early counts as the worst result, and a running one as the result that the model
expects.

The proposal depends only on the trial's number, its seed and the trials of the study, so a restart does not change it.

Source: R. Turner et al., Bayesian Optimization is Superior to Random Search for Machine Learning Hyperparameter Tuning, 2021,
for the practices of the winners of the black-box optimisation challenge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nni_manager.config.algorithm import BuiltInTuner
from nni_manager.tuner.flat_study import MAX_TRIALS, FlatStudy, bounded, in_order
from nni_manager.tuner.lazy import BaseDistribution, Floats, FrozenTrial, Study, np, optuna
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import VOID, LearningSampler, SamplerSeeds

if TYPE_CHECKING:
    from nni_manager.tuner.gaussian_process import MaternProcess

SOBOL_TRIALS = 8
# With many trials at once, the model waits for half as many results.
MIN_RESULTS = 4

_RANDOM_CANDIDATES = 1000
_NEAR_CANDIDATES, _NEAR_BEST, _NEAR_STEP = 300, 5, 0.1
# Candidates that remain after each round, the neighbours of each, and their distances.
_KEPT, _NEIGHBOURS = 10, 10
_STEPS = (0.06, 0.03, 0.012, 0.005)
_UCB_DEVIATIONS = 1.8
_GREEDY_DEVIATIONS = 0.2


class Auto(LearningSampler):
    """Proposes a point of the flat space."""

    def __init__(self, seeds: SamplerSeeds, flat_study: FlatStudy, *_: object) -> None:
        """All trials of an experiment share one `flat_study` and one Sobol sequence."""
        super().__init__(seeds)
        self._flat_study, self._space = flat_study, flat_study.space
        self._experiment_seed = seeds.experiment
        self._numbers = np.random.Generator(np.random.PCG64(seeds.trial))

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Choose the point of the trial."""
        trials = study.get_trials(deepcopy=False)
        past = in_order(
            each for each in trials if each.number != trial.number and VOID not in each.user_attrs
        )
        results = sum(each.state is optuna.trial.TrialState.COMPLETE for each in past)
        if not self._space.width:
            self._positions = np.empty(0)
        elif trial.number < SOBOL_TRIALS or results < MIN_RESULTS:
            self._positions = self._sobol(trial.number)
        else:
            sign = -1.0 if study.direction is optuna.study.StudyDirection.MAXIMIZE else 1.0
            self._positions = self._most_promising(past, sign, trial.number)

    def draw(self, study: Study, name: str, distribution: BaseDistribution) -> Any:
        """The draw at the chosen point."""
        return self._space.draw_at(self._positions, name, distribution)

    def _sobol(self, number: int) -> Floats:
        from scipy.stats import qmc  # half a second, needed for eight trials only

        sequence = qmc.Sobol(self._space.width, rng=self._experiment_seed)
        if number:
            sequence.fast_forward(number)
        point: Floats = sequence.random(1)[0]
        return point

    def _most_promising(self, past: list[FrozenTrial], sign: float, number: int) -> Floats:
        from nni_manager.tuner.gaussian_process import MaternProcess  # SciPy is loaded for the first fit

        ended = [each for each in past if each.state is not optuna.trial.TrialState.RUNNING]
        running = [each for each in past if each.state is optuna.trial.TrialState.RUNNING]
        losses = np.array([_loss_of(each, sign) for each in ended])
        # Values show the shape of the function, ranks the differences among the best when these are small.
        ended, losses = bounded(ended, ranked(losses) if number % 4 >= 2 else standardised(losses))
        running = running[-MAX_TRIALS:]
        points = self._flat_study.points_of([*ended, *running])
        points, at = points[: len(ended)], points[len(ended) :]
        features = np.array([each.features for each in points])
        process = MaternProcess.fitted(features, losses, self._space.are_choices)
        expected = process.predict(features)[0]
        # Noise must not mislead: the best trial is that of the model.
        order = np.argsort(expected, kind="stable")
        if at:
            process = process.with_expected(np.array([each.features for each in at]))
        self._flat_study.note_tried(past)
        search = _Search(process, float(expected[order[0]]), number, self._flat_study)
        best = np.array([points[each].positions for each in order[:_NEAR_BEST]])
        return self._searched(search, best)

    def _searched(self, search: _Search, best: Floats) -> Floats:
        width = self._space.width
        near = best[self._numbers.integers(len(best), size=_NEAR_CANDIDATES)]
        pool = np.vstack(
            [self._numbers.random((_RANDOM_CANDIDATES, width)), self._neighbours(near, _NEAR_STEP)]
        )
        values = search.values(self._space.features(pool))
        for step in _STEPS:
            order = np.argsort(-values, kind="stable")[:_KEPT]
            pool, values = pool[order], values[order]
            neighbours = self._neighbours(np.repeat(pool, _NEIGHBOURS, axis=0), step)
            pool = np.vstack([pool, neighbours])
            values = np.concatenate([values, search.values(self._space.features(neighbours))])
        point: Floats = pool[np.argmax(values)]
        return point

    def _neighbours(self, positions: Floats, step: float) -> Floats:
        # About three hyper-parameters move.
        share = max(0.25, min(1.0, 3 / self._space.width))
        return self._space.neighbours(positions, step, share, self._numbers)


class _Search:
    """What one trial looks for."""

    def __init__(self, process: MaternProcess, best: float, number: int, flat_study: FlatStudy) -> None:
        self._process, self._best, self._number, self._flat_study = process, best, number, flat_study

    def values(self, features: Floats) -> Floats:
        """The acquisition function, higher is better; -inf for a point that was tried, as in a space of few points."""
        from nni_manager.tuner.gaussian_process import log_expected_improvement

        means, deviations = self._process.predict(features)
        match self._number % 4:
            case 1:
                values = _UCB_DEVIATIONS * deviations - means
            case 3:
                values = _GREEDY_DEVIATIONS * deviations - means
            case _:
                values = log_expected_improvement(means, deviations, self._best)
        values[self._flat_study.are_tried(features)] = -np.inf
        return values


def _loss_of(trial: FrozenTrial, sign: float) -> float:
    """NaN: it failed or was pruned. The value of a pruned trial is its last intermediate result, which may look too good."""
    return (
        sign * trial.value
        if trial.state is optuna.trial.TrialState.COMPLETE and trial.value is not None
        else np.nan
    )


def standardised(losses: Floats) -> Floats:
    """Losses with mean 0 and deviation 1. Those far worse than the median are compressed; NaN (failed) is the worst of all."""
    # Scale to at most 1 first: the difference of two large floats overflows.
    losses = losses / (float(np.nanmax(np.abs(losses))) or 1.0)
    least, median, most = float(np.nanmin(losses)), float(np.nanmedian(losses)), float(np.nanmax(losses))
    # If half of the results are the best one, nothing is compressed.
    excess = (losses - median) / ((median - least) or (most - median) or 1.0)
    compressed = np.where(excess > 1, 1 + np.log(np.fmax(excess, 1.0)), excess)
    return _scaled(np.where(np.isnan(compressed), np.nanmax(compressed), compressed))


def ranked(losses: Floats) -> Floats:
    """The quantiles of a normal distribution at the ranks of losses, with mean 0 and deviation 1; NaN (failed) is the worst."""
    from scipy.special import ndtri  # SciPy is loaded for the first fit

    filled = np.where(np.isnan(losses), np.nanmax(losses), losses)
    _, indices, counts = np.unique(filled, return_inverse=True, return_counts=True)
    middles = np.cumsum(counts) - counts / 2
    return _scaled(ndtri(middles / len(losses))[indices])


def _scaled(losses: Floats) -> Floats:
    deviation = float(losses.std())
    centred: Floats = losses - losses.mean()
    return centred / deviation if deviation > 1e-12 else centred


DECLARED = BuiltInTuner("Auto", __doc__, over_a_study(Auto, FlatStudy), origin="", counts_failures=True)
