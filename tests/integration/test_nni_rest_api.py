"""Paths of NNI's REST API. Their responses have only the fields that NNI itself defines."""

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import requests
from deadlines import DEADLINE_S
from real_experiment import a_started_experiment, wait_until

from trial_keeper.wire.messages import Stream

TRAIN = """
import os
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
print("trained")
output = os.environ["NNI_OUTPUT_DIR"]
os.mkdir(f"{output}/tensorboard")
with open(f"{output}/model.onnx", "wb") as file:
    file.write(bytes([0, 255]) * 200_000)
nni.report_intermediate_result(x)
nni.report_final_result({"default": x, "loss": 0.5})
if nni.get_sequence_id() == 1:
    raise SystemExit("no success")
"""
# A trial job must have no other fields, because the constructor of TrialJob in NNI v2.10 has only these parameters.
OF_TRIAL_JOB = {
    "trialJobId", "status", "hyperParameters", "logPath", "startTime", "endTime", "finalMetricData", "stderrPath",
    "sequenceId", "message",
}  # fmt: skip
REQUIRED = {"trialJobId", "status", "startTime", "sequenceId"}
# This module implements the part of `python -m tensorboard.main` that these tests need.
TENSORBOARD = """
import socket, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
with socket.create_server(("127.0.0.1", port)) as server:
    server.accept()
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished experiment with one failed trial. Its manager has a program named tensorboard."""
    folder = tmp_path_factory.mktemp("done")
    program = folder / "packages" / "tensorboard" / "main.py"
    program.parent.mkdir(parents=True)
    program.write_text(TENSORBOARD)
    environ = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(program.parents[1]), os.environ.get("PYTHONPATH")]))
    }
    with a_started_experiment(
        folder / "experiment", TRAIN, environ=environ, trialConcurrency=1, maxTrialNum=2
    ) as experiment:
        experiment.wait_for_status("DONE")
        yield experiment


def test_a_trial_job_has_only_the_fields_that_the_nni_client_accepts(done):
    succeeded, failed = done.get("/trial-jobs")
    for job in (succeeded, failed):
        assert job.keys() >= REQUIRED
        assert job.keys() <= OF_TRIAL_JOB
        assert done.get(f"/trial-jobs/{job['trialJobId']}") == job
        (parameters,) = map(json.loads, job["hyperParameters"])
        (final,) = job["finalMetricData"]
        assert final in done.get("/metric-data?type=FINAL")
        assert json.loads(json.loads(final["data"])) == {
            "default": parameters["parameters"]["x"],
            "loss": 0.5,
        }
        assert job["startTime"] <= final["timestamp"]
    assert [(job["status"], job["sequenceId"]) for job in (succeeded, failed)] == [
        ("SUCCEEDED", 0),
        ("FAILED", 1),
    ]
    assert "stderrPath" not in succeeded
    assert Path(failed["stderrPath"]).read_text() == "no success\n"
    assert done.get("/trial-jobs?status=FAILED") == [failed]
    assert done.ask("GET", "/trial-jobs/nope").status_code == 404


def test_a_waiting_trial_job_has_all_required_fields_and_no_end_time(a_real_experiment):
    experiment = a_real_experiment(
        "", trialConcurrency=1, maxTrialNum=1, trial={"command": "sleep 600", "codeDir": "."}
    )
    experiment.start()
    wait_until(lambda: experiment.get("/trial-jobs"), "the trial is created")
    (job,) = experiment.get("/trial-jobs")
    assert job.keys() >= REQUIRED
    assert "endTime" not in job
    assert "finalMetricData" not in job


def test_the_metadata_of_an_experiment_and_the_list_of_experiments_contain_the_managers_pid_and_port(done):
    metadata = done.get("/experiment-metadata")
    assert metadata["pid"] == done.manager.pid
    assert (metadata["port"], metadata["tag"], metadata["prefixUrl"]) == (done.port, [], None)
    assert metadata["webuiUrl"] == [f"http://127.0.0.1:{done.port}"]
    (line,) = (each for each in done.get("/experiments-info") if each["id"] == done.folder.experiment_id)
    for name in (
        "pid",
        "port",
        "tag",
        "prefixUrl",
        "webuiUrl",
        "experimentName",
        "status",
        "platform",
        "logDir",
    ):
        assert line[name] == metadata[name], name
    assert isinstance(line["startTime"], int)


