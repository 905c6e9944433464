"""Creates the training service of an experiment; the only module that depends on all kinds of training services.

Modules of one kind are imported only for experiments of that kind: OpenPAI's schema and HTTP client alone would be a fifth
of a manager's imports.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nni_manager.config import model
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.errors import NniManagerError, UserError
from nni_manager.store.folders import WORLD_WRITABLE_STICKY, ExperimentFolder
from nni_manager.training_services.base import JobEnded, TrainingService
from trial_keeper.wire.workspace import Workspace

if TYPE_CHECKING:
    from nni_manager.local_openpai.daemon import Service
    from nni_manager.training_services.kubernetes.azure_share import AzureShare
    from nni_manager.training_services.kubernetes.operator import Operator
    from nni_manager.training_services.openpai.job import JobTemplate
    from nni_manager.training_services.openpai.protocol import Storage
    from nni_manager.training_services.openpai.rest import OpenPai
    from nni_manager.training_services.retry_policy import ClientRetryPolicy

_LOOPBACK = "127."
# The local OpenPAI serves few clients and has no rate limit.
_POLL_HERE_S = 1.0
# Any port: connecting a UDP socket selects the route and sends no packet.
_ANY_PORT = 9


def make_service(
    config: model.ExperimentSpec, folder: ExperimentFolder
) -> Callable[[Callable[[JobEnded], None]], TrainingService]:
    """A factory for the experiment's training service, to be called on the event loop that will run it.

    Raises:
        UserError: the cluster or its job file cannot be used.
        RetryableError: the local OpenPAI cannot start now.
    """
    if config.kubernetes is not None:
        return _on_kubernetes(config, config.kubernetes, folder)
    pai = config.pai
    if pai is None:
        from nni_manager.training_services.local.client import LocalTrainingService

        return lambda on_job_ended: LocalTrainingService(config, folder.workspace, folder.jobs, on_job_ended)
    from nni_manager.local_openpai import daemon as local_openpai
    from nni_manager.local_openpai.container_runtime import mounts_work
    from nni_manager.training_services.openpai.client import POLL_S, ClusterHere, OpenPaiService
    from nni_manager.training_services.openpai.job import template_of

    if pai.is_local and not mounts_work():
        # Without mounts, tasks on this machine see the storage at its own path.
        pai = replace(pai, mount=str(pai.storage))
    template = template_of(pai)
    login = partial(_current_login, config, pai)
    cluster = open_cluster(login(), template, newer_token=lambda: login().token)
    state = local_openpai.StateFolder.of_user()
    here = ClusterHere(partial(local_openpai.wake, state), partial(local_openpai.replace_unresponsive, state))
    return lambda on_job_ended: OpenPaiService(
        cluster,
        template,
        pai.mount,
        folder.workspace,
        on_job_ended,
        poll_s=_POLL_HERE_S if pai.is_local else POLL_S,
        python=sys.executable if pai.is_local else None,
        runs_as_manager=pai.is_local and not _uses_containers(),
        which="" if pai.is_local else _which_cluster(config, pai),
        here=here if pai.is_local else None,
    )


def _which_cluster(config: model.ExperimentSpec, pai: model.PaiConfig) -> str:
    """The nnictl options that select the cluster. An experiment file contains the login as well."""
    if config.config_path.is_file():
        return f"--config {shlex.quote(str(config.config_path))}"
    return f"--host {shlex.quote(pai.host)} --user {shlex.quote(pai.user)}"


def _uses_containers() -> bool:
    """True if the local OpenPAI runs tasks in containers, as other users than the manager's."""
    from nni_manager.local_openpai import daemon as local_openpai
    from nni_manager.local_openpai.settings import Sandbox

    process = local_openpai.StateFolder.of_user().process()
    return process is not None and process.options.sandbox != Sandbox.PROCESS.value


def checkpoints_of(config: model.ExperimentSpec, folder: ExperimentFolder) -> Path:
    """The path of the checkpoint folder inside trials. The folder is created if the tuner uses it.

    Raises:
        OSError: the storage refuses the folder.
    """
    if config.tuner.name == "PBTTuner":
        checkpoints = folder.workspace.checkpoints
        checkpoints.mkdir(0o755, exist_ok=True)
        is_private = config.pai is None or (config.pai.is_local and not _uses_containers())
        if config.kubernetes is not None or not is_private:
            checkpoints.chmod(WORLD_WRITABLE_STICKY)  # for the users that containers run as
    if config.kubernetes is not None:
        return Workspace(Path(model.MOUNT) / folder.experiment_id).checkpoints
    if config.pai is None:
        return folder.workspace.checkpoints.resolve()
    # Not at the top: with what it imports, managers of other platforms would start a quarter of a second later.
    from nni_manager.local_openpai.container_runtime import mounts_work

    if config.pai.is_local and not mounts_work():
        return folder.workspace.checkpoints.resolve()
    return Workspace(Path(config.pai.mount) / folder.experiment_id).checkpoints


