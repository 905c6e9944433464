"""The Python Experiment API on experiments of a few tiny trials, with managers of their own."""

import contextlib
import importlib.metadata
import math
import os
import platform
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy
import psutil
import pytest
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from real_experiment import wait_until
from user_home import environ_of, left_in, processes_of

from nni_manager.client.experiments import known_experiment
from nni_manager.errors import RetryableError, UserError
from nni_manager.experiment import Experiment, RunMode
from nni_manager.experiment.data import TrialResult
from nni_manager.store.registry import Registry

GOOD = """\
import nni_sdk
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(x / 2)
nni_sdk.report_final_result({"default": x, "loss": -x})
"""
# Unlike GOOD, this code does not end by itself: it reports one result and then waits for a signal.
ENDLESS = GOOD.replace("nni_sdk.report_final", "import signal; signal.pause(); nni_sdk.report_final")
PAGE = (Path(__file__).parents[2] / "docs/python-api.md").read_text()
# This is the first example of the documentation page, with smaller limits.
PREPARED = (
    PAGE.partition("```python\n")[2].partition("```")[0]
    + """\
from nni_manager.experiment import RunMode
experiment.config.trial_concurrency = 1
experiment.config.max_trial_number = 2
experiment.config.experiment_name = "tiny"
experiment.config.experiment_working_directory = "../experiments"
"""
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder of a user's script and the current directory, with a separate home."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(GOOD)
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("NNI_")]:
        monkeypatch.delenv(name)
    for name, value in environ_of(folder).items():
        monkeypatch.setenv(name, value)
    yield folder
    for process in processes_of(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def prepared():
    names = {}
    exec(PREPARED, names)
    return names["experiment"]


@pytest.mark.smoke
def test_queries_of_an_ended_experiment_return_the_same_answers_before_and_after_its_manager_stops(
    place, capsys
):
    with prepared() as experiment:
        assert experiment.run("auto") is True
        out, shown = capsys.readouterr()
        assert out == "", "stdout is the script's own"
        assert "2/2 ended" in shown
        assert f"Experiment {experiment.id} is served at http://127.0.0.1:{experiment.port}/" in shown

        def all_answers():
            trials = experiment.list_trial_jobs()
            return (
                experiment.get_status(),
                trials,
                experiment.get_trial_job(trials[1].trialJobId),
                experiment.get_job_statistics(),
                experiment.get_job_metrics(),
                experiment.get_job_metrics(trials[0].trialJobId),
                experiment.get_experiment_profile()["params"],
                experiment.get_experiment_metadata(experiment.id)["experimentName"],
                experiment.export_data(),
            )

        answers = all_answers()
        status, trials, second, statistics, metrics, of_first, params, name, results = answers
        assert (status, statistics) == ("DONE", [{"trialJobStatus": "SUCCEEDED", "trialJobNumber": 2}])
        assert [trial.sequenceId for trial in trials] == [0, 1]
        assert (second, name) == (trials[1], "tiny")
        x = trials[0].parameters["x"]
        assert trials[0].hyperParameters[0].parameters == {"x": x}
        assert trials[0].finalMetricData[0].data == {"default": x, "loss": -x}
        assert trials[0].value == x
        frame = experiment.trials_dataframe()
        assert list(frame.columns) == [
            "number",
            "trialJobId",
            "x",
            "value",
            "value/loss",
            "state",
            "durationS",
            "tags",
            "note",
        ]
        assert list(frame.number) == [0, 1]
        assert set(frame.state) == {"SUCCEEDED"}
        assert list(frame.value) == [trial.value for trial in trials]
        assert (frame.durationS > 0).all()
        curves = experiment.metrics_dataframe()
        assert list(curves.columns) == ["trialJobId", "step", "type", "timestamp", "value", "value/loss"]
        assert list(curves.step) == [0, 1, 0, 1]
        assert list(curves.value[:2]) == [x / 2, x]
        assert (
            list(experiment.metrics_dataframe(trials[1].trialJobId).trialJobId) == [trials[1].trialJobId] * 2
        )
        assert experiment.best_trial == max(trials, key=lambda trial: trial.value)
        assert Path(trials[0].stderrPath).read_text() == ""
        assert list(metrics) == [trial.trialJobId for trial in trials]
        assert [(each.type, each.data) for each in of_first[trials[0].trialJobId]] == [
            ("PERIODICAL", x / 2),
            ("FINAL", {"default": x, "loss": -x}),
        ]
        assert (params["maxTrialNumber"], params["trialConcurrency"]) == (2, 1)
        assert results[0].parameter == {"x": x}
        assert results[0].value == {"default": x, "loss": -x}

        for wrong, said in (
            (lambda: experiment.get_trial_job("nope"), "cannot find trial 'nope'"),
            (lambda: experiment.get_job_metrics("nope"), "cannot find trial 'nope'"),
            (lambda: experiment.kill_trial_job("nope"), "cannot find trial 'nope'"),
            (lambda: experiment.update_trial_concurrency(0), "cannot use config.trial_concurrency: 0 is not"),
            (lambda: experiment.update_search_space({"x": 1}), "cannot use x: "),
            (experiment.start, "it is served on port"),
        ):
            with pytest.raises(UserError, match=said):
                wrong()
    assert all_answers() == answers
    assert experiment.port is None
    with pytest.raises(UserError, match=rf"does not run; Experiment.resume\('{experiment.id}'\) resumes it"):
        experiment.update_max_trial_number(5)
    assert left_in(place) == []


def test_the_provenance_of_each_trial_contains_its_code_version_and_its_python_and_its_packages(place):
    with prepared() as experiment:
        assert experiment.run("auto") is True
        trials = experiment.list_trial_jobs()
        found = [experiment.get_provenance(trial.trialJobId) for trial in trials]
        experiment.stop()
        assert [experiment.get_provenance(trial.trialJobId) for trial in trials] == found
        for each in found:
            assert each["code"]["digest"]
            assert each["code"]["gitCommit"] is None
            (attempt,) = each["attempts"]
            assert attempt["host"] == socket.gethostname()
            assert attempt["python"] == platform.python_version()
            assert f"pytest=={importlib.metadata.version('pytest')}" in each["packages"]
        assert len({each["attempts"][0]["packages"] for each in found}) == len(found) - 1 == 1


def test_a_warning_shows_the_exit_code_and_the_log_command_if_every_trial_fails(place, capsys):
    experiment = prepared()
    experiment.config.trial_command = "exit 3"
    with experiment:
        assert experiment.run("auto") is True  # as in NNI, True means that all trials have ended
        last = capsys.readouterr().err.splitlines()[-1]
    assert "none of 2 trials succeeded; the last one " in last
    assert "exit code 3; `nnictl log trial" in last
    assert [trial.message for trial in experiment.list_trial_jobs()] == ["exit code 3"] * 2


def test_experiment_wait_also_waits_for_trials_that_were_added_after_the_start(place, capsys):
    with pytest.raises(UserError, match=r"call start\(\) or run\(\) first"):
        prepared().wait()
    gate = place / "gate"
    os.mkfifo(gate)
    (place / "train.py").write_text(f"open('gate').close()\n{GOOD}")
    with prepared() as experiment:
        experiment.start()
        experiment.config.description = "late"
        experiment.enqueue_trial({"x": numpy.float32(4.5)})
        with pytest.raises(UserError, match=r"cannot send {'x': nan} to the manager: it is not JSON"):
            experiment.enqueue_trial({"x": math.nan})
        with pytest.raises(UserError, match=r"cannot import \[\]: it has no list of results"):
            experiment.import_data([])
        with gate.open("w"):  # open() waits until the first trial has opened the pipe
            (place / "open").touch()
            (place / "open").replace(gate)
        with Experiment.connect(experiment.port) as other:
            assert other.wait() is True
        assert experiment.wait() is True
        assert experiment.get_status() == "DONE"
        results = [each for each in experiment.export_data() if each.parameter["x"] <= 1]
        assert experiment.import_data(results) == len(results) == 1
        assert experiment.import_data([*results, TrialResult({"x": 0.5}, math.nan, "none")]) == 1
        assert 4.5 in [trial.parameters["x"] for trial in experiment.list_trial_jobs()]
    assert experiment.wait() is True
    err = capsys.readouterr().err
    assert "2/2 ended" in err
    assert "WARNING: config.description changed after the start, without effect" in err
    assert "skipped 1 of 2 results: they have no finite number to import" in err


def test_the_python_api_can_update_view_and_resume_an_existing_experiment(place, capsys):
    (place / "train.py").write_text(ENDLESS)
    with contextlib.suppress(ZeroDivisionError), prepared() as experiment:
        experiment.start("auto", run_mode=RunMode.Foreground)
        # The `with` block did not start the experiment, so leaving the block does not stop the experiment.
        with Experiment.connect(experiment.port) as other:
            assert other.id == experiment.id
            other.update_search_space({"x": {"_type": "uniform", "_value": [5, 6]}})
            other.update_max_experiment_duration("2h")
            other.update_max_trial_number(3)
            other.update_trial_concurrency(2)
            wait_until(lambda: len(other.list_trial_jobs()) == 2, "two trials at a time")
            params = other.get_experiment_profile()["params"]
            assert (params["maxTrialNumber"], params["maxExperimentDuration"]) == (3, 7200)
            with pytest.raises(
                UserError, match="the configuration of an experiment that was created elsewhere"
            ):
                other.config.trial_command = "python3 other.py"
        first, second = experiment.list_trial_jobs()
        assert second.parameters["x"] >= 5
        experiment.kill_trial_job(first.trialJobId)
        wait_until(
            lambda: experiment.get_trial_job(first.trialJobId).status == "USER_CANCELED",
            "the trial has ended",
        )
        _ = 1 / 0
    assert experiment.get_status() == "STOPPED"
    assert f"trial {first.trialJobId}" in capsys.readouterr().out  # this line comes from the manager's log
    assert left_in(place) == []

    (place / "train.py").write_text(GOOD)
    viewed = Experiment.view(experiment.id, "auto", non_blocking=True)
    port = viewed.port
    assert Experiment.connect(port).get_status() == "STOPPED"
    resumed = Experiment(id=experiment.id)
    assert resumed.has_checkpoint()
    assert resumed.run_or_resume("auto") is True  # the new manager replaces the view
    unused = free_port_pair()
    with pytest.raises(UserError, match=f"connect to port {unused}: none of your experiments uses it"):
        Experiment.connect(unused)
    resumed.stop()
    viewed.stop()
    assert left_in(place) == []


@pytest.fixture
def started(place):
    """Starts a script that ends with the given lines; its stdin and stdout are pipes."""
    scripts = []

    def start(last_lines):
        script = subprocess.Popen(
            [sys.executable, "-c", PREPARED + last_lines],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        scripts.append(script)
        return script

    yield start
    for script in scripts:
        script.kill()
        script.communicate()


def read_until(script, mark, stream="stdout"):
    text = ""
    while mark not in text:
        line = getattr(script, stream).readline()
        assert line, script.communicate()
        text += line
    return text


def known():
    return [known_experiment(folder) for folder in Registry.of_user().all()]


def test_after_ctrl_c_the_experiment_is_stopped_and_the_script_continues(place, started):
    (place / "train.py").write_text(ENDLESS)
    script = started("print('run is', experiment.run('auto'), experiment.get_status())")
    read_until(script, "1 running", "stderr")
    script.send_signal(signal.SIGINT)
    out, err = script.communicate(timeout=DEADLINE_S)
    assert (script.returncode, out) == (0, "run is None STOPPED\n"), err
    assert f"WARNING: Ctrl-C: stopping experiment {known()[0].experiment_id}\n" in err
    assert left_in(place) == []


def test_the_experiment_stops_when_the_script_exits_but_not_when_a_fork_of_the_script_exits(place, started):
    (place / "train.py").write_text(ENDLESS)
    script = started(
        "import os, sys\n"
        "with experiment:\n"
        "    experiment.start('auto')\n"
        "    if os.fork() == 0: sys.exit()\n"
        "    os.wait(); print('after fork', experiment.get_status()); input()"
    )
    assert "after fork RUNNING\n" in read_until(script, "after fork")
    _, err = script.communicate("\n", timeout=DEADLINE_S)
    assert script.returncode == 0
    assert "WARNING" not in err
    assert known()[0].stored.status()["status"] == "STOPPED"
    assert left_in(place) == []


def test_the_error_of_experiment_wait_names_the_resume_method_if_the_manager_dies(place, capsys):
    (place / "train.py").write_text(ENDLESS)
    with prepared() as experiment:
        experiment.start()
        manager = known()[0].manager
        os.kill(manager.pid, signal.SIGKILL)
        with pytest.raises(
            RetryableError, match=rf"continue; Experiment\.resume\('{experiment.id}'\) finds them"
        ):
            experiment.wait()
        Experiment.resume(experiment.id, wait_completion=False).stop()
    assert left_in(place) == []


def test_killing_the_script_stops_its_experiment_but_not_a_detached_experiment(place, started):
    (place / "train.py").write_text(ENDLESS)
    script = started(
        "experiment.start('auto', run_mode=RunMode.Detach)\n"
        "tied = Experiment(experiment.config)\n"
        "tied.start('auto'); print('tied is', tied.id); input()"
    )
    tied_id = read_until(script, "tied is ").split()[-1]
    script.kill()
    script.wait()

    def tied_has_ended():
        tied = next(each for each in known() if each.experiment_id == tied_id)
        return tied.manager is None and tied.stored.status()["status"] == "STOPPED" and tied

    tied = wait_until(tied_has_ended, "the manager has stopped the experiment by itself")
    assert "stopping, because the program that started it has ended" in tied.folder.manager_log.read_text()
    (port,) = [each.manager.port for each in known() if each.manager is not None]
    with Experiment.connect(port) as detached:
        assert detached.get_status() == "RUNNING"
    detached.stop()
    assert left_in(place) == []
