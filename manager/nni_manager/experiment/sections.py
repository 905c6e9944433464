"""The sections of a configuration in Python: the keys of NNI's second schema as fields, without checks.

Generated from the declarations of the keys; `make golden` writes this file. A field that is None is not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nni_manager.experiment.aliases import ConfigBase, GpuIndices, PathOrText, Seconds
from nni_manager.experiment.platform_section import PlatformSection

__all__ = [
    "AlgorithmConfig",
    "ExperimentFields",
    "FrameworkAttemptCompletionPolicy",
    "FrameworkControllerConfig",
    "FrameworkControllerRoleConfig",
    "K8sStorageConfig",
    "KubeflowConfig",
    "KubeflowRoleConfig",
    "LocalConfig",
    "OpenpaiConfig",
    "RemoteConfig",
    "RemoteMachineConfig",
    "SlurmConfig",
    "TrainingServiceConfig",
]


@dataclass(kw_only=True)
class AlgorithmConfig(ConfigBase):
    """A built-in tuner, assessor or advisor by its name, or your own class.

    code_directory: The folder of your own class.
    class_name: Your own class; in the second schema and in Python, module and class: `my_tuner.MyTuner`.
    class_args: The arguments of the algorithm.
    call_timeout: The maximum duration of one call of your own class.
    name: A built-in tuner, or one that you have registered; a built-in assessor, which stops trials early; a built-in
        advisor: `Hyperband` or `BOHB`.
    include_intermediate_results: If an assessor or `max_trial_duration` stops a trial before a final result, its last
        intermediate result is its result to the tuner; without it, see assessors.
    """

    code_directory: PathOrText | None = None
    """The folder of your own class. Value: a folder."""
    class_name: str | None = None
    """Your own class; in the second schema and in Python, module and class: `my_tuner.MyTuner`. Value: the name of a
    class."""
    class_args: dict[str, Any] = field(default_factory=dict)
    """The arguments of the algorithm."""
    call_timeout: Seconds | None = None
    """The maximum duration of one call of your own class. Value: a whole number and one of s, m, h, d. Since 0.6, not
    in NNI. Default: `10m`."""
    name: str | None = None
    """A built-in tuner, or one that you have registered; a built-in assessor, which stops trials early; a built-in
    advisor: `Hyperband` or `BOHB`. Value: the name of a tuner or the name of an assessor or the name of an advisor.
    Default: `Auto`, unless it is your own."""
    include_intermediate_results: bool | None = None
    """If an assessor or `max_trial_duration` stops a trial before a final result, its last intermediate result is its
    result to the tuner; without it, see assessors. Since 0.6, not in NNI. Default: `False`."""


@dataclass(kw_only=True)
class TrainingServiceConfig(PlatformSection):
    """The training service that runs trials. Trial fields set here take precedence over those of the experiment.

    nni_manager_ip: Where keepers on a cluster reach this machine; without effect where trials run here.
    trial_code_directory: The folder with the training code.
    trial_command: Run by bash in the code folder.
    trial_gpu_number: GPUs per trial; `0` hides all GPUs from a trial.
    platform: Where trials run: `local` is this machine, `openpai` is OpenPAI (`pai` in the first schema),
        `frameworkcontroller` is FrameworkController, `kubeflow` is Kubeflow, `slurm` is Slurm, `remote` is machines
        over SSH.
    reuse_mode: A job runs many trials in sequence, see reuse.
    """

    nni_manager_ip: str | None = None
    """Where keepers on a cluster reach this machine; without effect where trials run here. Value: an IPv4 address or a
    host name. Default: detected."""
    trial_code_directory: PathOrText | None = None
    """The folder with the training code. Value: a folder. Default: `.`."""
    trial_command: str | None = None
    """Run by bash in the code folder. Value: a shell command."""
    trial_gpu_number: int | None = None
    """GPUs per trial; `0` hides all GPUs from a trial. Value: a whole number from 0 to 99999. Default: the trial sees
    what the machine shows."""
    platform: str | None = None
    """Where trials run: `local` is this machine, `openpai` is OpenPAI (`pai` in the first schema),
    `frameworkcontroller` is FrameworkController, `kubeflow` is Kubeflow, `slurm` is Slurm, `remote` is machines over
    SSH. Value: a platform."""
    reuse_mode: bool | None = None
    """A job runs many trials in sequence, see reuse. Default: `True` on a cluster."""


@dataclass(kw_only=True)
class LocalConfig(TrainingServiceConfig):
    """The training service whose trials run on this machine.

    The other fields are those of `TrainingServiceConfig`.

    gpu_indices: The GPUs to use.
    max_trial_number_per_gpu: The number of trials that share one GPU.
    use_active_gpu: Also use GPUs on which other programs compute.
    """

    platform: str | None = "local"
    gpu_indices: GpuIndices | None = None
    """The GPUs to use. Value: GPU numbers separated by commas. Default: all."""
    max_trial_number_per_gpu: int | None = None
    """The number of trials that share one GPU. Value: a whole number from 1 to 99999. Default: `1`."""
    use_active_gpu: bool | None = None
    """Also use GPUs on which other programs compute. Default: `False`."""


@dataclass(kw_only=True)
class OpenpaiConfig(TrainingServiceConfig):
    """The training service whose trials are jobs on OpenPAI.

    The other fields are those of `TrainingServiceConfig`.

    host: The cluster, with or without `http://` or `https://`; the default scheme is `http`, in the second schema
        `https`. `local`: this machine.
    username: Your account on OpenPAI.
    token: Your token on OpenPAI.
    password: Your password on OpenPAI; tokens are fetched and renewed as needed.
    trial_cpu_number: The CPUs of each job.
    trial_memory_size: The memory of each job.
    docker_image: The image of the containers, with or without the keeper.
    virtual_cluster: The virtual cluster of the jobs.
    local_storage_mount_point: Where this machine has the shared storage.
    container_storage_mount_point: Where containers have the same folder.
    storage_config_name: The name of the shared storage on OpenPAI.
    openpai_config_file: A job file of your own.
    ca_file: The CA certificates to trust when the cluster is called with `https`.
    keeper: Where the keeper of a container is: in the image, in the bundle, or `auto`: in the bundle if the image has
        none of this version.
    """

    platform: str | None = "openpai"
    host: str | None = None
    """The cluster, with or without `http://` or `https://`; the default scheme is `http`, in the second schema `https`.
    `local`: this machine. Value: the host of OpenPAI, or local for the built-in cluster on this machine."""
    username: str | None = None
    """Your account on OpenPAI. Value: the name of your account there."""
    token: str | None = field(default=None, repr=False)
    """Your token on OpenPAI. Value: a token from your OpenPAI profile page, without blanks."""
    password: str | None = field(default=None, repr=False)
    """Your password on OpenPAI; tokens are fetched and renewed as needed. Value: your password there. Since 0.6, not in
    NNI."""
    trial_cpu_number: int | None = None
    """The CPUs of each job. Value: a whole number from 1 to 99999."""
    trial_memory_size: str | int | None = None
    """The memory of each job. Value: a whole number of MB, at least 100, or a size such as 8gb."""
    docker_image: str | None = None
    """The image of the containers, with or without the keeper. Value: the name of an image. Default: NNI's image, which
    has no keeper."""
    virtual_cluster: str | None = None
    """The virtual cluster of the jobs. Value: the name of a virtual cluster. Default: OpenPAI's `default`."""
    local_storage_mount_point: PathOrText | None = None
    """Where this machine has the shared storage. Value: a folder of this machine."""
    container_storage_mount_point: str | None = None
    """Where containers have the same folder. Value: an absolute path in the container."""
    storage_config_name: str | None = None
    """The name of the shared storage on OpenPAI. Value: the name of a storage of OpenPAI."""
    openpai_config_file: PathOrText | None = None
    """A job file of your own. Value: the path of an OpenPAI job file."""
    ca_file: PathOrText | None = None
    """The CA certificates to trust when the cluster is called with `https`. Value: the path of a PEM file. Since 0.7,
    not in NNI. Default: those that this machine trusts."""
    keeper: str | None = None
    """Where the keeper of a container is: in the image, in the bundle, or `auto`: in the bundle if the image has none
    of this version. Value: one of auto, image, bundle. Since 0.7, not in NNI. Default: `auto`."""
    openpai_config: dict[str, Any] | None = None