def test_the_api_returns_complete_files_of_a_trial(done):
    trial = done.get("/trial-jobs")[0]["trialJobId"]

    def file(name):
        return done.ask("GET", f"/trial-file/{trial}/{name}")

    assert file("stdout").text == "trained\n"
    assert file("stdout").headers["Content-Type"] == "text/plain; charset=utf-8"
    assert file("stderr").text == "stderr is empty."
    assert file("trial.log").text == done.stream(trial, Stream.KEEPER).read_text()
    model = file("model.onnx")
    assert (model.content, model.headers["Content-Type"]) == (
        bytes([0, 255]) * 200_000,
        "application/octet-stream",
    )
    for name in ("attempt.json", "..%2fattempt.json", "%2fetc%2fpasswd", "model.pt"):
        assert file(name).status_code == 404, name
    path = done.stream(trial, Stream.STDOUT).with_name("model.onnx")
    kept = path.with_name("kept")
    path.rename(kept)
    path.symlink_to("/etc/passwd")
    try:
        assert file("model.onnx").status_code == 400
    finally:
        path.unlink()
    assert file("model.onnx").json()["error"].startswith(f"cannot find model.onnx of trial {trial}")
    kept.rename(path)


@pytest.mark.parametrize(("verb", "path"), [("POST", "/experiment"), ("PUT", "/experiment/cluster-metadata")])
def test_requests_from_the_nnictl_program_of_nni_are_refused_with_a_remedy(done, verb, path):
    answer = done.ask(verb, path, json={})
    assert (answer.status_code, "nnictl create" in answer.json()["error"]) == (409, True)


@pytest.fixture
def no_tensorboard_is_left(done):
    yield
    assert done.ask("DELETE", "/tensorboard-tasks").status_code == 200


@pytest.mark.usefixtures("no_tensorboard_is_left")
def test_tensorboard_is_started_listed_and_stopped(done):
    trials = [job["trialJobId"] for job in done.get("/trial-jobs")]
    board = done.ask("POST", "/tensorboard", json={"trials": ",".join(trials)}).json()
    assert (board["status"], board["trialJobIdList"]) == ("RUNNING", trials)
    assert [path.rpartition("/")[2] for path in board["trialLogDirectoryList"]] == ["tensorboard"] * 2
    process = psutil.Process(board["pid"])
    # While the process calls exec, its command line is empty.
    wait_until(process.cmdline, "its program has started")
    assert process.cmdline()[-1] == board["port"]
    path = f"/tensorboard/{board['id']}"
    assert done.get(path) == board == done.ask("PUT", path).json()
    assert done.get("/tensorboard-tasks") == [board]
    assert done.ask("DELETE", path).json()["status"] == "STOPPED"
    assert (
        not psutil.pid_exists(board["pid"]) or psutil.Process(board["pid"]).status() == psutil.STATUS_ZOMBIE
    )
    assert done.get("/tensorboard-tasks") == []
    assert done.ask("GET", path).status_code == 404

    second = done.ask("POST", "/tensorboard", json={"trials": trials[0]}).json()
    os.kill(second["pid"], signal.SIGKILL)
    wait_until(
        lambda: done.get("/tensorboard-tasks")[0]["status"] == "ERROR", "the killed TensorBoard is noticed"
    )
    assert done.ask("DELETE", "/tensorboard-tasks").status_code == 200
    assert done.get("/tensorboard-tasks") == []


@pytest.mark.parametrize("body", [{}, [], {"trials": ""}, {"trials": "nope"}, {"trials": ["x"]}])
def test_a_request_for_tensorboard_of_unknown_trials_is_refused(done, body):
    answer = done.ask("POST", "/tensorboard", json=body)
    assert (answer.status_code, "separated by commas" in answer.json()["error"]) == (400, True)


def test_the_api_returns_the_same_responses_with_and_without_a_token(done):
    for path in ("/trial-jobs", "/experiments-info", "/experiment-metadata", "/export-data", "/metric-data"):
        url = f"http://localhost:{done.port}/api/v1/nni{path}"
        answer = requests.get(url, timeout=DEADLINE_S)
        assert answer.status_code == 200, path
        # The response for /experiment-metadata is not compared, because it contains the address of the request.
        if path != "/experiment-metadata":
            assert answer.json() == done.get(path)


# These are the routes of NNI's manager in v2.10 and v3.0.
ROUTES = """\
GET /version
GET /check-status
GET /experiment
PUT /experiment
POST /experiment
DELETE /experiment
POST /experiment/import-data
GET /experiment/imported-data
GET /experiment-metadata
GET /experiments-info
PUT /experiment/cluster-metadata
GET /job-statistics
GET /trial-jobs
POST /trial-jobs
GET /trial-jobs/{}
DELETE /trial-jobs/{}
GET /metric-data
GET /metric-data/{}
GET /metric-data-range/{}/{}
GET /metric-data-latest
GET /trial-file/{}/{}
GET /export-data
POST /tensorboard
GET /tensorboard/{}
PUT /tensorboard/{}
DELETE /tensorboard/{}
GET /tensorboard-tasks
DELETE /tensorboard-tasks
"""


def test_every_route_of_the_nni_manager_exists(done):
    paths = done.get("/openapi.json")["paths"]
    found = {
        (verb.upper(), re.sub(r"{\w+}", "{}", path.removeprefix("/api/v1/nni")))
        for path in paths
        for verb in paths[path]
    }
    assert [line for line in ROUTES.splitlines() if tuple(line.split()) not in found] == []
