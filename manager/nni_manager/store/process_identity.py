"""Which process it was: its number alone may belong to somebody else by now."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# proc_pid_stat(5) counts from 1 and has the command's name second; these follow its closing parenthesis.
_STATE, _START_TICKS = 3 - 3, 22 - 3


@cache
def boot_id() -> str:
    """What tells this machine, from its start to its next one, from every other; empty where the kernel does not tell.

    Source: proc_sys_kernel(5), random/boot_id.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of this machine.

    `start_ticks` counts from the start of the machine. A time of day would not do: it is derived from the wall clock, so that
    the same process has another one after somebody has set the clock.
    """

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """That of the process which has this number now; None when there is none, or only a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[_STATE] in "ZX" else cls(pid, int(fields[_START_TICKS]), boot_id())

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ProcessIdentity:
        """As it was noted, by `dataclasses.asdict`.

        Raises:
            KeyError: it was not.
        """
        return cls(document["pid"], document["start_ticks"], document["boot_id"])

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return ProcessIdentity.of(self.pid) == self


def terminate(descriptor: int, within_s: float) -> bool:
    """Ask a process to end, and close this descriptor of it; whether it has ended by then."""
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        ended, _, _ = select.select([descriptor], [], [], within_s)
        return bool(ended)
    finally:
        os.close(descriptor)
