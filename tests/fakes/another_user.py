"""Keepers that run as another user of this machine, also from a checkout that only its owner can read."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from packaging.requirements import Requirement
from strangers import NOBODY

import nni_sdk
import trial_keeper

AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """Run the block as another user. Modules that are already imported stay usable. Skips the test unless it runs as root."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    os.setresuid(NOBODY, NOBODY, -1)  # the real uid changes too, because os.access checks it
    try:
        yield
    finally:
        os.setresuid(0, 0, -1)


def keepers_of_nobody(folder: Path) -> tuple[str, ...]:
    """The command prefix that starts a keeper as user nobody; skips the test if that is impossible.

    If nobody cannot read this checkout or its virtual environment, the keeper's package and its requirements are copied to
    `folder`.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv (Debian: util-linux)")
    if not _complaint(AS_NOBODY):
        return AS_NOBODY
    _copy_keeper(folder)
    # The other user imports the keeper from the copy in `folder`.
    prefix = ("env", f"PYTHONPATH={folder}", *AS_NOBODY)
    if complaint := _complaint(prefix):
        pytest.skip(f"needs a Python and a temporary directory that user {NOBODY} can read: {complaint}")
    return prefix


def _complaint(prefix: tuple[str, ...]) -> str:
    """The error that prevents the import of the keeper's package; empty if the import succeeds."""
    importing = [*prefix, sys.executable, "-c", "import trial_keeper.__main__, trial_keeper.host.host"]
    done = subprocess.run(importing, capture_output=True, text=True, cwd="/", timeout=DEADLINE_S)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def _copy_keeper(folder: Path) -> None:
    folder.chmod(0o755)
    for package in (trial_keeper, nni_sdk):
        source = Path(package.__path__[0])
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _required_by("trial-keeper"):
        for file in distribution(name).files or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), folder / file)
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))


def _required_by(name: str) -> set[str]:
    """The transitive requirements of a distribution, without extras."""
    found: set[str] = set()
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found |= {requirement.name} | _required_by(requirement.name)
    return found
