"""TPE: parameters that are frequent among good results and rare among bad ones, by Optuna's Parzen estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict

from nni_manager.config.algorithm import BuiltInTuner, MinimizingArgs
from nni_manager.config.schema import Schema, flag, mapping, must_be, whole
from nni_manager.tuner.lazy import BaseSampler, optuna
from nni_manager.tuner.optuna_backed import over_a_study
from nni_manager.tuner.samplers import SamplerSeeds, Space, with_fixed_space, without_single


class TpeArguments(Schema):
    """`tpe_args` of TPE, with the names of NNI 2.10. Without a key, Optuna's default applies.

    Only the first two have an effect: Optuna's sampler has its own weights, and no liars, see `TpeArgs`.
    """

    model_config = ConfigDict(alias_generator=None)
    n_startup_jobs: int | None = whole(1, 99999, "20", None)
    n_ei_candidates: int | None = whole(1, 99999, "24", None)
    constant_liar_type: Literal["best", "worst", "mean"] | None = must_be(
        "best, worst or mean", "worst", None
    )
    linear_forgetting: int | None = whole(1, 99999, "25", None)
    prior_weight: float | None = must_be("a number above 0", "1.0", None, gt=0, le=1e6)
    gamma: float | None = must_be("a number above 0", "0.25", None, gt=0, le=1e6)


class TpeArgs(MinimizingArgs):
    """classArgs of TPE.

    `parallel_optimize` and `constant_liar_type` are accepted and have no effect: running trials always
    count as bad ones, so that concurrent trials do not sample the same region.
    """

    parallel_optimize: bool = flag("true", False)
    constant_liar_type: Literal["min", "max", "mean"] = must_be("min, max or mean", "min", "min")
    tpe_args: TpeArguments | None = mapping("{n_startup_jobs: 20}", None)

    def ignored(self) -> Sequence[tuple[tuple[str, ...], str]]:
        """See `RandomArgs`."""
        written = set() if self.tpe_args is None else self.tpe_args.model_fields_set
        why = "the sampler of TPE is Optuna's, which has no such setting"
        return [(("tpe_args", name), why) for name in sorted(written - {"n_startup_jobs", "n_ei_candidates"})]


def tpe(seeds: SamplerSeeds, always_there: Space, **settings: Any) -> BaseSampler:
    """TPE over the hyper-parameters that every trial has; see `MakeSampler`. `settings` are Optuna's."""
    # Running trials count as bad, so that concurrent trials are not sent to the same point.
    sampler = optuna.samplers.TPESampler(seed=seeds.trial, constant_liar=True, multivariate=True, **settings)
    return with_fixed_space(sampler, without_single(always_there))


def _settings(given: TpeArguments | None) -> dict[str, int]:
    """NNI's `tpe_args` as Optuna's settings. Source: NNI v2.10, tpe_tuner.py; Optuna v5, TPESampler."""
    given = given or TpeArguments()
    settings = {"n_startup_trials": given.n_startup_jobs, "n_ei_candidates": given.n_ei_candidates}
    return {name: value for name, value in settings.items() if value is not None}


DECLARED = BuiltInTuner(
    "TPE",
    __doc__,
    over_a_study(lambda seeds, space, args: tpe(seeds, space, **_settings(args.tpe_args))),
    TpeArgs,
    has_several_objectives=True,
    learns_constraints=True,
    learns_curves=True,
)
