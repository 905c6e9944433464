"""The experiment file for FrameworkController: its keys, its checks, and the settings of its jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from nni_manager.config.diagnostics import ConfigInvalid, KeyPath, ref
from nni_manager.config.dialect import EACH, SERVICE
from nni_manager.config.document import read_yaml
from nni_manager.config.schema import Schema, line, mapping, must_be, text, whole
from nni_manager.training_services.frameworkcontroller.framework_template import (
    FrameworkTemplate,
    read_template,
)
from nni_manager.training_services.kubernetes.experiment_file import (
    EXAMPLE_OF_NFS,
    POD,
    KubernetesExperimentKeys,
    KubernetesFile,
    KubernetesServiceKeys,
    PodKeys,
)
from nni_manager.training_services.kubernetes.section import KubernetesConfig, RoleConfig

_ROLE = "{name: worker, taskNumber: 1, " + POD
_POLICY = (*SERVICE, "taskRoles", EACH, "frameworkAttemptCompletionPolicy")


class CompletionPolicyKeys(Schema):
    """`frameworkAttemptCompletionPolicy` of a task role: the number of tasks that end the job; -1 disables the rule."""

    python_name = "FrameworkAttemptCompletionPolicy"
    # fmt: off
    min_failed_task_count: int = must_be("-1 or a whole number of at least 1", "1", ge=-1, le=99999,
        about="failed tasks that end the job as failed")
    min_succeed_task_count: int = must_be("-1 or a whole number of at least 1", "-1", ge=-1, le=99999,
        v1="minSucceededTaskCount", about="succeeded tasks that end the job as succeeded")
    # fmt: on


class TaskRoleKeys(PodKeys):
    """An item of `taskRoles`: the identical tasks of one role of a job."""

    python_name = "FrameworkControllerRoleConfig"
    # fmt: off
    name: str = must_be("a name of at most 63 lower-case letters and digits", "worker", pattern=r"^[a-z0-9]{1,63}$",
        about="the name of the role")
    task_number: int = whole(1, 10000, "1", v1="taskNum", about="the number of tasks")
    framework_attempt_completion_policy: CompletionPolicyKeys = mapping("{minFailedTaskCount: 1, minSucceedTaskCount: -1}",
        about="when the job ends; `-1` disables a rule")
    # fmt: on


class FrameworkControllerServiceKeys(KubernetesServiceKeys):
    """The training service whose trials are Frameworks on Kubernetes."""

    python_name = "FrameworkControllerConfig"
    # fmt: off
    service_account_name: str | None = line("the name of a service account", "frameworkbarrier", None,
        about="the service account of the pods")
    task_roles: list[TaskRoleKeys] | None = text("a list of roles", f"[{_ROLE}]", None, v1="/trial.taskRoles",
        unset="required, unless `configPath` is set", about="the roles of a job")
    config_path: str | None = line("the path of a Framework template", "framework.yml", None, kind="file", since="0.6",
        about="[a Framework of your own](frameworkcontroller.md#a-framework-of-your-own); it takes precedence over `taskRoles`")
    # fmt: on


class FrameworkControllerExperimentKeys(KubernetesExperimentKeys):
    """The experiment file for FrameworkController."""

    # fmt: off
    training_service: FrameworkControllerServiceKeys = mapping("{platform: frameworkcontroller}",
        v1="frameworkcontrollerConfig", about="the cluster and its jobs")
    # fmt: on


class FrameworkControllerFile(KubernetesFile):
    """The part of FrameworkController."""

    schema = FrameworkControllerExperimentKeys
    examples_v1: ClassVar = {
        **KubernetesFile.examples_v1,
        "frameworkcontrollerConfig": f"storage: nfs, nfs: {{{EXAMPLE_OF_NFS}}}",
    }
    example_of_trial = ("taskRoles", f"[{_ROLE}]")
    hints_v1: ClassVar = {**KubernetesFile.hints_v1} | dict.fromkeys(
        (f"trial.{role}" for role in ("worker", "ps", "master")),
        "it applies to trainingServicePlatform: kubeflow; write an item of taskRoles with this name",
    )
    hints_v1_elsewhere: ClassVar = {
        "trial.taskRoles": "it applies to trainingServicePlatform: frameworkcontroller; remove it, and write command directly "
        "into trial",
        "trial.taskRoles.*.frameworkAttemptCompletionPolicy.minSucceedTaskCount": "its name in NNI's first schema is "
        "minSucceededTaskCount; use that name",
    }
    aliases: ClassVar = {
        **KubernetesFile.aliases,
        (*_POLICY, "minSucceededTaskCount"): (*_POLICY, "minSucceedTaskCount"),
    }
    implicit = frozenset({(*SERVICE, "taskRoles", EACH, "dockerImage")})
    _template: FrameworkTemplate | None = None

    @classmethod
    def roles_in(cls, service: Mapping[str, Any]) -> dict[KeyPath, Any]:
        """The items of `taskRoles`."""
        listed = service.get("taskRoles")
        return {("taskRoles", i): role for i, role in enumerate(listed if isinstance(listed, list) else ())}

    def check(self) -> None:
        """Check the keys, and the Framework template if the file names one."""
        super().check()
        template = self.paths.get((*SERVICE, "configPath"))
        if template is None or not template.is_file():
            return
        if self.service.get("taskRoles") is not None:
            self.reading.warn(
                "«trainingService.configPath» takes precedence over «trainingService.taskRoles»: the template describes the jobs"
            )
        try:
            self._template = read_template(read_yaml(template), self.service.get("namespace"))
        except ConfigInvalid as error:
            self.reading.diagnostics += error.diagnostics

    def check_roles(self) -> None:
        """Refuse a file without roles, and roles of the same name."""
        roles, key_path = self.service.get("taskRoles"), (*SERVICE, "taskRoles")
        if roles is None and self.service.get("configPath") is None:
            written, template = ref(key_path, f"[{_ROLE}]"), ref((*SERVICE, "configPath"))
            why = f"it must be a list of roles; write e.g. {written}, or name a template in {template}"
            self.reading.refuse(key_path, why, "do without")
        elif isinstance(roles, list):
            names = [role.get("name") if isinstance(role, Mapping) else None for role in roles]
            for index, name in enumerate(names):
                if isinstance(name, str) and name in names[:index]:
                    why = f"another role has the name {name!r}; rename one of the two"
                    self.reading.refuse((*key_path, index, "name"), why)

    def paths_in_file(self) -> Iterator[tuple[KeyPath, Any]]:
        """Those of roles and storage, and the template."""
        yield from super().paths_in_file()
        yield (*SERVICE, "configPath"), self.service.get("configPath")

    def cluster(self, file: FrameworkControllerExperimentKeys) -> KubernetesConfig:
        """The settings of Frameworks, from the template if there is one."""
        service, template = file.training_service, self._template
        return self.same_named(
            KubernetesConfig,
            service,
            operator="frameworkcontroller",
            storage=self.storage_of_jobs(service.storage),
            roles=tuple(
                self._role_of_task(index, task) for index, task in enumerate(service.task_roles or ())
            )
            if template is None
            else template.roles,
            service_account=service.service_account_name,
            template=self.paths.get((*SERVICE, "configPath")),
            template_text=None if template is None else template.text,
        )

    def _role_of_task(self, index: int, task: TaskRoleKeys) -> RoleConfig:
        policy = task.framework_attempt_completion_policy
        return dataclasses.replace(
            self.role(("taskRoles", index), task.name, task.task_number, task),
            min_failed=policy.min_failed_task_count,
            min_succeeded=policy.min_succeed_task_count,
        )


FILE = FrameworkControllerFile
