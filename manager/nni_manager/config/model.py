"""The checked configuration of an experiment: frozen, with absolute paths, independent of the schema of the file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from nni_manager.config.search_space import SearchSpace, parse_search_space
from nni_manager.domain.objectives import Constraint, Objective, Objectives, OptimizeMode, single
from nni_manager.errors import InternalError

Platform = Literal["local", "pai", "frameworkcontroller", "kubeflow"]
# paiConfig.host of the built-in cluster on this machine (local_openpai).
LOCAL_HOST = "local"


@dataclass(frozen=True, slots=True)
class Expansion:
    """A path of the file and its absolute form; nnictl prints both, as NNI does."""

    key: str
    written: str
    absolute: Path


# Fitting a model to thousands of results takes minutes; a longer call most likely hangs.
CALL_TIMEOUT_S = 600.0
# As many trials fail in a minute, and a script that is wrong fails in each of them.
FAIL_FAST = 10


@dataclass(frozen=True, slots=True)
class UserClass:
    """A class of the user. `class_name` and `validator` are dotted: module and class.

    `code_dir` is the folder of the module; None: the module is installed. `call_timeout_s` limits each call of the class.
    `is_advisor`: the class is both tuner and assessor.
    """

    class_name: str
    code_dir: str | None = None
    validator: str | None = None
    call_timeout_s: float = CALL_TIMEOUT_S
    is_advisor: bool = False


@dataclass(frozen=True, slots=True)
class TunerConfig:
    """The tuner. `class_args` is as written in the file; checked values are in the other fields.

    `seed` None: each experiment draws its own seed. `include_intermediate_results`: the tuner receives the last intermediate
    result of an early-stopped trial as its final result. `own`: the user's class; None for a built-in tuner.
    """

    name: str
    optimize_mode: OptimizeMode
    seed: int | None
    class_args: dict[str, Any]
    include_intermediate_results: bool = False
    own: UserClass | None = None


@dataclass(frozen=True, slots=True)
class PriorPoint:
    """Parameters with which the search starts (`warmStart`), and their result. `source`: an experiment's id, or a file."""

    source: str
    parameters: dict[str, Any]
    value: float
    """That of the first objective."""


@dataclass(frozen=True, slots=True)
class AssessorConfig:
    """The assessor, which stops trials early. `class_args` is as written in the file, and checked. `own`: as for a tuner.

    `optimize_mode` None: that of `class_args`, or the tuner's, in experiments of version 0.6.
    """

    name: str
    class_args: dict[str, Any]
    own: UserClass | None = None
    optimize_mode: OptimizeMode | None = None


@dataclass(frozen=True, slots=True)
class LocalSpec:
    """GPU sharing of trials on this machine. `gpu_indices` None means all GPUs.

    `may_use_active_gpu` is stored and has no effect: trials also use GPUs that other processes use.
    """

    gpu_indices: tuple[int, ...] | None = None
    max_trials_per_gpu: int = 1
    may_use_active_gpu: bool = False


HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The platform's section of an experiment that runs on a cluster: its login, its storage and its jobs."""

    stored_as: ClassVar[str]
    """The key of the section in a stored experiment."""
    stored_before: ClassVar[str] = "schema"
    """The key that follows it there, and in the text that the web page shows."""

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The files, besides the experiment file, that may contain secrets."""
        return ()

    @property
    def has_job_file(self) -> bool:
        """True if a file of the user describes the jobs; its text is a part of the section."""
        return False

    @property
    def receiver_of_login(self) -> str:
        """The cluster of another person or host that receives the user's login; empty: none does."""
        return ""

    @property
    def has_unmounted_share(self) -> bool:
        """True if the files of trials are on a share that this machine has not mounted."""
        return False

    def without_secrets(self) -> ClusterConfig:
        """A copy for display. Logins and the text of job descriptions, which may contain logins, are hidden."""
        return self

    def without_login(self) -> ClusterConfig:
        """A copy for archives."""
        return self

    def keys_of_profile(self) -> dict[str, Any]:
        """The keys of the section in NNI's second schema that a profile shows; no logins."""
        return {}

    @classmethod
    def of_stored(cls, fields: dict[str, Any]) -> ClusterConfig:
        """The section with these fields, as `ExperimentSpec.to_json` wrote them.

        Raises:
            ValidationError: a field is missing, or has another type.
        """
        section: ClusterConfig = _validated(cls, fields)
        return section


