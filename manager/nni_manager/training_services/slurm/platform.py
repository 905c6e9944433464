"""Slurm as a platform. The manager runs where the shared home is; Slurm's commands are there, or on a login node."""

from __future__ import annotations

import contextlib
import re
import shutil
from functools import partial

from nni_manager.config.model import ExperimentSpec
from nni_manager.errors import UserError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.support.keeper_bundle import bundle_for
from nni_manager.training_services.errors import QuotaExceeded
from nni_manager.training_services.platform import Platform, PlatformCheck, ServiceFactory
from nni_manager.training_services.slurm.client import Slurm, SlurmMissing, missing
from nni_manager.training_services.slurm.render import sbatch_command
from nni_manager.training_services.slurm.section import SlurmSection
from nni_manager.training_services.ssh.login import require_client


class SlurmPlatform(Platform):
    """A Slurm cluster. Jobs run as the manager's user, and see the experiment's folder at the same path."""

    runs_as_manager = True

    def __init__(self, config: ExperimentSpec) -> None:
        super().__init__(config)
        assert isinstance(config.cluster, SlurmSection)
        self.section = config.cluster

    def make_service(self, folder: ExperimentFolder) -> ServiceFactory:
        """A factory for the training service of this cluster."""
        from nni_manager.training_services.slurm.service import SlurmService

        return partial(SlurmService, self.section, folder)

    def check_offline(self) -> None:
        """Check that Slurm's commands are here, or the SSH client for those of a login node; and the keeper's bundle.

        Raises:
            UserError: they are not, or containers cannot see the experiment's folder.
            BundleUnusable: the file requires a bundle, and there is none of this version.
        """
        if self.section.container_image is not None:
            bundle_for(self.section.keeper)
            # Apptainer separates paths to bind with commas, and the two ends of a bind with a colon.
            if re.search("[,:]", str(self.config.log_dir)):
                raise UserError(
                    f"cannot show {self.config.log_dir} to a container: Apptainer does not bind paths with a comma or a colon; "
                    "set experimentWorkingDirectory to another folder"
                )
        if self.section.login is not None:
            require_client("slurmConfig.login")
        elif shutil.which("sbatch") is None:
            raise SlurmMissing(missing("sbatch"))

    def check(self) -> PlatformCheck:
        """Let Slurm check the options of the jobs, without submitting one. A limit that is reached now is a warning.

        Raises:
            UserError: Slurm refuses them, or the login node does not share this machine's folders.
            RetryableError: slurmctld or the login node does not answer.
        """
        self.check_offline()
        warnings: tuple[str, ...] = ()
        with contextlib.closing(Slurm(self.section.ssh_login)) as slurm:
            names = slurm.cluster()
            try:
                slurm.test(sbatch_command(self.section, "nni-check", "/", "/dev/null"))
            except QuotaExceeded as error:
                warnings = (str(error),)
            if self.section.login is not None:
                slurm.check_shared_home(self.config.log_dir)
        where = f"Slurm cluster {names.name}"
        if self.section.partition:
            where = f"{where}, partition {self.section.partition}"
        if self.section.login is not None:
            where = f"{where}, by {self.section.login}"
        return PlatformCheck(where, warnings)

    def api(self) -> tuple[str, str]:
        """The controller, or the login node: the route to it is usually that to the compute nodes."""
        if self.section.ssh_login is not None:
            return "the login node", self.section.ssh_login.url
        with contextlib.closing(Slurm()) as slurm:
            return "Slurm's controller", f"slurm://{slurm.cluster().controller}"


platform = SlurmPlatform
