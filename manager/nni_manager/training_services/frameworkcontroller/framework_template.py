"""Reads and checks a user's Framework template, from which the jobs of an experiment are created.

The user controls roles, images, volumes and all other pod settings. The template must not contain what jobs add: the keeper,
which runs each role's command, its variables, the shared storage, and the labels that identify jobs.

Source: FrameworkController v1, Framework; NNI v2.10 for one container per pod and for the policies of roles that have none.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from nni_manager.config.diagnostics import KeyPath, shown
from nni_manager.config.document import Document
from nni_manager.training_services.kubernetes.pod_template import TemplateReading
from nni_manager.training_services.kubernetes.section import RoleConfig
from trial_keeper.frozen_dataclass import dataclass

_API_VERSION, _KIND = "frameworkcontroller.microsoft.com/v1", "Framework"
_NAME = re.compile(r"[a-z0-9]{1,63}")
_MAX_TASKS = 10_000
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class FrameworkTemplate:
    """A valid template (`text`, JSON) and its roles, whose `cpu` and `memory_mb` are 0: `text` has the resource requests."""

    text: str
    roles: tuple[RoleConfig, ...]


def read_template(document: Document, namespace: str | None) -> FrameworkTemplate:
    """The template in a document. `namespace` is that of the experiment file.

    Raises:
        ConfigInvalid: with every error of the template.
    """
    reading = _Reading(document)
    roles: tuple[RoleConfig, ...] = ()
    if reading.is_framework():
        reading.check_framework(namespace)
        roles = tuple(reading.roles())
    return FrameworkTemplate(reading.text(), roles)


class _Reading(TemplateReading):
    """One pass over a Framework."""

    def is_framework(self) -> bool:
        """True if the document is a Framework with roles."""
        value = self.document.value
        found = (value.get("apiVersion"), value.get("kind")) if isinstance(value, dict) else (None, None)
        if found != (_API_VERSION, _KIND):
            self.refuse((), f"it is not a Framework; write apiVersion: {_API_VERSION} and kind: {_KIND}")
            return False
        spec = self.mapping(("spec",), value.get("spec"), needed=True)
        roles = spec.get("taskRoles")
        if spec and not (isinstance(roles, list) and roles):
            self.refuse(("spec", "taskRoles"), "it must be a list of roles; write at least one role")
            return False
        return bool(spec)

    # ---- the Framework

    def check_framework(self, namespace: str | None) -> None:
        """Check the fields of the Framework outside of its roles."""
        value = self.document.value
        meta = self.mapping(("metadata",), value.get("metadata"))
        self.check_labels(("metadata", "labels"), meta.get("labels"))
        if meta.get("namespace") not in (None, namespace):
            why = "jobs are created in frameworkcontrollerConfig.namespace; write the namespace there, and remove it here"
            self.refuse(("metadata", "namespace"), why)
        spec = value["spec"]
        if spec.get("executionType") not in (None, "Start"):
            self.refuse(("spec", "executionType"), "only Start is supported; write Start, or remove it")
        self._check_retries(("spec", "retryPolicy"), spec.get("retryPolicy"))

    def _check_retries(self, key_path: KeyPath, policy: Any) -> None:
        policy = self.mapping(key_path, policy)
        if policy.get("fancyRetryPolicy") or policy.get("maxRetryCount"):
            why = "a job never restarts a task that has ended; remove it, and write maxTrialRetry into the experiment file"
            self.refuse(key_path, why)

    # ---- its roles

    def roles(self) -> Iterator[RoleConfig]:
        """The roles that can be read."""
        names: list[Any] = []
        for key_path, role in self.items(("spec", "taskRoles"), self.document.value["spec"]["taskRoles"]):
            name, tasks = role.get("name"), role.get("taskNumber")
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                why = f"{shown(name)} is not a name; write lower-case letters and digits"
                self.refuse((*key_path, "name"), why)
            elif name in names:
                self.refuse((*key_path, "name"), f"another role has the name {name!r}; rename one of the two")
            names.append(name)
            if not (type(tasks) is int and 1 <= tasks <= _MAX_TASKS):
                why = f"{shown(tasks)} is not a number of tasks; write a whole number from 1 to {_MAX_TASKS}"
                self.refuse((*key_path, "taskNumber"), why)
                tasks = 1
            ends = (*key_path, "frameworkAttemptCompletionPolicy")
            policy = self.mapping(ends, role.get("frameworkAttemptCompletionPolicy"))
            task = self.mapping((*key_path, "task"), role.get("task"), needed=True)
            self._check_retries((*key_path, "task", "retryPolicy"), task.get("retryPolicy"))
            command, image, gpu = self._pod((*key_path, "task", "pod"), task)
            yield RoleConfig(
                *(str(name), tasks, command, image, gpu),
                cpu=0,
                memory_mb=0,
                min_failed=self._count((*ends, "minFailedTaskCount"), policy, 1),
                min_succeeded=self._count((*ends, "minSucceededTaskCount"), policy, -1),
            )

    def _count(self, key_path: KeyPath, policy: Mapping[str, Any], default: int) -> int:
        count = policy.get(str(key_path[-1]), default)
        if type(count) is not int or count < -1:
            why = f"{shown(count)} is not a number of tasks; write -1 for no limit, or a whole number of at least 1"
            self.refuse(key_path, why)
            return default
        return count

    def _pod(self, key_path: KeyPath, task: Mapping[str, Any]) -> tuple[str, str, int]:
        """The command and the image of the pod's container, and the number of GPUs that it requests."""
        pod = self.mapping(key_path, task.get("pod"), needed=bool(task))
        meta = self.mapping((*key_path, "metadata"), pod.get("metadata"))
        self.check_labels((*key_path, "metadata", "labels"), meta.get("labels"))
        key_path = (*key_path, "spec")
        spec = self.mapping(key_path, pod.get("spec"), needed=bool(pod))
        self.check_spec(key_path, spec)
        containers = list(self.items((*key_path, "containers"), spec.get("containers")))
        if len(containers) != 1:
            if spec:
                why = f"there are {len(containers)} containers; write exactly one, in which the trial runs"
                self.refuse((*key_path, "containers"), why)
            return "", "", 0
        return self._container(*containers[0])

    def _container(self, key_path: KeyPath, container: Mapping[str, Any]) -> tuple[str, str, int]:
        for key in ("command", "args"):
            texts = container.get(key, [])
            if not (isinstance(texts, list) and all(isinstance(each, str) for each in texts)):
                self.refuse((*key_path, key), "it must be a list of strings; write e.g. [python3, train.py]")
                return "", "", 0
        command = [*container.get("command", ()), *container.get("args", ())]
        if not container.get("command"):
            why = "the keeper starts it instead of the image's entry point; write the whole command, e.g. [python3, train.py]"
            self.refuse((*key_path, "command"), why)
        self.check_container(key_path, container)
        image = container.get("image")
        if not (isinstance(image, str) and image):
            self.refuse((*key_path, "image"), f"{shown(image)} is not an image; write the name of an image")
        resources = self.mapping((*key_path, "resources"), container.get("resources"))
        limits = self.mapping((*key_path, "resources", "limits"), resources.get("limits"))
        gpus = str(limits.get(_GPU, 0))
        return shlex.join(command), str(image), int(gpus) if gpus.isdigit() else 0
