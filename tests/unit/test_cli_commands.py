"""nnictl's command line: help, one line for each error, and the selection of an experiment."""

import contextlib
import gc
import json
import os
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import click
import psutil
import pytest
from attempts import RegisteringStore, attempt_id
from deadlines import DEADLINE_S
from strangers import give_away

from nni_manager.cli import main, options
from nni_manager.client import manager_process, manager_stop, output
from nni_manager.client.experiments import register, resolve
from nni_manager.client.manager_client import ConnectionClosed, ManagerClient, ManagerUnresponsive
from nni_manager.client.remains import remains_of
from nni_manager.config.reader import read_experiment_file
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.ingest import AttemptIngest, StreamWrite
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.engine.keeper_ingest import quota_message
from nni_manager.errors import NniManagerError, RetryableError
from nni_manager.store import reader as reader_module
from nni_manager.store.folders import ExperimentFolder, ManagerProcess, Registry
from nni_manager.store.rows import attempt_row, experiment_row, trial_row
from nni_manager.store.writer import Store, log_path
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from nni_sdk.records import Mark
from trial_keeper import __version__
from trial_keeper.wire.messages import AttemptKey, Stream

CONFIG = """\
authorName: ada
experimentName: digits
trialConcurrency: 2
trainingServicePlatform: local
searchSpacePath: search_space.json
useAnnotation: false
tuner: {builtinTunerName: TPE, classArgs: {optimize_mode: maximize}}
trial: {command: "true", codeDir: .}
"""


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    # Captured output has no width; the terminal of the test run must not set one.
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def an_experiment(tmp_path):
    """Creates a stored experiment; one with a port has an owner until the test ends."""
    (tmp_path / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (tmp_path / "config.yml").write_text(CONFIG)
    config = read_experiment_file(tmp_path / "config.yml").to_json()
    with contextlib.ExitStack() as stack:

        def make(experiment_id, port=None):
            folder = ExperimentFolder(tmp_path / "logs" / experiment_id)
            folder.make()
            Store.create(folder.database, folder.collected_logs, experiment_id, config, b"s", 0.0).close()
            Registry.of_user().add(folder)
            if port is not None:
                stack.enter_context(folder.owned())
                folder.write_process(ManagerProcess(os.getpid(), "127.0.0.1", port, __version__))
            return folder

        yield make


def all_commands(group=main.cli, path=()):
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from all_commands(command, (*path, name))


@pytest.mark.parametrize("command", [(), *all_commands()], ids=" ".join)
def test_help_of_every_command_has_an_example_with_its_name(nnictl, command):
    code, out, err = nnictl(*command, "--help")
    assert (code, err) == (0, "")
    assert "Example:\n" in out
    assert " ".join(["nnictl", *command]) in out.split("Example:\n")[1]


LISTS = [path for path in all_commands() if path[-1] in ("list", "ls", "jobs", "url")]


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_every_listing_command_has_a_json_option(nnictl, command):
    assert "--json" in nnictl(*command, "--help")[1]


def test_the_version_of_nnictl_is_that_of_the_keeper(nnictl):
    assert nnictl("--version") == (0, f"nnictl {__version__}\n", "")
    assert nnictl("-v") == (0, f"nnictl {__version__}\n", "")


def test_a_group_without_a_command_shows_its_help_as_an_error(nnictl):
    code, out, err = nnictl("trial")
    assert (code, out) == (1, "")
    assert "Commands:" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["creat"], "cannot find the command nnictl creat; did you mean create? `nnictl --help` shows"),
        (["trial", "list"], "cannot find the command nnictl trial list; "),
        (["create", "--confg", "x"], "cannot use option --confg of nnictl create; did you mean --config? "),
        (["create"], "cannot run nnictl create without an experiment file; write `nnictl create FILE`"),
        (["create", "-c", "x", "-p", "http"], "cannot use --port http: it is neither a number from 1 to 65534 nor auto; "),
        (["create", "-c", "x", "-p", "65535"], "cannot use --port 65535: it is neither a number from 1 to 65534"),
        (["trial", "ls", "a", "b"], "cannot read this command line: Got unexpected extra argument (b); "),
        (["trial", "ls", "--head", "1", "--tail", "1"], "cannot use --head and --tail together; leave one out"),
        (["trial", "ls", "--best", "1", "--tail", "1"], "cannot use --tail and --best together; leave one out"),
        (["trial", "ls", "--best", "1", "--sort", "time"], "cannot use --best and --sort together; leave one out"),
        (["trial", "ls", "--json", "--columns", "value"], "cannot use --json and --columns together; leave one out"),
        (["trial", "ls", "--nni-json", "--state", "failed"], "cannot use --nni-json and --state together; leave one out"),
        (["trial", "ls", "--descending"], "cannot use --descending without --sort; add --sort COLUMN"),
        (["stop", "abc", "--all"], "cannot use more than one of ID, --all and --port; "),
        (["stop", "--port", "8080"], "cannot find an experiment on port 8080; "),
        (["stop", "x*"], "cannot find a running experiment x*; "),
        (["create", "-c", "none.yml"], "cannot read none.yml: there is no such file; check the path"),
        (["create", "-c", "no/none.yml"], "cannot read no/none.yml: there is no such file; check the path"),
        (["stop"], "cannot find an experiment; start one with "),
        (["experiment", "delete"], "cannot delete: exactly one of ID and --all is needed; "),
        (["experiment", "delete", "x", "--all"], "cannot delete: exactly one of ID and --all is needed; "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_command_line_error_is_one_line_with_a_remedy(nnictl, arguments, expected):
    code, out, err = nnictl(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"ERROR: {expected}")
    assert err.count("\n") == 1


def test_all_errors_of_an_experiment_file_are_printed_one_per_line(nnictl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (tmp_path / "config.yml").write_text(
        CONFIG.replace("Concurrency: 2", "Concurrency: two") + "maxTrials: 3\n"
    )
    code, out, err = nnictl("create", "-c", "config.yml")
    assert (code, out) == (1, "")
    assert [line.split(": cannot")[0] for line in err.splitlines()] == [
        "ERROR: config.yml:3",
        "ERROR: config.yml:9",
    ]
    assert not (tmp_path / "nni-experiments").exists()


def test_an_experiment_is_selected_by_id_by_prefix_or_as_the_only_running_one(an_experiment):
    an_experiment("abc11111")
    an_experiment("abd22222", port=9000)
    an_experiment("abc11111x")
    assert resolve("abc11111").experiment_id == "abc11111"
    assert resolve("abd").experiment_id == "abd22222"
    assert resolve(None).experiment_id == "abd22222"
    assert resolve(None).manager.port == 9000


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (None, "cannot choose among 2 running experiments; name one of abc11111 (port 9000), abd22222 (port 9002)"),
        ("ab", "cannot use experiment id 'ab': several ids start with it: abc11111 (port 9000), abd"),
        ("abc11112", "cannot find experiment 'abc11112'; did you mean abc11111? "),
        ("", "cannot find experiment ''; "),
    ],
)  # fmt: skip
def test_an_ambiguous_or_unknown_experiment_id_is_an_error(an_experiment, prefix, expected):
    an_experiment("abc11111", port=9000)
    an_experiment("abd22222", port=9002)
    with pytest.raises(NniManagerError) as caught:
        resolve(prefix)
    assert str(caught.value).startswith(expected)


