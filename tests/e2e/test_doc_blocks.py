"""The code blocks of the documentation are correct: for each kind of block, a test in this file runs or checks the blocks.

A block that cannot be run has a comment before it: `<!-- not run: REASON -->`. The nnictl and make commands of such a block are
parsed nevertheless. Blocks of the kinds `text` and `console` contain the output of programs.
"""

import copy
import doctest
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from nginx import nginx
from real_experiment import free_port_pair
from user_home import environ_of

from nni_manager.cli.main import cli
from nni_manager.cli.nni_spellings import translated
from nni_manager.config.ignore_file import IgnoreRules, is_left_out
from nni_manager.config.prior_results import read_results
from nni_manager.config.reader import read_experiment_file
from nni_manager.config.search_space import parse_search_space

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n\n?)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
# This module skips these pages, because the test file beside each page runs all its blocks.
ELSEWHERE = {
    "docs/recipes.md": "tests/e2e/test_recipes.py",
    "docs/from-nni.md": "tests/e2e/test_recipes.py",
    "docs/from-optuna.md": "tests/e2e/test_recipes.py",
    "docs/from-ray-tune.md": "tests/e2e/test_recipes.py",
    "docs/from-wandb.md": "tests/e2e/test_recipes.py",
    "docs/internals.md": "tests/unit/test_internals_page.py",
    "examples/platform/README.md": "tests/e2e/test_installed_platform.py",
}


@dataclass(frozen=True)
class Block:
    """A code block. `number` is the index of the block on its page. `reason` says why the block is not run; an empty `reason`
    means that the block is run.
    """

    page: str
    number: int
    kind: str
    text: str
    reason: str


def pages():
    """The pages of the documentation, by their paths."""
    patterns = ("*.md", "docs/*.md", "examples/**/*.md", "images/*.md", "proto/*.md")
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def blocks_of(page):
    found = _BLOCK.finditer((ROOT / page).read_text())
    return [
        Block(page, number, each["kind"], each["text"], each["reason"] or "")
        for number, each in enumerate(found)
    ]


BLOCKS = [block for page in pages() if page not in ELSEWHERE for block in blocks_of(page)]
START = blocks_of("README.md")
(TRAIN,) = (block.text for block in START if "report_intermediate_result(-x" in block.text)
(SPACE,) = (block.text for block in START if block.kind == "json")
(CONFIG,) = (block.text for block in START if block.kind == "yaml")


def of_kind(*kinds):
    """Parametrize a test with all blocks of these kinds."""
    chosen = [
        pytest.param(block, id=f"{block.page}-{block.number}") for block in BLOCKS if block.kind in kinds
    ]
    return pytest.mark.parametrize("block", chosen)


def skip_if_not_run(block):
    if block.reason:
        pytest.skip(f"not run: {block.reason}")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the files of the quick start and the files that the commands in the documentation mention."""
    folder = tmp_path / "home/work"
    folder.mkdir(parents=True)
    for name, text in (("train.py", TRAIN), ("search_space.json", SPACE), ("config.yml", CONFIG)):
        (folder / name).write_text(text)
    for name in ("digits.tar.gz", "results.json", "before.json", "after.json", "train.sif"):
        (folder / name).touch()
    shutil.copytree(ROOT / "examples/platform", folder / "examples/platform")
    monkeypatch.chdir(folder)
    return folder


def test_the_docs_contain_only_kinds_of_blocks_that_this_module_tests():
    assert {block.kind for block in BLOCKS} <= {
        *("yaml", "json", "python", "pycon", "sh", "nginx", "gitignore", "toml"),
        *("text", "console"),
    }
    for page, test in ELSEWHERE.items():
        assert blocks_of(page), f"{page} has no blocks"
        assert (ROOT / test).exists()


# ---- files

_FIRST_KEYS = {"trainingServicePlatform", "trainingService", "trialCommand"}


def merged(document, change):
    """Merge `change` into a copy of the document: keys of `change` replace those of the document."""
    document = copy.deepcopy(document)
    for key, value in change.items():
        inner = document.get(key)
        document[key] = merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return document


SECOND = {
    "searchSpaceFile": "search_space.json",
    "trialCommand": "python3 train.py",
    "trialGpuNumber": 0,
    "trialConcurrency": 2,
    "tuner": {"name": "TPE"},
    "trainingService": {"platform": "local"},
}
"""The experiment file of the quick start in NNI's second schema."""