@dataclass(kw_only=True)
class K8sStorageConfig(ConfigBase):
    """The shared storage for code and output of trials.

    storage_type: The kind of storage.
    server: The server that exports the folder.
    path: The folder that all tasks share.
    claim_name: The PersistentVolumeClaim that containers mount.
    azure_account: The account of the share.
    azure_share: The share; it is created if it is missing.
    key_vault_name: The vault with the account's key.
    key_vault_key: The account's key in the vault.
    upload_retry_count: How often an upload to the share is retried.
    """

    aliases: ClassVar[Mapping[str, str]] = {
        "storage": "storage_type",
        "keyvault": "key_vault_name",
        "keyvaultsecret": "key_vault_key",
    }
    storage_type: str | None = None
    """The kind of storage. Value: one of nfs, azureStorage, pvc. Default: the one that is described."""
    server: str | None = None
    """The server that exports the folder. Value: the address of an NFS server."""
    path: str | None = None
    """The folder that all tasks share. Value: the path that the server exports, or the mount point of the claim's
    volume on this machine."""
    claim_name: str | None = None
    """The PersistentVolumeClaim that containers mount. Value: the name of a claim. Since 0.6, not in NNI."""
    azure_account: str | None = None
    """The account of the share. Value: the name of a storage account."""
    azure_share: str | None = None
    """The share; it is created if it is missing. Value: the name of a file share."""
    key_vault_name: str | None = None
    """The vault with the account's key. Value: the name of a vault."""
    key_vault_key: str | None = None
    """The account's key in the vault. Value: the name of a secret in the vault."""
    upload_retry_count: int | None = None
    """How often an upload to the share is retried. Value: a whole number from 1 to 99999. Since 0.6, not in NNI.
    Default: `1`."""


