"""This machine as a platform: each job is a process."""

from __future__ import annotations

from nni_manager.store.folders import ExperimentFolder
from nni_manager.training_services.local.section import LocalSection
from nni_manager.training_services.platform import Platform, PlatformCheck, ServiceFactory


class LocalPlatform(Platform):
    """This machine. Trials see its paths and run as the manager's user."""

    runs_as_manager = True
    keepers_run_here = True

    def make_service(self, folder: ExperimentFolder) -> ServiceFactory:
        """A factory for the training service of this machine."""
        from nni_manager.training_services.local.client import LocalTrainingService

        return lambda on_job_ended: LocalTrainingService(
            self.config, folder.workspace, folder.jobs, on_job_ended
        )

    def check_offline(self) -> None:
        """Check that this machine has the GPUs of a trial, and the program of its command.

        Raises:
            UserError: it lacks one of them.
        """
        from nni_manager.training_services.local.command import check_command
        from nni_manager.training_services.local.gpus import GpuShares, gpus_of_this_machine

        assert isinstance(self.config.cluster, LocalSection)
        GpuShares.of(self.config.cluster, self.config.trial_gpu_number, gpus_of_this_machine())
        check_command(self.config)

    def check(self) -> PlatformCheck:
        """The same checks: there is no cluster. A warning if programs that use GPUs cannot be detected."""
        from nni_manager.training_services.local.gpus import why_unseen

        self.check_offline()
        assert isinstance(self.config.cluster, LocalSection)
        looks_at_others = self.config.trial_gpu_number and not self.config.cluster.may_use_active_gpu
        unseen = why_unseen() if looks_at_others else ""
        return PlatformCheck(warnings=(unseen,) if unseen else ())


platform = LocalPlatform
