"""The first schema of experiment files (NNI 1.x). `kubernetes.py` has the parts for Kubernetes.

Source: NNI v1.9 and v2.0, ExperimentConfig reference and nnictl's schema.
"""

from __future__ import annotations

import ipaddress
import math
import re
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, PlainValidator, ValidationInfo, WithJsonSchema, field_validator
from pydantic.alias_generators import to_camel

from nni_manager.config.algorithms import reason_against
from nni_manager.config.diagnostics import remedy_for_unknown, shown
from nni_manager.config.schema import Schema, flag, is_placeholder, mapping, must_be, refusal, whole

# The sections of each platform, besides `trial`.
SECTIONS: dict[str, tuple[str, ...]] = {
    "local": ("localConfig",),
    "pai": ("paiConfig",),
    "frameworkcontroller": ("frameworkcontrollerConfig",),
    "kubeflow": ("kubeflowConfig",),
    "remote": ("machineList", "remoteConfig"),
    "paiYarn": ("paiYarnConfig",),
    "dlts": ("dltsConfig",),
    "aml": ("amlConfig",),
    "adl": ("adlConfig",),
    "dlc": ("dlcConfig",),
    "hybrid": ("hybridConfig", "machineList", "remoteConfig", "paiConfig", "amlConfig", "localConfig"),
}
# The keys whose values are paths of this machine, relative to the file; `pvc.path` is another.
PATH_KEYS = (
    "searchSpacePath",
    "logDir",
    "codeDir",
    "nniManagerNFSMountPath",
    "paiConfigPath",
    "configPath",
    "privateRegistryAuthPath",
)
PLATFORMS = ("local", "pai", "frameworkcontroller", "kubeflow")
_CLUSTERS = "a cluster (pai, frameworkcontroller, kubeflow)"
# NNI's platforms that are not supported: the reason and the remedy.
UNSUPPORTED: dict[str, str] = {
    "remote": "trials are not started over SSH; run nnictl on that machine with trainingServicePlatform: local, or use "
    + _CLUSTERS,
    "paiYarn": "OpenPAI on YARN was discontinued with OpenPAI 0.14; use trainingServicePlatform: pai",
    "dlts": f"DLTS is no longer maintained; use {_CLUSTERS}",
    "aml": f"Azure Machine Learning is not supported; use {_CLUSTERS}, such as Kubernetes on Azure",
    "dlc": f"Alibaba's DLC is not supported; use {_CLUSTERS}, such as Kubernetes on Alibaba Cloud",
    "adl": "AdaptDL is no longer maintained; use trainingServicePlatform: kubeflow",
    "hybrid": f"an experiment runs on one platform; use local or {_CLUSTERS}",
}
SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I | re.A
)
_DURATION = re.compile(r"^([1-9][0-9]*)([smhd])$", re.ASCII)


def duration_s(text: Any) -> float | None:
    """The seconds of a duration such as `90m`; None for None.

    Raises:
        ValueError: the text is not a duration.
    """
    if text is None:
        return None
    match = _DURATION.match(text) if isinstance(text, str) else None
    if match is None or len(match[1]) > 9:  # nine digits of seconds are thirty years
        raise ValueError(text)
    return float(int(match[1]) * SECONDS_OF[match[2]])


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
_MAX_MB = 99_999_999
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([tgmk]?)(i?b)?", re.IGNORECASE)
_BYTES_OF = {"t": 1024**4, "g": 1024**3, "m": 1024**2, "k": 1024, "": 1}


