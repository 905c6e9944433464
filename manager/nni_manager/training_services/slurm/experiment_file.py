"""The experiment file for Slurm: the login node, and the options of its jobs by the names of sbatch's long options."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import ValidationInfo, field_validator

from nni_manager.config.diagnostics import KeyPath, ref, shown
from nni_manager.config.dialect import SERVICE
from nni_manager.config.experiment_schema import (
    COMMAND,
    ExperimentKeys,
    ServiceKeys,
    Size,
    keeper_source,
    size,
)
from nni_manager.config.platform_file import PlatformFile
from nni_manager.config.schema import line, mapping, must_be, refusal, text, whole
from nni_manager.support.keeper_bundle import KeeperSource
from nni_manager.training_services.slurm.render import OWN_OPTIONS, TIME_LIMIT
from nni_manager.training_services.slurm.section import SlurmSection
from nni_manager.training_services.ssh.login import ADDRESS

_SINCE = "0.7"


class SlurmServiceKeys(ServiceKeys):
    """The training service whose trials are batch jobs on Slurm."""

    python_name = "SlurmConfig"
    # fmt: off
    partition: str | None = line("the name of a partition", "gpu", None, since=_SINCE, unset="Slurm's default",
        about="the partition of the jobs, or several with commas between them")
    account: str | None = line("the name of an account", "vision", None, since=_SINCE, unset="Slurm's default",
        about="the account that is charged")
    qos: str | None = line("the name of a quality of service", "normal", None, since=_SINCE, unset="Slurm's default",
        about="the quality of service of the jobs")
    time_limit: str | None = must_be("a time limit of Slurm in quotes: minutes, hours:minutes:seconds or days-hours",
        '"4:00:00"', None, since=_SINCE, pattern=TIME_LIMIT, unset="that of the partition",
        about="the [time limit](slurm.md#time-limits) of a job; a reused job needs time for its trials together")
    gres: str | None = line("generic resources of Slurm", "gpu:a100:2", None, since=_SINCE, unset="none",
        about="the generic resources of each node of a job, such as GPUs of a type")
    gpus: int | None = whole(0, 99999, "1", None, since=_SINCE, unset="`trialGpuNumber`", about="the GPUs of a job")
    cpus_per_task: int | None = whole(1, 99999, "4", None, since=_SINCE, unset="Slurm's default, usually 1",
        about="the CPUs of each task of a job")
    memory: Size | None = size("16gb", None, since=_SINCE, unset="Slurm's default", about="the memory of a job on each node")
    constraint: str | None = line("features of nodes", "a100", None, since=_SINCE, unset="any node",
        about="the features that nodes must have")
    nodes: int | None = whole(1, 99999, "1", None, since=_SINCE, unset="Slurm's default, usually 1",
        about="the nodes of a job; the trial's command runs on the first one, and starts the others with `srun`")
    ntasks: int | None = whole(1, 9999999, "1", None, since=_SINCE, unset="Slurm's default, usually 1",
        about="the tasks that the trial's command may start with `srun`")
    extra_args: list[str] = must_be("a list of options of sbatch", '["--exclusive"]', [], since=_SINCE,
        about="other options of `sbatch`, each in the form `--name=value`")
    container_image: str | None = line("a .sif file, a folder with an image, or an address such as docker://IMAGE",
        "train.sif", None, since=_SINCE, unset="no container",
        about="the image of the [container](slurm.md#containers) in which Apptainer runs each job")
    container_args: list[str] = must_be("a list of options of apptainer exec", '["--bind=/data"]', [], since=_SINCE,
        about="other options of `apptainer exec`, each in the form `--name=value`")
    keeper: KeeperSource = keeper_source()
    login: str | None = must_be("a host for ssh, or user@host:port", "ada@login1", None, since=_SINCE, pattern=ADDRESS,
        unset="this machine", about="the [login node](slurm.md#a-manager-elsewhere) whose Slurm commands are used")
    # fmt: on

    @field_validator("extra_args", "container_args")
    @classmethod
    def _are_long_options(cls, options: list[str], about: ValidationInfo) -> list[str]:
        example = "--exclusive or --nice=100" if about.field_name == "extra_args" else "--nv or --bind=/data"
        for option in options:
            if re.match("--[^=]", option) is None:
                raise refusal(f"{shown(option)} is not a long option; write e.g. {example}")
        return options

    @field_validator("extra_args")
    @classmethod
    def _are_free_options(cls, options: list[str]) -> list[str]:
        for option in options:
            name = option.partition("=")[0]
            if name in OWN_OPTIONS:
                raise refusal(f"{name} is set for each job by nnictl; remove it")
        return options


class SlurmExperimentKeys(ExperimentKeys):
    """The experiment file for Slurm."""

    trial_command: str = text("a shell command", "python3 train.py", v1="trial.command", about=COMMAND)
    training_service: SlurmServiceKeys = mapping(
        "{platform: slurm}", v1="slurmConfig", about="the options of the jobs"
    )


class SlurmFile(PlatformFile):
    """The part of Slurm."""

    schema = SlurmExperimentKeys
    examples_v1: ClassVar = {"slurmConfig": "partition: gpu"}
    hints: ClassVar = {
        "trainingService.time": 'the key of a time limit is timeLimit; write e.g. timeLimit: "4:00:00"',
        "trainingService.mem": "the key of the memory is memory; write e.g. memory: 16gb",
    }

    _image: str | None = None

    def check(self) -> None:
        """Check that an image that is a file or a folder exists, and that no key of a container stands without an image."""
        key_path = (*SERVICE, "containerImage")
        image = self.service.get("containerImage")
        if image is None:
            self._check_keys_without_image(key_path)
        elif not isinstance(image, str) or re.match("[a-z][a-z-]+:", image):
            self._image = image
        elif (path := self.reading.absolute(key_path, image)) is not None:
            self._image = str(path)
            if not path.exists():
                self.reading.report(
                    key_path,
                    f"cannot use {ref(key_path)} {path}: it does not exist; name a file or folder of the shared home, or an "
                    "address such as docker://IMAGE",
                )

    def _check_keys_without_image(self, key_path: KeyPath) -> None:
        for name in ("containerArgs", "keeper"):
            if self.service.get(name):
                self.reading.warn(
                    f"{ref((*SERVICE, name))} has no effect without {ref(key_path)}; add it, or remove the key"
                )

    def cluster(self, file: SlurmExperimentKeys) -> SlurmSection:
        """The options of the jobs."""
        service = file.training_service
        return self.same_named(
            SlurmSection,
            service,
            gpus=file.trial_gpu_number if service.gpus is None else service.gpus,
            memory_mb=service.memory,
            extra_args=tuple(service.extra_args),
            container_image=self._image,
            container_args=tuple(service.container_args),
        )


FILE = SlurmFile