def open_cluster(
    pai: model.PaiConfig,
    template: JobTemplate | None = None,
    retry_policy: ClientRetryPolicy | None = None,
    newer_token: Callable[[], str | None] = lambda: None,
) -> OpenPai:
    """The OpenPAI cluster that an experiment file names.

    `template`: the jobs' template, whose storage is added to the local OpenPAI. `newer_token`: see `OpenPai`.

    Raises:
        UserError: the file names no cluster, or the local one is not available.
    """
    if pai.is_local:
        return _cluster_of_this_machine(pai, template, retry_policy)
    from nni_manager.training_services.openpai.rest import OpenPai

    return OpenPai(
        pai.host,
        pai.user,
        token=pai.token,
        password=pai.password,
        newer_token=newer_token,
        retry_policy=retry_policy,
    )


def _cluster_of_this_machine(
    pai: model.PaiConfig, template: JobTemplate | None, retry_policy: ClientRetryPolicy | None
) -> OpenPai:
    """The local OpenPAI, started if it does not run, with the storage that jobs need.

    Raises:
        UserError: OpenPAI cannot be started, or the storage of that name is another folder.
    """
    from nni_manager.local_openpai import daemon as local_openpai

    try:
        pai.storage.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create trial.nniManagerNFSMountPath {pai.storage}: {error.strerror}; write a path that can be created"
        ) from error
    state = local_openpai.StateFolder.of_user()
    known = local_openpai.running(state)
    options = known.process.options if known else local_openpai.last_options(state)
    wanted = None if template is None else template.job.storage_at(pai.mount)
    if wanted is not None and wanted.name not in options.storages:
        # A restart with one more storage does not disturb running jobs.
        local_openpai.stop(state)
        storages = {**options.storages, wanted.name: str(_shown_at(pai, wanted))}
        known = local_openpai.start(state, replace(options, storages=storages))
    service = local_openpai.with_valid_token(known or local_openpai.start(state))
    if wanted is None:
        return _client_of(service, retry_policy)
    found, expected = Path(service.process.options.storages[wanted.name]), _shown_at(pai, wanted)
    if not (found.exists() and expected.exists() and found.samefile(expected)):
        raise UserError(
            f"cannot use trial.nniManagerNFSMountPath {pai.storage}: storage {wanted.name} of the local OpenPAI is "
            f"{found}; write that path, or another storage name in paiStorageConfigName and containerNFSMountPath"
        )
    return _client_of(service, retry_policy)


def _client_of(service: Service, retry_policy: ClientRetryPolicy | None) -> OpenPai:
    from nni_manager.training_services.openpai.rest import OpenPai

    access = service.credentials
    return OpenPai(
        service.process.address,
        access.user,
        token=access.token,
        newer_token=lambda: (service.state.credentials() or access).token,
        retry_policy=retry_policy,
        is_own=True,
    )


def _shown_at(pai: model.PaiConfig, storage: Storage) -> Path:
    """The folder that must be the storage, so that containers see `pai.storage` at `pai.mount`."""
    below = PurePosixPath(pai.mount).relative_to(storage.mount_path).parts
    if pai.storage.parts[len(pai.storage.parts) - len(below) :] != below:
        raise UserError(
            f"cannot use trial.nniManagerNFSMountPath {pai.storage} with containerNFSMountPath {pai.mount}: both must end with "
            f"{'/'.join(below)}; write containerNFSMountPath: {storage.mount_path}"
        )
    return pai.storage.parents[len(below) - 1] if below else pai.storage


def running_here(retry_policy: ClientRetryPolicy | None = None) -> OpenPai | None:
    """The local OpenPAI; None if it does not run.

    Raises:
        UserError: the state of OpenPAI cannot be determined.
    """
    from nni_manager.local_openpai import daemon as local_openpai

    service = local_openpai.running(local_openpai.StateFolder.of_user())
    return None if service is None else _client_of(service, retry_policy)


def _on_kubernetes(
    config: model.ExperimentSpec, kubernetes: model.KubernetesConfig, folder: ExperimentFolder
) -> Callable[[Callable[[JobEnded], None]], TrainingService]:
    from nni_manager.training_services.kubernetes.api import Kubernetes
    from nni_manager.training_services.kubernetes.backend import KubernetesService

    refuse_nameless_claim(config)
    logins = {}
    for path in {role.registry_login for role in kubernetes.roles if role.registry_login is not None}:
        try:
            logins[path] = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read privateRegistryAuthPath {path}: {error}; log in to the registry again with `docker login`"
            ) from error
    cluster, operator = Kubernetes(), operator_of(kubernetes)
    share = share_of(config, folder.workspace)
    return lambda on_job_ended: KubernetesService(
        cluster, operator, folder.workspace, on_job_ended, logins, share
    )