def _validated(cls: Any, fields: dict[str, Any]) -> Any:
    return _validator(cls).validate_python(fields)


@cache
def _validator(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


@dataclass(frozen=True, slots=True)
class PaiConfig(ClusterConfig):
    """An OpenPAI cluster and the settings of its jobs. Exactly one of `token` and `password` is set unless `is_local`.

    `storage` is the path of the shared folder on the manager's machine, `mount` its path in containers. `image`,
    `storage_name`, `cpu`, `gpu` and `memory_mb` are None only if `job_text`, the content of `job_file`, describes the job.
    """

    stored_as: ClassVar[str] = "pai"
    stored_before: ClassVar[str] = "assessor"
    host: str
    user: str
    token: str | None = field(repr=False)
    password: str | None = field(repr=False)
    storage: Path
    mount: str
    image: str | None
    storage_name: str | None
    virtual_cluster: str | None
    gpu: int | None
    cpu: int | None
    memory_mb: int | None
    job_file: Path | None = None
    job_text: str | None = field(default=None, repr=False)

    @property
    def is_local(self) -> bool:
        """True if this is the built-in cluster on this machine."""
        return self.host.lower() == LOCAL_HOST

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The job file."""
        return () if self.job_file is None else (self.job_file,)

    @property
    def has_job_file(self) -> bool:
        """True if there is a job file."""
        return bool(self.job_text)

    @property
    def receiver_of_login(self) -> str:
        """The cluster, unless it is the one on this machine."""
        return "" if self.is_local else f"OpenPAI {self.host}"

    def without_secrets(self) -> PaiConfig:
        """A copy without token, password and text of the job file."""
        return dataclasses.replace(
            self, token=_hidden(self.token), password=_hidden(self.password), job_text=_hidden(self.job_text)
        )

    def without_login(self) -> PaiConfig:
        """A copy without token and password."""
        return dataclasses.replace(self, token=None, password=None)

    def keys_of_profile(self) -> dict[str, Any]:
        """The cluster, the user and the settings of jobs."""
        return {
            "host": self.host,
            "username": self.user,
            "dockerImage": self.image,
            "trialCpuNumber": self.cpu,
            "trialMemorySize": None if self.memory_mb is None else f"{self.memory_mb}MB",
            "virtualCluster": self.virtual_cluster,
            "storageConfigName": self.storage_name,
            "localStorageMountPoint": str(self.storage),
            "containerStorageMountPoint": self.mount,
        }


def _hidden(text: str | None) -> str | None:
    return None if text is None else HIDDEN


@dataclass(frozen=True, slots=True)
class NfsStorage:
    """An export of an NFS server, which containers mount."""

    server: str
    path: str


@dataclass(frozen=True, slots=True)
class AzureStorage:
    """An Azure file share; the key of its account is `secret` in `vault`.

    `upload_tries_again` is the maximum number of retries of an upload.
    """

    account: str
    share: str
    vault: str
    secret: str
    upload_tries_again: int = 1


@dataclass(frozen=True, slots=True)
class ClaimStorage:
    """A PersistentVolumeClaim; `path` is the mount point of its volume on this machine. `name` None: not set in the file."""

    path: Path
    name: str | None


MOUNT, VOLUME = "/tmp/mount", "nni-vol"
"""The mount path and the volume name of the shared storage in pods on Kubernetes."""
JOB_LABELS = ("app", "expId", "trialId", "envId")
"""The labels that identify the Kubernetes objects of a job."""

KubernetesStorage = NfsStorage | AzureStorage | ClaimStorage


@dataclass(frozen=True, slots=True)
class RoleConfig:
    """The identical tasks of one role of a job on Kubernetes. `registry_login` is a Docker login file.

    `min_failed` and `min_succeeded` are the numbers of tasks that end the job; -1 disables the rule. Both are None if the
    operator decides.
    """

    name: str
    tasks: int
    command: str
    image: str
    gpu: int
    cpu: int
    memory_mb: int
    shm_mb: int | None = None
    registry_login: Path | None = None
    min_failed: int | None = None
    min_succeeded: int | None = None


@dataclass(frozen=True, slots=True)
class KubernetesConfig(ClusterConfig):
    """The settings of jobs on Kubernetes. `roles` are in the order of the file, or of `template` if it describes the job.

    `api_version` is without the group; None for FrameworkController. `template_text` is the content of `template` as JSON.
    `namespace` None: that of the cluster login. `runtime` is set only for TrainJobs: `NAME` of a ClusterTrainingRuntime, or
    `TrainingRuntime/NAME`. `queue` is a Kueue queue.
    """

    stored_as: ClassVar[str] = "kubernetes"
    operator: Literal["frameworkcontroller", "tf-operator", "pytorch-operator", "trainjob", "job"]
    storage: KubernetesStorage
    roles: tuple[RoleConfig, ...]
    api_version: str | None = None
    service_account: str | None = None
    namespace: str | None = None
    template: Path | None = None
    template_text: str | None = field(default=None, repr=False)
    runtime: str | None = None
    queue: str | None = None

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The template and the Docker login files."""
        logins = {role.registry_login for role in self.roles}
        return tuple(filter(None, (self.template, *sorted(filter(None, logins)))))

    @property
    def has_job_file(self) -> bool:
        """True if there is a template."""
        return bool(self.template_text)

    @property
    def has_unmounted_share(self) -> bool:
        """True for an Azure file share."""
        return isinstance(self.storage, AzureStorage)

    def without_secrets(self) -> KubernetesConfig:
        """A copy without the text of the template."""
        return dataclasses.replace(self, template_text=_hidden(self.template_text))

    @classmethod
    def of_stored(cls, fields: dict[str, Any]) -> ClusterConfig:
        """The section with these fields; the kind of the storage is stored before its fields."""
        _, storage = fields["storage"]
        return super(KubernetesConfig, cls).of_stored({**fields, "storage": storage})


_SECTIONS: dict[str, type[ClusterConfig]] = {each.stored_as: each for each in (PaiConfig, KubernetesConfig)}


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """Job reuse: a job runs many trials in sequence, and exits after `idle_timeout_s` without one.

    `max_trials` 0 means no limit. `warm_imports` are modules that the job imports before its trials start.
    """

    is_on: bool = False
    idle_timeout_s: float = 600.0
    max_trials: int = 0
    warm_imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExperimentSpec:
    """One checked experiment. Paths are absolute; `code_dir` was a folder when the file was read.

    `max_exec_duration_s`, `max_trial_number` and `max_trial_duration_s` None mean no limit. Limits and the search space
    can change after the file was read; `search_space_revision` counts the changes of the space. `search_space_raw` is the
    JSON of `search_space`. `gpu_num` None leaves a trial's CUDA_VISIBLE_DEVICES unchanged, 0 hides all GPUs. `nni_manager_ip`
    is the manager's address for keepers on other machines; None: the manager detects it. `trial_command` is empty if roles or
    a job file contain the commands. `cluster` None: trials run on this machine. `is_annotated`: `code_dir` has
    annotations, and trials run a generated copy; once the copy exists, `code_dir` is its path. `warnings` are for the user who
    starts the experiment. `schema` is that of the experiment file; a profile has its keys.
    """

    experiment_name: str
    author_name: str
    description: str | None
    trial_concurrency: int
    max_exec_duration_s: float | None
    max_trial_number: int | None
    training_service: Platform
    search_space: SearchSpace
    search_space_raw: dict[str, Any]
    tuner: TunerConfig
    trial_command: str
    code_dir: Path
    gpu_num: int | None
    nni_manager_ip: str | None
    log_dir: Path
    log_collection: Literal["none", "http"]
    log_level: Literal["trace", "debug", "info", "warning", "error", "fatal"]
    debug: bool
    version_check: bool
    local: LocalSpec
    reuse: ReuseConfig
    config_path: Path
    expansions: tuple[Expansion, ...] = ()
    cluster: ClusterConfig | None = None
    assessor: AssessorConfig | None = None
    is_annotated: bool = False
    warnings: tuple[str, ...] = ()
    max_trial_duration_s: float | None = None
    max_trial_retry: int = 0
    max_preemptions: int = 100
    initial_trials: tuple[dict[str, Any], ...] = ()
    """The parameters of the first trials, before the tuner proposes any."""
    warm_start: tuple[PriorPoint, ...] = ()
    """The first trials after these. Chosen when the experiment is created, so that a resume does not choose again."""
    fail_fast: int = FAIL_FAST
    """How many trials may fail, before any has succeeded, until no more are started; 0: all of them."""
    search_space_revision: int = 0
    schema: Literal["v1", "v2"] = "v1"
    objective: str = ""
    """The name of the function that trials run, "module:name"; empty: they run a command."""
    objectives: tuple[Objective, ...] = ()
    """As in the file; empty: it names none, see `all_objectives`."""
    constraints: tuple[Constraint, ...] = ()

    @property
    def all_objectives(self) -> Objectives:
        """The objectives and constraints; without any in the file, the number that trials report, by the tuner's mode."""
        return Objectives(self.objectives or single(self.tuner.optimize_mode).all, self.constraints)

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """The files of the experiment that may contain a login or other secrets."""
        return () if self.cluster is None else (self.config_path, *self.cluster.secret_files)

    def without_secrets(self) -> ExperimentSpec:
        """A copy for display, without logins and the text of job descriptions; file names stay."""
        cluster = None if self.cluster is None else self.cluster.without_secrets()
        return dataclasses.replace(self, cluster=cluster)

    def to_json(self) -> str:
        """The experiment as JSON text; `from_json` restores an equal object."""
        fields: dict[str, Any] = {}
        for name, value in _as_json(self).items():
            if self.cluster is not None and name == self.cluster.stored_before:
                fields[self.cluster.stored_as] = self.cluster
            fields[name] = value
        del fields["search_space"], fields["cluster"]
        for name in _SECTIONS:
            fields.setdefault(name)
        return json.dumps(fields, default=_as_json)

    @classmethod
    def from_json(cls, text: str) -> ExperimentSpec:
        """The experiment that `to_json` wrote. Paths are not checked again.

        Raises:
            InternalError: `to_json` did not write this text.
        """
        try:
            fields = json.loads(text)
            fields["cluster"] = _stored_cluster(fields)
            fields.setdefault("reuse", ReuseConfig())  # absent in the first format of the store
            fields["search_space"] = parse_search_space(
                fields["search_space_raw"], for_own_class=fields["tuner"].get("own") is not None
            )
            spec: ExperimentSpec = _validated(cls, fields)
        except ValidationError as error:
            raise _unreadable(error) from None  # the text of the cause contains values, such as logins
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InternalError(
                f"cannot read the stored experiment: {error!r}; please report this error"
            ) from error
        return spec


def _as_json(value: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return str(value)
    fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    # The class name shows the kind of storage.
    return [type(value).__name__, fields] if isinstance(value, KubernetesStorage) else fields


def _stored_cluster(fields: dict[str, Any]) -> ClusterConfig | None:
    """The section of the platform, which is taken out of the stored fields; None if trials run on this machine."""
    stored = {name: fields.pop(name, None) for name in _SECTIONS}
    name, section = next(((name, each) for name, each in stored.items() if each is not None), ("", None))
    try:
        return None if section is None else _SECTIONS[name].of_stored(section)
    except ValidationError as error:
        raise _unreadable(error, name) from None


def _unreadable(error: ValidationError, *above: str) -> InternalError:
    wrong = [f"{'.'.join(map(str, (*above, *each['loc'])))}: {each['msg']}" for each in error.errors()]
    return InternalError(f"cannot read the stored experiment: {', '.join(wrong)}; please report this error")
