"""Tuners over an Optuna study, with Optuna's samplers or our own.

Optuna samples and models the raw draw of each hyper-parameter, from a plain distribution: the index of a choice, a whole
number, a float in a range, or, for the normal family, a probability. `Sampling` maps draws to values of the user's space:
quantised, clipped, or through the inverse of the normal distribution. So values of each type are exactly distributed, and TPE
models draws before they are rounded. The draws are stored as metadata.

Each trial has its own random generator, seeded from the tuner's seed and the trial's key. A tuner rebuilt after a restart
therefore continues the earlier sequence of proposals and never repeats its first draws. A sampler can set attributes on a trial
or on the study (generations, a covariance matrix). These attributes are stored in the metadata of the sampled trial.

Source: Optuna 5 ask-and-tell interface.
"""

from __future__ import annotations

import copy
import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any, TypeAlias

from nni_manager.config import search_space
from nni_manager.config.algorithm import RandomArgs
from nni_manager.config.prior_results import PriorResult
from nni_manager.domain.objectives import Objectives, OptimizeMode, Outcome
from nni_manager.tuner import base
from nni_manager.tuner.lazy import BaseDistribution, BaseSampler, FrozenTrial, optuna
from nni_manager.tuner.samplers import IMPORTED, VOID, SamplerSeeds, from_unit
from nni_manager.tuner.untrusted_metadata import NOTED_ON_STUDY, NOTED_ON_TRIAL

# An open interval: the inverse of the normal distribution is infinite at 0 and at 1. Truncates beyond 8.2 sigma.
PROBABILITIES = (2**-53, 1 - 2**-53)
"""The bounds of the draw of all normal types: the probability that the variable is below its value."""

_NOTES = (NOTED_ON_TRIAL, NOTED_ON_STUDY)
# TPE's attribute for processes that share a study and read a trial before its draws are stored.
_DRAWS_OF_TPE = "tpe:relative_params"
# Optuna 5 keeps each constraint of a trial under this prefix and its name; `Trial.set_constraint` needs a trial in progress.
_CONSTRAINTS = "constraints"

MakeSampler: TypeAlias = Callable[[SamplerSeeds, Any, Any], BaseSampler]
"""Makes the sampler of one trial from its seeds, the hyper-parameters that every trial has, and the tuner's classArgs."""


class SeededTuner(base.KeyedTuner[base.Position]):
    """Base of tuners that draw parameters at random from a search space."""

    def __init__(
        self, space: search_space.SearchSpace, optimize_mode: OptimizeMode, seed: int | None
    ) -> None:
        """`seed` None: a random seed."""
        super().__init__()
        self.sampling = Sampling(space)
        self.seed = secrets.randbits(32) if seed is None else seed
        self._sign = -1.0 if optimize_mode == "maximize" else 1.0
        self.trial_ids: dict[base.Position, str] = {}
        """The ended trials, by position, for tuners whose trials continue from others."""

    def tell_result(self, trial_key: int, result: base.Observation) -> None:
        """See `BaseTuner`."""
        self.note_id(trial_key, result.trial_id)
        super().tell_result(trial_key, result)

    def note_id(self, trial_key: int, trial_id: str) -> None:
        """Store the id of a trial."""
        if trial_id and trial_key in self.position_of:
            self.trial_ids[self.position_of[trial_key]] = trial_id

    def loss_of(self, value: float | None) -> float:
        """The result as a loss: lower is better; infinite if the trial failed."""
        return math.inf if value is None else self._sign * value

    def draws_in(self, trial: base.PastTrial) -> dict[str, base.JsonScalar]:
        """The draws in a trial's metadata.

        Raises:
            ValueError, TypeError, LookupError, ArithmeticError: they are not of this search space.
        """
        draws = {name: each for name, each in trial.metadata.items() if name.startswith("/")}
        self.sampling.sample(lambda name, _: draws[name])
        return draws


