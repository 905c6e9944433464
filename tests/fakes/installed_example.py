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
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "source"], check=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True)
    return str(site)
