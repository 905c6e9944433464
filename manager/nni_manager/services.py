"""From an experiment's file to the cluster it runs on: the one place that knows all kinds of training services.

What belongs to one kind is imported where an experiment of that kind needs it: OpenPAI's schema and HTTP client are a fifth
of what a manager would otherwise import.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nni_manager.config.mistakes import ConfigInvalid
from nni_manager.config.model import (
    MOUNT,
    AzureStorage,
    ClaimStorage,
    ExperimentConfig,
    KubernetesConfig,
    NfsStorage,
    PaiConfig,
)
from nni_manager.errors import NniManagerError, UserMistake
from nni_manager.store.folders import OPEN_TO_ALL, ExperimentFolder
from nni_manager.training_services.base import JobEnded, TrainingService
from trial_keeper.wire.workspace import Workspace

if TYPE_CHECKING:
    from nni_manager.local_openpai.service import Service
    from nni_manager.training_services.kubernetes.azure_share import AzureShare
    from nni_manager.training_services.kubernetes.operator import Operator
    from nni_manager.training_services.openpai.job import JobTemplate
    from nni_manager.training_services.openpai.protocol import Storage
    from nni_manager.training_services.openpai.rest import OpenPai
    from nni_manager.training_services.patience import Patience

_LOOPBACK = "127."
# The cluster of this machine is asked by few, and sets them no limit.
_POLL_HERE_S = 1.0
# Any port: asking which way packets would take sends none.
_ANY_PORT = 9


def make_service(
    config: ExperimentConfig, folder: ExperimentFolder
) -> Callable[[Callable[[JobEnded], None]], TrainingService]:
    """What makes the experiment's training service, on the loop where it will live.

    Raises:
        UserMistake: the cluster or its job file cannot be used.
        TryAgain: the cluster of this machine does not start now.
    """
    if config.kubernetes is not None:
        return _on_kubernetes(config, config.kubernetes, folder)
    pai = config.pai
    if pai is None:
        from nni_manager.training_services.local.client import LocalTrainingService

        return lambda on_job_ended: LocalTrainingService(config, folder.workspace, folder.jobs, on_job_ended)
    from nni_manager.local_openpai.runner import mounts_work
    from nni_manager.training_services.openpai.client import POLL_S, OpenPaiService
    from nni_manager.training_services.openpai.job import template_of

    if pai.is_local and not mounts_work():
        # Tasks of this machine then see the storage where it is.
        pai = replace(pai, mount=str(pai.storage))
    template = template_of(pai)
    login = partial(_todays_login, config, pai)
    cluster = open_cluster(login(), template, newer_token=lambda: login().token)
    return lambda on_job_ended: OpenPaiService(
        cluster,
        template,
        pai.mount,
        folder.workspace,
        on_job_ended,
        poll_s=_POLL_HERE_S if pai.is_local else POLL_S,
        python=sys.executable if pai.is_local else None,
    )


def checkpoints_of(config: ExperimentConfig, folder: ExperimentFolder) -> Path:
    """Where trials keep what later trials go on from, as trials see it; made where the tuner speaks of it.

    Raises:
        OSError: the storage does not take the folder.
    """
    from nni_manager.local_openpai.runner import mounts_work

    if config.tuner.name == "PBTTuner":
        checkpoints = folder.workspace.checkpoints
        checkpoints.mkdir(exist_ok=True)
        if config.pai is not None or config.kubernetes is not None:
            checkpoints.chmod(OPEN_TO_ALL)  # for the users that containers run as
    if config.kubernetes is not None:
        return Workspace(Path(MOUNT) / folder.experiment_id).checkpoints
    if config.pai is None or (config.pai.is_local and not mounts_work()):
        return folder.workspace.checkpoints.resolve()
    return Workspace(Path(config.pai.mount) / folder.experiment_id).checkpoints


def open_cluster(
    pai: PaiConfig,
    template: JobTemplate | None = None,
    patience: Patience | None = None,
    newer_token: Callable[[], str | None] = lambda: None,
) -> OpenPai:
    """The cluster that an experiment file names. `template`: what runs there, so that this machine's own is fit for it.

    `newer_token`: see `OpenPai`.

    Raises:
        UserMistake: it names none, or that of this machine cannot be had.
    """
    if pai.is_local:
        return _cluster_of_this_machine(pai, template, patience)
    from nni_manager.training_services.openpai.rest import OpenPai

    return OpenPai(
        pai.host,
        pai.user,
        token=pai.token,
        password=pai.password,
        newer_token=newer_token,
        patience=patience,
    )


def _cluster_of_this_machine(
    pai: PaiConfig, template: JobTemplate | None, patience: Patience | None
) -> OpenPai:
    """The cluster that this machine brings along, begun if it does not run, with the storage that jobs ask for.

    Raises:
        UserMistake: it cannot be started, or has another folder as that storage.
    """
    from nni_manager.local_openpai import service as local_openpai

    try:
        pai.storage.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserMistake(
            f"cannot make trial.nniManagerNFSMountPath {pai.storage}: {error.strerror}; name a folder that can be made"
        ) from error
    state = local_openpai.StateFolder.of_user()
    known = local_openpai.running(state)
    options = known.process.options if known else local_openpai.last_options(state)
    wanted = None if template is None else template.storage_at(pai.mount)
    if wanted is not None and wanted.name not in options.storages:
        # To begin again with one more storage disturbs no job: those that run go on.
        local_openpai.stop(state)
        storages = {**options.storages, wanted.name: str(_shown_at(pai, wanted))}
        known = local_openpai.start(state, replace(options, storages=storages))
    service = known or local_openpai.start(state)
    found = service.process.options.storages
    if wanted is not None and not _is_same(Path(found[wanted.name]), _shown_at(pai, wanted)):
        raise UserMistake(
            f"cannot use trial.nniManagerNFSMountPath {pai.storage}: the OpenPAI of this machine has {found[wanted.name]} as its "
            f"storage {wanted.name}; write that path, or give your folder another name in paiStorageConfigName and "
            "containerNFSMountPath"
        )
    return _entered(service, patience)


def _entered(service: Service, patience: Patience | None) -> OpenPai:
    from nni_manager.training_services.openpai.rest import OpenPai

    access = service.credentials
    return OpenPai(service.process.address, access.user, token=access.token, patience=patience, is_own=True)


def _shown_at(pai: PaiConfig, storage: Storage) -> Path:
    """The folder that has to be the storage, for containers to see `pai.storage` at `pai.mount`."""
    below = PurePosixPath(pai.mount).relative_to(storage.mount_path).parts
    if pai.storage.parts[len(pai.storage.parts) - len(below) :] != below:
        raise UserMistake(
            f"cannot use trial.containerNFSMountPath {pai.mount} with nniManagerNFSMountPath {pai.storage}: they must end alike "
            f"below {storage.mount_path}; write containerNFSMountPath: {storage.mount_path}"
        )
    return pai.storage.parents[len(below) - 1] if below else pai.storage


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def running_here(patience: Patience | None = None) -> OpenPai | None:
    """The cluster that this machine brings along, if it runs.

    Raises:
        UserMistake: nobody can tell.
    """
    from nni_manager.local_openpai import service as local_openpai

    service = local_openpai.running(local_openpai.StateFolder.of_user())
    return None if service is None else _entered(service, patience)


def _on_kubernetes(
    config: ExperimentConfig, kubernetes: KubernetesConfig, folder: ExperimentFolder
) -> Callable[[Callable[[JobEnded], None]], TrainingService]:
    from nni_manager.training_services.kubernetes.api import Kubernetes
    from nni_manager.training_services.kubernetes.service import KubernetesService

    refuse_nameless_claim(config)
    logins = {}
    for path in {role.registry_login for role in kubernetes.roles if role.registry_login is not None}:
        try:
            logins[path] = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserMistake(
                f"cannot read privateRegistryAuthPath {path}: {error}; log in to the registry again with `docker login`"
            ) from error
    cluster, operator = Kubernetes(), operator_of(kubernetes)
    share = share_of(config, folder.workspace)
    return lambda on_job_ended: KubernetesService(
        cluster, operator, folder.workspace, on_job_ended, logins, share
    )


def operator_of(kubernetes: KubernetesConfig) -> Operator:
    """Who runs the jobs of an experiment on Kubernetes."""
    if kubernetes.operator == "frameworkcontroller":
        from nni_manager.training_services.frameworkcontroller.operator import FrameworkController

        return FrameworkController(kubernetes)
    from nni_manager.training_services.kubeflow.operators import OPERATORS

    return OPERATORS[kubernetes.operator](kubernetes)


def refuse_nameless_claim(config: ExperimentConfig) -> None:
    """Refuse a claim without a name: files may leave it out, as in NNI, and containers could not mount it.

    Raises:
        UserMistake: it is one.
    """
    kubernetes = config.kubernetes
    if kubernetes is None:
        return
    match kubernetes.storage:
        case ClaimStorage(path, None):
            raise UserMistake(
                f"cannot run {config.config_path.name} with pvc alone: containers mount the claim by its name; write it "
                f"beside the path, e.g. pvc: {{path: {path}, name: nni}}"
            )


def storage_here(config: ExperimentConfig) -> Path | None:
    """Where this machine has the storage that it shares with jobs; None when those run here, or it has a share in its place.

    Raises:
        NotMounted: it has it nowhere.
    """
    from nni_manager.training_services.mounts import folder_of_export

    if config.pai is not None:
        return config.pai.storage
    if config.kubernetes is None:
        return None
    match config.kubernetes.storage:
        case NfsStorage(server, path):
            return folder_of_export(server, path)
        case ClaimStorage(path):
            return path
        case AzureStorage():
            return None


def share_of(
    config: ExperimentConfig, workspace: Workspace, patience: Patience | None = None
) -> AzureShare | None:
    """The share that the experiment's jobs mount and this machine does not; None where there is none.

    Raises:
        AzureMissing, KeyUnreadable, VaultAway: it cannot be used.
    """
    if config.kubernetes is None or not isinstance(config.kubernetes.storage, AzureStorage):
        return None
    try:
        from nni_manager.training_services.kubernetes.azure_share import AzureShare
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("azure"):
            raise
        from nni_manager.training_services.kubernetes.errors import AzureMissing

        raise AzureMissing from error
    return AzureShare(config.kubernetes.storage, workspace.root, patience)


def remove_from_share(config: ExperimentConfig, workspace: Workspace) -> str:
    """Remove what lies on the experiment's share, if it has one; why that was not possible, else empty."""
    from nni_manager.training_services.patience import Patience

    try:
        share = share_of(config, workspace, Patience(tries=2))
        if share is not None:
            with contextlib.closing(share):
                share.remove(workspace.root)
    except NniManagerError as error:
        return f"{error}. Its folder {workspace.root.name} stays there: remove it in Azure's portal"
    return ""