def operator_of(kubernetes: model.KubernetesConfig) -> Operator:
    """The Kubernetes operator that runs the experiment's jobs."""
    if kubernetes.operator == "frameworkcontroller":
        from nni_manager.training_services.frameworkcontroller.operator import FrameworkController

        return FrameworkController(kubernetes)
    from nni_manager.training_services.kubeflow.operators import OPERATORS

    return OPERATORS[kubernetes.operator](kubernetes)


def refuse_nameless_claim(config: model.ExperimentSpec) -> None:
    """Refuse a claim without a name: experiment files may omit the name, but containers cannot mount such a claim.

    Raises:
        UserError: the claim has no name.
    """
    match config.kubernetes and config.kubernetes.storage:
        case model.ClaimStorage(path, None):
            raise UserError(
                f"cannot use pvc in {config.config_path.name}: the claim has no name, by which containers mount it; write "
                f"e.g. pvc: {{path: {path}, name: nni}}"
            )


def storage_here(config: model.ExperimentSpec) -> Path | None:
    """Local path of the storage that jobs share; None if jobs run here, or if an Azure share is used instead.

    Raises:
        UserError: the storage is not mounted on this machine.
    """
    from nni_manager.training_services.mounts import folder_of_export

    if config.pai is not None:
        return config.pai.storage
    match config.kubernetes and config.kubernetes.storage:
        case model.NfsStorage(server, path):
            return folder_of_export(server, path)
        case model.ClaimStorage(path):
            return path
    return None


def share_of(
    config: model.ExperimentSpec, workspace: Workspace, retry_policy: ClientRetryPolicy | None = None
) -> AzureShare | None:
    """The Azure share that jobs mount and this machine does not; None if the jobs use other storage.

    Raises:
        UserError, RetryableError: the share cannot be used.
    """
    if config.kubernetes is None or not isinstance(config.kubernetes.storage, model.AzureStorage):
        return None
    try:
        from nni_manager.training_services.kubernetes.azure_share import AzureShare
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("azure"):
            raise
        raise UserError(
            "cannot use Azure's storage: the Python clients are not installed; run `pip install 'trial-keeper[azure]'`"
        ) from error
    return AzureShare(config.kubernetes.storage, workspace.root, retry_policy)


def remove_from_share(config: model.ExperimentSpec, workspace: Workspace) -> str:
    """Remove the experiment's folder from its Azure share, if any. Returns the error message; empty if none."""
    from nni_manager.training_services.retry_policy import ClientRetryPolicy

    try:
        share = share_of(config, workspace, ClientRetryPolicy(tries=2))
        if share is not None:
            with contextlib.closing(share):
                share.remove(workspace.root)
    except NniManagerError as error:
        return (
            f"{error}. The share still has folder {workspace.root.name}; delete the folder in Azure's portal"
        )
    return ""


def address_for_keepers(config: model.ExperimentSpec) -> str:
    """The address at which keepers reach this machine; loopback if they run here.

    Raises:
        UserError: there is no route to the cluster's host.
    """
    if config.kubernetes is None and (config.pai is None or config.pai.is_local):
        return "127.0.0.1"
    if config.nni_manager_ip is not None:
        return config.nni_manager_ip
    if config.pai is not None:
        what, address = "OpenPAI", open_cluster(config.pai).address
    else:
        from nni_manager.training_services.kubernetes.login import log_in

        what, address = "Kubernetes", log_in().address
    host = urlsplit(address).hostname
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _ANY_PORT))
        except OSError as error:
            raise UserError(
                f"cannot find a route to {what} at {host}: {error.strerror}; correct that address, or set nniManagerIp to the "
                "address of this machine"
            ) from error
        return str(probe.getsockname()[0])


def listens_at(address: str) -> str:
    """The address to listen on for clients of `address`: the same on loopback, otherwise all networks of this machine."""
    return address if address.startswith(_LOOPBACK) else "0.0.0.0"


def _current_login(config: model.ExperimentSpec, stored: model.PaiConfig) -> model.PaiConfig:
    """The current login in the experiment file: tokens may expire during an experiment."""
    from nni_manager.config.reader import read_experiment_file

    try:
        current = read_experiment_file(config.config_path, reads_code=False).pai
    except ConfigInvalid:
        return stored
    if current is None or (current.host, current.user) != (stored.host, stored.user):
        return stored
    return current
