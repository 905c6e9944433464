"""What the manager and nnictl ask about an experiment on this platform."""

from functools import partial

from nni_manager.store.folders import ExperimentFolder
from nni_manager.training_services.platform import Platform, PlatformCheck, ServiceFactory


class NicePlatform(Platform):
    """Keepers are processes of this machine and of the manager's user."""

    runs_as_manager = keepers_run_here = True

    def make_service(self, folder: ExperimentFolder) -> ServiceFactory:
        """The service is created on the manager's event loop."""
        from trial_keeper_nice.service import NiceService

        return partial(NiceService, self.config, folder)

    def check(self) -> PlatformCheck:
        """Called by `nnictl create` before anything starts."""
        return PlatformCheck(f"this machine, with niceness {self.config.cluster.niceness}")


platform = NicePlatform
