"""The OpenPAI parts of an experiment file: checks across several keys, and the settings of its jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nni_manager.config.diagnostics import Place
from nni_manager.config.kubernetes import Refuse
from nni_manager.config.model import LOCAL_HOST, PaiConfig
from nni_manager.config.v1 import PaiExperimentV1

# The keys without which OpenPAI has no job, each with an example.
_NEEDED = {
    "command": "python3 train.py",
    "image": "registry.example.com/me/train:1",
    "paiStorageConfigName": "confignfs-data",
    "gpuNum": "0",
    "cpuNum": "1",
    "memoryMB": "8192",
}


def is_on_local_openpai(cluster: Mapping[str, Any]) -> bool:
    """True if `paiConfig` names the built-in cluster on this machine, which has its own login and creates its storage."""
    return str(cluster.get("host")).lower() == LOCAL_HOST


def refuse_missing(trial: Mapping[str, Any], cluster: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse the lack of each key that a job needs, unless a job file describes the job."""
    if trial.get("paiConfigPath") is not None or not trial:
        return
    for key, example in _NEEDED.items():
        if trial.get(key) is None and cluster.get(key) is None:
            why = f"each job on OpenPAI requires it; write e.g. {key}: {example}, or name a job file in "
            refuse(("trial", key), why + "trial.paiConfigPath", "do without")


def reason_against_login(cluster: Mapping[str, Any], refuse: Refuse) -> tuple[Place, str] | None:
    """The place and the message if there is not exactly one of token and password. A missing user is refused."""
    if not cluster:
        return None
    if cluster.get("userName") is None:
        why = "it must be the name of your OpenPAI account; write e.g. userName: ada"
        refuse(("paiConfig", "userName"), why, "do without")
    given = [key for key in ("token", "passWord") if cluster.get(key) is not None]
    if len(given) == 1:
        return None
    what = "token and passWord are both set" if given else "neither token nor passWord is set"
    return ("paiConfig", *given[:1]), (
        f"cannot log in with paiConfig: {what}; write exactly one of them (your OpenPAI profile page shows tokens; "
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


def pai_of(file: PaiExperimentV1, storage: Path, job_file: Path | None, job_text: str | None) -> PaiConfig:
    """The cluster and its jobs, of a file without diagnostics. Numbers in `trial` take precedence over those in `paiConfig`."""
    trial, cluster = file.trial, file.pai_config
    return PaiConfig(
        host=cluster.host,
        user=cluster.user_name or "",
        token=cluster.token,
        password=cluster.pass_word,
        storage=storage,
        mount=trial.container_nfs_mount_path.rstrip("/") or "/",
        image=trial.image,
        storage_name=trial.pai_storage_config_name,
        virtual_cluster=trial.virtual_cluster,
        gpu=cluster.gpu_num if trial.gpu_num is None else trial.gpu_num,
        cpu=cluster.cpu_num if trial.cpu_num is None else trial.cpu_num,
        memory_mb=cluster.memory_mb if trial.memory_mb is None else trial.memory_mb,
        job_file=job_file,
        job_text=job_text,
    )
