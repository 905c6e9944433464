"""Builds the bundle: a package for the Python of nnictl that brings the keeper into images that have none.

    python images/keeper_bundle.py [--output build] [--machine x86_64 aarch64] [--no-frozen]

The package has one archive for each CPython from 3.10 on: the keeper, and the manylinux wheels of its libraries. Another archive
has a keeper with its own interpreter, for images without such a Python. It needs a glibc at least as new as this machine's, and
is built only for this machine's architecture. Versions and digests of the libraries are those of images/requirements.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
REQUIREMENTS = REPOSITORY / "images" / "requirements" / "keeper.txt"
MINOR_VERSIONS = range(10, 15)
# The tags of wheels for glibc 2.17 and later, and for 2.28, the oldest that Python 3.14's wheels may need.
_TAGS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
_FREEZER = "pyinstaller==6.22.3"
_PACKAGE = "trial_keeper_bundle"
_SOURCES = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "nni_sdk",
    "trial_keeper",
    "manager",
    "docs",
)
# The SDK stays out: the manager writes nni_sdk into the workspace.
_NOT_FOR_KEEPERS = ("nni_sdk", "nni", "pip")
# What serves a manager on a machine that is reached over SSH; the rest of nnictl stays out.
_SERVER = "nni_manager.training_services.remote.machine_server"
_OF_SERVER = (
    *("__init__.py", "support/__init__.py", "support/leftovers.py"),
    *("training_services/__init__.py", "training_services/remote/__init__.py"),
    *(
        f"training_services/remote/{name}.py"
        for name in ("frames", "gpu_query", "machine_jobs", "machine_server")
    ),
)
# Python cannot import extension modules from a zip file; they lie beside it under their full names.
_MAIN = """\
import shutil
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

HERE = Path(__file__).parent


class ExtensionFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        file = HERE / "extensions" / f"{name}.so"
        if not file.is_file():
            return None
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))


sys.meta_path.insert(0, ExtensionFinder)
sys.path.insert(1, str(HERE / "libraries.zip"))

from trial_keeper.__main__ import main

try:
    code = main()
finally:
    # Only what run.sh has unpacked for this process. Its folder may outlive the container.
    if HERE.name.startswith("trial-keeper."):
        shutil.rmtree(HERE, ignore_errors=True)
raise SystemExit(code)
"""
# PyInstaller's launcher sets these for itself; the trial must have the container's own. run.sh probes whether the C library can
# run this keeper.
_FROZEN_MAIN = """\
import os
import shutil
import sys

if sys.argv[1:] == ["--probe"]:
    raise SystemExit

for name in [name for name in os.environ if name.startswith("_PYI_")]:
    del os.environ[name]
library_path = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
os.environ.pop("LD_LIBRARY_PATH", None)
if library_path is not None:
    os.environ["LD_LIBRARY_PATH"] = library_path

from trial_keeper.__main__ import main

try:
    code = main()
finally:
    folder = os.path.dirname(sys.executable)
    if os.path.basename(folder).startswith("trial-keeper."):
        shutil.rmtree(folder, ignore_errors=True)
raise SystemExit(code)
"""
_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "trial-keeper-bundle"
version = "{version}"
description = "The keeper of trial-keeper {version} for images that have none; install it in the Python of nnictl"
license = "MIT"
requires-python = ">=3.10"

[tool.setuptools]
packages = ["{package}"]
package-data = {{ {package} = ["*.json", "*.tar", "*.tar.gz"] }}
"""


def main() -> None:
    """Build the package, and print its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build", help="the folder of the wheel")
    parser.add_argument(
        "--machine",
        nargs="+",
        default=[platform.machine()],
        help="x86_64 and aarch64: those of the containers",
    )
    parser.add_argument("--no-frozen", action="store_true", help="only the archives for images with Python")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(_build(Path(scratch), options.output, options.machine, has_frozen=not options.no_frozen))


def _build(scratch: Path, output: Path, machines: list[str], *, has_frozen: bool) -> Path:
    keeper = _own_wheel(scratch)
    version = keeper.name.split("-")[1]
    package = scratch / "bundle" / _PACKAGE
    package.mkdir(parents=True)
    digests = {}
    for machine, minor in itertools.product(machines, MINOR_VERSIONS):
        name = f"cp3{minor}-{machine}"
        print(f"{name}", file=sys.stderr)
        folder = _for_cpython(scratch / name, minor, machine, keeper)
        content = gzip.compress(_packed(folder), mtime=0)
        (package / f"{name}.tar.gz").write_bytes(content)
        digests[name] = hashlib.sha256(content).hexdigest()
    machine = platform.machine()
    for other in sorted({*machines} - {machine}) if has_frozen else ():
        print(f"no keeper for {other} images without Python: that needs a build on {other}", file=sys.stderr)
    if has_frozen and machine in machines:
        print(f"frozen-{machine}", file=sys.stderr)
        content = _packed(_frozen(scratch, keeper))
        (package / f"frozen-{machine}.tar").write_bytes(content)
        digests[f"frozen-{machine}"] = hashlib.blake2b(content).hexdigest()
    (package / "__init__.py").write_text('"""The archives of the keeper, and their digests."""\n')
    (package / "bundle.json").write_text(
        json.dumps({"version": version, "digests": digests, "glibc": platform.libc_ver()[1]}, indent=1)
    )
    (package.parent / "pyproject.toml").write_text(_PYPROJECT.format(version=version, package=_PACKAGE))
    output.mkdir(parents=True, exist_ok=True)
    for older in output.glob(f"{_PACKAGE}-*.whl"):
        older.unlink()
    _pip("wheel", "--no-deps", "--wheel-dir", output, package.parent)
    return next(output.glob(f"{_PACKAGE}-*.whl"))


def _own_wheel(scratch: Path) -> Path:
    """The project's wheel. It is built in a copy: setuptools would create a build/ folder here, and reuse old files in it."""
    source = scratch / "source"
    source.mkdir()
    for name in _SOURCES:
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, source / name)
    _pip("wheel", "--no-deps", "--wheel-dir", scratch / "own", source)
    return next((scratch / "own").glob("*.whl"))


