"""An experiment with jobs on an Azure share: a failed upload, and keepers without a network to the
manager.
"""

import asyncio

import pytest
from azure_here import ACCOUNT, SECRET, SHARE, VAULT, Azure
from deadlines import DEADLINE_S, scaled_s
from kube_api import KubeCluster
from kube_controllers import FRAMEWORKS
from kube_definitions import FRAMEWORK
from kube_place import worker_role
from kube_store import DEFINITIONS, PODS, SECRETS
from real_experiment import RealExperiment, a_manager_here, until

pytest.importorskip("kubernetes")
pytest.importorskip("azure.storage.fileshare")

from attempts import AttemptNumbers, attempt_id

from nni_manager.domain.experiment import ExperimentState
from nni_manager.training_services.platform import platform_of
from nni_sdk.records import decode
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.workspace import Workspace

pytestmark = pytest.mark.smoke

TRAIN = """\
import nni_sdk
for step in range(500):
    nni_sdk.report_intermediate_result(step)
nni_sdk.report_final_result(nni_sdk.get_next_parameter()["x"])
"""
# No process listens on this port.
NOWHERE = "127.0.0.1:9"


@pytest.fixture
def azure(tmp_path, monkeypatch):
    with Azure(tmp_path / "azure") as azure:
        for name, value in azure.environ.items():
            monkeypatch.setenv(name, value)
        yield azure


@pytest.fixture
def cluster(tmp_path, azure, monkeypatch):
    (tmp_path / "node").mkdir()
    with KubeCluster(tmp_path / "node", {(ACCOUNT, SHARE, azure.key): azure.share}) as cluster:
        cluster.store.create(DEFINITIONS, "", FRAMEWORK)
        (tmp_path / "kubeconfig").write_text(cluster.api.kubeconfig())
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield cluster


def test_metrics_arrive_through_the_azure_share_when_keepers_cannot_reach_the_manager(
    tmp_path, azure, cluster
):
    experiment = RealExperiment(
        tmp_path,
        TRAIN,
        maxTrialNum=1,
        trialConcurrency=1,
        trainingServicePlatform="frameworkcontroller",
        trial={"codeDir": ".", "taskRoles": [worker_role("python3 train.py", "me/train:1")]},
        frameworkcontrollerConfig={
            "storage": "azureStorage",
            "azureStorage": {"accountName": ACCOUNT, "azureShare": SHARE},
            "keyVault": {"vaultName": VAULT, "name": SECRET},
        },
    )
    experiment.create()
    azure.refuses, azure.refuses_at = (403, "AuthorizationFailure"), "/trial.json"

    async def play():
        make_service = await asyncio.to_thread(platform_of(experiment.config).make_service, experiment.folder)
        async with a_manager_here(experiment, make_service, told=NOWHERE) as engine:
            await until(lambda: engine.snapshot().problem, "the upload fails")
            told = engine.snapshot().problem
            assert "cannot upload TESTEXPT/trials/" in told
            assert "allow this machine's address in the firewall" in told
            assert azure.key not in told
            assert not cluster.store.list(FRAMEWORKS)
            assert cluster.api.counted()["create", "frameworks"] == 0
            azure.refuses = None
            await until(lambda: cluster.store.list(FRAMEWORKS), "the job is submitted", DEADLINE_S)
            # The manager's next six requests to the share fail, and the manager must retry them.
            azure.fails_with = [(503, "ServerBusy")] * 6
            await until(lambda: engine.experiment.state is ExperimentState.DONE, "the experiment is done")
            (trial,) = engine.experiment.trials.values()
            assert trial.state.value == "SUCCEEDED", trial.run.message
            return trial.trial_id

    trial_id = asyncio.run(asyncio.wait_for(play(), scaled_s(150)))
    left = AttemptNumbers(Workspace(azure.share / "TESTEXPT")).folder(
        AttemptKey(trial_id, attempt_id(0), "worker-0")
    )
    written = decode(left.stream(Stream.METRICS).read_bytes(), 0).records
    rows = experiment.rows(trial_id)
    assert len(written) == 501
    assert [(row.record_offset, row.value) for row in rows] == [(each.offset, each.value) for each in written]
    asyncio.run(
        asyncio.wait_for(until(lambda: not cluster.store.list(FRAMEWORKS), "the job is deleted"), DEADLINE_S)
    )
    assert not cluster.store.list(SECRETS)
    assert not cluster.store.list(PODS)
    assert platform_of(experiment.config).remove_from_share(experiment.folder.workspace) == ""
    assert list(azure.share.iterdir()) == []
