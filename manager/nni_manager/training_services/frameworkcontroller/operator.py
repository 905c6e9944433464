"""FrameworkController as an `Operator`."""

from __future__ import annotations

from collections.abc import Mapping

from nni_manager.domain.completion import Completion
from nni_manager.training_services.frameworkcontroller.render import (
    completion_of,
    framework_name,
    render_framework,
    waits_at_barrier,
)
from nni_manager.training_services.frameworkcontroller.states import FrameworkState, verdict_of
from nni_manager.training_services.frameworkcontroller.template import pods_of, template_of
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import JobOutcome, Operator, Stage
from nni_manager.training_services.kubernetes.resources import Resource
from trial_keeper.settings import KeeperSettings

FRAMEWORKS = Resource(
    "frameworkcontroller.microsoft.com", "v1", "frameworks", "Framework", operator="FrameworkController"
)


class FrameworkController(Operator):
    """The operator whose resources are Frameworks."""

    title = "FrameworkController"

    @property
    def resource(self) -> Resource:
        """Frameworks."""
        return FRAMEWORKS

    @property
    def completion(self) -> Completion:
        """Based on the roles' completion policies."""
        return completion_of(self.config.roles)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warns that the barrier must be allowed to read the Framework."""
        if not waits_at_barrier(self.config) or self.config.service_account is not None:
            return ()
        template = template_of(self.config)
        if template is not None and all("serviceAccountName" in pod for pod in pods_of(template)):
            return ()
        return (
            "tasks of one job wait for each other at FrameworkController's barrier, which reads the Framework: if the "
            "cluster does not let every pod do so, name an account that may in serviceAccountName",
        )

    def name_of(self, experiment_id: str, job_id: str) -> str:
        """The Framework's name."""
        return framework_name(experiment_id, job_id)

    def render(self, namespace: str, settings: KeeperSettings) -> Document:
        """The Framework."""
        return render_framework(self.config, namespace, settings)

    def stage_of(self, document: Document) -> Stage:
        """Based on the Framework's state."""
        return FrameworkState.of(document).stage

    def verdict_of(self, document: Document, pods: Mapping[str, Document]) -> JobOutcome:
        """The outcome of its deciding task."""
        return verdict_of(document, pods)
