"""NNI's own Python client, in the unmodified versions 2.10.1 and 3.0, with a real manager."""

import contextlib
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from pythons import python_of
from real_experiment import RealExperiment, a_started_experiment, wait_until
from real_nni import python_with_nni

from nni_manager.config.reader import read_experiment_file
from nni_manager.store.reader import StoreReader

pytestmark = [pytest.mark.peer, pytest.mark.timeout(600)]

TRAIN = """
import time
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
nni.report_intermediate_result(x / 2)
if nni.get_sequence_id() >= 2:
    time.sleep(600)
nni.report_final_result({"default": x, "loss": 0.5} if nni.get_sequence_id() else x)
"""
# The script writes one JSON document into a file. The client of NNI v2.10 has no method kill_trial_job: with it, the
# script stops no trial.
CLIENT = """
import dataclasses, json, sys
from nni.experiment import Experiment

experiment = Experiment.connect(int(sys.argv[1]))
jobs = experiment.list_trial_jobs()
seen = {
    "id": experiment.id,
    "status": experiment.get_status(),
    "jobs": [dataclasses.asdict(job) for job in jobs],
    "second": dataclasses.asdict(experiment.get_trial_job(jobs[1].trialJobId)),
    "statistics": experiment.get_job_statistics(),
    "metrics": {name: [dataclasses.asdict(each) for each in found] for name, found in experiment.get_job_metrics().items()},
    "of_first": [dataclasses.asdict(each) for each in experiment.get_job_metrics(jobs[0].trialJobId)[jobs[0].trialJobId]],
    "exported": [dataclasses.asdict(each) for each in experiment.export_data()],
    "metadata": experiment.get_experiment_metadata(experiment.id),
    "pid": experiment._proc.pid,
}
experiment.update_trial_concurrency(2)
experiment.update_max_experiment_duration("2h")
experiment.update_max_trial_number(5)
experiment.update_search_space({"x": {"_type": "uniform", "_value": [5, 6]}})
if hasattr(experiment, "kill_trial_job"):
    experiment.kill_trial_job(jobs[2].trialJobId)
seen["params"] = experiment.get_experiment_profile()["params"]
experiment.stop()
json.dump(seen, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module", params=["2.10.1", "3.0"])
def client(request):
    """A Python with NNI's real client. If this machine has Python 3.9, the client of v2.10.1 runs on it, as for typical users of
    v2.10.1.
    """
    version = request.param
    python = python_of("3.9") if version == "2.10.1" else None
    return python_with_nni(version, python or sys.executable)


def an_experiment_in(schema, folder):
    """An experiment described in this schema of NNI. It has three trials, the last of which does not end by itself."""
    experiment = RealExperiment(folder, TRAIN, trialConcurrency=1, maxTrialNum=3, maxExecDuration="1h")
    if schema == "v2":
        keys = {
            "trialCommand": f"{sys.executable} train.py",
            "trialConcurrency": 1,
            "maxTrialNumber": 3,
            "maxExperimentDuration": "1h",
            "searchSpaceFile": "search_space.json",
            "experimentWorkingDirectory": str(experiment.config.log_dir),
            "tuner": {"name": "Random"},
            "trainingService": {"platform": "local"},
        }
        file = experiment.code / "v2.yml"
        file.write_text(json.dumps(keys))
        experiment.config = read_experiment_file(file)
    return experiment


@pytest.mark.parametrize("schema", ["v1", pytest.param("v2", marks=pytest.mark.smoke)])
def test_the_python_client_of_nni_can_query_and_change_and_stop_an_experiment(client, schema, tmp_path):
    experiment = an_experiment_in(schema, tmp_path / "experiment")
    experiment.create()
    with contextlib.closing(experiment):
        experiment.start()
        wait_until(lambda: experiment.row_count() == 5, "the third trial reports")
        (tmp_path / "client.py").write_text(CLIENT)
        answers = tmp_path / "answers.json"
        with subprocess.Popen(
            [client, "client.py", str(experiment.port), answers],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            # NNI's client waits until the manager exits. The manager is a child of the test and stays a zombie until the test
            # polls it.
            wait_until(
                lambda: None not in (experiment.manager.poll(), running.poll()) or running.poll(),
                "both have ended",
            )
            assert running.returncode == 0, running.stderr.read()
        seen = json.loads(answers.read_text())
        manager = experiment.manager
        assert (seen["id"], seen["status"]) == (experiment.folder.experiment_id, "NO_MORE_TRIAL")
        assert seen["pid"] == seen["metadata"]["pid"] == manager.pid
        assert [job["status"] for job in seen["jobs"]] == ["SUCCEEDED", "SUCCEEDED", "RUNNING"]
        assert seen["second"] == seen["jobs"][1]
        xs = [job["hyperParameters"][0]["parameters"]["x"] for job in seen["jobs"]]
        assert [final["data"] for final in seen["jobs"][0]["finalMetricData"]] == [xs[0]]
        assert [final["data"] for final in seen["jobs"][1]["finalMetricData"]] == [
            {"default": xs[1], "loss": 0.5}
        ]
        assert seen["jobs"][2]["finalMetricData"] == []
        assert [(each["type"], each["data"]) for each in seen["of_first"]] == [
            ("PERIODICAL", xs[0] / 2),
            ("FINAL", xs[0]),
        ]
        assert sorted(seen["metrics"]) == sorted(job["trialJobId"] for job in seen["jobs"])
        assert [(each["parameter"], each["value"]) for each in seen["exported"]] == [
            ({"x": xs[0]}, xs[0]),
            ({"x": xs[1]}, {"default": xs[1], "loss": 0.5}),
        ]
        assert {each["trialJobStatus"]: each["trialJobNumber"] for each in seen["statistics"]} == {
            "SUCCEEDED": 2,
            "RUNNING": 1,
        }
        names = (
            ("maxTrialNum", "maxExecDuration")
            if schema == "v1"
            else ("maxTrialNumber", "maxExperimentDuration")
        )
        params = seen["params"]
        assert [params[name] for name in (*names, "trialConcurrency")] == [5, 7200, 2]
        assert params["searchSpace"] == {"x": {"_type": "uniform", "_value": [5, 6]}}
        assert manager.wait(DEADLINE_S) == 0
        with StoreReader(experiment.folder.database) as reader:
            assert reader.experiment().state.value == "STOPPED"


# NNI's command nnictl needs setuptools, so this script calls the functions of the command directly.
NNICTL = """
import sys
from pathlib import Path
from argparse import Namespace
from nni.tools.nnictl import nnictl_utils
from nni.tools.nnictl.config_utils import Experiments