class OptunaTuner(SeededTuner[int]):
    """A tuner over one in-memory Optuna study. Each trial has a new sampler, which can read all trials of the study.

    A trial's position is its number in the study.
    """

    def __init__(
        self,
        space: search_space.SearchSpace,
        args: RandomArgs,
        _: Path,
        objectives: Objectives,
        *,
        make_sampler: MakeSampler,
        shared: Callable[[search_space.SearchSpace], object] | None = None,
        learns: bool = True,
        takes_imports: bool = True,
    ) -> None:
        """`shared`: makes, for all trials, what `make_sampler` gets in place of the hyper-parameters.

        `takes_imports`: True if the sampler uses trials that another kind of sampler has proposed.
        """
        self.learns = learns
        self._takes_imports = learns and takes_imports
        super().__init__(space, objectives.first.mode, args.seed)
        self._objectives = objectives
        over = self.sampling.always_there if shared is None else shared(space)

        def make_one(seeds: SamplerSeeds) -> BaseSampler:
            return make_sampler(seeds, over, args)

        self._make_sampler = make_one
        self._storage = optuna.storages.InMemoryStorage()
        self._study = optuna.create_study(
            storage=self._storage,
            directions=[each.mode for each in objectives.all],
            sampler=self._make_sampler(SamplerSeeds(self.seed, 0)),
        )
        self._study_id = self._storage.get_study_id_from_name(self._study.study_name)

    def propose(self, trial_key: int) -> base.Suggestion:
        """See `KeyedTuner`. Never exhausted: a space of one point yields that point again."""
        seeds = SamplerSeeds(self.seed, seed_of_trial(self.seed, trial_key))
        self._study.sampler = self._make_sampler(seeds)
        noted_before = dict(self._storage.get_study_system_attrs(self._study_id))
        trial = self._study.ask()
        parameters = self.sampling.sample(lambda name, distribution: draw(trial, name, distribution))
        self.note(trial_key, trial.number)
        # In a storage with one study, a trial's number is also its id.
        on_trial = self._storage.get_trial(trial.number).system_attrs
        on_study = self._storage.get_study_system_attrs(self._study_id)
        noted = {
            NOTED_ON_TRIAL: {
                name: value for name, value in on_trial.items() if not name.startswith(_DRAWS_OF_TPE)
            },
            NOTED_ON_STUDY: {
                name: value
                for name, value in on_study.items()
                if name not in noted_before or noted_before[name] != value
            },
        }
        notes = {name: json.dumps(attributes) for name, attributes in noted.items() if attributes}
        return base.Suggestion(parameters, {**trial.params, **notes})

    def learn(self, position: int, value: float | None) -> None:
        """See `KeyedTuner`. With several objectives or constraints, a number alone is no result."""
        self._learn(position, self._outcome_of(value, None))

    def _outcome_of(self, value: float | None, metric: str | None) -> Outcome | None:
        """The numbers of a result; None: it has none that counts. `metric`: all of it as JSON text."""
        if value is None or not math.isfinite(value):
            return None
        if self._objectives.is_plain:
            return Outcome((value,))
        return None if metric is None else self._objectives.outcome(metric)

    def _learn(self, position: int, outcome: Outcome | None) -> None:
        if outcome is None:
            self._study.tell(position, state=optuna.trial.TrialState.FAIL)
            return
        for name, violation in _constraints(outcome).items():
            # In a storage with one study, a trial's number is also its id.
            self._storage.set_trial_system_attr(position, f"{_CONSTRAINTS}:{name}", violation)
        self._study.tell(position, outcome.values)

    def tell_result(self, trial_key: int, result: base.Observation) -> None:
        """See `BaseTuner`. Samplers of Optuna read the intermediate results of a pruned trial from the study."""
        position = self.end(trial_key)
        if position is None:
            return
        if result.is_void:
            self._storage.set_trial_user_attr(position, VOID, True)
        if not result.pruned_curve:
            self._learn(position, self._outcome_of(result.value, result.metric))
        else:
            for step, value in enumerate(result.pruned_curve, 1):
                # In a storage with one study, a trial's number is also its id.
                self._storage.set_trial_intermediate_value(position, step, value)
            self._study.tell(position, state=optuna.trial.TrialState.PRUNED)

    def replay(self, trials: Iterable[base.PastTrial]) -> None:
        """See `KeyedTuner`."""
        for number, trial in enumerate(trials, len(self._study.get_trials(deepcopy=False))):
            self._study.add_trial(self._frozen(trial))
            for name, value in _noted(trial, NOTED_ON_STUDY).items():
                self._storage.set_study_system_attr(self._study_id, name, value)
            self.note(trial.key, number)
            if trial.ended:
                self.end(trial.key)

    def import_results(self, results: Iterable[PriorResult]) -> int:
        """See `BaseTuner.import_results`."""
        count = 0
        for result in results if self._takes_imports else ():
            draws = self.sampling.draws_of(result.parameters)
            outcome = self._outcome_of(result.value, result.metric)
            if draws is None or outcome is None:
                continue
            used = self.sampling.distributions_of(draws)
            self._study.add_trial(
                optuna.create_trial(
                    values=outcome.values,
                    params=draws,
                    distributions=used,
                    user_attrs={IMPORTED: True},
                    constraints=_constraints(outcome),
                )
            )
            count += 1
        return count

    def _frozen(self, trial: base.PastTrial) -> FrozenTrial:
        values: Sequence[float] | None = None
        constraints, state = {}, optuna.trial.TrialState.FAIL
        curve = dict(enumerate(trial.pruned_curve, 1))
        if curve:
            values, state = [trial.pruned_curve[-1]], optuna.trial.TrialState.PRUNED
        elif not trial.ended:
            state = optuna.trial.TrialState.RUNNING
        elif (outcome := self._outcome_of(trial.value, trial.metric)) is not None:
            values, constraints, state = (
                outcome.values,
                _constraints(outcome),
                optuna.trial.TrialState.COMPLETE,
            )
        with base.reading_metadata_of(trial):
            return optuna.create_trial(
                state=state,
                values=values,
                constraints=constraints,
                params={name: drawn for name, drawn in trial.metadata.items() if name not in _NOTES},
                distributions=self.sampling.distributions_of(trial.metadata),
                system_attrs=_noted(trial, NOTED_ON_TRIAL),
                user_attrs={VOID: True} if trial.is_void else {},
                intermediate_values=curve,
            )


