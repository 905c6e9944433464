"""What monitoring systems ask a manager: Kubernetes' probes, and the metrics that Prometheus scrapes."""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from nni_manager.support.http_server import metrics_response
from nni_manager.web.backend_reads import ExperimentBackend

LIVE, READY, METRICS = "/livez", "/readyz", "/metrics"


class MonitoringRoutes:
    """The paths at the root of the server. The probes are public and say nothing of the experiment."""

    def __init__(self, engine: ExperimentBackend) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        """All routes."""
        return [Route(LIVE, self.live), Route(READY, self.ready), Route(METRICS, self.metrics)]

    async def live(self, _: Request) -> Response:
        """Respond, which shows that the event loop runs."""
        return PlainTextResponse("ok\n")

    async def ready(self, _: Request) -> Response:
        """Respond with 503 while nothing can be stored, for example on a full disk."""
        store = self._engine.snapshot().store
        if store is not None and store.problem:
            return PlainTextResponse("cannot store results; see `nnictl experiment status`\n", 503)
        return PlainTextResponse("ok\n")

    async def metrics(self, request: Request) -> Response:
        """The metrics of the experiment and of this process."""
        # A manager that nobody scrapes does not pay for the import.
        from nni_manager.engine.experiment_metrics import ExperimentCollector

        # In the event loop, which alone changes the experiment.
        return metrics_response(ExperimentCollector(self._engine.snapshot()), request)
