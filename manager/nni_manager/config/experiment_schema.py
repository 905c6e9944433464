"""The schema of experiment files, in the terms of NNI's second schema. `v1` names the keys of the first (`dialect.py`).

Source: NNI v2.10, nni/experiment/config; NNI v1.9 and v2.0, ExperimentConfig reference and nnictl's schema.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema, field_validator, model_validator

from nni_manager.config.algorithms import reason_against
from nni_manager.config.diagnostics import shown
from nni_manager.config.model import FAIL_FAST
from nni_manager.config.schema import (
    Schema,
    flag,
    is_placeholder,
    line,
    mapping,
    must_be,
    refusal,
    text,
    whole,
)
from nni_manager.config.units import duration_s, megabytes
from nni_manager.domain.objectives import OptimizeMode

_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I | re.A
)


def _gpu_indices(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(each, int | str) and not isinstance(each, bool) for each in listed):
        raise ValueError(value)
    parts = [part.strip() for each in listed for part in str(each).split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len({*map(int, parts)}) != len(parts):
        raise ValueError(value)
    return tuple(int(part) for part in parts)


GpuIndices = Annotated[
    tuple[int, ...] | None,
    PlainValidator(_gpu_indices),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*\d+\s*(,\s*\d+\s*)*$"},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "uniqueItems": True},
                {"type": "null"},
            ]
        }
    ),
]
Duration = Annotated[
    float | None,
    PlainValidator(duration_s),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": r"^[1-9][0-9]{0,8}[smhd]$"}, {"type": "null"}]}),
]
_MOST_FAILURES = 99_999


def _failures(value: Any) -> int:
    """The number of failures of `failFast`; 0: it is off."""
    if isinstance(value, bool):
        return FAIL_FAST if value else 0
    if not isinstance(value, int) or not 1 <= value <= _MOST_FAILURES:
        raise ValueError(value)
    return value


FailFast = Annotated[
    int,
    PlainValidator(_failures),
    WithJsonSchema(
        {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1, "maximum": _MOST_FAILURES}]}
    ),
]
_MAX_MB = 99_999_999


def _size(least_mb: int, value: Any) -> int:
    size_mb = megabytes(value)
    if not least_mb <= size_mb <= _MAX_MB:
        raise ValueError(value)
    return size_mb


def _size_schema(least_mb: int) -> WithJsonSchema:
    pattern = r"^\s*[0-9]{1,9}(\.[0-9]{1,6})?\s*[TGMKtgmk]?([Ii]?[Bb])?\s*$"
    number = {"type": "integer", "minimum": least_mb, "maximum": _MAX_MB}
    return WithJsonSchema({"anyOf": [number, {"type": "string", "pattern": pattern}]})


Size = Annotated[int, PlainValidator(partial(_size, 1)), _size_schema(1)]
SizeFrom100 = Annotated[int, PlainValidator(partial(_size, 100)), _size_schema(100)]
_SIZE_FROM_100 = "a whole number of MB, at least 100, or a size such as 8gb"

# RFC 1123 label: Kubernetes requires it of names.
_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
# A ClusterTrainingRuntime, or a TrainingRuntime in the namespace of the jobs.
_RUNTIME = r"^(TrainingRuntime/)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
DEFAULT_RUNTIME = "torch-distributed"
_AZURE_NAME = r"^[0-9a-zA-Z-]{3,63}$"
_VAULT_NAME = r"^[0-9a-zA-Z-]{1,127}$"
_POD = 'command: "python3 train.py", gpuNumber: 0, cpuNumber: 1, memorySize: 8192, dockerImage: ...}'
ROLE = "{name: worker, taskNumber: 1, " + _POD
REPLICA = "{replicas: 1, " + _POD
_IMAGE = "registry.example.com/me/train:1"
_GPUS = "GPU numbers separated by commas"


def _duration(example: str, **rules: Any) -> Any:
    return must_be("a whole number and one of s, m, h, d", example, None, **rules)


def _available(kind: Literal["tuner", "advisor", "assessor"]) -> BeforeValidator:
    """Refuses the name of an algorithm that is not available."""

    def checked(name: Any) -> Any:
        if is_placeholder(name):
            raise ValueError(name)
        if name is not None and (reason := reason_against(kind, name)) is not None:
            raise refusal(reason)
        return name

    return BeforeValidator(checked)


class _AlgorithmKeys(Schema):
    """A built-in algorithm by name, or the user's own class. The reader reports missing keys of either."""

    code_directory: str | None = text("a folder", ".", None, v1="codeDir")
    class_file_name: str | None = must_be(
        "the name of a Python file", "my_tuner.py", None, pattern=r"\.py$", only_v1=True
    )
    class_name: str | None = must_be("the name of a class", "MyTuner", None, pattern=r"^\w+(\.\w+)*$")
    # Checked by the schema of the algorithm once the name is known.
    class_args: dict[str, Any] | None = mapping("{optimize_mode: maximize}", None)
    call_timeout: Duration = _duration("10m")


