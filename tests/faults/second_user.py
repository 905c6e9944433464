"""Programs of a second user on the machine of an experiment: they forge attempts, and flood the keepers' port. They need root."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from real_experiment import wait_until


@contextlib.contextmanager
def a_forger(workspace: Path, *options: str) -> Iterator[Callable[[], list[str]]]:
    """Run a process that forges attempts. Yield a function that returns its printed lines: the trials with forged attempts, or
    the refusal.
    """
    with _a_process("forger.py", str(workspace), *options) as printed:
        wait_until(printed, "the forger is ready")
        yield lambda: printed()[1:]


@contextlib.contextmanager
def an_attacker(workspace: Path, gates: Path) -> Iterator[Callable[[], list[str]]]:
    """Run a process that attacks the trials of a workspace, see storage_attacker.py. Yield a function that returns its printed
    lines.
    """
    with _a_process("storage_attacker.py", str(workspace), str(gates)) as printed:
        wait_until(printed, "the attacker is ready")
        yield lambda: printed()[1:]


@contextlib.contextmanager
def a_flood(port: int) -> Iterator[Callable[[], int]]:
    """Open many unauthenticated connections to this port and replace them repeatedly. Yield a function that returns the number of
    opened connections, in hundreds.
    """
    with _a_process("flooder.py", str(port)) as printed:
        yield lambda: int((printed() or ["0"])[-1])


@contextlib.contextmanager
def _a_process(script: str, *arguments: str) -> Iterator[Callable[[], list[str]]]:
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

        def printed() -> list[str]:
            text = Path(output.name).read_text()
            assert process.poll() is None, f"{script} has ended with {process.returncode}:\n{text}"
            return text.splitlines()

        try:
            yield printed
            printed()
        finally:
            process.kill()
            process.wait()