def document_with(block):
    """The experiment file that a block belongs to: the last complete experiment file of the page. If the page has none, it is the
    experiment file of the quick start.
    """
    document = yaml.safe_load(CONFIG)
    for each in blocks_of(block.page)[: block.number + 1]:
        if each.kind != "yaml":
            continue
        change = yaml.safe_load(each.text)
        if "trainingService" in change or "name" in change.get("tuner", {}):
            document = SECOND
        # The document is built from the complete experiment files before the block and from the block itself. The other blocks of
        # the page are fragments, which are skipped.
        if _FIRST_KEYS & change.keys() or each == block:
            document = merged(document, change)
            # A complete section of the block replaces the document's section; the two sections are not merged.
            for section in ("tuner", "trial", "frameworkcontrollerConfig"):
                own = change.get(section, {})
                if (section == "tuner" and own) or own.keys() & {"codeDir", "storage"}:
                    document[section] = own
    if "advisor" in document:
        del document["tuner"]
    if document.get("useAnnotation"):
        del document["searchSpacePath"]
    return document


@of_kind("yaml")
def test_an_experiment_file_in_the_docs_is_valid(block, place):
    skip_if_not_run(block)
    for each in blocks_of(block.page):
        # The block may use classes and annotated code from other blocks of the page, so these are written to files.
        for name in re.findall(r"^class (My\w+)\(", each.text, re.M):
            (place / f"{re.sub('(?<!^)(?=[A-Z])', '_', name).lower()}.py").write_text(each.text)
        (place / "my_advisor.py").write_text("class MyAdvisor: ...")
        if "@nni.variable" in each.text and each.kind == "python":
            (place / "train.py").write_text(each.text)
    document = yaml.safe_load(block.text)
    if document.get("kind") == "Framework":
        (place / "template.yml").write_text(block.text)
        whole = document_with(blocks_of(block.page)[0])
        whole["frameworkcontrollerConfig"]["configPath"] = "template.yml"
        del whole["trial"]["taskRoles"]
        document = whole
    elif "spec" in document:
        (place / "pod.yml").write_text(block.text)
        document = document_with(blocks_of(block.page)[0])
        document["kubeflowConfig"]["podTemplate"] = "pod.yml"
    else:
        document = document_with(block)
    (place / "mnt").mkdir()
    path = place / "config.yml"
    path.write_text(yaml.safe_dump(document).replace("/local/mnt", str(place / "mnt")))
    read_experiment_file(path)


@of_kind("json")
def test_a_json_block_of_the_docs_is_valid(block):
    skip_if_not_run(block)
    value = json.loads(block.text)
    if isinstance(value, list):
        space = {
            "lr": {"_type": "uniform", "_value": [0, 1]},
            "net": {"_type": "choice", "_value": ["deep", "flat"]},
        }
        results, problems = read_results(value, parse_search_space(space), "TPE")
        assert (len(results), problems) == (len(value), [])
    elif any("_type" in str(each) for each in value.values()):
        parse_search_space(value)


@of_kind("toml")
def test_a_toml_block_of_the_docs_occurs_in_the_pyproject_file_of_the_example_platform(block):
    skip_if_not_run(block)
    assert block.text in (ROOT / "examples/platform/pyproject.toml").read_text()


@of_kind("gitignore")
def test_the_ignore_file_in_the_docs_excludes_the_files_named_in_its_comments(block):
    skip_if_not_run(block)
    rules = [IgnoreRules.of("", block.text)]
    kept = ("scripts/run.py", "scripts/sub/run.py", "train.py", "sub/logs")
    assert [path for path in kept if is_left_out(rules, path)] == []
    left_out = ("data/", "sub/data/", "a.ckpt", "logs", "scripts/notes.txt", "scripts/sub/notes.txt")
    assert [path for path in left_out if not is_left_out(rules, path)] == []