class TunerKeys(_AlgorithmKeys):
    """`tuner`."""

    name: Annotated[str | None, _available("tuner")] = must_be(
        "the name of a tuner", "TPE", None, v1="builtinTunerName"
    )
    include_intermediate_results: bool = flag("false", False)


class AdvisorKeys(_AlgorithmKeys):
    """`advisor`: NNI's name for an algorithm that replaces both tuner and assessor."""

    name: Annotated[str | None, _available("advisor")] = must_be(
        "the name of an advisor", "Hyperband", None, v1="builtinAdvisorName"
    )
    gpu_indices: GpuIndices = must_be(_GPUS, '"0,1"', None, only_v1=True)


class AssessorKeys(_AlgorithmKeys):
    """`assessor`."""

    name: Annotated[str | None, _available("assessor")] = must_be(
        "the name of an assessor", "Medianstop", None, v1="builtinAssessorName"
    )


class ObjectiveKeys(Schema):
    """One of `objectives`: a metric of the final result."""

    metric: str = line("the name of a metric", "accuracy")
    mode: OptimizeMode = must_be("maximize or minimize", "maximize")


class ConstraintKeys(Schema):
    """One of `constraints`: bounds of a metric of the final result."""

    metric: str = line("the name of a metric", "size_mb")
    at_most: float | None = must_be("a number", "50", None, allow_inf_nan=False)
    at_least: float | None = must_be("a number", "1", None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _is_satisfiable(self) -> ConstraintKeys:
        if self.at_most is None and self.at_least is None:
            raise refusal(
                f"cannot use the constraint of {shown(self.metric)}: it has no bound; write at_most, at_least or both"
            )
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            raise refusal(
                f"cannot use the constraint of {shown(self.metric)}: at_least {self.at_least:g} is above at_most "
                f"{self.at_most:g}; swap them"
            )
        return self


class _PodKeys(Schema):
    """The container settings of one role."""

    command: str = text("a shell command", "python3 train.py")
    gpu_number: int = whole(0, 99999, "0", v1="gpuNum")
    cpu_number: int = whole(1, 99999, "1", v1="cpuNum")
    memory_size: Size = must_be("a whole number of MB, or a size such as 8gb", "8192", v1="memoryMB")
    docker_image: str = line("the name of an image", _IMAGE, v1="image")
    private_registry_auth_path: str | None = line(
        "the path of a Docker login file", "~/.docker/config.json", None
    )
    shared_memory_size: Size | None = must_be(
        "a whole number of MB, or a size such as 1gb", "1024", None, v1="shmMB"
    )


class CompletionPolicyKeys(Schema):
    """`frameworkAttemptCompletionPolicy` of a task role: the number of tasks that end the job; -1 disables the rule."""

    min_failed_task_count: int = must_be("-1 or a whole number of at least 1", "1", ge=-1, le=99999)
    min_succeed_task_count: int = must_be(
        "-1 or a whole number of at least 1", "-1", ge=-1, le=99999, v1="minSucceededTaskCount"
    )


class TaskRoleKeys(_PodKeys):
    """An item of `taskRoles`."""

    name: str = must_be(
        "a name of at most 63 lower-case letters and digits", "worker", pattern=r"^[a-z0-9]{1,63}$"
    )
    task_number: int = whole(1, 10000, "1", v1="taskNum")
    framework_attempt_completion_policy: CompletionPolicyKeys = mapping(
        "{minFailedTaskCount: 1, minSucceedTaskCount: -1}"
    )


class ReplicaKeys(_PodKeys):
    """`worker`, `ps` and `master`. `codeDirectory` has no effect unless all roles have the same."""

    replicas: int = whole(1, 10000, "1")
    code_directory: Any = must_be("a folder", ".", None, v1="")


class StorageKeys(Schema):
    """The shared storage for code and output of trials. This schema accepts the keys of
    all storage types; `config/kubernetes.py` and `config/v2.py` check which belong to each.
    """

    storage_type: Literal["nfs", "azureStorage", "pvc"] | None = must_be(
        "one of nfs, azureStorage, pvc", "nfs", None, v1="storage"
    )
    server: str | None = line("the address of an NFS server", "10.10.10.10", None, v1="nfs.server")
    path: str | None = line(
        "the path that the server exports, or the mount point of the claim's volume on this machine",
        "/var/nfs/nni",
        None,
        v1="nfs.path pvc.path",
    )
    claim_name: str | None = must_be("the name of a claim", "nni", None, pattern=_LABEL, v1="pvc.name")
    azure_account: str | None = must_be(
        "the name of a storage account",
        "mystorage",
        None,
        pattern=r"^[0-9a-zA-Z-]{3,31}$",
        v1="azureStorage.accountName",
    )
    azure_share: str | None = must_be(
        "the name of a file share", "nni", None, pattern=_AZURE_NAME, v1="azureStorage.azureShare"
    )
    key_vault_name: str | None = must_be(
        "the name of a vault", "my-vault", None, pattern=_VAULT_NAME, v1="keyVault.vaultName"
    )
    key_vault_key: str | None = must_be(
        "the name of a secret in the vault", "storage-key", None, pattern=_VAULT_NAME, v1="keyVault.name"
    )
    upload_retry_count: int | None = whole(1, 99999, "3", None)


class _ServiceKeys(Schema):
    """The keys of `trainingService` that all platforms share."""

    platform: str = must_be("a platform", "local", v1="/trainingServicePlatform")
    reuse_mode: bool = flag("true", False, v1="reuse")


class LocalServiceKeys(_ServiceKeys):
    """`trainingService` of this machine."""

    gpu_indices: GpuIndices = must_be(_GPUS, '"0,1"', None)
    max_trial_number_per_gpu: int = whole(1, 99999, "1", 1, v1="maxTrialNumPerGpu")
    use_active_gpu: bool = flag("false", False)


class OpenpaiServiceKeys(_ServiceKeys):
    """`trainingService` of OpenPAI. The reader checks which keys are required, with and without a job file.

    The first schema's GPU, CPU and memory numbers in `paiConfig` are defaults for those of `trial`.
    """

    host: str = must_be(
        "the host of OpenPAI, or local for the built-in cluster on this machine",
        "https://openpai.example.com",
        pattern=r"^\S+$",
    )
    username: str | None = line("the name of your account there", "ada", None, v1="userName")
    token: str | None = must_be(
        "a token from your OpenPAI profile page, without blanks",
        "eyJhbGciOi...",
        None,
        pattern=r"^\S+$",
        repr=False,
    )
    password: str | None = text("your password there", "'...'", None, repr=False, v1="passWord")
    trial_cpu_number: int | None = whole(1, 99999, "1", None, v1="/trial.cpuNum")
    trial_memory_size: SizeFrom100 | None = must_be(_SIZE_FROM_100, "8192", None, v1="/trial.memoryMB")
    docker_image: str | None = line("the name of an image", _IMAGE, None, v1="/trial.image")
    virtual_cluster: str | None = line(
        "the name of a virtual cluster", "default", None, v1="/trial.virtualCluster"
    )
    local_storage_mount_point: str = line(
        "a folder of this machine", "/local/mnt", v1="/trial.nniManagerNFSMountPath"
    )
    container_storage_mount_point: str = line(
        "an absolute path in the container", "/mnt/confignfs-data", v1="/trial.containerNFSMountPath"
    )
    storage_config_name: str | None = line(
        "the name of a storage of OpenPAI", "confignfs-data", None, v1="/trial.paiStorageConfigName"
    )
    openpai_config_file: str | None = line(
        "the path of an OpenPAI job file", "job.yml", None, v1="/trial.paiConfigPath"
    )
    gpu_num: int | None = whole(0, 99999, "1", None, only_v1=True)
    cpu_num: int | None = whole(1, 99999, "1", None, only_v1=True)
    memory_mb: SizeFrom100 | None = must_be(_SIZE_FROM_100, "8192", None, alias="memoryMB", only_v1=True)
    max_trial_num_per_gpu: int = whole(1, 99999, "1", 1, only_v1=True)
    use_active_gpu: bool = flag("false", False, only_v1=True)

    @field_validator("host")
    @classmethod
    def _has_a_name(cls, host: str) -> str:
        name = urlsplit(host if "://" in host else f"https://{host}").hostname or ""
        if ":" not in name and not all(name.removesuffix(".").split(".")):  # a name, or an IPv6 address
            raise ValueError(host)
        return host

    @field_validator("container_storage_mount_point")
    @classmethod
    def _is_plain(cls, path: str) -> str:
        # OpenPAI would expand a `<%` tag.
        if not path.startswith("/") or "<%" in path or not path.isprintable():
            raise ValueError(path)
        return path


class _KubernetesServiceKeys(_ServiceKeys):
    storage: StorageKeys | None = mapping(
        "{storageType: nfs, server: 10.10.10.10, path: /var/nfs/nni}", None, v1="."
    )
    namespace: str | None = must_be("the name of a namespace", "default", None, pattern=_LABEL)


class FrameworkControllerServiceKeys(_KubernetesServiceKeys):
    """`trainingService` of FrameworkController."""

    service_account_name: str | None = line("the name of a service account", "frameworkbarrier", None)
    task_roles: list[TaskRoleKeys] | None = text("a list of roles", f"[{ROLE}]", None, v1="/trial.taskRoles")
    config_path: str | None = line("the path of a Framework template", "framework.yml", None)


class KubeflowServiceKeys(_KubernetesServiceKeys):
    """`trainingService` of Kubeflow. The reader checks which roles the operator has."""

    operator: Literal["tf-operator", "pytorch-operator", "trainjob", "job"] = must_be(
        "one of tf-operator, pytorch-operator, trainjob, job", "pytorch-operator"
    )
    api_version: Literal["v1", "v1beta2", "v1beta1", "v1alpha2", "v1alpha1"] | None = must_be(
        "one of v1, v1beta2, v1beta1, v1alpha2, v1alpha1", "v1", None
    )
    runtime: str | None = must_be(
        "the name of a training runtime", DEFAULT_RUNTIME, None, pattern=_RUNTIME, max_length=253
    )
    queue_name: str | None = must_be("the name of a queue of Kueue", "team-a", None, pattern=_LABEL)
    worker: ReplicaKeys | None = mapping(REPLICA, None, v1="/trial.worker")
    ps: ReplicaKeys | None = mapping(REPLICA, None, v1="/trial.ps")
    master: ReplicaKeys | None = mapping(REPLICA, None, v1="/trial.master")


class ExperimentKeys(Schema):
    """The keys of a file that all platforms share. Paths are as written; durations are in seconds."""

    author_name: str = text("a name", "your name", only_v1=True)
    experiment_name: str = text("a name", "digits")
    experiment_type: Literal["hpo"] | None = must_be("hpo", "hpo", None, v1="")
    description: str | None = must_be("text", "what this searches for", None)
    trial_concurrency: int = whole(1, 99999, "2")
    max_experiment_duration: Duration = _duration("1h", v1="maxExecDuration")
    max_trial_number: int | None = whole(1, 99999, "20", None, v1="maxTrialNum")
    max_trial_duration: Duration = _duration("30m")
    max_trial_retry: int = whole(0, 99, "2", 0)
    # Each restart is on the cluster's word; the limit only ends a trial that a crowded cluster would never let finish.
    max_preemptions: int = whole(0, 9999, "100", 100)
    # NNI lacks this key: it starts every trial, however many fail.
    fail_fast: FailFast = must_be(f"false, or a whole number from 1 to {_MOST_FAILURES}", "10", FAIL_FAST)
    search_space_file: str | None = line(
        "the path of a JSON file", "search_space.json", None, v1="searchSpacePath"
    )
    # The reader checks the search space.
    search_space: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})] = must_be(
        "a mapping of hyper-parameters", "{}", None, v1=""
    )
    use_annotation: bool = flag("false", False)
    multi_phase: bool = flag("false", False, only_v1=True)
    multi_thread: bool = flag("false", False, only_v1=True)
    nni_manager_ip: str | None = must_be("an IPv4 address or a host name", "10.0.0.1", None)
    experiment_working_directory: str = text("a folder", "~/nni-experiments", "", v1="logDir")
    debug: bool = flag("false", False)
    version_check: bool | None = flag("true", None)
    log_level: Literal["trace", "debug", "info", "warning", "error", "fatal"] = must_be(
        "one of trace, debug, info, warning, error, fatal", "info", "info"
    )
    log_collection: Literal["none", "http"] = must_be("none or http", "none", "none")
    tuner: TunerKeys | None = mapping("{name: TPE, classArgs: {optimize_mode: maximize}}", None)
    # No effect: the tuners of this version do not use GPUs.
    tuner_gpu_indices: GpuIndices = must_be(_GPUS, '"0,1"', None, v1="tuner.gpuIndices")
    assessor: AssessorKeys | None = mapping("{name: Medianstop}", None)
    advisor: AdvisorKeys | None = mapping("{name: Hyperband}", None)
    # NNI lacks these three keys: a reused job always exits after 600 idle seconds.
    reuse_idle_timeout: Duration = _duration("10m")
    max_trials_per_job: int = whole(0, 999999999, "0", 0)
    warm_imports: list[str] = must_be("a list of module names", "[numpy, sklearn]", [])
    # NNI lacks this key, too: parameters that a person knows to be good.
    initial_trials: list[dict[str, Any]] = must_be("a list of parameters of trials", "[{lr: 0.1}]", [])
    # NNI lacks these keys, too: its trials have one number, `default`.
    objectives: list[ObjectiveKeys] = must_be(
        "a list of objectives", "[{metric: accuracy, mode: maximize}]", []
    )
    constraints: list[ConstraintKeys] = must_be(
        "a list of constraints", "[{metric: size_mb, at_most: 50}]", []
    )
    trial_code_directory: str = text("a folder", ".", v1="trial.codeDir")

    @field_validator("experiment_type", mode="before")
    @classmethod
    def _is_search(cls, kind: Any) -> Any:
        # NNI v3 writes hpo; the other value is architecture search.
        if kind not in ("hpo", None):
            raise refusal("architecture search is not supported; write hpo, or remove it")
        return kind

    @field_validator("nni_manager_ip")
    @classmethod
    def _is_reachable(cls, text: str | None) -> str | None:
        if text is None:
            return None
        # A last label of digits means an address, which must be valid; anything else must be a valid DNS name.
        if not _HOST_NAME.fullmatch(text) or text.rpartition(".")[2].isdigit():
            return str(ipaddress.IPv4Address(text))
        return text

    @field_validator("warm_imports")
    @classmethod
    def _are_modules(cls, names: list[str]) -> list[str]:
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise refusal(f"{shown(name)} is not the name of a module; write names as after `import`")
        return names

    @field_validator("multi_phase", "multi_thread")
    @classmethod
    def _is_off(cls, asked: bool) -> bool:
        if asked:
            raise refusal("true: NNI deprecated it, and it is not supported; remove the key")
        return asked


