"""Source files contain no call that could execute the content of a file or message. These checks supplement the linter."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import nni_manager
import nni_sdk
import trial_keeper
from nni_manager.engine.tokens import is_token

pytestmark = pytest.mark.slow

PACKAGES = [Path(str(package.__file__)).parent for package in (nni_manager, nni_sdk, trial_keeper)]
SOURCES = [path for package in PACKAGES for path in package.rglob("*.py")]
# These loaders instantiate any object that a document names.
UNSAFE_YAML = {
    "Loader", "UnsafeLoader", "FullLoader", "CLoader", "load", "load_all", "full_load", "full_load_all", "unsafe_load",
    "unsafe_load_all",
}  # fmt: skip
# Each of these files may use the named loader. nni_sdk/objective.py loads, in a trial, the function passed to `Experiment.run`
# from a file of the same user, which experiment/objective.py writes. sklearn.py loads a model from a checkpoint signed by a
# keeper. keeper_unpacker.py unpacks an archive whose digest it has compared.
ALLOWED = {
    "experiment/objective.py": ["pickle"],
    "nni_sdk/objective.py": ["pickle"],
    "integrations/sklearn.py": ["pickle"],
    "training_services/keeper_unpacker.py": ["extractall"],
}


def unsafe_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="yaml"), attr=attribute) if attribute in UNSAFE_YAML:
                yield f"yaml.{attribute}"
            case ast.ImportFrom(module="yaml"):
                yield "from yaml import"
            case ast.Call(func=ast.Name(id="YAML"), keywords=keywords):
                kinds = [keyword.value for keyword in keywords if keyword.arg == "typ"]
                if not any(isinstance(kind, ast.Constant) and kind.value in ("safe", "rt") for kind in kinds):
                    yield "YAML() without typ"
            case ast.Call(func=ast.Attribute(attr="extractall")):
                yield "extractall"
            case ast.Import(names=names) if any(
                name.name in ("pickle", "marshal", "shelve") for name in names
            ):
                yield "pickle"


def test_no_source_file_has_a_call_that_could_execute_file_content() -> None:
    found = {
        "/".join(path.parts[-2:]): unsafe for path in SOURCES if (unsafe := [*unsafe_in(path.read_text())])
    }
    assert found == ALLOWED


def timed_comparisons_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(isinstance(each, (ast.Eq, ast.NotEq)) for each in node.ops):
            text = ast.unparse(node)
            if re.search("token|secret|signature", text, re.IGNORECASE):
                yield text


GATES = [path for path in SOURCES if path.parent.name in ("engine", "web", "service")]


@pytest.mark.parametrize("path", GATES, ids=lambda path: "/".join(path.parts[-3:]))
def test_no_source_file_of_engine_web_and_service_compares_a_token_with_an_equality_operator(
    path: Path,
) -> None:
    assert list(timed_comparisons_in(path.read_text())) == []


def test_tokens_are_compared_in_constant_time() -> None:
    assert list(timed_comparisons_in("if token == given: pass"))
    assert "hmac.compare_digest(" in inspect.getsource(is_token)


@pytest.mark.parametrize(
    "source",
    [
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "from yaml import load",
        "YAML(typ='unsafe')",
        "YAML()",
        "archive.extractall(folder)",
        "import pickle",
    ],
)
def test_the_scan_finds_each_kind_of_unsafe_call(source: str) -> None:
    assert list(unsafe_in(source))
