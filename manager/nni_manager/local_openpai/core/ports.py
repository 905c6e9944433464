"""Port selection for a container: the first free port from OpenPAI's hashed port on.

Source: microsoft/pai v1.8.1 (src/rest-server) and microsoft/openpai-runtime v0.1.12. Both compute the hash; neither reserves
the ports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

# A range with this many consecutive ports in use counts as exhausted.
_MAX_TRIES = 1000


class PortsExhausted(Exception):
    """No free port near the hashed one."""


def hashed_port(container_id: str, label: str, index: int, first: int, end: int) -> int:
    """OpenPAI's port for a label and an index, from `first` up to but not including `end`."""
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
    """The chosen ports of each label, all different. `wanted` has the number for each label; `is_free` checks one port.

    Raises:
        PortsExhausted: too few ports are free.
    """
    taken: set[int] = set()

    def selected(label: str, index: int) -> int:
        start = hashed_port(container_id, label, index, first, end)
        for step in range(min(_MAX_TRIES, end - first)):
            port = (start - first + step) % (end - first) + first
            if port not in taken and is_free(port):
                taken.add(port)
                return port
        raise PortsExhausted(f"cannot find a free port near {start} for {label}")

    return {
        label: tuple(selected(label, index) for index in range(count))
        for label, count in wanted.items()
        if count > 0
    }