def test_an_experiment_whose_manager_died_is_listed_with_the_command_to_resume_it(nnictl, an_experiment):
    an_experiment("abc11111")
    code, out, err = nnictl("experiment", "list", "--all")
    assert code == 0
    assert "NOT RUNNING (was INITIALIZED)" in out
    assert err == ("WARNING: the manager of experiment abc11111 died; `nnictl resume abc11111` resumes it\n")
    assert nnictl("experiment", "list")[1].startswith("INFO: There is no running experiment; ")
    (line,) = json.loads(nnictl("experiment", "list", "--all", "--json")[1])
    assert (line["id"], line["status"], line["managerIsRunning"]) == ("abc11111", "INITIALIZED", False)


def test_a_corrupt_database_does_not_hide_other_experiments(nnictl, an_experiment):
    an_experiment("abc11111").database.write_bytes(b"corrupt" * 1000)
    an_experiment("abd22222")
    code, out, err = nnictl("experiment", "list", "--all")
    assert code == 0
    assert "abd22222" in out
    assert "UNREADABLE" in out
    assert "WARNING: experiment abc11111: cannot " in err


@pytest.mark.parametrize(
    "corrupt", [b"", b"[]", b'{"path": "x"}', b'{"folder": 1}', b"\xff", Path.mkdir, os.mkfifo]
)
def test_a_corrupt_registry_entry_does_not_hide_other_experiments(nnictl, an_experiment, corrupt):
    an_experiment("abc11111")
    entry = Registry.of_user().folder / "abc11111.json"
    entry.unlink()
    is_file = isinstance(corrupt, bytes)
    entry.write_bytes(corrupt) if is_file else corrupt(entry)
    an_experiment("abd22222")
    code, out, err = nnictl("experiment", "list", "--all")
    assert (code, [line.split()[:2] for line in out.splitlines()[1:]]) == (
        0,
        [["abc11111", "UNREADABLE"], ["abd22222", "NOT"]],
    )
    why = "it does not name the experiment's folder" if is_file else "it is a "
    problem = f"cannot {'read' if is_file else 'use'} {entry}: {why}"
    assert f"WARNING: experiment abc11111: {problem}" in err
    code, _, err = nnictl("trial", "ls", "abc11111")
    assert (code, err.startswith(f"ERROR: {problem}")) == (1, True)
    assert nnictl("trial", "ls", "abd22222")[0] == 0


def test_an_experiment_is_added_to_the_list_by_its_folder(nnictl, an_experiment, tmp_path, monkeypatch):
    folder = an_experiment("abc11111")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert nnictl("trial", "ls", "abc11111")[0] == 1
    (tmp_path / "link").symlink_to(folder.path.parent)
    for experiment_id, path in (
        ("abc11111", folder.path),
        (None, folder.path),
        (None, tmp_path / "link" / "abc11111"),
    ):
        assert register(path, experiment_id) == "abc11111"
    assert nnictl("trial", "ls", "abc11111")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["nothing"],
            "cannot use nothing as an experiment: it has no folder db; name the experiment's own folder",
        ),
        (
            ["abc11111", "abd22222"],
            "cannot find experiment 'abd22222' in abc11111: it has experiment abc11111; use ",
        ),
        (
            ["copy/abc11111"],
            "cannot add experiment abc11111 of copy/abc11111: this user has another one with that id",
        ),
    ],
)
@pytest.mark.parametrize("command", ["resume", "view"])
def test_a_folder_that_is_not_the_experiments_is_refused(
    nnictl, an_experiment, monkeypatch, command, arguments, problem
):
    folder = an_experiment("abc11111").path
    monkeypatch.chdir(folder.parent)
    shutil.copytree(folder, "copy/abc11111")
    code, _, err = nnictl(command, "--experiment_dir", *arguments)
    assert (code, err.startswith(f"ERROR: {problem}")) == (1, True), err
    assert [each.path for each in Registry.of_user().all()] == [folder]


@pytest.mark.parametrize(
    "command",
    ["trial ls", "experiment show", "experiment export", "experiment status", "log stderr --path"],
)
def test_without_an_id_the_latest_experiment_is_used_and_named_on_stderr(nnictl, an_experiment, command):
    for number, name in enumerate(("abd22222", "abc11111", "abe33333")):
        finished(an_experiment(name), 0.5)
        entry = Registry.of_user().folder / f"{name}.json"
        os.utime(entry, (number % 2, number % 2))
    an_experiment("abf44444").database.unlink()
    os.utime(Registry.of_user().folder / "abf44444.json", (9, 9))
    code, out, err = nnictl(*command.split())
    assert err.startswith("INFO: no experiment is running; this is the latest, abc11111\n")
    assert code == 0
    assert nnictl(*command.split(), "abc11111")[1] == out


