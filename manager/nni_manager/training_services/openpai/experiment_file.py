"""The experiment file for OpenPAI: its keys, the checks across several keys, and the settings of its jobs."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import field_validator

from nni_manager.config.diagnostics import Diagnostic, KeyPath, ref
from nni_manager.config.dialect import SERVICE, Keys
from nni_manager.config.document import MAX_BYTES
from nni_manager.config.experiment_schema import (
    IMAGE,
    ExperimentKeys,
    ServiceKeys,
    SizeFrom100,
    keeper_source,
    size,
)
from nni_manager.config.keys import keys_on
from nni_manager.config.platform_file import PlatformFile
from nni_manager.config.schema import example_of, flag, line, mapping, must_be, text, whole
from nni_manager.config.translation import Translation
from nni_manager.support.keeper_bundle import KeeperSource
from nni_manager.training_services.openpai.section import LOCAL_HOST, PaiConfig
from trial_keeper.wire.safe_open import read_named

_IN_JOB_FILE = "required, unless a job file has it"
_WITHOUT_EFFECT = "accepted, without effect: OpenPAI gives each job its own GPUs"
_size = partial(size, "8192", what="a whole number of MB, at least 100, or a size such as 8gb")


class OpenpaiServiceKeys(ServiceKeys):
    """The training service whose trials are jobs on OpenPAI.

    The reader checks which keys are required, with and without a job file. The first schema's GPU, CPU and memory numbers in
    `paiConfig` are defaults for those of `trial`.
    """

    python_name = "OpenpaiConfig"
    # fmt: off
    host: str = must_be("the host of OpenPAI, or local for the built-in cluster on this machine", "https://openpai.example.com",
        pattern=r"^\S+$", about="the cluster, with or without `http://` or `https://`; the default scheme is `http`, in the "
        "second schema `https`. `local`: this machine")
    username: str | None = line("the name of your account there", "ada", None, v1="userName",
        unset="required, except with `host: local`", about="your account on OpenPAI")
    token: str | None = must_be("a token from your OpenPAI profile page, without blanks", "eyJhbGciOi...", None,
        pattern=r"^\S+$", repr=False, unset="required, or a password", about="your token on OpenPAI")
    password: str | None = text("your password there", "'...'", None, repr=False, v1="passWord", since="0.6",
        unset="required, or a token", about="your password on OpenPAI; tokens are fetched and renewed as needed")
    trial_cpu_number: int | None = whole(1, 99999, "1", None, v1="/trial.cpuNum", unset=_IN_JOB_FILE,
        about="the CPUs of each job")
    trial_memory_size: SizeFrom100 | None = _size(None, v1="/trial.memoryMB", unset=_IN_JOB_FILE,
        about="the memory of each job")
    docker_image: str | None = line("the name of an image", IMAGE, None, v1="/trial.image",
        unset=f"{_IN_JOB_FILE}; in the second schema NNI's image, which has no keeper",
        about="the image of the containers, [with or without the keeper](images.md)")
    virtual_cluster: str | None = line("the name of a virtual cluster", "default", None, v1="/trial.virtualCluster",
        unset="OpenPAI's `default`", about="the virtual cluster of the jobs")
    local_storage_mount_point: str = line("a folder of this machine", "/local/mnt", kind="folder",
        v1="/trial.nniManagerNFSMountPath", about="where this machine has the shared storage")
    container_storage_mount_point: str = line("an absolute path in the container", "/mnt/confignfs-data",
        v1="/trial.containerNFSMountPath", about="where containers have the same folder")
    storage_config_name: str | None = line("the name of a storage of OpenPAI", "confignfs-data", None,
        v1="/trial.paiStorageConfigName", unset=_IN_JOB_FILE, about="the name of the shared storage on OpenPAI")
    openpai_config_file: str | None = line("the path of an OpenPAI job file", "job.yml", None, kind="file",
        v1="/trial.paiConfigPath", about="[a job file of your own](openpai.md#a-job-file-of-your-own)")
    ca_file: str | None = line("the path of a PEM file", "/etc/ssl/openpai.pem", None, kind="file", since="0.7",
        unset="those that this machine trusts", about="the CA certificates to trust when the cluster is called with `https`")
    keeper: KeeperSource = keeper_source()
    gpu_num: int | None = whole(0, 99999, "1", None, only_v1=True, about="the default of `trial.gpuNum`")
    cpu_num: int | None = whole(1, 99999, "1", None, only_v1=True, about="the default of `trial.cpuNum`")
    memory_mb: SizeFrom100 | None = _size(None, alias="memoryMB", only_v1=True, about="the default of `trial.memoryMB`")
    max_trial_num_per_gpu: int = whole(1, 99999, "1", 1, only_v1=True, about=_WITHOUT_EFFECT)
    use_active_gpu: bool = flag("false", False, only_v1=True, about=_WITHOUT_EFFECT)
    # fmt: on

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


class OpenpaiExperimentKeys(ExperimentKeys):
    """The experiment file for OpenPAI."""

    # fmt: off
    trial_gpu_number: int | None = whole(0, 99999, "0", None, v1="trial.gpuNum", unset=_IN_JOB_FILE,
        about="the GPUs of each job")
    # fmt: on
    training_service: OpenpaiServiceKeys = mapping(
        "{platform: openpai}", v1="paiConfig", about="the cluster and its jobs"
    )


# The keys without which OpenPAI has no job, with the key that v1 also has in `paiConfig`.
_NEEDED: dict[Keys, str | None] = {
    ("trialCommand",): None,
    (*SERVICE, "dockerImage"): None,
    (*SERVICE, "storageConfigName"): None,
    ("trialGpuNumber",): "gpuNum",
    (*SERVICE, "trialCpuNumber"): "cpuNum",
    (*SERVICE, "trialMemorySize"): "memoryMB",
}


def is_on_local_openpai(service: Mapping[str, Any]) -> bool:
    """True if the host is the built-in cluster on this machine, which has its own login and creates its storage."""
    return str(service.get("host")).lower() == LOCAL_HOST


def refuse_missing(value: Mapping[str, Any], service: Mapping[str, Any], refuse: Callable[..., None]) -> None:
    """Refuse the lack of each key that a job needs, unless a job file describes the job."""
    if service.get("openpaiConfigFile") is not None:
        return
    examples = {key.path: example_of(key.field) for key in keys_on("openpai")}
    for key_path, other in _NEEDED.items():
        given = (value if len(key_path) == 1 else service).get(key_path[-1])
        if given is None and (other is None or service.get(other) is None):
            why = f"each job on OpenPAI requires it; write e.g. {ref(key_path, examples[key_path])}, or name a job file in "
            refuse(key_path, why + "«trainingService.openpaiConfigFile»", "do without")


def reason_against_login(
    service: Mapping[str, Any], refuse: Callable[..., None]
) -> tuple[KeyPath, str] | None:
    """The key path and the message if there is not exactly one of token and password. A missing user is refused."""
    if service.get("username") is None:
        why = "it must be the name of your OpenPAI account; write e.g. «trainingService.username: ada»"
        refuse((*SERVICE, "username"), why, "do without")
    given = [key for key in ("token", "password") if service.get(key) is not None]
    if len(given) == 1:
        return None
    both = "«trainingService.token» and «trainingService.password»"
    what = f"{both} are both set" if given else f"neither of {both} is set"
    return (*SERVICE, *given[:1]), (
        f"cannot log in to OpenPAI: {what}; write exactly one of them (your OpenPAI profile page shows tokens; "
        "application tokens do not expire)"
    )


def reason_against_storage(storage: Path, is_local: bool) -> str | None:
    """The reason why this machine cannot use the storage, with the remedy; None if it can."""
    if is_local and not storage.exists():
        return None  # the local cluster creates it
    if storage.is_dir() and os.access(storage, os.W_OK | os.X_OK):
        return None
    what = f"you cannot write to {storage}" if storage.is_dir() else f"there is no folder {storage}"
    remedy = "mount the storage there, such as `sudo mount -t nfs4 SERVER:/pai/data FOLDER`, or fix the path"
    return f"{what}; {remedy}"


_JOB_FILE = "write it into an OpenPAI job file, and set trial.paiConfigPath to that file"


class OpenpaiFile(PlatformFile):
    """The part of OpenPAI."""

    schema = OpenpaiExperimentKeys
    open_keys = ("openpaiConfig",)
    examples_v1: ClassVar = {"paiConfig": "userName: ada, token: ..., host: openpai.example.com"}
    storage_in_v1 = "trial.nniManagerNFSMountPath on OpenPAI"
    hints_v1: ClassVar = {
        "trial.paiStoragePlugin": "its name is now paiStorageConfigName; write the name of an OpenPAI storage under that key",
        "localConfig": "OpenPAI assigns machines and GPUs; remove it, and write reuse into paiConfig",
    }
    hints_v1_elsewhere: ClassVar = {
        "trial.dataDir": "OpenPAI no longer has HDFS; read data from the storage at trial.containerNFSMountPath, and remove it",
        "trial.outputDir": "OpenPAI no longer has HDFS; write to $NNI_OUTPUT_DIR on the shared storage, and remove it",
        "trial.gpuType": "a virtual cluster determines the GPU type; remove it, and set trial.virtualCluster",
        "trial.authFile": f"only OpenPAI's job files can contain a registry login; {_JOB_FILE}",
        "trial.portList": f"only OpenPAI's job files can request ports; {_JOB_FILE}",
        "trial.shmMB": f"only OpenPAI's job files can request shared memory (extraContainerOptions); {_JOB_FILE}",
    }
    why_dropped: ClassVar = {
        "paiConfig.maxTrialNumPerGpu": "it has no effect on OpenPAI",
        "paiConfig.useActiveGpu": "it has no effect on OpenPAI",
        "paiConfig.gpuNum": "trial.gpuNum takes precedence",
        "paiConfig.cpuNum": "trial.cpuNum takes precedence",
        "paiConfig.memoryMB": "trial.memoryMB takes precedence",
    }
    hints: ClassVar = {
        "trainingService.openpaiConfig": "it is not supported; write it into a file, and set «trainingService.openpaiConfigFile» "
        "to that file",
    }
    implicit = frozenset({(*SERVICE, "dockerImage")})

    @classmethod
    def convert(cls, raw: dict[str, Any], service: dict[str, Any]) -> None:
        """Move the section's numbers to the keys of a trial, where these are not set, and write v1's default scheme."""
        defaults = {
            "trialGpuNumber": (raw, "gpuNum"),
            "trialCpuNumber": (service, "cpuNum"),
            "trialMemorySize": (service, "memoryMB"),
        }
        for name, (mapping_of_v2, default) in defaults.items():
            if mapping_of_v2.get(name) is None and default in service:
                mapping_of_v2[name] = service.pop(default)
        if "://" not in service["host"] and service["host"].lower() != LOCAL_HOST:
            service["host"] = f"http://{service['host']}"

    @classmethod
    def apply_defaults(cls, file: Translation, service: dict[str, Any]) -> None:
        """Set the scheme of the host, and the image."""
        host = service.get("host")
        if isinstance(host, str) and "://" not in host and host.lower() != LOCAL_HOST:
            service["host"] = f"https://{host}"
        if "dockerImage" not in service and "openpaiConfigFile" not in service:
            file.set_default_image(service, SERVICE)

    _storage: Path | None = None
    _ca_file: Path | None = None
    _job_file: Path | None = None
    _job_text: str | None = None

    @property
    def storage(self) -> Path | None:
        """The folder of the shared storage on this machine."""
        return self._storage

    def check(self) -> None:
        """Check the login, the certificates, the storage, and that a job file or keys describe the job."""
        reading, service = self.reading, self.service
        is_local = is_on_local_openpai(service)
        refuse_missing(reading.raw, service, reading.refuse)
        reading.refuse_placeholders(*(("username", "token", "password") if is_local else ()))
        wrong = None if is_local else reason_against_login(service, reading.refuse)
        if wrong is not None:
            reading.report(*wrong)
        self._check_certificates((*SERVICE, "caFile"))
        key_path = (*SERVICE, "localStorageMountPoint")
        self._storage = reading.absolute(key_path, service.get(key_path[-1]))
        if self._storage is not None and (why := reason_against_storage(self._storage, is_local)) is not None:
            reading.refuse(key_path, why)
        if service.get("openpaiConfigFile") is not None and reading.raw.get("trialCommand") is not None:
            reading.warn(
                "«trialCommand» has no effect: the job file of «trainingService.openpaiConfigFile» has the commands; remove it"
            )
        self._read_job_file((*SERVICE, "openpaiConfigFile"))

    def _check_certificates(self, key_path: KeyPath) -> None:
        self._ca_file = self.reading.absolute(key_path, self.service.get(str(key_path[-1])))
        if self._ca_file is None:
            return
        if not str(self.service.get("host")).startswith("https://"):
            self.reading.warn(
                "«trainingService.caFile» has no effect: the cluster is called with http; remove it, or write https:// before "
                "«trainingService.host»"
            )
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self._ca_file)
        except OSError as error:
            why = (
                "it is not a PEM file with certificates"
                if isinstance(error, ssl.SSLError)
                else error.strerror
            )
            self.reading.report(
                key_path,
                f"cannot use {ref(key_path)} {self._ca_file}: {why}; name the CA's certificate in PEM format",
            )

    def _read_job_file(self, key_path: KeyPath) -> None:
        self._job_file = self.reading.absolute(key_path, self.service.get(str(key_path[-1])))
        if self._job_file is None:
            return
        try:
            self._job_text = read_named(self._job_file, MAX_BYTES).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            self.reading.report(
                key_path, f"cannot read {ref(key_path)} {self._job_file}: {why}; name an OpenPAI job file"
            )
            return
        # Imported here: most experiments have no job file.
        from nni_manager.training_services.openpai.job_checks import ProtocolInvalid
        from nni_manager.training_services.openpai.protocol import parse

        try:
            parse(self._job_text, str(self._job_file))
        except ProtocolInvalid as error:
            self.reading.diagnostics += [
                Diagnostic(each.file, each.line, each.column, each.key, each.message)
                for each in error.diagnostics
            ]

    def cluster(self, file: OpenpaiExperimentKeys) -> PaiConfig:
        """The cluster and its jobs."""
        assert self._storage is not None
        service, gpu = file.training_service, file.trial_gpu_number
        cpu, memory_mb = service.trial_cpu_number, service.trial_memory_size
        return self.same_named(
            PaiConfig,
            service,
            user=service.username or "",
            storage=self._storage,
            mount=service.container_storage_mount_point.rstrip("/") or "/",
            image=service.docker_image,
            storage_name=service.storage_config_name,
            gpu=service.gpu_num if gpu is None else gpu,
            cpu=service.cpu_num if cpu is None else cpu,
            memory_mb=service.memory_mb if memory_mb is None else memory_mb,
            ca_file=self._ca_file,
            job_file=self._job_file,
            job_text=self._job_text,
        )


FILE = OpenpaiFile
