"""Plain Kubernetes Jobs, optionally with a Kueue queue. All tasks of a job have the same role.

Source: Kubernetes, Job v1: an Indexed Job gives each pod its index; Kueue suspends a Job until its queue has capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nni_manager.training_services.kubeflow.common import ConditionedOperator
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import Stage
from nni_manager.training_services.kubernetes.render import pod_spec
from trial_keeper.settings import KeeperSettings

_CONTAINER = "trial"


class PlainJobs(ConditionedOperator):
    """Jobs of batch/v1. A job succeeds when all its tasks have succeeded."""

    title = software = "Kubernetes"
    group, kind = "batch", "Job"
    stages: ClassVar = {"Complete": Stage.ENDED, "Failed": Stage.ENDED}

    def spec(self, name: str, settings: KeeperSettings, labels: dict[str, str]) -> Document:
        """One pod per task, all in parallel; failed pods are not replaced."""
        (role,) = self.config.roles
        pod = pod_spec(self.config, role, name, settings, container=_CONTAINER)
        return {
            "completions": role.tasks,
            "parallelism": role.tasks,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }

    def pod_counts_of(self, status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The status itself."""
        return [status]