def megabytes(value: Any) -> int:
    """A size in MB (1024-based), rounded up: 8192, "8192", "8gb", "4g", "1.5 GiB".

    Raises:
        ValueError: the value is not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(value)
    if not found[2] and not found[3]:
        return math.ceil(float(found[1]))
    return math.ceil(float(found[1]) * _BYTES_OF[found[2].lower()] / 1024**2)


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


OWN_ADVISOR = "custom advisors are not supported; write a custom tuner into tuner"


def _duration(example: str, **rules: Any) -> Any:
    return must_be("a whole number and one of s, m, h, d", example, None, **rules)


def _available(kind: Literal["tuner", "advisor", "assessor"]) -> BeforeValidator:
    """Refuses the name of an algorithm that is not available."""

    def checked(name: Any) -> Any:
        is_set = name is not None or kind == "advisor"
        if is_set and not is_placeholder(name) and (reason := reason_against(kind, name)) is not None:
            raise refusal(reason)
        return name

    return BeforeValidator(checked)


class _Algorithm(Schema):
    """A built-in algorithm by name, or the user's own class. The reader reports missing keys of either."""

    answers: ClassVar[dict[str, str]] = {
        "gpuNum": "only trials use GPUs; remove it, or write gpuIndices, which has no effect",
        "checkpointDir": "results are stored with the experiment; remove it",
    }
    code_dir: str | None = must_be("a folder", ".", None, min_length=1, v2="codeDirectory")
    class_file_name: str | None = must_be(
        "the name of a Python file", "my_tuner.py", None, pattern=r"\.py$", v2=""
    )
    class_name: str | None = must_be("the name of a class", "MyTuner", None, pattern=r"^\w+(\.\w+)*$")
    # Checked by the schema of the algorithm once the name is known.
    class_args: dict[str, Any] | None = mapping("{optimize_mode: maximize}", None)
    call_timeout: Duration = _duration("10m")


class TunerV1(_Algorithm):
    """`tuner`. `gpuIndices` has no effect: the tuners of this version do not use GPUs."""

    builtin_tuner_name: Annotated[str | None, _available("tuner")] = must_be(
        "the name of a tuner", "TPE", None, v2="name"
    )
    include_intermediate_results: bool = flag("false", False)
    gpu_indices: GpuIndices = must_be("GPU numbers separated by commas", '"0,1"', None, v2="/tunerGpuIndices")


class AdvisorV1(Schema):
    """`advisor`: NNI's name for an algorithm that replaces both tuner and assessor."""

    answers: ClassVar[dict[str, str]] = dict.fromkeys(("codeDir", "classFileName", "className"), OWN_ADVISOR)
    builtin_advisor_name: Annotated[str, _available("advisor")] = must_be(
        "the name of an advisor", "Hyperband", v2="name"
    )
    # Checked by the schema of the algorithm once the name is known.
    class_args: dict[str, Any] | None = mapping("{optimize_mode: maximize}", None)
    gpu_indices: GpuIndices = must_be("GPU numbers separated by commas", '"0,1"', None, v2="")


class AssessorV1(_Algorithm):
    """`assessor`."""

    builtin_assessor_name: Annotated[str | None, _available("assessor")] = must_be(
        "the name of an assessor", "Medianstop", None, v2="name"
    )


_FOR_CLUSTERS = "it applies only to jobs on a cluster; remove it"
_FOR_ROLES = "it applies to trainingServicePlatform: {}; remove it, and write command directly into trial"
_JOB_FILE = "write it into an OpenPAI job file, and set trial.paiConfigPath to that file"


class TrialV1(Schema):
    """The keys of `trial` that all platforms share."""

    answers: ClassVar[dict[str, str]] = {
        "nasMode": "architecture search is not supported; remove it, and write its options as a choice",
        "dataDir": "OpenPAI no longer has HDFS; read data from the storage at trial.containerNFSMountPath, and remove it",
        "outputDir": "OpenPAI no longer has HDFS; write to $NNI_OUTPUT_DIR on the shared storage, and remove it",
        "gpuType": "a virtual cluster determines the GPU type; remove it, and set trial.virtualCluster",
        "authFile": f"only OpenPAI's job files can contain a registry login; {_JOB_FILE}",
        "portList": f"only OpenPAI's job files can request ports; {_JOB_FILE}",
        "shmMB": f"only OpenPAI's job files can request shared memory (extraContainerOptions); {_JOB_FILE}",
        "worker": _FOR_ROLES.format("kubeflow"),
        "ps": _FOR_ROLES.format("kubeflow"),
        "master": _FOR_ROLES.format("kubeflow"),
        "taskRoles": _FOR_ROLES.format("frameworkcontroller"),
    }
    code_dir: str = must_be("a folder", ".", min_length=1, v2="/trialCodeDirectory")
    gpu_num: int | None = whole(0, 99999, "0", None, v2="/trialGpuNumber")


class LocalTrialV1(TrialV1):
    """`trial` on this machine."""

    answers: ClassVar[dict[str, str]] = TrialV1.answers | dict.fromkeys(
        ("cpuNum", "memoryMB", "image", "virtualCluster", "nniManagerNFSMountPath", "containerNFSMountPath",
         "paiStorageConfigName", "paiConfigPath", "shmMB"), _FOR_CLUSTERS,
    )  # fmt: skip
    command: str = must_be("a shell command", "python3 train.py", min_length=1, v2="/trialCommand")


