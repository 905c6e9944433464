"""A real pseudo terminal with a shell: tests type commands and read the output."""

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

# These escape sequences move the cursor or set colours. `_read_until` removes them, so that patterns match plain text.
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")
# The shell controls the terminal, so that Ctrl-C reaches the foreground program and not the shell.
_SHELL = """\
import fcntl, os, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"])
"""
# The shell prints this prompt after each command. The number is the exit code of the command.
_PROMPT = re.compile(r"\[(\d+)\]ready> $")


class Terminal:
    """One shell. Every wait has a timeout."""

    def __init__(self, folder: Path, environ: Mapping[str, str], within_s: float = DEADLINE_S) -> None:
        self._within_s = within_s
        self._screen = ""
        self.told = ""
        """The complete output, for the message of a failed test."""
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        attributes = termios.tcgetattr(side)
        # Without this, the terminal would echo typed text, and the tests would read it as output.
        attributes[3] &= ~termios.ECHO
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
        """Type a command and wait for its end; return its exit code and output."""
        self.type(command)
        return self._until_prompt()

    def type(self, command: str) -> None:
        """Type a command without waiting."""
        os.write(self._main, f"{command}\n".encode())

    def press(self, key: bytes) -> tuple[int, str]:
        """Press a key that ends the running program. Return the program's exit code and its output after the key."""
        os.write(self._main, key)
        return self._until_prompt()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read until the output matches, and discard it up to the match."""
        found = self._read_until(re.compile(pattern))
        self._screen = self._screen[found.end() :]
        return found

    def close(self) -> None:
        """Close the terminal and kill the shell."""
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
            # A read may end in the middle of a character or of an escape sequence. This part stays in `raw` until the next read
            # completes it.
            whole = re.sub(rb"(\x1b(\[[0-9;?]*)?|[\xc0-\xff][\x80-\xbf]{0,2})$", b"", raw)
            raw, text = raw[len(whole) :], _CONTROLS.sub("", whole.decode(errors="replace"))
            self._screen += text
            self.told += text
        return found
