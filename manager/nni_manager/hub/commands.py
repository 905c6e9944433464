"""Runs nnictl for the page of all experiments: its checks and its messages are those of the command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from nni_manager.errors import UserError

# A stop ends within a minute or two, whatever hangs.
_TIMEOUT_S = 180.0


async def run_nnictl(*arguments: str) -> str:
    """Run a command, and return its last message.

    Raises:
        CommandFailed: it failed; the message is its own.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nni_manager.cli", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "NNICTL_COMPAT"},
        start_new_session=True,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), _TIMEOUT_S)
    except (asyncio.TimeoutError, TimeoutError) as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise CommandFailed(
            f"cannot end `nnictl {' '.join(arguments)}` within {_TIMEOUT_S:.0f} s; run it in a terminal"
        ) from error
    if process.returncode != 0:
        lines = [
            line.removeprefix("ERROR: ") for line in errors.decode(errors="replace").splitlines() if line
        ]
        raise CommandFailed(
            "\n".join(lines) or f"cannot run `nnictl {' '.join(arguments)}`: exit code {process.returncode}"
        )
    lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith("INFO: ")]
    return lines[-1].removeprefix("INFO: ") if lines else ""


class CommandFailed(UserError):
    """cannot run the command; the message is its own"""
