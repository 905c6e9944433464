"""Hyperband: random parameters with a small budget, the best of them again with more.

A bracket starts with n parameter sets and a budget r. When all trials of a round have ended, the best third (for `eta` 3) run
again with three times the budget, up to R. Brackets differ in their start: from many sets with a small budget to few with the
full budget R. Training code receives its budget as the parameter TRIAL_BUDGET, and may continue from the checkpoint that the
parameter set's trial of the round before has saved. While a round is unfinished, the next bracket starts.

Source: L. Li et al., Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization, 2018.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import field, replace
from random import Random
from typing import Literal

from nni_manager.config.algorithm import BuiltInTuner, RandomArgs
from nni_manager.config.schema import must_be, whole
from nni_manager.config.search_space import SearchSpace
from nni_manager.tuner.base import (
    JsonScalar,
    PastTrial,
    Suggestion,
    natural,
    reading_metadata_of,
)
from nni_manager.tuner.optuna_backed import SeededTuner, seed_of_trial
from trial_keeper.frozen_dataclass import dataclass

BUDGET = "TRIAL_BUDGET"
# Powers of a third are not exact: 81 * (1/3)**4 is a little below 1.
_ROUNDING = 1e-9


class HyperbandArgs(RandomArgs):
    """classArgs of Hyperband, an advisor in NNI. `exec_mode` serial is rejected: serial execution leaves jobs idle."""

    R: int = whole(1, 99999, "60", 60)
    eta: int = whole(2, 100, "3", 3)
    exec_mode: Literal["parallelism"] = must_be("parallelism", "parallelism", "parallelism")


@dataclass(frozen=True, slots=True)
class _Position:
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
    """(round, config) of the sets that are to be proposed: promoted ones, and those whose trial was interrupted."""
    members: list[int] = field(default_factory=list)
    """Number of parameter sets in each round that has started."""
    losses: list[dict[int, float]] = field(default_factory=list)
    """Losses of each round that has started, by config; infinite for a failed trial."""

    def __post_init__(self) -> None:
        self.members.append(self.rounds[0][0])
        self.losses.append({})

    @property
    def next_position(self) -> _Position | None:
        """The next trial to propose; None while other trials must end first, and when the bracket is finished."""
        if self.waiting:
            return _Position(self.number, *self.waiting[0])
        if len(self.draws) < self.members[0]:
            return _Position(self.number, 0, len(self.draws))
        return None

    @property
    def is_complete(self) -> bool:
        """True if all trials of the bracket have been proposed and have ended."""
        has_all_losses = len(self.losses[-1]) == self.members[-1]
        return has_all_losses and (len(self.losses) == len(self.rounds) or not self.waiting)

    def asked(self, position: _Position, draws: dict[str, JsonScalar]) -> None:
        """Record that the trial was proposed, now or before a restart."""
        self.draws.setdefault(position.config, draws)
        if (position.round, position.config) in self.waiting:
            self.waiting.remove((position.round, position.config))

    def ended(self, position: _Position, loss: float) -> None:
        """Record the end of the trial; an infinite loss means that the trial failed."""
        if position.round >= len(self.losses):
            return
        losses = self.losses[position.round]
        losses[position.config] = loss
        is_last = position.round == len(self.rounds) - 1
        if is_last or len(losses) < self.members[position.round] or len(self.losses) > position.round + 1:
            return
        ranked = sorted((loss, config) for config, loss in losses.items() if math.isfinite(loss))
        promoted = ranked[: self.rounds[position.round + 1][0]]
        if promoted:
            self.members.append(len(promoted))
            self.losses.append({})
            self.waiting.extend((position.round + 1, config) for _, config in promoted)


class Hyperband(SeededTuner[_Position]):
    """Runs brackets one after another, without end; parameter sets are drawn at random."""

    def __init__(self, space: SearchSpace, args: HyperbandArgs, *_: object, smallest_budget: int = 1) -> None:
        """Apply the settings of the experiment file.

        Budgets are at least `smallest_budget`; the last budget of each bracket is `args.R`.
        """
        super().__init__(space, args.optimize_mode, args.seed)
        self._most, self._eta = args.R, args.eta
        self._most_rounds = int(math.log(args.R / smallest_budget) / math.log(args.eta) + _ROUNDING)
        self._brackets: list[_Bracket] = []
        self._first_open = 0

    def propose(self, trial_key: int) -> Suggestion:
        """See `KeyedTuner`; never exhausted."""
        position = self._next_position()
        bracket = self._brackets[position.bracket]
        known = bracket.draws.get(position.config)
        draws = self.new_draws(trial_key) if known is None else known
        parameters = self.sampling.sample(lambda name, _: draws[name])
        bracket.asked(position, draws)
        self.note(trial_key, position)
        metadata = {"bracket": position.bracket, "round": position.round, "config": position.config, **draws}
        before = self.trial_ids.get(replace(position, round=position.round - 1))
        return Suggestion({**parameters, BUDGET: bracket.rounds[position.round][1]}, metadata, before)

    def new_draws(self, trial_key: int) -> dict[str, JsonScalar]:
        """Draws for a new parameter set, from the trial's own random generator."""
        _, draws = self.sampling.complete({}, Random(seed_of_trial(self.seed, trial_key)))
        return draws

    def learn(self, position: _Position, value: float | None) -> None:
        """See `KeyedTuner`."""
        self._brackets[position.bracket].ended(position, self.loss_of(value))

    def requeue(self, position: _Position) -> None:
        """See `KeyedTuner`. The parameter set runs once more with the same budget."""
        self._brackets[position.bracket].waiting.append((position.round, position.config))

    def replay(self, trials: Iterable[PastTrial]) -> None:
        """See `KeyedTuner`. Trial keys grow from round to round, so each round precedes its promotions."""
        for trial in trials:
            with reading_metadata_of(trial):
                draws = self.draws_in(trial)
                position = _Position(
                    *(natural(trial.metadata[name]) for name in ("bracket", "round", "config"))
                )
            while len(self._brackets) <= position.bracket:
                self._add_bracket()
            self._brackets[position.bracket].asked(position, draws)
            self.note(trial.key, position)
            if trial.ended:
                self.tell_result(trial.key, trial.observation)

    def _next_position(self) -> _Position:
        while self._first_open < len(self._brackets) and self._brackets[self._first_open].is_complete:
            self._first_open += 1
        for bracket in self._brackets[self._first_open :]:
            if (position := bracket.next_position) is not None:
                return position
        position = self._add_bracket().next_position
        assert position is not None
        return position

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


DECLARED = BuiltInTuner(
    "Hyperband",
    __doc__,
    Hyperband,
    HyperbandArgs,
    is_advisor=True,
    adds_parameters=(BUDGET,),
)
