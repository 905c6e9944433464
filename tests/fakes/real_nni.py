"""The real package `nni` in a separate virtual environment. Only the dependencies that trials and clients import are installed
with it.
"""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_OF_BOTH = (
    "astor", "certifi", "charset-normalizer", "cloudpickle", "colorama", "filelock<3.12", "idna", "json-tricks", "numpy",
    "packaging", "prettytable", "psutil", "pyyaml", "requests", "schema", "typing-extensions", "urllib3", "wcwidth",
    "websockets",
)  # fmt: skip
_REQUIREMENTS = {
    "2.10.1": ("typeguard<3",),
    # NNI's nnictl imports pkg_resources, which later versions of setuptools lack.
    "3.0": ("typeguard>=3,<4.1.3", "scipy", "importlib-metadata", "zipp", "setuptools<81"),
}


def python_with_nni(version: str, python: str = sys.executable) -> Path:
    """The Python of the environment, which is created once per virtual environment of the tests.

    `python`: the interpreter to use. Skips the test if nni cannot be installed.
    """
    folder = Path(sys.prefix) / "peers" / f"nni-{version}"
    installed = folder / "bin" / "python"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        packages = [f"nni=={version}", *_OF_BOTH, *_REQUIREMENTS[version]]
        complete = folder / "complete"
        if not complete.exists() or complete.read_text() != " ".join(packages):
            shutil.rmtree(folder, ignore_errors=True)
            _run([python, "-m", "venv", folder], "make an environment for")
            # The environment's own pip is used: the pip of the running Python may be too new for the environment's Python.
            # Modules are not compiled, because compiling unused modules takes long.
            pip = [installed, "-m", "pip"]
            _run([*pip, "install", "--quiet", "--no-compile", "--no-deps", *packages], "install")
            _run([installed, "-c", "import nni, nni.experiment"], "import")
            complete.write_text(" ".join(packages))
    return installed


def _run(command: list[object], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot {what} nni here: {done.stderr.strip().splitlines()[-1:]}")