class PaiTrialV1(TrialV1):
    """`trial` on OpenPAI. The reader checks which keys are required, with and without a job file."""

    answers: ClassVar[dict[str, str]] = TrialV1.answers | {
        "paiStoragePlugin": "its name is now paiStorageConfigName; write the name of an OpenPAI storage under that key"
    }
    command: str | None = must_be(
        "a shell command", "python3 train.py", None, min_length=1, v2="/trialCommand"
    )
    cpu_num: int | None = whole(1, 99999, "1", None, v2="trialCpuNumber")
    memory_mb: SizeFrom100 | None = must_be(
        _SIZE_FROM_100, "8192", None, alias="memoryMB", v2="trialMemorySize"
    )
    image: str | None = must_be(
        "the name of an image", "registry.example.com/me/train:1", None, min_length=1, v2="dockerImage"
    )
    virtual_cluster: str | None = must_be("the name of a virtual cluster", "default", None, min_length=1)
    nni_manager_nfs_mount_path: str = must_be(
        "a folder of this machine",
        "/local/mnt",
        min_length=1,
        alias="nniManagerNFSMountPath",
        v2="localStorageMountPoint",
    )
    container_nfs_mount_path: str = must_be(
        "an absolute path in the container",
        "/mnt/confignfs-data",
        min_length=1,
        alias="containerNFSMountPath",
        v2="containerStorageMountPoint",
    )
    pai_storage_config_name: str | None = must_be(
        "the name of a storage of OpenPAI", "confignfs-data", None, min_length=1, v2="storageConfigName"
    )
    pai_config_path: str | None = must_be(
        "the path of an OpenPAI job file", "job.yml", None, min_length=1, v2="openpaiConfigFile"
    )

    @field_validator("container_nfs_mount_path")
    @classmethod
    def _is_plain(cls, path: str) -> str:
        # OpenPAI would expand a `<%` tag.
        if not path.startswith("/") or "<%" in path or not path.isprintable():
            raise ValueError(path)
        return path


class PaiConfigV1(Schema):
    """`paiConfig`. Its GPU, CPU and memory numbers are defaults for `trial`."""

    user_name: str | None = must_be(
        "the name of your account there", "ada", None, min_length=1, v2="username"
    )
    token: str | None = must_be(
        "a token from your OpenPAI profile page, without blanks",
        "eyJhbGciOi...",
        None,
        pattern=r"^\S+$",
        repr=False,
    )
    pass_word: str | None = must_be(
        "your password there", "'...'", None, min_length=1, repr=False, v2="password"
    )
    host: str = must_be(
        "the host of OpenPAI, or local for the built-in cluster on this machine",
        "https://openpai.example.com",
        min_length=1,
        pattern=r"^\S+$",
    )
    reuse: bool = flag("true", False, v2="reuseMode")
    gpu_num: int | None = whole(0, 99999, "1", None, v2="")
    cpu_num: int | None = whole(1, 99999, "1", None, v2="")
    memory_mb: SizeFrom100 | None = must_be(_SIZE_FROM_100, "8192", None, alias="memoryMB", v2="")
    max_trial_num_per_gpu: int = whole(1, 99999, "1", 1, v2="")
    use_active_gpu: bool = flag("false", False, v2="")


class LocalConfigV1(Schema):
    """`localConfig`."""

    gpu_indices: GpuIndices = must_be("GPU numbers separated by commas", '"0,1"', None)
    max_trial_num_per_gpu: int = whole(1, 99999, "1", 1, v2="maxTrialNumberPerGpu")
    use_active_gpu: bool = flag("false", False)
    reuse: bool = flag("true", False, v2="reuseMode")