def test_without_an_id_an_experiment_that_runs_precedes_the_latest(an_experiment, capsys):
    an_experiment("abc11111", port=9000)
    an_experiment("abd22222")
    assert options.experiment(None).experiment_id == "abc11111"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("corrupt", [b"", b"[]", b"{}", b'{"pid": 1'])
def test_a_corrupt_manager_process_file_does_not_hide_other_experiments(nnictl, an_experiment, corrupt):
    folder = an_experiment("abc11111", port=9000)
    (folder.path / "manager-process.json").write_bytes(corrupt)
    an_experiment("abd22222")
    lines = json.loads(nnictl("experiment", "list", "--all", "--json")[1])
    assert [(line["id"], line["status"]) for line in lines] == [
        ("abc11111", "UNREADABLE"),
        ("abd22222", "INITIALIZED"),
    ]
    assert lines[0]["problem"].startswith(f"cannot read {folder.path}/manager-process.json: ")
    assert nnictl("trial", "ls", "abd22222")[0] == 0


def test_checking_for_a_running_manager_opens_its_lock_read_only(nnictl, an_experiment, monkeypatch):
    folder = an_experiment("abc11111")
    with folder.owned():
        pass
    opened = []
    really_open = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *rest: (opened.append((path, flags)), really_open(path, flags, *rest))[1],
    )
    assert folder.running_process() is None
    assert opened == [(folder.path / "owner.lock", os.O_RDONLY | os.O_CLOEXEC)]


def test_a_lock_that_cannot_be_opened_does_not_hide_other_experiments(nnictl, an_experiment):
    folder = an_experiment("abc11111")
    lock = folder.path / "owner.lock"
    lock.symlink_to(lock)  # a loop that nobody can open, not even root
    an_experiment("abd22222")
    code, out, err = nnictl("experiment", "list", "--all")
    assert (code, "UNREADABLE" in out, "abd22222" in out) == (0, True, True)
    assert "WARNING: experiment abc11111: cannot determine whether experiment abc11111 runs: " in err


def test_removed_experiment_folders_are_dropped_from_the_registry_with_one_process_scan(
    nnictl, an_experiment, monkeypatch
):
    for name in ("abc11111", "abd22222"):
        shutil.rmtree(an_experiment(name).path)
    scans = []
    really_scan = psutil.process_iter
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: (scans.append(attrs), really_scan(attrs))[1])
    assert nnictl("experiment", "list", "--all")[1] == "INFO: There is no experiment\n"
    assert len(scans) == 1


def test_stopping_an_experiment_without_a_manager_and_jobs_says_that_nothing_runs(nnictl, an_experiment):
    an_experiment("abc11111")
    code, out, err = nnictl("stop", "abc")
    assert (code, err) == (0, "")
    assert "INFO: Nothing of it runs; `nnictl resume abc11111` records what its trials reported" in out
    assert nnictl("stop", "--all") == (0, "INFO: No experiment is running.\n", "")


@pytest.mark.parametrize("word", ["show", "status"])
def test_commands_that_always_print_json_accept_the_json_option(nnictl, an_experiment, word):
    an_experiment("abc11111")
    code, out, err = nnictl("experiment", word, "abc11111")
    assert (code, json.loads(out) != {}) == (1 if word == "status" else 0, True)  # the manager has died
    assert nnictl("experiment", word, "abc11111", "--json") == (code, out, err)


def test_stored_experiments_are_shown_without_a_manager(nnictl, an_experiment):
    folder = an_experiment("abc11111")
    assert json.loads(nnictl("experiment", "show", "abc11111")[1])["params"]["experimentName"] == "digits"
    code, out, err = nnictl("experiment", "status", "abc11111")
    assert (code, json.loads(out)) == (
        1,
        {"status": "INITIALIZED", "errors": [], "managerIsRunning": False, "leftovers": []},
    )
    assert err == (
        "WARNING: the manager of experiment abc11111 is not running, and this is its last status; "
        "`nnictl resume abc11111` resumes it\n"
    )
    assert nnictl("trial", "ls", "abc11111") == (0, "INFO: Experiment abc11111 has no trials yet\n", err)
    assert nnictl("trial", "ls", "abc11111", "--json")[1] == "[]\n"
    assert nnictl("log", "stderr", "abc", "--path")[1] == f"{folder.manager_stderr}\n"
    folder.manager_stderr.write_text("one\ntwo\nthree\n")
    assert nnictl("log", "stderr", "abc", "--tail", "2") == (0, "two\nthree\n", "")
    assert nnictl("log", "stderr", "abc", "--head", "1") == (0, "one\n", "")


def test_listing_experiments_reads_no_trial_and_a_trial_log_reads_one(nnictl, an_experiment, monkeypatch):
    folder = an_experiment("abc11111")
    store = RegisteringStore(folder.database, folder.collected_logs)
    trials = [Trial(f"t{n}", n, {}, {}, 1.0, f"t{n}") for n in range(3)]
    store.commit([trial_row(trial) for trial in trials], 1.0)
    store.close()
    # With ten thousand trials, parsing their rows takes most of the time.
    made = []
    trial_of = reader_module.trial_of
    monkeypatch.setattr(
        reader_module,
        "trial_of",
        lambda row, *more, **fields: (made.append(row["trial_id"]), trial_of(row, *more, **fields))[1],
    )
    assert nnictl("experiment", "list", "--all")[0] == 0
    assert made == []
    code, _, err = nnictl("log", "trial", "abc11111", "-T", "t1")
    assert (code, made) == (1, ["t1"])
    assert err.startswith(
        "ERROR: cannot show stdout and stderr of trial t1: it is WAITING and has written nothing; "
    )
    code, _, err = nnictl("log", "trial", "abc11111", "-T", "t9")
    assert err.startswith("ERROR: cannot find trial 't9' in experiment abc11111; `nnictl trial ls abc11111` ")
    assert [line.split(":")[0] for line in nnictl("log", "trial", "abc11111")[1].splitlines()] == [
        "trial t0",
        "trial t1",
        "trial t2",
    ]


