"""The Pythons of this machine, as users' trials may have them: from PATH and pyenv."""

import shutil
import subprocess
from pathlib import Path

import pytest


def python_of(version):
    """The path of a Python such as 3.9, or None."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"), reverse=True)
    for path in (*map(str, pyenv), shutil.which(f"python{version}")):
        if path and not subprocess.run([path, "-c", "pass"], capture_output=True).returncode:
            return path
    return None


def each_of(pythons):
    """Parameters of a test: the paths by version. A version that this machine lacks is skipped."""
    return [
        pytest.param(
            path, id=version, marks=[pytest.mark.skipif(path is None, reason=f"no Python {version} here")]
        )
        for version, path in pythons.items()
    ]
