"""Traces of trials, as a collector of OpenTelemetry receives them."""

import asyncio
import http.server
import queue
import threading
from contextlib import contextmanager

import pytest
from deadlines import DEADLINE_S
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from real_experiment import wait_until

from nni_manager.engine import tracing

# The trial reports an intermediate result and waits until the file `gate` exists. After that, a trial with x above 1 fails.
TRAIN = """
import pathlib, time
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
nni.report_intermediate_result(0)
while not pathlib.Path("gate").exists():
    time.sleep(0.01)
if x > 1:
    raise SystemExit(f"x is {x}")
nni.report_final_result(x)
"""

UNREACHABLE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


class Collector(http.server.ThreadingHTTPServer):
    """Receives spans over OTLP, each with its resource."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans = queue.Queue()

    def trace(self):
        """Wait for the spans of a trial and return them; the last one is the span `trial`."""
        trace = [self.spans.get(timeout=DEADLINE_S)]
        while trace[-1][1].name != "trial":
            trace.append(self.spans.get(timeout=DEADLINE_S))
        return trace


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for of_resource in request.resource_spans:
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    self.server.spans.put((values_of(of_resource.resource.attributes), span))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Log no request."""


@contextmanager
def a_collector():
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield collector
        collector.shutdown()


def values_of(attributes):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def endpoint(collector):
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}"}


def an_experiment(make, x, environ=None):
    """An experiment with one trial."""
    return make(TRAIN, trialConcurrency=1, maxTrialNum=1, initialTrials=[{"x": x}], environ=environ)


def open_gate(experiment):
    (experiment.code / "gate").touch()


def run_to_the_end(experiment):
    """Run the manager until its trial has ended, stop the experiment, and wait until the manager exits."""
    open_gate(experiment)
    experiment.start()
    experiment.wait_for_status("DONE")
    experiment.delete("/experiment")
    experiment.manager.wait(DEADLINE_S)
    assert experiment.manager.returncode == 0


def test_a_trace_has_a_span_for_the_trial_and_a_child_span_for_each_state(a_real_experiment):
    with a_collector() as collector:
        experiment = an_experiment(a_real_experiment, 0.5, endpoint(collector))
        experiment.start()
        wait_until(lambda: experiment.row_count() == 1, "the trial runs")
        open_gate(experiment)
        trace = collector.trace()
    *states, root = [span for _, span in trace]
    # The last state, `closing`, may take no time. Then the trace has no span for it.
    assert [span.name for span in states][:2] == ["waiting", "running"]
    assert {span.name for span in states[2:]} <= {"closing"}
    assert {span.parent_span_id for span in states} == {root.span_id}
    assert {span.trace_id for span in states} == {root.trace_id}
    starts = [span.start_time_unix_nano for span in states]
    assert starts[0] == root.start_time_unix_nano
    assert starts == sorted(starts)
    assert [span.end_time_unix_nano for span in states] == [*starts[1:], root.end_time_unix_nano]
    (trial,) = experiment.get("/trials")
    assert values_of(root.attributes) == {
        "experiment.id": "TESTEXPT",
        "experiment.name": "tests",
        "trial.id": trial["id"],
        "trial.number": 0,
        "trial.state": "SUCCEEDED",
        "trial.exit_reason": "succeeded",
        "trial.result": 0.5,
        "trial.retries": 0,
        "trial.preemptions": 0,
        "job.id": trial["jobId"],
    }
    resource, _ = trace[0]
    assert (resource["service.name"], resource["service.instance.id"]) == ("trial-keeper", "TESTEXPT")


def test_the_span_of_a_failed_trial_has_an_error_with_its_message(a_real_experiment):
    with a_collector() as collector:
        environ = endpoint(collector) | {"OTEL_SERVICE_NAME": "digits"}
        experiment = an_experiment(a_real_experiment, 2, environ)
        open_gate(experiment)
        experiment.start()
        resource, root = collector.trace()[-1]
    assert root.status.code == root.status.STATUS_CODE_ERROR
    assert "x is 2" in root.status.message
    assert resource["service.name"] == "digits"


def test_the_trace_of_a_trial_includes_its_states_before_the_manager_was_replaced(a_real_experiment):
    with a_collector() as collector:
        experiment = an_experiment(a_real_experiment, 0.5, endpoint(collector))
        experiment.start()
        wait_until(lambda: experiment.row_count() == 1, "the trial runs")
        experiment.kill_manager()
        experiment.start()
        (trial,) = experiment.get("/trials")
        experiment.delete(f"/trial-jobs/{trial['id']}")
        *states, root = [span for _, span in collector.trace()]
    assert [span.name for span in states][:3] == ["waiting", "running", "stopping"]
    assert states[0].start_time_unix_nano == root.start_time_unix_nano
    assert abs(root.start_time_unix_nano / 1e6 - trial["submitTime"]) < 1


def test_a_manager_exits_even_if_the_trace_collector_is_unreachable(a_real_experiment):
    run_to_the_end(
        an_experiment(
            a_real_experiment, 0.5, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}
        )
    )


@pytest.mark.parametrize("environ", [{}, UNREACHABLE | {"OTEL_SDK_DISABLED": "true"}])
def test_an_experiment_without_tracing_does_not_import_opentelemetry(a_real_experiment, environ):
    experiment = an_experiment(a_real_experiment, 0.5, environ)
    experiment.program = [
        "-c",
        "import sys; from nni_manager.__main__ import main; code = main()\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')]); sys.exit(code)",
    ]
    run_to_the_end(experiment)
    assert experiment.folder.manager_stderr.read_text() == "[]\n"


def test_an_experiment_runs_without_the_tracing_library_and_the_log_names_the_library(a_real_experiment):
    experiment = an_experiment(a_real_experiment, 0.5, UNREACHABLE)
    experiment.program = [
        "-c",
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from nni_manager.__main__ import main; sys.exit(main())",
    ]
    run_to_the_end(experiment)
    log = experiment.folder.manager_log.read_text()
    assert (
        "cannot send traces to the endpoint of OTEL_EXPORTER_OTLP_ENDPOINT: there is no opentelemetry" in log
    )
    assert "pip install 'trial-keeper[tracing]'" in log


def test_an_unresponsive_collector_delays_the_close_of_the_tracer_by_at_most_the_timeout(monkeypatch, caplog):
    class Silent:
        def shutdown(self):
            assert answered.wait(DEADLINE_S)

    answered = threading.Event()
    monkeypatch.setattr(tracing, "_CLOSE_TIMEOUT_S", 0.05)
    asyncio.run(tracing.TrialTracer(Silent(), None, "exp", "digits").close())
    assert "cannot send all traces: their collector has not answered within 0.05 s" in caplog.text
    answered.set()
