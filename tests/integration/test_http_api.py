"""The HTTP API of a real manager."""

import json
import subprocess
import sys

import pytest
from deadlines import DEADLINE_S
from real_experiment import a_started_experiment, wait_until

TRAIN = """
import nni_sdk as nni
number = nni.get_sequence_id()
nni.get_next_parameter()
for i in range(3):
    nni.report_intermediate_result({"default": i, "loss": -i})
if number == 1:
    nni.report_final_result(float("nan"))
elif number == 2:
    raise SystemExit("third time unlucky")
else:
    nni.report_final_result({"default": number, "other": "it's"})
"""
WAITING = "import time\nimport nni_sdk as nni\nnni.get_next_parameter()\nnni.report_intermediate_result(1)\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished experiment with its manager. No test changes this experiment."""
    folder = tmp_path_factory.mktemp("done")
    with a_started_experiment(folder, TRAIN, trialConcurrency=1, maxTrialNum=4) as experiment:
        experiment.wait_for_status("DONE")
        yield experiment


def test_the_api_returns_the_transport_of_a_running_trial_and_null_for_a_stopped_trial(
    a_real_experiment,
):
    experiment = a_real_experiment(WAITING, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    wait_until(lambda: experiment.row_count() == 1, "the trial reports")
    (trial,) = experiment.get("/trials")
    assert (trial["transport"], trial["road"]) == ("grpc", "stream")
    assert 0 <= trial["lastContactAgoS"] < 60
    profile = experiment.get("/experiment")
    shown = profile["trialTransports"]
    ago_s = shown[trial["id"]]["lastContactAgoS"]
    assert shown == {trial["id"]: {"transport": "grpc", "road": "stream", "lastContactAgoS": ago_s}}
    assert profile["trialRoads"] == shown
    assert experiment.ask("DELETE", f"/trial-jobs/{trial['id']}").status_code == 202
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["transport"], trial["lastContactAgoS"]) == (None, None)
    assert experiment.get("/experiment")["trialTransports"] == {}


def test_every_path_of_the_nni_api_returns_the_data_of_the_experiment(done):
    assert done.get("/check-status") == {"status": "DONE", "errors": []}
    assert done.ask("GET", "/version").text.count(".") == 2
    assert done.get("/job-statistics") == [
        {"trialJobStatus": "SUCCEEDED", "trialJobNumber": 3},
        {"trialJobStatus": "FAILED", "trialJobNumber": 1},
    ]
    profile = done.get("/experiment")
    assert profile["id"] == done.folder.experiment_id
    assert profile["params"]["maxTrialNum"] == 4
    assert profile["nextSequenceId"] == 4
    assert done.get("/experiment-metadata")["port"] == done.port

    trials = done.get("/trials")
    assert [trial["sequenceId"] for trial in trials] == [0, 1, 2, 3]
    assert [trial["value"] for trial in trials] == [0, None, None, 3]
    assert trials[0]["startTime"] <= trials[0]["endTime"]
    assert json.loads(trials[0]["hyperParameters"][0])["parameters"] == trials[0]["parameters"]
    failed = done.get("/trials?status=FAILED")
    assert [trial["id"] for trial in failed] == [trials[2]["id"]]
    assert done.get("/trials?status=UNKNOWN") == []
    assert (failed[0]["reason"], failed[0]["exitCode"]) == ("non-zero exit", 1)
    assert "third time unlucky" in failed[0]["message"]
    alone = done.get(f"/trials/{trials[0]['id']}")
    assert [each["attempt"] for each in alone.pop("provenance")["attempts"]] == [0]
    assert alone.pop("hasCheckpoint") is False
    assert alone == trials[0]

    first = trials[0]["id"]
    records = done.get(f"/metric-data/{first}")
    assert [record["type"] for record in records] == ["PERIODICAL"] * 3 + ["FINAL"]
    assert json.loads(json.loads(records[-1]["data"])) == {"default": 0, "other": "it's"}
    assert len(done.get("/metric-data")) == 4 * 3 + 3
    assert len(done.get("/metric-data?type=FINAL")) == 3
    assert len(done.get("/metric-data-range/1/2")) == 4 + 3
    assert len(done.get("/metric-data-latest")) == 3 + 4
    assert [json.loads(entry["value"]) for entry in done.get("/export-data")][::2] == [
        {"default": 0, "other": "it's"},
        {"default": 3, "other": "it's"},
    ]
    jobs = done.get("/jobs")
    assert {job["jobId"]: (job["trialIds"], job["trialCount"], job["state"]) for job in jobs} == {
        trial["jobId"]: ([trial["id"]], 1, "ended") for trial in trials
    }
    summary = done.get("/summary")
    assert summary["best"]["sequenceId"] == 3
    assert [trial["sequenceId"] for trial in summary["top"]] == [3, 0]
    assert [trial["sequenceId"] for trial in summary["latestFailures"]] == [2]