@of_kind("nginx")
def test_nginx_accepts_an_nginx_configuration_of_the_docs(block, tmp_path):
    skip_if_not_run(block)
    with nginx(tmp_path / "nginx", free_port_pair(), settings=f"}} {block.text.rstrip().removesuffix('}')}"):
        pass


# ---- commands

_TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


def commands_of(block):
    """The commands of a block, each as a list of words. In a `console` block, only lines after a prompt are commands."""
    text = block.text.replace("\\\n", " ")
    if block.kind == "console":
        text = "\n".join(re.findall(r"^\$ (.*)$", text, re.M))
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        for end in ("|", ">", "&&"):
            while end in words:
                words, rest = words[: words.index(end)], words[words.index(end) + 1 :]
                if end == "&&":
                    yield rest
        if words:
            yield words


def parse(words):
    """Parse a command line of nnictl without running it: unknown commands and options raise a usage error."""
    context, command, left = None, cli, translated(cli, words)
    while True:
        context = command.make_context(command.name or "nnictl", list(left), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        left = [*context._protected_args, *context.args]
        if not left:
            return
        _, command, left = command.resolve_command(context, left)


@of_kind("sh", "console")
def test_the_commands_and_the_options_in_the_docs_exist(block, place):
    others = set()
    for program, *words in commands_of(block):
        if program == "nnictl":
            parse(words)
        elif program == "make":
            assert {word for word in words if "=" not in word} <= _TARGETS
        elif program != "python3" or not Path(words[0]).exists():
            others.add(program)
    assert not others or block.reason or block.kind == "console", others


# ---- Python

# This code runs before each example. It defines the names that an example leaves to the reader, such as the training itself.
_READERS_CODE = """
import os, types
import nni_sdk
x, steps, accuracy, loss, save_folder = 1, 3, 0.5, 0.1, "."
relu = tanh = new_model = lambda *_: types.SimpleNamespace(save=print)
train = evaluate = lambda *_: 0.5
save = train_for_some_epochs = lambda *_: None
load = lambda path: path and (new_model(), 0)
"""
_PRELUDES = {
    "docs/tuners.md": """
folders = {"load_checkpoint_dir": "", "save_checkpoint_dir": "saved"}
nni_sdk.get_next_parameter = lambda: folders
""",
    "docs/integrations.md": """
import numpy, xgboost
from sklearn.linear_model import SGDClassifier
train_x = valid_x = numpy.random.default_rng(1).random((60, 3))
train_y = valid_y = (train_x[:, 0] > 0.5).astype(int)
train = valid = xgboost.DMatrix(train_x, train_y)
parameters = {"eval_metric": "auc"}
import nni_sdk.integrations.xgboost
model, classes = SGDClassifier(), [0, 1]
""",
    "docs/python-api.md": """
import plotly.graph_objects
plotly.graph_objects.Figure.show = lambda self: print("shown")
""",
}


@of_kind("python")
def test_a_python_block_of_the_docs_runs(block, place):
    skip_if_not_run(block)
    if block.page == "docs/integrations.md" and importlib.util.find_spec("xgboost") is None:
        pytest.skip("xgboost is not installed")
    # A block that starts with `experiment.` continues the Python blocks before it on the page.
    before = [each.text for each in blocks_of(block.page)[: block.number] if each.kind == "python"]
    before = before if block.text.startswith("experiment.") else []
    (place / "block.py").write_text(
        "\n".join([_READERS_CODE, _PRELUDES.get(block.page, ""), *before, block.text])
    )
    done = subprocess.run(
        [sys.executable, "block.py"],
        cwd=place,
        env=os.environ | environ_of(place),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_interactive_python_examples_of_the_docs_print_the_documented_output(place):
    names = {}
    for block in (block for block in BLOCKS if block.kind == "pycon"):
        example = doctest.DocTestParser().get_doctest(block.text, names, block.page, block.page, block.number)
        runner = doctest.DocTestRunner()
        runner.run(example, clear_globs=False)
        names = example.globs
        assert runner.summarize().failed == 0
