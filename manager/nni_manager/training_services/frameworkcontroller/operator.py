"""FrameworkController as an `Operator`. Pure: the same input gives the same document.

Pods of multi-task jobs start with FrameworkController's barrier. The barrier waits until all tasks have an address, and
writes the addresses to a script for the commands.

Source: FrameworkController v1 (Framework, FrameworkBarrier); NNI v2.10 for names, ports and variables. Unlike NNI, a
failed task is not restarted in its pod, and single-task jobs have no barrier.
"""

from __future__ import annotations

from collections.abc import Mapping

from nni_manager.config.model import RoleConfig
from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.training_services.frameworkcontroller.states import FrameworkState, verdict_of
from nni_manager.training_services.frameworkcontroller.template import (
    pods_of,
    template_of,
    with_keeper,
    with_labels,
)
from nni_manager.training_services.kubernetes.api import Document
from nni_manager.training_services.kubernetes.operator import JobOutcome, Operator, Stage
from nni_manager.training_services.kubernetes.render import pod_spec, short_name
from nni_manager.training_services.kubernetes.resources import Resource
from trial_keeper.settings import KeeperSettings

FRAMEWORKS = Resource(
    "frameworkcontroller.microsoft.com", "v1", "frameworks", "Framework", operator="FrameworkController"
)
CONTAINER = "framework"
_BARRIER = "frameworkbarrier"
_BARRIER_VOLUME = "frameworkbarrier-volume"
_BARRIER_PATH = "/mnt/frameworkbarrier"
_BARRIER_IMAGE = "frameworkcontroller/frameworkbarrier"
_FIRST_PORT = 4000
# A node that does not end a pod within ten minutes counts as lost. No task can run twice: tasks are never retried.
_NODE_LOST_S = 600
_NO_RETRIES = {"fancyRetryPolicy": False, "maxRetryCount": 0}


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
        return Completion(
            tuple(
                TaskRole(role.name, role.tasks, _count(role.min_failed), _count(role.min_succeeded))
                for role in self.config.roles
            )
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warns that the barrier must be allowed to read the Framework."""
        if not self._waits_at_barrier or self.config.service_account is not None:
            return ()
        template = template_of(self.config)
        if template is not None and all("serviceAccountName" in pod for pod in pods_of(template)):
            return ()
        return (
            "tasks of one job wait for each other at FrameworkController's barrier, which reads the Framework; if "
            "pods may not read Frameworks on this cluster, set serviceAccountName to an account that may",
        )

    def name_of(self, experiment_id: str, job_id: str) -> str:
        """Lower-case letters and digits, so names of two jobs may collide."""
        return f"nniexp{experiment_id}{short_name(job_id)}".lower()

    def metadata(self, labels: dict[str, str]) -> Document:
        """The labels, and those and the annotations of the template."""
        return with_labels((template_of(self.config) or {}).get("metadata"), labels)

    def spec(self, name: str, settings: KeeperSettings, labels: dict[str, str]) -> Document:
        """The template with a keeper in each pod, or one made from the roles."""
        template: Document = (template_of(self.config) or {"spec": {}})["spec"]
        given = template.get("taskRoles") or [{"task": {"pod": {}}} for _ in self.config.roles]
        roles = [
            {
                "name": role.name,
                "taskNumber": role.tasks,
                "frameworkAttemptCompletionPolicy": {
                    "minFailedTaskCount": _count(role.min_failed),
                    "minSucceededTaskCount": _count(role.min_succeeded),
                },
                "task": {
                    "retryPolicy": _NO_RETRIES,
                    "podGracefulDeletionTimeoutSec": _NODE_LOST_S,
                    **own["task"],
                    "pod": {
                        "metadata": with_labels(own["task"]["pod"].get("metadata"), labels),
                        "spec": self._pod(role, name, settings, own["task"]["pod"].get("spec")),
                    },
                },
            }
            for role, own in zip(self.config.roles, given, strict=True)
        ]
        return {"executionType": "Start", "retryPolicy": _NO_RETRIES, **template, "taskRoles": roles}

    def stage_of(self, document: Document) -> Stage:
        """Based on the Framework's state."""
        return FrameworkState.of(document).stage

    def verdict_of(self, document: Document, pods: Mapping[str, Document]) -> JobOutcome:
        """The outcome of the Framework's deciding task."""
        return verdict_of(document, pods)

    @property
    def _waits_at_barrier(self) -> bool:
        """True if the tasks of a job wait for each other."""
        return self.completion.tasks > 1

    def _pod(self, role: RoleConfig, name: str, settings: KeeperSettings, given: Document | None) -> Document:
        """Returns the pod of a role; `given` is the template's pod spec, or None."""
        own = [each.get("name") for each in (given or {}).get("initContainers") or ()]
        has_barrier = self._waits_at_barrier and _BARRIER not in own  # else it is the template's own
        ports = {each.name: port for port, each in enumerate(self.config.roles, _FIRST_PORT)}
        environ = {f"FB_{role_name.upper()}_PORT": f"{port}" for role_name, port in ports.items()}
        before = (f". {_BARRIER_PATH}/injector.sh",) if has_barrier else ()
        job = (self.config, role, name, settings)
        if given is None:
            spec = pod_spec(*job, container=CONTAINER, environ=environ, port=ports[role.name], before=before)
        else:
            spec = with_keeper(given, *job, environ=environ, before=before)
        if has_barrier:
            barrier = {"name": _BARRIER_VOLUME, "mountPath": _BARRIER_PATH}
            spec["volumes"].append({"name": _BARRIER_VOLUME, "emptyDir": {}})
            spec["containers"][0]["volumeMounts"].append(barrier)
            spec["initContainers"] = [
                {"name": _BARRIER, "image": _BARRIER_IMAGE, "volumeMounts": [barrier]},
                *(spec.get("initContainers") or ()),
            ]
        return spec


def _count(wanted: int | None) -> int:
    return -1 if wanted is None else wanted
