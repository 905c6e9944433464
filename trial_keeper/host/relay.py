"""The trial's output once more, on the keeper's own stdout and stderr, where clusters look for it."""

import os
import threading
from pathlib import Path

_COPY_BYTES = 64 * 1024
_LOOK_AGAIN_S = 0.1
# A log collector that does not read must not keep the job from ending.
_LONGEST_DRAIN_S = 5.0


class Relay:
    """A thread that copies files to descriptors while they grow. A full pipe stops the relay and nothing else."""

    def __init__(self, copies: list[tuple[Path, int]]) -> None:
        """`copies`: which file goes to which descriptor. The files exist."""
        self._copies = [
            (os.open(path, os.O_RDONLY | os.O_CLOEXEC), descriptor) for path, descriptor in copies
        ]
        self._no_more_comes = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Copy the rest and end; waits for a slow reader no longer than a few seconds."""
        self._no_more_comes.set()
        self._thread.join(_LONGEST_DRAIN_S)

    def _run(self) -> None:
        try:
            while True:
                is_last_round = self._no_more_comes.wait(_LOOK_AGAIN_S)
                for source, target in self._copies:
                    while data := os.read(source, _COPY_BYTES):
                        _write_all(target, data)
                if is_last_round:
                    return
        except BrokenPipeError:
            return  # nobody reads the keeper's output; the files have it all the same


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