def test_a_truncated_log_causes_a_warning_in_the_trial_list_and_beside_the_log(nnictl, an_experiment):
    folder = an_experiment("abc11111")
    cut = quota_message(Stream.STDOUT, folder.path / "stdout")
    store = RegisteringStore(folder.database, folder.collected_logs)
    trial = Trial("t0", 0, {}, {}, 1.0, "t0", warning=f"{cut}\nanother line")
    key = AttemptKey("t0", attempt_id(0), "main-0")
    store.commit([trial_row(trial), *AttemptIngest(key).take(Stream.STDOUT, 0, b"hello\n")], 1.0)
    store.close()
    assert f"{1 << 30} bytes (1 GiB)" in cut
    code, _, err = nnictl("trial", "ls", "abc11111")
    of_manager, _, of_trial = err.partition("\n")
    assert "the manager of experiment abc11111 is not running" in of_manager
    assert (code, of_trial) == (0, f"WARNING: trial t0: {cut}\nWARNING: trial t0: another line\n")
    assert nnictl("log", "trial", "abc11111", "-T", "t0")[2] == of_trial


@pytest.mark.parametrize("where", ["workspace", "collected"])
def test_a_log_that_a_trial_replaced_with_a_link_is_not_followed(nnictl, an_experiment, tmp_path, where):
    folder = an_experiment("abc11111")
    store = RegisteringStore(folder.database, folder.collected_logs)
    key = AttemptKey("t0", attempt_id(0), "main-0")
    store.commit([trial_row(Trial("t0", 0, {}, {}, 1.0, "t0")), attempt_row(key, 0)], 1.0)
    store.close()
    (tmp_path / "secret").write_text("root:secret")
    workspace = folder.workspace.attempt(key).stream(Stream.STDOUT)
    path = workspace if where == "workspace" else log_path(folder.collected_logs, key, Stream.STDOUT)
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "secret")
    code, out, err = nnictl("log", "trial", "abc11111", "-T", "t0")
    assert (code, out) == (1, "")
    assert err.startswith(f"ERROR: cannot show {path}: the trial has replaced this log")


def test_invalid_metrics_bytes_cause_a_warning_in_the_trial_list(nnictl, an_experiment):
    folder = an_experiment("abc11111")
    store = RegisteringStore(folder.database, folder.collected_logs)
    for name in ("t0", "t1"):
        store.commit([trial_row(Trial(name, int(name[1]), {}, {}, 1.0, name))], 1.0)
    receiver = AttemptIngest(AttemptKey("t1", attempt_id(0), "main"))
    store.commit(receiver.take(Stream.METRICS, 0, b"loss is 0.5\n" * 2), 1.0)
    store.close()
    code, out, err = nnictl("trial", "ls", "abc11111")
    assert (code, "t0" in out) == (0, True)
    assert "\nWARNING: trial t1: 24 bytes of its metrics are not valid records and are ignored; " in err
    assert err.count("\n") == 2


def test_a_manager_that_does_not_answer_is_an_error_without_a_traceback(nnictl, an_experiment, unused_port):
    an_experiment("abc11111", port=unused_port)
    code, _, err = nnictl("trial", "ls", "--json")
    assert code == 1
    assert err.startswith("ERROR: cannot reach the manager of experiment abc11111 at http://127.0.0.1:")
    assert "NOT ANSWERING" in nnictl("experiment", "list")[1]
    # Stored data can still be listed.
    assert nnictl("trial", "ls")[:2] == (0, "INFO: Experiment abc11111 has no trials yet\n")


def test_a_trial_is_selected_by_id_or_by_a_unique_prefix(nnictl, an_experiment):
    folder = an_experiment("abc11111")
    store = RegisteringStore(folder.database, folder.collected_logs)
    names = ["aB3dE", "aB3xx", "aB", "a_B"]
    store.commit([trial_row(Trial(name, n, {}, {}, 1.0, name)) for n, name in enumerate(names)], 1.0)
    store.close()
    assert [
        json.loads(nnictl("trial", "show", "abc", "-T", prefix)[1])["id"] for prefix in ("aB", "aB3x", "a_")
    ] == [
        "aB",
        "aB3xx",
        "a_B",
    ]
    code, out, err = nnictl("trial", "show", "abc", "-T", "aB3")
    assert (code, out) == (1, "")
    assert err.startswith(
        "ERROR: cannot use trial id 'aB3': several ids start with it, such as aB3dE, aB3xx; "
    )
    assert nnictl("log", "trial", "abc", "-T", "b")[2].startswith(
        "ERROR: cannot find trial 'b' in experiment "
    )


def finished(folder, *results):
    """Adds a trial for each result, and ends the experiment."""
    store = RegisteringStore(folder.database, folder.collected_logs)
    for number, result in enumerate(results):
        trial = Trial(
            f"t{number}",
            number,
            {"lr": number / 10},
            {},
            1.0,
            f"t{number}",
            TrialState.SUCCEEDED,
            run=TrialRun(attempt=0),
        )
        trial.run.final, trial.run.value, trial.run.reporter = str(result), result, "main"
        record = json.dumps({"parameter_id": number, "trial_job_id": trial.trial_id, "type": "PERIODICAL",
                             "sequence": 0, "value": "0.1"}).encode() + b"\n"  # fmt: skip
        receiver = AttemptIngest(AttemptKey(trial.trial_id, attempt_id(0), "main"))
        frame = b"ME%06d" % len(record) + record
        store.commit([trial_row(trial), *receiver.take(Stream.METRICS, 0, frame)], 1.0)
    store.commit([experiment_row(ExperimentState.DONE, "", 9.0, 10.0, True)], 1.0)
    store.close()


