"""Jobs of one experiment on the fake cluster. Scripts replace their keepers, and each manager has its own Kubernetes service."""

import asyncio
import contextlib

from deadlines import DEADLINE_S, scaled_s
from kube_api import KubeCluster
from kube_controllers import FRAMEWORKS
from kube_definitions import FRAMEWORK
from kube_store import CONFIG_MAPS, DEFINITIONS, PODS, SECRETS
from real_experiment import until

from nni_manager.training_services.frameworkcontroller.operator import FrameworkController
from nni_manager.training_services.kubeflow.operators import OPERATORS
from nni_manager.training_services.kubernetes import resource_calls
from nni_manager.training_services.kubernetes import watch as watch_module
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.backend import KubernetesService
from nni_manager.training_services.kubernetes.section import KubernetesConfig, NfsStorage, RoleConfig
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.workspace import Workspace

QUICK = ClientRetryPolicy(tries=2, first_s=0.001, longest_s=0.01, connect_within_s=5.0, answer_within_s=20.0)
NAME = "nniexpexpttrialtrial1"


def operator_of(kubernetes):
    """The operator that a configuration section names."""
    return OPERATORS.get(kubernetes.operator, FrameworkController)(kubernetes)


class KubeSite:
    """The cluster, the folder and the job ends of one experiment.

    Tests may change `config` and `share` before a manager starts.
    """

    def __init__(self, folder, cluster):
        self.cluster, self.folder = cluster, folder
        self.ends = []
        self.share = None
        self.config = KubernetesConfig(
            "frameworkcontroller",
            NfsStorage("nas", "/nni"),
            (RoleConfig("worker", 1, "true", "me/train:1", 0, 1, 100, None, None, 1, 1),),
        )
        self.runs("exec sleep 100")

    def runs(self, script):
        """Set the script that a container runs instead of its keeper."""
        (self.folder / "EXPT").mkdir(exist_ok=True)
        (self.folder / "EXPT" / "run.sh").write_text(script)

    @contextlib.asynccontextmanager
    async def manager(self):
        """The Kubernetes service of a manager. It is closed at the end of the block."""
        kubernetes = Kubernetes(self.folder / "kubeconfig", QUICK)
        workspace = Workspace(self.folder / "EXPT")
        operator = operator_of(self.config)
        service = KubernetesService(kubernetes, operator, workspace, self.ends.append, share=self.share)
        try:
            yield service
        finally:
            await service.close()

    def settings(self, job_id="trial1"):
        trial_id = None if job_id.startswith("env-") else job_id
        return KeeperSettings(
            "EXPT", job_id, str(self.folder / "EXPT"), "c0ffee", trial_id=trial_id, grace_s=1.0
        )

    @property
    def store(self):
        return self.cluster.store

    def state(self, name=NAME):
        found = self.store.find(FRAMEWORKS, "default", name) or {}
        return (found.get("status") or {}).get("state")

    def is_clean(self):
        return not any(self.store.list(kind, "default") for kind in (FRAMEWORKS, PODS, SECRETS, CONFIG_MAPS))

    async def has_ended(self, count=1):
        await until(lambda: len(self.ends) >= count, "the end is reported", DEADLINE_S)
        return self.ends[-1]

    async def is_running(self, name=NAME):
        await until(lambda: self.state(name) == "AttemptRunning", "the job runs", DEADLINE_S)


@contextlib.contextmanager
def a_site(folder, monkeypatch, runs=None):
    """A cluster with FrameworkController and an NFS export. `runs`: see Kubelet. Retries are fast."""
    monkeypatch.setattr(resource_calls, "_FIRST_RETRY_DELAY_S", 0.05)
    monkeypatch.setattr(watch_module, "_FIRST_PAUSE_S", 0.05)
    node = folder / "node"
    node.mkdir()
    with KubeCluster(node, {"nas:/nni": folder}, runs) as cluster:
        cluster.store.create(DEFINITIONS, "", FRAMEWORK)
        (folder / "kubeconfig").write_text(cluster.api.kubeconfig())
        yield KubeSite(folder, cluster)


def run(work):
    """Run a test's coroutine on a new loop with a timeout."""
    asyncio.run(asyncio.wait_for(work, scaled_s(150)))
