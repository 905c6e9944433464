"""The platform `nice` of examples/platform, as pip installs it."""

import atexit
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "platform"


@cache
def installed_example():
    """The folder with the installed package and its metadata, for sys.path. It is built once per test process."""
    folder = Path(tempfile.mkdtemp(prefix="platform-"))
    atexit.register(shutil.rmtree, folder)
    # A copy is built, because setuptools would create a folder build/ in the checkout.
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # Without build isolation, pip uses the setuptools of the tests' environment instead of installing it for the build.
    options = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "install", *options, "--target", site, folder / "source"], check=True)
    return str(site)
