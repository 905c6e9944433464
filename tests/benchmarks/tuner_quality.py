"""`make quality-functions`: the best value that tuners find within 100 trials, compared with Optuna's own samplers called
directly.

A tuner that wraps an Optuna sampler must not be worse than the sampler. This holds if the median over its seeds is not above the
sampler's, or if the difference may be chance. A tuner without such a sampler must be better than random search; the table also
compares it with Optuna's TPE. A tuner that divides a budget gets the budget of 100 whole trials.
"""

import argparse
import math
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, starmap
from random import Random

import optuna
from made_tuner import made_tuner
from pruning_quality import quality_with_pruning
from scipy.stats import mannwhitneyu
from table import Row, render

from nni_manager.config.algorithms import TUNERS
from nni_manager.tuner.tuners.hyperband import BUDGET

TRIALS = 100
SEEDS = 20
# At this level of significance, one of a hundred samplers that are as good as Optuna's is rejected by chance.
CHANCE = 0.01
# This is the standard deviation of the noise that a trial with almost no budget adds to the logarithm of its value.
NOISE = 0.5
SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "TPE": lambda seed: optuna.samplers.TPESampler(seed=seed),
    "Random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "CmaEs": lambda seed: optuna.samplers.CmaEsSampler(seed=seed),
    "NSGAII": lambda seed: optuna.samplers.NSGAIISampler(seed=seed),
    "QMC": lambda seed: optuna.samplers.QMCSampler(seed=seed, scramble=True),
    "GP": lambda seed: optuna.samplers.GPSampler(seed=seed),
}
# The comparison omits tuners that enumerate points, and tuners whose trials continue from checkpoints.
MEASURED = [
    name
    for name, each in TUNERS.items()
    if (each.learns or name in SAMPLERS) and (each.is_advisor or not each.adds_parameters)
]
# These classArgs are for a tuner that divides a budget among its trials.
WITH_BUDGET = {"BOHB": {"min_budget": 1, "max_budget": 27}}


@dataclass(frozen=True)
class Function:
    """A standard function to minimise; its minimum is 0, or `least`."""

    bounds: tuple[tuple[float, float], ...]
    value: Callable[[Sequence[float]], float]
    least: float = 0.0


def _sphere(x: Sequence[float]) -> float:
    return sum((each - 1) ** 2 for each in x)


def _rosenbrock(x: Sequence[float]) -> float:
    return sum(100 * (b - a * a) ** 2 + (1 - a) ** 2 for a, b in pairwise(x))


def _rastrigin(x: Sequence[float]) -> float:
    return sum(each * each - 10 * math.cos(2 * math.pi * each) + 10 for each in x)


def _ackley(x: Sequence[float]) -> float:
    squares = sum(each * each for each in x) / len(x)
    waves = sum(math.cos(2 * math.pi * each) for each in x) / len(x)
    return -20 * math.exp(-0.2 * math.sqrt(squares)) - math.exp(waves) + 20 + math.e


def _branin(x: Sequence[float]) -> float:
    a, b = x
    valley = b - 5.1 / (4 * math.pi**2) * a * a + 5 / math.pi * a - 6
    return valley**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(a) + 10


_HARTMANN_A = (
    (10, 3, 17, 3.5, 1.7, 8),
    (0.05, 10, 17, 0.1, 8, 14),
    (3, 3.5, 1.7, 10, 17, 8),
    (17, 8, 0.05, 10, 0.1, 14),
)
_HARTMANN_P = (
    (0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886),
    (0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991),
    (0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650),
    (0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381),
)


def _hartmann(x: Sequence[float]) -> float:
    return -sum(
        weight * math.exp(-sum(a * (each - p) ** 2 for each, a, p in zip(x, row, places, strict=True)))
        for weight, row, places in zip((1.0, 1.2, 3.0, 3.2), _HARTMANN_A, _HARTMANN_P, strict=True)
    )


# Source: the virtual library of simulation experiments of Simon Fraser University, test functions of optimisation.
FUNCTIONS = {
    "Branin, 2": Function(((-5, 10), (0, 15)), _branin, 0.397887),
    "sphere, 5": Function(((-5, 5),) * 5, _sphere),
    "Rosenbrock, 4": Function(((-2, 2),) * 4, _rosenbrock),
    "Rastrigin, 3": Function(((-5.12, 5.12),) * 3, _rastrigin),
    "Ackley, 5": Function(((-15, 30),) * 5, _ackley),
    "Hartmann, 6": Function(((0, 1),) * 6, _hartmann, -3.32237),
}