def test_all_trials_are_exported_with_number_state_and_duration(nnictl, an_experiment):
    folder = an_experiment("abc11111")
    with contextlib.closing(RegisteringStore(folder.database, folder.collected_logs)) as store:
        failed = Trial(
            "t5",
            5,
            {"lr": 0.9, "state": "on"},
            {},
            1.0,
            "t5",
            TrialState.FAILED,
            run=TrialRun(attempt=0, started_at_s=10.0, ended_at_s=12.5),
        )
        store.commit([trial_row(failed), trial_row(Trial("t6", 6, {"lr": 1.0}, {}, 1.0, ""))], 1.0)
    finished(folder, 0.5)
    code, out, err = nnictl("experiment", "export", "abc", "--type", "csv", "--all")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "number,trialJobId,lr,parameter/state,value,state,durationS,tags,note",
        "0,t0,0.0,,0.5,SUCCEEDED,,,",
        "5,t5,0.9,on,,FAILED,2.5,,",
        "6,t6,1.0,,,WAITING,,,",
    ]
    for option, refusal in {
        ("--all",): "cannot use --all with --type json; add --type csv",
        ("--all", "-t", "csv", "-i"): "cannot use --all and --intermediate together; leave one out",
    }.items():
        assert nnictl("experiment", "export", "abc", *option)[2] == f"ERROR: {refusal}\n"


def test_a_stored_trial_names_whether_it_has_a_checkpoint(nnictl, an_experiment):
    folder = an_experiment("abc11111")
    finished(folder, 0.5, 0.6)
    with contextlib.closing(RegisteringStore(folder.database, folder.collected_logs)) as store:
        key, mark = AttemptKey("t1", attempt_id(0), "main"), Mark(500, 20, "000001")
        store.commit([StreamWrite(key, Stream.METRICS, 500, 520, marks=(mark,))], 1.0)
        store.commit([trial_row(Trial("t2", 2, {}, {}, 1.0, "t2", continues="t1"))], 1.0)
    shown = [json.loads(nnictl("trial", "show", "abc", "-T", each)[1]) for each in ("t0", "t1", "t2")]
    assert [each["hasCheckpoint"] for each in shown] == [False, True, True]


def test_an_experiment_without_a_success_is_listed_as_such(nnictl, an_experiment):
    folder = an_experiment("abc11111")
    finished(an_experiment("abd22222"), 0.5)
    with contextlib.closing(RegisteringStore(folder.database, folder.collected_logs)) as store:
        for number in range(3):
            trial = Trial(
                f"t{number}", number, {}, {}, 1.0, f"t{number}", TrialState.FAILED, run=TrialRun(attempt=0)
            )
            store.commit([trial_row(trial)], 1.0)
        store.commit([experiment_row(ExperimentState.DONE, "", 9.0, 10.0, True)], 1.0)
    lines = nnictl("experiment", "list", "--all")[1].splitlines()
    assert "DONE, 0 of 3 succeeded" in lines[1]
    assert "succeeded" not in lines[2]
    first, second = json.loads(nnictl("experiment", "list", "--all", "--json")[1])
    assert (first["status"], first["trialCount"], first["succeededCount"]) == ("DONE", 3, 0)
    assert (second["trialCount"], second["succeededCount"]) == (1, 1)


def test_results_are_exported_to_a_file_or_to_stdout(nnictl, an_experiment, tmp_path):
    finished(an_experiment("abc11111"), 0.5, 0.7)
    record = {"trialJobId": "t1", "parameter": {"lr": 0.1}, "value": 0.7}
    assert json.loads(nnictl("experiment", "export", "abc")[1])[1] == record
    code, out, err = nnictl("experiment", "export", "abc", "-t", "csv", "-i", "-f", str(tmp_path / "r.csv"))
    assert (code, out, err) == (0, f"INFO: Wrote the results of 2 trials to {tmp_path}/r.csv\n", "")
    assert (tmp_path / "r.csv").read_text().splitlines() == [
        "trialJobId,lr,value,intermediate",
        "t0,0.0,0.5,[0.1]",
        "t1,0.1,0.7,[0.1]",
    ]


def test_scripts_of_nnis_users_get_nnis_output(nnictl, an_experiment, monkeypatch):
    finished(an_experiment("abc11111"), 0.5, 0.7)
    table = nnictl("experiment", "export", "abc", "-t", "csv", "--nni-columns", "-i")[1]
    assert table.splitlines() == [
        "lr,reward,trialJobId,intermediate",
        '0.0,0.5,t0,"[0.1,0.5]"',
        '0.1,0.7,t1,"[0.1,0.7]"',
    ]
    jobs = nnictl("trial", "ls", "abc", "--nni-json")[1]
    assert [job["trialJobId"] for job in json.loads(jobs)] == ["t0", "t1"]
    assert nnictl("trial", "ls", "abc")[1].startswith("no.\ttrial\tstate\t")
    own = nnictl("trial", "ls", "abc", "--json")[1]

    monkeypatch.setenv("NNICTL_COMPAT", "1")
    assert nnictl("trial", "ls", "abc")[1] == jobs
    assert nnictl("experiment", "export", "abc", "-t", "csv", "-i")[1] == table
    assert nnictl("trial", "ls", "abc", "--json")[1] == own
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "no.  trial" in nnictl("trial", "ls", "abc")[1]


def test_nnis_output_is_refused_where_it_has_no_meaning(nnictl, an_experiment):
    an_experiment("abc11111")
    for words in (["trial", "ls", "--json", "--nni-json"], ["experiment", "export", "--nni-columns"]):
        code, out, err = nnictl(*words, "abc")
        assert (code, out, err.startswith("ERROR: cannot use --")) == (1, "", True)


