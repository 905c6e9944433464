"""`make test-k8s` with a kubeconfig file, for the fake cluster in a separate process."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from deadlines import DEADLINE_S, scaled_s
from kube_place import Place, named_cluster, surroundings, worker_role

pytest.importorskip("kubernetes")

from nni_manager.store.folders import ExperimentFolder

REPOSITORY = Path(__file__).parents[2]
# These expressions for `pytest -k` select one test of the API server, and tests with a whole experiment. They have whole names,
# so that a search for the name of a test finds them.
API_SERVER = "test_a_server_reports_its_version"
FRAMEWORK = "test_an_experiment_creates_one_framework_object_per_trial_and_deletes_the_objects"
TFJOB = "test_a_tfjob_ends_when_its_workers_end_although_the_parameter_server_still_runs"


@pytest.fixture
def server(tmp_path, request):
    """The server process; its output at the end is a JSON document with the number of calls."""
    program = REPOSITORY / "tests" / "fakes" / "kube_server.py"
    with subprocess.Popen(
        [sys.executable, str(program), str(tmp_path), *getattr(request, "param", ())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def recipe():
    """The command of `make test-k8s`, without the creation of the virtual environment."""
    said = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "test-k8s"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    return said.stdout.splitlines()[-1]


def run_on_named_cluster(folder, some):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        ["bash", "-euc", recipe()],
        cwd=REPOSITORY,
        env=outside
        | {
            "KUBECONFIG": str(folder / "kubeconfig"),
            "TEST_K8S_IMAGE": "me/other:2",
            "TEST_K8S_STORAGE": "pvc:nni",
            "TEST_K8S_STORAGE_HERE": str(folder / "storage"),
            "PYTEST_ADDOPTS": f"-k '{some}' --basetemp {folder / 'pytest'}",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled_s(240),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("server", [["--without-controllers"]], indirect=True)
def test_tests_of_a_job_kind_are_skipped_with_a_reason_if_the_cluster_has_no_controller_of_this_kind(
    server, tmp_path
):
    done = run_on_named_cluster(tmp_path, f"{FRAMEWORK} or {TFJOB}")
    assert "2 skipped" in done.stdout
    for kind in ("frameworks", "tfjobs"):
        assert f" has {kind}, but no controller of them: none has written a status within 20 s" in done.stdout
    server.kill()


@pytest.mark.smoke
def test_tests_with_the_mark_any_cluster_run_on_the_cluster_that_the_kubeconfig_names(server, tmp_path):
    done = run_on_named_cluster(tmp_path, f"{API_SERVER} or {FRAMEWORK}")
    assert "2 passed" in done.stdout
    said, _ = server.communicate(timeout=DEADLINE_S)
    asked = json.loads(said)
    assert asked["create frameworks"] == 3 + 1, (
        "the named cluster must run the jobs, not the fake one of other tests, and the probe for a controller"
    )
    assert asked["create customresourcedefinitions"] == asked["delete customresourcedefinitions"] == 3


def test_a_failed_cluster_test_leaves_no_manager_process(tmp_path):
    managers = []
    with contextlib.suppress(ZeroDivisionError), surroundings(tmp_path) as around:
        place = Place(tmp_path, around, "import signal; signal.pause()")
        place.config["trainingServicePlatform"] = "frameworkcontroller"
        place.config["trial"]["taskRoles"] = [worker_role("python3 train.py", around.image)]
        place.config["frameworkcontrollerConfig"] = around.storage | {"namespace": around.namespace}
        assert place.create().returncode == 0
        (path,) = (tmp_path / "experiments").iterdir()
        managers.append(psutil.Process(ExperimentFolder(path).running_process().pid))
        raise ZeroDivisionError
    assert [each.is_running() for each in managers] == [False]


def test_the_command_make_test_k8s_lists_missing_variables():
    with pytest.raises(pytest.skip.Exception, match="TEST_K8S_STORAGE, TEST_K8S_STORAGE_HERE not set"):
        named_cluster({"TEST_KUBECONFIG": "k", "TEST_K8S_IMAGE": "i"})
    said = {"TEST_KUBECONFIG": "k", "TEST_K8S_IMAGE": "i", "TEST_K8S_STORAGE_HERE": "/mnt/nni"}
    nfs = named_cluster(said | {"TEST_K8S_STORAGE": "nfs:10.0.0.1:/a/b"})
    assert nfs.storage == {"storage": "nfs", "nfs": {"server": "10.0.0.1", "path": "/a/b"}}
    claim = named_cluster(said | {"TEST_K8S_STORAGE": "pvc:data", "TEST_K8S_NAMESPACE": "team"})
    assert claim.storage == {"storage": "pvc", "pvc": {"path": "/mnt/nni", "name": "data"}}
    assert (nfs.namespace, claim.namespace) == ("default", "team")
