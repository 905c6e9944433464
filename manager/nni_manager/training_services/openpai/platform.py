"""OpenPAI as a platform. The local OpenPAI is one of its own, in `nni_manager.local_openpai.platform`."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nni_manager.config.cluster import ClusterConfig
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import ExperimentSpec
from nni_manager.errors import UserError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.support.keeper_bundle import bundle_for
from nni_manager.support.plain_text import escaped
from nni_manager.training_services.openpai.connection import PaiLogin
from nni_manager.training_services.openpai.job import JobTemplate, template_of
from nni_manager.training_services.openpai.rest import OpenPai
from nni_manager.training_services.openpai.section import PaiConfig
from nni_manager.training_services.platform import (
    Locations,
    Platform,
    PlatformCheck,
    ServiceFactory,
    ServiceKeys,
    storage_for_archive,
)
from nni_manager.training_services.retry_policy import ClientRetryPolicy

_KEYS_OF_LOGIN = ("host", "username", "token", "password", "caFile")
_LOCAL_OPENPAI = "nni_manager.local_openpai.platform"
_IN_PYTHON = (
    " (in Python: into config; then stop the experiment, and call Experiment(config, id=ID).resume())"
)


class _LoginUnusable(UserError):
    """A configuration has no login for the user and the cluster of the experiment."""


class OpenPaiPlatform(Platform):
    """An OpenPAI cluster. Its shared storage is mounted on this machine."""

    def __init__(self, config: ExperimentSpec) -> None:
        super().__init__(config)
        assert isinstance(config.cluster, PaiConfig)
        self.pai = config.cluster

    # ---- the cluster

    def open_cluster(
        self,
        template: JobTemplate | None = None,
        retry_policy: ClientRetryPolicy | None = None,
        current_login: Callable[[], PaiLogin | None] = lambda: None,
    ) -> OpenPai:
        """The OpenPAI cluster that the experiment file names.

        `template`: the jobs' template, whose storage is added to the local OpenPAI. `current_login`: replaces the stored login,
        also when the cluster refuses a token or a password later.

        Raises:
            UserError: the local OpenPAI is not available.
        """
        pai = self.pai
        login = current_login() or PaiLogin(pai.token, pai.password, pai.ca_file)
        return OpenPai(
            pai.host,
            pai.user,
            token=login.token,
            password=login.password,
            current_login=current_login,
            ca_file=login.ca_file,
            retry_policy=retry_policy,
        )

    def api(self) -> tuple[str, str]:
        """OpenPAI's REST server."""
        return "OpenPAI", self.open_cluster().address

    def current_login(self) -> PaiLogin:
        """The login that the experiment file contains now: tokens may expire during an experiment.

        It is the stored one if the file has no valid login for this user on this cluster; `source` has the reason.
        """
        from nni_manager.config.python_document import CALLED
        from nni_manager.config.reader import read_service_keys

        pai, path = self.pai, self.config.config_path
        stored = PaiLogin(pai.token, pai.password, pai.ca_file)
        if path.name == CALLED:  # an experiment of the Python API has no file
            return replace(stored, source=_IN_PYTHON)
        try:
            return self._login_in(read_service_keys(path, _KEYS_OF_LOGIN), path)
        except ConfigInvalid as error:
            return replace(stored, source=f" (but its login cannot be read: {error.diagnostics[0]})")
        except _LoginUnusable as error:
            return replace(stored, source=f" ({path}, {error})")

    def _login_in(self, keys: Sequence[Any], path: Path) -> PaiLogin:
        """The login of these values of `_KEYS_OF_LOGIN`, which are those of this file.

        Raises:
            _LoginUnusable: it is none for this user on this cluster; the message is a clause about the file.
        """
        host, user, token, password, ca_file = keys
        if host is None:
            raise _LoginUnusable("which has no login for OpenPAI: write it there")
        if (host, user) != (self.pai.host, self.pai.user):
            raise _LoginUnusable(
                f"whose login is for {user} at {host}: write {self.pai.user} and {self.pai.host} there, or it is not used"
            )
        if (token is None) == (password is None):
            what = "no login" if token is None else "both token and password"
            raise _LoginUnusable(f"which has {what}: write exactly one of token and password")
        certificates = (
            None if ca_file is None else Path(os.path.abspath(path.parent / os.path.expanduser(ca_file)))
        )
        return PaiLogin(token, password, certificates, f" ({path})")

    def section_with_login(self, keys: ServiceKeys) -> PaiConfig:
        """The section with the token, the password and the `caFile` of another configuration, if it has a login.

        Raises:
            UserError: that configuration has both token and password, or is for another user or cluster.
        """
        if keys(("token", "password")) == [None, None]:
            return self.pai
        try:
            login = self._login_in(keys(_KEYS_OF_LOGIN), Path.cwd() / "config")
        except _LoginUnusable as error:
            raise UserError(f"cannot log in to OpenPAI with config, {error}") from error
        return replace(self.pai, token=login.token, password=login.password, ca_file=login.ca_file)

    # ---- jobs

    @property
    def pai_of_jobs(self) -> PaiConfig:
        """The section that jobs are rendered from."""
        return self.pai

    def make_service(self, folder: ExperimentFolder) -> ServiceFactory:
        """A factory for the service of this cluster."""
        from nni_manager.training_services.openpai.client import OpenPaiService

        pai = self.pai_of_jobs
        template = template_of(pai)
        cluster = self.open_cluster(template, current_login=self.current_login)
        options = self.service_options()
        return lambda on_job_ended: OpenPaiService(
            cluster, template, pai.mount, folder.workspace, on_job_ended, **options
        )

    def service_options(self) -> dict[str, Any]:
        """The options of the service that depend on the kind of cluster."""
        return {"which": self._options_of_nnictl(), "bundle": bundle_for(self.pai.keeper)}

    def _options_of_nnictl(self) -> str:
        """The nnictl options that select the cluster. An experiment file contains the login as well."""
        if self.config.config_path.is_file():
            return f"--config {shlex.quote(str(self.config.config_path))}"
        return f"--host {shlex.quote(self.pai.host)} --user {shlex.quote(self.pai.user)}"

    # ---- locations

    def storage_here(self) -> Path | None:
        """The folder of the experiment file."""
        return self.pai.storage

    @property
    def mount(self) -> str | None:
        """The path in containers of the experiment file."""
        return self.pai.mount

    def section_from_archive(self, locations: Locations, archive: Path) -> ClusterConfig:
        """The section with the storage and the login of this machine."""
        storage = storage_for_archive(locations.storage or self.pai.storage, archive)
        token, password = os.environ.get("OPENPAI_TOKEN"), os.environ.get("OPENPAI_PASSWORD")
        if not (self.pai.is_local or token or password):
            raise UserError(
                f"cannot load {archive}: it runs on OpenPAI {escaped(self.pai.host)}, and archives contain no login; set "
                f"OPENPAI_TOKEN or OPENPAI_PASSWORD for user {escaped(self.pai.user)}"
            )
        return replace(self.pai, storage=storage, token=token, password=None if token else password)

    # ---- checks

    def check_offline(self) -> None:
        """Check the keeper's bundle.

        Raises:
            BundleUnusable: the file requires a bundle, and there is none of this version.
        """
        bundle_for(self.pai.keeper)

    def check(self) -> PlatformCheck:
        """Check that OpenPAI accepts this user and has the resources of the jobs. Starts the local OpenPAI if the file uses it.

        Raises:
            ProtocolInvalid: the job file is invalid.
            UserError: the storage or virtual cluster is not available to this user, or no node is large enough.
            RetryableError: OpenPAI is unreachable.
        """
        self.check_offline()
        template, file = template_of(self.pai), self.config.config_path.name
        cluster = self.open_cluster(template, ClientRetryPolicy(tries=2))
        owner = cluster.user_of_token()
        if owner not in (None, cluster.user):
            # Jobs would belong to the token's user, and the manager searches for those of userName.
            raise UserError(
                f"cannot use paiConfig.userName {cluster.user} of {file}: the token is {owner}'s; write "
                f"userName: {owner}, or a token of {cluster.user}"
            )
        wanted = {
            "storage": tuple(storage.name for storage in template.job.storages or ()),
            "virtual cluster": (template.job.virtual_cluster,),
        }
        own = cluster.virtual_clusters_of_user()
        usable = cluster.virtual_clusters() if own is None else own
        available = {"storage": cluster.storages(), "virtual cluster": usable}
        for what, names in wanted.items():
            for name in names:
                if name not in available[what]:
                    known = ", ".join(available[what]) or "none"
                    raise UserError(
                        f"cannot run jobs on OpenPAI at {cluster.address}: there is no {what} {name!r} that {cluster.user} may "
                        f"use; correct the name in {file} (known: {known})"
                    )
        _check_nodes(file, cluster, template)
        return PlatformCheck(f"OpenPAI at {cluster.address}, as {cluster.user}", template.warnings)


