"""The peak resource usage of a trial."""

import json
from collections.abc import Iterable
from dataclasses import asdict

from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.messages import GpuUsage, Usage


@dataclass(frozen=True, slots=True)
class PeakUsage:
    """The highest value of each resource that a keeper of the trial has reported, possibly at different times.

    With several tasks, each value is that of the task that used most. `gpus` are in the order of their indices.
    """

    cpu_percent: float = 0.0
    rss_bytes: int = 0
    disk_bytes: int = 0
    gpus: tuple[GpuUsage, ...] = ()

    def merge_max(self, usage: Usage) -> "PeakUsage":
        """The peak including `usage`; equal to this one if nothing was higher."""
        gpus = {gpu.index: gpu for gpu in self.gpus}
        for gpu in usage.gpus:
            peak = gpus.get(gpu.index, gpu)
            gpus[gpu.index] = GpuUsage(
                gpu.index,
                max(peak.utilisation_percent, gpu.utilisation_percent),
                max(peak.memory_used_bytes, gpu.memory_used_bytes),
            )
        return PeakUsage(
            max(self.cpu_percent, usage.cpu_percent),
            max(self.rss_bytes, usage.rss_bytes),
            max(self.disk_bytes, usage.disk_bytes),
            tuple(gpus[index] for index in sorted(gpus)),
        )

    def to_json(self) -> str:
        """The JSON text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PeakUsage":
        """The inverse of `to_json`."""
        document = json.loads(text)
        return cls(**document | {"gpus": tuple(GpuUsage(**gpu) for gpu in document["gpus"])})


def gpus_to_json(gpus: Iterable[GpuUsage]) -> str:
    """The GPUs of one sample as JSON text for the store."""
    return json.dumps([asdict(gpu) for gpu in gpus])


def gpus_from_json(text: str) -> tuple[GpuUsage, ...]:
    """The inverse of `gpus_to_json`."""
    return tuple(GpuUsage(**gpu) for gpu in json.loads(text))
