"""Reads and writes small files, also of /proc, in a third of the time that `open` takes.

Keeper and manager do it often for each trial, and each system call gives other threads a turn.
"""

import os
from pathlib import Path

_READ_BYTES = 16 * 1024


def read_all(path: str | Path) -> bytes:
    """Return the whole content.

    Raises:
        OSError: it cannot be read, for example because its process is gone.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = b""
        while piece := os.read(descriptor, _READ_BYTES):
            content += piece
        return content
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes, *, is_durable: bool = False) -> None:
    """Write the whole content, and close the descriptor in any case. With `is_durable` it is on disk when this returns.

    Raises:
        OSError: it cannot be written; a part of it may be there.
    """
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if is_durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
