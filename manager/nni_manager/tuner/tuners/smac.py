"""SMAC: the largest expected improvement of a random forest; one trial in five at random."""

from __future__ import annotations

from statistics import NormalDist

from nni_manager.config.algorithm import BuiltInTuner, Need, RandomArgs
from nni_manager.config.schema import flag
from nni_manager.tuner.flat_study import FlatStudy
from nni_manager.tuner.lazy import Floats, FrozenTrial, Study, np
from nni_manager.tuner.model_sampler import ModelSampler, expected_improvement
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import SamplerSeeds


class SmacArgs(RandomArgs):
    """classArgs of SMAC."""

    config_dedup: bool = flag("true", False)


class Forest(ModelSampler):
    """A random forest. Its trees disagree where data is scarce. One proposal in five is random.

    scikit-learn's forest replaces SMAC's own.
    """

    _RANDOM_SHARE = 0.2

    def __init__(self, seeds: SamplerSeeds, flat_study: FlatStudy, args: SmacArgs) -> None:
        super().__init__(seeds, flat_study, cold_start=10, candidates=5000, starting_points=100)
        self.repeats = not args.config_dedup
        self._seed = seeds.trial
        self._is_random = self.random.random() < self._RANDOM_SHARE

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """See `ModelSampler`."""
        if not self._is_random:
            super().before_trial(study, trial)

    def fit(self, points: Floats, losses: Floats) -> None:
        """See `ModelSampler`."""
        from sklearn.ensemble import RandomForestRegressor  # an extra

        self._forest = RandomForestRegressor(
            n_estimators=10, min_samples_split=3, max_features=5 / 6, random_state=self._seed
        )
        # Fit ranks instead of losses: trees disagree most about very bad losses, which would attract the search.
        scores = _scores(losses)
        self._forest.fit(points, scores)
        self._best = float(scores.min())

    def acquisition(self, points: Floats) -> Floats:
        """See `ModelSampler`."""
        votes = np.array([tree.predict(points) for tree in self._forest.estimators_])
        return expected_improvement(votes.mean(axis=0), np.maximum(votes.std(axis=0), 1e-6), self._best)


def _scores(losses: Floats) -> Floats:
    """The ranks of the losses, as quantiles of a normal distribution."""
    ranks = np.argsort(np.argsort(losses, kind="stable"), kind="stable")
    return np.array([NormalDist().inv_cdf((rank + 0.5) / len(losses)) for rank in ranks])


DECLARED = BuiltInTuner(
    "SMAC",
    __doc__,
    over_a_study(Forest, FlatStudy),
    SmacArgs,
    need=Need("sklearn", "scikit-learn", "tuners", "Auto"),
)
