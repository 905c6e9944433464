"""Allocation of this machine's resources and ports to containers."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping

from nni_manager.local_openpai.core.exits import ALLOCATION_REFUSED, PORT_CONFLICT, TaskExit
from nni_manager.local_openpai.core.job import Allocated, Allocation, ContainerEnded, PaiJob, Task
from nni_manager.local_openpai.core.plan import JobPlan
from nni_manager.local_openpai.core.ports import PortsExhausted, chosen_ports
from nni_manager.local_openpai.core.queue import Grant, Request, VirtualCluster, summed, virtual_clusters
from nni_manager.local_openpai.errors import ApiError, invalid_job
from nni_manager.local_openpai.settings import ClusterSettings


class Allocator:
    """The virtual clusters with their queues, and the ports in use. Used from one event loop."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.virtual_clusters: dict[str, VirtualCluster] = virtual_clusters(settings.virtual_clusters)
        self._settings = settings
        self._ports: dict[str, frozenset[int]] = {}

    def check(self, plan: JobPlan) -> None:
        """Check that the job can run once enough resources are free.

        Raises:
            ApiError: NoVirtualClusterError.
            ProtocolInvalid: the job can never fit into its virtual cluster.
        """
        cluster = self.virtual_clusters.get(plan.virtual_cluster)
        if cluster is None:
            known = ", ".join(self.virtual_clusters)
            message = f"cannot find virtual cluster {plan.virtual_cluster}; use one of {known}"
            raise ApiError("NoVirtualClusterError", message)
        together = summed(role.need for role in plan.roles for _ in range(role.tasks))
        have = cluster.capacity
        for need in [together] if plan.is_gang else [role.need for role in plan.roles]:
            if not need.fits_into(have):
                raise invalid_job(
                    f"cannot run this job: {'all its tasks together need' if plan.is_gang else 'one of its tasks needs'} "
                    f"{need.cpu} CPUs, {need.memory_mb} MB and {need.gpu} GPUs, but "
                    f"virtual cluster {plan.virtual_cluster} has only {have.cpu} CPUs, {have.memory_mb} MB and {have.gpu} GPUs; "
                    "request less, or start the cluster with more"
                )

    def request(self, job: PaiJob, request: Request) -> list[ContainerEnded]:
        """Queue a request. A request that can never fit, e.g. after a restart with less capacity, ends its containers instead."""
        name = job.plan.virtual_cluster
        cluster = self.virtual_clusters.get(name)
        if cluster is not None and request.total.fits_into(cluster.capacity):
            cluster.enqueue(request)
            return []
        problem = (
            f"virtual cluster {name} {'was removed' if cluster is None else 'became too small'} after the job was submitted; "
            "start the cluster with its former resources, and submit the job again"
        )
        ended = TaskExit(ALLOCATION_REFUSED, diagnostics=problem)
        return [ContainerEnded(container_id, ended) for container_id in request.needs]

    def cancel(self, container_ids: Iterable[str]) -> None:
        """Remove the requests of these containers from the queues."""
        for cluster in self.virtual_clusters.values():
            cluster.dequeue(container_ids)

    def release(self, container_id: str) -> None:
        """Release the resources and ports of a container; no-op if the container has none."""
        for cluster in self.virtual_clusters.values():
            cluster.release(container_id)
        self._ports.pop(container_id, None)

    def adopt(self, plan: JobPlan, task: Task, allocation: Allocation) -> None:
        """Register the allocation of a container of an earlier cluster."""
        cluster = self.virtual_clusters.get(plan.virtual_cluster)
        if cluster is not None:
            cluster.hold(task.container_id, plan.role(task.role).need, allocation.gpus)
        self._use_ports(task.container_id, allocation.ports)

    def grants(self) -> Iterator[Grant]:
        """Allocate resources to queued requests, one by one, until none fits.

        A grant that cannot be used ends its containers. The job may then withdraw other requests, and make new ones.
        """
        is_granted = True
        while is_granted:
            is_granted = False
            for cluster in self.virtual_clusters.values():
                for grant in cluster.grants():
                    is_granted = True
                    yield grant

    def allocated(self, job: PaiJob, grant: Grant) -> list[Allocated] | list[ContainerEnded]:
        """The outcome of a grant: the allocations with their ports, or the end of all its containers."""
        tasks = {task.container_id: task for task in job.tasks.values()}
        allocations: dict[str, Allocation] = {}
        in_use = {port for ports in self._ports.values() for port in ports}

        def is_free(port: int) -> bool:
            return port not in in_use and _can_listen(port)

        first, end = self._settings.first_port, self._settings.end_port
        try:
            for container_id, gpus in grant.gpus.items():
                wanted = job.plan.role(tasks[container_id].role).ports
                ports = chosen_ports(container_id, wanted, first, end, is_free)
                self._use_ports(container_id, ports)
                in_use.update(self._ports[container_id])
                allocations[container_id] = Allocation(self._settings.host_ip, ports, gpus)
        except PortsExhausted as error:
            problem = f"{error}; free ports between {first} and {end - 1}"
            ended = TaskExit(PORT_CONFLICT, diagnostics=problem)
            return [ContainerEnded(container_id, ended) for container_id in grant.gpus]
        return [Allocated(allocations)]

    def _use_ports(self, container_id: str, ports: Mapping[str, Iterable[int]]) -> None:
        self._ports[container_id] = frozenset(port for numbers in ports.values() for port in numbers)


def _can_listen(port: int) -> bool:
    """True if a process could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
