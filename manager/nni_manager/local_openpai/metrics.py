"""Metrics of the cluster, computed from its jobs and virtual clusters when they are scraped. docs/monitoring.md lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from nni_manager.local_openpai.core.queue import ResourceCounts, VirtualCluster
from nni_manager.local_openpai.core.states import State
from nni_manager.local_openpai.jobs import JobSummary

if TYPE_CHECKING:
    from prometheus_client import Metric

_PREFIX = "local_openpai"


class ClusterCollector(Collector):
    """Collects the metrics of these jobs and virtual clusters."""

    def __init__(self, jobs: Collection[JobSummary], clusters: Collection[VirtualCluster]) -> None:
        self._jobs = jobs
        self._clusters = clusters

    def collect(self) -> Iterator[Metric]:
        """All metrics of the cluster."""
        states = Counter(job.state for job in self._jobs)
        jobs = GaugeMetricFamily(f"{_PREFIX}_jobs", "Jobs by state.", labels=["state"])
        for state in State:
            jobs.add_metric([state.value], states[state])
        yield jobs
        by_cluster = ["virtual_cluster"]
        waiting = GaugeMetricFamily(
            f"{_PREFIX}_queued_jobs", "Jobs that wait for resources.", labels=by_cluster
        )
        for cluster in self._clusters:
            waiting.add_metric([cluster.name], cluster.waiting_jobs)
        yield waiting
        capacity = {cluster.name: cluster.capacity for cluster in self._clusters}
        allocated = {cluster.name: cluster.used for cluster in self._clusters}
        yield from _resources("capacity", "Resources of a virtual cluster.", capacity)
        yield from _resources("allocated", "Resources that its tasks have.", allocated)


def _resources(name: str, about: str, by_cluster: Mapping[str, ResourceCounts]) -> Iterator[Metric]:
    metrics = [
        GaugeMetricFamily(f"{_PREFIX}_{name}_{unit}", about, labels=["virtual_cluster"])
        for unit in ("cpus", "memory_bytes", "gpus")
    ]
    for cluster, counts in by_cluster.items():
        for metric, amount in zip(metrics, (counts.cpu, counts.memory_mb * 2**20, counts.gpu), strict=True):
            metric.add_metric([cluster], amount)
    yield from metrics
