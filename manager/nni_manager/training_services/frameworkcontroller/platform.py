"""FrameworkController as a platform."""

from __future__ import annotations

from nni_manager.training_services.frameworkcontroller.operator import FrameworkController
from nni_manager.training_services.kubernetes.operator import Operator
from nni_manager.training_services.kubernetes.platform import KubernetesPlatform


class FrameworkControllerPlatform(KubernetesPlatform):
    """Kubernetes with FrameworkController."""

    def operator(self) -> Operator:
        """FrameworkController."""
        return FrameworkController(self.kubernetes)


platform = FrameworkControllerPlatform
