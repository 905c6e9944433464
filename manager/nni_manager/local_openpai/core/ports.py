"""Which ports a container gets: OpenPAI's hash says where to look first, and the next that is free is taken.

Source: microsoft/pai v1.8.1 (src/rest-server) and microsoft/openpai-runtime v0.1.12, which both compute the hash and
reserve nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

# A range this full is of no use to the job either.
_MOST_TRIES = 1000


class PortsExhausted(Exception):
    """No free port near where the hash points."""


def hashed_port(container_id: str, label: str, index: int, first: int, end: int) -> int:
    """The port of that label and index in OpenPAI, from `first` up to but not including `end`."""
    digest = hashlib.md5(f"[{container_id}][{label}][{index}]".encode(), usedforsecurity=False).hexdigest()
    total = int(digest[:12], 16) + int(digest[12:24], 16) + int(digest[24:], 16)
    return total % (end - first) + first


def chosen_ports(
    container_id: str,
    wanted: Mapping[str, int],
    first: int,
    end: int,
    is_free: Callable[[int], bool],
) -> dict[str, tuple[int, ...]]:
    """So many ports for each label, all different. `is_free` says whether one may be taken.

    Raises:
        PortsExhausted: there are too few.
    """
    taken: set[int] = set()

    def one(label: str, index: int) -> int:
        start = hashed_port(container_id, label, index, first, end)
        for step in range(min(_MOST_TRIES, end - first)):
            port = (start - first + step) % (end - first) + first
            if port not in taken and is_free(port):
                taken.add(port)
                return port
        raise PortsExhausted(f"no free port near {start} for {label}")

    return {
        label: tuple(one(label, index) for index in range(count))
        for label, count in wanted.items()
        if count > 0
    }