@dataclass(kw_only=True)
class FrameworkAttemptCompletionPolicy(ConfigBase):
    """`framework_attempt_completion_policy` of a task role: the number of tasks that end the job; -1 disables the rule.

    min_failed_task_count: Failed tasks that end the job as failed.
    min_succeed_task_count: Succeeded tasks that end the job as succeeded.
    """

    aliases: ClassVar[Mapping[str, str]] = {
        "minsucceededtaskcount": "min_succeed_task_count",
    }
    min_failed_task_count: int | None = None
    """Failed tasks that end the job as failed. Value: -1 or a whole number of at least 1."""
    min_succeed_task_count: int | None = None
    """Succeeded tasks that end the job as succeeded. Value: -1 or a whole number of at least 1."""


@dataclass(kw_only=True)
class FrameworkControllerRoleConfig(ConfigBase):
    """An item of `task_roles`: the identical tasks of one role of a job.

    command: Run by bash in the code folder.
    gpu_number: The GPUs of each task.
    cpu_number: The CPUs of each task.
    memory_size: The memory of each task.
    docker_image: The image of the containers, with or without the keeper.
    private_registry_auth_path: The login for the image's registry.
    shared_memory_size: The shared memory of each task.
    name: The name of the role.
    task_number: The number of tasks.
    framework_attempt_completion_policy: When the job ends; `-1` disables a rule.
    """

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {
        "framework_attempt_completion_policy": FrameworkAttemptCompletionPolicy,
    }
    command: str | None = None
    """Run by bash in the code folder. Value: a shell command."""
    gpu_number: int | None = None
    """The GPUs of each task. Value: a whole number from 0 to 99999."""
    cpu_number: int | None = None
    """The CPUs of each task. Value: a whole number from 1 to 99999."""
    memory_size: str | int | None = None
    """The memory of each task. Value: a whole number of MB, or a size such as 8gb."""
    docker_image: str | None = None
    """The image of the containers, with or without the keeper. Value: the name of an image. Default: NNI's image, which
    has no keeper."""
    private_registry_auth_path: PathOrText | None = None
    """The login for the image's registry. Value: the path of a Docker login file. Since 0.6, not in NNI."""
    shared_memory_size: str | int | None = None
    """The shared memory of each task. Value: a whole number of MB, or a size such as 1gb. Since 0.6, not in NNI.
    Default: the cluster's."""
    name: str | None = None
    """The name of the role. Value: a name of at most 63 lower-case letters and digits."""
    task_number: int | None = None
    """The number of tasks. Value: a whole number from 1 to 10000."""
    framework_attempt_completion_policy: FrameworkAttemptCompletionPolicy = field(
        default_factory=FrameworkAttemptCompletionPolicy
    )
    """When the job ends; `-1` disables a rule."""