def test_an_experiment_without_results_exports_an_empty_list_with_a_warning(nnictl, an_experiment):
    an_experiment("abc11111")
    code, out, err = nnictl("experiment", "export", "abc")
    assert (code, out) == (0, "[]\n")
    assert err.startswith("WARNING: experiment abc11111 has no result yet; `nnictl trial ls abc11111` ")


def test_an_ended_experiment_is_deleted_with_its_folder_and_registry_entry(nnictl, an_experiment, tmp_path):
    folder = an_experiment("abc11111")
    finished(folder, 0.5)
    code, _, err = nnictl("experiment", "delete", "abc")
    assert (code, folder.path.exists()) == (1, True)  # no terminal to confirm on
    assert "there is no terminal; confirm with --yes" in err
    assert nnictl("experiment", "delete", "abc", "--yes") == (0, "INFO: Deleted experiment abc11111\n", "")
    assert (folder.path.exists(), Registry.of_user().all()) == (False, [])


def test_the_workspace_on_the_shared_storage_is_deleted_too(nnictl, an_experiment, tmp_path):
    folder = an_experiment("abc11111")
    finished(folder, 0.5)
    (tmp_path / "storage/abc11111/trials").mkdir(parents=True)
    (folder.path / "workspace").symlink_to(tmp_path / "storage/abc11111")
    assert nnictl("experiment", "delete", "abc", "--yes")[0] == 0
    assert list((tmp_path / "storage").iterdir()) == []


def test_a_running_experiment_is_not_deleted(nnictl, an_experiment):
    an_experiment("abc11111", port=9000)
    died = an_experiment("abd22222")
    done = an_experiment("abe33333")
    finished(done, 0.5)
    trial = a_process_of(died)
    code, _, err = nnictl("experiment", "delete", "abc", "--yes", "--force")
    assert (code, err) == (
        1,
        "ERROR: cannot delete experiment abc11111: it is running; run `nnictl stop abc11111` first\n",
    )
    code, _, err = nnictl("experiment", "delete", "abd", "--yes")
    assert code == 1
    assert err.startswith(
        "ERROR: cannot delete experiment abd22222: its manager exited in state INITIALIZED, "
        f"and 1 process ({trial.pid}) of its trials run; "
    )
    code, out, err = nnictl("experiment", "delete", "--all", "--yes")
    assert (code, out, err.count("WARNING: cannot delete")) == (0, "INFO: Deleted experiment abe33333\n", 2)
    assert nnictl("experiment", "delete", "abd", "--yes", "--force")[0] == 0
    assert not died.path.exists()
    trial.kill()
    trial.wait()


def a_process_of(folder):
    """A process that looks like one of a trial of this experiment."""
    attempt = folder.workspace.root / "trials/aB3dE/attempts/0/main-0"
    return subprocess.Popen(["sleep", "600"], env={"NNI_SYS_DIR": str(attempt), "PATH": os.environ["PATH"]})


def test_an_experiment_of_a_dead_manager_is_deleted_once_its_trial_processes_have_ended(
    nnictl, an_experiment
):
    died = an_experiment("abd22222")
    trial, others = a_process_of(died), a_process_of(an_experiment("abd33333"))
    assert nnictl("experiment", "delete", "abd22222", "--yes")[0] == 1
    trial.kill()
    trial.wait()
    assert nnictl("experiment", "delete", "abd22222", "--yes") == (
        0,
        "INFO: Deleted experiment abd22222\n",
        "",
    )
    assert not died.path.exists()
    others.kill()
    others.wait()


def test_an_experiment_whose_cluster_is_unreachable_is_not_deleted_while_it_may_have_jobs(
    nnictl, an_experiment, tmp_path, monkeypatch
):
    monkeypatch.setattr(ClientRetryPolicy, "delay_s", lambda self, failures, asked_s: 0.0)
    died = an_experiment("abd22222")
    pai = {"host": "http://127.0.0.1:1", "user": "ada", "token": "t", "password": None, "mount": "/mnt"}
    pai |= {"storage": str(tmp_path), "image": "i", "storage_name": "s", "virtual_cluster": None}
    pai |= {"gpu": 0, "cpu": 1, "memory_mb": 100, "job_file": None, "job_text": None}
    with contextlib.closing(sqlite3.connect(died.database)) as connection:
        ((config,),) = connection.execute("SELECT config FROM experiment")
        changed = json.dumps(json.loads(config) | {"training_service": "pai", "pai": pai})
        connection.execute("UPDATE experiment SET config = ?", (changed,))
        connection.commit()
        # No job was submitted, so the cluster is not queried.
        assert remains_of(died) == ""
        connection.execute("INSERT INTO job VALUES ('aB3dE', 1.0, NULL, 1)")
        connection.commit()
    code, _, err = nnictl("experiment", "delete", "abd", "--yes")
    assert code == 1
    assert (
        "exited in state INITIALIZED, and 1 job (aB3dE) may be left on its cluster; run `nnictl stop" in err
    )


@pytest.mark.parametrize("corrupt", ["database", "entry", "lock"])
def test_an_unreadable_experiment_is_deleted_with_force(nnictl, an_experiment, corrupt):
    folder = an_experiment("abc11111")
    if corrupt == "database":
        folder.database.write_bytes(b"corrupt" * 1000)
    elif corrupt == "entry":
        (Registry.of_user().folder / "abc11111.json").write_bytes(b"[]")
    else:
        (folder.path / "owner.lock").symlink_to(folder.path / "owner.lock")
    code, _, err = nnictl("experiment", "delete", "abc11111", "--yes")
    assert (code, err.startswith("ERROR: cannot ")) == (1, True)
    assert nnictl("experiment", "delete", "abc11111", "--yes", "--force")[0] == 0
    assert nnictl("experiment", "list", "--all")[1] == "INFO: There is no experiment\n"