class ExperimentV1(Schema):
    """The keys of a file that all platforms share. Paths are as written; durations are in seconds."""

    answers: ClassVar[dict[str, str]] = {
        section: f"it applies to another platform; write trainingServicePlatform: {platform}, or remove it"
        for platform in PLATFORMS
        for section in SECTIONS[platform]
    } | {
        "sharedStorage": "storage is set per platform; remove it, and write the storage of the platform "
        "(trial.nniManagerNFSMountPath on OpenPAI, nfs on Kubernetes)",
        "tensorboard": "TensorBoard is not started automatically; remove it, and run TensorBoard on the files in $NNI_OUTPUT_DIR",
        "webuiPort": "the port is an option of nnictl; remove it, and use `nnictl create --port N`",
    } | {
        section: f"{UNSUPPORTED[platform]}, and remove it"
        for platform in UNSUPPORTED if platform != "hybrid"
        for section in SECTIONS[platform]
    }  # fmt: skip
    author_name: str = must_be("a name", "your name", min_length=1, v2="")
    experiment_name: str = must_be("a name", "digits", min_length=1)
    description: str | None = must_be("text", "what this searches for", None)
    trial_concurrency: int = whole(1, 99999, "2")
    max_exec_duration: Duration = _duration("1h", v2="maxExperimentDuration")
    max_trial_num: int | None = whole(1, 99999, "20", None, v2="maxTrialNumber")
    max_trial_duration: Duration = _duration("30m")
    max_trial_retry: int = whole(0, 99, "2", 0)
    training_service_platform: str = must_be("a platform", "local", v2="trainingService.platform")
    search_space_path: str | None = must_be(
        "the path of a JSON file", "search_space.json", None, min_length=1, v2="searchSpaceFile"
    )
    use_annotation: bool = flag("false", False)
    multi_phase: bool = flag("false", False, v2="")
    multi_thread: bool = flag("false", False, v2="")
    nni_manager_ip: str | None = must_be("an IPv4 address or a host name", "10.0.0.1", None)
    log_dir: str = must_be("a folder", "~/nni-experiments", "", min_length=1, v2="experimentWorkingDirectory")
    debug: bool = flag("false", False)
    version_check: bool | None = flag("true", None)
    log_level: Literal["trace", "debug", "info", "warning", "error", "fatal"] = must_be(
        "one of trace, debug, info, warning, error, fatal", "info", "info"
    )
    log_collection: Literal["none", "http"] = must_be("none or http", "none", "none")
    tuner: TunerV1 | None = mapping("{builtinTunerName: TPE}", None)
    assessor: AssessorV1 | None = mapping("{builtinAssessorName: Medianstop}", None)
    advisor: AdvisorV1 | None = mapping("{builtinAdvisorName: Hyperband}", None)
    # NNI lacks these three keys: a reused job always exits after 600 idle seconds.
    reuse_idle_timeout: Duration = _duration("10m")
    max_trials_per_job: int = whole(0, 999999999, "0", 0)
    warm_imports: list[str] = must_be("a list of module names", "[numpy, sklearn]", [])

    @field_validator("training_service_platform", mode="before")
    @classmethod
    def _is_here(cls, word: Any) -> Any:
        if word in PLATFORMS or is_placeholder(word) or not isinstance(word, str):
            return word
        if word in UNSUPPORTED:
            raise refusal(f"cannot use trainingServicePlatform: {shown(word)}: {UNSUPPORTED[word]}")
        remedy = "did you mean pai?" if word == "openpai" else remedy_for_unknown(word, PLATFORMS)
        raise refusal(f"cannot use trainingServicePlatform: {shown(word)} is not a platform; {remedy}")

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
                raise refusal(
                    f"cannot use warmImports: {shown(name)} is not the name of a module; write names as after `import`"
                )
        return names

    @field_validator("multi_phase", "multi_thread")
    @classmethod
    def _is_off(cls, asked: bool, info: ValidationInfo) -> bool:
        if asked:
            key = to_camel(info.field_name or "")
            raise refusal(
                f"cannot use {key}: true: NNI deprecated it, and it is not supported; remove the key"
            )
        return asked


class LocalExperimentV1(ExperimentV1):
    """The experiment file for this machine."""

    trial: LocalTrialV1 = mapping('{command: "python3 train.py", codeDir: .}', v2="trainingService")
    local_config: LocalConfigV1 | None = mapping("{maxTrialNumPerGpu: 1}", None, v2="trainingService")


class PaiExperimentV1(ExperimentV1):
    """The experiment file for OpenPAI."""

    answers: ClassVar[dict[str, str]] = ExperimentV1.answers | {
        "localConfig": "OpenPAI assigns machines and GPUs; remove it, and write reuse into paiConfig"
    }
    trial: PaiTrialV1 = mapping('{command: "python3 train.py", codeDir: ., image: ...}', v2="trainingService")
    pai_config: PaiConfigV1 = mapping(
        "{userName: ada, token: ..., host: openpai.example.com}", v2="trainingService"
    )
