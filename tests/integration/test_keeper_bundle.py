"""run.sh with a bundle of the keeper: which keeper it starts, and when it exits with an error. The tests run it in bash."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from deadlines import DEADLINE_S
from keeper_bundles import FROZEN, MACHINE, make_bundle

from nni_manager.config.reader import read_experiment_file
from nni_manager.engine.shared_files import SharedFiles
from nni_manager.support.keeper_bundle import BundleUnusable, bundle_for
from nni_manager.training_services import keeper_unpacker
from nni_manager.training_services.platform import platform_of
from nni_manager.training_services.run_script import render_run_script
from trial_keeper import __version__
from trial_keeper.wire.documents import ManagerDocument
from trial_keeper.wire.workspace import Workspace

pytestmark = pytest.mark.any_machine
OF_THIS_PYTHON = f"cp{sys.version_info[0]}{sys.version_info[1]}-{MACHINE}"
CAN_MOUNT = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
)
TOOLS = ("b2sum", "mktemp", "rm", "tar", "tee", "uname")


class Container:
    """A workspace with a bundle, and the programs of an image."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.tmp = folder / "bin", folder / "tmp"
        self.programs.mkdir()
        self.tmp.mkdir()
        self.bundle = make_bundle(folder / "installed", (OF_THIS_PYTHON, FROZEN))
        self.workspace = Workspace(folder / "EXPT")
        self.workspace.root.mkdir()
        for tool in TOOLS:
            self.link(tool)

    def link(self, name: str, target: str | None = None) -> None:
        """Add a program of this machine to the image."""
        (self.programs / name).symlink_to(target or shutil.which(name))

    def add(self, name: str, script: str) -> None:
        """Add a shell script to the image, as a program."""
        path = self.programs / name
        # remove a symlink first, because the write below would change its target, a program of this machine
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def write(self, **changes) -> None:
        """Write the workspace's files."""
        bundle = replace(self.bundle, **changes)
        files = SharedFiles(self.workspace)
        document = ManagerDocument("EXPT", __version__, ("127.0.0.1:1",))
        files.write_experiment(document, render_run_script(bundle), None, bundle)

    def run(self, *arguments: str, first: Iterable[str] = ("/bin/bash",)) -> subprocess.CompletedProcess:
        """Run run.sh in the same way as the first process of a container. `first` is the command that executes it."""
        return subprocess.run(
            [*first, str(self.workspace.run_sh), *arguments],
            env={"PATH": str(self.programs), "TMPDIR": str(self.tmp)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )


@pytest.fixture
def container(tmp_path):
    return Container(tmp_path)


def test_the_bundled_keeper_runs_with_the_python_but_without_the_packages_of_the_image(container):
    container.link("python3", sys.executable)
    container.write()
    done = container.run("doctor")
    assert (done.stdout, done.stderr, done.returncode) == (f"{OF_THIS_PYTHON} 1 1 doctor\n", "", 0)


def test_the_frozen_keeper_is_used_if_the_python_of_the_image_does_not_run(container):
    container.add("python3", "exit 1")
    container.write()
    assert container.run().stdout == f"{FROZEN} frozen\n"


def test_the_frozen_keeper_is_used_if_the_bundle_has_no_archive_for_the_python_of_the_image(
    container, tmp_path
):
    container.bundle = make_bundle(tmp_path / "older", ("cp39-" + MACHINE, FROZEN))
    container.link("python3", sys.executable)
    container.write()
    assert container.run().stdout == f"{FROZEN} frozen\n"


def test_the_program_named_python_is_used_if_the_program_named_python3_fails(container):
    container.add("python3", "exit 1")
    container.link("python", sys.executable)
    container.write()
    assert container.run().stdout == f"{OF_THIS_PYTHON} 1 1\n"


@pytest.mark.parametrize(
    ("implementation", "version", "flags", "name"),
    [
        ("cpython", (3, 9), "", "cp39"),
        ("cpython", (3, 13), "t", "cp313t"),
        ("pypy", (3, 11), "", "pp311"),
    ],
)
def test_the_name_of_a_keeper_archive_starts_with_the_python_tag_that_wheels_have(
    monkeypatch, implementation, version, flags, name
):
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name=implementation))
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(sys, "abiflags", flags)
    assert keeper_unpacker.archive_name() == f"{name}-{MACHINE}"


