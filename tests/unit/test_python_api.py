"""The Python Experiment API without an experiment: names, notebooks, data frames, and its examples."""

import doctest
import importlib
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

from nni_manager.errors import UserError
from nni_manager.experiment import (
    Experiment,
    ExperimentConfig,
    KubeflowRoleConfig,
    TrialResult,
    UnsupportedName,
)
from nni_manager.experiment import progress as progress_module
from nni_manager.experiment.data import PandasMissing, TrialJob, TrialMetricData, frame_of
from nni_manager.experiment.progress import NotebookView, is_in_notebook
from nni_manager.experiment.queries import NotStarted
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.registry import Registry
from nni_manager.store.writer import Store

ROOT = Path(__file__).parents[2]
# These are the public names of NNI v2.10.
NAMES = """
    Experiment RunMode ExperimentConfig AlgorithmConfig CustomAlgorithmConfig TrainingServiceConfig LocalConfig OpenpaiConfig
    FrameworkControllerConfig FrameworkControllerRoleConfig FrameworkAttemptCompletionPolicy KubeflowConfig KubeflowRoleConfig
    K8sStorageConfig K8sNfsConfig K8sAzureStorageConfig TrialResult TrialMetricData TrialHyperParameters TrialJob
"""
METHODS = """
    start run stop connect resume view get_status get_trial_job list_trial_jobs get_job_statistics get_job_metrics
    get_experiment_profile get_experiment_metadata get_all_experiments_metadata export_data update_trial_concurrency
    update_max_experiment_duration update_search_space update_max_trial_number run_or_resume has_checkpoint load_checkpoint
    kill_trial_job
"""


@pytest.mark.parametrize("name", ["config", "data", "experiment", "aliases"])
def test_the_doctest_examples_in_the_modules_pass(name):
    module = importlib.import_module(f"nni_manager.experiment.{name}")
    assert doctest.testmod(module).failed == 0


def test_the_doctest_examples_on_the_page_pass():
    page = ROOT / "docs/python-api.md"
    assert doctest.testfile(str(page), module_relative=False) == (0, 13)


def test_every_name_of_the_nni_experiment_api_exists_and_is_documented():
    module, page = (
        importlib.import_module("nni_manager.experiment"),
        (ROOT / "docs/python-api.md").read_text(),
    )
    for name in NAMES.split():
        assert name in module.__all__
    for name in METHODS.split():
        assert getattr(Experiment, name).__doc__
        assert name in page or name == "load_checkpoint"