def address_for_keepers(config: ExperimentConfig) -> str:
    """The address of this machine at which the jobs' keepers reach it: loopback where they run here.

    Raises:
        UserMistake: the cluster's host has no address.
    """
    if config.kubernetes is None and (config.pai is None or config.pai.is_local):
        return "127.0.0.1"
    if config.nni_manager_ip is not None:
        return config.nni_manager_ip
    what, host = _cluster_address(config)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _ANY_PORT))
        except OSError as error:
            raise UserMistake(
                f"cannot find the way to {what} at {host}: {error.strerror}; correct that address, or write the address of this "
                "machine as nniManagerIp"
            ) from error
        address: str = probe.getsockname()[0]
    return address


def _cluster_address(config: ExperimentConfig) -> tuple[str, str | None]:
    if config.pai is not None:
        return "OpenPAI", urlsplit(open_cluster(config.pai).address).hostname
    from nni_manager.training_services.kubernetes.login import log_in

    return "Kubernetes", urlsplit(log_in().address).hostname


def listens_at(address: str) -> str:
    """Where to listen so that `address` is reached: only there on loopback, else on all networks of this machine."""
    return address if address.startswith(_LOOPBACK) else "0.0.0.0"


def _todays_login(config: ExperimentConfig, stored: PaiConfig) -> PaiConfig:
    """The login of the experiment file as it is now: tokens expire, and experiments last."""
    from nni_manager.config.reader import read_experiment_file

    try:
        today = read_experiment_file(config.config_path, reads_code=False).pai
    except ConfigInvalid:
        return stored
    is_the_same = today is not None and (today.host, today.user) == (stored.host, stored.user)
    return today if today is not None and is_the_same else stored
