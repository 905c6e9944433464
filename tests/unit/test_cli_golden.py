"""The exact output of nnictl: the help of every command, and outputs about one stored experiment.

`make golden` regenerates the golden files; review the difference before you commit it.
"""

import os
import shlex
import sys
import time
from pathlib import Path

import click
import pytest
from attempts import RegisteringStore, attempt_id

from nni_manager.cli import main
from nni_manager.config.reader import read_experiment_file
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.ingest import AttemptIngest
from nni_manager.domain.remarks import Remarks
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import NO_FINAL_RESULT, TrialRun
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.registry import Registry
from nni_manager.store.rows import experiment_row, remarks_row, trial_row
from nni_sdk.frame import encode
from trial_keeper import __version__
from trial_keeper.wire.file_changes import FileChange, file_warning
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.reasons import ExitReason

GOLDEN = Path(__file__).parents[1] / "golden/nnictl"
WRITES = os.environ.get("GOLDEN") == "write"
CONFIG = """\
experimentName: digits
authorName: ada
trialConcurrency: 2
maxTrialNum: 5
maxExecDuration: 1h
trainingServicePlatform: local
searchSpacePath: search_space.json
logDir: logs
tuner: {builtinTunerName: Random, classArgs: {optimize_mode: maximize, seed: 1}}
trial: {command: "true", codeDir: .}
"""
# The recorded outputs show this time: 2026-05-04 03:02:01 UTC.
NOW_S = 1777863721.0
OUTPUTS = {
    "banner": "",
    "experiment-list": "experiment list --all",
    "experiment-list-json": "experiment list --all --json",
    "experiment-show": "experiment show abc",
    "experiment-status": "experiment status abc",
    "experiment-export": "experiment export abc --intermediate",
    "experiment-export-csv": "experiment export abc --type csv --intermediate",
    "trial-ls": "trial ls abc",
    "trial-ls-best": "trial ls abc --best 1",
    "trial-ls-columns": "trial ls abc --sort value --descending --columns no.,state,value,lr",
    "trial-ls-tags": "trial ls abc --tag keep --columns no.,trial,value,tags,note",
    "trial-tag": "trial tag abc --trial-id t1 --add good --remove keep",
    "trial-tag-refused": "trial tag abc --trial-id t1 --add 'two words'",
    "trial-note": "trial note abc --trial-id t1",
    "experiment-tag": "experiment tag abc --add baseline",
    "experiment-note": "experiment note abc --text 'with the cleaned labels'",
    "trial-ls-json": "trial ls abc --head 1 --json",
    "trial-show": "trial show abc --trial-id t1",
    "log-trial-paths": "log trial abc",
    "stop-what-ended": "stop abc",
    "top-what-ended": "top abc",
    "unknown-experiment": "trial ls xyz",
    "unknown-command": "trial list",
}


def all_commands(group=main.cli, path=()):
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from all_commands(command, (*path, name))
        else:
            yield (*path, name)


HELPS = {"-".join(("help", *path)): path for path in all_commands()}