def _constraints(outcome: Outcome) -> dict[str, float]:
    """How far a result violates each constraint, in Optuna's form: above 0 if it does."""
    return {str(index): violation for index, violation in enumerate(outcome.violations)}


def _noted(trial: base.PastTrial, name: str) -> dict[str, Any]:
    attributes: dict[str, Any] = json.loads(str(trial.metadata.get(name, "{}")))
    return attributes


def over_a_study(
    make_sampler: MakeSampler,
    shared: Callable[[search_space.SearchSpace], object] | None = None,
    **settings: Any,
) -> Callable[..., OptunaTuner]:
    """`make` of a `BuiltInTuner` over a study; see `OptunaTuner`."""
    return partial(OptunaTuner, make_sampler=make_sampler, shared=shared, **settings)


class Sampling:
    """Maps draws to parameters. The key of a hyper-parameter's distribution is its JSON pointer in the space."""

    def __init__(self, space: search_space.SearchSpace, above: str = "") -> None:
        """`above`: the JSON pointer of a nested space. `always_there`: the distributions outside of nested choices."""
        self._space = space
        self._pointers = {name: pointer_of(above, name) for name in space.parameters}
        self.always_there = {
            self._pointers[name]: distribution_of(each) for name, each in space.parameters.items()
        }
        self._nested = {
            (self._pointers[name], index): Sampling(option.space, f"{self._pointers[name]}/{index}")
            for name, parameter in space.parameters.items()
            if isinstance(parameter, search_space.Choice)
            for index, option in enumerate(parameter.options)
            if isinstance(option, search_space.Nested)
        }

    def sample(self, draw: Callable[[str, BaseDistribution], Any]) -> dict[str, Any]:
        """A trial's parameters from the values that `draw` returns for each parameter, in the order of the search space."""
        parameters: dict[str, Any] = {}
        for name, parameter in self._space.parameters.items():
            pointer = self._pointers[name]
            drawn = draw(pointer, self.always_there[pointer])
            if not isinstance(parameter, search_space.Choice):
                parameters[name] = _value_of(parameter, drawn)
                continue
            option = parameter.options[drawn]
            if isinstance(option, search_space.Nested):
                option = {"_name": option.name, **self._nested[pointer, drawn].sample(draw)}
            # A copy: changes by the caller must not reach the search space.
            parameters[name] = copy.deepcopy(option)
        return parameters

    def complete(
        self, known: Mapping[str, base.JsonScalar], random: Random
    ) -> tuple[dict[str, Any], dict[str, base.JsonScalar]]:
        """The parameters and their draws: the known draws, and random ones for all others."""
        draws: dict[str, base.JsonScalar] = {}

        def draw(name: str, distribution: BaseDistribution) -> Any:
            draws[name] = known[name] if name in known else from_unit(distribution, random.random())
            return draws[name]

        return self.sample(draw), draws

    def distributions_of(self, draws: Mapping[str, Any]) -> dict[str, BaseDistribution]:
        """The distributions of draws, in the order of the space.

        Raises:
            ValueError, TypeError, LookupError, ArithmeticError: they are not of this search space.
        """
        used: dict[str, BaseDistribution] = {}

        def recall(name: str, distribution: BaseDistribution) -> Any:
            used[name] = distribution
            return draws[name]

        self.sample(recall)
        return used

    def draws_of(self, parameters: Mapping[str, Any]) -> dict[str, base.JsonScalar] | None:
        """Draws that yield these parameters; None if the parameters are not in the space."""
        if search_space.contains(self._space, dict(parameters)):
            return None
        draws: dict[str, base.JsonScalar] = {}
        for name, parameter in self._space.parameters.items():
            pointer, value = self._pointers[name], parameters[name]
            if isinstance(parameter, search_space.Choice):
                options = enumerate(parameter.options)
                found = (self._draws_of_option(pointer, index, option, value) for index, option in options)
                draws |= next(filter(None, found), {})
            else:
                draws[pointer] = _draw_of(parameter, value)
        return draws

    def _draws_of_option(
        self, pointer: str, index: int, option: Any, value: Any
    ) -> dict[str, base.JsonScalar] | None:
        """Draws that yield this value of a choice by this option; None if the option does not match the value."""
        if not isinstance(option, search_space.Nested):
            is_same = json.dumps(option, sort_keys=True) == json.dumps(value, sort_keys=True)
            return {pointer: index} if is_same else None
        if not isinstance(value, dict) or value.get("_name") != option.name:
            return None
        inner = self._nested[pointer, index].draws_of(
            {key: each for key, each in value.items() if key != "_name"}
        )
        return None if inner is None else {**inner, pointer: index}


