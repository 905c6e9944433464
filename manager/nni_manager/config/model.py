"""The experiment as the rest of the manager sees it: frozen, with absolute paths, whatever schema it was written in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nni_manager.config.search_space import SearchSpace, parse_search_space
from nni_manager.errors import Bug

OptimizeMode = Literal["maximize", "minimize"]
# paiConfig.host of the cluster that this machine brings along.
LOCAL_HOST = "local"


@dataclass(frozen=True, slots=True)
class Expansion:
    """A relative path of the file and what it came to; nnictl tells the user, as NNI does."""

    key: str
    written: str
    absolute: Path


# A model that is fitted to thousands of results takes minutes; what takes longer has most likely stopped for good.
CALL_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class UserClass:
    """A class of the user's own. `class_name` and `validator` are dotted: module and class.

    `code_dir` is the folder where the module is; None: it is installed. No call of it may take longer than `call_timeout_s`.
    """

    class_name: str
    code_dir: str | None = None
    validator: str | None = None
    call_timeout_s: float = CALL_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class TunerConfig:
    """Who proposes parameters. `class_args` is as written in the file; the checked values are the fields beside it.

    `seed` None means that every experiment draws its own. `include_intermediate_results`: the last intermediate result of a trial
    that was stopped early is told to the tuner as its result. `own`: it is this class, and not one of ours.
    """

    name: str
    optimize_mode: OptimizeMode
    seed: int | None
    class_args: dict[str, Any]
    include_intermediate_results: bool = False
    own: UserClass | None = None


@dataclass(frozen=True, slots=True)
class AssessorConfig:
    """Who stops trials early. `class_args` is as written in the file, and checked. `own`: as for a tuner."""

    name: str
    class_args: dict[str, Any]
    own: UserClass | None = None


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """How trials share the GPUs of this machine. `gpu_indices` None means all of them.

    `may_use_active_gpu` is kept as written and has no effect: a GPU in use by others is not spared.
    """

    gpu_indices: tuple[int, ...] | None = None
    max_trials_per_gpu: int = 1
    may_use_active_gpu: bool = False


@dataclass(frozen=True, slots=True)
class PaiConfig:
    """An OpenPAI cluster, and what a job there is made of. One of `token` and `password` is there unless `is_local`.

    `storage` and `mount` are one folder, as the manager sees it and as containers do. `image`, `storage_name`, `cpu`, `gpu`
    and `memory_mb` are None only where `job_text` describes the job; that is the content of `job_file`.
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
        """Whether it is the cluster that this machine brings along."""
        return self.host.lower() == LOCAL_HOST


@dataclass(frozen=True, slots=True)
class NfsStorage:
    """An export of an NFS server, which containers mount."""

    server: str
    path: str


@dataclass(frozen=True, slots=True)
class AzureStorage:
    """A file share of Azure, with the place of its account's key in a vault.

    `upload_tries_again` is how often an upload that failed is repeated.
    """

    account: str
    share: str
    vault: str
    secret: str
    upload_tries_again: int = 1


@dataclass(frozen=True, slots=True)
class ClaimStorage:
    """A PersistentVolumeClaim; `path` is where this machine has its volume. `name` None: the file does not say."""

    path: Path
    name: str | None


MOUNT, VOLUME = "/tmp/mount", "nni-vol"
"""Where containers on Kubernetes see the shared storage, and what that is called in their pods."""
JOB_LABELS = ("app", "expId", "trialId", "envId")
"""What tells the objects of a job on Kubernetes from those of all others."""

KubernetesStorage = NfsStorage | AzureStorage | ClaimStorage


