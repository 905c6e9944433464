"""The experiment file for Slurm: the login node, and the options of its jobs by the names of sbatch's long options."""

from __future__ import annotations

from typing import ClassVar

from pydantic import field_validator

from nni_manager.config.diagnostics import shown
from nni_manager.config.experiment_schema import COMMAND, ExperimentKeys, ServiceKeys, Size, size
from nni_manager.config.platform_file import PlatformFile
from nni_manager.config.schema import line, mapping, must_be, refusal, text, whole
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
    login: str | None = must_be("a host for ssh, or user@host:port", "ada@login1", None, since=_SINCE, pattern=ADDRESS,
        unset="this machine", about="the [login node](slurm.md#a-manager-elsewhere) whose Slurm commands are used")
    # fmt: on

    @field_validator("extra_args")
    @classmethod
    def _are_free_options(cls, options: list[str]) -> list[str]:
        for option in options:
            name = option.partition("=")[0]
            if not name.startswith("--") or len(name) < 3:
                raise refusal(f"{shown(option)} is not a long option; write e.g. --exclusive or --nice=100")
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

    def cluster(self, file: SlurmExperimentKeys) -> SlurmSection:
        """The options of the jobs."""
        service = file.training_service
        return self.same_named(
            SlurmSection,
            service,
            gpus=file.trial_gpu_number if service.gpus is None else service.gpus,
            memory_mb=service.memory,
            extra_args=tuple(service.extra_args),
        )


FILE = SlurmFile