def pointer_of(above: str, name: str) -> str:
    """The JSON pointer of the hyper-parameter of this name below the pointer `above`."""
    # RFC 6901: a name that contains a slash must not collide with a nested one.
    return f"{above}/{name.replace('~', '~0').replace('/', '~1')}"


def distribution_of(parameter: search_space.Parameter) -> BaseDistribution:
    """The distribution of a hyper-parameter's draws."""
    match parameter:
        case search_space.Choice(options):
            return optuna.distributions.CategoricalDistribution(tuple(range(len(options))))
        case search_space.RandInt(low, high):
            return optuna.distributions.IntDistribution(low, high - 1)
        case search_space.Uniform(low, high) | search_space.QUniform(low, high):
            return optuna.distributions.FloatDistribution(low, high)
        case search_space.LogUniform(low, high) | search_space.QLogUniform(low, high):
            return optuna.distributions.FloatDistribution(low, high, log=True)
        case (
            search_space.Normal()
            | search_space.QNormal()
            | search_space.LogNormal()
            | search_space.QLogNormal()
        ):
            return optuna.distributions.FloatDistribution(*PROBABILITIES)


def draw(trial: optuna.Trial, name: str, distribution: BaseDistribution) -> Any:
    """The draw of the study's sampler for the hyper-parameter of this name."""
    match distribution:
        case optuna.distributions.CategoricalDistribution():
            return trial.suggest_categorical(name, distribution.choices)
        case optuna.distributions.IntDistribution():
            return trial.suggest_int(name, distribution.low, distribution.high)
    assert isinstance(distribution, optuna.distributions.FloatDistribution)
    return trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)


def _value_of(parameter: search_space.Parameter, drawn: Any) -> base.JsonScalar:
    """The value of a draw, as a plain int or float."""
    match parameter:
        case search_space.RandInt():
            return int(drawn)
        case search_space.QUniform() | search_space.QLogUniform():
            return parameter.quantised(drawn)
        case search_space.Normal(mu, sigma):
            return NormalDist(mu, sigma).inv_cdf(drawn)
        case search_space.QNormal(mu, sigma, q):
            return search_space.multiple_of(NormalDist(mu, sigma).inv_cdf(drawn), q)
        case search_space.LogNormal(mu, sigma):
            return math.exp(NormalDist(mu, sigma).inv_cdf(drawn))
        case search_space.QLogNormal(mu, sigma, q):
            return search_space.multiple_of(math.exp(NormalDist(mu, sigma).inv_cdf(drawn)), q)
        case _:
            return float(drawn)


def _draw_of(parameter: search_space.Parameter, value: Any) -> base.JsonScalar:
    """A draw that yields the value, which lies in the parameter's support."""
    match parameter:
        case search_space.RandInt():
            return int(value)
        case search_space.Normal(mu, sigma) | search_space.QNormal(mu, sigma):
            share = NormalDist(mu, sigma).cdf(value)
        case search_space.LogNormal(mu, sigma) | search_space.QLogNormal(mu, sigma):
            share = NormalDist(mu, sigma).cdf(math.log(value)) if value > 0 else 0.0
        case _:
            return float(value)
    return min(max(share, PROBABILITIES[0]), PROBABILITIES[1])


def seed_of_trial(seed: int, trial_key: int) -> int:
    """A 32-bit seed, unique among 2**32 consecutive keys, and far from its neighbours'.

    A 32-bit hash could collide among ten thousand trials; this mixing is a bijection.
    Source: the finaliser of MurmurHash3.
    """
    mixed = (seed * 0x9E3779B1 + trial_key) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor % 2**32
    return mixed
