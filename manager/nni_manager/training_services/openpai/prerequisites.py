"""The prerequisites of a task role in order: those it names, each after those that it requires.

OpenPAI documents `require` ("will be parsed by backend automatically") but never reads the key; this module does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
    """Returns the first cycle of names that require each other; empty if there is none."""
    fine: set[str] = set()
    for start in requires:
        way: list[str] = []
        todo = [(start, 0)]  # a name and its number of predecessors on the path
        while todo:
            name, depth = todo.pop()
            fine.update(way[depth:])  # everything reachable from these is checked
            del way[depth:]
            if name in way:
                return way[way.index(name) :]
            if name not in fine:
                way.append(name)
                todo += [(each, len(way)) for each in reversed(requires.get(name, ()))]
        fine.update(way)
    return []
