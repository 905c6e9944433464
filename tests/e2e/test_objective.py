"""Functions as objectives: `Experiment.run(objective=f)`, with real managers, keepers and trials."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest
from deadlines import DEADLINE_S
from real_experiment import wait_until
from user_home import BIN, environ_of, left_in, processes_of

from nni_manager.client.experiments import known_experiment
from nni_manager.errors import UserError
from nni_manager.experiment import Experiment
from nni_manager.store.registry import Registry

MODULE = """\
import os
import nni_sdk

calls = 0


def measure(parameters):
    global calls
    calls += 1
    nni_sdk.report_intermediate_result(parameters["x"] / 2)
    if parameters["x"] == 3:
        raise ValueError("no such x")
    print(os.getpid(), os.getppid(), os.getcwd(), calls)
    return {"default": parameters["x"], "calls": calls}


class Model:
    @staticmethod
    def loss(parameters):
        return None if parameters["x"] == 1 else "none"
"""
# The script has no `__main__` guard. So a trial process must not run the script, which would start another experiment.
SCRIPT = """\
import sys
from nni_manager.experiment import Experiment

print("the script runs", flush=True)
experiment = Experiment("local")
experiment.config.search_space = {"x": {"_type": "choice", "_value": [1, 2, 3]}}
experiment.config.tuner.name = "GridSearch"
experiment.config.tuner.class_args["optimize_mode"] = "maximize"
experiment.config.trial_concurrency = 1
experiment.config.experiment_working_directory = "../experiments"
offset, calls = 10, 0


def objective(parameters):
    global calls
    calls += 1
    return helper(parameters["x"]) + 100 * calls


def helper(x):
    import beside
    return x + offset + beside.MORE

"""

USES_PICKLE = """\
import multiprocessing
import pickle
from dataclasses import dataclass

from nni_manager.experiment import search


def square(x):
    return x * x


@dataclass
class Model:
    size: int

    def times(self, x):
        return self.size * x

    def __getattr__(self, name):
        return {}[name] if name == "func" else super().__getattribute__(name)

    def __call__(self, parameters):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return sum(pool.map(self.times, [1, 2]))


def objective(parameters):
    total = 0
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            total += sum(pool.map(square, [1, 2]))
    with open("model.pickle", "wb") as file:
        pickle.dump(Model(3), file)
    return total


