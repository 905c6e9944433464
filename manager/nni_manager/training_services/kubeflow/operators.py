"""All operators of this package, by their name in experiment files."""

from __future__ import annotations

from nni_manager.training_services.kubeflow.plain_jobs import PlainJobs
from nni_manager.training_services.kubeflow.replicated_jobs import PyTorchJobs, TfJobs
from nni_manager.training_services.kubeflow.train_jobs import TrainJobs
from nni_manager.training_services.kubernetes.operator import Operator

OPERATORS: dict[str, type[Operator]] = {
    "tf-operator": TfJobs,
    "pytorch-operator": PyTorchJobs,
    "trainjob": TrainJobs,
    "job": PlainJobs,
}
