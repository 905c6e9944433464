"""What the sources must not hold: ways to run what a file or a peer says. Beside the linter's rules, which know fewer ways."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nni_manager
import nni_sdk
import trial_keeper

PACKAGES = [Path(str(package.__file__)).parent for package in (nni_manager, nni_sdk, trial_keeper)]
SOURCES = [path for package in PACKAGES for path in package.rglob("*.py")]
# They make whatever object a document names.
UNSAFE_YAML = {
    "Loader", "UnsafeLoader", "FullLoader", "CLoader", "load", "load_all", "full_load", "full_load_all", "unsafe_load",
    "unsafe_load_all",
}  # fmt: skip


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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-3:]))
def test_no_source_has_a_way_to_run_what_a_file_says(path: Path) -> None:
    assert list(unsafe_in(path.read_text())) == []


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
def test_such_ways_are_noticed(source: str) -> None:
    assert list(unsafe_in(source))
