"""The quick start of README.md and the recipes of docs/recipes.md, as a reader runs them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from deadlines import DEADLINE_S
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
    """The experiment file with the keys of a recipe in place of its own."""
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


def test_the_function_of_the_quick_start_is_searched(place):
    (script,) = re.findall(r"^```python\n(from nni_manager.*?)^```", START, re.MULTILINE | re.DOTALL)
    assert abs(float(run(place, sys.executable, "-c", script).split()[-1])) < 0.01


def ids(place):
    lines = nnictl(place, "experiment", "list", "--all").splitlines()[1:]
    return [line.split("\t")[0] for line in lines]


def test_the_quick_start_finds_a_minimum_and_shows_what_a_trial_printed(place):
    assert set(FILES) == {"train.py", "search_space.json", "config.yml"}
    rows = [line.split("\t") for line in nnictl(place, "trial", "ls", "--best", "10").splitlines()[1:]]
    assert len(rows) == 10
    assert [float(row[3]) for row in rows] == sorted((float(row[3]) for row in rows), reverse=True)
    printed = nnictl(place, "log", "trial", "-T", rows[0][1])
    assert re.search(r"^epoch 9: x = -?\d+\.\d{4}$", printed, re.MULTILINE)
    assert "epoch 9: x = " in run(place, sys.executable, "train.py")


@pytest.mark.parametrize("block", list(blocks("yaml")))
def test_the_experiment_file_of_a_recipe_is_valid(place, block):
    path = place / "recipe.yml"
    path.write_text(yaml.safe_dump(merged(yaml.safe_load(FILES["config.yml"]), yaml.safe_load(block))))
    assert read_experiment_file(path).warnings == ()


@pytest.mark.parametrize("block", list(blocks("python")))
def test_the_code_of_a_recipe_runs(place, block):
    first, second = ids(place)
    if "nni_sdk" in block:  # a part of train.py
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


def test_an_experiment_continues_after_a_stop(place):
    (commands,) = (block.values[0] for block in blocks("") if "resume" in block.values[0])
    stop, *others = [line.split()[1:] for line in commands.splitlines()]
    assert stop == ["stop"]
    latest = ids(place)[0]
    for command in others:
        nnictl(place, *command)
    nnictl(place, "top")
    assert len(nnictl(place, "trial", "ls", latest).splitlines()) == 1 + int(others[-1][-1])
    nnictl(place, *stop)
