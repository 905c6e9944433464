"""The Pythons of this machine, as users' trials may have them: from PATH and pyenv."""

import functools
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@functools.cache
def python_of(version):
    """The path of the Python of a version such as 3.9; None if this machine has none."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"), reverse=True)
    if pyenv:
        return str(pyenv[0])
    path = shutil.which(f"python{version}")
    # The program in PATH may be a shim of pyenv, which exists even if pyenv does not have this version.
    return path if path and not subprocess.run([path, "-c", "pass"], capture_output=True).returncode else None


FRAMEWORKS_PYTHON = Path(sys.prefix, "frameworks/bin/python")
"""Made by `make frameworks`: PyTorch for CPUs, and the frameworks on it."""


def python_with(framework):
    """A Python that has this framework. Skips the test if neither the running Python nor that of `make frameworks` has it."""
    if importlib.util.find_spec(framework):
        return sys.executable
    if FRAMEWORKS_PYTHON.exists():
        code = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({framework!r}))"
        if subprocess.run([FRAMEWORKS_PYTHON, "-c", code]).returncode == 0:
            return FRAMEWORKS_PYTHON
    pytest.skip(f"{framework} is not installed; run make frameworks")


def each_of(pythons):
    """Parameters of a test: the paths by version. A version that this machine lacks is skipped."""
    return [
        pytest.param(
            path, id=version, marks=[pytest.mark.skipif(path is None, reason=f"no Python {version} here")]
        )
        for version, path in pythons.items()
    ]
