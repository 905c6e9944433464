"""Allocates GPUs of this machine to jobs. Pure bookkeeping."""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from nni_manager.errors import UserError
from nni_manager.training_services.local.section import LocalSection

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def gpus_of_this_machine() -> tuple[int, ...]:
    """Returns the indices of the NVIDIA GPUs that the driver shows; empty without a driver."""
    return tuple(range(len(list(_NVIDIA_GPUS.iterdir())))) if _NVIDIA_GPUS.is_dir() else ()


@dataclass(slots=True)
class GpuShares:
    """Allocates GPUs, each to at most `max_jobs_per_gpu` jobs at a time."""

    indices: tuple[int, ...]
    max_jobs_per_gpu: int
    _held: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, section: LocalSection, gpu_num: int | None, present: tuple[int, ...]) -> "GpuShares":
        """Returns the allocator of one experiment.

        Raises:
            UserError: a trial needs more GPUs than the experiment may use here.
        """
        usable = present if section.gpu_indices is None else section.gpu_indices
        absent = sorted(set(usable) - set(present))
        if gpu_num and absent:
            raise UserError(
                f"cannot use localConfig.gpuIndices: GPU {absent[0]} does not exist, this machine has {len(present)} GPUs; "
                "remove gpuIndices to use all of them"
            )
        if (gpu_num or 0) > len(usable):
            raise UserError(
                f"cannot run trials on this machine: trial.gpuNum is {gpu_num} and the experiment may use {len(usable)} GPUs; "
                "lower gpuNum (0 hides all GPUs from trials; without gpuNum, GPUs are not managed)"
            )
        return cls(usable, section.max_trials_per_gpu)

    def take(self, job_id: str, count: int) -> tuple[int, ...] | None:
        """Allocate the `count` least loaded GPUs to the job; None if too few are free."""
        load = Counter(itertools.chain.from_iterable(self._held.values()))
        free = sorted(
            (index for index in self.indices if load[index] < self.max_jobs_per_gpu),
            key=lambda index: (load[index], index),
        )[:count]
        if len(free) < count:
            return None
        return self.hold(job_id, tuple(sorted(free)))

    def hold(self, job_id: str, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Record that the job has these GPUs."""
        self._held[job_id] = indices
        return indices

    def held_by(self, job_id: str) -> tuple[int, ...]:
        """Returns the job's GPUs."""
        return self._held.get(job_id, ())

    def release(self, job_id: str) -> None:
        """Free the job's GPUs."""
        self._held.pop(job_id, None)
