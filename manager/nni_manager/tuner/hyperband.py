"""Hyperband: many parameter sets with a small budget, the best of them again with a larger one, and so on.

A bracket starts with n parameter sets and a budget r. When all trials of a round have ended, the best third (of `eta` 3) run
again with three times the budget, up to R. Brackets differ in their start: from many sets with a small budget to few with the
full budget R. Training code receives its budget as the parameter TRIAL_BUDGET. Nothing waits: while a round is unfinished, the
next bracket starts.

Source: L. Li et al., Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization, 2018.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from optuna.distributions import BaseDistribution

from nni_manager.config.algorithms import HyperbandArgs
from nni_manager.config.search_space import SearchSpace
from nni_manager.errors import InternalError
from nni_manager.tuner.base import BaseTuner, JsonScalar, PastTrial, Suggestion
from nni_manager.tuner.optuna_backed import Sampling, natural, seed_of_trial
from nni_manager.tuner.samplers import from_unit

BUDGET = "TRIAL_BUDGET"
# Powers of a third are not exact: 81 * (1/3)**4 is a little below 1.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a trial: the `config`-th parameter set in this round of this bracket."""

    bracket: int
    round: int
    config: int


@dataclass(slots=True)
class _Bracket:
    """A bracket; `rounds` are (number of parameter sets, budget)."""

    number: int
    rounds: list[tuple[int, int]]
    draws: dict[int, dict[str, JsonScalar]] = field(default_factory=dict)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """(round, config) of the promoted sets that were not yet asked for."""
    members: list[int] = field(default_factory=list)
    """Number of parameter sets in each round that has started."""
    losses: list[dict[int, float]] = field(default_factory=list)
    """Losses of each round that has started, by config; infinite for a failed trial."""

    def __post_init__(self) -> None:
        self.members.append(self.rounds[0][0])
        self.losses.append({})

    @property
    def next_place(self) -> _Place | None:
        """The next trial to propose; None while other trials must end first, and when the bracket is finished."""
        if self.waiting:
            return _Place(self.number, *self.waiting[0])
        if len(self.draws) < self.members[0]:
            return _Place(self.number, 0, len(self.draws))
        return None

    @property
    def is_over(self) -> bool:
        """True if no trial of the bracket is left to be asked for or to end."""
        is_told = len(self.losses[-1]) == self.members[-1]
        return is_told and (len(self.losses) == len(self.rounds) or not self.waiting)

    def asked(self, place: _Place, draws: dict[str, JsonScalar]) -> None:
        """Record that the trial was asked for, now or before a restart."""
        self.draws.setdefault(place.config, draws)
        if (place.round, place.config) in self.waiting:
            self.waiting.remove((place.round, place.config))

    def told(self, place: _Place, loss: float) -> None:
        """Record that the trial has ended; an infinite loss: it failed."""
        if place.round >= len(self.losses):
            return
        losses = self.losses[place.round]
        losses[place.config] = loss
        is_last = place.round == len(self.rounds) - 1
        if is_last or len(losses) < self.members[place.round] or len(self.losses) > place.round + 1:
            return
        ranked = sorted((loss, config) for config, loss in losses.items() if math.isfinite(loss))
        promoted = ranked[: self.rounds[place.round + 1][0]]
        if promoted:
            self.members.append(len(promoted))
            self.losses.append({})
            self.waiting.extend((place.round + 1, config) for _, config in promoted)


