"""The package as pip installs it, and unchanged scripts for NNI that run in a Python with this package."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from email import message_from_string
from hashlib import sha256
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from real_experiment import free_port_pair

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "nni_sdk", "trial_keeper", "manager", "docs")
# This code is that of NNI's quickstart notebook, except that it trains another model.
QUICKSTART = """
import sys
from nni.experiment import Experiment

experiment = Experiment('local')
experiment.config.trial_command = f'{sys.executable} model.py'
experiment.config.trial_code_directory = '.'
experiment.config.search_space = {
    'features': {'_type': 'choice', '_value': [128, 256, 512, 1024]},
    'lr': {'_type': 'loguniform', '_value': [0.0001, 0.1]},
    'momentum': {'_type': 'uniform', '_value': [0, 1]},
}
experiment.config.tuner.name = 'TPE'
experiment.config.tuner.class_args['optimize_mode'] = 'maximize'
experiment.config.max_trial_number = 3
experiment.config.trial_concurrency = 2
experiment.run(int(sys.argv[1]))
print(len(experiment.export_data()), "results")
experiment.stop()
"""
MODEL = """
import nni
params = {'features': 512, 'lr': 0.001, 'momentum': 0}
params.update(nni.get_next_parameter())
for epoch in range(3):
    nni.report_intermediate_result(params['lr'] * epoch)
nni.report_final_result(params['lr'])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with the wheel of this checkout. It uses the dependencies of the Python that runs the tests."""
    folder = tmp_path_factory.mktemp("installed")
    # The build uses a copy of the sources. In the checkout, setuptools would create the folder build/, and a later build would
    # reuse its old files.
    source = folder / "source"
    for name in SOURCES:
        path = REPOSITORY / name
        copied = source / name
        copied.parent.mkdir(exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copied, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, copied)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    run(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    site_packages(python).joinpath("dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def site_packages(python):
    (found,) = python.parents[1].glob("lib/python*/site-packages")
    return found


def run(*command, **options):
    """The output of a command."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("NNI_", "PYTHON"))}
    done = subprocess.run(
        list(map(str, command)),
        env=environ,
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        **options,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.smoke
def test_the_statement_import_nni_works_without_the_real_nni_package(python, tmp_path):
    code = "import nni, nni.experiment, nni_sdk; print(nni is nni_sdk, nni.experiment.Experiment.__module__)"
    assert run(python, "-c", code, cwd=tmp_path) == "True nni_manager.experiment.experiment\n"
    code = "import nni_sdk.integrations.reporter as module; print(module.__file__)"
    assert "site-packages" in run(python, "-c", code, cwd=tmp_path)


@pytest.mark.smoke
def test_the_quickstart_of_nni_runs_unchanged(python, tmp_path):
    (tmp_path / "main.py").write_text(QUICKSTART)
    (tmp_path / "model.py").write_text(MODEL)
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [python, "main.py", str(free_port_pair())],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=4 * DEADLINE_S,
    )  # fmt: skip
    assert (done.returncode, "3 results" in done.stdout) == (0, True), done.stdout + done.stderr


def test_an_installed_nni_package_takes_precedence_over_nni_sdk(python, tmp_path):
    package = site_packages(python) / "nni"
    package.mkdir()
    try:
        (package / "__init__.py").write_text("WHO = 'real'\n")
        assert run(python, "-c", "import nni; print(nni.WHO)", cwd=tmp_path) == "real\n"
    finally:
        shutil.rmtree(package)


def test_two_builds_of_the_same_source_give_the_same_wheel(python, tmp_path):
    """The modification times of files must not matter: they differ between a checkout and a copy."""
    folder = python.parents[2]
    (first,) = folder.glob("*.whl")
    again = tmp_path / "source"
    shutil.copytree(folder / "source", again, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    for path in again.rglob("*"):
        os.utime(path, (10**9, 10**9))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, again)
    assert sha256((tmp_path / first.name).read_bytes()).digest() == sha256(first.read_bytes()).digest()


@pytest.mark.smoke
def test_the_package_description_has_no_links_to_files_of_the_repository(python):
    (metadata,) = site_packages(python).glob("trial_keeper-*.dist-info/METADATA")
    found = message_from_string(metadata.read_text())
    assert found["Description-Content-Type"] == "text/markdown"
    text = found.get_payload()
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("http")] == []
    assert "`nnictl help recipes`" in text
    assert "Programming Language :: Python :: 3.12" in found.get_all("Classifier")


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="not a checkout: git names the files")
def test_the_source_distribution_is_complete(tmp_path):
    source = tmp_path / "source"
    tracked = run("git", "ls-files", "-z", cwd=REPOSITORY).split("\0")[:-1]
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    run(sys.executable, "-c", "from setuptools import build_meta as b; b.build_sdist('../made')", cwd=source)
    (made,) = (tmp_path / "made").glob("*.tar.gz")
    with tarfile.open(made) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    missing = set(tracked) - packed
    assert {
        name for name in missing if name not in (".gitignore", ".gitattributes", ".python-version")
    } == set()


@pytest.mark.smoke
def test_the_package_contains_every_module(python):
    installed = site_packages(python)
    for source in (REPOSITORY / "nni_sdk", REPOSITORY / "trial_keeper", REPOSITORY / "manager/nni_manager"):
        modules = {path.relative_to(source.parent) for path in source.rglob("*.py")}
        assert {path for path in modules if not (installed / path).exists()} == set()


@pytest.mark.smoke
def test_the_package_contains_the_documentation(python, tmp_path):
    pages = run(python.with_name("nnictl"), "help", cwd=tmp_path).splitlines()[3:]
    assert {line.split("\t")[0] for line in pages} == {
        page.stem for page in (REPOSITORY / "docs").glob("*.md") if page.stem != "internals"
    }
    shown = run(python.with_name("nnictl"), "help", "tuners", cwd=tmp_path)
    assert shown.strip() == (REPOSITORY / "docs/tuners.md").read_text().strip()


@pytest.mark.smoke
def test_nnictl_names_the_package_to_install_if_the_manager_extra_is_missing(python):
    """`pip install trial-keeper` installs the commands of the manager without their dependencies."""
    others = site_packages(python) / "dependencies.pth"
    kept = others.read_text()
    others.unlink()
    try:
        for command in (
            ["bin/nnictl", "--help"],
            ["bin/python", "-m", "nni_manager.cli"],
        ):
            done = subprocess.run(
                [python.parents[1] / command[0], *command[1:]],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
            assert done.returncode == 1, command
            assert "Traceback" not in done.stderr
            assert done.stderr.startswith("ERROR: cannot run nnictl: the package ")
            assert done.stderr.endswith("-m pip install 'trial-keeper[manager]'`\n")
        code = "try:\n  import nni_manager.experiment\nexcept ImportError as error: print(error)"
        said = run(python, "-c", code)
        assert said.startswith("cannot run nni_manager.experiment: the package ")
    finally:
        others.write_text(kept)


@pytest.mark.smoke
def test_pip_uninstall_leaves_no_files(python, tmp_path):
    copied = tmp_path / "venv"
    shutil.copytree(python.parents[1], copied, symlinks=True)
    there = copied / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", there, "uninstall", "--quiet", "--yes", "trial-keeper")
    assert not list(site_packages(there).glob("trial_keeper*"))
    assert not list(site_packages(there).glob("nni*"))
