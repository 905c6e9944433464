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


def test_the_function_of_the_quick_start_is_searched(tmp_path):
    place = tmp_path / "work"  # a home of its own: other tests count the experiments of theirs
    place.mkdir()
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


# ---- the pages for users of other tools: the same example with both

OTHERS = ("from-nni", "from-optuna", "from-ray-tune", "from-wandb")
WHY_NOT = {
    "from-ray-tune": "Ray Tune is not installed in this Python; `make peers` installs it in one of its own",
    "from-wandb": "a sweep needs an account at W&B",
}


def example(page, heading):
    """The files and the commands below a heading of a page."""
    part = (ROOT / f"docs/{page}.md").read_text().partition(f"## With {heading}\n")[2].partition("\n## ")[0]
    files = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", part, re.MULTILINE | re.DOTALL))
    rest = re.sub(r"^```\w+\n.*?^```\n", "", part, flags=re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^```\n(.*?)^```", rest, re.MULTILINE | re.DOTALL)
    return files, "".join(commands).splitlines()


def write(place, files):
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / name).write_text(text)
    return place


@pytest.mark.parametrize("page", OTHERS)
def test_the_example_of_another_tool_runs_with_trial_keeper(page, tmp_path):
    files, commands = example(page, "trial-keeper")
    place = write(tmp_path / "work", files)
    (command,) = commands
    assert command == "nnictl create config.yml --foreground"
    nnictl(place, *command.split()[1:])
    best = nnictl(place, "trial", "ls", "--best", "1").splitlines()[1].split("\t")
    assert float(best[3]) < 1, "twenty trials halve the loss of 25 at least five times"


def test_the_example_of_nnis_users_runs_unchanged(tmp_path):
    files, (command,) = example("from-nni", "NNI")
    place = write(tmp_path / "work", files)
    nnictl(place, *command.split()[1:])
    assert float(nnictl(place, "trial", "ls", "--best", "1").splitlines()[1].split("\t")[3]) < 1


def test_the_example_of_optuna_runs(tmp_path):
    files, (command,) = example("from-optuna", "Optuna")
    place = write(tmp_path / "work", files)
    assert command == "python3 search.py"
    assert float(run(place, sys.executable, "search.py").splitlines()[-1].removeprefix("best ")) < 1


@pytest.mark.parametrize("page", WHY_NOT)
def test_the_other_examples_are_valid_python(page):
    files, _ = example(page, {"from-ray-tune": "Ray Tune", "from-wandb": "W&B"}[page])
    for name, text in files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
    pytest.skip(WHY_NOT[page])