@dataclass(kw_only=True)
class FrameworkControllerConfig(TrainingServiceConfig):
    """The training service whose trials are Frameworks on Kubernetes.

    The other fields are those of `TrainingServiceConfig`.

    storage: The storage that this machine and all tasks share.
    keeper: Where the keeper of a container is: in the image, in the bundle, or `auto`: in the bundle if the image has
        none of this version.
    namespace: The namespace of the jobs.
    service_account_name: The service account of the pods.
    task_roles: The roles of a job.
    config_path: A Framework of your own; it takes precedence over `task_roles`.
    """

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {
        "storage": K8sStorageConfig,
        "task_roles": FrameworkControllerRoleConfig,
    }
    platform: str | None = "frameworkcontroller"
    storage: K8sStorageConfig = field(default_factory=K8sStorageConfig)
    """The storage that this machine and all tasks share."""
    keeper: str | None = None
    """Where the keeper of a container is: in the image, in the bundle, or `auto`: in the bundle if the image has none
    of this version. Value: one of auto, image, bundle. Since 0.7, not in NNI. Default: `auto`."""
    namespace: str | None = None
    """The namespace of the jobs. Value: the name of a namespace. Default: that of the login."""
    service_account_name: str | None = None
    """The service account of the pods. Value: the name of a service account."""
    task_roles: list[FrameworkControllerRoleConfig] = field(default_factory=list)
    """The roles of a job."""
    config_path: PathOrText | None = None
    """A Framework of your own; it takes precedence over `task_roles`. Value: the path of a Framework template. Since
    0.6, not in NNI."""


@dataclass(kw_only=True)
class KubeflowRoleConfig(ConfigBase):
    """`worker`, `ps` or `master`: the identical tasks of one role of a job.

    command: Run by bash in the code folder.
    gpu_number: The GPUs of each task.
    cpu_number: The CPUs of each task.
    memory_size: The memory of each task.
    docker_image: The image of the containers, with or without the keeper.
    private_registry_auth_path: The login for the image's registry.
    shared_memory_size: The shared memory of each task.
    replicas: The number of tasks.
    code_directory: The folder with the training code, if all roles have the same and `trial_code_directory` is not set.
    """

    command: str | None = None
    """Run by bash in the code folder. Value: a shell command."""
    gpu_number: int | None = None
    """The GPUs of each task. Value: a whole number from 0 to 99999."""
    cpu_number: int | None = None
    """The CPUs of each task. Value: a whole number from 1 to 99999."""
    memory_size: str | int | None = None
    """The memory of each task. Value: a whole number of MB, or a size such as 8gb."""
    docker_image: str | None = None
    """The image of the containers, with or without the keeper. Value: the name of an image. Default: NNI's image, which
    has no keeper."""
    private_registry_auth_path: PathOrText | None = None
    """The login for the image's registry. Value: the path of a Docker login file. Since 0.6, not in NNI."""
    shared_memory_size: str | int | None = None
    """The shared memory of each task. Value: a whole number of MB, or a size such as 1gb. Since 0.6, not in NNI.
    Default: the cluster's."""
    replicas: int | None = None
    """The number of tasks. Value: a whole number from 1 to 10000."""
    code_directory: PathOrText | None = None
    """The folder with the training code, if all roles have the same and `trial_code_directory` is not set. Value: a
    folder."""