if __name__ == "__main__":
    for each in (objective, Model(2)):
        found = search(each, {"x": {"_type": "choice", "_value": [1]}}, trials=1, tuner="GridSearch")
        for trial in found.experiment.list_trial_jobs():
            print((trial.message + " " + trial.status).strip(), trial.value)
    with open("model.pickle", "rb") as file:
        print(pickle.load(file))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder of a user's script and the current directory, with a separate home."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "beside.py").write_text("MORE = 0.5\n")
    (folder / "my_objective.py").write_text(MODULE)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in os.environ if name.startswith("NNI_")]:
        monkeypatch.delenv(name)
    for name, value in environ_of(folder).items():
        monkeypatch.setenv(name, value)
    yield folder
    sys.modules.pop("my_objective", None)
    for process in processes_of(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def prepared(trials=3):
    experiment = Experiment("local")
    experiment.config.search_space = {"x": {"_type": "choice", "_value": [1, 2, 3][:trials]}}
    experiment.config.tuner.name = "GridSearch"
    experiment.config.tuner.class_args["optimize_mode"] = "maximize"
    experiment.config.trial_concurrency = 1
    experiment.config.experiment_working_directory = "../experiments"
    return experiment


def by_x(experiment):
    return {trial.parameters["x"]: trial for trial in experiment.list_trial_jobs()}


def output_of(trial, stream="stdout"):
    return Path(trial.stderrPath).with_name(stream).read_text()


def started(place, last_lines):
    (place / "script.py").write_text(SCRIPT + last_lines)
    return subprocess.Popen(
        [sys.executable, "script.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def nnictl(*words):
    return subprocess.run([BIN / "nnictl", *words], capture_output=True, text=True, timeout=DEADLINE_S)


def the_known():
    (folder,) = Registry.of_user().all()
    return known_experiment(folder)


@pytest.mark.smoke
def test_each_trial_of_an_importable_function_runs_in_a_separate_process(place):
    from my_objective import measure

    with prepared() as experiment:
        assert experiment.run("auto", objective=measure) is True
        trials = by_x(experiment)
        metrics = experiment.get_job_metrics()
        config = the_known().stored.config()
    assert (config.objective, config.code_dir) == ("my_objective:measure", place)
    assert not (the_known().folder.objective / "function.pickle").exists()
    assert {x: (trial.status, trial.value) for x, trial in trials.items()} == {
        1: ("SUCCEEDED", 1), 2: ("SUCCEEDED", 2), 3: ("FAILED", None)
    }  # fmt: skip
    pids = set()
    for x in (1, 2):
        pid, parent, cwd, calls = output_of(trials[x]).split()
        pids |= {pid}
        assert (cwd, calls) == (str(place), "1"), "a global that an earlier trial changed"
        assert str(os.getpid()) not in (pid, parent)
        assert [each.data for each in metrics[trials[x].trialJobId]] == [x / 2, {"default": x, "calls": 1}]
    assert len(pids) == 2
    assert trials[3].message.endswith("ValueError: no such x")
    shown = output_of(trials[3], "stderr")
    assert 'raise ValueError("no such x")' in shown
    assert shown.startswith("Traceback (most recent call last):")
    assert left_in(place) == []


def test_an_objective_function_that_returns_text_causes_a_warning_about_an_invalid_result(place):
    from my_objective import Model

    with prepared(trials=2) as experiment:
        assert experiment.run("auto", objective=Model.loss) is True
        trials = by_x(experiment)
    assert the_known().stored.config().objective == "my_objective:Model.loss"
    for x, shown in ((1, "null"), (2, '"none"')):
        assert f"cannot use the result {shown}: it is no number" in output_of(trials[x], "stderr")
        assert trials[x].value is None


def test_trials_do_not_run_the_top_level_code_of_a_script_without_a_main_guard(place):
    with started(place, "print('run is', experiment.run('auto', objective=objective))\n") as script:
        out, err = script.communicate(timeout=DEADLINE_S)
    assert script.returncode == 0
    assert "WARNING" not in err
    assert out.count("the script runs") == 1
    assert "run is True" in out
    known = the_known()
    assert {trial["value"] for trial in known.stored.trial_list()} == {111.5, 112.5, 113.5}
    config = known.stored.config()
    assert (config.objective, config.code_dir) == ("__main__:objective", known.folder.objective)
    for path in known.folder.workspace.trials.glob("*/attempts/*/*/output/stdout"):
        assert path.read_text() == ""
    assert left_in(place) == []


def test_pickle_and_multiprocessing_find_the_functions_and_classes_of_the_script(place):
    (place / "script.py").write_text(USES_PICKLE)
    script = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=DEADLINE_S)
    printed = [line for line in script.stdout.splitlines() if line.startswith(("SUCCEEDED", "Model"))]
    assert printed == ["SUCCEEDED 15.0", "SUCCEEDED 6.0", "Model(size=3)"], script


class Trap:
    """An object that, when it is unpickled, records the pid of the current process in a file."""

    def __init__(self, record):
        self.record = record

    def __reduce__(self):
        code = f"open({str(self.record)!r}, 'a').write(f'{{__import__(\"os\").getpid()}} ') and 7"
        return eval, (code,)


def test_a_pickled_closure_is_stored_in_private_files_and_loaded_only_by_trial_processes(place):
    def closure(trap):
        return lambda parameters: print(os.getpid()) or parameters["x"] + trap

    with prepared(trials=2) as experiment:
        old_umask = os.umask(0)
        try:
            assert experiment.run("auto", objective=closure(Trap(place / "loaded"))) is True
        finally:
            os.umask(old_umask)
        trials = by_x(experiment)
    assert {x: trial.value for x, trial in trials.items()} == {1: 8, 2: 9}
    pids = {output_of(trial).strip() for trial in trials.values()}
    assert set((place / "loaded").read_text().split()) == pids
    folder = the_known().folder.objective
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {
        "objective": 0o700, "trial.py": 0o600, "objective.json": 0o600, "function.pickle": 0o600
    }  # fmt: skip


def test_a_pickled_function_is_not_loaded_if_another_user_can_write_to_its_file(place):
    import pickle

    (place / "function.pickle").write_bytes(pickle.dumps(Trap(place / "loaded")))
    (place / "function.pickle").chmod(0o620)
    (place / "objective.json").write_text(json.dumps({"function": None, "path": [], "cwd": str(place)}))
    code = "import nni_sdk.objective, sys; nni_sdk.objective.run_trial(sys.argv[1])"
    ran = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True)
    assert ran.returncode == 1
    assert f"ObjectiveUnusable: cannot load {place}/function.pickle: another user" in ran.stderr
    assert not (place / "loaded").exists()


def test_a_stopped_experiment_resumes_with_the_same_or_a_new_objective_function(place):
    with started(
        place, "experiment.config.max_trial_number = 1\nexperiment.run('auto', objective=objective)\n"
    ) as script:
        _, err = script.communicate(timeout=DEADLINE_S)
    assert script.returncode == 0
    assert "WARNING" not in err
    name = the_known().experiment_id
    with Experiment.resume(name, "auto", wait_completion=False) as resumed:
        resumed.update_max_trial_number(2)
        wait_until(lambda: len(resumed.export_data()) == 2, "the second trial has a result")
        wait_until(lambda: resumed.get_status() == "DONE", "the experiment is done")
    with Experiment.resume(
        name, "auto", wait_completion=False, objective=lambda parameters: -parameters["x"]
    ) as resumed:
        resumed.update_max_trial_number(3)
        wait_until(lambda: len(resumed.export_data()) == 3, "the third trial has a result")
        wait_until(lambda: resumed.get_status() == "DONE", "the experiment is done")
        values = {x: trial.value for x, trial in by_x(resumed).items()}
    assert sorted(values.values()) == [-3, 111.5, 112.5]
    assert left_in(place) == []


def test_the_archive_of_an_experiment_omits_its_objective_function_so_a_resume_requires_the_function(place):
    with started(
        place, "experiment.config.max_trial_number = 1\nexperiment.run('auto', objective=objective)\n"
    ) as script:
        _, err = script.communicate(timeout=DEADLINE_S)
    assert script.returncode == 0
    assert "WARNING" not in err
    name = the_known().experiment_id
    saved = nnictl("experiment", "save", name, "--path", "it.tar.gz", "--saveCodeDir")
    assert saved.returncode == 0, saved.stderr
    assert "it.tar.gz does not contain the function __main__:objective, which trials run" in saved.stderr
    with tarfile.open("it.tar.gz") as archive:
        assert not [each for each in archive.getnames() if "pickle" in each or "objective" in each]
        assert "code.tar.gz" not in archive.getnames()
    assert nnictl("experiment", "delete", name, "--yes").returncode == 0
    loaded = nnictl("experiment", "load", "--path", "it.tar.gz", "--logDir", "loaded")
    assert loaded.returncode == 0, loaded.stderr
    how = f"Experiment.resume('{name}', objective=FUNCTION)"
    assert f"trials run the function __main__:objective, which archives do not contain: resume the experiment from Python with {how}" in loaded.stderr  # fmt: skip  # noqa: E501
    resumed = nnictl("resume", name)
    assert resumed.returncode != 0
    assert (
        f"cannot resume experiment {name}: its trials run the function __main__:objective, which archives do not contain; "
        f"resume it from Python with {how}" in resumed.stderr
    )
    with pytest.raises(UserError, match=r"cannot resume experiment .* __main__:objective"):
        Experiment.resume(name, "auto")
    with Experiment.resume(
        name, "auto", wait_completion=False, objective=lambda parameters: -parameters["x"]
    ) as experiment:
        experiment.update_max_trial_number(2)
        wait_until(lambda: len(experiment.export_data()) == 2, "the second trial has a result")
        assert sorted(trial.value for trial in experiment.list_trial_jobs())[0] < 0


@pytest.mark.smoke
def test_after_ctrl_c_the_trial_is_stopped_and_the_script_continues(place):
    with started(
        place,
        "def forever(parameters):\n    import signal; signal.pause()\n"
        "print('run is', experiment.run('auto', objective=forever), experiment.get_status())",
    ) as script:
        text = ""
        while "1 running" not in text:
            line = script.stderr.readline()
            assert line, script.communicate()
            text += line
        script.send_signal(signal.SIGINT)
        out, err = script.communicate(timeout=DEADLINE_S)
    assert (script.returncode, out.splitlines()[-1]) == (0, "run is None STOPPED"), err
    assert f"WARNING: Ctrl-C: stopping experiment {the_known().experiment_id}\n" in err
    assert left_in(place) == []


def test_an_objective_function_that_trials_could_not_run_is_refused_before_the_manager_starts(place):
    import threading

    lock = threading.Lock()
    for objective, said in (
        (3, "cannot use 3 as the objective: it is not callable"),
        (lambda parameters: lock, "cannot copy the function .*: cannot pickle '_thread.lock' object"),
    ):
        with pytest.raises(UserError, match=said):
            prepared().run("auto", objective=objective)
    experiment = prepared()
    experiment.config.trial_command = "python3 train.py"
    with pytest.raises(UserError, match=r"cannot use trial_command = 'python3 train\.py' together"):
        experiment.run("auto", objective=len)
    elsewhere = Experiment("openpai")
    with pytest.raises(UserError, match="cannot run the function builtins:len on openpai"):
        elsewhere.run("auto", objective=len)
    assert Registry.of_user().all() == []
