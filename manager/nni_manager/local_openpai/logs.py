"""The logs of a container under the names of OpenPAI's API: `stdout`, `stdout.1`, `runtime.log`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nni_manager.local_openpai.container_logs import CURRENT, LOG_FOLDERS, old_logs
from nni_manager.local_openpai.errors import ApiError
from trial_keeper.frozen_dataclass import dataclass

# The size that OpenPAI's log service returns in tail mode.
TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Bytes of a log, starting at `offset`. `size_bytes` is the size of the whole log."""

    data: bytes
    offset: int
    size_bytes: int


def _files(logs: Path) -> Iterator[tuple[str, Path]]:
    for name, folder in LOG_FOLDERS.items():
        for number, path in enumerate((logs / folder / CURRENT, *old_logs(logs / folder))):
            yield (f"{name}.{number}" if number else name), path


def log_sizes(logs: Path) -> dict[str, int]:
    """The sizes in bytes of the logs that exist, by name; rotated files are `stdout.1` (the newest), `stdout.2`.

    Raises:
        ApiError: NoTaskLogError, the task has no logs.
    """
    found = {}
    for name, path in _files(logs):
        try:
            found[name] = path.stat().st_size
        except FileNotFoundError:
            continue  # rotated away meanwhile
    if not found:
        raise ApiError(
            "NoTaskLogError", "cannot find logs of this task: the task has not started; try again later"
        )
    return found


def read_log(logs: Path, name: str, offset: int | None = None, max_bytes: int = TAIL_BYTES) -> LogPiece:
    """At most `max_bytes` bytes, starting at `offset`; without an offset, the end of the log.

    Only names that `log_sizes` returns are accepted, so a caller cannot read outside the task's folder.

    Raises:
        ApiError: NoTaskLogError, no log of that name.
    """
    path = dict(_files(logs)).get(name, logs / "of no name")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - max_bytes) if offset is None else max(0, offset)
            file.seek(start)
            return LogPiece(file.read(max_bytes), start, size)
    except FileNotFoundError:
        known = ", ".join(name for name, path in _files(logs) if path.exists()) or "none"
        message = f"cannot find the log {name!r}; the logs of this task are: {known}"
        raise ApiError("NoTaskLogError", message) from None
