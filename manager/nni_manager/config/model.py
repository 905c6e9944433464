"""The checked configuration of an experiment: frozen, with absolute paths, independent of the schema of the file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
class PaiConfig:
    """An OpenPAI cluster and the settings of its jobs. Exactly one of `token` and `password` is set unless `is_local`.

    `storage` is the path of the shared folder on the manager's machine, `mount` its path in containers. `image`,
    `storage_name`, `cpu`, `gpu` and `memory_mb` are None only if `job_text`, the content of `job_file`, describes the job.
    """

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
class KubernetesConfig:
    """The settings of jobs on Kubernetes. `roles` are in the order of the file, or of `template` if it describes the job.

    `api_version` is without the group; None for FrameworkController. `template_text` is the content of `template` as JSON.
    `namespace` None: that of the cluster login. `runtime` is set only for TrainJobs: `NAME` of a ClusterTrainingRuntime, or
    `TrainingRuntime/NAME`. `queue` is a Kueue queue.
    """

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
    a job file contain the commands. `pai` is set only for the training service `pai`, `kubernetes` only for
    `frameworkcontroller` and `kubeflow`. `is_annotated`: `code_dir` has annotations, and trials run a generated copy; once
    the copy exists, `code_dir` is its path. `warnings` are for the user who starts the experiment. `schema` is that of the
    experiment file; a profile has its keys.
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
    pai: PaiConfig | None = None
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
    kubernetes: KubernetesConfig | None = None
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
        if self.kubernetes is not None:
            logins = {role.registry_login for role in self.kubernetes.roles}
            return (
                self.config_path,
                *filter(None, (self.kubernetes.template, *sorted(filter(None, logins)))),
            )
        return () if self.pai is None else (self.config_path, *filter(None, (self.pai.job_file,)))

    def to_json(self) -> str:
        """The experiment as JSON text; `from_json` restores an equal object."""
        fields = _as_json(self)
        del fields["search_space"]
        return json.dumps(fields, default=_as_json)

    @classmethod
    def from_json(cls, text: str) -> ExperimentSpec:
        """The experiment that `to_json` wrote. Paths are not checked again.

        Raises:
            InternalError: `to_json` did not write this text.
        """
        try:
            fields = json.loads(text)
            if fields.get("kubernetes") is not None:
                _, fields["kubernetes"]["storage"] = fields["kubernetes"]["storage"]
            fields.setdefault("reuse", ReuseConfig())  # absent in the first format of the store
            fields["search_space"] = parse_search_space(
                fields["search_space_raw"], for_own_class=fields["tuner"].get("own") is not None
            )
            return _stored_form().validate_python(fields)
        except ValidationError as error:
            # `from None`: the text of the cause contains values, such as logins.
            wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            raise InternalError(
                f"cannot read the stored experiment: {', '.join(wrong)}; please report this error"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InternalError(
                f"cannot read the stored experiment: {error!r}; please report this error"
            ) from error


def _as_json(value: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return str(value)
    fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    # The class name shows the kind of storage.
    return [type(value).__name__, fields] if isinstance(value, KubernetesStorage) else fields


@cache
def _stored_form() -> TypeAdapter[ExperimentSpec]:
    return TypeAdapter(ExperimentSpec)


HIDDEN = "(hidden)"


def without_secrets(config: ExperimentSpec) -> ExperimentSpec:
    """A copy for display. Logins and the text of job descriptions, which may contain logins, are hidden; file names stay."""
    pai, kubernetes = config.pai, config.kubernetes
    if pai is not None:
        pai = dataclasses.replace(
            pai, token=_hidden(pai.token), password=_hidden(pai.password), job_text=_hidden(pai.job_text)
        )
    if kubernetes is not None:
        kubernetes = dataclasses.replace(kubernetes, template_text=_hidden(kubernetes.template_text))
    return dataclasses.replace(config, pai=pai, kubernetes=kubernetes)


def _hidden(text: str | None) -> str | None:
    return None if text is None else HIDDEN
