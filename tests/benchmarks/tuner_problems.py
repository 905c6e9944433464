"""`make quality`: the best models that tuners find within 50 trials, on problems of scikit-learn.

The result of a trial is predicted by a forest that is fitted to the problem's table in `problems/` (see `real_problems`). A score
of 0 is the median of random search, and 1 is the best known error. The problems in CHOOSING were used to choose the rules of
`Auto`; the goal applies to the other problems.
"""

import argparse
import csv
import functools
import math
import os
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import numpy as np
import optuna
from made_tuner import made_tuner
from real_problems import REAL_PROBLEMS, Parameters, file_of, flat
from tuner_quality import SAMPLERS

from nni_manager.config import search_space
from nni_manager.config.search_space import parse_search_space
from nni_manager.tuner.optuna_backed import Sampling

TRIALS, SEEDS = 50, 10
CONCURRENCIES = (1, 4)
CHOOSING = (
    "SVM, digits", "SVR, diabetes", "MLP solvers, wine", "forest, digits", "elastic net, diabetes",
    "choice of a model, cancer",
)  # fmt: skip
HELD_OUT = tuple(name for name in REAL_PROBLEMS if name not in CHOOSING)
TUNERS = ("Auto", "TPE", "GPTuner", "Optuna's TPE", "Random")
REFERENCE = "Optuna's TPE"
GOAL = 0.15
_RANDOM_POINTS = 4000
_CLIMBS, _CLIMBERS = 12, 40
# The forests predict the logarithm of the error. An error of 0 has no logarithm, so this value replaces all smaller errors.
_MIN_ERROR = 1e-3


class Tabulated:
    """A problem whose training results are predicted by forests that are fitted to the problem's table."""

    def __init__(self, name: str) -> None:
        """Read the table, fit the forests, and search for the best known error. This takes a second."""
        from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

        self.space = REAL_PROBLEMS[name].space
        self.sampling = Sampling(parse_search_space(self.space))
        self._codes = tuple(_columns_of(self.space).values())
        with file_of(name).open(newline="") as file:
            header, *rows = csv.reader(file)
        *columns, _, noise = header
        self.noise = float(noise.removeprefix("noise "))
        points = self._encoded(
            [{key: text for key, text in zip(columns, row, strict=False) if text} for row in rows]
        )
        errors = np.array([float(row[len(columns)] or math.inf) for row in rows])
        is_lost = errors >= REAL_PROBLEMS[name].lost_from
        known = np.log(np.maximum(errors[~is_lost], _MIN_ERROR))
        forest = ExtraTreesRegressor(80, min_samples_leaf=2, random_state=0).fit(points[~is_lost], known)
        self._trees = [each.tree_ for each in forest.estimators_]
        self._losing = []
        if is_lost.any():
            self._losing = [
                each.tree_
                for each in ExtraTreesClassifier(80, min_samples_leaf=2, random_state=0)
                .fit(points, is_lost)
                .estimators_
            ]
        random = Random(0)
        drawn = [self.sampling.complete({}, random) for _ in range(_RANDOM_POINTS)]
        values = self.errors_of([parameters for parameters, _ in drawn])
        self.random_median = self._median_of_random(values)
        self.least = self._climbed([draws for _, draws in drawn], values, random)

    def errors_of(self, parameters: Sequence[Parameters]) -> np.ndarray:
        """The errors without noise; NaN where training diverges."""
        points = self._encoded(
            [{key: str(value) for key, value in flat(each).items()} for each in parameters]
        )
        errors = np.exp(np.mean([each.predict(points)[:, 0] for each in self._trees], axis=0).ravel())
        if self._losing:
            votes = np.mean(
                [each.predict(points).reshape(len(points), -1)[:, -1] for each in self._losing], axis=0
            )
            errors[votes > 0.5] = np.nan
        return errors

    def observed(self, error: float, random: Random) -> float | None:
        """The result of a trial with this error; None if it fails."""
        return None if math.isnan(error) else error + self.noise * random.gauss(0, 1)

    def _encoded(self, rows: Sequence[dict[str, str]]) -> np.ndarray:
        return np.array([[code(row) for code in self._codes] for row in rows], dtype=np.float32)

    def _median_of_random(self, errors: np.ndarray) -> float:
        random = Random(1)
        found = []
        for _ in range(400):
            trials = [float(errors[random.randrange(len(errors))]) for _ in range(TRIALS)]
            seen = [(value, each) for each in trials if (value := self.observed(each, random)) is not None]
            found.append(min(seen)[1])
        return statistics.median(found)

    def _climbed(self, draws: list[dict[str, Any]], errors: np.ndarray, random: Random) -> float:
        for _ in range(_CLIMBS):
            best = np.argsort(np.nan_to_num(errors, nan=math.inf))[:_CLIMBERS]
            kept = [draws[each] for each in best]
            fewer = [
                {name: drawn for name, drawn in parent.items() if random.random() < 0.7}
                for parent in kept * 10
            ]
            changed = [self.sampling.complete(each, random) for each in fewer]
            errors = np.concatenate([errors[best], self.errors_of([parameters for parameters, _ in changed])])
            draws = kept + [each for _, each in changed]
        return float(np.nanmin(errors))