name, port, pid, what, *numbers = sys.argv[1:]
Experiments().add_experiment(name, int(port), 0, "local", "tests", status="RUNNING", pid=int(pid))
if what == "ls":
    head, tail = map(int, numbers)
    nnictl_utils.trial_ls(Namespace(id=name, head=head or None, tail=tail or None))
else:
    nnictl_utils.export_trials_data(Namespace(id=name, path=what, type="csv", intermediate=bool(int(numbers[0]))))
"""
REGISTER = """
import sys
from pathlib import Path
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.registry import Registry
Registry.of_user().add(ExperimentFolder(Path(sys.argv[1])))
"""
REPORTS = """
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
nni.report_intermediate_result(x / 2)
nni.report_intermediate_result(x)
nni.report_final_result(%s)
"""


@pytest.fixture(scope="module", params=["x", '{"default": x, "loss": 0.5}'], ids=["number", "dict"])
def ended(request, tmp_path_factory):
    """A finished experiment whose manager still runs. Results are either all numbers or all dicts, because NNI's nnictl cannot
    sort a mixture.
    """
    folder, train = tmp_path_factory.mktemp("ended"), REPORTS % request.param
    with a_started_experiment(folder, train, trialConcurrency=1, maxTrialNum=3) as experiment:
        experiment.wait_for_status("DONE")
        yield experiment


@pytest.fixture
def both(ended, client, tmp_path):
    """Two functions that run NNI's nnictl and our nnictl. Each returns the output of the command."""
    (tmp_path / "nnictl.py").write_text(NNICTL)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def of_nni(*words):
        words = [ended.folder.experiment_id, str(ended.port), str(ended.manager.pid), *map(str, words)]
        return subprocess.run(
            [client, "nnictl.py", *words],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def ours(*words):
        subprocess.run([sys.executable, "-c", REGISTER, ended.folder.path], env=environ, check=True)
        return subprocess.run(
            [sys.executable, "-m", "nni_manager.cli", *words], env=environ, capture_output=True, check=True
        ).stdout.decode()

    return of_nni, ours


@pytest.mark.parametrize(
    ("head", "tail"), [(0, 0), pytest.param(2, 0, marks=pytest.mark.smoke), (0, 2), (9, 0)]
)
def test_nnictl_trial_ls_prints_the_same_json_as_the_nnictl_of_nni(both, head, tail):
    of_nni, ours = both
    limit = [f"--head={head}"] if head else [f"--tail={tail}"] if tail else []
    expected = of_nni("ls", head, tail)
    assert json.loads(expected)
    assert ours("trial", "ls", "--nni-json", *limit).strip() == expected.strip()


@pytest.mark.parametrize("has_intermediates", [False, pytest.param(True, marks=pytest.mark.smoke)])
def test_nnictl_experiment_export_writes_the_same_csv_as_the_nnictl_of_nni(both, has_intermediates, tmp_path):
    of_nni, ours = both
    of_nni(tmp_path / "theirs.csv", int(has_intermediates))
    options = ["--intermediate"] if has_intermediates else []
    table = ours("experiment", "export", "--type", "csv", "--nni-columns", *options)
    with (tmp_path / "theirs.csv").open(newline="") as file:
        expected = list(csv.DictReader(file))
    assert len(expected) == 3
    assert list(csv.DictReader(io.StringIO(table, newline=""))) == expected


def test_the_recorded_public_names_of_nni_match_the_installed_nni_package(client):
    version = client.parents[1].name.removeprefix("nni-")
    here = Path(__file__).parents[1]
    done = subprocess.run(
        [client, here / "fakes" / "public_names.py"], capture_output=True, text=True, check=True
    )
    stored = json.loads((here / "golden" / "nni_names.json").read_text())[version]
    assert json.loads(done.stdout.splitlines()[-1]) == stored
