"""FrameworkController as a platform."""

from __future__ import annotations

from nni_manager.config.model import ExperimentSpec
from nni_manager.training_services.frameworkcontroller.operator import FrameworkController
from nni_manager.training_services.kubernetes.operator import Operator
from nni_manager.training_services.kubernetes.platform import KubernetesPlatform


class FrameworkControllerPlatform(KubernetesPlatform):
    """Kubernetes with FrameworkController."""

    def operator(self) -> Operator:
        """FrameworkController."""
        return FrameworkController(self.kubernetes)


def platform(config: ExperimentSpec) -> FrameworkControllerPlatform:
    """The platform of an experiment on FrameworkController."""
    return FrameworkControllerPlatform(config)
