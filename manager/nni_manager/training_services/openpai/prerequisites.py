"""Which prerequisites a task role needs, in which order: those it names, each behind what it requires.

OpenPAI documents `require` ("will be parsed by backend automatically") and no part of it reads the key; here it counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def in_order(names: Sequence[str], requires: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """`names`, each once, with all they require before them. Where the order is free, it is that of the lists.

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
    """Names that require each other in a ring, from the first that is met; empty if there is no ring."""
    fine: set[str] = set()
    for start in requires:
        way: list[str] = []
        todo = [(start, 0)]  # a name and how many stand before it on the way
        while todo:
            name, depth = todo.pop()
            fine.update(way[depth:])  # all that these lead to has been seen
            del way[depth:]
            if name in way:
                return way[way.index(name) :]
            if name not in fine:
                way.append(name)
                todo += [(each, len(way)) for each in reversed(requires.get(name, ()))]
        fine.update(way)
    return []
