"""The experiment file for Kubeflow, and for plain Jobs of Kubernetes: its keys, its checks, and the settings of its jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from nni_manager.config.diagnostics import ConfigInvalid, KeyPath, ref
from nni_manager.config.dialect import SERVICE
from nni_manager.config.document import read_yaml
from nni_manager.config.schema import line, mapping, must_be, whole
from nni_manager.config.translation import Translation
from nni_manager.training_services.kubernetes.experiment_file import (
    EXAMPLE_OF_NFS,
    LABEL,
    POD,
    KubernetesExperimentKeys,
    KubernetesFile,
    KubernetesServiceKeys,
    PodKeys,
)
from nni_manager.training_services.kubernetes.pod_template import read_pod_template
from nni_manager.training_services.kubernetes.section import KubernetesConfig

_REPLICAS = ("worker", "ps", "master")
_REPLICA = "{replicas: 1, " + POD
# A ClusterTrainingRuntime, or a TrainingRuntime in the namespace of the jobs.
_RUNTIME = r"^(TrainingRuntime/)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
_DEFAULT_RUNTIME = "torch-distributed"
_KUBEFLOW_V1 = ("v1", "v1beta2", "v1beta1", "v1alpha2")


class _Operator(NamedTuple):
    """The roles of an operator's jobs, the first of which is required, and its API versions, newest first."""

    roles: tuple[str, ...]
    versions: tuple[str, ...]


_OPERATORS = {
    "tf-operator": _Operator(("worker", "ps"), _KUBEFLOW_V1),
    "pytorch-operator": _Operator(("master", "worker"), _KUBEFLOW_V1),
    "trainjob": _Operator(("worker",), ("v1alpha1",)),
    "job": _Operator(("worker",), ("v1",)),
}
_ALL_VERSIONS = frozenset(version for each in _OPERATORS.values() for version in each.versions)


class ReplicaKeys(PodKeys):
    """`worker`, `ps` or `master`: the identical tasks of one role of a job."""

    python_name = "KubeflowRoleConfig"
    # fmt: off
    replicas: int = whole(1, 10000, "1", about="the number of tasks")
    code_directory: Any = must_be("a folder", ".", None, kind="folder", v1="",
        about="the folder with the training code, if all roles have the same and `trialCodeDirectory` is not set")
    # fmt: on


class KubeflowServiceKeys(KubernetesServiceKeys):
    """The training service whose trials are jobs of a Kubeflow operator, or plain Jobs.

    The reader checks which roles the operator has.
    """

    python_name = "KubeflowConfig"
    # fmt: off
    operator: Literal["tf-operator", "pytorch-operator", "trainjob", "job"] = must_be(
        "one of tf-operator, pytorch-operator, trainjob, job", "pytorch-operator",
        about="the [operator](kubeflow.md#operators) of the jobs")
    api_version: Literal["v1", "v1beta2", "v1beta1", "v1alpha2", "v1alpha1"] | None = must_be(
        "one of v1, v1beta2, v1beta1, v1alpha2, v1alpha1", "v1", None, unset="the newest of the operator",
        about="the version of the resources: for TFJobs and PyTorchJobs `v1`, `v1beta2`, `v1beta1` or `v1alpha2`, for "
        "TrainJobs `v1alpha1`, for Jobs `v1`")
    runtime: str | None = must_be("the name of a training runtime", _DEFAULT_RUNTIME, None, pattern=_RUNTIME, max_length=253,
        since="0.6", unset=f"`{_DEFAULT_RUNTIME}`",
        about="of `trainjob`: a ClusterTrainingRuntime, or `TrainingRuntime/NAME` for one of the jobs' namespace")
    queue_name: str | None = must_be("the name of a queue of Kueue", "team-a", None, pattern=LABEL, since="0.6",
        about="a LocalQueue of [Kueue](https://kueue.sigs.k8s.io/) in the namespace, in which all jobs wait")
    pod_template: str | None = line("the path of a pod template", "pod.yml", None, kind="file", since="0.7",
        about="[what each pod has besides](kubeflow.md#pod-templates), such as tolerations, node selectors and volumes")
    worker: ReplicaKeys | None = mapping(_REPLICA, None, v1="/trial.worker", about="the role `worker`")
    ps: ReplicaKeys | None = mapping(_REPLICA, None, v1="/trial.ps", about="the role `ps`")
    master: ReplicaKeys | None = mapping(_REPLICA, None, v1="/trial.master", about="the role `master`")
    # fmt: on


class KubeflowExperimentKeys(KubernetesExperimentKeys):
    """The experiment file for Kubeflow."""

    # fmt: off
    training_service: KubeflowServiceKeys = mapping("{platform: kubeflow}", v1="kubeflowConfig",
        about="the cluster and its jobs")
    # fmt: on


