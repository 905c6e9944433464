"""The settings of an experiment on FrameworkController, as they are stored."""

from nni_manager.training_services.kubernetes.section import KubernetesConfig

SECTION = KubernetesConfig