class LocalExperimentKeys(ExperimentKeys):
    """The experiment file for this machine."""

    trial_command: str = text("a shell command", "python3 train.py", v1="trial.command")
    trial_gpu_number: int | None = whole(0, 99999, "0", None, v1="trial.gpuNum")
    training_service: LocalServiceKeys = mapping("{platform: local}", v1="localConfig")


class OpenpaiExperimentKeys(ExperimentKeys):
    """The experiment file for OpenPAI."""

    trial_command: str | None = text("a shell command", "python3 train.py", None, v1="trial.command")
    trial_gpu_number: int | None = whole(0, 99999, "0", None, v1="trial.gpuNum")
    training_service: OpenpaiServiceKeys = mapping("{platform: openpai}", v1="paiConfig")


class _KubernetesExperimentKeys(ExperimentKeys):
    """The experiment file for Kubernetes. `trialCommand` and `trialGpuNumber` have no effect: each role has its own."""

    trial_command: Any = must_be("a shell command", "python3 train.py", None, v1="")
    trial_gpu_number: Any = must_be("a number of GPUs", "0", None, v1="")


class FrameworkControllerExperimentKeys(_KubernetesExperimentKeys):
    """The experiment file for FrameworkController."""

    training_service: FrameworkControllerServiceKeys = mapping(
        "{platform: frameworkcontroller}", v1="frameworkcontrollerConfig"
    )


class KubeflowExperimentKeys(_KubernetesExperimentKeys):
    """The experiment file for Kubeflow."""

    training_service: KubeflowServiceKeys = mapping("{platform: kubeflow}", v1="kubeflowConfig")


AnyExperimentKeys: TypeAlias = (
    LocalExperimentKeys | OpenpaiExperimentKeys | FrameworkControllerExperimentKeys | KubeflowExperimentKeys
)
EXPERIMENTS: Mapping[str, type[AnyExperimentKeys]] = {
    "local": LocalExperimentKeys,
    "openpai": OpenpaiExperimentKeys,
    "frameworkcontroller": FrameworkControllerExperimentKeys,
    "kubeflow": KubeflowExperimentKeys,
}
"""The schema of a whole file, by its platform."""