def test_a_list_of_ten_thousand_trials_takes_less_than_three_seconds(nnictl, an_experiment):
    folder = an_experiment("abc11111")
    store = RegisteringStore(folder.database, folder.collected_logs)
    trials = [Trial(f"t{n:05}", n, {"lr": n / 10_000, "size": 32}, {}, 1.0, f"t{n}") for n in range(10_000)]
    store.commit([trial_row(trial) for trial in trials], 1.0)
    store.close()
    started_s = time.process_time()
    code, out, err = nnictl("trial", "ls", "abc")
    # 0.4 s on a free core; 9 s when rich drew the table.
    assert time.process_time() - started_s < 3
    assert (code, len(out.splitlines()), len(err.splitlines())) == (0, 10_001, 1)
    assert out.splitlines()[-1] == "9999\tt09999\tWAITING\t\t\tlr=0.9999 size=32"


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize(
    "trial_id", ["../experiment", "..", ".", "", "x?y", "x#y", "x/y", "a b", "%2e%2e", "-"]
)
@pytest.mark.parametrize("command", ["trial kill", "log trial", "trial codegen"])
def test_an_invalid_trial_id_is_not_found_and_no_request_is_sent(
    nnictl, an_experiment, command, trial_id, is_running
):
    asked = []
    with an_http_manager(dict, asked) as port:
        folder = an_experiment("abc11111", port=port if is_running else None)
        folder.annotated_code.mkdir()
        code, out, err = nnictl(*command.split(), "abc11111", "-T", trial_id)
    assert (code, out, asked) == (1, "", [])
    assert err == (
        f"ERROR: cannot find trial {trial_id!r} in experiment abc11111; `nnictl trial ls abc11111` lists them\n"
    )


@pytest.mark.parametrize(
    ("name", "path"), [("x?y", "x%3Fy"), ("../experiment", "..%2Fexperiment"), ("x#é/", "x%23%C3%A9%2F")]
)
def test_special_characters_in_a_name_are_escaped_in_request_paths(name, path):
    asked = []
    with an_http_manager(dict, asked) as port:
        client = ManagerClient("abc11111", ManagerProcess(1, "127.0.0.1", port, __version__))
        client.delete("/trial-jobs", name)
        client.get("/trials", name)
    assert asked == [f"DELETE /api/v1/nni/trial-jobs/{path}", f"GET /api/v1/nni/trials/{path}"]


def test_stop_reports_once_why_it_waits_and_again_when_that_changes(an_experiment, monkeypatch):
    summaries = [
        ("", 1),
        ("", 1),
        ("cannot write db: disk full\nmore", 1),
        ("cannot write db: disk full", 1),
        ("", 2),
    ]
    last = {"id": "abc11111", "problem": "", "counts": {"RUNNING": 1, "WAITING": 0}}
    answers = iter([last, *({**last, "problem": problem, "counts": {"RUNNING": running, "WAITING": 0}}
                            for problem, running in summaries)])  # fmt: skip
    lines = []
    with an_http_manager(lambda: next(answers, last)) as port, contextlib.ExitStack() as owner:
        folder = an_experiment("abc11111")
        owner.enter_context(folder.owned())
        with subprocess.Popen(["true"]) as over:
            pass
        folder.write_process(ManagerProcess(over.pid, "127.0.0.1", port, __version__))

        def report(line):
            lines.append(line)
            if len(lines) == 3:
                owner.close()  # the manager exits

        monkeypatch.setattr(manager_stop, "_REPORT_INTERVAL_S", 0.0)
        monkeypatch.setattr(output, "info", report)
        manager_stop.stop_experiment(resolve("abc11111"))
    assert lines == ["1 trial has not ended yet", "cannot write db: disk full", "2 trials have not ended yet"]


@pytest.mark.parametrize("looks_like", ["another program", "a view of it"])
def test_a_process_that_reuses_the_managers_pid_gets_no_signal_and_is_not_named(
    an_experiment, monkeypatch, looks_like
):
    monkeypatch.setattr(manager_stop, "_LEFT_TIMEOUT_S", 0.2)
    folder = an_experiment("abc11111")
    arguments = ["600"] if looks_like == "another program" else ["600", str(folder.path), "--view"]
    sleep = "import sys, time; time.sleep(int(sys.argv[1]))"
    with (
        folder.owned() as lease,
        subprocess.Popen([sys.executable, "-c", sleep, *arguments]) as bystander,
    ):
        try:
            folder.write_process(ManagerProcess(bystander.pid, "127.0.0.1", 9000, __version__))
            with pytest.raises(RetryableError) as caught:
                manager_stop.leave(resolve("abc11111"))
            assert str(lease.holder) in str(caught.value)
            assert "kill" not in str(caught.value)
            assert str(bystander.pid) not in str(caught.value)
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_the_error_for_a_manager_that_ignores_sigterm_names_its_pid(an_experiment, monkeypatch):
    monkeypatch.setattr(manager_stop, "_LEFT_TIMEOUT_S", 0.2)
    folder = an_experiment("abc11111")
    ignores_sigterm = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    )
    with (
        folder.owned(),
        subprocess.Popen(
            [sys.executable, "-c", ignores_sigterm, str(folder.path)], stdout=subprocess.PIPE
        ) as manager,
    ):
        try:
            manager.stdout.readline()
            folder.write_process(ManagerProcess(manager.pid, "127.0.0.1", 9000, __version__))
            with pytest.raises(RetryableError, match=f"`kill -9 {manager.pid}`"):
                manager_stop.leave(resolve("abc11111"))
        finally:
            manager.kill()


