"""The quick start of README.md and the recipes of docs/recipes.md, as a reader runs them."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import requests
import yaml
from amounts import amount
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from real_experiment import wait_until
from real_nni import python_with_nni
from user_home import BIN, environ_of

from nni_manager.config.reader import read_experiment_file

ROOT = Path(__file__).parents[2]
START = (ROOT / "README.md").read_text().partition("## Quick start")[2].partition("## Where to read on")[0]
FILES = dict(re.findall(r"^`([\w.]+)`, [^\n]*:\n\n```\w+\n(.*?)^```", START, re.MULTILINE | re.DOTALL))
RECIPES = (ROOT / "docs/recipes.md").read_text()


def blocks(language):
    """The code blocks of the recipes with the headings above them."""
    for recipe in RECIPES.split("\n## ")[1:]:
        heading = recipe.partition("\n")[0].strip("…?")
        for block in re.findall(rf"^```{language}\n(.*?)^```", recipe, re.MULTILINE | re.DOTALL):
            yield pytest.param(block, id=heading)


def merged(file, change):
    """The experiment file `file` with the keys of a recipe, which replace existing keys."""
    for key, value in change.items():
        file[key] = merged(file.get(key, {}), value) if isinstance(value, dict) else value
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of the quick start, in a home of its own, with two experiments that have ended."""
    folder = tmp_path_factory.mktemp("home") / "work"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for _ in range(2):
        nnictl(folder, "create", "config.yml", "--foreground")
    return folder


def nnictl(place, *arguments):
    return run(place, BIN / "nnictl", *arguments)