def _for_cpython(folder: Path, minor: int, machine: str, keeper: Path) -> Path:
    """A folder that an isolated CPython 3.`minor` can run."""
    wheels = folder.with_name(f"{folder.name}-wheels")
    _pip(
        *("download", "--no-deps", "--only-binary=:all:", "--implementation=cp", "--require-hashes"),
        *(f"--platform={tag}_{machine}" for tag in _TAGS),
        *(f"--python-version=3.{minor}", "--dest", wheels, "--requirement", REQUIREMENTS),
    )
    for wheel in (*sorted(wheels.glob("*.whl")), keeper):
        shutil.unpack_archive(wheel, folder, "zip")
    for name in _NOT_FOR_KEEPERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in (folder / "nni_manager").rglob("*"):
        if path.is_file() and path.relative_to(folder / "nni_manager").as_posix() not in _OF_SERVER:
            path.unlink()
    for path in folder.glob("*.dist-info"):
        shutil.rmtree(path)
    (folder / "extensions").mkdir()
    for path in [*folder.rglob("*.so")]:
        name = ".".join((*path.relative_to(folder).parent.parts, path.name.partition(".")[0]))
        path.rename(folder / "extensions" / f"{name}.so")
    python = _python_of(minor)
    if python is None:
        print(f"python3.{minor} is not here: its keeper compiles its modules at each start", file=sys.stderr)
    else:
        _compile(python, folder)
    _zip_libraries(folder)
    (folder / "__main__.py").write_text(_MAIN)
    # `test -x` of this file shows whether the file system allows programs, so also libraries.
    (folder / "trial-keeper").touch(0o755)
    return folder


def _compile(python: str, folder: Path) -> None:
    """Replace modules by compiled ones, which only an interpreter of the same version can make."""
    options = ("-b", "-qq", "--invalidation-mode", "unchecked-hash")
    subprocess.run([python, "-m", "compileall", *options, folder], check=True)
    # The interpreter of a warm start, of any version, runs these.
    kept = {f"warm_{name}.py" for name in ("main", "interpreter")}
    for path in folder.rglob("*.py"):
        if path.name not in kept:
            path.unlink()


def _zip_libraries(folder: Path) -> None:
    """Pack all but the keeper into one file: unpacking hundreds of files takes longer than the keeper's own start."""
    tops = [path for path in folder.iterdir() if path.name not in ("trial_keeper", "extensions")]
    with zipfile.ZipFile(folder / "libraries.zip", "w") as archive:
        for path in sorted(each for top in tops for each in (top, *top.rglob("*"))):
            # The same content gives the same bytes. Python finds a package without __init__ by the entry of its folder.
            name = f"{path.relative_to(folder)}{'/' if path.is_dir() else ''}"
            archive.writestr(zipfile.ZipInfo(name), b"" if path.is_dir() else path.read_bytes())
    for top in tops:
        if top.is_dir():
            shutil.rmtree(top)
        else:
            top.unlink()


def _python_of(minor: int) -> str | None:
    for name in (
        f"python3.{minor}",
        *(str(path) for path in _pyenv().glob(f"3.{minor}.*/bin/python3.{minor}")),
    ):
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


def _pyenv() -> Path:
    return Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"


def _frozen(scratch: Path, keeper: Path) -> Path:
    """A folder with a keeper and its interpreter."""
    environment, script = scratch / "environment", scratch / "trial-keeper.py"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    _pip("install", "--require-hashes", "--requirement", REQUIREMENTS, python=python)
    _pip("install", "--no-deps", keeper, python=python)
    _pip("install", _FREEZER, python=python)
    script.write_text(_FROZEN_MAIN)
    # The interpreter of a warm start runs one of the keeper's files with the image's Python.
    modules = ("--collect-all=trial_keeper", "--hidden-import=grpc", f"--hidden-import={_SERVER}")
    folders = ("--distpath", scratch / "dist", "--workpath", scratch / "work", "--specpath", scratch)
    command = (python, "-m", "PyInstaller", "--log-level=ERROR", "--onedir", "--name=trial-keeper")
    subprocess.run([*command, *modules, *folders, script], check=True)
    folder = scratch / "dist" / "trial-keeper"
    # An interpreter that was built here may contain 20 MB for debuggers.
    for library in (*folder.rglob("libpython*"), *folder.rglob("lib-dynload/*.so")):
        subprocess.run(["strip", "--strip-unneeded", library], check=True)
    return folder


def _packed(folder: Path) -> bytes:
    """An archive of a folder; the same content gives the same bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, path.relative_to(folder), recursive=False, filter=_without_origin)
    return content.getvalue()


def _without_origin(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member


def _pip(*arguments: object, python: str | Path = sys.executable) -> None:
    subprocess.run(
        [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)],
        check=True,
    )


if __name__ == "__main__":
    main()
