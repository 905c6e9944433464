"""The GPUs of this machine, and their allocation to jobs, which is pure bookkeeping."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from nni_manager.errors import UserError
from nni_manager.training_services.base import ManagedGpu
from nni_manager.training_services.local.section import LocalSection
from trial_keeper.gpus import Gpus, GpusUnseen, gpus_here

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
# One file for each GPU and each CPU. Source: Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def gpus_of_this_machine() -> tuple[int, ...]:
    """Returns the indices of the GPUs that NVIDIA's driver shows, or else AMD's; empty without a driver."""
    count = len(list(_NVIDIA_GPUS.iterdir())) if _NVIDIA_GPUS.is_dir() else 0
    return tuple(range(count or sum(map(_is_amd_gpu, _AMD_NODES.glob("*/gpu_id")))))


def _is_amd_gpu(gpu_id: Path) -> bool:
    try:
        return int(gpu_id.read_text()) != 0  # a CPU has 0
    except (OSError, ValueError):  # another container's GPU cannot be read
        return False


def gpus_in_use() -> frozenset[int]:
    """Returns the indices of the GPUs on which any process computes. Blocks while the driver answers.

    Raises:
        GpusUnseen: they cannot be determined.
    """
    return _driver().in_use()


@functools.cache
def _driver() -> Gpus:
    return gpus_here()


def why_unseen() -> str:
    """Returns why programs that use GPUs cannot be detected here, with the remedy; empty if they can."""
    try:
        _driver()
    except GpusUnseen as error:
        return f"{error}; until then trials also use GPUs that other programs use"
    return ""


@dataclass(slots=True)
class GpuShares:
    """Allocates GPUs, each to at most `max_jobs_per_gpu` jobs at a time."""

    indices: tuple[int, ...]
    max_jobs_per_gpu: int
    _held: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, section: LocalSection, gpu_num: int | None, present: tuple[int, ...]) -> GpuShares:
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
                "lower gpuNum, or trialGpuNumber (0 hides all GPUs from trials; without it, GPUs are not managed)"
            )
        return cls(usable, section.max_trials_per_gpu)

    def take(self, job_id: str, count: int, in_use: Collection[int] = ()) -> tuple[int, ...] | None:
        """Allocate the `count` least loaded GPUs to the job; None if too few are free.

        `in_use`: the GPUs on which processes compute. Those without a job of ours belong to other programs, and are not free.
        """
        load = self._load()
        free = sorted(
            (
                index
                for index in self.indices
                if load[index] < self.max_jobs_per_gpu and (load[index] or index not in in_use)
            ),
            key=lambda index: (load[index], index),
        )[:count]
        if len(free) < count:
            return None
        return self.hold(job_id, tuple(sorted(free)))

    def used_by_others(self, in_use: Collection[int]) -> list[int]:
        """Returns the GPUs of `in_use` that the experiment may use, and that no job of it has."""
        load = self._load()
        return [index for index in self.indices if index in in_use and not load[index]]

    def shown(self, in_use: Collection[int] | None) -> list[ManagedGpu]:
        """Returns the GPUs that the experiment may use. `in_use`: those on which processes compute; None: unknown."""
        jobs = {
            index: tuple(job for job, held in self._held.items() if index in held) for index in self.indices
        }
        return [
            ManagedGpu(index, job_ids, None if job_ids or in_use is None else index in in_use)
            for index, job_ids in jobs.items()
        ]

    def _load(self) -> Counter[int]:
        return Counter(itertools.chain.from_iterable(self._held.values()))

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
