"""The settings of an experiment on Kubeflow, as they are stored."""

from nni_manager.training_services.kubernetes.section import KubernetesConfig

SECTION = KubernetesConfig