class KubeflowFile(KubernetesFile):
    """The part of Kubeflow."""

    schema = KubeflowExperimentKeys
    examples_v1: ClassVar = {
        **KubernetesFile.examples_v1,
        "kubeflowConfig": f"operator: pytorch-operator, apiVersion: v1, storage: nfs, nfs: {{{EXAMPLE_OF_NFS}}}",
    }
    example_of_trial = ("worker", _REPLICA)
    hints_v1: ClassVar = {
        **KubernetesFile.hints_v1,
        "trial.taskRoles": "it applies to trainingServicePlatform: frameworkcontroller; write worker, ps and master",
    }
    hints_v1_elsewhere: ClassVar = dict.fromkeys(
        (f"trial.{role}" for role in _REPLICAS),
        "it applies to trainingServicePlatform: kubeflow; remove it, and write command directly into trial",
    )
    implicit = frozenset(
        {(*SERVICE, "dockerImage")}
        | {(*SERVICE, role, key) for role in _REPLICAS for key in ("dockerImage", "gpuNumber")}
    )

    _template: str | None = None

    @classmethod
    def roles_in(cls, service: Mapping[str, Any]) -> dict[KeyPath, Any]:
        """The roles by their names."""
        return {(name,): service[name] for name in _REPLICAS if name in service}

    @classmethod
    def apply_defaults(cls, file: Translation, service: dict[str, Any]) -> None:
        """Set the numbers of GPUs, and the defaults of all operators."""
        for role in cls.roles_in(service).values():
            if isinstance(role, dict):
                role.setdefault("gpuNumber", 0)
        super().apply_defaults(file, service)

    def check(self) -> None:
        """Check the keys, and the pod template if the file names one."""
        super().check()
        key_path = (*SERVICE, "podTemplate")
        if self.service.get("podTemplate") is not None and self.service.get("operator") == "trainjob":
            why = "the pods of a TrainJob are those of its runtime; write it into the runtime, and remove it here"
            self.reading.refuse(key_path, why)
        template = self.paths.get(key_path)
        if template is None or not template.is_file():
            return
        try:
            self._template = read_pod_template(read_yaml(template))
        except ConfigInvalid as error:
            self.reading.diagnostics += error.diagnostics

    def paths_in_file(self) -> Iterator[tuple[KeyPath, Any]]:
        """Those of roles and storage, and the pod template."""
        yield from super().paths_in_file()
        yield (*SERVICE, "podTemplate"), self.service.get("podTemplate")

    def check_roles(self) -> None:
        """Refuse what the operator lacks, and the lack of what it requires."""
        service, refuse = self.service, self.reading.refuse
        operator = service.get("operator")
        if not isinstance(operator, str) or operator not in _OPERATORS:
            return
        roles, versions = _OPERATORS[operator]
        version = service.get("apiVersion")
        if isinstance(version, str) and version in _ALL_VERSIONS and version not in versions:
            key_path = (*SERVICE, "apiVersion")
            why = f"{operator} supports {', '.join(versions)}, not {version}; write {ref(key_path, versions[0])}"
            refuse(key_path, why)
        if operator != "trainjob" and service.get("runtime") is not None:
            why = "only «trainingService.operator: trainjob» uses it; remove it, or change the operator"
            refuse((*SERVICE, "runtime"), why)
        if service.get(roles[0]) is None:
            key_path = (*SERVICE, roles[0])
            refuse(
                key_path, f"{operator} requires this role; write e.g. {ref(key_path, _REPLICA)}", "do without"
            )
        for role in _REPLICAS:
            if service.get(role) is not None and role not in roles:
                why = f"{operator} supports only {' and '.join(roles)}; remove it, or change the operator"
                refuse((*SERVICE, role), why)
        master = service.get("master") if "master" in roles else None
        if isinstance(master, Mapping) and isinstance(count := master.get("replicas"), int) and count > 1:
            example = "«trainingService.master.replicas: 1»"
            why = f"a PyTorchJob has one master, not {count}; write {example}, and increase the replicas of worker"
            refuse((*SERVICE, "master", "replicas"), why)

    def cluster(self, file: KubeflowExperimentKeys) -> KubernetesConfig:
        """The settings of the operator's jobs."""
        service = file.training_service
        replicas: dict[str, ReplicaKeys | None] = {name: getattr(service, name) for name in _REPLICAS}
        return self.same_named(
            KubernetesConfig,
            service,
            storage=self.storage_of_jobs(service.storage),
            roles=tuple(
                self.role((name,), name, pod.replicas, pod)
                for name, pod in replicas.items()
                if pod is not None
            ),
            api_version=service.api_version or _OPERATORS[service.operator].versions[0],
            runtime=(service.runtime or _DEFAULT_RUNTIME) if service.operator == "trainjob" else None,
            queue=service.queue_name,
            template=self.paths.get((*SERVICE, "podTemplate")),
            template_text=self._template,
        )


FILE = KubeflowFile
