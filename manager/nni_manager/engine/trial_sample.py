"""Chooses the trials that charts of a large experiment show: evenly, and always those that matter most."""

from collections.abc import Iterable, Sequence

from nni_manager.domain.trial import Trial

TOP = 100
"""The number of best trials that a sample always has."""


def even(count: int, most: int) -> list[int]:
    """At most `most` positions out of `count`, evenly chosen, with the first and the last one."""
    if count <= most:
        return list(range(count))
    if most < 2:
        return [count - 1][:most]
    return [(2 * place * (count - 1) + most - 1) // (2 * (most - 1)) for place in range(most)]


def improvements(trials: Iterable[Trial], *, maximize: bool) -> list[Trial]:
    """The trials with a result that is better than all before them."""
    better: list[Trial] = []
    best: float | None = None
    for trial in trials:
        value = trial.run.value
        if (
            value is not None
            and trial.run.is_feasible
            and (best is None or (value > best if maximize else value < best))
        ):
            better.append(trial)
            best = value
    return better


def sampled(
    trials: Sequence[Trial], most: int, *, maximize: bool, front: Sequence[Trial] = ()
) -> list[Trial]:
    """A sample of trials, in the order of their numbers; all of them if they are at most `most`.

    It has at most `most` evenly chosen ones, and besides the `TOP` best and the improvements, both by number and by time of the
    end. Of more than `most` improvements, it has the best one and evenly chosen others. Trials that violate a constraint are
    neither.
    Of `front`, the Pareto front, it has those that are among `trials`, at most `most`. `trials`: in the order of their numbers.
    """
    if len(trials) <= most:
        return list(trials)
    results = [trial for trial in trials if trial.run.value is not None]
    by_end = sorted((trial for trial in results if trial.run.ended_at_s is not None), key=_end)
    best = sorted(
        (each for each in results if each.run.is_feasible),
        key=lambda trial: trial.run.value or 0.0,
        reverse=maximize,
    )[:TOP]
    chosen = {trials[place].trial_id for place in even(len(trials), most)}
    for steps in (improvements(results, maximize=maximize), improvements(by_end, maximize=maximize)):
        chosen.update(steps[place].trial_id for place in even(len(steps), most))
    chosen.update(trial.trial_id for trial in best)
    chosen.update(front[place].trial_id for place in even(len(front), most))
    return [trial for trial in trials if trial.trial_id in chosen]


def _end(trial: Trial) -> float:
    return trial.run.ended_at_s or 0.0
