"""Kubeflow, and plain Jobs of Kubernetes, as a platform."""

from __future__ import annotations

from nni_manager.training_services.kubeflow.operators import OPERATORS
from nni_manager.training_services.kubernetes.operator import Operator
from nni_manager.training_services.kubernetes.platform import KubernetesPlatform


class KubeflowPlatform(KubernetesPlatform):
    """Kubernetes with one of Kubeflow's operators, or with none."""

    def operator(self) -> Operator:
        """The operator that the experiment file names."""
        return OPERATORS[self.kubernetes.operator](self.kubernetes)


platform = KubeflowPlatform