class Hyperband(BaseTuner):
    """Runs brackets one after another, without end; parameter sets are drawn at random."""

    def __init__(self, space: SearchSpace, args: HyperbandArgs, smallest_budget: int = 1) -> None:
        """Take the settings of the experiment file.

        No budget is below `smallest_budget`, and the last of each bracket is `args.R`.
        """
        self._sampling = Sampling(space)
        self._seed = secrets.randbits(32) if args.seed is None else args.seed
        self._sign = -1.0 if args.optimize_mode == "maximize" else 1.0
        self._most, self._eta = args.R, args.eta
        self._most_rounds = int(math.log(args.R / smallest_budget) / math.log(args.eta) + _ROUNDING)
        self._brackets: list[_Bracket] = []
        self._first_open = 0
        self._place_of: dict[int, _Place] = {}
        self._running: set[int] = set()

    def ask(self, trial_key: int) -> Suggestion:
        """See `BaseTuner.ask`; never exhausted."""
        if trial_key in self._place_of:
            raise InternalError(
                f"cannot propose parameters for trial {trial_key} a second time; please report this"
            )
        place = self._next_place()
        bracket = self._brackets[place.bracket]
        known = bracket.draws.get(place.config)
        draws = self.new_draws(trial_key) if known is None else known
        parameters = self._sampling.sample(lambda name, _: draws[name])
        bracket.asked(place, draws)
        self._place_of[trial_key] = place
        self._running.add(trial_key)
        metadata = {"bracket": place.bracket, "round": place.round, "config": place.config, **draws}
        return Suggestion({**parameters, BUDGET: bracket.rounds[place.round][1]}, metadata)

    def new_draws(self, trial_key: int) -> dict[str, JsonScalar]:
        """Draws for a new parameter set, from the trial's own random generator."""
        random = Random(seed_of_trial(self._seed, trial_key))
        draws: dict[str, JsonScalar] = {}

        def draw(name: str, distribution: BaseDistribution) -> Any:
            draws[name] = from_unit(distribution, random.random())
            return draws[name]

        self._sampling.sample(draw)
        return draws

    def tell(self, trial_key: int, value: float | None) -> None:
        """See `BaseTuner.tell`."""
        if trial_key not in self._place_of:
            raise InternalError(
                f"cannot learn from trial {trial_key}: this tuner did not propose it; please report this"
            )
        if trial_key not in self._running:
            return
        self._running.remove(trial_key)
        is_usable = value is not None and math.isfinite(value)
        place = self._place_of[trial_key]
        loss = self._sign * value if value is not None and is_usable else math.inf
        self._brackets[place.bracket].told(place, loss)

    def restore(self, trials: Iterable[PastTrial]) -> None:
        """See `Tuner.restore`. All keys of a round are lower than those of the next, so each promotion finds its round."""
        if self._place_of:
            raise InternalError("cannot rebuild a tuner that is in use; please report this")
        for trial in trials:
            place, draws = self._read(trial)
            while len(self._brackets) <= place.bracket:
                self._add_bracket()
            self._brackets[place.bracket].asked(place, draws)
            self._place_of[trial.key] = place
            self._running.add(trial.key)
            if trial.ended:
                self.tell(trial.key, trial.value)

    def _read(self, trial: PastTrial) -> tuple[_Place, dict[str, JsonScalar]]:
        draws = {name: each for name, each in trial.metadata.items() if name.startswith("/")}
        try:
            self._sampling.sample(lambda name, _: draws[name])
            return _Place(*(natural(trial.metadata[name]) for name in ("bracket", "round", "config"))), draws
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise InternalError(
                f"cannot rebuild the tuner: the metadata of trial {trial.key} is not of this search space; "
                "please report this"
            ) from error

    def _next_place(self) -> _Place:
        while self._first_open < len(self._brackets) and self._brackets[self._first_open].is_over:
            self._first_open += 1
        for bracket in self._brackets[self._first_open :]:
            if (place := bracket.next_place) is not None:
                return place
        place = self._add_bracket().next_place
        assert place is not None
        return place

    def _add_bracket(self) -> _Bracket:
        most_rounds, number = self._most_rounds, len(self._brackets)
        last = most_rounds - number % (most_rounds + 1)
        configs = math.ceil((most_rounds + 1) * self._eta**last / (last + 1) - _ROUNDING)
        budget = self._most * self._eta**-last
        rounds = [
            (
                max(1, int(configs * self._eta**-i + _ROUNDING)),
                int(budget * self._eta**i + _ROUNDING),
            )
            for i in range(last + 1)
        ]
        self._brackets.append(_Bracket(number, rounds))
        return self._brackets[-1]
