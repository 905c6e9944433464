"""OpenTelemetry traces of trials: a span for each trial, and below it one for each state that the trial had.

They are sent over OTLP if the environment names an endpoint, as OpenTelemetry specifies. docs/monitoring.md describes them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING

from nni_manager.domain.trial import Trial, TrialState
from nni_manager.support.daemon_threads import in_daemon_thread
from trial_keeper import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_CLOSE_TIMEOUT_S = 5.0


class TrialTracer:
    """Records the states of unfinished trials, and exports the spans of a trial when it is terminal."""

    def __init__(self, provider: TracerProvider, tracer: Tracer, experiment_id: str, name: str) -> None:
        self._provider = provider
        self._tracer = tracer
        self._experiment = {"experiment.id": experiment_id, "experiment.name": name}
        self._states: dict[str, list[tuple[TrialState, float]]] = {}
        """For each unfinished trial its states, with the time of each in seconds since the epoch."""

    def note(self, trial: Trial) -> None:
        """Note the state of a trial, which has changed."""
        now_s = time.time()
        states = self._states.get(trial.trial_id) or _first_states(trial)
        if trial.state.is_terminal:
            self._states.pop(trial.trial_id, None)
            self._export(trial, states, now_s)
            return
        if states[-1][0] is not trial.state:
            states.append((trial.state, now_s))
        self._states[trial.trial_id] = states

    def _export(self, trial: Trial, states: list[tuple[TrialState, float]], now_s: float) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        reason = trial.run.reason
        attributes: dict[str, str | int | float] = {
            **self._experiment,
            "trial.id": trial.trial_id,
            "trial.number": trial.sequence_id,
            "trial.state": trial.state.value,
            "trial.exit_reason": "" if reason is None else reason.value,
            "trial.retries": trial.retries,
            "trial.preemptions": trial.preemptions,
            "job.id": trial.job_id,
        }
        if trial.run.value is not None:
            attributes["trial.result"] = trial.run.value
        span = self._tracer.start_span("trial", start_time=_ns(trial.created_at_s), attributes=attributes)
        below = set_span_in_context(span)
        ends_s = [at_s for _, at_s in states[1:]] + [now_s]
        for (state, start_s), end_s in zip(states, ends_s, strict=True):
            child = self._tracer.start_span(state.value.lower(), context=below, start_time=_ns(start_s))
            child.end(_ns(max(start_s, end_s)))  # another machine's clock may be ahead
        if trial.state is TrialState.FAILED:
            span.set_status(Status(StatusCode.ERROR, trial.run.message))
        span.end(_ns(max(trial.created_at_s, now_s)))

    async def close(self) -> None:
        """Send the spans that have not been sent, at most for 5 s."""
        # The provider's own timeouts hold for each of its batches.
        sent = in_daemon_thread(self._provider.shutdown, name="traces")
        await asyncio.wait([sent], timeout=_CLOSE_TIMEOUT_S)
        if not sent.done():
            log.warning(
                "cannot send all traces: their collector has not answered within %g s", _CLOSE_TIMEOUT_S
            )


def trial_tracer(experiment_id: str, name: str) -> TrialTracer | None:
    """The tracer of an experiment; None if the environment names no endpoint, or the library is not installed."""
    variable = next((each for each in _ENDPOINTS if os.environ.get(each)), None)
    if variable is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        log.warning(
            "cannot send traces to the endpoint of %s: there is no %s; run pip install 'trial-keeper[tracing]'",
            variable,
            error.name,
        )
        return None
    resource = {"service.version": __version__, "service.instance.id": experiment_id}
    if "OTEL_SERVICE_NAME" not in os.environ:
        resource["service.name"] = "trial-keeper"
    provider = TracerProvider(resource=Resource.create(resource))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return TrialTracer(provider, provider.get_tracer("nni_manager", __version__), experiment_id, name)


def _first_states(trial: Trial) -> list[tuple[TrialState, float]]:
    """The states of a trial that this manager sees for the first time; an earlier manager may have started it."""
    states = [(TrialState.WAITING, trial.created_at_s)]
    if trial.run.started_at_s is not None:
        states.append((TrialState.RUNNING, trial.run.started_at_s))
    return states


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
