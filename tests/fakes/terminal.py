"""A person at a terminal: a real pseudo terminal with a shell in it, which is typed at and read."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from deadlines import DEADLINE_S

# What moves a cursor or colours a letter is no text.
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")
# The shell gets the terminal as its own, so that Ctrl-C reaches what runs in it and not the shell.
_SHELL = """\
import fcntl, os, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"])
"""
# Each prompt tells how the command before it ended.
_PROMPT = re.compile(r"\[(\d+)\]ready> $")


class Terminal:
    """One shell. Everything that is waited for is waited for with an end."""

    def __init__(self, folder: Path, environ: Mapping[str, str], within_s: float = DEADLINE_S) -> None:
        self._within_s = within_s
        self._screen = ""
        self.told = ""
        """All that was ever shown, for whoever looks into a test that failed."""
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        attributes = termios.tcgetattr(side)
        attributes[3] &= ~termios.ECHO  # what is typed is not read as what was answered
        termios.tcsetattr(side, termios.TCSANOW, attributes)
        outside = {name: value for name, value in environ.items() if name not in ("COLUMNS", "LINES")}
        self._shell = subprocess.Popen(
            [sys.executable, "-c", _SHELL],
            cwd=folder,
            env=outside | {"PS1": "[$?]ready> ", "TERM": "xterm-256color", "HISTFILE": ""},
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
        )
        os.close(side)
        self._until_prompt()

    def run(self, command: str) -> tuple[int, str]:
        """Type a command and wait for its end; its exit code and what it said."""
        self.type(command)
        return self._until_prompt()

    def type(self, command: str) -> None:
        """Type a command, and do not wait."""
        os.write(self._main, f"{command}\n".encode())

    def press(self, key: bytes) -> tuple[int, str]:
        """Press a key that ends what runs; its exit code and what it said since."""
        os.write(self._main, key)
        return self._until_prompt()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read until this is shown; what is before it is done with."""
        found = self._read_until(re.compile(pattern))
        self._screen = self._screen[found.end() :]
        return found

    def close(self) -> None:
        """Hang up."""
        os.close(self._main)
        self._shell.send_signal(signal.SIGKILL)
        self._shell.wait()

    def _until_prompt(self) -> tuple[int, str]:
        found = self._read_until(_PROMPT)
        said, self._screen = self._screen[: found.start()], ""
        return int(found[1]), said

    def _read_until(self, pattern: re.Pattern[str]) -> re.Match[str]:
        deadline_s = time.monotonic() + self._within_s
        raw = b""
        while (found := pattern.search(self._screen)) is None:
            ready, _, _ = select.select([self._main], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"after {self._within_s:g} s still not: {pattern.pattern}\n{self.told}"
            raw += os.read(self._main, 65536)
            # A letter, or an escape sequence, may come in two pieces.
            whole = re.sub(rb"(\x1b(\[[0-9;?]*)?|[\xc0-\xff][\x80-\xbf]{0,2})$", b"", raw)
            raw, text = raw[len(whole) :], _CONTROLS.sub("", whole.decode(errors="replace"))
            self._screen += text
            self.told += text
        return found
