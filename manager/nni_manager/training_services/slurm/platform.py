"""Slurm as a platform. The manager runs on a login node, where Slurm's commands and the shared home are."""

from __future__ import annotations

import shutil
from functools import partial

from nni_manager.config.model import ExperimentSpec
from nni_manager.store.folders import ExperimentFolder
from nni_manager.training_services.errors import QuotaExceeded
from nni_manager.training_services.platform import Platform, PlatformCheck, ServiceFactory
from nni_manager.training_services.slurm.client import Slurm, SlurmMissing, missing
from nni_manager.training_services.slurm.render import sbatch_command
from nni_manager.training_services.slurm.section import SlurmSection


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
        """Check that Slurm's commands are here.

        Raises:
            SlurmMissing: they are not.
        """
        if shutil.which("sbatch") is None:
            raise SlurmMissing(missing("sbatch"))

    def check(self) -> PlatformCheck:
        """Let Slurm check the options of the jobs, without submitting one. A limit that is reached now is a warning.

        Raises:
            UserError: Slurm refuses them.
            RetryableError: slurmctld does not answer.
        """
        self.check_offline()
        slurm = Slurm()
        names = slurm.cluster()
        warnings: tuple[str, ...] = ()
        try:
            slurm.test(sbatch_command(self.section, "nni-check", "/", "/dev/null"))
        except QuotaExceeded as error:
            warnings = (str(error),)
        where = f"Slurm cluster {names.name}"
        if self.section.partition:
            where = f"{where}, partition {self.section.partition}"
        return PlatformCheck(where, warnings)

    def api(self) -> tuple[str, str]:
        """The controller: the route to it is usually that to the compute nodes."""
        return "Slurm's controller", f"slurm://{Slurm().cluster().controller}"


platform = SlurmPlatform
