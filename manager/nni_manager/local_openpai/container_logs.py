"""The logs of a container: the pipes of its scripts, masked secrets, and files of bounded size.

The fork server imports this module, so it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import time
from collections.abc import Iterable
from pathlib import Path

LOG_FOLDERS = {"stdout": "user-stdout", "stderr": "user-stderr", "all": "user-all", "runtime.log": "runtime"}
CURRENT = "current"
MASK = b"******"

_READ_BYTES = 65536
_DRAIN_S = 5.0


class Redactor:
    """Masks secrets in a byte stream, including secrets split across chunks."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        self._secrets = sorted(set(secrets), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._secrets))) if self._secrets else None
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The masked output. A possible start of a secret at the end of the data is held back until more data arrives."""
        if self._pattern is None:
            return data
        data = self._held + data
        end = len(data) - self._beginning_at_end(data)
        shown, position = [], 0
        for match in self._pattern.finditer(data):
            if match.start() >= end:
                break
            shown += [data[position : match.start()], MASK]
            position = match.end()
            end = max(end, position)
        shown.append(data[position:end])
        self._held = data[end:]
        return b"".join(shown)

    def flush(self) -> bytes:
        """The data held back, at the end of the stream."""
        rest, self._held = self._held, b""
        return rest if self._pattern is None else self._pattern.sub(MASK, rest)

    def _beginning_at_end(self, data: bytes) -> int:
        lengths = (
            length
            for secret in self._secrets
            for length in range(1, min(len(secret) - 1, len(data)) + 1)
            if data.endswith(secret[:length])
        )
        return max(lengths, default=0)


class RotatedLog:
    """A log of bounded size: a folder with `current` and older files, each named after the time of its rotation."""

    def __init__(self, folder: Path, file_bytes: int, old_files: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file_bytes = file_bytes
        self._old_files = old_files
        self._open()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._folder / CURRENT, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Append data. On a full disk the data is dropped and the task continues."""
        view = memoryview(data)
        with contextlib.suppress(OSError):
            while view:
                if self._size >= self._file_bytes:
                    self._rotate()
                written = os.write(self._descriptor, view[: self._file_bytes - self._size])
                self._size += written
                view = view[written:]

    def _rotate(self) -> None:
        newest = next((int(log.stem[1:]) for log in old_logs(self._folder)), 0)
        with contextlib.suppress(FileNotFoundError):  # renamed before, but the next file could not be opened
            # Names stay in order even if the clock is set back.
            os.rename(self._folder / CURRENT, self._folder / f"@{max(time.time_ns(), newest + 1):020d}.s")
        full = self._descriptor
        self._open()
        os.close(full)
        for old in old_logs(self._folder)[self._old_files :]:
            old.unlink()


def old_logs(folder: Path) -> list[Path]:
    """The rotated files, the newest first."""
    return sorted(folder.glob("@*.s"), reverse=True)


class Streams:
    """The pipes that a container's scripts write to, and the logs that receive the data.

    `writers` are the write ends of the pipes `stdout`, `stderr` and `runtime`.
    """

    def __init__(self, logs: Path, secrets: list[bytes], file_bytes: int, old_files: int, waker: int) -> None:
        """`waker`: a descriptor; `pump` returns also when it is readable."""
        self._logs = {
            name: RotatedLog(logs / folder, file_bytes, old_files) for name, folder in LOG_FOLDERS.items()
        }
        self._selector = selectors.DefaultSelector()
        self._selector.register(waker, selectors.EVENT_READ, None)
        self.writers: dict[str, int] = {}
        self._secrets = secrets
        sinks_of = {"stdout": ("stdout", "all"), "stderr": ("stderr", "all"), "runtime": ("runtime.log",)}
        for name, sinks in sinks_of.items():
            reader, self.writers[name] = os.pipe()
            os.set_blocking(reader, False)
            self._selector.register(reader, selectors.EVENT_READ, (Redactor(secrets), sinks))

    def log(self, text: str) -> None:
        """Write a line of the supervisor to runtime.log."""
        redactor = Redactor(self._secrets)
        line = f"[{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}] {text}\n".encode()
        self._logs["runtime.log"].write(redactor.feed(line) + redactor.flush())

    def pump(self, timeout_s: float) -> bool:
        """Write available output to the logs, waiting at most `timeout_s`; True while scripts may write more."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, _READ_BYTES)
                continue
            redactor, sinks = key.data
            try:
                data = os.read(key.fd, _READ_BYTES)
            except BlockingIOError:
                continue
            shown = redactor.feed(data) if data else redactor.flush()
            for sink in sinks if shown else ():
                self._logs[sink].write(shown)
            if not data:
                self._selector.unregister(key.fd)
        return any(key.data is not None for key in self._selector.get_map().values())

    def drain(self) -> None:
        """Write output until the last writer closes its pipe, for at most `_DRAIN_S`."""
        for descriptor in self.writers.values():
            os.close(descriptor)
        deadline_s = time.monotonic() + _DRAIN_S
        while self.pump(0.1) and time.monotonic() < deadline_s:
            continue
