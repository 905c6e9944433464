"""Reading and writing small files, and what the kernel shows as such, in a third of the time that `open` takes: keeper and
manager do it often for each trial, and each word with the kernel is a moment in which other threads take their turn.
"""

import os
from pathlib import Path

_READ_BYTES = 16 * 1024


def read_all(path: str | Path) -> bytes:
    """The whole content.

    Raises:
        OSError: it cannot be read, as when the process that it speaks of is gone.
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
    """Write all of it, and close the descriptor in any case. `is_durable`: it is on the disk when this returns.

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