def of_tuner(name: str, function: str, seed: int, trials: int) -> float:
    """The best value of a trial-keeper tuner, as its distance to the function's minimum."""
    problem = FUNCTIONS[function]
    space = {
        f"x{number}": {"_type": "uniform", "_value": list(bound)}
        for number, bound in enumerate(problem.bounds)
    }
    tuner = made_tuner(name, space, seed=seed, **WITH_BUDGET.get(name, {}))
    least, key, noises = math.inf, 0, Random(seed)
    whole = WITH_BUDGET.get(name, {}).get("max_budget", 60)
    left = trials * whole
    while left > 0:
        suggestion = tuner.ask(key)
        assert suggestion is not None
        budget = suggestion.parameters.pop(BUDGET, whole)
        value = problem.value(list(suggestion.parameters.values())) - problem.least
        tuner.tell(key, value * math.exp(NOISE * noises.gauss(0, 1) * (1 - budget / whole)))
        if budget == whole:
            least = min(least, value)
        key, left = key + 1, left - budget
    return least


def of_sampler(name: str, function: str, seed: int, trials: int) -> float:
    """The best value of an Optuna sampler that is called directly."""
    problem = FUNCTIONS[function]
    study = optuna.create_study(sampler=SAMPLERS[name](seed))
    for _ in range(trials):
        trial = study.ask()
        at = [trial.suggest_float(f"x{number}", *bound) for number, bound in enumerate(problem.bounds)]
        study.tell(trial, problem.value(at))
    return float(study.best_value) - problem.least


def _found(which: str, name: str, function: str, seed: int, trials: int) -> float:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Optuna warns that some of its samplers, such as QMC, are experimental. The measurement ignores these warnings.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return {"tuner": of_tuner, "sampler": of_sampler}[which](name, function, seed, trials)


def tuners_here() -> list[str]:
    """The tuners whose libraries are installed."""
    return [name for name in MEASURED if (need := TUNERS[name].need) is None or need.is_met]


def quality(
    names: Sequence[str],
    functions: Sequence[str] = tuple(FUNCTIONS),
    seeds: int = SEEDS,
    trials: int = TRIALS,
    processes: int = 2,
) -> list[Row]:
    """A row for each tuner and function. If `processes` is 1, the searches run in this process."""
    asked = {
        (which, each, function)
        for function in functions
        for name in names
        for which, each in (
            ("tuner", name),
            *((("sampler", name),) if name in SAMPLERS else (("sampler", "Random"), ("sampler", "TPE"))),
        )
    }
    jobs = [(*one, seed, trials) for one in sorted(asked) for seed in range(seeds)]
    if processes == 1:
        values = list(starmap(_found, jobs))
    else:
        with ProcessPoolExecutor(processes) as pool:
            values = list(pool.map(_found, *zip(*jobs, strict=True)))
    found: dict[tuple[str, str, str], list[float]] = {}
    for (*of, _, _), value in zip(jobs, values, strict=True):
        found.setdefault(tuple(of), []).append(value)
    return [_row(name, function, found) for name in names for function in functions]


def _row(name: str, function: str, found: dict[tuple[str, str, str], list[float]]) -> Row:
    ours = found["tuner", name, function]
    theirs = found["sampler", name if name in SAMPLERS else "Random", function]
    median, their_median = statistics.median(ours), statistics.median(theirs)
    if name in SAMPLERS:
        # The p-value is the probability of such a difference if both samplers were equally good. A larger p-value than CHANCE
        # excuses a worse median.
        is_chance = float(mannwhitneyu(ours, theirs, alternative="greater").pvalue) > CHANCE
        shown, goal = f"Optuna's {name} {their_median:.3g}", "no worse"
        holds = median <= their_median or is_chance
    else:
        of_tpe = statistics.median(found["sampler", "TPE", function])
        shown, goal = f"Random {their_median:.3g}, Optuna's TPE {of_tpe:.3g}", "below Random"
        holds = median < their_median
    return Row(f"{name} on {function}", f"{median:.3g}", shown, f"{median / their_median:.2f} x", goal, holds)


def main() -> int:
    """Run the searches and print the table; return 1 when a tuner misses its goal."""
    parser = argparse.ArgumentParser(description="The best value that tuners find, beside Optuna's samplers.")
    parser.add_argument("tuners", nargs="*", help="their names; all by default")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parser.parse_args()
    os.nice(10)
    rows = quality(arguments.tuners or tuners_here(), seeds=arguments.seeds)
    if not arguments.tuners or "TPE" in arguments.tuners:
        rows += quality_with_pruning(arguments.seeds, CHANCE)
    print(render(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
