"""BOHB: as Hyperband, with new parameters from a model of past results.

The model is fitted to the results of the largest budget that has enough results.

Source: S. Falkner et al., BOHB: Robust and Efficient Hyperparameter Optimization at Scale, 2018. The model is Optuna's
multivariate Parzen estimator.
"""

from __future__ import annotations

import math
from random import Random

from pydantic import model_validator

from nni_manager.config.algorithm import BuiltInTuner, RandomArgs
from nni_manager.config.schema import must_be, refusal, whole
from nni_manager.config.search_space import SearchSpace
from nni_manager.tuner.base import JsonScalar
from nni_manager.tuner.lazy import optuna
from nni_manager.tuner.optuna_backed import draw, seed_of_trial
from nni_manager.tuner.samplers import SamplerSeeds
from nni_manager.tuner.tuners.hyperband import BUDGET, Hyperband, HyperbandArgs
from nni_manager.tuner.tuners.tpe import tpe

# Bounds the time of a proposal. The latest results are from the region that the search has reached.
_MAX_RESULTS = 300


class BohbArgs(RandomArgs):
    """classArgs of BOHB, an advisor in NNI.

    `top_n_percent`, `bandwidth_factor` and `min_bandwidth` are accepted and have no effect: Optuna's model has its own settings.
    """

    min_budget: int = whole(1, 99999, "1", 1)
    max_budget: int = whole(1, 99999, "27", 3)
    eta: int = whole(2, 100, "3", 3)
    min_points_in_model: int | None = whole(1, 99999, "5", None)
    top_n_percent: int = whole(1, 99, "15", 15)
    num_samples: int = whole(1, 99999, "64", 64)
    random_fraction: float = must_be("a number from 0 to 1", "0.33", 0.33, ge=0, le=1)
    bandwidth_factor: float = must_be("a number above 0", "3", 3.0, gt=0)
    min_bandwidth: float = must_be("a number above 0", "0.001", 0.001, gt=0)

    @model_validator(mode="after")
    def _has_budget_range(self) -> BohbArgs:
        if self.min_budget > self.max_budget:
            raise refusal(
                f"cannot use BOHB: min_budget {self.min_budget} is above max_budget {self.max_budget}; swap them"
            )
        return self


class Bohb(Hyperband):
    """Runs brackets one after another, without end; parameter sets come from a model once there are enough results."""

    def __init__(self, space: SearchSpace, args: BohbArgs, *_: object) -> None:
        super().__init__(
            space,
            HyperbandArgs(
                optimize_mode=args.optimize_mode,
                seed=args.seed,
                R=args.max_budget,
                eta=args.eta,
            ),
            smallest_budget=args.min_budget,
        )
        self._args = args
        self._enough = args.min_points_in_model or len(space.parameters) + 1

    def new_draws(self, trial_key: int) -> dict[str, JsonScalar]:
        """See `Hyperband`."""
        random = Random(seed_of_trial(self.seed, trial_key))
        results = self._results_for_model()
        if random.random() < self._args.random_fraction or results is None:
            return super().new_draws(trial_key)
        study = optuna.create_study(
            storage=optuna.storages.InMemoryStorage(),
            sampler=tpe(
                SamplerSeeds(self.seed, random.getrandbits(32)),
                self.sampling.always_there,
                n_startup_trials=0,
                n_ei_candidates=self._args.num_samples,
            ),
        )
        study.add_trials(
            optuna.create_trial(
                value=loss, params=dict(draws), distributions=self.sampling.distributions_of(draws)
            )
            for draws, loss in results
        )
        trial = study.ask()
        self.sampling.sample(lambda name, distribution: draw(trial, name, distribution))
        return dict(trial.params)

    def _results_for_model(self) -> list[tuple[dict[str, JsonScalar], float]] | None:
        """The latest draws and losses of the largest budget with enough results, in bracket order; None: no such budget."""
        by_budget: dict[int, list[tuple[dict[str, JsonScalar], float]]] = {}
        for bracket in self._brackets:
            for (_, budget), losses in zip(bracket.rounds, bracket.losses, strict=False):
                by_budget.setdefault(budget, []).extend(
                    (bracket.draws[config], loss)
                    for config, loss in sorted(losses.items())
                    if math.isfinite(loss)
                )
        enough = [budget for budget, results in by_budget.items() if len(results) >= self._enough + 2]
        return by_budget[max(enough)][-_MAX_RESULTS:] if enough else None


DECLARED = BuiltInTuner("BOHB", __doc__, Bohb, BohbArgs, is_advisor=True, adds_parameters=(BUDGET,))
