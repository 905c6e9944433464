"""Typical errors of new users, and the exact output of nnictl for each error.

`make golden` regenerates the golden files; review the difference before you commit it.
"""

import os
from pathlib import Path

import pytest

from nni_manager.cli import main

GOLDEN = Path(__file__).parents[1] / "golden/errors"
WRITES = os.environ.get("GOLDEN") == "write"
CONFIG = """\
authorName: me
experimentName: first
trialConcurrency: 2
maxTrialNum: 10
trainingServicePlatform: local
searchSpacePath: space.json
useAnnotation: false
tuner:
  builtinTunerName: TPE
  classArgs: {optimize_mode: maximize}
trial:
  command: python3 train.py
  codeDir: .
"""
SPACE = '{\n  "lr": {"_type": "loguniform", "_value": [0.001, 1]},\n  "units": {"_type": "choice", "_value": [16, 32]}\n}\n'
# In each case, the second text replaces the first text in the experiment file.
IN_FILE = {
    "tab": ("  builtinTunerName", "\tbuiltinTunerName"),
    "unclosed-brace": ("maximize}", "maximize"),
    "unclosed-quote": ("experimentName: first", 'experimentName: "first'),
    "missing-colon": ("maxTrialNum: 10", "maxTrialNum 10"),
    "wrong-indentation": ("  codeDir: .", "   codeDir: ."),
    "duplicate-key": ("maxTrialNum: 10", "maxTrialNum: 10\nmaxTrialNum: 20"),
    "misspelt-key": ("trialConcurrency", "trialConcurency"),
    "misspelt-nested-key": ("  codeDir", "  codeDirectry"),
    "concurrency-zero": ("trialConcurrency: 2", "trialConcurrency: 0"),
    "concurrency-word": ("trialConcurrency: 2", "trialConcurrency: two"),
    "duration-with-a-word": ("maxTrialNum: 10", "maxExecDuration: 5 hours"),
    "platform-misspelt": ("Platform: local", "Platform: locl"),
    "platform-of-nni-only": ("Platform: local", "Platform: aml"),
    "tuner-misspelt": ("Name: TPE", "Name: TPEE"),
    "tuner-of-nni-only": ("Name: TPE", "Name: PPOTuner"),
    "mode-misspelt": ("optimize_mode: maximize", "optimize_mode: max"),
    "class-argument-unknown": ("{optimize_mode: maximize}", "{optimise: maximize}"),
    "no-command": ("  command: python3 train.py\n", ""),
    "command-misspelt": ("python3 train.py", "pyhton3 train.py"),
    "no-space-file": ("space.json", "spaces.json"),
    "no-code-folder": ("codeDir: .", "codeDir: src"),
    "author-is-empty": ("authorName: me", "authorName:"),
    "negative-gpus": ("  codeDir: .", "  codeDir: .\n  gpuNum: -1"),
    "keys-of-both-schemas": ("maxTrialNum: 10", "maxTrialNumber: 10"),
    "sweep-of-wandb": (
        CONFIG,
        "program: train.py\nmethod: bayes\nparameters:\n  lr: {min: 0.001, max: 0.1}\n",
    ),
    "annotations-and-a-space": ("useAnnotation: false", "useAnnotation: true"),
}
# In each case, the second text replaces the first text in the search space file.
IN_SPACE = {
    "space-misspelt-type": ("loguniform", "log_uniform"),
    "space-bounds-swapped": ("[0.001, 1]", "[1, 0.001]"),
    "space-one-bound": ("[0.001, 1]", "[0.001]"),
    "space-log-of-zero": ("[0.001, 1]", "[0, 1]"),
    "space-empty-choice": ("[16, 32]", "[]"),
    "space-no-value": (', "_value": [16, 32]', ""),
    "space-missing-brace": ("[16, 32]}\n", "[16, 32]\n"),
    "space-without-underscores": ('"_type": "loguniform", "_value"', '"type": "loguniform", "value"'),
    "space-is-a-list": (SPACE, "[1, 2]\n"),
}
COMMANDS = {
    "a-search-space-as-experiment-file": "create space.json",
    "a-program-as-experiment-file": "config check train.py",
    "misspelt-command-of-a-group": "statu",
    "no-file": "create",
    "file-that-is-missing": "create exp.yaml",
    "file-that-is-a-folder": "create .",
    "two-files": "create config.yml --config config.yml",
    "port-word": "create config.yml --port http",
    "port-too-high": "create config.yml --port 70000",
    "command-misspelt-of-nnictl": "experiments list",
    "command-of-another-tool": "run config.yml",
    "option-misspelt": "create config.yml --forground",
    "nothing-to-list": "trial ls",
    "nothing-to-stop": "stop",
    "unknown-experiment-to-resume": "resume abc",
    "unknown-experiment-to-view": "view abc",
    "no-trial-id": "trial kill",
    "no-trial-id-after-the-option": "trial kill -T",
    "no-value": "update trialnum",
    "unknown-format": "experiment export --type xml",
    "unknown-topic": "help quickstart",
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A user's home, with an experiment file that has no error."""
    for name, value in {"COLUMNS": "100", "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"),
                        "XDG_CONFIG_HOME": str(tmp_path / "config")}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yml").write_text(CONFIG)
    (tmp_path / "space.json").write_text(SPACE)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def answer_to(capsys, place, command):
    code = main.run(command.split())
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    shown = f"$ nnictl {command}\n{out}{err}---- exit code {code}\n"
    return shown.replace(str(place), "HOME")


def same(name, output):
    path = GOLDEN / f"{name}.txt"
    if WRITES:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(output)
    assert path.is_file(), f"{path} is missing; run `make golden`, and review what it wrote"
    assert output == path.read_text(), "if the new output is correct, run `make golden`"


def test_the_unchanged_experiment_file_is_valid(capsys, place):
    assert answer_to(capsys, place, "config check config.yml").endswith("exit code 0\n")


@pytest.mark.parametrize("name", [*IN_FILE, *IN_SPACE])
def test_the_output_for_an_invalid_file_matches_its_golden_file(capsys, place, name):
    (old, new), path = (IN_FILE[name], "config.yml") if name in IN_FILE else (IN_SPACE[name], "space.json")
    text = (place / path).read_text()
    assert old in text
    (place / path).write_text(text.replace(old, new, 1))
    output = answer_to(capsys, place, "config check config.yml")
    same(name, output)
    assert output.count("ERROR: ") + output.count("WARNING: ") >= 1


@pytest.mark.parametrize("name", COMMANDS)
def test_the_output_for_a_command_line_error_matches_its_golden_file(capsys, place, name):
    output = answer_to(capsys, place, COMMANDS[name])
    same(name, output)
    assert output.endswith("exit code 1\n")


def test_every_golden_file_belongs_to_a_test_case():
    obsolete = [path for path in GOLDEN.iterdir() if path.stem not in {*IN_FILE, *IN_SPACE, *COMMANDS}]
    for path in obsolete if WRITES else ():
        path.unlink()
    assert WRITES or not obsolete