def test_a_keeper_of_this_version_in_the_image_is_preferred_to_the_bundle(container):
    container.link("python3", sys.executable)
    container.add("trial-keeper", f'echo "trial-keeper {__version__}"')
    container.write()
    assert container.run().stdout == f"trial-keeper {__version__}\n"
    assert list(container.tmp.iterdir()) == []


def test_the_bundle_is_used_if_the_keeper_in_the_image_has_another_version(container):
    container.link("python3", sys.executable)
    container.add("trial-keeper", 'echo "trial-keeper 0.1.0"')
    container.write()
    assert container.run().stdout == f"{OF_THIS_PYTHON} 1 1\n"


def test_the_bundle_is_preferred_to_the_keeper_in_the_image_if_the_experiment_file_requires_a_bundle(
    container,
):
    container.link("python3", sys.executable)
    container.add("trial-keeper", f'echo "trial-keeper {__version__}"')
    container.write(is_preferred=True)
    assert container.run().stdout == f"{OF_THIS_PYTHON} 1 1\n"


def test_the_keeper_in_the_image_runs_despite_another_version_if_the_bundle_cannot_run(container):
    container.add("trial-keeper", 'echo "trial-keeper 0.1.0"; exit 103')
    container.write(digests={})
    assert container.run().returncode == 103


@pytest.mark.parametrize("is_preferred", [False, True])
@pytest.mark.parametrize("missing", ["tar", "b2sum"])
def test_run_sh_exits_with_115_and_names_the_requirements_if_the_image_can_run_no_keeper(
    container, missing, is_preferred
):
    (container.programs / missing).unlink()
    container.write(is_preferred=is_preferred)
    done = container.run()
    assert done.returncode == 115
    assert (
        f"it needs {MACHINE}, and CPython 3.10 to 3.14 with libstdc++, or glibc 2.36 or later" in done.stderr
    )


def test_run_sh_removes_a_frozen_keeper_that_cannot_run_in_the_image_and_exits_with_115(container, tmp_path):
    container.bundle = make_bundle(tmp_path / "musl", (FROZEN,))
    container.write()
    container.add(
        "tar",
        f'{shutil.which("tar")} "$@"; while [ $# -gt 1 ]; do shift; done; echo exit 1 > "$1/trial-keeper"',
    )
    done = container.run()
    assert done.returncode == 115
    assert list(container.tmp.iterdir()) == []


@pytest.fixture(params=[OF_THIS_PYTHON, FROZEN])
def archive(request, container):
    """The name of the archive that the image needs."""
    if request.param == OF_THIS_PYTHON:
        container.link("python3", sys.executable)
    return request.param


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes() + b"x")])
def test_run_sh_does_not_run_a_damaged_archive_and_recommends_a_resume(container, archive, damage):
    container.write()
    name = container.bundle.stored_name(archive)
    damage(container.workspace.keeper / name)
    done = container.run()
    assert done.returncode == 101
    assert f"{container.workspace.keeper / name} is missing or damaged; run nnictl resume" in done.stderr
    container.write()
    assert container.run().returncode == 0


def test_run_sh_runs_the_verified_frozen_keeper_even_if_the_archive_is_replaced_after_the_verification(
    container, tmp_path
):
    container.write()
    archive = container.workspace.keeper / container.bundle.stored_name(FROZEN)
    other = make_bundle(tmp_path / "other", (FROZEN,), keeper="echo forged").archive(FROZEN)
    container.add("b2sum", f'{shutil.which("b2sum")} "$@"; {shutil.which("cp")} {other} {archive}')
    assert container.run().stdout == f"{FROZEN} frozen\n"