@dataclass(kw_only=True)
class KubeflowConfig(TrainingServiceConfig):
    """The training service whose trials are jobs of a Kubeflow operator, or plain Jobs.

    The other fields are those of `TrainingServiceConfig`.

    storage: The storage that this machine and all tasks share.
    keeper: Where the keeper of a container is: in the image, in the bundle, or `auto`: in the bundle if the image has
        none of this version.
    namespace: The namespace of the jobs.
    operator: The operator of the jobs.
    api_version: The version of the resources: for TFJobs and PyTorchJobs `v1`, `v1beta2`, `v1beta1` or `v1alpha2`, for
        TrainJobs `v1alpha1`, for Jobs `v1`.
    runtime: Of `trainjob`: a ClusterTrainingRuntime, or `TrainingRuntime/NAME` for one of the jobs' namespace.
    queue_name: A LocalQueue of Kueue in the namespace, in which all jobs wait.
    pod_template: What each pod has besides, such as tolerations, node selectors and volumes.
    worker: The role `worker`.
    ps: The role `ps`.
    master: The role `master`.
    """

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {
        "storage": K8sStorageConfig,
        "worker": KubeflowRoleConfig,
        "ps": KubeflowRoleConfig,
        "master": KubeflowRoleConfig,
    }
    platform: str | None = "kubeflow"
    storage: K8sStorageConfig = field(default_factory=K8sStorageConfig)
    """The storage that this machine and all tasks share."""
    keeper: str | None = None
    """Where the keeper of a container is: in the image, in the bundle, or `auto`: in the bundle if the image has none
    of this version. Value: one of auto, image, bundle. Since 0.7, not in NNI. Default: `auto`."""
    namespace: str | None = None
    """The namespace of the jobs. Value: the name of a namespace. Default: that of the login."""
    operator: str | None = None
    """The operator of the jobs. Value: one of tf-operator, pytorch-operator, trainjob, job."""
    api_version: str | None = None
    """The version of the resources: for TFJobs and PyTorchJobs `v1`, `v1beta2`, `v1beta1` or `v1alpha2`, for TrainJobs
    `v1alpha1`, for Jobs `v1`. Value: one of v1, v1beta2, v1beta1, v1alpha2, v1alpha1. Default: the newest of the
    operator."""
    runtime: str | None = None
    """Of `trainjob`: a ClusterTrainingRuntime, or `TrainingRuntime/NAME` for one of the jobs' namespace. Value: the
    name of a training runtime. Since 0.6, not in NNI. Default: `torch-distributed`."""
    queue_name: str | None = None
    """A LocalQueue of Kueue in the namespace, in which all jobs wait. Value: the name of a queue of Kueue. Since 0.6,
    not in NNI."""
    pod_template: PathOrText | None = None
    """What each pod has besides, such as tolerations, node selectors and volumes. Value: the path of a pod template.
    Since 0.7, not in NNI."""
    worker: KubeflowRoleConfig | None = None
    """The role `worker`."""
    ps: KubeflowRoleConfig | None = None
    """The role `ps`."""
    master: KubeflowRoleConfig | None = None
    """The role `master`."""


@dataclass(kw_only=True)
class SlurmConfig(TrainingServiceConfig):
    """The training service whose trials are batch jobs on Slurm.

    The other fields are those of `TrainingServiceConfig`.

    partition: The partition of the jobs, or several with commas between them.
    account: The account that is charged.
    qos: The quality of service of the jobs.
    time_limit: The time limit of a job; a reused job needs time for its trials together.
    gres: The generic resources of each node of a job, such as GPUs of a type.
    gpus: The GPUs of a job.
    cpus_per_task: The CPUs of each task of a job.
    memory: The memory of a job on each node.
    constraint: The features that nodes must have.
    nodes: The nodes of a job; the trial's command runs on the first one, and starts the others with `srun`.
    ntasks: The tasks that the trial's command may start with `srun`.
    extra_args: Other options of `sbatch`, each in the form `--name=value`.
    container_image: The image of the container in which Apptainer runs each job.
    container_args: Other options of `apptainer exec`, each in the form `--name=value`.
    keeper: Where the keeper of a container is: in the image, in the bundle, or `auto`: in the bundle if the image has
        none of this version.
    login: The login node whose Slurm commands are used.
    """

    platform: str | None = "slurm"
    partition: str | None = None
    """The partition of the jobs, or several with commas between them. Value: the name of a partition. Since 0.7, not in
    NNI. Default: Slurm's default."""
    account: str | None = None
    """The account that is charged. Value: the name of an account. Since 0.7, not in NNI. Default: Slurm's default."""
    qos: str | None = None
    """The quality of service of the jobs. Value: the name of a quality of service. Since 0.7, not in NNI. Default:
    Slurm's default."""
    time_limit: str | None = None
    """The time limit of a job; a reused job needs time for its trials together. Value: a time limit of Slurm in quotes:
    minutes, hours:minutes:seconds or days-hours. Since 0.7, not in NNI. Default: that of the partition."""
    gres: str | None = None
    """The generic resources of each node of a job, such as GPUs of a type. Value: generic resources of Slurm. Since
    0.7, not in NNI. Default: none."""
    gpus: int | None = None
    """The GPUs of a job. Value: a whole number from 0 to 99999. Since 0.7, not in NNI. Default: `trial_gpu_number`."""
    cpus_per_task: int | None = None
    """The CPUs of each task of a job. Value: a whole number from 1 to 99999. Since 0.7, not in NNI. Default: Slurm's
    default, usually 1."""
    memory: str | int | None = None
    """The memory of a job on each node. Value: a whole number of MB, or a size such as 8gb. Since 0.7, not in NNI.
    Default: Slurm's default."""
    constraint: str | None = None
    """The features that nodes must have. Value: features of nodes. Since 0.7, not in NNI. Default: any node."""
    nodes: int | None = None
    """The nodes of a job; the trial's command runs on the first one, and starts the others with `srun`. Value: a whole
    number from 1 to 99999. Since 0.7, not in NNI. Default: Slurm's default, usually 1."""
    ntasks: int | None = None
    """The tasks that the trial's command may start with `srun`. Value: a whole number from 1 to 9999999. Since 0.7, not
    in NNI. Default: Slurm's default, usually 1."""
    extra_args: list[str] | None = None
    """Other options of `sbatch`, each in the form `--name=value`. Value: a list of options of sbatch. Since 0.7, not in
    NNI."""
    container_image: str | None = None
    """The image of the container in which Apptainer runs each job. Value: a .sif file, a folder with an image, or an
    address such as docker://IMAGE. Since 0.7, not in NNI. Default: no container."""
    container_args: list[str] | None = None
    """Other options of `apptainer exec`, each in the form `--name=value`. Value: a list of options of apptainer exec.
    Since 0.7, not in NNI."""
    keeper: str | None = None
    """Where the keeper of a container is: in the image, in the bundle, or `auto`: in the bundle if the image has none
    of this version. Value: one of auto, image, bundle. Since 0.7, not in NNI. Default: `auto`."""
    login: str | None = None
    """The login node whose Slurm commands are used. Value: a host for ssh, or user@host:port. Since 0.7, not in NNI.
    Default: this machine."""


