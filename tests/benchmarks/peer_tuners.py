"""Optimisers of other projects behind one interface.

Runs in the virtual environment of one of them, without trial-keeper. The first line of stdin is JSON: the name of the peer, a
seed, and the dimensions of the space. Each further line is the result of the last proposal, or null if the trial failed. Each
line of stdout is a proposal: its draws by dimension, and the CPU seconds of this process so far, without the time for imports.
"""

import json
import os
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from typing import Any

Dimension = dict[str, Any]
"""`name`, `kind` (float, int or choice), `low`, `high`, `is_log`, `count` of a choice's options, and `parents`:
pairs of a choice and an option with which the dimension is active; without any it is always."""
Draws = dict[str, Any]
TRIALS = 50


class Peer(ABC):
    """Alternately proposes draws and receives a result. If an optimiser does not support failed trials, a failed trial is
    reported with the worst result so far.
    """

    has_failures = False

    def __init__(self, dimensions: list[Dimension], seed: int) -> None:
        self.dimensions, self.seed = dimensions, seed
        self._worst: float | None = None
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Make the optimiser for `dimensions` and `seed`."""

    @abstractmethod
    def ask(self) -> Draws:
        """The next proposal."""

    @abstractmethod
    def tell(self, value: float) -> None:
        """Receive the result of the last proposal. Lower is better."""

    def fail(self) -> None:
        """The last proposal has failed."""
        if self._worst is not None:
            self.tell(self._worst)

    def learn(self, value: float | None) -> None:
        if value is None:
            self.fail()
            return
        self._worst = value if self._worst is None else max(value, self._worst)
        self.tell(value)


class Nevergrad(Peer):
    """NGOpt, which chooses an algorithm for the space and the budget."""

    def start(self) -> None:
        import nevergrad as ng

        def parameter(each: Dimension) -> Any:
            if each["kind"] == "choice":
                return ng.p.Choice(range(each["count"]))
            make = ng.p.Log if each["is_log"] else ng.p.Scalar
            made = make(lower=each["low"], upper=each["high"])
            return made.set_integer_casting() if each["kind"] == "int" else made

        space = ng.p.Dict(**{each["name"]: parameter(each) for each in self.dimensions})
        space.random_state.seed(self.seed)
        self._optimizer = ng.optimizers.registry["NGOpt"](space, budget=TRIALS, num_workers=1)

    def ask(self) -> Draws:
        self._asked = self._optimizer.ask()
        return dict(self._asked.value)

    def tell(self, value: float) -> None:
        self._optimizer.tell(self._asked, value)


class ScikitOptimize(Peer):
    """A Gaussian process; gp_hedge chooses among three acquisition functions."""

    def start(self) -> None:
        from skopt import Optimizer
        from skopt.space import Categorical, Integer, Real

        def dimension(each: Dimension) -> Any:
            if each["kind"] == "choice":
                return Categorical(list(range(each["count"])))
            make = Integer if each["kind"] == "int" else Real
            return make(each["low"], each["high"], prior="log-uniform" if each["is_log"] else "uniform")

        self._optimizer = Optimizer([dimension(each) for each in self.dimensions], random_state=self.seed)

    def ask(self) -> Draws:
        self._asked = self._optimizer.ask()
        return {each["name"]: drawn for each, drawn in zip(self.dimensions, self._asked, strict=True)}

    def tell(self, value: float) -> None:
        self._optimizer.tell(self._asked, value)


class Smac3(Peer):
    """The facade for hyper-parameters: a random forest. Nested parameters are conditional."""

    has_failures = True

    def start(self) -> None:
        from ConfigSpace import Categorical, ConfigurationSpace, Float, InCondition, Integer
        from smac import HyperparameterOptimizationFacade, Scenario

        space, made = ConfigurationSpace(seed=self.seed), {}
        for each in self.dimensions:
            name = each["name"]
            if each["kind"] == "choice":
                made[name] = Categorical(name, [str(option) for option in range(each["count"])])
            else:
                make = Integer if each["kind"] == "int" else Float
                made[name] = make(name, (each["low"], each["high"]), log=each["is_log"])
        space.add(*made.values())
        for each in self.dimensions:
            if each["parents"]:
                options = [str(option) for _, option in each["parents"]]
                space.add(InCondition(made[each["name"]], made[each["parents"][0][0]], options))
        scenario = Scenario(
            space,
            n_trials=TRIALS,
            deterministic=True,
            seed=self.seed,
            output_directory=tempfile.mkdtemp(),
        )
        self._facade = HyperparameterOptimizationFacade(
            scenario, lambda config, seed=0: 0.0, overwrite=True, logging_level=False
        )

    def ask(self) -> Draws:
        self._asked = self._facade.ask()
        choices = {each["name"] for each in self.dimensions if each["kind"] == "choice"}
        return {
            name: int(value) if name in choices else value for name, value in dict(self._asked.config).items()
        }

    def tell(self, value: float) -> None:
        from smac.runhistory import TrialValue

        self._facade.tell(self._asked, TrialValue(cost=value))

    def fail(self) -> None:
        from smac.runhistory import StatusType, TrialValue

        cost = 1e6 if self._worst is None else self._worst
        self._facade.tell(self._asked, TrialValue(cost=cost, status=StatusType.CRASHED))


class OptunaGp(Peer):
    """Optuna's GPSampler. Parameters of an option are suggested only with that option."""

    def start(self) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(sampler=optuna.samplers.GPSampler(seed=self.seed))

    def ask(self) -> Draws:
        self._trial = self._study.ask()
        draws: Draws = {}
        for each in self.dimensions:
            name = each["name"]
            if each["parents"] and not any(draws.get(choice) == option for choice, option in each["parents"]):
                continue
            if each["kind"] == "choice":
                draws[name] = self._trial.suggest_categorical(name, range(each["count"]))
            elif each["kind"] == "int":
                draws[name] = self._trial.suggest_int(name, each["low"], each["high"])
            else:
                draws[name] = self._trial.suggest_float(name, each["low"], each["high"], log=each["is_log"])
        return draws

    def tell(self, value: float) -> None:
        self._study.tell(self._trial, value)

    def fail(self) -> None:
        import optuna

        self._study.tell(self._trial, state=optuna.trial.TrialState.FAIL)