def test_the_keeper_is_unpacked_on_the_shared_storage_if_no_temporary_folder_is_writable(container, archive):
    container.write()
    shutil.rmtree(container.tmp)
    script = container.workspace.run_sh
    script.write_text(script.read_text().replace("/dev/shm", "/dev/null"))
    assert container.run().stdout.startswith(archive)
    (unpacked,) = container.workspace.unpacked_keepers.iterdir()
    assert unpacked.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not CAN_MOUNT, reason="needs root, for a file system of the test's own")
@pytest.mark.parametrize("option", ["noexec", "size=4k"])
def test_the_keeper_is_not_unpacked_in_a_temporary_folder_that_is_full_or_mounted_with_noexec(
    container, archive, option
):
    container.write()
    script = container.workspace.run_sh
    script.write_text(script.read_text().replace("/dev/shm", "/dev/null"))
    mount = f'{shutil.which("mount")} -t tmpfs -o {option} none {container.tmp} && exec /bin/bash "$0"'
    done = container.run(first=(shutil.which("unshare"), "--mount", "/bin/bash", "-c", mount))
    assert done.stdout.startswith(archive), done.stderr
    assert len(list(container.workspace.unpacked_keepers.iterdir())) == 1


def test_the_error_names_all_tried_folders_if_none_of_these_folders_is_writable(container, archive):
    container.write()
    script = container.workspace.run_sh
    script.write_text(script.read_text().replace("/dev/shm", "/dev/null"))
    shutil.rmtree(container.tmp)
    shutil.rmtree(container.workspace.unpacked_keepers)
    done = container.run()
    assert done.returncode == 115
    assert (
        f"none of {container.tmp}, /dev/null and {container.workspace.unpacked_keepers} is writable"
        in done.stderr
    )


def test_an_existing_keeper_archive_is_not_written_again(container):
    container.write()
    stored = container.workspace.keeper / container.bundle.stored_name(FROZEN)
    before = stored.stat().st_ino
    container.write()
    assert stored.stat().st_ino == before


# ---- the installed package


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that makes a bundle package which this Python can import."""

    def install(**options):
        bundle = make_bundle(tmp_path / "site", (FROZEN,), **options)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        return bundle

    return install


def test_the_manager_finds_an_installed_bundle(installed):
    bundle = installed()
    assert bundle_for("auto") == bundle
    assert bundle_for("bundle") == replace(bundle, is_preferred=True)
    assert bundle_for("image") is None


def test_a_missing_bundle_is_an_error_only_if_the_experiment_file_requires_a_bundle():
    assert bundle_for("auto") is None
    with pytest.raises(
        BundleUnusable, match=f"run `make keeper-bundle` in a checkout of trial-keeper {__version__}"
    ):
        bundle_for("bundle")


def test_a_bundle_of_another_version_is_refused(installed):
    installed(version="0.1.0")
    with pytest.raises(
        BundleUnusable, match=r"trial_keeper_bundle 0\.1\.0 with trial-keeper .* keeper: image"
    ):
        bundle_for("auto")
    assert bundle_for("image") is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": "0.7.0", "digests": []}'])
def test_a_damaged_bundle_is_refused(installed, content):
    bundle = installed()
    (bundle.folder / "bundle.json").write_text(content)
    with pytest.raises(BundleUnusable, match=r"cannot read .*bundle\.json.*--force-reinstall"):
        bundle_for("auto")


@pytest.mark.parametrize("name", ["v2_openpai", "v2_frameworkcontroller", "v2_kubeflow"])
def test_the_offline_check_refuses_an_experiment_file_that_requires_a_missing_bundle(tmp_path, name):
    corpus = Path(__file__).parents[1] / "golden/config/files"
    shutil.copytree(corpus, tmp_path / "files")
    file = tmp_path / "files" / f"{name}.yml"
    text = file.read_text()
    file.write_text(re.sub(r"^(trainingService:\n)", r"\1  keeper: bundle\n", text, flags=re.MULTILINE))
    platform = platform_of(read_experiment_file(file, reads_code=False))
    with pytest.raises(
        BundleUnusable, match="cannot use keeper: bundle: trial_keeper_bundle is not installed"
    ):
        platform.check_offline()