@dataclass(kw_only=True)
class RemoteMachineConfig(ConfigBase):
    """An item of `machine_list`: a machine, its login, and how trials share its GPUs.

    host: The machine; also a `Host` of `~/.ssh/config`.
    port: The port of its SSH server.
    user: Your account on the machine.
    password: Your password on the machine; it takes precedence over `ssh_key_file`.
    ssh_key_file: The private key of the login.
    ssh_passphrase: The passphrase of the private key.
    gpu_indices: The GPUs to use.
    max_trial_number_per_gpu: The number of trials that share one GPU.
    use_active_gpu: Also use GPUs on which other programs compute.
    python_path: The folder with the `python3` of trials and its trial-keeper; it comes first on PATH.
    """

    host: str | None = None
    """The machine; also a `Host` of `~/.ssh/config`. Value: the name or the address of a machine."""
    port: int | None = None
    """The port of its SSH server. Value: a whole number from 1 to 65535. Default: that of `~/.ssh/config`, or `22`."""
    user: str | None = None
    """Your account on the machine. Value: the name of your account there. Default: that of `~/.ssh/config`, or your
    name on this machine."""
    password: str | None = field(default=None, repr=False)
    """Your password on the machine; it takes precedence over `ssh_key_file`. Value: your password there, in quotes.
    Default: none."""
    ssh_key_file: PathOrText | None = None
    """The private key of the login. Value: the path of a private key. Default: those of `ssh`: the agent's,
    `~/.ssh/id_rsa` and the like."""
    ssh_passphrase: str | None = field(default=None, repr=False)
    """The passphrase of the private key. Value: the passphrase of the key, in quotes. Default: none."""
    gpu_indices: GpuIndices | None = None
    """The GPUs to use. Value: GPU numbers separated by commas. Default: all."""
    max_trial_number_per_gpu: int | None = None
    """The number of trials that share one GPU. Value: a whole number from 1 to 99999. Default: `1`."""
    use_active_gpu: bool | None = None
    """Also use GPUs on which other programs compute. Default: `False`."""
    python_path: str | None = None
    """The folder with the `python3` of trials and its trial-keeper; it comes first on PATH. Value: an absolute path of
    a folder on the machine. Default: the PATH of a shell over SSH."""


@dataclass(kw_only=True)
class RemoteConfig(TrainingServiceConfig):
    """The training service whose trials run on machines over SSH.

    The other fields are those of `TrainingServiceConfig`.

    machine_list: The machines that run trials.
    """

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {
        "machine_list": RemoteMachineConfig,
    }
    platform: str | None = "remote"
    machine_list: list[RemoteMachineConfig] = field(default_factory=list)
    """The machines that run trials."""


