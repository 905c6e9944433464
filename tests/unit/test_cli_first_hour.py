"""The output of nnictl in typical situations of new users: a failed experiment, a command name from another tool, or a result
that is a dict.
"""

import contextlib
import csv
import io
import json
import shutil
import subprocess
import sys

import pytest
from attempts import RegisteringStore
from stored_experiments import a_process_of

from nni_manager.client import experiments, manager_stop
from nni_manager.config.reader import read_experiment_file
from nni_manager.domain import message_summary
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.profiles import metadata_view, stored_metadata_view
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry
from nni_manager.store.rows import experiment_row, trial_row
from trial_keeper.wire.reasons import ExitReason

CONFIG = """\
experimentName: digits
trialConcurrency: 2
searchSpace: {lr: {_type: uniform, _value: [0, 1]}}
trialCommand: "true"
trainingService: {platform: local}
"""
TRACEBACK = "the tuner mine failed. Fix it. The error:\nTraceback (most recent call last):\nKeyError: 'lr'\n"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def stored(tmp_path):
    """Creates a stored experiment in this state, with one succeeded trial for each result."""

    def make(*results, more="", state=ExperimentState.DONE, error="", experiment_id="abc11111"):
        (tmp_path / "config.yml").write_text(CONFIG + more)
        config = read_experiment_file(tmp_path / "config.yml")
        objectives = config.all_objectives
        folder = ExperimentFolder(tmp_path / "logs" / experiment_id)
        folder.make()
        store = RegisteringStore.create(
            folder.database, folder.collected_logs, experiment_id, config.to_json(), b"s", 0.0
        )
        Registry.of_user().add(folder)
        for number, result in enumerate(results):
            trial = Trial(
                f"t{number}", number, {"lr": number / 8}, {}, 1.0, f"t{number}", TrialState.SUCCEEDED
            )
            trial.run.final = json.dumps(result)
            outcome = objectives.outcome(trial.run.final)
            trial.run.value = outcome.values[0] if outcome else None
            store.commit([trial_row(trial)], 1.0)
        store.commit([experiment_row(state, error, 42.0, 60.0, True)], 60.0)
        store.close()
        return folder

    return make


@pytest.mark.parametrize(
    ("results", "out"), [((), "INFO: Experiment abc11111 has no trials\n"), ((0.5,), "no.\ttrial\t")]
)
def test_nnictl_trial_ls_names_the_error_that_ended_the_experiment(nnictl, stored, results, out):
    stored(*results, state=ExperimentState.ERROR, error=TRACEBACK)
    code, shown, err = nnictl("trial", "ls", "abc")
    assert (code, shown[: len(out)]) == (0, out)
    assert err == (
        "WARNING: experiment abc11111 has the status ERROR: the tuner mine failed. Fix it. (KeyError: 'lr'); "
        "`nnictl experiment status abc11111` shows the whole error\n"
    )


