"""Builds that `images/build.sh` must refuse. A script replaces podman, and reports the ABI of the base image's Python."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import scaled_s

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("nni_sdk", "trial_keeper", "manager", "docs", "images")
# This fake podman supports only `podman run`, with which the build reads the ABI of the base image's Python. Any other podman
# command fails, because the build must refuse its input before it runs another command.
PODMAN = f"""#!/bin/sh
[ "$1" = run ] || {{ echo "podman $*"; exit 9; }}
exec {sys.executable} -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))'
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the files that the build reads, with the script that replaces podman."""
    for folder in SOURCES:
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    podman = tmp_path / "bin" / "podman"
    podman.parent.mkdir()
    podman.write_text(PODMAN)
    podman.chmod(0o755)
    return tmp_path


def build(checkout, *arguments, **environ):
    paths = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [checkout / "images" / "build.sh", *arguments],
        env={**os.environ, "PATH": paths, "PYTHON": sys.executable, **environ},
        capture_output=True,
        text=True,
        timeout=scaled_s(300),
    )


def test_an_image_build_refuses_a_package_with_a_wrong_digest(checkout):
    requirements = checkout / "images" / "requirements" / "keeper.txt"
    text = requirements.read_text()
    start = text.index("packaging==")
    changed = re.sub(r"sha256:[0-9a-f]{8}", "sha256:00000000", text[start : text.index("# via", start)])
    requirements.write_text(text[:start] + changed + text[text.index("# via", start) :])
    result = build(checkout, "keeper", "keeper:test")
    assert (result.returncode, result.stdout) == (1, "")
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in result.stderr
    assert "packaging" in result.stderr


def test_an_image_build_refuses_an_unknown_extra_and_lists_the_known_extras(checkout):
    result = build(checkout, "manager", "manager:test", EXTRAS="tuners,tunres")
    assert (result.returncode, result.stderr) == (
        1,
        "cannot build with EXTRAS=tuners,tunres: there is no extra 'tunres' for an image; "
        "use azure, gp, gpu, tuners\n",
    )
