"""PBTTuner: population based training: the worst trials continue from checkpoints of the best.

A generation has one trial of each member. The next generation starts when all trials of the current one have ended. Most
members continue from their own checkpoint with their own parameters. The worst members continue from the checkpoint of one of
the best, with slightly changed parameters. While all trials of an unfinished generation are assigned, `ask` returns `LATER`.

Training code receives the paths of checkpoints as the parameters `load_checkpoint_dir` and `save_checkpoint_dir`. In the first
generation, `load_checkpoint_dir` has no checkpoint. Code that uses `nni_sdk.load_checkpoint` instead needs no paths: a trial
continues from the signed checkpoint of its parent.

Source: M. Jaderberg et al., Population Based Training of Neural Networks, 2017; NNI v2.10 for names and folders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field
from random import Random
from statistics import NormalDist
from typing import Any

from nni_manager.config.algorithm import BuiltInTuner, CheckpointFolder, RandomArgs
from nni_manager.config.schema import must_be, whole
from nni_manager.config.search_space import SearchSpace
from nni_manager.tuner.base import (
    JsonScalar,
    Later,
    PastTrial,
    Suggestion,
    natural,
    reading_metadata_of,
)
from nni_manager.tuner.lazy import BaseDistribution, optuna
from nni_manager.tuner.optuna_backed import PROBABILITIES, SeededTuner, seed_of_trial
from nni_manager.tuner.samplers import from_unit
from trial_keeper.frozen_dataclass import dataclass

LOAD, SAVE = "load_checkpoint_dir", "save_checkpoint_dir"

Draws = dict[str, JsonScalar]
_NORMAL = NormalDist()


class PbtArgs(RandomArgs):
    """classArgs of PBTTuner. Without `all_checkpoint_dir`, checkpoints are in the experiment's workspace."""

    all_checkpoint_dir: str | None = must_be(
        "an absolute path that trials can access", "/mnt/checkpoints", None, pattern=r"^/"
    )
    population_size: int = whole(1, 99999, "10", 10)
    factor: float = must_be("a number from 0 to 1", "0.2", 0.2, ge=0, le=1)
    resample_probability: float = must_be("a number from 0 to 1", "0.25", 0.25, ge=0, le=1)
    fraction: float = must_be("a number from 0 to 1", "0.2", 0.2, ge=0, le=1)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of a member's trial: the checkpoint to load (`<member>/<generation>`; empty: none) and the draws.

    `draws` is None until values are drawn.
    """

    loads: str
    draws: Draws | None


@dataclass(slots=True)
class _Generation:
    """One trial of each member. The plans of the members in `asked` have all draws."""

    plans: list[_Plan]
    asked: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    """By member; infinite for a failed trial."""


class PopulationTuner(SeededTuner[tuple[int, int]]):
    """Runs generations one after another, without end. A trial's position is its generation and member."""

    def __init__(self, space: SearchSpace, args: PbtArgs, checkpoints: CheckpointFolder, *_: object) -> None:
        super().__init__(space, args.optimize_mode, args.seed)
        self._args = args
        self._checkpoints = checkpoints.of_space(args.all_checkpoint_dir)
        self._generations = [_Generation([_Plan("", None)] * args.population_size)]

    def propose(self, trial_key: int) -> Suggestion | Later:
        """See `KeyedTuner`; never exhausted."""
        number, generation = len(self._generations) - 1, self._generations[-1]
        free = [member for member in range(len(generation.plans)) if member not in generation.asked]
        if not free:
            return Later.LATER
        member, plan = free[0], generation.plans[free[0]]
        # A changed choice may add nested hyper-parameters that the member never had.
        parameters, used = self.sampling.complete(plan.draws or {}, self._random(number, member))
        self._start(trial_key, number, member, _Plan(plan.loads, used))
        own = self._checkpoints / str(member)
        folders = {
            LOAD: str(self._checkpoints / plan.loads if plan.loads else own),
            SAVE: str(own / str(number)),
        }
        metadata = {"generation": number, "member": member, "loads": plan.loads, **used}
        return Suggestion({**parameters, **folders}, metadata, self._parent_of(plan))

    def _parent_of(self, plan: _Plan) -> str | None:
        """The id of the trial whose checkpoint a member loads."""
        parent, _, generation = plan.loads.partition("/")
        return self.trial_ids.get((int(generation), int(parent))) if plan.loads else None

    def learn(self, position: tuple[int, int], value: float | None) -> None:
        """See `KeyedTuner`."""
        number, member = position
        generation = self._generations[number]
        generation.losses[member] = self.loss_of(value)
        if number == len(self._generations) - 1 and len(generation.losses) == len(generation.plans):
            self._begin_next(number)

    def requeue(self, position: tuple[int, int]) -> None:
        """See `KeyedTuner`. The member's next trial of the same generation has the same plan."""
        number, member = position
        self._generations[number].asked.discard(member)

    def replay(self, trials: Iterable[PastTrial]) -> None:
        """See `KeyedTuner`."""
        past = [(*self._read(trial), trial) for trial in trials]
        for number, member, plan, trial in sorted(past, key=lambda each: each[:2]):
            while len(self._generations) <= number:
                # Needed only if the store lacks trials of the previous generation: otherwise its last result starts the next one.
                self._begin_next(len(self._generations) - 1)
            self._start(trial.key, number, member, plan)
            if trial.ended:
                self.tell_result(trial.key, trial.observation)

    def _start(self, trial_key: int, number: int, member: int, plan: _Plan) -> None:
        generation = self._generations[number]
        generation.plans[member] = plan
        generation.asked.add(member)
        self.note(trial_key, (number, member))

    def _read(self, trial: PastTrial) -> tuple[int, int, _Plan]:
        with reading_metadata_of(trial):
            plan = _Plan(str(trial.metadata["loads"]), self.draws_in(trial))
            number, member = natural(trial.metadata["generation"]), natural(trial.metadata["member"])
            _ = self._generations[0].plans[member]
        return number, member, plan

    def _begin_next(self, number: int) -> None:
        generation = self._generations[number]
        size = len(generation.plans)
        ranked = sorted(range(size), key=lambda member: (generation.losses.get(member, math.inf), member))
        good = [member for member in ranked if math.isfinite(generation.losses.get(member, math.inf))]
        cut = math.ceil(self._args.fraction * size)
        best = good[:cut]
        # A failed trial leaves no reliable checkpoint.
        replaced = {*(ranked[size - cut :] if size > cut else ()), *(set(ranked) - set(good))} - set(best)
        plans = []
        for member in range(size):
            random = self._random(number + 1, member, for_plan=True)
            if member not in replaced:
                plans.append(_Plan(f"{member}/{number}", generation.plans[member].draws))
            elif best:
                parent = random.choice(best)
                draws = self._changed(generation.plans[parent].draws or {}, random)
                plans.append(_Plan(f"{parent}/{number}", draws))
            else:  # all trials of the generation failed
                plans.append(_Plan("", None))
        self._generations.append(_Generation(plans))

    def _changed(self, draws: Draws, random: Random) -> Draws:
        """Draw each value again, or move it slightly up or down."""
        changed: Draws = {}
        for name, distribution in self.sampling.distributions_of(draws).items():
            is_new = random.random() < self._args.resample_probability
            unit, up = random.random(), random.random() < 0.5
            changed[name] = (
                from_unit(distribution, unit) if is_new else self._moved(distribution, draws[name], up=up)
            )
        return changed

    def _moved(self, distribution: BaseDistribution, drawn: Any, *, up: bool) -> Any:
        sign = 1 if up else -1
        match distribution:
            case optuna.distributions.FloatDistribution(low=low, high=high) if (low, high) == PROBABILITIES:
                # A normal variable moves by sigmas: multiplication would push a likely value to the end of the tail.
                moved = _NORMAL.cdf(_NORMAL.inv_cdf(drawn) + sign * self._args.factor)
                return min(max(moved, low), high)
            case optuna.distributions.CategoricalDistribution(choices=choices):
                return choices[min(max(choices.index(drawn) + sign, 0), len(choices) - 1)]
            case optuna.distributions.IntDistribution(low=low, high=high):
                return min(max(drawn + sign, low), high)
        assert isinstance(distribution, optuna.distributions.FloatDistribution)
        return min(max(drawn * (1 + sign * self._args.factor), distribution.low), distribution.high)

    def _random(self, number: int, member: int, *, for_plan: bool = False) -> Random:
        # The position is the seed, so the draws do not depend on the trial's key.
        position = 2 * (number * self._args.population_size + member) + for_plan
        return Random(seed_of_trial(self.seed, position))


DECLARED = BuiltInTuner(
    "PBTTuner", __doc__, PopulationTuner, PbtArgs, aliases=("PBT",), adds_parameters=(LOAD, SAVE)
)