def test_an_unsupported_class_name_raises_an_error_and_a_misspelled_class_name_causes_a_warning():
    with pytest.raises(
        UnsupportedName,
        match="cannot import AmlConfig: this platform is not supported; use local, openpai",
    ):
        from nni_manager.experiment import AmlConfig  # noqa: F401
    with pytest.warns(UserWarning, match="KubeflowRowConfig is read as KubeflowRoleConfig"):
        from nni_manager.experiment import KubeflowRowConfig
    assert KubeflowRowConfig is KubeflowRoleConfig
    with pytest.raises(ImportError, match=r"cannot find nni\.trace: .* install the package nni"):
        from nni_sdk import trace  # noqa: F401


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: Experiment("local").get_status(),
            "cannot query an experiment that has not been started; call start",
        ),
        (
            lambda: Experiment().start(),
            "cannot start an experiment without a configuration; write Experiment",
        ),
        (lambda: Experiment(id="x/../y"), "as the id of an experiment"),
        (lambda: Experiment({"platform": "local"}), "cannot create an experiment from dict; pass a platform"),
        (lambda: Experiment("local").resume(), "cannot find an experiment without its id; pass the id"),
        (lambda: Experiment.resume("nope"), "cannot find experiment 'nope'"),
        (lambda: Experiment.resume(None), "cannot find an experiment without its id; pass the id, as in"),
        (Experiment.resume, "cannot find an experiment without its id; pass the id, as in"),
        (Experiment.view, "cannot find an experiment without its id; pass the id, as in"),
        (
            lambda: Experiment("local").run(len),
            "as the port; a function is the objective: write run(objective=f)",
        ),
        (
            lambda: Experiment("local").import_data({"x": 1}),
            "cannot import results from an object of type dict: it is not a list; pass a list, such as that of export_data()",
        ),
        (
            lambda: Experiment("local").set_note(None),
            'cannot use None as a note: it is no text; pass a text, or ""',
        ),
        (lambda: Experiment.view(5), "cannot use 5 as the id of an experiment"),
        (lambda: Experiment("local", 5), "cannot use 5 as the id of an experiment"),
        (
            lambda: setattr(Experiment("local"), "config", "local"),
            "cannot create an experiment from str; pass an Ex",
        ),
        (
            lambda: setattr(Experiment("local"), "trial_command", "python3 train.py"),
            "cannot set trial_command of an experiment: it is a field of its configuration; set experiment.config.trial",
        ),
        (
            lambda: Experiment("local").start("auto", run_mode="detach"),
            "cannot start with run_mode='detach'; write one of RunMode.Background, RunMode.Foreground, RunMode.Detach",
        ),
        (lambda: Experiment.view("nope"), "cannot find experiment 'nope'"),
        (lambda: Experiment(id="nope").list_trial_jobs(), "cannot find experiment 'nope'"),
        (lambda: Experiment.connect(1), "cannot connect to port 1: none of your experiments uses it"),
    ],
)
def test_an_invalid_call_raises_an_error_with_a_remedy(call, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(UserError) as caught:
        call()
    assert expected in str(caught.value)


def test_the_start_of_an_experiment_in_a_deleted_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work").rmdir()
    for call in (
        Experiment("local").run,
        lambda: Experiment("local").run(objective=len),
        a_config("/tmp").validate,
    ):
        with pytest.raises(UserError, match=r"it was deleted; change to another one with os\.chdir\(\)"):
            call()


def a_stored_experiment(folder, experiment_id):
    found = ExperimentFolder(folder / experiment_id)
    found.make(None)
    Registry.of_user().add(found)
    Store.create(found.database, found.collected_logs, experiment_id, "{}", b"secret", 0.0).close()
    return found


def a_config(folder):
    return ExperimentConfig(
        "local",
        trial_command="true",
        trial_concurrency=1,
        search_space={"x": {"_type": "uniform", "_value": [0, 1]}},
        tuner={"name": "Random"},
        experiment_working_directory=str(folder),
    )


def test_an_experiment_is_found_only_by_its_full_id(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    a_stored_experiment(tmp_path, "digits10")
    for call in (
        lambda: Experiment.resume("digits1"),
        lambda: Experiment.view("digits1"),
        lambda: Experiment("local", id="digits1").get_status(),
    ):
        with pytest.raises(UserError, match="cannot find experiment 'digits1'; did you mean digits10"):
            call()
    assert Experiment(id="digits10").get_status() == "INITIALIZED"


def test_an_experiment_id_in_use_is_refused_even_in_a_different_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    first = a_stored_experiment(tmp_path / "first", "digits1")
    config = a_config("second")
    with pytest.raises(UserError, match=f"{first.path} has this id; choose another id, or resume it"):
        Experiment(config, id="digits1").start("auto")
    assert Registry.of_user().all() == [first]
    assert not (tmp_path / "second").exists()


def test_an_experiment_id_that_another_process_has_just_taken_is_refused_and_its_experiment_is_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    make = ExperimentFolder.make

    def make_second(folder, storage):
        monkeypatch.setattr(ExperimentFolder, "make", make)
        a_stored_experiment(folder.path.parent, folder.experiment_id)
        make(folder, storage)

    monkeypatch.setattr(ExperimentFolder, "make", make_second)
    config = a_config(tmp_path / "new")
    with pytest.raises(UserError, match="new/digits1 has this id; choose another id, or resume it"):
        Experiment(config, id="digits1").start("auto")
    assert Experiment(id="digits1").get_status() == "INITIALIZED"


def test_errors_about_the_command_and_the_port_use_the_names_of_the_python_api(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    experiment = Experiment("local")
    experiment.config.trial_concurrency = 1
    experiment.config.tuner.name = "Random"
    experiment.config.search_space = {"x": {"_type": "uniform", "_value": [0, 1]}}
    experiment.config.trial_command = "pyton3 train.py"
    with pytest.raises(
        UserError, match="cannot find the command 'pyton3' of trial_command: it is neither a program"
    ):
        experiment.start("auto")
    (tmp_path / "train.py").touch()
    experiment.config.trial_command = "python3 trian.py"
    with pytest.raises(
        UserError,
        match=r"'trian.py' of trial_command: .* did you mean train.py\? .* to trial_code_directory$",
    ):
        experiment.start()
    experiment.config.trial_command = "python3 train.py"
    for port in (0, 65536, "8080", True):
        with pytest.raises(UserError, match='it is not a number from 1 to 65534; pass one, or port="auto"'):
            experiment.start(port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match='choose another with port=N or port="auto"'):
            experiment.start(taken.getsockname()[1])
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


@pytest.mark.slow
def test_the_import_paths_of_nni_work_after_a_call_of_install_import_aliases():
    code = (
        "from nni_sdk.aliases import install_import_aliases as answer; answer(); answer()\n"
        "import sys; import nni; assert 'nni_manager.experiment' not in sys.modules\n"
        "from nni.tuner import Tuner\n"
        "from nni.experiment import Experiment, RunMode\n"
        "from nni.experiment.config import AlgorithmConfig\n"
        "import nni.experiment, nni_manager.experiment as ours\n"
        "from nni.experiment.data import TrialResult; assert TrialResult is ours.TrialResult\n"
        "from nni.experiment.experiment import RunMode as same; assert same is RunMode\n"
        "assert nni.experiment is ours and Experiment is ours.Experiment and AlgorithmConfig is ours.AlgorithmConfig\n"
        "assert ours.__spec__.name == 'nni_manager.experiment' and nni.__name__ == 'nni_sdk'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def notebook(monkeypatch):
    """Replaces the two functions of IPython that the view calls, as if in a kernel.

    Returns the list of displayed outputs and their updates.
    """
    shown = []

    def display(picture, display_id):
        assert display_id is True
        shown.append(picture)
        return types.SimpleNamespace(update=shown.append)

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    return shown


def a_summary(**fields):
    empty = {"problem": "", "errors": [], "best": None, "latestFailures": [], "latestWithoutResult": None}
    counts = {"SUCCEEDED": 1, "RUNNING": 1, "FAILED": 0}
    limits = {"maxTrialNum": 4, "maxExecDurationS": None, "elapsedS": 5, "trialCount": 2}
    return {"id": "aB3dE", "name": "digits", "status": "RUNNING", "counts": counts} | empty | limits | fields


def test_a_notebook_shows_a_single_output_that_is_updated(notebook):
    assert is_in_notebook()
    view = NotebookView()
    view.show(a_summary())
    view.show(a_summary(status="DONE", counts={"SUCCEEDED": 4, "RUNNING": 0}))
    first, second = notebook
    assert "1/4" in repr(first)
    assert "DONE" in repr(second)
    assert "\x1b" not in repr(second)
    assert second._repr_html_().startswith("<pre")
    assert "DONE" in second._repr_html_()


def test_a_process_without_an_ipython_kernel_is_not_a_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not is_in_notebook()
    terminal = types.ModuleType("IPython")
    terminal.get_ipython = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert not is_in_notebook()


RESULTS = [
    TrialResult({"lr": 0.1, "net": {"_name": "conv", "size": 3}}, {"default": 0.9, "loss": 1}, "aB3dE"),
    TrialResult({"lr": 0.2, "value": 7}, 0.5, "x"),
]


def test_a_data_frame_of_results_has_a_column_for_each_parameter():
    pytest.importorskip("pandas")
    frame = frame_of(RESULTS)
    assert list(frame.columns) == [
        "trialJobId",
        "lr",
        "net/_name",
        "net/size",
        "parameter/value",
        "value",
        "value/loss",
    ]
    assert frame["value"].tolist() == [0.9, 0.5]
    assert frame["lr"].mean() == pytest.approx(0.15)
    assert list(frame_of([]).columns) == ["trialJobId", "value"]
    assert frame_of(RESULTS, ("loss",))["value"].tolist() == [1, 0.5]


def test_a_result_without_one_of_the_metrics_has_an_empty_value_in_a_data_frame():
    pytest.importorskip("pandas")
    values = frame_of([*RESULTS, TrialResult({"lr": 0.3}, {"loss": 0.2}, "y")], ("default", "loss"))["value"]
    assert values.isna().tolist() == [False, False, True]
    assert values.min() == 0.5
    other = frame_of([TrialResult({"lr": 0.3}, {"loss": 0.2}, "y")])
    assert list(other.columns) == ["trialJobId", "lr", "value", "value/loss"]


def test_the_error_contains_a_remedy_if_a_data_frame_is_requested_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        PandasMissing, match=r"run `pip install pandas`, or use list_trial_jobs\(\) or export_data\(\)$"
    ):
        frame_of(RESULTS)


def test_a_metric_value_is_decoded_from_json():
    document = {
        "trialJobId": "a",
        "parameterId": "0",
        "type": "FINAL",
        "sequence": 0,
        "data": '"it\'s \\"fine\\""',
    }
    assert TrialMetricData.of(document).data == 'it\'s "fine"'


@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [
        ("SYS_CANCELED", "time limit", "time limit"),
        ("USER_CANCELED", "stopped by user", "stopped by user"),
        ("EARLY_STOPPED", "early stopped", "early stopped"),
        ("FAILED", "non-zero exit", "exit code 3"),
        ("SUCCEEDED", "succeeded", ""),
        ("RUNNING", None, ""),
    ],
)
def test_the_message_of_a_trial_without_success_is_the_reason_of_its_end(status, reason, expected):
    document = {
        "trialJobId": "aB3dE",
        "status": status,
        "state": status,
        "hyperParameters": [],
        "logPath": "/log",
    }
    document |= {
        "sequenceId": 0,
        "value": None,
        "parameters": {},
        "message": "",
        "reason": reason,
        "exitCode": 3,
    }
    assert TrialJob.of(document).message == expected
    assert TrialJob.of(document | {"message": "more"}).message == "more"


def test_the_log_tail_prints_the_complete_lines_that_were_appended_after_its_start(tmp_path, capsys):
    log = tmp_path / "manager.log"
    log.write_text("before\n")
    tail = progress_module.LogTail(log)
    with log.open("a") as file:
        file.write("one\ntwo\nhalf")
    tail.close()
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_trial_is_refused_with_a_remedy_if_it_is_enqueued_before_the_experiment_starts():
    with pytest.raises(
        NotStarted, match=r"call start\(\) first, or write config.initial_trials = \[\{'x': 0.5\}\]$"
    ):
        Experiment("local").enqueue_trial({"x": 0.5})
    with pytest.raises(UserError, match="cannot start a trial with 'x': it is not a mapping"):
        Experiment("local").enqueue_trial("x")
