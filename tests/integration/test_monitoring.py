"""The probes and metrics of a real manager. The tests request them in the same way as Kubernetes and Prometheus."""

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from prometheus_client.parser import text_string_to_metric_families
from real_experiment import a_started_experiment, wait_until
from starlette.requests import Request
from strangers import session_of_another_user

from nni_manager.engine.snapshot import StoreLoad
from nni_manager.web.monitoring_routes import MonitoringRoutes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/monitoring"
TRAIN = """
import nni_sdk as nni
nni.get_next_parameter()
nni.report_final_result(0.5 + nni.get_sequence_id())
"""


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """The manager of a finished experiment with two trials."""
    with a_started_experiment(tmp_path_factory.mktemp("monitored"), TRAIN, maxTrialNum=2) as experiment:
        experiment.wait_for_status("DONE")
        yield experiment


def url(manager, path):
    return f"http://127.0.0.1:{manager.port}{path}"


def get(manager, path, **headers):
    token = {"Authorization": f"Bearer {manager.folder.process().token}"}
    return requests.get(url(manager, path), headers=token | headers, timeout=DEADLINE_S)


def samples(text):
    """The metrics' values by name and labels, without the label `experiment`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "experiment"}
            found[(sample.name, *labels.values())] = sample.value
    return found


def test_the_metrics_contain_values_about_trials_results_jobs_and_the_manager_process(manager):
    answer = get(manager, "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    found = samples(answer.text)
    assert found["trial_keeper_trials", "SUCCEEDED"] == 2
    assert found["trial_keeper_trials", "RUNNING"] == 0
    assert found["trial_keeper_best_result",] == 1.5
    assert found["trial_keeper_experiment_state", "DONE"] == 1
    assert found["trial_keeper_experiment_state", "RUNNING"] == 0
    assert found["trial_keeper_trial_limit",] == 2
    assert found["trial_keeper_store_transactions_total",] >= 2
    assert found["trial_keeper_store_transaction_seconds_total",] > 0
    assert found["trial_keeper_store_failing",] == found["trial_keeper_problems",] == 0
    assert found["process_resident_memory_bytes",] > 10e6
    assert f'experiment="{manager.folder.path.name}"' in answer.text


def test_metrics_have_the_openmetrics_format_if_the_client_accepts_this_format(manager):
    answer = get(manager, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")


def test_another_user_of_the_machine_can_read_the_probes_but_not_the_metrics(manager):
    with session_of_another_user() as another:
        assert another.get(url(manager, "/metrics"), timeout=DEADLINE_S).status_code == 401
        for path in ("/livez", "/readyz"):
            answer = another.get(url(manager, path), timeout=DEADLINE_S)
            assert (answer.status_code, answer.text) == (200, "ok\n")


async def test_a_manager_that_cannot_store_results_is_not_ready():
    loads = iter([StoreLoad(0, 1, 0.1, "the disk is full"), StoreLoad(0, 2, 0.2, ""), None])
    routes = MonitoringRoutes(SimpleNamespace(snapshot=lambda: SimpleNamespace(store=next(loads))))
    answers = [await routes.ready(Request({"type": "http"})) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 200, 200]
    assert answers[0].body == b"cannot store results; see `nnictl experiment status`\n"


def test_promtool_reports_no_error_in_the_metrics(manager):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=get(manager, "/metrics").text,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_metric_in_the_dashboard_and_the_alerts_is_exported(manager):
    names = {name for (name, *_) in samples(get(manager, "/metrics").text)} | {"up"}
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) == 11
    asked += re.findall(r"expr: (.*)", (EXAMPLES / "alerts.yml").read_text())
    used = {
        name for expr in asked for name in re.findall(r"\b(?:trial_keeper|process)_\w+(?=\{|\[| |$)", expr)
    }
    assert len(used) >= 11
    assert used - names == set()


def test_promtool_accepts_the_example_configuration_and_alerts(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    config = (EXAMPLES / "prometheus.yml").read_text().replace("/etc/prometheus", str(tmp_path))
    (tmp_path / "prometheus.yml").write_text(config)
    (tmp_path / "trial-keeper.token").write_text("token")
    shutil.copy(EXAMPLES / "alerts.yml", tmp_path)
    checked = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "4 rules found" in checked.stdout


@contextlib.contextmanager
def a_prometheus(folder, manager):
    """Run a Prometheus that scrapes the manager each second with the token from a file. Yield its address."""
    (folder / "token").write_text(manager.folder.process().token)
    (folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [
                    {
                        "job_name": "trial-keeper",
                        "authorization": {"credentials_file": str(folder / "token")},
                        "static_configs": [{"targets": [f"127.0.0.1:{manager.port}"]}],
                    }
                ],
            }
        )
    )
    address = f"127.0.0.1:{free_port_pair()}"
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def test_prometheus_scrapes_a_manager_with_its_token(manager, tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: prometheus)")

    def queried():
        with contextlib.suppress(requests.ConnectionError):
            query = {"query": 'trial_keeper_trials{status="SUCCEEDED"}'}
            answer = requests.get(f"{address}/api/v1/query", params=query, timeout=DEADLINE_S)
            return answer.ok and answer.json()["data"]["result"]

    with a_prometheus(tmp_path, manager) as address:
        (result,) = wait_until(queried, f"a sample is stored; see {tmp_path / 'log'}")
    assert result["value"][1] == "2"
    assert result["metric"]["experiment"] == manager.folder.path.name