@dataclass(kw_only=True)
class ExperimentFields(ConfigBase):
    """The fields of `ExperimentConfig`.

    experiment_name: The name in lists.
    description: Text for people.
    trial_concurrency: The number of trials that run at a time.
    max_experiment_duration: The time after which no more trials are started. One whose job waits in a queue of the
        cluster still runs.
    max_trial_number: The number of trials to start, including failed ones.
    max_trial_duration: The maximum duration of one trial; then it is stopped.
    max_trial_retry: How often a trial is retried whose job or keeper the cluster lost.
    max_preemptions: How often a trial starts again whose job the cluster preempted; not counted as retries.
    lost_node_timeout: How long a node of a job on a cluster may be not ready, and its keeper silent, until the job is
        lost.
    fail_fast: After how many failed trials no more are started, if none has succeeded before: a script that is wrong
        fails in every trial. Failures of the cluster do not count. `False` starts all trials.
    nni_manager_ip: Where keepers on a cluster reach this machine; without effect where trials run here.
    debug: More log; and no version check, unless `version_check` is written.
    version_check: Refuse a keeper whose version differs from the manager's in the first two numbers.
    log_level: The detail of the manager's log.
    log_collection: `http`: trials' output is sent to the manager as well, at 5 MB/s at most while a trial runs, the
        rest when it has ended, and 1 GiB of each. `none`: only metrics are sent.
    reuse_idle_timeout: With reuse, how long a job waits for its next trial before it leaves.
    max_trials_per_job: With reuse, after how many trials a job leaves and a new one is requested; `0`: never.
    warm_imports: With reuse, modules that trials find imported, see warm starts.
    initial_trials: Parameters of the first trials, values that you know to be good. The tuner receives their results,
        and they count in the number of trials. Values outside the search space are used, with a warning.
    objectives: What the search is for, see several objectives.
    constraints: Bounds of metrics; a trial outside is never the best.
    notify: Recipients of notifications about the experiment's end, an error, or failed trials in a row.
    experiment_type: `hpo`, hyper-parameter optimization, is the only supported type.
    search_space_file: A JSON file, or a YAML file (`.yml`, `.yaml`), see search space.
    search_space: The search space itself.
    use_annotation: The search space is that of the annotations in the code folder; if they name no hyper-parameter,
        that of the file is used.
    experiment_working_directory: The folder for the experiment's data.
    tuner: The algorithm that proposes parameters.
    tuner_gpu_indices: Accepted, without effect on these tuners.
    assessor: The algorithm that stops trials early.
    advisor: An algorithm that replaces both tuner and assessor.
    trial_code_directory: The folder with the training code.
    trial_command: Run by bash in the code folder.
    trial_gpu_number: GPUs per trial; `0` hides all GPUs from a trial.
    training_service: The platform that runs trials, and its keys.
    """

    parts: ClassVar[Mapping[str, type[ConfigBase]]] = {
        "tuner": AlgorithmConfig,
        "assessor": AlgorithmConfig,
        "advisor": AlgorithmConfig,
        "training_service": TrainingServiceConfig,
    }
    experiment_name: str | None = None
    """The name in lists. Value: a name. Default: that of the program."""
    description: str | None = None
    """Text for people. Since 0.6, not in NNI."""
    trial_concurrency: int | None = None
    """The number of trials that run at a time. Value: a whole number from 1 to 99999."""
    max_experiment_duration: Seconds | None = None
    """The time after which no more trials are started. One whose job waits in a queue of the cluster still runs. Value:
    a whole number and one of s, m, h, d. Default: no limit."""
    max_trial_number: int | None = None
    """The number of trials to start, including failed ones. Value: a whole number from 1 to 999999999. Default: no
    limit."""
    max_trial_duration: Seconds | None = None
    """The maximum duration of one trial; then it is stopped. Value: a whole number and one of s, m, h, d. Default: no
    limit."""
    max_trial_retry: int | None = None
    """How often a trial is retried whose job or keeper the cluster lost. Value: a whole number from 0 to 99. Since 0.6,
    not in NNI. Default: `0`."""
    max_preemptions: int | None = None
    """How often a trial starts again whose job the cluster preempted; not counted as retries. Value: a whole number
    from 0 to 9999. Since 0.7, not in NNI. Default: `100`."""
    lost_node_timeout: Seconds | None = None
    """How long a node of a job on a cluster may be not ready, and its keeper silent, until the job is lost. Value: a
    whole number and one of s, m, h, d. Since 0.7, not in NNI. Default: `5m`."""
    fail_fast: int | None = None
    """After how many failed trials no more are started, if none has succeeded before: a script that is wrong fails in
    every trial. Failures of the cluster do not count. `False` starts all trials. Value: false, or a whole number from 1
    to 99999. Since 0.7, not in NNI. Default: `10`."""
    nni_manager_ip: str | None = None
    """Where keepers on a cluster reach this machine; without effect where trials run here. Value: an IPv4 address or a
    host name. Default: detected."""
    debug: bool | None = None
    """More log; and no version check, unless `version_check` is written. Default: `False`."""
    version_check: bool | None = None
    """Refuse a keeper whose version differs from the manager's in the first two numbers. Since 0.6, not in NNI.
    Default: `True`, with `debug` `False`."""
    log_level: str | None = None
    """The detail of the manager's log. Value: one of trace, debug, info, warning, error, fatal. Default: `info`."""
    log_collection: str | None = None
    """`http`: trials' output is sent to the manager as well, at 5 MB/s at most while a trial runs, the rest when it has
    ended, and 1 GiB of each. `none`: only metrics are sent. Value: none or http. Since 0.6, not in NNI. Default:
    `none`."""
    reuse_idle_timeout: Seconds | None = None
    """With reuse, how long a job waits for its next trial before it leaves. Value: a whole number and one of s, m, h,
    d. Since 0.6, not in NNI. Default: `10m`."""
    max_trials_per_job: int | None = None
    """With reuse, after how many trials a job leaves and a new one is requested; `0`: never. Value: a whole number from
    0 to 999999999. Since 0.6, not in NNI. Default: `0`."""
    warm_imports: list[str] | None = None
    """With reuse, modules that trials find imported, see warm starts. Value: a list of module names. Since 0.6, not in
    NNI."""
    initial_trials: list[dict[str, Any]] | None = None
    """Parameters of the first trials, values that you know to be good. The tuner receives their results, and they count
    in the number of trials. Values outside the search space are used, with a warning. Value: a list of parameters of
    trials. Since 0.7, not in NNI."""
    objectives: list[dict[str, Any]] | None = None
    """What the search is for, see several objectives. Since 0.7, not in NNI. Default: the reported number, `default`,
    in the tuner's `optimize_mode`."""
    constraints: list[dict[str, Any]] | None = None
    """Bounds of metrics; a trial outside is never the best. Since 0.7, not in NNI."""
    notify: list[dict[str, Any]] | None = None
    """Recipients of notifications about the experiment's end, an error, or failed trials in a row. Since 0.7, not in
    NNI."""
    experiment_type: str | None = None
    """`hpo`, hyper-parameter optimization, is the only supported type. Value: hpo."""
    search_space_file: PathOrText | None = None
    """A JSON file, or a YAML file (`.yml`, `.yaml`), see search space. Value: the path of a JSON file."""
    search_space: Mapping[str, Any] | None = None
    """The search space itself. Value: a mapping of hyper-parameters. Default: see `search_space_file`."""
    use_annotation: bool | None = None
    """The search space is that of the annotations in the code folder; if they name no hyper-parameter, that of the file
    is used. Default: `False`."""
    experiment_working_directory: PathOrText | None = None
    """The folder for the experiment's data. Value: a folder. Default: `~/nni-experiments`."""
    tuner: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The algorithm that proposes parameters. Default: `Auto`."""
    tuner_gpu_indices: GpuIndices | None = None
    """Accepted, without effect on these tuners. Value: GPU numbers separated by commas."""
    assessor: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The algorithm that stops trials early."""
    advisor: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """An algorithm that replaces both tuner and assessor."""
    trial_code_directory: PathOrText | None = None
    """The folder with the training code. Value: a folder. Default: `.`."""
    trial_command: str | None = None
    """Run by bash in the code folder. Value: a shell command."""
    trial_gpu_number: int | None = None
    """GPUs per trial; `0` hides all GPUs from a trial. Value: a whole number from 0 to 99999. Default: the trial sees
    what the machine shows."""
    training_service: TrainingServiceConfig = field(default_factory=TrainingServiceConfig)
    """The platform that runs trials, and its keys."""
