"""The prerequisites of a task role in order: those it names, each after those that it requires.

OpenPAI documents `require` ("will be parsed by backend automatically") but never reads the key; this module does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter


def in_order(names: Sequence[str], requires: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns `names` and all they require, each once and after its requirements. Ties keep the order of the lists.

    `requires` has no cycle.
    """
    done: dict[str, None] = {}
    todo = list(reversed(names))
    while todo:
        name = todo[-1]
        missing = [each for each in requires.get(name, ()) if each not in done]
        if missing:
            todo += reversed(missing)
        else:
            done[todo.pop()] = None
    return tuple(done)


def cycle_in(requires: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a cycle of names, each of which requires the next, from the first that `requires` lists; empty if there is none."""
    try:
        TopologicalSorter(requires).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1][:0:-1]
        first = next(cycle.index(name) for name in requires if name in cycle)
        return cycle[first:] + cycle[:first]
    return []