def test_a_listener_of_another_user_at_the_managers_port_never_gets_the_token():
    asked = []
    with an_http_manager(lambda: asked.append(1) or {"id": "abc11111"}) as port:
        client = ManagerClient("abc11111", ManagerProcess(1, "127.0.0.1", port, __version__, "secret"))
        assert client.summary() == {"id": "abc11111"}
        give_away(port)
        client = ManagerClient("abc11111", ManagerProcess(1, "127.0.0.1", port, __version__, "secret"))
        with pytest.raises(
            ManagerUnresponsive, match=r"another user of this machine .* listens at .*; wait and"
        ):
            client.summary()
    assert asked == [1]


def test_a_request_that_the_manager_dropped_is_retried_before_any_signal(an_experiment, monkeypatch):
    answers, asked = iter([None, None, {"id": "abc11111"}]), []

    def no_signal(_):
        raise AssertionError("it was ended by a signal")

    monkeypatch.setattr(manager_stop, "leave", no_signal)
    with an_http_manager(lambda: next(answers), asked) as port, contextlib.ExitStack() as owner:
        folder = an_experiment("abc11111")
        owner.enter_context(folder.owned())
        with subprocess.Popen(["true"]) as over:
            pass
        folder.write_process(ManagerProcess(over.pid, "127.0.0.1", port, __version__))
        monkeypatch.setattr(manager_stop, "_wait_until_gone", lambda *_: True)
        manager_stop.stop_experiment(resolve("abc11111"))
    get, delete = "GET /api/v1/nni/summary", "DELETE /api/v1/nni/experiment"
    assert asked == [get, get, get, delete]


def test_a_closed_connection_and_a_missing_listener_have_different_errors(an_experiment, unused_port):
    def error_on(port):
        client = ManagerClient("abc11111", ManagerProcess(1, "127.0.0.1", port, __version__))
        with pytest.raises(ManagerUnresponsive) as caught:
            client.summary()
        return caught.value

    with an_http_manager(lambda: None) as port:
        closed = error_on(port)
    assert isinstance(closed, ConnectionClosed)
    assert ": the connection was closed before the answer; wait and try again" in str(closed)
    refused = error_on(unused_port)
    assert not isinstance(refused, ConnectionClosed)
    assert ": no program listens there; " in str(refused)


# urllib3 leaves a socket to the garbage collector when its handshake fails.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
@pytest.mark.parametrize("certificate_sha256", [None, "a" * 64])
@pytest.mark.parametrize("is_reset", [True, False])
def test_a_connection_closed_at_once_is_reported_as_closed_with_and_without_tls(certificate_sha256, is_reset):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def close():
            accepted, _ = listener.accept()
            if is_reset:
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()

        closing = threading.Thread(target=close)
        closing.start()
        process = ManagerProcess(1, "127.0.0.1", port, __version__, "token", certificate_sha256)
        with pytest.raises(ConnectionClosed, match="the connection was closed before the answer"):
            ManagerClient("abc11111", process).summary()
        closing.join(DEADLINE_S)
    gc.collect()


# A manager that is ready, and rejects every request.
REFUSING = """\
#!{python}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from nni_manager.store.folders import ExperimentFolder, ManagerProcess
folder = ExperimentFolder(Path(sys.argv[sys.argv.index("--folder") + 1]))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{{"error": "cannot do this %s"}}' % self.command.encode()
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_DELETE = do_GET
with HTTPServer(("127.0.0.1", 0), Handler) as server, folder.owned():
    folder.write_process(ManagerProcess(os.getpid(), "127.0.0.1", server.server_address[1], "0"))
    server.serve_forever()
"""


def test_a_create_that_fails_leaves_no_manager_not_even_one_that_rejects_the_stop(tmp_path, monkeypatch):
    (tmp_path / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (tmp_path / "config.yml").write_text(CONFIG)
    config = read_experiment_file(tmp_path / "config.yml")
    python = tmp_path / "python"
    python.write_text(REFUSING.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(NniManagerError, match="cannot do this GET"):
        manager_process.create_experiment(config, [9], debug=False)
    left = [each for each in psutil.process_iter() if is_of(each, str(python))]
    for each in left:
        each.kill()
    assert left == []
    assert list(config.log_dir.parent.rglob("manager-process.json")) == []


def is_of(process, word):
    with contextlib.suppress(psutil.Error):
        return word in process.cmdline()
    return False


@contextlib.contextmanager
def an_http_manager(answer, asked=None):
    """A server on this machine that answers GET with `answer()`, and DELETE with an empty object; yields its port.

    None closes the connection without an answer. `asked` collects the verb and path of every request.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(answer())

        def do_DELETE(self):
            self.reply({})

        def reply(self, document):
            if asked is not None:
                asked.append(f"{self.command} {self.path}")
            if document is None:
                self.close_connection = True
                return
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            serving.join(DEADLINE_S)


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        probe.bind(
            ("127.0.0.1", 0)
        )  # bound and not listening: the port stays free, and connections to it fail
        yield probe.getsockname()[1]


# ---- an experiment file, or an experiment's folder, as an argument


def test_the_experiment_file_is_an_argument_or_an_option(nnictl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = "ERROR: cannot read none.yml: there is no such file; check the path\n"
    for words in (
        ["create", "none.yml"],
        ["create", "--config", "none.yml"],
        ["platform", "clean", "none.yml"],
    ):
        assert nnictl(*words) == (1, "", missing)
    assert nnictl("create") == (
        1,
        "",
        "ERROR: cannot run nnictl create without an experiment file; write `nnictl create FILE`\n",
    )
    assert nnictl("create", "a.yml", "-c", "b.yml") == (
        1,
        "",
        "ERROR: cannot use both a.yml and --config b.yml; name one experiment file\n",
    )


def test_resume_and_view_accept_the_path_of_an_experiment(nnictl, tmp_path):
    for command in ("resume", "view"):
        code, _, err = nnictl(command, f"{tmp_path}/nothing")
        assert (code, f"cannot use {tmp_path}/nothing as an experiment: it has no folder db" in err) == (
            1,
            True,
        )
