"""The resource queue: one FIFO queue for each virtual cluster.

The first request of a queue blocks all later ones until enough resources are free, so that a large job does not starve. All
containers of a request are allocated together; with gang allocation, these are all tasks of the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field

from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class ResourceCounts:
    """CPUs, megabytes of memory and GPUs."""

    cpu: int = 0
    memory_mb: int = 0
    gpu: int = 0

    def __add__(self, other: ResourceCounts) -> ResourceCounts:
        return ResourceCounts(self.cpu + other.cpu, self.memory_mb + other.memory_mb, self.gpu + other.gpu)

    def __sub__(self, other: ResourceCounts) -> ResourceCounts:
        return ResourceCounts(self.cpu - other.cpu, self.memory_mb - other.memory_mb, self.gpu - other.gpu)

    def fits_into(self, other: ResourceCounts) -> bool:
        """True if no resource exceeds that of `other`."""
        return self.cpu <= other.cpu and self.memory_mb <= other.memory_mb and self.gpu <= other.gpu


def summed(needs: Iterable[ResourceCounts]) -> ResourceCounts:
    """The sum of all needs."""
    return sum(needs, ResourceCounts())


@dataclass(frozen=True, slots=True)
class Request:
    """A request, as an effect of a job, to allocate containers at the same time: the need of each, by container id."""

    job_id: int
    needs: Mapping[str, ResourceCounts]

    @property
    def total(self) -> ResourceCounts:
        """The sum of all needs of the request."""
        return summed(self.needs.values())


@dataclass(frozen=True, slots=True)
class Grant:
    """An allocated request: the GPUs of each container."""

    request: Request
    gpus: Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class VirtualCluster:
    """The resources of one virtual cluster, their holders, and the queued requests. `waiting` is in queue order."""

    name: str
    capacity: ResourceCounts
    gpus: tuple[int, ...]
    waiting: dict[tuple[int, str], Request] = field(default_factory=dict)
    used: ResourceCounts = field(default_factory=ResourceCounts)
    _held: dict[str, tuple[ResourceCounts, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def waiting_jobs(self) -> int:
        """The number of queued jobs."""
        return len({request.job_id for request in self.waiting.values()})

    def enqueue(self, request: Request) -> None:
        """Append a request to the queue."""
        self.waiting[request.job_id, next(iter(request.needs))] = request

    def dequeue(self, container_ids: Iterable[str]) -> None:
        """Remove the requests of these containers from the queue."""
        removed = set(container_ids)
        for key in [key for key, request in self.waiting.items() if not removed.isdisjoint(request.needs)]:
            del self.waiting[key]

    def hold(self, container_id: str, need: ResourceCounts, gpus: tuple[int, ...]) -> None:
        """Allocate resources to a container without a capacity check: a restarted cluster may have less capacity."""
        self._held[container_id] = need, gpus
        self.used += need

    def release(self, container_id: str) -> None:
        """Release the container's allocation, if any."""
        held = self._held.pop(container_id, None)
        if held is not None:
            self.used -= held[0]

    def grants(self) -> Iterator[Grant]:
        """Allocate the requests at the front of the queue that fit now, one by one: a grant may change the queue."""
        while self.waiting:
            key, request = next(iter(self.waiting.items()))
            if not request.total.fits_into(self.capacity - self.used):
                break
            free = self._free_gpus()
            if request.total.gpu > len(free):
                break
            del self.waiting[key]
            gpus: dict[str, tuple[int, ...]] = {}
            for container_id, need in request.needs.items():
                gpus[container_id] = tuple(free[: max(0, need.gpu)])
                free = free[max(0, need.gpu) :]
                self.hold(container_id, need, gpus[container_id])
            yield Grant(request, gpus)

    def _free_gpus(self) -> list[int]:
        taken = {gpu for _, gpus in self._held.values() for gpu in gpus}
        return [gpu for gpu in self.gpus if gpu not in taken]


def virtual_clusters(capacities: Mapping[str, ResourceCounts]) -> dict[str, VirtualCluster]:
    """Empty virtual clusters of these capacities. GPU numbers are consecutive across all clusters."""
    made: dict[str, VirtualCluster] = {}
    first = 0
    for name, capacity in capacities.items():
        made[name] = VirtualCluster(name, capacity, tuple(range(first, first + capacity.gpu)))
        first += capacity.gpu
    return made
