"""The effect of pruned trials on TPE: the best value that TPE with MedianPruner finds.

The comparisons are Optuna's own loop, and our TPE without the results of pruned trials. Each search has the same number of steps.
The loss of a trial falls along a learning curve towards the value of a function. One of the parameters determines how fast the
loss falls.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import optuna
from made_tuner import made_tuner
from scipy.stats import mannwhitneyu
from table import Row

from nni_manager.config.algorithms import ASSESSORS
from nni_manager.tuner.assessment import Assessment
from nni_manager.tuner.base import Observation, Suggestion

STEPS_OF_TRIAL = 20
BUDGET = 60 * STEPS_OF_TRIAL
NAMES = ("a", "b", "c", "rate")


def curve(parameters: dict[str, float]) -> list[float]:
    """The losses of a trial that is not pruned."""
    end = sum((parameters[name] - 0.3 * number) ** 2 for number, name in enumerate(NAMES[:3], 1))
    tau = 3 + 2 * parameters["rate"]
    return [end + 2 * math.exp(-step / tau) for step in range(STEPS_OF_TRIAL)]


def of_tuner(seed: int, *, teaches: bool = True) -> float:
    """The best final loss that our TPE with MedianPruner finds.

    If `teaches`, the tuner receives the learning curves of pruned trials.
    """
    tuner = made_tuner("TPE", {name: {"_type": "uniform", "_value": [-1, 1]} for name in NAMES}, seed=seed)
    pruner = ASSESSORS["MedianPruner"]
    assessment = Assessment(pruner.make("minimize", pruner.args()))
    best, left, key = math.inf, BUDGET, 0
    while left > 0:
        suggestion = tuner.ask(key)
        assert isinstance(suggestion, Suggestion)
        values = curve(suggestion.parameters)
        name = str(key)
        seen = next(
            (at for at, value in enumerate(values, 1) if not assessment.report(name, 0, (value,))),
            STEPS_OF_TRIAL,
        )
        is_whole = seen == STEPS_OF_TRIAL
        assessment.end(name, has_succeeded=is_whole)
        pruned = values[:seen] if teaches and not is_whole else []
        value = values[-1] if is_whole else None
        tuner.tell_result(key, Observation(name, value, None, is_whole, pruned))
        best, left, key = min(best, value if value is not None else math.inf), left - seen, key + 1
    return best


def of_optuna(seed: int) -> float:
    """The best final loss that Optuna's own loop finds with the settings of our TPE."""
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True),
        pruner=optuna.pruners.MedianPruner(),
    )
    left = BUDGET
    while left > 0:
        trial = study.ask()
        values = curve({name: trial.suggest_float(name, -1, 1) for name in NAMES})
        for step, value in enumerate(values, 1):
            left -= 1
            trial.report(value, step)
            if step < STEPS_OF_TRIAL and trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            study.tell(trial, values[-1])
    return float(study.best_value)


def quality_with_pruning(seeds: int, chance: float) -> list[Row]:
    """One row: our TPE compared with Optuna's, and the value of a TPE that ignores pruned trials."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    ours, theirs, untaught = (
        _values(of, seeds) for of in (of_tuner, of_optuna, partial(of_tuner, teaches=False))
    )
    is_chance = float(mannwhitneyu(ours, theirs, alternative="greater").pvalue) > chance
    median, their_median = statistics.median(ours), statistics.median(theirs)
    return [
        Row(
            "TPE with MedianPruner on learning curves",
            f"{median:.3g}",
            f"Optuna's loop {their_median:.3g}; pruned trials ignored {statistics.median(untaught):.3g}",
            f"{median / their_median:.2f} x",
            "no worse",
            median <= their_median or is_chance,
        )
    ]


def _values(of: Callable[[int], float], seeds: int) -> Sequence[float]:
    return [of(seed) for seed in range(seeds)]
