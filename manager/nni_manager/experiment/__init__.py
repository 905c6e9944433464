"""The Python API, with the names of NNI's `nni.experiment`: `from nni_manager.experiment import Experiment`.

See docs/python-api.md. `python -m nni_manager.experiment SCRIPT` runs a script that was written for NNI unchanged.
"""

from __future__ import annotations

from typing import Any

from nni_manager.startup.required_extra import required_extra

with required_extra("nni_manager.experiment"):
    from nni_manager.config.diagnostics import ConfigInvalid
    from nni_manager.errors import NniManagerError, RetryableError, UserError
    from nni_manager.experiment import sections
    from nni_manager.experiment.aliases import AliasHint
    from nni_manager.experiment.config import (
        CustomAlgorithmConfig,
        ExperimentConfig,
        K8sAzureStorageConfig,
        K8sNfsConfig,
        K8sPvcConfig,
        UnsupportedName,
        unsupported,
    )
    from nni_manager.experiment.data import TrialHyperParameters, TrialJob, TrialMetricData, TrialResult
    from nni_manager.experiment.experiment import Experiment, RunMode
    from nni_manager.experiment.search import Best, SearchResult, search
    from nni_manager.experiment.sections import *  # noqa: F403
    from nni_manager.experiment.sections import KubeflowRoleConfig

__all__ = [
    "AliasHint",
    "Best",
    "ConfigInvalid",
    "CustomAlgorithmConfig",
    "Experiment",
    "ExperimentConfig",
    "K8sAzureStorageConfig",
    "K8sNfsConfig",
    "K8sPvcConfig",
    "NniManagerError",
    "RetryableError",
    "RunMode",
    "SearchResult",
    "TrialHyperParameters",
    "TrialJob",
    "TrialMetricData",
    "TrialResult",
    "UnsupportedName",
    "UserError",
    "search",
]
__all__ += sections.__all__


# NNI's page on Kubeflow uses this name, which NNI does not have.
_MISSPELT = {"KubeflowRowConfig": KubeflowRoleConfig}


def __getattr__(name: str) -> Any:
    if name in _MISSPELT:
        import warnings

        meant = _MISSPELT[name]
        warnings.warn(f"{name} is read as {meant.__name__}; write {meant.__name__}", AliasHint, stacklevel=2)
        return meant
    return unsupported(__name__, name)
