"""Metrics of an experiment and its manager in the text format of Prometheus, computed from a snapshot when they are scraped.

Names follow Prometheus' conventions: a unit in the name, `_total` for counters, `_info` for constants. docs/monitoring.md lists
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.jobs import JobState
from nni_manager.engine.serializers import counts_view
from nni_manager.engine.snapshot import ExperimentSnapshot
from trial_keeper import __version__

if TYPE_CHECKING:
    from prometheus_client import Metric

_PREFIX = "trial_keeper"
_EXPERIMENT = "experiment"


class ExperimentCollector(Collector):
    """Collects the metrics of one snapshot. Each has the label `experiment`, because managers of several experiments share a port
    one after another.
    """

    def __init__(self, snapshot: ExperimentSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """All metrics of the experiment."""
        snapshot, experiment = self._snapshot, self._snapshot.experiment
        yield self._info()
        yield self._state()
        limits, leaderboard = experiment.budget.limits, experiment.leaderboard
        yield self._gauge(
            "duration_seconds", "How long the experiment has run, without pauses.", snapshot.duration_s
        )
        yield self._by("trials", "Trials by NNI's status.", "status", counts_view(experiment))
        yield self._gauge("trial_concurrency", "The maximum number of trials at a time.", limits.concurrency)
        if limits.max_trials is not None:
            yield self._gauge("trial_limit", "The maximum number of trials.", limits.max_trials)
        best = None if leaderboard.objectives.has_several else leaderboard.best
        if best is not None and best.run.value is not None:
            yield self._gauge("best_result", "The best final result of a trial.", best.run.value)
        jobs = Counter(job.state for job in experiment.jobs.live.values())
        by_state = {state.name.lower(): jobs[state] for state in JobState}
        yield self._by("jobs", "Jobs that have not ended, by state.", "state", by_state)
        yield self._gauge("connected_keepers", "Keepers with an open stream.", snapshot.keepers)
        yield self._gauge("problems", "Problems that somebody has to solve.", len(snapshot.problems))
        yield self._gauge("leftover_jobs", "Jobs that could not be ended.", len(snapshot.leftovers))
        store = snapshot.store
        if store is None:  # a view stores nothing
            return
        yield self._gauge("store_pending_bytes", "Bytes that wait for a transaction.", store.pending_bytes)
        yield self._gauge("store_failing", "1 while nothing can be stored.", bool(store.problem))
        yield self._counter("store_transactions", "Transactions of the database.", store.transactions)
        yield self._counter("store_transaction_seconds", "Time in these transactions.", store.transactions_s)

    def _info(self) -> Metric:
        config = self._snapshot.config
        metric = InfoMetricFamily(f"{_PREFIX}_experiment", "The experiment.", labels=[_EXPERIMENT])
        metric.add_metric(
            [self._id],
            {"name": config.experiment_name, "platform": config.training_service, "version": __version__},
        )
        return metric

    def _state(self) -> Metric:
        metric = StateSetMetricFamily(
            f"{_PREFIX}_experiment_state", "The state of the experiment.", labels=[_EXPERIMENT]
        )
        found = self._snapshot.experiment.state
        metric.add_metric([self._id], {state.value: state is found for state in ExperimentState})
        return metric

    @property
    def _id(self) -> str:
        return self._snapshot.experiment.experiment_id

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"{_PREFIX}_{name}", about, labels=[_EXPERIMENT])
        metric.add_metric([self._id], value)
        return metric

    def _counter(self, name: str, about: str, value: float) -> Metric:
        metric = CounterMetricFamily(f"{_PREFIX}_{name}", about, labels=[_EXPERIMENT])
        metric.add_metric([self._id], value)
        return metric

    def _by(self, name: str, about: str, label: str, values: dict[str, int]) -> Metric:
        metric = GaugeMetricFamily(f"{_PREFIX}_{name}", about, labels=[_EXPERIMENT, label])
        for key, value in values.items():
            metric.add_metric([self._id, key], value)
        return metric
