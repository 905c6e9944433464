"""The experiment file for this machine: its keys, and the hints for keys of clusters."""

from __future__ import annotations

from typing import ClassVar

from nni_manager.config.experiment_schema import COMMAND, ExperimentKeys, GpuIndices, ServiceKeys, gpus
from nni_manager.config.platform_file import PlatformFile
from nni_manager.config.schema import flag, mapping, text, whole
from nni_manager.training_services.local.section import LocalSection


class LocalServiceKeys(ServiceKeys):
    """The training service whose trials run on this machine."""

    python_name = "LocalConfig"
    # fmt: off
    gpu_indices: GpuIndices = gpus(unset="all", about="the GPUs to use")
    max_trial_number_per_gpu: int = whole(1, 99999, "1", 1, v1="maxTrialNumPerGpu",
        about="the number of trials that share one GPU")
    use_active_gpu: bool = flag("false", False, about="also use GPUs on which other programs compute")
    # fmt: on


class LocalExperimentKeys(ExperimentKeys):
    """The experiment file for this machine."""

    trial_command: str = text("a shell command", "python3 train.py", v1="trial.command", about=COMMAND)
    training_service: LocalServiceKeys = mapping(
        "{platform: local}",
        v1="localConfig",
        unset="none; required in the second schema",
        about="how trials share this machine",
    )


class LocalFile(PlatformFile):
    """The part of this machine."""

    schema = LocalExperimentKeys
    examples_v1: ClassVar = {"localConfig": "maxTrialNumPerGpu: 1"}
    hints_v1: ClassVar = dict.fromkeys(
        (
            f"trial.{key}"
            for key in (
                "cpuNum",
                "memoryMB",
                "image",
                "virtualCluster",
                "nniManagerNFSMountPath",
                "containerNFSMountPath",
                "paiStorageConfigName",
                "paiConfigPath",
                "shmMB",
            )
        ),
        "it applies only to jobs on a cluster; remove it",
    )
    hints: ClassVar = {"trainingService.maxTrialNumPerGpu": "did you mean maxTrialNumberPerGpu?"}
    reuses_jobs = False

    def cluster(self, file: LocalExperimentKeys) -> LocalSection:
        """The sharing of GPUs that the file names."""
        service = file.training_service
        return self.same_named(
            LocalSection,
            service,
            max_trials_per_gpu=service.max_trial_number_per_gpu,
            may_use_active_gpu=service.use_active_gpu,
        )


FILE = LocalFile
