"""Brings a keeper to a machine that has none of this version: an archive of the bundle, sent once and unpacked there."""

from __future__ import annotations

import asyncio

import asyncssh

from nni_manager.errors import UserError
from nni_manager.support.keeper_bundle import KeeperBundle
from nni_manager.training_services.errors import ClusterUnavailable
from nni_manager.training_services.remote import render
from nni_manager.training_services.remote.section import RemoteMachine
from trial_keeper import __version__
from trial_keeper.wire.versions import installation_of

# A slow line needs a minute for the largest archive.
_TIMEOUT_S = 600.0


async def install(ssh: asyncssh.SSHClientConnection, machine: RemoteMachine, bundle: KeeperBundle) -> str:
    """Install the archive that fits the machine, unless it is there; returns the folder with its `trial-keeper`, below the home.

    Raises:
        UserError: the machine can run none, or has no room.
        ClusterUnavailable: the line or the machine is too slow.
        asyncssh.Error, OSError: the connection ends.
    """
    said = await _said(ssh, machine, render.bundle_probe(machine, bundle))
    # A login shell may print something first.
    name, _, is_there = said.strip().rpartition("\n")[2].partition(" ")
    if name not in bundle.digests:
        raise UserError(
            f"cannot run trials on {machine.address}: it has no trial-keeper {__version__} on PATH, and cannot run the keeper's "
            f"bundle, which needs {bundle.requirement}; run {installation_of(__version__)} there, or set pythonPath"
        )
    if is_there != "yes":
        archive = await asyncio.to_thread(bundle.archive(name).read_bytes)
        await _said(ssh, machine, render.bundle_installation(machine, bundle, name), archive)
    return render.bundle_folder(bundle.digests[name])


async def _said(
    ssh: asyncssh.SSHClientConnection, machine: RemoteMachine, command: str, body: bytes = b""
) -> str:
    try:
        done = await asyncio.wait_for(ssh.run(command, input=body, encoding=None, check=False), _TIMEOUT_S)
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise ClusterUnavailable(
            f"cannot install the keeper's bundle on {machine.address} within {_TIMEOUT_S:.0f} s; check the network and its disk"
        ) from error
    said, problem = _text(done.stdout), _text(done.stderr)
    if done.returncode:
        raise UserError(
            f"cannot install the keeper's bundle on {machine.address}: {problem.strip() or f'exit code {done.returncode}'}; free "
            f"disk space there, or run {installation_of(__version__)} there"
        )
    return said


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
