"""The real bundle of the keeper, in real images without a keeper: one with Python 3.11, and one without Python."""

import os
import shlex
import subprocess
import sys

import pytest
from deadlines import scaled_s
from fake_manager import TOKEN, TRIAL

from nni_manager.engine.shared_files import SharedFiles
from nni_manager.support.keeper_bundle import bundle_for
from nni_manager.training_services.run_script import render_run_script
from nni_sdk.records import decode, encode
from trial_keeper import __version__
from trial_keeper.wire.documents import ManagerDocument
from trial_keeper.wire.messages import Stream, TrialEnded
from trial_keeper.wire.reasons import ExitReason

pytestmark = [pytest.mark.smoke, pytest.mark.any_machine, pytest.mark.containers, pytest.mark.timeout(1000)]
MOUNT = "/mnt/confignfs-data"
NOBODY = 65534
# This script reports a result in the format of nni_sdk. It is written in bash, because one of the images has no Python.
REPORTING = f"""\
printf %s {shlex.quote(encode(0, TRIAL, "FINAL", 0, 41).decode())} >> "$NNI_SYS_DIR/.nni/metrics"
env | grep '^_PYI\\|^LD_LIBRARY_PATH' || echo "no such variable"
exit 3
"""
TRAIN = """
import nni_sdk
nni_sdk.get_next_parameter()
nni_sdk.report_final_result(1)
try:
    import grpc
except ImportError:
    print("no grpc")
"""
READ_ONLY = ("--read-only", "--tmpfs=/run", "--read-only-tmpfs=false")


@pytest.fixture
def bundle(podman, monkeypatch):
    """The bundle of this checkout, installed for this Python."""
    monkeypatch.syspath_prepend(str(podman.bundle()))
    return bundle_for("auto")


@pytest.fixture(params=["with Python 3.11", "without Python"])
def image(podman, request):
    return podman.base() if request.param == "with Python 3.11" else podman.without_python()


@pytest.fixture
def a_job(site, bundle, a_container):
    """Runs a trial in a container of an image, as a cluster would."""

    def start(image, command, *options, user=0):
        site.add_trial(command, code_dir=f"{MOUNT}/code")
        document = ManagerDocument.from_bytes(site.workspace.manager_json.read_bytes())
        files = SharedFiles(site.workspace)
        files.write_experiment(document, render_run_script(bundle), None, bundle)
        storage = site.workspace.root.parent
        for path in (storage, *storage.rglob("*")):
            os.chown(path, user, user)
        workspace = f"{MOUNT}/{site.workspace.root.name}"
        environ = site.settings(workspace=workspace, collect_logs=True, relay_output=True).to_environ()
        variables = [f"--env={name}={value}" for name, value in environ.items()]
        container = (f"--volume={storage}:{MOUNT}", f"--user={user}:{user}", *variables, *options)
        return a_container(*container, image, "bash", f"{workspace}/run.sh")

    return start


@pytest.mark.parametrize(
    ("user", "options"),
    [(0, ()), (NOBODY, ()), (NOBODY, READ_ONLY)],
    ids=["root", "nobody", "read-only"],
)
def test_a_trial_runs_in_an_image_without_a_keeper(site, a_job, image, user, options):
    keeper = a_job(image, REPORTING, *options, user=user)
    assert keeper.wait() == 3, keeper.stderr
    assert [record.value for record in decode(site.file(), 0).records] == ["41"]
    for stream in Stream:
        assert site.manager.stored(stream) == site.file(stream), stream
    (ended,) = site.manager.all_of(TrialEnded)
    assert (ended.reason, ended.exit_code) == (ExitReason.NONZERO_EXIT, 3)
    # The trial has the environment of the image, and not the environment of the keeper's interpreter.
    assert keeper.stdout == "no such variable\n"
    assert TOKEN not in keeper.stderr


def test_the_keeper_is_pid_1_of_its_container(a_job, image):
    keeper = a_job(image, "echo $PPID; tr '\\0' ' ' < /proc/1/cmdline")
    assert keeper.wait() == 0, keeper.stderr
    pid, command = keeper.stdout.splitlines()
    assert pid == "1"
    assert "/tmp/trial-keeper." in command


def test_the_files_of_an_unpacked_keeper_are_removed_when_the_keeper_ends(a_job, image, tmp_path):
    """A container of Apptainer, for example, uses the /tmp of its node, which outlives the container."""
    of_node = tmp_path / "node"
    of_node.mkdir()
    keeper = a_job(image, "ls /tmp", f"--volume={of_node}:/tmp")
    assert keeper.wait() == 0, keeper.stderr
    assert keeper.stdout.startswith("trial-keeper.")
    assert list(of_node.iterdir()) == []


def test_python_in_the_image_can_import_nni_sdk_but_no_library_of_the_keeper(podman, site, a_job):
    (site.code / "train.py").write_text(TRAIN)
    keeper = a_job(podman.base(), "python3 train.py")
    assert keeper.wait() == 0, keeper.stderr
    assert keeper.stdout == "no grpc\n"


def test_the_frozen_keeper_prints_its_version_in_an_image_without_python(podman, site, a_job):
    keeper = a_job(podman.without_python(), 'bash "${NNI_SYS_DIR%/trials/*}/run.sh" --version')
    assert keeper.wait() == 0, keeper.stderr
    assert keeper.stdout == f"trial-keeper {__version__}\n"


def test_the_bundle_for_this_python_version_contains_compiled_modules(bundle, tmp_path):
    """Without compiled modules, the keeper would compile its modules at each start."""
    archive = bundle.archive(f"cp{sys.version_info[0]}{sys.version_info[1]}-{os.uname().machine}")
    names = subprocess.run(
        ["tar", "-tzf", str(archive)], capture_output=True, text=True, timeout=scaled_s(60)
    ).stdout
    assert "trial_keeper/core/keeper.pyc" in names
