"""The settings of an experiment on this machine, as they are stored."""

from __future__ import annotations

from typing import ClassVar

from nni_manager.config.cluster import ClusterConfig
from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class LocalSection(ClusterConfig):
    """GPU sharing of trials on this machine. `gpu_indices` None means all GPUs.

    `may_use_active_gpu`: also those on which other programs compute.
    """

    is_this_machine: ClassVar = True
    gpu_indices: tuple[int, ...] | None = None
    max_trials_per_gpu: int = 1
    may_use_active_gpu: bool = False


SECTION = LocalSection
