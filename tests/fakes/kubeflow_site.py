"""Jobs of Kubeflow's operators and plain Kubernetes Jobs of one experiment on the fake cluster."""

import contextlib
from dataclasses import replace

import kube_definitions as definitions
from kube_operators import PYTORCH_JOBS, RUNTIMES, TF_JOBS, TRAIN_JOBS
from kube_site import a_site
from kube_store import DEFINITIONS, JOBS

from nni_manager.training_services.kubernetes.section import KubernetesConfig, NfsStorage, RoleConfig

WORKER = RoleConfig("worker", 1, "true", "me/train:1", 0, 1, 100)
_NFS = NfsStorage("nas", "/nni")
CONFIGS = {
    "tf-operator": KubernetesConfig("tf-operator", _NFS, (WORKER, replace(WORKER, name="ps")), "v1"),
    "pytorch-operator": KubernetesConfig(
        "pytorch-operator", _NFS, (WORKER, replace(WORKER, name="master")), "v1"
    ),
    "trainjob": KubernetesConfig("trainjob", _NFS, (WORKER,), "v1alpha1", runtime="torch-distributed"),
    "job": KubernetesConfig("job", _NFS, (WORKER,), "v1"),
}
KINDS = {
    "tf-operator": TF_JOBS,
    "pytorch-operator": PYTORCH_JOBS,
    "trainjob": TRAIN_JOBS,
    "job": JOBS,
}


@contextlib.contextmanager
def a_kubeflow_site(folder, monkeypatch):
    """A cluster with all operators. The experiment's jobs are plain Jobs until a test sets another of `CONFIGS`."""
    with a_site(folder, monkeypatch) as site:
        for each in definitions.OF_KUBEFLOW:
            site.store.create(DEFINITIONS, "", each)
        site.store.create(RUNTIMES, "", definitions.TORCH_DISTRIBUTED)
        site.config = CONFIGS["job"]
        yield site