Code = Callable[[dict[str, str]], float]


def _columns_of(space: dict[str, Any], above: str = "") -> dict[str, Code]:
    """The input columns of the forests, each as a function of a table's row. For an inactive parameter, the function returns a
    value below the parameter's range.
    """
    found: dict[str, Code] = {}
    for name, each in space.items():
        column, values = f"{above}{name}", each["_value"]
        if each["_type"] != "choice":
            found[column] = _number(column, math.log if "log" in each["_type"] else float, values[0])
        for option in values if each["_type"] == "choice" else ():
            shown = option["_name"] if isinstance(option, dict) else str(option)
            found[f"{column}={shown}"] = _is_chosen(column, shown)
            if isinstance(option, dict):
                inner = {key: value for key, value in option.items() if key != "_name"}
                found |= _columns_of(inner, f"{column}.")
    return found


def _number(column: str, scaled: Callable[[float], float], low: float) -> Code:
    inactive = scaled(low) - 1
    return lambda row: scaled(float(row[column])) if column in row else inactive


def _is_chosen(column: str, shown: str) -> Code:
    return lambda row: float(row.get(column) == shown)


problem_of = functools.cache(Tabulated)


class OurTuner:
    """A tuner of trial-keeper."""

    def __init__(self, name: str, problem: Tabulated, seed: int) -> None:
        self._tuner, self._key = made_tuner(name, problem.space, seed=seed), -1

    def ask(self) -> tuple[int, Parameters]:
        self._key += 1
        return self._key, self._tuner.ask(self._key).parameters  # type: ignore[union-attr]

    def tell(self, trial: int, value: float | None) -> None:
        self._tuner.tell(trial, value)


class OptunaSampler:
    """An Optuna sampler, used as in a typical Optuna program: a parameter that occurs in several options has one name in the
    study.
    """

    def __init__(self, name: str, problem: Tabulated, seed: int) -> None:
        self._study, self._space = (
            optuna.create_study(sampler=SAMPLERS[name](seed)),
            parse_search_space(problem.space),
        )

    def ask(self) -> tuple[optuna.Trial, Parameters]:
        trial = self._study.ask()
        return trial, suggested(trial, self._space)

    def tell(self, trial: optuna.Trial, value: float | None) -> None:
        if value is None:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)


def suggested(trial: Any, space: search_space.SearchSpace, above: str = "") -> Parameters:
    """The parameters that `trial` suggests. `trial` has the interface of an Optuna trial."""
    parameters: Parameters = {}
    for name, each in space.parameters.items():
        column = f"{above}{name}"
        match each:
            case search_space.Choice(options):
                # Optuna refuses two ranges for the same name, so the name of a nested parameter contains the names of the
                # parameters above it.
                option = options[trial.suggest_categorical(column, range(len(options)))]
                if isinstance(option, search_space.Nested):
                    option = {"_name": option.name, **suggested(trial, option.space, f"{column}.")}
                parameters[name] = option
            case search_space.RandInt(low, high):
                parameters[name] = trial.suggest_int(column, low, high - 1)
            case search_space.QUniform(low, high) | search_space.QLogUniform(low, high):
                is_log = isinstance(each, search_space.QLogUniform)
                parameters[name] = each.quantised(trial.suggest_float(column, low, high, log=is_log))
            case search_space.Uniform(low, high) | search_space.LogUniform(low, high):
                is_log = isinstance(each, search_space.LogUniform)
                parameters[name] = trial.suggest_float(column, low, high, log=is_log)
    return parameters


@dataclass(frozen=True)
class Run:
    """The result of one search. `error`: the error of the trial with the best result, without the noise of the result."""

    error: float
    cpu_ms: float
    """Per trial, of the tuner alone."""


def tuner_of(name: str, problem: Tabulated, seed: int) -> Any:
    """A tuner of trial-keeper, or a sampler of Optuna."""
    of_optuna = name.removeprefix("Optuna's ")
    return (OurTuner if of_optuna == name else OptunaSampler)(of_optuna, problem, seed)


