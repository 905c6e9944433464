"""The Python script of NNI's page on FrameworkController, on a fake Kubernetes cluster."""

import re
import subprocess
import sys

import pytest
from deadlines import DEADLINE_S, scaled_s
from kube_api import KubeCluster
from kube_controllers import FRAMEWORKS
from kube_definitions import FRAMEWORK
from kube_store import ACCOUNTS, CONFIG_MAPS, DEFINITIONS, PODS, SECRETS
from real_experiment import wait_until
from user_home import environ_of

from nni_manager.client.experiments import known_experiment
from nni_manager.store.folders import ExperimentFolder

pytestmark = pytest.mark.smoke

pytest.importorskip("kubernetes")

EXPORT = "10.20.30.40:/mnt/nfs/nni"
# NNI's page leaves the search space and the training code to the reader. The test fills them in.
PAGE = """\
from nni.experiment import (
    Experiment,
    FrameworkAttemptCompletionPolicy,
    FrameworkControllerRoleConfig,
    K8sNfsConfig,
)

search_space = {'x': {'_type': 'uniform', '_value': [0, 1]}}

experiment = Experiment('frameworkcontroller')
experiment.config.trial_code_directory = '.'
experiment.config.search_space = search_space
experiment.config.tuner.name = 'TPE'
experiment.config.tuner.class_args['optimize_mode'] = 'maximize'
experiment.config.max_trial_number = 10
experiment.config.trial_concurrency = 2

experiment.config.training_service.storage = K8sNfsConfig()
experiment.config.training_service.storage.server = '10.20.30.40'
experiment.config.training_service.storage.path = '/mnt/nfs/nni'
experiment.config.training_service.task_roles = [FrameworkControllerRoleConfig()]
experiment.config.training_service.task_roles[0].name = 'worker'
experiment.config.training_service.task_roles[0].task_number = 1
experiment.config.training_service.task_roles[0].command = 'python3 model.py'
experiment.config.training_service.task_roles[0].gpuNumber = 1
experiment.config.training_service.task_roles[0].cpuNumber = 1
experiment.config.training_service.task_roles[0].memorySize = '4g'
experiment.config.training_service.task_roles[0].framework_attempt_completion_policy = \\
    FrameworkAttemptCompletionPolicy(min_failed_task_count = 1, min_succeed_task_count = 1)
experiment.config.training_service.service_account_name = 'frameworkcontroller'

experiment.run(PORT)
print(experiment.id, len(experiment.export_data()))
"""
MODEL = """\
import nni_sdk as nni
nni.report_final_result(nni.get_next_parameter()["x"])
"""
# Tests cannot mount an NFS export, so the manager reads a fake mount table that lists one.
RUN = """\
import pathlib, sys
from nni_manager.training_services import mounts
mounts._MOUNTS = pathlib.Path("../mountinfo")
sys.argv[1:] = ["search.py"]
from nni_manager.experiment.__main__ import main
main()
"""


@pytest.fixture
def place(tmp_path):
    for name in ("node", "work", "storage"):
        (tmp_path / name).mkdir()
    storage = tmp_path / "storage"
    (tmp_path / "mountinfo").write_text(f"36 21 0:50 / {storage} rw,relatime shared:9 - nfs4 {EXPORT} rw\n")
    (tmp_path / "work/search.py").write_text(PAGE.replace("PORT", "'auto'"))
    (tmp_path / "work/model.py").write_text(MODEL)
    return tmp_path


def test_the_script_from_the_documentation_of_nni_runs_unchanged(place):
    with KubeCluster(place / "node", {EXPORT: place / "storage"}) as cluster:
        cluster.store.create(DEFINITIONS, "", FRAMEWORK)
        cluster.store.create(ACCOUNTS, "default", {"metadata": {"name": "frameworkcontroller"}})
        (place / "kubeconfig").write_text(cluster.api.kubeconfig())
        done = subprocess.run(
            [sys.executable, "-c", RUN],
            cwd=place / "work",
            env=environ_of(place / "work") | {"KUBECONFIG": str(place / "kubeconfig")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled_s(150),
        )
        assert done.returncode == 0, done.stderr
        experiment_id, count = done.stdout.splitlines()[-1].split()
        assert count == "10"
        for camel, snake in (
            ("gpuNumber", "gpu_number"),
            ("cpuNumber", "cpu_number"),
            ("memorySize", "memory_size"),
        ):
            assert len(re.findall(f"{camel} .* is read as {snake}", done.stderr)) == 1
        assert "docker_image is not set: NNI's default " in done.stderr
        kinds = (FRAMEWORKS, PODS, SECRETS, CONFIG_MAPS)
        wait_until(
            lambda: not any(cluster.store.list(kind) for kind in kinds), "all objects are deleted", DEADLINE_S
        )
        known = known_experiment(ExperimentFolder(place / "nni-experiments" / experiment_id))
        assert (known.manager, known.stored.status()["status"]) == (None, "DONE")