@pytest.fixture(autouse=True)
def fixed_environment(tmp_path, monkeypatch):
    """Sets the same terminal width, time zone and home directory for every test."""
    for name, value in {"COLUMNS": "100", "TZ": "UTC", "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"),
                        "XDG_CONFIG_HOME": str(tmp_path / "config")}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def an_experiment(tmp_path):
    """A stored experiment that has ended, with a trial of each kind."""
    (tmp_path / "search_space.json").write_text(
        '{"lr": {"_type": "uniform", "_value": [0, 1]}, "size": {"_type": "choice", "_value": [16, 32]}}'
    )
    (tmp_path / "config.yml").write_text(CONFIG)
    config = read_experiment_file(tmp_path / "config.yml")
    folder = ExperimentFolder(config.log_dir / "abc11111")
    folder.make()
    store = RegisteringStore.create(
        folder.database, folder.collected_logs, "abc11111", config.to_json(), b"s", NOW_S
    )
    Registry.of_user().add(folder)
    ends = [
        ("t0aaa", TrialState.SUCCEEDED, ExitReason.SUCCEEDED, 0, 0.5, ""),
        ("t1bbb", TrialState.SUCCEEDED, ExitReason.SUCCEEDED, 0, 0.9876543, ""),
        ("t2ccc", TrialState.FAILED, ExitReason.NONZERO_EXIT, 1, None, "Traceback\nKeyError: no module named 'torch'\n"),
        ("t3ddd", TrialState.USER_CANCELED, ExitReason.STOPPED_BY_USER, 143, None, ""),
        ("t4eee", TrialState.SUCCEEDED, ExitReason.SUCCEEDED, 0, None, NO_FINAL_RESULT),
        ("t5fff", TrialState.EARLY_STOPPED, ExitReason.EARLY_STOPPED, 143, 0.75, ""),
        ("t6ggg", TrialState.FAILED, ExitReason.SIGNAL, 139, None, ""),
        ("t7hhh", TrialState.FAILED, ExitReason.NONZERO_EXIT, 1, None,
         'Traceback (most recent call last):\n  File "train.py", line 3, in f\nValueError: nan\nsee <https://example.org>\n'),
    ]  # fmt: skip
    for number, (name, state, reason, code, value, message) in enumerate(ends):
        trial = Trial(
            name,
            number,
            {"lr": number / 8, "size": 16},
            {},
            NOW_S + number,
            name,
            state,
            run=TrialRun(attempt=0),
        )
        trial.run.started_at_s, trial.run.ended_at_s = NOW_S + number, NOW_S + 10 * number + 1
        trial.run.reason, trial.run.exit_code, trial.run.message, trial.run.reporter = (
            reason,
            code,
            message,
            "main-0",
        )
        trial.run.final, trial.run.value = value and str(value), value
        if name == "t5fff":
            trial.warn(file_warning(Stream.METRICS, FileChange.TRUNCATED))
        written = AttemptIngest(AttemptKey(name, attempt_id(0), "main-0")).take(
            Stream.METRICS, 0, encode(number, name, "PERIODICAL", 0, 0.25)
        )
        store.commit([trial_row(trial), *written], NOW_S + 5)
    store.commit([remarks_row("t1bbb", Remarks(("keep", "lr/low"), "converges late\ntry more"))], NOW_S + 60)
    store.commit([experiment_row(ExperimentState.DONE, "", 42.0, NOW_S + 60, True)], NOW_S + 60)
    store.close()


def same(name, output, home):
    output = output.replace(str(home), "HOME").replace(__version__, "VERSION")
    path = GOLDEN / f"{name}.txt"
    if WRITES:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(output.encode())
    assert path.is_file(), f"{path} is missing; run `make golden`, and review what it wrote"
    assert output == path.read_bytes().decode(), "if the new output is correct, run `make golden`"


@pytest.mark.parametrize("name", HELPS)
def test_the_help_of_each_command_matches_its_golden_file(capsys, tmp_path, name):
    assert main.run([*HELPS[name], "--help"]) == 0
    same(name, capsys.readouterr().out, tmp_path)


@pytest.mark.usefixtures("an_experiment")
@pytest.mark.parametrize("name", OUTPUTS)
def test_every_recorded_output_matches_its_golden_file(capsys, tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    command = OUTPUTS[name]
    code = main.run(shlex.split(command))
    out, err = capsys.readouterr()
    errors = f"---- stderr\n{err}" if err else ""
    same(name, f"$ nnictl {command}\n{out}{errors}---- exit code {code}\n", tmp_path)


def test_every_golden_file_belongs_to_a_command():
    obsolete = [path for path in GOLDEN.iterdir() if path.stem not in {*HELPS, *OUTPUTS}]
    for path in obsolete if WRITES else ():
        path.unlink()
    assert WRITES or not obsolete