@dataclass(frozen=True, slots=True)
class RoleConfig:
    """The tasks of one role of a job on Kubernetes, which are all alike. `registry_login` is a file of Docker's.

    `min_failed` and `min_succeeded` tasks end the job; -1 stands for none, and where the operator decides, both are None.
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
    """What jobs on Kubernetes are made of. `roles` are in the order of the file, or of `template`, where that describes the job.

    `api_version` is that of the resources of all operators but FrameworkController, without their group. `template_text` is the
    content of `template` as JSON. `namespace` None: that of the login to the cluster. `runtime` is there for TrainJobs alone: the
    name of a ClusterTrainingRuntime, or of a TrainingRuntime, with that word and a slash before it. `queue` is one of Kueue's.
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

    def to_dict(self) -> dict[str, Any]:
        """The parts as JSON values and paths, from which `from_dict` makes an equal one."""
        return dataclasses.asdict(self) | {
            "storage": [type(self.storage).__name__, dataclasses.asdict(self.storage)]
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> KubernetesConfig:
        """What `to_dict` wrote, through JSON."""
        kind, storage = fields["storage"]
        made: KubernetesStorage
        if kind == NfsStorage.__name__:
            made = NfsStorage(**storage)
        elif kind == AzureStorage.__name__:
            made = AzureStorage(**storage)
        else:
            made = ClaimStorage(**storage | {"path": Path(storage["path"])})
        roles = [
            RoleConfig(**role | {"registry_login": _path(role["registry_login"])}) for role in fields["roles"]
        ]
        parts = {"storage": made, "roles": tuple(roles), "template": _path(fields["template"])}
        return cls(**{**fields, **parts})


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """Whether a job runs many trials in turn, and when it leaves.

    `max_trials` 0 means as many as there are. `warm_imports` are modules that trials of a job find imported already.
    """

    is_on: bool = False
    idle_timeout_s: float = 600.0
    max_trials: int = 0
    warm_imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """One checked experiment. Paths are absolute; `code_dir` was a folder when the file was read.

    `max_exec_duration_s`, `max_trial_number` and `max_trial_duration_s` None mean no limit. Limits and the search space are those
    of now: they may have been changed since the file was read, the space `search_space_revision` times. `gpu_num` None leaves
    CUDA_VISIBLE_DEVICES of a trial alone, 0 hides all GPUs. `search_space_raw` is the JSON `search_space` was read from.
    `nni_manager_ip` is where keepers on other machines reach the manager; None: it finds that out. `trial_command` is empty where
    roles or a job file say what tasks run. `pai` is there exactly for the training service of that name, `kubernetes` for
    `frameworkcontroller` and `kubeflow`. `is_annotated`: `code_dir` holds annotations, and trials run a copy that is made of it;
    once that is made, `code_dir` is the copy. `warnings` are for the user who starts it.
    """

    experiment_name: str
    author_name: str
    description: str | None
    trial_concurrency: int
    max_exec_duration_s: float | None
    max_trial_number: int | None
    training_service: Literal["local", "pai", "frameworkcontroller", "kubeflow"]
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
    local: LocalConfig
    reuse: ReuseConfig
    config_path: Path
    expansions: tuple[Expansion, ...] = ()
    pai: PaiConfig | None = None
    assessor: AssessorConfig | None = None
    is_annotated: bool = False
    warnings: tuple[str, ...] = ()
    max_trial_duration_s: float | None = None
    max_trial_retry: int = 0
    search_space_revision: int = 0
    kubernetes: KubernetesConfig | None = None

    @property
    def secret_files(self) -> tuple[Path, ...]:
        """Those files of the experiment that may hold a login or other secrets."""
        if self.kubernetes is not None:
            logins = {
                role.registry_login for role in self.kubernetes.roles if role.registry_login is not None
            }
            template = () if self.kubernetes.template is None else (self.kubernetes.template,)
            return (self.config_path, *template, *sorted(logins))
        if self.pai is None:
            return ()
        return (self.config_path,) if self.pai.job_file is None else (self.config_path, self.pai.job_file)

    def to_json(self) -> str:
        """The experiment as JSON text, from which `from_json` makes an equal one."""
        # Shallow, because asdict would deep-copy the search space only to have it dropped.
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["search_space"]
        fields["tuner"] = dataclasses.asdict(self.tuner)
        fields["local"] = dataclasses.asdict(self.local)
        fields["reuse"] = dataclasses.asdict(self.reuse)
        fields["pai"] = None if self.pai is None else dataclasses.asdict(self.pai)
        fields["kubernetes"] = None if self.kubernetes is None else self.kubernetes.to_dict()
        fields["assessor"] = None if self.assessor is None else dataclasses.asdict(self.assessor)
        fields["expansions"] = [dataclasses.asdict(expansion) for expansion in self.expansions]
        return json.dumps(fields, default=str)

    @classmethod
    def from_json(cls, text: str) -> ExperimentConfig:
        """The experiment `to_json` wrote. Nothing is checked against the disk again.

        Raises:
            Bug: the text is not one of ours.
        """
        try:
            fields = json.loads(text)
            gpu_indices = fields["local"]["gpu_indices"]
            reuse = fields.get("reuse", {})  # absent from what the first format of the store has
            fields |= {
                "search_space": parse_search_space(fields["search_space_raw"]),
                "tuner": TunerConfig(**_with_own(fields["tuner"])),
                "local": LocalConfig(
                    **fields["local"] | {"gpu_indices": None if gpu_indices is None else tuple(gpu_indices)}
                ),
                "pai": _pai(fields.get("pai")),
                "kubernetes": None
                if fields.get("kubernetes") is None
                else KubernetesConfig.from_dict(fields["kubernetes"]),
                "assessor": None
                if fields.get("assessor") is None
                else AssessorConfig(**_with_own(fields["assessor"])),
                "reuse": ReuseConfig(**reuse | {"warm_imports": tuple(reuse.get("warm_imports", ()))}),
                "expansions": tuple(
                    Expansion(each["key"], each["written"], Path(each["absolute"]))
                    for each in fields["expansions"]
                ),
            }
            fields["warnings"] = tuple(fields.get("warnings", ()))
            fields |= {name: Path(fields[name]) for name in ("code_dir", "log_dir", "config_path")}
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise Bug(f"cannot read the stored experiment: {error!r}; please report it") from error


HIDDEN = "(hidden)"


def without_secrets(config: ExperimentConfig) -> ExperimentConfig:
    """The same to be looked at: logins are hidden, and what describes a job and may hold some, but by the name of its file."""
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


def _with_own(fields: dict[str, Any]) -> dict[str, Any]:
    own = fields.get("own")
    return fields | {"own": None if own is None else UserClass(**own)}


def _pai(fields: dict[str, Any] | None) -> PaiConfig | None:
    if fields is None:
        return None
    return PaiConfig(**fields | {"storage": Path(fields["storage"]), "job_file": _path(fields["job_file"])})


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