def _check_nodes(file: str, cluster: OpenPai, template: JobTemplate) -> None:
    """Check that a node is large enough for one task of each role, if OpenPAI reports node sizes."""
    nodes = cluster.nodes()
    for role in template.sized_roles:
        need = role.resources
        required = {"GPUs": need.gpu, "CPUs": need.cpu, "MB of memory": need.memory_mb}
        counts = [(node.gpu, node.cpu, node.memory_mb) for node in nodes]
        is_fitting = (
            all(size is None or number <= size for number, size in zip(required.values(), node, strict=True))
            for node in counts
        )
        if not nodes or any(is_fitting):
            continue
        known = [[each for each in column if each is not None] for column in zip(*counts, strict=True)]
        largest = ", ".join(
            f"{max(column)} {unit}" for unit, column in zip(required, known, strict=True) if column
        )
        raise UserError(
            f"cannot run jobs on OpenPAI at {cluster.address}: a task of role {role.name} requires "
            f"{', '.join(f'{number} {unit}' for unit, number in required.items())}, and no node is that large (maximum "
            f"of a node: {largest}); require less in {file}"
        )


def platform(config: ExperimentSpec) -> OpenPaiPlatform:
    """The platform of an experiment on OpenPAI."""
    made = OpenPaiPlatform(config)
    if not made.pai.is_local:
        return made
    # The local OpenPAI is built on this package, and is loaded only for experiments on it.
    local: type[OpenPaiPlatform] = importlib.import_module(_LOCAL_OPENPAI).LocalOpenPaiPlatform
    return local(config)
