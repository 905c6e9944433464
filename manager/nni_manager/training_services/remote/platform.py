"""Machines over SSH as a platform. Each has a Python with trial-keeper; no storage is shared."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

from nni_manager.config.model import ExperimentSpec
from nni_manager.errors import NniManagerError, RetryableError, UserError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.training_services.platform import LOOPBACK, Platform, PlatformCheck, ServiceFactory
from nni_manager.training_services.remote.section import RemoteMachine, RemoteSection
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from nni_manager.training_services.ssh.login import require_client
from trial_keeper.wire.workspace import Workspace

if TYPE_CHECKING:
    from nni_manager.training_services.remote.pool import RemoteShare


class RemotePlatform(Platform):
    """Machines over SSH. Jobs see the experiment's folder at a path of their machine."""

    def __init__(self, config: ExperimentSpec) -> None:
        super().__init__(config)
        assert isinstance(config.cluster, RemoteSection)
        self.section = config.cluster

    def make_service(self, folder: ExperimentFolder) -> ServiceFactory:
        """A factory for the service of these machines."""
        self.check_offline()
        from nni_manager.training_services.remote.service import RemoteService

        return partial(RemoteService, self.section, folder, self.config.trial_gpu_number)

    # ---- checks

    def check_offline(self) -> None:
        """Check that the SSH client is installed, and that the tuner needs no files of all machines.

        Raises:
            UserError: it is not, or the tuner does.
        """
        require_client("platform remote")
        tuner = self.config.tuner
        if tuner.name == "PBTTuner" and "all_checkpoint_dir" not in (tuner.class_args or {}):
            raise UserError(
                "cannot use PBTTuner on platform remote: its trials continue from files of others, which may be on another "
                "machine; set all_checkpoint_dir in classArgs to a folder that all machines share"
            )

    def check(self) -> PlatformCheck:
        """Connect to all machines at once, and check each for trial-keeper and GPUs.

        Raises:
            UserError: with all machines that cannot run trials.
            RetryableError: the same, if all may be usable later.
        """
        self.check_offline()
        from nni_manager.training_services.ssh.ssh_thread import SshThread

        with contextlib.closing(SshThread()) as thread:  # a notebook has a running loop on this thread
            problems = thread.run(self._problems())
        if problems:
            error = UserError if any(isinstance(each, UserError) for each in problems) else RetryableError
            raise error("\n".join(map(str, problems)))
        machines = self.section.machines
        count = "one machine" if len(machines) == 1 else f"{len(machines)} machines"
        return PlatformCheck(f"{count} over SSH: {', '.join(each.address for each in machines)}")

    async def _problems(self) -> list[NniManagerError]:
        found = await asyncio.gather(*map(self._check, self.section.machines), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, NniManagerError):
                raise each
        return [each for each in found if isinstance(each, NniManagerError)]

    async def _check(self, machine: RemoteMachine) -> None:
        from nni_manager.training_services.remote.connection import connect
        from nni_manager.training_services.remote.placement import why_gpus_lack

        connection = await connect(machine, lambda event: None)
        try:
            if gpus_per_trial := self.config.trial_gpu_number:
                gpus = (await connection.request("gpus")).header
                if why := why_gpus_lack(machine, tuple(gpus["present"]), gpus_per_trial):
                    raise UserError(why)
        finally:
            await connection.close()

    # ---- locations

    def share(self, workspace: Workspace, retry_policy: ClientRetryPolicy | None = None) -> RemoteShare:
        """The experiment's folders on the machines."""
        self.check_offline()
        from nni_manager.training_services.remote.pool import MachinePool, RemoteShare

        return RemoteShare(MachinePool(self.section.machines, workspace), owns_pool=True)

    def remove_from_share(self, workspace: Workspace) -> str:
        """Remove the experiment's folder from all machines. Returns the error message; empty if none."""
        try:
            with contextlib.closing(self.share(workspace)) as share:
                share.remove(workspace.root)
        except NniManagerError as error:
            return str(error)
        return ""

    # ---- addresses

    def api(self) -> tuple[str, str]:
        """The first machine: the route to it is usually that to the others."""
        return "the machine", self.section.machines[0].url

    def address_for_keepers(self) -> str:
        """This machine's address on the route to the first machine; loopback if only ssh knows the way to it.

        Keepers on a machine that does not reach the address use the SSH connection.
        """
        try:
            return super().address_for_keepers()
        except UserError:
            return LOOPBACK


platform = RemotePlatform
