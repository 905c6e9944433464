"""The OpenPAI parts of an experiment file: checks across several keys, and the settings of its jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nni_manager.config.diagnostics import Place, ref
from nni_manager.config.dialect import Keys
from nni_manager.config.experiment_schema import OpenpaiExperimentKeys
from nni_manager.config.keys import SERVICE, keys_on
from nni_manager.config.kubernetes import Refuse
from nni_manager.config.model import LOCAL_HOST, PaiConfig
from nni_manager.config.schema import example_of

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


def refuse_missing(value: Mapping[str, Any], service: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse the lack of each key that a job needs, unless a job file describes the job."""
    if service.get("openpaiConfigFile") is not None:
        return
    examples = {key.path: example_of(key.field) for key in keys_on("openpai")}
    for place, other in _NEEDED.items():
        given = (value if len(place) == 1 else service).get(place[-1])
        if given is None and (other is None or service.get(other) is None):
            why = f"each job on OpenPAI requires it; write e.g. {ref(place, examples[place])}, or name a job file in "
            refuse(place, why + "«trainingService.openpaiConfigFile»", "do without")


def reason_against_login(service: Mapping[str, Any], refuse: Refuse) -> tuple[Place, str] | None:
    """The place and the message if there is not exactly one of token and password. A missing user is refused."""
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


def pai_of(
    file: OpenpaiExperimentKeys, storage: Path, job_file: Path | None, job_text: str | None
) -> PaiConfig:
    """The cluster and its jobs, of a file without diagnostics."""
    service, gpu = file.training_service, file.trial_gpu_number
    cpu, memory_mb = service.trial_cpu_number, service.trial_memory_size
    return PaiConfig(
        host=service.host,
        user=service.username or "",
        token=service.token,
        password=service.password,
        storage=storage,
        mount=service.container_storage_mount_point.rstrip("/") or "/",
        image=service.docker_image,
        storage_name=service.storage_config_name,
        virtual_cluster=service.virtual_cluster,
        gpu=service.gpu_num if gpu is None else gpu,
        cpu=service.cpu_num if cpu is None else cpu,
        memory_mb=service.memory_mb if memory_mb is None else memory_mb,
        job_file=job_file,
        job_text=job_text,
    )