def test_invalid_requests_return_an_error_status_and_a_message(done):
    first = done.get("/trials")[0]["id"]
    for method, path, status, word in [
        ("GET", "/trials/nope", 404, "nnictl trial ls"),
        ("GET", "/metric-data/nope", 404, "nnictl trial ls"),
        ("GET", "/metric-data?type=WRONG", 400, "PERIODICAL"),
        ("DELETE", f"/trial-jobs/{first}", 409, "SUCCEEDED already"),
        (
            "GET",
            "/no-such-path",
            404,
            "GET /api/v1/nni/no-such-path: Not Found; /api/v1/nni/openapi.json lists",
        ),
        ("PATCH", "/experiment", 405, "Method Not Allowed; /api/v1/nni/openapi.json lists"),
        ("GET", "/trials?status=foo", 400, "cannot use status=foo: write one of EARLY_STOPPED, FAILED"),
        ("GET", "/trial-jobs?status=foo", 400, "cannot use status=foo: write one of EARLY_STOPPED, FAILED"),
        ("GET", "/trial-window?start=abc", 400, "there is no such parameter; write some of states"),
        ("GET", "/trial-sample?offset=1", 400, "there is no such parameter; write some of states"),
        ("PUT", "/experiment", 400, "not JSON"),
    ]:
        response = done.ask(method, path)
        assert (response.status_code, word in response.text) == (status, True), (path, response.text)
    assert done.get("/check-status")["status"] == "DONE"


@pytest.mark.parametrize("levels", [150, 330, 900])
def test_requests_with_values_that_are_nested_too_deeply_are_refused(done, levels):
    deep = json.loads("[" * levels + "]" * levels)
    space = {"net": {"_type": "choice", "_value": [deep]}}
    for method, path, body in [
        ("PUT", "/experiment?update_type=SEARCH_SPACE", {"params": {"searchSpace": space}}),
        ("PUT", "/experiment?update_type=SEARCH_SPACE", {"params": {"searchSpace": json.dumps(space)}}),
        ("POST", "/trial-jobs", {"number": 1, "name": deep}),
        ("POST", "/experiment/import-data", [{"parameter": {"number": deep}, "value": 1}]),
    ]:
        response = done.ask(method, path, json=body)
        assert response.status_code == 400, (path, response.text)
        assert "levels deep" in response.text


def test_the_error_for_a_trial_parameter_that_is_nested_too_deeply_contains_the_parameter_name(done):
    response = done.ask("POST", "/trial-jobs", json={"number": 1, "name": json.loads("[" * 100 + "]" * 100)})
    assert response.status_code == 400
    assert "its parameter 'name' is nested more than 100 levels deep; make it flatter" in response.text


def test_a_request_with_a_foreign_host_header_is_refused(done):
    response = done.ask("GET", "/experiment", headers={"Host": "evil.example"})
    assert response.status_code == 400


def test_a_second_manager_on_the_same_experiment_is_refused(done):
    second = subprocess.run(
        [sys.executable, "-m", "nni_manager", "--folder", done.folder.path, "--port", "1"],
        capture_output=True,
        text=True,
    )
    assert second.returncode == 1
    assert second.stderr.startswith("cannot own experiment TESTEXPT: manager process ")
    assert f", port {done.port} owns it; stop it first with `nnictl stop TESTEXPT`" in second.stderr
    assert second.stderr.count("\n") == 1


def test_a_manager_exits_and_starts_no_keeper_if_its_port_is_in_use(done, a_real_experiment):
    other = a_real_experiment(TRAIN)
    for port in (done.port, done.port - 1):  # the HTTP port, and the keepers' port
        manager = subprocess.run(
            [sys.executable, "-m", "nni_manager", "--folder", other.folder.path, "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert manager.returncode == 1
        assert "--port" in manager.stderr
        assert manager.stderr.count("\n") == 1
    assert not other.keeper_pids()


def test_a_running_trial_continues_after_max_exec_duration_has_expired(a_real_experiment):
    train = "import time\nimport nni_sdk as nni\nnni.get_next_parameter()\ntime.sleep(2)\nnni.report_final_result(1)\n"
    experiment = a_real_experiment(train, trialConcurrency=1, maxTrialNum=50, maxExecDuration="1s")
    experiment.start()
    summary = experiment.wait_for_status("DONE")
    assert summary["counts"]["SUCCEEDED"] == summary["trialCount"] == 1


SEVERAL = """
import nni_sdk as nni
nni.get_next_parameter()
for result in (0, 0.1, 0.2):
    nni.report_final_result(result)
"""


def test_the_first_of_several_final_results_counts_and_the_trial_has_a_warning(a_real_experiment):
    experiment = a_real_experiment(SEVERAL, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["status"], trial["value"]) == ("SUCCEEDED", 0)
    assert trial["warning"] == (
        "it reported several final results, and only the first counts; call report_final_result once"
    )


def test_a_metric_name_with_a_lone_surrogate_is_stored_and_contained_in_the_message(
    a_real_experiment, tmp_path
):
    code = """
import os
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
name = os.fsdecode(b"caf\\xe9.png")
nni.report_final_result({name: 0.5, "default": 0.5} if x == 1 else {name: 0.5})
"""
    space = {"x": {"_type": "choice", "_value": [1, 2]}}
    grid = {"builtinTunerName": "GridSearch"}
    experiment = a_real_experiment(code, space=space, trialConcurrency=1, maxTrialNum=2, tuner=grid)
    experiment.start()
    experiment.wait_for_status("DONE")
    first, second = experiment.get("/trials")
    assert json.loads(first["finalMetricData"][0]["data"]) == {"default": 0.5, "caf\udce9.png": 0.5}
    assert second["value"] is None
    assert "caf\\udce9.png" in second["message"]