def test_nnictl_experiment_status_prints_every_line_of_a_traceback_once(nnictl, stored, monkeypatch):
    stored(state=ExperimentState.ERROR, error=TRACEBACK)
    code, out, err = nnictl("experiment", "status", "abc")
    assert (code, json.loads(out)["errors"], err) == (0, [TRACEBACK], "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = nnictl("experiment", "status", "abc")
    assert (code, json.loads(out)["errors"]) == (0, ["the tuner mine failed. Fix it. (KeyError: 'lr')"])
    assert err == f"WARNING: {TRACEBACK}"


def test_a_long_error_is_shortened_to_its_first_and_last_line():
    assert message_summary.outline(TRACEBACK) == "the tuner mine failed. Fix it. (KeyError: 'lr')"
    assert message_summary.outline("disk full\n") == "disk full"
    summary = message_summary.message_summary("could not start", TRACEBACK)
    assert summary == "the tuner mine failed. Fix it. (KeyError: 'lr')"
    assert message_summary.message_summary("mount", "cannot mount x\nsome output") == "cannot mount x"


def test_nnictl_experiment_list_warns_of_experiments_whose_manager_has_died(nnictl, stored):
    stored(experiment_id="over1111")
    assert nnictl("experiment", "list")[2] == ""
    folder = stored(state=ExperimentState.RUNNING, experiment_id="dead1111")
    code, out, err = nnictl("experiment", "list")
    assert (code, out[:35]) == (0, "INFO: There is no running experimen")
    resume = "`nnictl resume {0}` resumes the experiment"
    assert err == (
        f"WARNING: the manager of dead1111 died, and none of its trials runs; {resume.format('dead1111')}\n"
    )
    trial = a_process_of(folder)
    err = nnictl("experiment", "list")[2]
    trial.kill()
    trial.wait()
    stop = "`nnictl stop dead1111` ends its trials"
    assert err == (
        f"WARNING: the manager of dead1111 died, and trials may still run; {resume.format('dead1111')}, {stop}\n"
    )
    stored(state=ExperimentState.RUNNING, experiment_id="dead2222")
    assert nnictl("experiment", "list")[2] == (
        f"WARNING: the managers of dead1111, dead2222 died, and no trial runs; {resume.format('ID')}\n"
    )


@pytest.fixture
def starting(stored):
    """Return a function that stores an experiment in this state, and starts a manager that has not written its process record."""
    with contextlib.ExitStack() as stack:

        def start(state=ExperimentState.RUNNING):
            folder = stored(state=state, experiment_id="starts11")
            options = (
                "-m",
                "nni_manager",
                "--folder",
                str(folder.path),
                "--host",
                "127.0.0.1",
                "--port",
                "8080",
            )
            command = [sys.executable, "-c", "print(flush=True); input()", *options]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            process.stdout.readline()
            return folder, process

        yield start


def test_a_starting_manager_is_not_reported_as_dead(nnictl, starting):
    starting()
    note = "INFO: the manager of experiment starts11 is starting\n"
    assert nnictl("experiment", "list")[2] == note
    _, out, err = nnictl("experiment", "list", "--all")
    assert (out.splitlines()[1].split("\t")[:2], err) == (["starts11", "STARTING"], "")
    assert nnictl("experiment", "status", "starts11")[::2] == (0, note)


@pytest.mark.parametrize("all_of_them", [[], ["--all"]])
def test_nnictl_experiment_list_scans_the_processes_once_for_all_dead_managers(
    nnictl, stored, monkeypatch, all_of_them
):
    for number in range(3):
        stored(state=ExperimentState.RUNNING, experiment_id=f"abc{number}")
    scans = []
    monkeypatch.setattr(experiments, "_managers_by_folder", lambda: scans.append(1) or {})
    assert "died" in nnictl("experiment", "list", *all_of_them)[2]
    assert len(scans) == 1


@pytest.mark.parametrize("which", ["starts11", "starts*", "--all"])
@pytest.mark.parametrize("state", [ExperimentState.RUNNING, ExperimentState.STOPPED], ids=["new", "resumed"])
def test_nnictl_stop_waits_for_a_starting_manager_and_succeeds_if_the_start_fails(
    nnictl, starting, monkeypatch, which, state
):
    folder, process = starting(state)
    is_locked = []

    def fail_to_start(_):
        # nnictl holds no lock while it waits, so this test can take the lock, as a manager that starts would do.
        with folder.owned(is_brief=True):
            is_locked.append(False)
        process.kill()
        process.wait()

    monkeypatch.setattr(manager_stop.time, "sleep", fail_to_start)
    code, out, _ = nnictl("stop", which)
    assert (code, is_locked) == (0, [False])
    assert "Nothing of it runs" in out


def test_nnictl_top_recommends_a_resume_if_the_manager_has_died(nnictl, stored):
    stored(state=ExperimentState.RUNNING)
    assert nnictl("top", "abc")[2] == (
        "ERROR: cannot watch experiment abc11111: it is not running; `nnictl trial ls abc11111` shows its trials, "
        "`nnictl resume abc11111` resumes it\n"
    )


def test_an_unknown_experiment_id_is_reported_even_if_another_experiment_has_a_damaged_database(
    nnictl, stored
):
    stored(experiment_id="good1111")
    stored(experiment_id="lost1111").database.write_bytes(b"")
    for command in (("trial", "ls"), ("stop",), ("experiment", "delete", "--yes")):
        code, _, err = nnictl(*command, "zzz12345")
        assert code == 1
        assert "cannot find experiment 'zzz12345'" in err
        assert "lost1111/db" not in err


def test_an_experiment_is_listed_and_can_be_deleted_if_its_database_folder_was_removed(nnictl, stored):
    folder = stored()
    shutil.rmtree(folder.database.parent)
    assert "abc11111\tUNREADABLE" in nnictl("experiment", "list", "--all")[1]
    code, _, err = nnictl("trial", "ls", "abc")
    assert code == 1
    assert "experiment.sqlite: it was removed; restore it from a copy, or remove the experiment with" in err
    assert nnictl("experiment", "delete", "abc11111", "--yes", "--force")[0] == 0
    assert not folder.path.exists()


def test_nnictl_trial_ls_shows_the_reason_of_each_stopped_trial(nnictl, stored):
    folder = stored()
    store = RegisteringStore(folder.database, folder.collected_logs)
    for number, (state, reason) in enumerate(
        [
            (TrialState.USER_CANCELED, ExitReason.STOPPED_BY_USER),
            (TrialState.SYS_CANCELED, ExitReason.TIME_LIMIT),
        ]
    ):
        trial = Trial(f"t{number}", number, {"lr": 0.5}, {}, 1.0, f"t{number}", state)
        trial.run.reason = reason
        store.commit([trial_row(trial)], 1.0)
    store.close()
    out = nnictl("trial", "ls", "abc")[1]
    assert "lr=0.5  (stopped by user)" in out
    assert "lr=0.5  (time limit)" in out


@pytest.mark.parametrize(
    ("result", "more"),
    [({"acc": 0.9}, ""), ({"default": 9}, "constraints: [{metric: default, at_most: 1}]\n")],
    ids=["without a number", "violates a constraint"],
)
def test_the_list_of_experiments_marks_an_experiment_without_a_usable_result(nnictl, stored, result, more):
    stored(result, more=more)
    listed = nnictl("experiment", "list", "--all")[1].splitlines()[1]
    assert listed.startswith("abc11111\tDONE, no result counts\t1\t")


ONE = "objectives: [{metric: loss, mode: minimize}]\n"
TWO = "objectives: [{metric: acc, mode: maximize}, {metric: ms, mode: minimize}]\n"


@pytest.mark.parametrize("options", [(), ("--all",)])
@pytest.mark.parametrize(
    ("more", "result", "value"), [(ONE, {"loss": 0.5, "x": 1}, "0.5"), (TWO, {"acc": 0.9, "ms": 12}, "0.9")]
)
def test_the_value_column_of_a_csv_export_contains_the_first_objective(
    nnictl, stored, options, more, result, value
):
    stored(result, more=more)
    code, out, _ = nnictl("experiment", "export", "abc", "--type", "csv", *options)
    (row,) = csv.DictReader(io.StringIO(out))
    assert (code, row["value"]) == (0, value)
    assert {name: row[f"value/{name}"] for name in result} == {
        name: str(number) for name, number in result.items()
    }


LIMITED = "constraints: [{metric: ms, at_most: 15}]\n"
RESULTS = [{"acc": acc, "ms": ms} for acc, ms in ((0.9, 20), (0.8, 10), (0.7, 12), (0.95, 30))]


@pytest.mark.parametrize(
    ("more", "best"),
    [
        (TWO, "front of 3"),
        (TWO + LIMITED, "front of 1"),
        ("objectives: [{metric: acc, mode: maximize}]\n" + LIMITED, "0.8"),
        ("objectives: [{metric: acc, mode: maximize}]\n", "0.95"),
    ],
)
def test_the_list_of_experiments_shows_the_best_result_without_loading_all_trials(
    nnictl, stored, monkeypatch, more, best
):
    folder = stored(*RESULTS, None, more=more)
    monkeypatch.setattr(StoreReader, "trials", lambda reader: pytest.fail("all trials are read"))
    code, out, _ = nnictl("experiment", "list", "--all")
    assert (code, out.splitlines()[1].split("\t")[:4]) == (0, ["abc11111", "DONE", "5", best])
    monkeypatch.undo()
    assert metadata_view(ExperimentSnapshot.stored(folder)) == stored_metadata_view(folder)


def rows_of(out):
    return [line.split("\t") for line in out.splitlines()]


def test_nnictl_trial_ls_has_a_column_for_every_objective_and_sorts_by_any_metric(nnictl, stored):
    stored(*({**each, "mb": each["ms"] % 7} for each in RESULTS), more=TWO)
    head, first, *_ = rows_of(nnictl("trial", "ls", "abc")[1])
    assert (head[:6], first[3:5]) == (["no.", "trial", "state", "acc", "ms", "time"], ["0.9", "20"])
    shown = rows_of(nnictl("trial", "ls", "abc", "--sort", "mb", "--columns", "no.,mb")[1])
    assert shown == [["no.", "mb"], ["3", "2"], ["1", "3"], ["2", "5"], ["0", "6"]]
    listed = json.loads(nnictl("trial", "ls", "abc", "--sort", "mb", "--json")[1])
    assert ([each["sequenceId"] for each in listed], "metrics" in listed[0]) == ([3, 1, 2, 0], False)


def test_nnictl_trial_ls_loads_no_final_results_for_the_default_columns(nnictl, stored, monkeypatch):
    stored(0.5)
    monkeypatch.setattr(StoreReader, "finals", lambda reader: pytest.fail("results are read"))
    assert rows_of(nnictl("trial", "ls", "abc")[1])[1][3] == "0.5"


@pytest.mark.parametrize("command", ["trial show", "trial kill", "trial tag"])
def test_the_error_suggests_the_trial_option_if_a_trial_id_is_given_in_place_of_an_experiment_id(
    nnictl, command
):
    code, _, err = nnictl(*command.split(), "aB3dE")
    assert (code, err.partition("; ")[2].partition("? ")[0]) == (
        1,
        f"did you mean `nnictl {command} -T aB3dE`",
    )


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("export", "`nnictl experiment export`"),
        ("status", "`nnictl experiment status`"),
        ("show", "`nnictl experiment show` or `nnictl trial show`"),
        ("run config.yml", "`nnictl create`"),
        ("ls", "`nnictl experiment list`"),
        ("logs", "`nnictl log trial`"),
        ("trial list", "`nnictl trial ls`"),
        ("trial log", "`nnictl log trial`"),
        ("experiment stop", "`nnictl stop`"),
        ("experiment best", "`nnictl trial ls --best 5`"),
        ("submit", "`nnictl openpai submit`"),
        ("creat", "create"),
    ],
)
def test_the_error_for_an_unknown_command_suggests_the_intended_command(nnictl, line, meant):
    code, _, err = nnictl(*line.split())
    assert (code, err.partition("; ")[2].partition("? ")[0]) == (1, f"did you mean {meant}")


@pytest.mark.parametrize(
    ("words", "page"), [("conda", "recipes"), ("Pareto", "objectives"), ("pruning", "assessors")]
)
def test_nnictl_help_for_an_unknown_topic_lists_the_pages_that_contain_the_word(nnictl, words, page):
    code, _, err = nnictl("help", words)
    assert (code, f"`nnictl help {page}`" in err.partition("did you mean ")[2]) == (1, True)


def test_nnictl_help_does_not_suggest_a_page_if_no_page_contains_the_word(nnictl):
    assert "did you mean" not in nnictl("help", "zzqqxxyy")[2]
