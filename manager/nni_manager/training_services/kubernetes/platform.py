"""Kubernetes as a platform: what all operators have in common."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nni_manager.config.cluster import ClusterConfig
from nni_manager.config.model import ExperimentSpec
from nni_manager.errors import NniManagerError, UserError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.support.keeper_bundle import bundle_for
from nni_manager.training_services.kubernetes.operator import Operator
from nni_manager.training_services.kubernetes.section import (
    MOUNT,
    AzureStorage,
    ClaimStorage,
    KubernetesConfig,
    NfsStorage,
)
from nni_manager.training_services.platform import (
    Locations,
    Platform,
    PlatformCheck,
    ServiceFactory,
    storage_for_archive,
)
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from trial_keeper.wire.workspace import Workspace

if TYPE_CHECKING:
    from nni_manager.training_services.kubernetes.azure_share import AzureShare


class KubernetesPlatform(Platform):
    """A Kubernetes cluster with an operator. Containers mount the storage that the experiment file names."""

    mount = MOUNT

    def __init__(self, config: ExperimentSpec) -> None:
        super().__init__(config)
        assert isinstance(config.cluster, KubernetesConfig)
        self.kubernetes = config.cluster

    @abstractmethod
    def operator(self) -> Operator:
        """The operator that runs the experiment's jobs."""

    def make_service(self, folder: ExperimentFolder) -> ServiceFactory:
        """A factory for the service of this cluster."""
        from nni_manager.training_services.kubernetes.api import Kubernetes
        from nni_manager.training_services.kubernetes.backend import KubernetesService

        self.check_offline()
        logins = {}
        for path in {
            role.registry_login for role in self.kubernetes.roles if role.registry_login is not None
        }:
            try:
                logins[path] = path.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(
                    f"cannot read privateRegistryAuthPath {path}: {error}; log in to the registry again with `docker login`"
                ) from error
        cluster, operator = Kubernetes(), self.operator()
        share, bundle = self.share(folder.workspace), bundle_for(self.kubernetes.keeper)
        return lambda on_job_ended: KubernetesService(
            cluster, operator, folder.workspace, on_job_ended, logins, share, bundle
        )

    # ---- checks

    def check_offline(self) -> None:
        """Check the keeper's bundle.

        Raises:
            BundleUnusable: the file requires a bundle, and there is none of this version.
        """
        bundle_for(self.kubernetes.keeper)

    def check(self) -> PlatformCheck:
        """Check that Kubernetes accepts this user and has what the jobs need.

        Raises:
            UserError: with everything that is missing, or the storage is not mounted on this machine.
            UserError, RetryableError: this version does not support such jobs, or Kubernetes is unreachable.
        """
        from nni_manager.training_services.kubernetes.api import Kubernetes
        from nni_manager.training_services.kubernetes.preflight import check

        self.storage_here()
        operator = self.operator()
        with contextlib.closing(Kubernetes(retry_policy=ClientRetryPolicy(tries=2))) as cluster:
            namespace = self.kubernetes.namespace or cluster.login.namespace
            warnings = check(cluster, operator, namespace, self._problems_of_share())
            where = f"{operator.title} at {cluster.login.address}, in namespace {namespace}"
            return PlatformCheck(where, operator.warnings + warnings)

    def _problems_of_share(self) -> list[str]:
        try:
            share = self.share(Workspace(self.config.log_dir), ClientRetryPolicy(tries=2))
            if share is not None:
                with contextlib.closing(share):
                    share.check()
        except NniManagerError as error:
            return [str(error)]
        return []

    def api(self) -> tuple[str, str]:
        """The API server of the kubeconfig."""
        from nni_manager.training_services.kubernetes.login import log_in

        return "Kubernetes", log_in().address

    # ---- locations

    def storage_here(self) -> Path | None:
        """The mount of the export or of the claim's volume; None for an Azure share."""
        from nni_manager.training_services.mounts import folder_of_export

        self.check_offline()
        match self.kubernetes.storage:
            case NfsStorage(server, path):
                return folder_of_export(server, path)
            case ClaimStorage(path):
                return path
        return None

    def share(self, workspace: Workspace, retry_policy: ClientRetryPolicy | None = None) -> AzureShare | None:
        """The Azure share; None for other storage."""
        if not isinstance(self.kubernetes.storage, AzureStorage):
            return None
        try:
            from nni_manager.training_services.kubernetes.azure_share import AzureShare
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("azure"):
                raise
            raise UserError(
                "cannot use Azure's storage: the Python clients are not installed; run `pip install 'trial-keeper[azure]'`"
            ) from error
        return AzureShare(self.kubernetes.storage, workspace.root, retry_policy)

    def remove_from_share(self, workspace: Workspace) -> str:
        """Remove the experiment's folder from an Azure share. Returns the error message; empty if none."""
        try:
            share = self.share(workspace, ClientRetryPolicy(tries=2))
            if share is not None:
                with contextlib.closing(share):
                    share.remove(workspace.root)
        except NniManagerError as error:
            return f"{error}. The share still has folder {workspace.root.name}; delete the folder in Azure's portal"
        return ""

    def section_from_archive(self, locations: Locations, archive: Path) -> ClusterConfig:
        """The section with the path of a claim's volume, from the user or the archive. An NFS mount is detected instead."""
        storage = self.kubernetes.storage
        if not isinstance(storage, ClaimStorage):
            return self.kubernetes
        path = storage_for_archive(locations.storage or storage.path, archive)
        return replace(self.kubernetes, storage=replace(storage, path=path))
