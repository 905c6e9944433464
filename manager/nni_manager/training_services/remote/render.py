"""The commands that run on a machine, and the names of things there. Pure functions."""

from __future__ import annotations

import hashlib
import shlex

from nni_manager.support.keeper_bundle import DIGEST_CHARACTERS, KeeperBundle, digest_program
from nni_manager.training_services.remote.section import RemoteMachine
from nni_manager.training_services.run_script import choice_snippet

NO_KEEPER = 127
"""The exit code of `server_command` if the machine has no trial-keeper. Source: bash(1), command not found."""


def key_of(machine: RemoteMachine) -> str:
    """The name of a machine's folder in its home, which several machines may share."""
    return hashlib.sha256(machine.address.encode()).hexdigest()[:8]


def path_prefix(machine: RemoteMachine) -> str:
    """The start of a shell command that puts the folder `pythonPath` first on PATH."""
    return "" if machine.python_path is None else f'export PATH={_expanded(machine.python_path)}:"$PATH"; '


def server_command(machine: RemoteMachine, folder: str = "") -> str:
    """The command that serves the manager on the machine. Any login shell can run it.

    `folder`: that of an unpacked bundle, whose keeper precedes any other.
    """
    first = folder and f'export PATH={folder}:"$PATH"; '
    return _in_bash(
        f"{path_prefix(machine)}{first}command -v trial-keeper > /dev/null || exit {NO_KEEPER}; exec trial-keeper serve-machine"
    )


def folder_of(machine: RemoteMachine, experiment_id: str) -> str:
    """The experiment's folder on the machine, for people."""
    return f"~/.cache/trial-keeper/{key_of(machine)}/{experiment_id}"


_BUNDLES = '"$HOME"/.cache/trial-keeper/bundle'


def bundle_folder(digest: str) -> str:
    """The folder with the `trial-keeper` of an unpacked archive, for bash on the machine."""
    return f"{_BUNDLES}/{digest[:DIGEST_CHARACTERS]}"


def bundle_probe(machine: RemoteMachine, bundle: KeeperBundle) -> str:
    """The command that prints the name of the archive that fits the machine, then `yes` if it is unpacked there, else `no`.

    It prints nothing if none fits.
    """
    return _in_bash(f"""{path_prefix(machine)}
{choice_snippet(bundle)}
choose_archive || exit 0
digest=$(digest_of "$name")
if [ -x {_BUNDLES}/"${{digest:0:{DIGEST_CHARACTERS}}}"/trial-keeper ]; then echo "$name" yes; else echo "$name" no; fi""")


def bundle_installation(machine: RemoteMachine, bundle: KeeperBundle, name: str) -> str:
    """The command that reads the archive from stdin, and unpacks it unless its digest is another."""
    digest = bundle.digests[name]
    return _in_bash(f"""{path_prefix(machine)}
set -e
umask 077
{choice_snippet(bundle)}
choose_archive
target={bundle_folder(digest)}
mkdir -p {_BUNDLES}
new=$(mktemp -d {_BUNDLES}/new.XXXXXXXX)
trap 'rm -rf "$new"' EXIT
cat > "$new/archive"
if [ "$({digest_program(name)} "$new/archive" | cut -d ' ' -f 1)" != {digest} ]; then
  echo 'the archive was damaged on the way' >&2
  exit 1
fi
mkdir "$new/keeper"
if [ -n "$python" ]; then
  "$python" -I -S -m tarfile -e "$new/archive" "$new/keeper" > /dev/null
  "$python" -I -S "$new/keeper" --version > /dev/null
  # By its name: machines with one home may have this Python at different paths, and pythonPath may change.
  printf '#!/bin/bash\nexec %q -I -S %q "$@"\n' "$python" "$target/keeper" > "$new/trial-keeper"
else
  tar -xf "$new/archive" -C "$new/keeper"
  "$new/keeper/trial-keeper" --probe > /dev/null
  printf '#!/bin/bash\nexec %q "$@"\n' "$target/keeper/trial-keeper" > "$new/trial-keeper"
fi
rm "$new/archive"
chmod 755 "$new" "$new/trial-keeper"
mv -T "$new" "$target" 2> /dev/null || [ -x "$target/trial-keeper" ]""")


def _in_bash(command: str) -> str:
    return f"exec bash -c {shlex.quote(command)}"


def _expanded(path: str) -> str:
    """The quoted path, with the home in place of a leading ~."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