class Ax(Peer):
    """Ax with its default strategy: Sobol points, then a Gaussian process of BoTorch."""

    def start(self) -> None:
        import torch
        from ax.api.client import Client
        from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig

        torch.manual_seed(self.seed)

        def parameter(each: Dimension) -> Any:
            name = each["name"].replace(".", "__")
            if each["kind"] == "choice":
                return ChoiceParameterConfig(name, list(range(each["count"])), "int", is_ordered=False)
            scaling = "log" if each["is_log"] else "linear"
            return RangeParameterConfig(name, (each["low"], each["high"]), each["kind"], scaling=scaling)

        self._client = Client(random_seed=self.seed)
        self._client.configure_experiment([parameter(each) for each in self.dimensions])
        self._client.configure_optimization(objective="-loss")

    def ask(self) -> Draws:
        ((self._asked, draws),) = self._client.get_next_trials(max_trials=1).items()
        return {name.replace("__", "."): drawn for name, drawn in draws.items()}

    def tell(self, value: float) -> None:
        self._client.complete_trial(self._asked, raw_data={"loss": value})

    def fail(self) -> None:
        self._client.mark_trial_failed(self._asked)


class Hebo(Peer):
    """HEBO, the winner of the black-box optimisation challenge of 2020."""

    def start(self) -> None:
        import numpy as np
        import torch
        from hebo.design_space.design_space import DesignSpace
        from hebo.optimizers.hebo import HEBO

        np.random.seed(self.seed)
        torch.manual_seed(self.seed)

        def dimension(each: Dimension) -> dict[str, Any]:
            if each["kind"] == "choice":
                return {"name": each["name"], "type": "cat", "categories": list(range(each["count"]))}
            kind = "int" if each["kind"] == "int" else "pow" if each["is_log"] else "num"
            return {"name": each["name"], "type": kind, "lb": each["low"], "ub": each["high"], "base": 10}

        self._optimizer = HEBO(
            DesignSpace().parse([dimension(each) for each in self.dimensions]), scramble_seed=self.seed
        )

    def ask(self) -> Draws:
        self._asked = self._optimizer.suggest(n_suggestions=1)
        return {
            name: value.item() if hasattr(value, "item") else value
            for name, value in self._asked.iloc[0].to_dict().items()
        }

    def tell(self, value: float) -> None:
        import numpy as np

        self._optimizer.observe(self._asked, np.array([[value]]))


