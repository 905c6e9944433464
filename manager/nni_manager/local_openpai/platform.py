"""The local OpenPAI as a platform of experiments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from nni_manager.errors import UserError
from nni_manager.local_openpai import daemon
from nni_manager.local_openpai.container_runtime import mounts_work
from nni_manager.local_openpai.settings import Sandbox
from nni_manager.support.keeper_bundle import bundle_for
from nni_manager.training_services.openpai.client import ClusterHere
from nni_manager.training_services.openpai.connection import PaiLogin
from nni_manager.training_services.openpai.job import JobTemplate
from nni_manager.training_services.openpai.platform import OpenPaiPlatform
from nni_manager.training_services.openpai.protocol import Storage
from nni_manager.training_services.openpai.rest import OpenPai
from nni_manager.training_services.openpai.section import PaiConfig
from nni_manager.training_services.retry_policy import ClientRetryPolicy

# The local OpenPAI serves few clients and has no rate limit.
_POLL_INTERVAL_S = 1.0


class LocalOpenPaiPlatform(OpenPaiPlatform):
    """The OpenPAI of this machine. It is started when an experiment needs it."""

    keepers_run_here = True

    @property
    def runs_as_manager(self) -> bool:
        """True if tasks are processes; in containers they run as other users than the manager's."""
        process = daemon.StateFolder.of_user().process()
        return process is None or process.options.sandbox == Sandbox.PROCESS.value

    @property
    def mount(self) -> str | None:
        """None without mounts: tasks then see the storage at its own path."""
        return self.pai.mount if mounts_work() else None

    @property
    def pai_of_jobs(self) -> PaiConfig:
        """The section with the path at which tasks see the storage."""
        return self.pai if mounts_work() else replace(self.pai, mount=str(self.pai.storage))

    def service_options(self) -> dict[str, Any]:
        """The options for a cluster whose daemon can be controlled."""
        state = daemon.StateFolder.of_user()
        return {
            "poll_s": _POLL_INTERVAL_S,
            "python": sys.executable,
            "bundle": None if self.runs_as_manager else bundle_for(self.pai.keeper),
            "runs_as_manager": self.runs_as_manager,
            "here": ClusterHere(partial(daemon.wake, state), partial(daemon.replace_unresponsive, state)),
        }

    def open_cluster(
        self,
        template: JobTemplate | None = None,
        retry_policy: ClientRetryPolicy | None = None,
        current_login: Callable[[], PaiLogin | None] = lambda: None,
    ) -> OpenPai:
        """The local OpenPAI, started if it does not run, with the storage that jobs need.

        Raises:
            UserError: OpenPAI cannot be started, or the storage of that name is another folder.
        """
        pai = self.pai
        try:
            pai.storage.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot create trial.nniManagerNFSMountPath {pai.storage}: {error.strerror}; write a path that can be created"
            ) from error
        state = daemon.StateFolder.of_user()
        wanted = None if template is None else template.job.storage_at(pai.mount)
        with state.restarts_alone():
            known = daemon.running(state)
            options = known.process.options if known else daemon.last_options(state)
            if wanted is not None and wanted.name not in options.storages:
                # A restart with one more storage does not disturb running jobs.
                daemon.stop(state)
                storages = {**options.storages, wanted.name: str(parent_shown_at(pai, wanted))}
                known = daemon.start(state, replace(options, storages=storages))
            service = daemon.with_valid_token(known or daemon.start(state))
        if wanted is None:
            return _client_of(service, retry_policy)
        found, expected = Path(service.process.options.storages[wanted.name]), parent_shown_at(pai, wanted)
        if not (found.exists() and expected.exists() and found.samefile(expected)):
            raise UserError(
                f"cannot use trial.nniManagerNFSMountPath {pai.storage}: storage {wanted.name} of the local OpenPAI is "
                f"{found}; write that path, or another storage name in paiStorageConfigName and containerNFSMountPath"
            )
        return _client_of(service, retry_policy)


def running_here(retry_policy: ClientRetryPolicy | None = None) -> OpenPai | None:
    """The local OpenPAI; None if it does not run.

    Raises:
        UserError: the state of OpenPAI cannot be determined.
    """
    service = daemon.running(daemon.StateFolder.of_user())
    return None if service is None else _client_of(service, retry_policy)


def _client_of(service: daemon.Service, retry_policy: ClientRetryPolicy | None) -> OpenPai:
    access = service.credentials
    return OpenPai(
        service.process.address,
        access.user,
        token=access.token,
        current_login=lambda: PaiLogin((service.state.credentials() or access).token),
        retry_policy=retry_policy,
        is_own=True,
    )


def parent_shown_at(pai: PaiConfig, storage: Storage) -> Path:
    """The folder that must be the storage, so that containers see `pai.storage` at `pai.mount`.

    Raises:
        UserError: there is no such folder.
    """
    below = PurePosixPath(pai.mount).relative_to(storage.mount_path).parts
    if pai.storage.parts[len(pai.storage.parts) - len(below) :] != below:
        raise UserError(
            f"cannot use trial.nniManagerNFSMountPath {pai.storage} with containerNFSMountPath {pai.mount}: both must end with "
            f"{'/'.join(below)}; write containerNFSMountPath: {storage.mount_path}"
        )
    return pai.storage.parents[len(below) - 1] if below else pai.storage
