"""The configuration of an experiment in Python: NNI's classes, with the keys of the second schema of experiment files as fields.

These classes define names and types. The tables of `nni_manager.config` check the values, and docs/experiment-file.md
describes each key. A field that is None is not set; it has the default of the experiment file.

Source: NNI v2.10 and v3.0, nni.experiment.config.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field, make_dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from pydantic.alias_generators import to_snake

from nni_manager.config.convert import read_keys
from nni_manager.config.diagnostics import ConfigInvalid, Diagnostic, folded, leaves
from nni_manager.config.dialect import SERVICE
from nni_manager.config.keys import keys_on
from nni_manager.config.model import ExperimentSpec as CheckedConfig
from nni_manager.config.platforms import BY_V1, NAMES, PLATFORMS, UNSUPPORTED
from nni_manager.config.python_document import read_python
from nni_manager.errors import UserError
from nni_manager.experiment.aliases import AliasHint, ConfigBase

# The folder of the training code: of all trials, of a training service, or of a role.
_OF_CODE = ("trialcodedirectory", "codedirectory")
_ALGORITHMS = ("tuner", "assessor", "advisor")
PathOrText: TypeAlias = str | PathLike[str]
"""A path; a relative path is relative to the current directory."""
Seconds: TypeAlias = str | int
"""A duration such as "90m" or "0.5h", or a number of seconds."""
GpuIndices: TypeAlias = list[int] | int | str
"""GPU indices: [0, 1], 0, or "0,1"."""


class PlatformUnknown(UserError):
    """cannot run an experiment on this platform; use one of local, openpai, frameworkcontroller, kubeflow"""


@dataclass(kw_only=True)
class AlgorithmConfig(ConfigBase):
    """A tuner, an assessor or an advisor: a built-in one by `name`, or your own class by `class_name` (module and class).

    >>> AlgorithmConfig(name="TPE", class_args={"optimize_mode": "maximize"}).document()
    {'name': 'TPE', 'classArgs': {'optimize_mode': 'maximize'}}
    """

    name: str | None = None
    class_args: dict[str, Any] = field(default_factory=dict)
    class_name: str | None = None
    code_directory: PathOrText | None = None
    call_timeout: Seconds | None = None
    include_intermediate_results: bool | None = None


@dataclass(kw_only=True)
class CustomAlgorithmConfig(AlgorithmConfig):
    """Your own tuner or assessor: `class_name` is module and class, in the folder `code_directory`."""

    code_directory: PathOrText | None = "."


@dataclass(kw_only=True)
class TrainingServiceConfig(ConfigBase):
    """The training service that runs trials. Trial fields set here take precedence over those of the experiment."""

    platform: str | None = None
    trial_command: str | None = None
    trial_code_directory: PathOrText | None = None
    trial_gpu_number: int | None = None
    nni_manager_ip: str | None = None
    reuse_mode: bool | None = None

    @classmethod
    def of_mapping(cls, fields: Mapping[str, Any]) -> TrainingServiceConfig:
        """The training service that a mapping with `platform` describes.

        Raises:
            PlatformUnknown: the platform is unknown.
        """
        return training_service_for(fields.get("platform"))(**fields)


@dataclass(kw_only=True)
class LocalConfig(TrainingServiceConfig):
    """Trials run on this machine."""

    platform: str | None = "local"
    gpu_indices: GpuIndices | None = None
    max_trial_number_per_gpu: int | None = None
    use_active_gpu: bool | None = None


@dataclass(kw_only=True)
class OpenpaiConfig(TrainingServiceConfig):
    """Trials are jobs on OpenPAI. `host` "local" is the built-in cluster on this machine."""

    platform: str | None = "openpai"
    host: str | None = None
    username: str | None = None
    token: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    trial_cpu_number: int | None = None
    trial_memory_size: str | int | None = None
    docker_image: str | None = None
    virtual_cluster: str | None = None
    storage_config_name: str | None = None
    local_storage_mount_point: PathOrText | None = None
    container_storage_mount_point: PathOrText | None = None
    openpai_config: dict[str, Any] | None = None
    openpai_config_file: PathOrText | None = None


@dataclass(kw_only=True)
class K8sStorageConfig(ConfigBase):
    """Shared storage of this machine and all pods. `storage_type` is nfs, azureStorage or pvc.

    `storage`, the name of `storage_type` in some of NNI's classes, is also accepted.
    """

    aliases: ClassVar[Mapping[str, str]] = {
        "storage": "storage_type",
        "keyvault": "key_vault_name",
        "keyvaultsecret": "key_vault_key",
    }
    storage_type: str | None = None
    server: str | None = None
    path: PathOrText | None = None
    claim_name: str | None = None
    azure_account: str | None = None
    azure_share: str | None = None
    key_vault_name: str | None = None
    key_vault_key: str | None = None
    upload_retry_count: int | None = None


@dataclass(kw_only=True)
class K8sNfsConfig(K8sStorageConfig):
    """An export of an NFS server: `server` and `path`."""

    storage_type: str | None = "nfs"


@dataclass(kw_only=True)
class K8sAzureStorageConfig(K8sStorageConfig):
    """An Azure file share: `azure_account` and `azure_share`. Its key is in a vault: `key_vault_name`, `key_vault_key`."""

    storage_type: str | None = "azureStorage"


@dataclass(kw_only=True)
class K8sPvcConfig(K8sStorageConfig):
    """A PersistentVolumeClaim: `claim_name`, and `path`, the mount point of its volume on this machine."""

    storage_type: str | None = "pvc"


@dataclass(kw_only=True)
class _PodConfig(ConfigBase):
    """The settings of the tasks of one role."""

    command: str | None = None
    gpu_number: int | None = None
    cpu_number: int | None = None
    memory_size: str | int | None = None
    shared_memory_size: str | int | None = None
    docker_image: str | None = None
    private_registry_auth_path: PathOrText | None = None


@dataclass(kw_only=True)
class FrameworkAttemptCompletionPolicy(ConfigBase):
    """The numbers of tasks of a role that end the job; -1 disables a rule."""

    aliases: ClassVar[Mapping[str, str]] = {"minsucceededtaskcount": "min_succeed_task_count"}
    min_failed_task_count: int | None = None
    min_succeed_task_count: int | None = None


@dataclass(kw_only=True)
class FrameworkControllerRoleConfig(_PodConfig):
    """One role of a job on FrameworkController: `task_number` tasks that run `command`."""

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {
        "framework_attempt_completion_policy": FrameworkAttemptCompletionPolicy
    }
    name: str | None = None
    task_number: int | None = None
    framework_attempt_completion_policy: FrameworkAttemptCompletionPolicy = field(
        default_factory=FrameworkAttemptCompletionPolicy
    )


@dataclass(kw_only=True)
class FrameworkControllerConfig(TrainingServiceConfig):
    """Trials are Frameworks on Kubernetes."""

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {
        "storage": K8sStorageConfig,
        "task_roles": FrameworkControllerRoleConfig,
    }
    platform: str | None = "frameworkcontroller"
    storage: K8sStorageConfig = field(default_factory=K8sStorageConfig)
    service_account_name: str | None = None
    namespace: str | None = None
    task_roles: list[FrameworkControllerRoleConfig] = field(default_factory=list)
    config_path: PathOrText | None = None


@dataclass(kw_only=True)
class KubeflowRoleConfig(_PodConfig):
    """One role of a job on Kubeflow: `replicas` tasks that run `command`."""

    replicas: int | None = None
    code_directory: PathOrText | None = None


@dataclass(kw_only=True)
class KubeflowConfig(TrainingServiceConfig):
    """Trials are jobs of a Kubeflow operator."""

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {
        "storage": K8sStorageConfig,
        **dict.fromkeys(("worker", "ps", "master"), KubeflowRoleConfig),
    }
    platform: str | None = "kubeflow"
    operator: str | None = None
    api_version: str | None = None
    runtime: str | None = None
    queue_name: str | None = None
    storage: K8sStorageConfig = field(default_factory=K8sStorageConfig)
    namespace: str | None = None
    worker: KubeflowRoleConfig | None = None
    ps: KubeflowRoleConfig | None = None
    master: KubeflowRoleConfig | None = None


_CLASSES = (LocalConfig, OpenpaiConfig, FrameworkControllerConfig, KubeflowConfig)


def training_service_for(platform: Any) -> type[TrainingServiceConfig]:
    """The class of the training service for a platform.

    Raises:
        PlatformUnknown: the platform is unknown or not supported.
    """
    if isinstance(platform, str) and platform in PLATFORMS:
        return next((each for each in _CLASSES if each.platform == platform), None) or _class_for(platform)
    known = ", ".join(PLATFORMS)
    why = f"there is no such platform; use one of {known}"
    if isinstance(platform, list):
        why = f"an experiment runs on one platform; use one of {known}"
    elif platform in BY_V1:
        why = f'the name of {BY_V1[platform].title} is "{BY_V1[platform].name}"; use that'
    elif platform in UNSUPPORTED:
        why = f"{UNSUPPORTED[platform].reason.partition(';')[0]}; use one of {known}"
    raise PlatformUnknown(f"cannot run an experiment on {platform!r}: {why}")


@cache
def _class_for(platform: str) -> type[TrainingServiceConfig]:
    """The class for a platform that NNI does not have: its fields are the keys of the platform, without types."""
    inherited = TrainingServiceConfig.field_names()
    keys = {key.path[1] for key in keys_on(platform) if key.path[:1] == SERVICE and len(key.path) > 1}
    names = [name for name in map(to_snake, sorted(keys)) if name not in inherited]
    return make_dataclass(
        f"{platform.title()}Config",
        [
            ("platform", "str | None", field(default=platform)),
            *((name, Any, field(default=None)) for name in names),
        ],
        bases=(TrainingServiceConfig,),
        kw_only=True,
    )


@dataclass
class ExperimentConfig(ConfigBase):
    """A whole experiment. `ExperimentConfig("local")` runs on this machine; all other fields are unset.

    >>> config = ExperimentConfig("local")
    >>> config.tuner.name = "Random"
    >>> config.trial_concurrency = 2
    >>> config.document()
    {'trialConcurrency': 2, 'tuner': {'name': 'Random'}, 'trainingService': {'platform': 'local'}}
    """

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {
        **dict.fromkeys(("tuner", "assessor", "advisor"), AlgorithmConfig),
        "training_service": TrainingServiceConfig,
    }
    answers: ClassVar[Mapping[str, str]] = {
        "name": "did you mean experiment_name?",
        "author_name": "an experiment in Python has no author; remove it",
    }
    training_service_platform: InitVar[str | None] = None
    _: KW_ONLY
    experiment_name: str | None = None
    experiment_type: str | None = None
    description: str | None = None
    search_space: Mapping[str, Any] | None = None
    search_space_file: PathOrText | None = None
    trial_command: str | None = None
    trial_code_directory: PathOrText | None = None
    trial_concurrency: int | None = None
    trial_gpu_number: int | None = None
    max_experiment_duration: Seconds | None = None
    max_trial_number: int | None = None
    max_trial_duration: Seconds | None = None
    max_trial_retry: int | None = None
    max_preemptions: int | None = None
    fail_fast: bool | int | None = None
    initial_trials: list[dict[str, Any]] | None = None
    objectives: list[dict[str, Any]] | None = None
    constraints: list[dict[str, Any]] | None = None
    nni_manager_ip: str | None = None
    use_annotation: bool | None = None
    debug: bool | None = None
    log_level: str | None = None
    log_collection: str | None = None
    version_check: bool | None = None
    experiment_working_directory: PathOrText | None = None
    tuner_gpu_indices: GpuIndices | None = None
    tuner: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    assessor: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    advisor: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    training_service: TrainingServiceConfig = field(default_factory=TrainingServiceConfig)
    shared_storage: dict[str, Any] | None = None
    reuse_idle_timeout: Seconds | None = None
    max_trials_per_job: int | None = None
    warm_imports: list[str] | None = None

    def __post_init__(self, training_service_platform: str | None) -> None:
        """Create the training service of the platform.

        Raises:
            PlatformUnknown: the platform is unknown.
        """
        if training_service_platform is not None:
            self.training_service = training_service_for(training_service_platform)()

    @classmethod
    def load(cls, path: PathOrText) -> ExperimentConfig:
        """The configuration in an experiment file, in either of NNI's schemas. Relative paths are those of the file.

        Raises:
            ConfigInvalid: the file cannot be read, or has errors in NNI's first schema.
            NoSuchField: a key of the second schema is unknown.
        """
        file = Path(path)
        keys = read_keys(file)
        places = (place for place, _ in leaves(keys) if folded(str(place[0])) not in _ALGORITHMS)
        if not any(isinstance(key, str) and folded(key) in _OF_CODE for place in places for key in place):
            keys["trialCodeDirectory"] = str(file.absolute().parent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AliasHint)  # keys of files are in camelCase
            return cls(**keys)

    def canonical_copy(self) -> ExperimentConfig:
        """A copy with absolute paths, the search space in place of its file, and the defaults of top-level fields.

        Raises:
            ConfigInvalid: with every error.
        """
        checked, copied = self.checked(), copy.deepcopy(self)
        copied.search_space = None if checked.is_annotated else checked.search_space_raw
        copied.search_space_file = None
        copied.experiment_name = checked.experiment_name
        copied.trial_code_directory = str(checked.code_dir)
        copied.experiment_working_directory = str(checked.log_dir)
        copied.use_annotation, copied.debug = checked.is_annotated, checked.debug
        copied.log_level = checked.log_level
        return copied

    def json(self) -> dict[str, Any]:
        """The canonical copy as a document of the second schema, for JSON.

        Raises:
            ConfigInvalid: with every error.
        """
        return self.canonical_copy().document()

    def checked(self) -> CheckedConfig:
        """The checked experiment, ready to run.

        Raises:
            ConfigInvalid: with every error; each names its field.
        """
        try:
            described = self.document()
        except RecursionError as error:
            message = "cannot use config: it contains itself; remove the circular reference"
            raise ConfigInvalid([Diagnostic("", None, None, "config", message)]) from error
        return read_python(described, _name_of_program())

    def validate(self) -> None:
        """Check the configuration without starting anything.

        Raises:
            ConfigInvalid: with every error.
        """
        self.checked()


def _name_of_program() -> str:
    """The default experiment name: that of the program, or "experiment" in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file).stem if file else "experiment"


class UnsupportedName(UserError, ImportError):
    """cannot import this name of nni.experiment: it configures an unsupported platform or storage"""


_PLATFORMS = f"this platform is not supported; use {NAMES}"
_UNSUPPORTED = dict.fromkeys(
    ("RemoteConfig", "RemoteMachineConfig", "AmlConfig", "DlcConfig", "AdlConfig", "PaiYarnConfig"),
    _PLATFORMS,
) | dict.fromkeys(
    ("SharedStorageConfig", "NfsConfig", "AzureBlobConfig", "AzureStorageConfig"),
    "shared storage belongs to the training service; on Kubernetes use K8sNfsConfig, K8sPvcConfig or K8sAzureStorageConfig",
)


def unsupported(module: str, name: str) -> Any:
    """Refuse a name that a module of the Python API lacks.

    Raises:
        UnsupportedName: NNI has it, for a platform or a storage that is not supported.
        AttributeError: NNI has it neither.
    """
    if name in _UNSUPPORTED:
        raise UnsupportedName(f"cannot import {name}: {_UNSUPPORTED[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    return unsupported(__name__, name)