class Vizier(Peer):
    """The default designer of Google Vizier: a Gaussian process with an upper confidence bound."""

    def start(self) -> None:
        import gc

        import jax
        from vizier import pyvizier as vz
        from vizier._src.algorithms.designers.gp_ucb_pe import VizierGPUCBPEBandit
        from vizier.pyvizier.converters import padding

        # JAX traces the model again for each proposal. A trace makes many objects, so the garbage collector must run less often.
        gc.set_threshold(100_000)
        problem = vz.ProblemStatement()
        root = problem.search_space.root
        for each in self.dimensions:
            scale = vz.ScaleType.LOG if each["is_log"] else vz.ScaleType.LINEAR
            if each["kind"] == "choice":
                root.add_categorical_param(each["name"], [str(option) for option in range(each["count"])])
            elif each["kind"] == "int":
                root.add_int_param(each["name"], each["low"], each["high"], scale_type=scale)
            else:
                root.add_float_param(each["name"], each["low"], each["high"], scale_type=scale)
        problem.metric_information.append(vz.MetricInformation("loss", goal=vz.ObjectiveMetricGoal.MINIMIZE))
        # Without padding, JAX compiles the model again for each number of trials, and a search takes more than twice as long.
        by_tens = padding.PaddingSchedule(num_trials=padding.PaddingType.MULTIPLES_OF_10)
        self._designer = VizierGPUCBPEBandit(
            problem, rng=jax.random.PRNGKey(self.seed), padding_schedule=by_tens
        )
        self._number = 0

    def ask(self) -> Draws:
        (suggestion,) = self._designer.suggest(1)
        self._number += 1
        for each in self.dimensions:
            # A proposal of Vizier 0.1.24 may lack a parameter, as seen on the AdaBoost problem. The middle of the range replaces
            # it.
            if each["name"] not in suggestion.parameters:
                suggestion.parameters[each["name"]] = _middle_of(each)
        self._asked = suggestion.to_trial(self._number)
        draws = {name: value.value for name, value in suggestion.parameters.items()}
        for each in self.dimensions:
            if each["kind"] == "choice":
                draws[each["name"]] = int(draws[each["name"]])
        return draws

    def tell(self, value: float) -> None:
        from vizier import pyvizier as vz

        self._complete(vz.Measurement(metrics={"loss": value}), None)

    def fail(self) -> None:
        from vizier import pyvizier as vz

        self._complete(vz.Measurement(), "failed")

    def _complete(self, measurement: Any, reason: str | None) -> None:
        from vizier import algorithms as vza

        self._asked.complete(measurement, infeasibility_reason=reason)
        self._designer.update(vza.CompletedTrials([self._asked]), vza.ActiveTrials())


def _middle_of(dimension: Dimension) -> str | int | float:
    """The middle of a dimension, as Vizier represents it."""
    if dimension["kind"] == "choice":
        return str(dimension["count"] // 2)
    low, high = dimension["low"], dimension["high"]
    middle = (low * high) ** 0.5 if dimension["is_log"] else (low + high) / 2
    return round(middle) if dimension["kind"] == "int" else middle


PEERS: dict[str, type[Peer]] = {
    "nevergrad": Nevergrad,
    "scikit-optimize": ScikitOptimize,
    "smac3": Smac3,
    "optuna-gp": OptunaGp,
    "ax": Ax,
    "hebo": Hebo,
    "vizier": Vizier,
}


def main() -> None:
    """Serve one search."""
    # Libraries print to stdout, so descriptor 1 leads to stderr from now on. The proposals are written to a copy of the original
    # stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    asked = json.loads(sys.stdin.readline())
    peer = PEERS[asked["peer"]](asked["dimensions"], asked["seed"])
    start_s = time.process_time()
    while True:
        draws = {
            name: value.item() if hasattr(value, "item") else value for name, value in peer.ask().items()
        }
        print(json.dumps({"draws": draws, "cpu_s": time.process_time() - start_s}), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        peer.learn(json.loads(line))


if __name__ == "__main__":
    main()
