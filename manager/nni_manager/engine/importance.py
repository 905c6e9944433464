"""Hyper-parameter importance: Optuna's evaluation of the available results.

Source: PED-ANOVA (arXiv 2304.10255), as implemented in Optuna 5.
"""

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nni_manager.domain.metrics import reward
from trial_keeper.frozen_dataclass import dataclass

# PED-ANOVA compares the best 10 % of trials with all trials; below this minimum, the best 10 % is one trial.
MIN_TRIALS = 10
# A number with at most this many distinct values is treated as a choice.
_FEW_VALUES = 10
# A number whose maximum is at least this multiple of its minimum is evaluated on a log scale.
_WIDE = 100.0
_LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class Importance:
    """`shares`: each parameter's share of the total importance, by the parameter's path, highest first.

    `why`: the reason, for users, if `shares` is empty.
    """

    shares: Mapping[str, float]
    trials: int
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The document of the HTTP API."""
        shares = [{"name": name, "value": share} for name, share in self.shares.items()]
        return {"importances": shares, "trials": self.trials, "why": self.why}


def importance_of(
    results: Iterable[tuple[Mapping[str, Any], str]], metric: str, *, maximize: bool
) -> Importance:
    """The influence of each parameter on whether a trial is among the best tenth.

    `results`: the parameters and the final result (JSON text) of each trial. `metric`: the name of the number in a result that
    is a dict. A nested choice is a separate parameter with the path "outer/inner". Results that violate a constraint count, as in
    Optuna, whose evaluators do not read constraints.
    """
    known = [
        (dict(_flat(parameters)), value)
        for parameters, final in results
        if (value := reward(final, metric)) is not None and abs(value) < _LARGEST
    ]
    if len(known) < MIN_TRIALS:
        why = f"{len(known)} trials have a number {metric!r}; {MIN_TRIALS} are needed"
        return Importance({}, len(known), why)
    # The import takes a second, so it is done only on demand.
    from optuna.importance import get_param_importances
    from optuna.trial import create_trial

    from nni_manager.tuner.lazy import optuna

    values: dict[str, list[Any]] = {}
    for parameters, _ in known:
        for name, value in parameters.items():
            values.setdefault(name, []).append(value)
    axes = {name: axis for name, each in values.items() if (axis := _Axis.of(each)) is not None}
    if not axes:
        return Importance({}, len(known), "all trials had the same parameters")
    if len({value for _, value in known}) == 1:
        return Importance({}, len(known), "all trials had the same result")
    study = optuna.create_study(direction="maximize" if maximize else "minimize")
    study.add_trials(
        [
            create_trial(
                params={
                    name: axes[name].coordinate(each) for name, each in parameters.items() if name in axes
                },
                distributions={name: axes[name].distribution for name in parameters if name in axes},
                value=value,
            )
            for parameters, value in known
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns if few trials have, or lack, a nested parameter
        shares = get_param_importances(study)
    highest_first = sorted(shares.items(), key=lambda each: -each[1])
    return Importance({name: float(share) for name, share in highest_first}, len(known))


@dataclass(frozen=True, slots=True)
class _Axis:
    """The values of one parameter in Optuna's form: numbers, or categories."""

    distribution: Any
    options: tuple[str, ...] | None

    @classmethod
    def of(cls, values: Sequence[Any]) -> "_Axis | None":
        """The axis of these values; None: all values are the same."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        options = sorted({_json_of(value) for value in values})
        if len(options) < 2:
            return None
        if len(options) <= _FEW_VALUES or not all(map(_is_number, values)):
            return cls(CategoricalDistribution(options), tuple(options))
        low, high = float(min(values)), float(max(values))
        return cls(FloatDistribution(low, high, log=low > 0 and high / low >= _WIDE), None)

    def coordinate(self, value: Any) -> Any:
        return float(value) if self.options is None else _json_of(value)


def _flat(parameters: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in parameters.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def _json_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < _LARGEST
        and math.isfinite(value)
    )
