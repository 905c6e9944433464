"""The manager's limit of open files and connections: its user's hard limit. Child processes keep the usual limit."""

import contextlib
import resource

_LIMIT = resource.RLIMIT_NOFILE
_given = resource.getrlimit(_LIMIT)


def raise_limit() -> None:
    """Raise the limit to the hard limit. The usual limit is 1,024, about as many keepers."""
    _, hard = _given
    with contextlib.suppress(ValueError, OSError):  # some systems report a hard limit that they refuse
        resource.setrlimit(_LIMIT, (hard, hard))


def restore_limit(pid: int) -> None:
    """Restore the original limit in a process that was just started: select() fails on descriptors above 1,023."""
    with contextlib.suppress(OSError):  # the process has ended already
        resource.prlimit(pid, _LIMIT, _given)
