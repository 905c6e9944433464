"""What an experiment searches for: its objectives and constraints, and the one rule for which results are the best.

With one objective, the best result is the one with the best value. With several, the best results form the Pareto front: no other
result is at least as good in every objective and better in one. A result that violates a constraint is never among the best.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

from nni_manager.domain.metrics import finite_number, reason_without, reason_without_reward, reward
from nni_manager.domain.pareto import ParetoFront
from nni_sdk.nesting import parsed_json
from trial_keeper.frozen_dataclass import dataclass

OptimizeMode = Literal["maximize", "minimize"]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Objective:
    """A metric of the final result, and whether a high or a low value is better."""

    metric: str
    mode: OptimizeMode

    def loss(self, value: float) -> float:
        """The value as a loss: lower is better."""
        return -value if self.mode == "maximize" else value


@dataclass(frozen=True, slots=True)
class Constraint:
    """Bounds of a metric of the final result, both inclusive; None: no such bound."""

    metric: str
    at_most: float | None = None
    at_least: float | None = None

    def violation(self, value: float) -> float:
        """How far the value lies outside the bounds; 0 or less if it is within."""
        above = None if self.at_most is None else value - self.at_most
        below = None if self.at_least is None else self.at_least - value
        return max((each for each in (above, below) if each is not None), default=0.0)

    def __str__(self) -> str:
        bounds = (("≤", self.at_most), ("≥", self.at_least))
        shown = ((sign, repr(float(bound)).removesuffix(".0")) for sign, bound in bounds if bound is not None)
        return " and ".join(f"{self.metric} {sign} {bound}" for sign, bound in shown)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a usable result: one of `values` for each objective, one of `violations` for each constraint."""

    values: tuple[float, ...]
    violations: tuple[float, ...] = ()

    @property
    def is_feasible(self) -> bool:
        """True if the result violates no constraint."""
        return all(each <= 0 for each in self.violations)


@dataclass(frozen=True, slots=True)
class Objectives:
    """All objectives of an experiment, at least one, and its constraints."""

    all: tuple[Objective, ...]
    constraints: tuple[Constraint, ...] = ()

    @property
    def first(self) -> Objective:
        """The objective whose number is shown where there is room for one number only."""
        return self.all[0]

    @property
    def has_several(self) -> bool:
        """True if the best results are a Pareto front."""
        return len(self.all) > 1

    @property
    def is_plain(self) -> bool:
        """True if the number of a result decides alone, as in NNI: one objective, named `default`, and no constraint."""
        return not self.has_several and not self.constraints and self.first.metric == "default"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that every result must have, in the order of the file."""
        of_objectives, of_constraints = (
            (each.metric for each in self.all),
            (each.metric for each in self.constraints),
        )
        return tuple(dict.fromkeys((*of_objectives, *of_constraints)))

    def outcome(self, text: str) -> Outcome | None:
        """The numbers of a reported result; None if one of its metrics is missing or no finite number. `text`: its JSON text."""
        if self.is_plain:
            number = reward(text)
            return None if number is None else Outcome((number,))
        try:
            reported = parsed_json(text)
        except ValueError:
            return None
        if not isinstance(reported, dict):
            reported = {"default": reported}
        numbers = {name: finite_number(reported.get(name)) for name in self.metrics}
        if None in numbers.values():
            return None
        known = {name: number for name, number in numbers.items() if number is not None}
        return Outcome(
            tuple(known[each.metric] for each in self.all),
            tuple(each.violation(known[each.metric]) for each in self.constraints),
        )

    def value_of(self, text: str) -> float | None:
        """The number of the first objective; None if the result is unusable."""
        outcome = self.outcome(text)
        return None if outcome is None else outcome.values[0]

    def reason_against(self, text: str) -> str:
        """The reason why `outcome` cannot use a reported result, as a clause with the value; it ends with the remedy."""
        if self.is_plain:
            return reason_without_reward(text)
        return reason_without(text, self.metrics)

    def losses(self, outcome: Outcome) -> tuple[float, ...]:
        """The values as losses: lower is better."""
        return tuple(each.loss(value) for each, value in zip(self.all, outcome.values, strict=True))

    def ranked(self, results: Iterable[tuple[Item, str]]) -> list[Item]:
        """The items of the feasible results, best first; with several objectives only those on the Pareto front.

        `results`: items, each with the JSON text of its final result. The front is in the order of the first objective; equal
        results keep their order.
        """
        judged = ((item, self.outcome(text)) for item, text in results)
        feasible = (
            (item, self.losses(each)) for item, each in judged if each is not None and each.is_feasible
        )
        if not self.has_several:
            return [item for item, _ in sorted(feasible, key=lambda each: each[1])]
        front: ParetoFront[Item] = ParetoFront()
        for item, losses in feasible:
            front.add(losses, item)
        return front.items


def single(mode: OptimizeMode) -> Objectives:
    """The objectives of an experiment that names none: the number that trials report."""
    return Objectives((Objective("default", mode),))


MAXIMIZE, MINIMIZE = single("maximize"), single("minimize")


def violated(objectives: Objectives, text: str) -> list[str]:
    """The constraints that a reported result violates, such as "size_mb ≤ 50"."""
    outcome = objectives.outcome(text) if objectives.constraints else None
    if outcome is None:
        return []
    judged = zip(objectives.constraints, outcome.violations, strict=True)
    return [str(each) for each, violation in judged if violation > 0]
