"""Plain Kubernetes Jobs, optionally with a Kueue queue. All tasks of a job have the same role.

Source: Kubernetes, Job v1: an Indexed Job gives each pod its index; Kueue suspends a Job until its queue has capacity.
"""

from __future__ import annotations

from typing import ClassVar

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.training_services.kubeflow.common import ConditionedOperator
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import Stage
from nni_manager.training_services.kubernetes.render import pod_spec
from nni_manager.training_services.kubernetes.resources import Resource
from trial_keeper.settings import KeeperSettings

_CONTAINER = "trial"


class PlainJobs(ConditionedOperator):
    """Jobs of batch/v1. A job succeeds when all its tasks have succeeded."""

    title = "Kubernetes"
    stages: ClassVar = {"Complete": Stage.ENDED, "Failed": Stage.ENDED}

    @property
    def resource(self) -> Resource:
        """Jobs."""
        return Resource("batch", "v1", "jobs", "Job", operator="Kubernetes")

    @property
    def completion(self) -> Completion:
        """Any failure fails the job."""
        (role,) = self.config.roles
        return Completion((TaskRole(role.name, role.tasks, 1, role.tasks),))

    def spec(self, name: str, settings: KeeperSettings, of_pods: Document) -> Document:
        """One pod per task, all in parallel; failed pods are not replaced."""
        (role,) = self.config.roles
        pod = pod_spec(self.config, role, name, settings, container=_CONTAINER)
        return {
            "completions": role.tasks,
            "parallelism": role.tasks,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"metadata": of_pods, "spec": pod},
        }

    def stage_of(self, document: Document) -> Stage:
        """Based on the conditions and the pod counts in its status."""
        stage, status = super().stage_of(document), document.get("status") or {}
        has_run = any(status.get(each) for each in ("ready", "succeeded", "failed"))
        return Stage.RUNNING if has_run and stage is Stage.WAITING else stage
