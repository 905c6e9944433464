"""The most that a trial has used of each resource."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from trial_keeper.wire.messages import GpuUsage, Usage


@dataclass(frozen=True, slots=True)
class PeakUsage:
    """The highest figure of each kind that a keeper of the trial has reported; they need not belong to one moment.

    With several tasks it is the figure of whichever task used most. `gpus` are in the order of their indices.
    """

    cpu_percent: float = 0.0
    rss_bytes: int = 0
    disk_bytes: int = 0
    gpus: tuple[GpuUsage, ...] = ()

    def raised_by(self, usage: Usage) -> "PeakUsage":
        """The peak once this was seen; equal to itself if nothing was higher."""
        gpus = {gpu.index: gpu for gpu in self.gpus}
        for gpu in usage.gpus:
            gpus[gpu.index] = _higher(gpus.get(gpu.index, gpu), gpu)
        return PeakUsage(
            max(self.cpu_percent, usage.cpu_percent),
            max(self.rss_bytes, usage.rss_bytes),
            max(self.disk_bytes, usage.disk_bytes),
            tuple(gpus[index] for index in sorted(gpus)),
        )

    def to_json(self) -> str:
        """As the store keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PeakUsage":
        """What `to_json` gave."""
        document = json.loads(text)
        return cls(**document | {"gpus": tuple(GpuUsage(**gpu) for gpu in document["gpus"])})


def gpus_to_json(gpus: Iterable[GpuUsage]) -> str:
    """As the store keeps the GPUs of one sample."""
    return json.dumps([asdict(gpu) for gpu in gpus])


def gpus_from_json(text: str) -> tuple[GpuUsage, ...]:
    """What `gpus_to_json` gave."""
    return tuple(GpuUsage(**gpu) for gpu in json.loads(text))


def _higher(one: GpuUsage, other: GpuUsage) -> GpuUsage:
    return GpuUsage(
        one.index,
        max(one.utilisation_percent, other.utilisation_percent),
        max(one.memory_used_bytes, other.memory_used_bytes),
    )
