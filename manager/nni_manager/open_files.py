"""How many files and connections the manager may have open: as many as its user may. What it starts keeps the usual limit."""

import contextlib
import resource

_LIMIT = resource.RLIMIT_NOFILE
_given = resource.getrlimit(_LIMIT)


def raise_limit() -> None:
    """Take as many as the system gives. A usual limit of 1,024 would keep the thousandth keeper out."""
    _, hard = _given
    with contextlib.suppress(ValueError, OSError):  # some systems name a limit that they do not give
        resource.setrlimit(_LIMIT, (hard, hard))


def give_back(pid: int) -> None:
    """Let a process that was just started have the limit that this one was started with: programs with select() rely on it."""
    with contextlib.suppress(OSError):  # it has ended already
        resource.prlimit(pid, _LIMIT, _given)