def run(place, *command):
    done = subprocess.run(
        [*command], cwd=place, env=environ_of(place), capture_output=True, text=True, timeout=4 * DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.smoke
def test_the_search_example_of_the_quick_start_runs(tmp_path):
    # This test has a home of its own, because other tests of this module count the experiments in their common home.
    place = tmp_path / "work"
    place.mkdir()
    (script,) = re.findall(r"^```python\n(from nni_manager.*?)^```", START, re.MULTILINE | re.DOTALL)
    assert abs(float(run(place, sys.executable, "-c", script).split()[-1])) < 0.01


def ids(place):
    lines = nnictl(place, "experiment", "list", "--all").splitlines()[1:]
    return [line.split("\t")[0] for line in lines]


@pytest.mark.smoke
def test_the_quick_start_finds_a_minimum_and_shows_the_output_of_a_trial(place):
    assert set(FILES) == {"train.py", "search_space.json", "config.yml"}
    rows = [line.split("\t") for line in nnictl(place, "trial", "ls", "--best", "10").splitlines()[1:]]
    assert len(rows) == 10
    assert [float(row[3]) for row in rows] == sorted((float(row[3]) for row in rows), reverse=True)
    printed = nnictl(place, "log", "trial", "-T", rows[0][1])
    assert re.search(r"^epoch 9: x = -?\d+\.\d{4}$", printed, re.MULTILINE)
    assert "epoch 9: x = " in run(place, sys.executable, "train.py")


@pytest.mark.parametrize("block", list(blocks("yaml")))
@pytest.mark.smoke
def test_the_experiment_file_of_a_recipe_is_valid(place, block):
    path = place / "recipe.yml"
    path.write_text(yaml.safe_dump(merged(yaml.safe_load(FILES["config.yml"]), yaml.safe_load(block))))
    assert read_experiment_file(path).warnings == ()


@pytest.mark.parametrize("block", list(blocks("python")))
@pytest.mark.smoke
def test_the_code_of_a_recipe_runs(place, block):
    first, second = ids(place)
    # A code block that uses nni_sdk is a part of train.py, so it is inserted into that file.
    if "nni_sdk" in block:
        code = FILES["train.py"].replace(
            "for epoch", f"{block}for epoch" if "seed_everything" in block else "for epoch"
        )
        code = (
            code if "seed_everything" in block else code.replace("nni_sdk.report_final_result(-x * x)", block)
        )
        assert block in code
    else:
        code = f"FIRST, SECOND = {first!r}, {second!r}\n{block}"
    printed = run(place, sys.executable, "-c", code)
    assert "epoch 9" in printed or "count" in printed or "trialJobId" in printed


@pytest.mark.smoke
def test_the_resume_recipe_continues_the_latest_experiment(place):
    (commands,) = (block.values[0] for block in blocks("sh") if "resume" in block.values[0])
    stop, *others = [line.split()[1:] for line in commands.splitlines()]
    assert stop == ["stop"]
    latest = ids(place)[0]
    for command in others:
        nnictl(place, *command)
    nnictl(place, "top")
    assert len(nnictl(place, "trial", "ls", latest).splitlines()) == 1 + int(others[-1][-1])
    nnictl(place, *stop)


# ---- the pages for users of other tools: the same example with the other tool and with trial-keeper

OTHERS = ("from-nni", "from-optuna", "from-ray-tune", "from-wandb")
PEERS = Path(sys.prefix, "peers")
"""What `make peers` installs."""


def example(page, heading):
    """The files and the commands below a heading of a page."""
    part = (ROOT / f"docs/{page}.md").read_text().partition(f"## With {heading}\n")[2].partition("\n## ")[0]
    files = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", part, re.MULTILINE | re.DOTALL))
    commands = re.findall(r"^```sh\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    return files, "".join(commands).splitlines()


def write(place, files):
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / name).write_text(text)
    return place


@pytest.mark.parametrize("page", OTHERS)
@pytest.mark.smoke
def test_an_example_from_the_page_of_another_tool_runs_with_trial_keeper(page, tmp_path):
    files, commands = example(page, "trial-keeper")
    place = write(tmp_path / "work", files)
    (command,) = commands
    assert command == "nnictl create config.yml --foreground"
    nnictl(place, *command.split()[1:])
    best = nnictl(place, "trial", "ls", "--best", "1").splitlines()[1].split("\t")
    assert float(best[3]) < 1, "twenty trials halve the loss of 25 at least five times"


@pytest.mark.smoke
def test_the_example_for_nni_users_runs_unchanged(tmp_path):
    files, (command,) = example("from-nni", "NNI")
    place = write(tmp_path / "work", files)
    nnictl(place, *command.split()[1:])
    assert float(nnictl(place, "trial", "ls", "--best", "1").splitlines()[1].split("\t")[3]) < 1


@pytest.mark.smoke
def test_the_optuna_example_of_the_docs_runs(tmp_path):
    files, (command,) = example("from-optuna", "Optuna")
    place = write(tmp_path / "work", files)
    assert command == "python3 search.py"
    assert float(run(place, sys.executable, "search.py").splitlines()[-1].removeprefix("best ")) < 1


@pytest.mark.peer
@pytest.mark.timeout(600)
def test_the_example_for_nni_users_runs_with_the_manager_of_the_real_nni_package(tmp_path):
    python = python_with_nni("3.0")
    files, (command,) = example("from-nni", "NNI")
    # One trial of NNI takes some seconds, so the test runs only two trials.
    few = files["config.yml"].replace("maxTrialNum: 20", "maxTrialNum: 2")
    assert few != files["config.yml"]
    place = write(tmp_path / "work", files | {"config.yml": few})
    port = free_port_pair()
    environ = {"HOME": str(tmp_path), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    nnictl_of_nni = partial(
        subprocess.run, cwd=place, env=environ, capture_output=True, text=True, timeout=4 * DEADLINE_S
    )
    command = [each for each in command.split() if each != "--foreground"]
    command[0] = python.parent / "nnictl"
    api, end = f"http://127.0.0.1:{port}/api/v1/nni", None

    def ended():
        found = requests.get(f"{api}/check-status", timeout=DEADLINE_S).json()
        return found if found["status"] in ("DONE", "ERROR") else None

    try:
        # NNI waits only a few seconds for its manager to listen, and ten seconds for its tuner to connect. Both may take longer
        # on a busy machine, so the test tries up to five times.
        for _ in range(5):
            done = nnictl_of_nni([*command, f"--port={port}"])
            if "/check-status" not in done.stderr:
                assert done.returncode == 0, done.stdout + done.stderr
                end = wait_until(ended, "it ends")
                if not any("Tuner did not connect in 10 seconds" in error for error in end["errors"]):
                    break
            nnictl_of_nni([command[0], "stop", "--all"])
        else:
            pytest.skip(
                "NNI's manager or tuner did not start within NNI's own limits, five times: this machine is too busy"
            )
        assert end == {"status": "DONE", "errors": []}
        trials = requests.get(f"{api}/trial-jobs", timeout=DEADLINE_S).json()
        assert [trial["status"] for trial in trials] == ["SUCCEEDED"] * 2
    finally:
        nnictl_of_nni([command[0], "stop", "--all"])


@pytest.mark.peer
@pytest.mark.timeout(600)
@pytest.mark.smoke
def test_the_ray_tune_example_of_the_docs_runs(benchmark_module, tmp_path):
    peers = benchmark_module("trial_peers")
    files, (command,) = example("from-ray-tune", "Ray Tune")
    assert files["search.py"].count("num_samples=20,") == 1
    # Ray Tune starts a process that imports all of Ray for each trial, so the short form of this test runs fewer trials.
    files["search.py"] = files["search.py"].replace("num_samples=20,", f"num_samples={amount(3, 20)},")
    place = write(tmp_path / "work", files)
    assert command == "python3 search.py"
    try:
        printed = peers.output_of(peers.RAY_TUNE, place, "search.py")
    except peers.PeerLacking as lacking:
        compile(files["search.py"], "search.py", "exec")
        pytest.skip(str(lacking))
    # The last line of the script may not be the last line of stdout: Ray may print the output of its workers later.
    (best,) = re.findall(r"^best (.*)$", printed, re.MULTILINE)
    assert 0 <= float(best) < float("inf")


@pytest.mark.peer
@pytest.mark.smoke
def test_the_training_code_of_the_wandb_example_runs_offline(tmp_path):
    files, commands = example("from-wandb", "W&B")
    assert commands == ["wandb sweep sweep.yaml", "wandb agent SWEEP_ID"]
    place = write(tmp_path / "work", files)
    parameters = yaml.safe_load(files["sweep.yaml"])["parameters"]
    # A sweep needs an account at W&B. Instead, the test writes parameters like those of a sweep to the file of default values.
    chosen = {name: {"value": (each["min"] + each["max"]) / 2} for name, each in parameters.items()}
    (place / "config-defaults.yaml").write_text(yaml.safe_dump(chosen))
    python = PEERS / "callbacks/bin/python"
    if not python.exists():
        compile(files["train.py"], "train.py", "exec")
        pytest.skip("wandb is not installed: make peers")
    done = subprocess.run(
        [python, "train.py"],
        cwd=place,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    (run_file,) = place.glob("wandb/offline-run-*/*.wandb")
    assert run_file.stat().st_size > 0
