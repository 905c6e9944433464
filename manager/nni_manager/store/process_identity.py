"""Identity of a process: a pid alone may have been reused."""

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
    """An id of this machine's current boot, different from every other machine's; empty if the kernel provides none.

    Source: proc_sys_kernel(5), random/boot_id.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of this machine.

    `start_ticks` counts from the boot. A time of day is unsuitable: it depends on the wall clock, so the same process would have
    another one after the clock is set.
    """

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The identity of the process that has this pid now; None if there is none, or only a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[_STATE] in "ZX" else cls(pid, int(fields[_START_TICKS]), boot_id())

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ProcessIdentity:
        """Read an identity that `dataclasses.asdict` has written.

        Raises:
            KeyError: a field is missing.
        """
        return cls(document["pid"], document["start_ticks"], document["boot_id"])

    @property
    def is_alive(self) -> bool:
        """True if the process runs."""
        return ProcessIdentity.of(self.pid) == self


def terminate(descriptor: int, within_s: float) -> bool:
    """Send SIGTERM, and SIGCONT for a stopped process, to a pidfd and close it. True if the process ended within `within_s`."""
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        ended, _, _ = select.select([descriptor], [], [], within_s)
        return bool(ended)
    finally:
        os.close(descriptor)