def run(
    name: str,
    problem_name: str,
    concurrency: int,
    seed: int,
    trials: int = TRIALS,
    make: Callable[[str, Tabulated, int], Any] = tuner_of,
) -> Run:
    """Search once; trials end in the order of their start."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    problem, noises = problem_of(problem_name), Random(seed)
    cpu_s = -time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        tuner = make(name, problem, seed)
        running: deque[tuple[Any, Parameters]] = deque()
        seen: list[tuple[float, float]] = []
        for number in range(trials + concurrency):
            if number >= concurrency and running:
                trial, parameters = running.popleft()
                cpu_s += time.process_time()
                error = float(problem.errors_of([parameters])[0])
                value = problem.observed(error, noises)
                cpu_s -= time.process_time()
                tuner.tell(trial, value)
                if value is not None:
                    seen.append((value, error))
            if number < trials:
                running.append(tuner.ask())
        cpu_s += time.process_time()
    return Run(min(seen)[1] if seen else math.inf, 1000 * cpu_s / trials)


Searches = dict[tuple[str, str, int], list[Run]]
"""The runs by tuner, problem and concurrency; one for each seed."""


def searches(
    tuners: Sequence[str],
    problems: Sequence[str],
    seeds: int,
    concurrencies: Sequence[int],
    processes: int = 2,
) -> Searches:
    """Run all searches. If `processes` is 1, they run in this process."""
    for name in problems:
        # Load the problem's data before the pool forks its processes, so that they share one copy of the data.
        problem_of(name)
    keys = list(product(tuners, problems, concurrencies))
    jobs = [(*key, seed) for key in keys for seed in range(seeds)]
    if processes == 1:
        found = [run(*job) for job in jobs]
    else:
        with ProcessPoolExecutor(processes) as pool:
            found = list(pool.map(run, *zip(*jobs, strict=True), chunksize=5))
    return {key: found[number * seeds : (number + 1) * seeds] for number, key in enumerate(keys)}


def scores(found: Searches, problems: Sequence[str], concurrency: int) -> dict[str, list[float]]:
    """The mean score of each tuner on each of the problems."""
    of_problem = {}
    for name in problems:
        least = min(
            [
                problem_of(name).least,
                *(one.error for key, runs in found.items() if key[1] == name for one in runs),
            ]
        )
        of_problem[name] = (problem_of(name).random_median, least)
    return {
        tuner: [
            statistics.mean(
                (median - one.error) / (median - least) for one in found[tuner, name, concurrency]
            )
            for name, (median, least) in of_problem.items()
        ]
        for tuner in dict.fromkeys(key[0] for key in found)
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean, by Student's t over the problems."""
    from scipy.stats import t

    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, mean
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def report(found: Searches, problems: Sequence[str], concurrency: int) -> list[str]:
    """The lines of a table: score, interval, rank, CPU per trial, and the difference to the reference."""
    of = scores(found, problems, concurrency)
    tuners = list(of)
    lines = [
        "| Tuner | Score | 95 % over problems | Rank | CPU ms per trial | Auto is better by |",
        "|---|---|---|---|---|---|",
    ]
    for tuner in tuners:
        low, high = interval(of[tuner])
        ranks = [
            1 + sum(of[other][each] > of[tuner][each] for other in tuners) for each in range(len(problems))
        ]
        cpu = statistics.mean(one.cpu_ms for name in problems for one in found[tuner, name, concurrency])
        ahead = [ours - theirs for ours, theirs in zip(of.get("Auto", of[tuner]), of[tuner], strict=True)]
        less, more = interval(ahead)
        lines.append(
            f"| {tuner} | {statistics.mean(of[tuner]):.2f} | {low:.2f} to {high:.2f} | {statistics.mean(ranks):.1f} | {cpu:.1f} "
            f"| {statistics.mean(ahead):.2f} ({less:.2f} to {more:.2f}) |"
        )
    return lines


def reaches_goal(found: Searches, problems: Sequence[str], concurrency: int) -> bool:
    """True if the mean lead of `Auto` over Optuna's TPE is at least GOAL, and its confidence interval is above 0."""
    of = scores(found, problems, concurrency)
    ahead = [ours - theirs for ours, theirs in zip(of["Auto"], of[REFERENCE], strict=True)]
    return statistics.mean(ahead) >= GOAL and interval(ahead)[0] > 0


def main() -> int:
    """Run the searches and print the scores; return 1 when `Auto` misses its goal."""
    parser = argparse.ArgumentParser(description="The best models that tuners find, beside Optuna's TPE.")
    parser.add_argument("tuners", nargs="*", default=TUNERS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--problems", choices=("choosing", "held-out", "all"), default="all")
    parser.add_argument("--each", action="store_true", help="also the scores of each problem")
    arguments = parser.parse_args()
    os.nice(10)
    parts = {"choosing": CHOOSING, "held-out": HELD_OUT}
    parts = parts if arguments.problems == "all" else {arguments.problems: parts[arguments.problems]}
    found = searches(
        arguments.tuners, [name for part in parts.values() for name in part], arguments.seeds, CONCURRENCIES
    )
    holds = True
    for part, problems in parts.items():
        for concurrency in CONCURRENCIES:
            print(f"\n{part}, {concurrency} at once, {TRIALS} trials, {arguments.seeds} seeds")
            print("\n".join(report(found, problems, concurrency)), flush=True)
            if arguments.each:
                of = scores(found, problems, concurrency)
                for tuner, values in of.items():
                    print(
                        tuner, *(f"{name} {value:.2f};" for name, value in zip(problems, values, strict=True))
                    )
            if part == "held-out" and {"Auto", REFERENCE} <= {*arguments.tuners}:
                holds = holds and reaches_goal(found, problems, concurrency)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
