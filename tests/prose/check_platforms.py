"""Fails when product code outside the packages of platforms names a platform, or checks which platform an experiment runs on.

It checks identifiers and strings, but no comments or docstrings.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from nni_manager.config.platforms import PLATFORMS

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "manager" / "nni_manager"
_SERVICES = PRODUCT / "training_services"
# Only the packages of platforms, and the table of platforms, may name platforms.
HOMES = (
    *(path for path in sorted(_SERVICES.iterdir()) if path.is_dir()),
    PRODUCT / "local_openpai",
    PRODUCT / "config" / "platforms.py",
)
# These files outside HOMES may name platforms, each for the given reason.
EXEMPT = {
    "cli/openpai.py": "the commands of the local OpenPAI",
    "cli/openpai_jobs.py": "the commands for jobs on OpenPAI",
    "cli/main.py": "has these commands",
    "cli/nni_spellings.py": "the name of their group",
    "experiment/__init__.py": "NNI's classes of the Python API",
    "experiment/config.py": "NNI's classes of the Python API",
    "experiment/sections.py": "NNI's classes of the Python API",
}
# These names of platforms are also words with other uses, so the check looks for them only in some forms.
_AMBIGUOUS = {"local", "remote"}
_NAMES = "|".join([*(PLATFORMS.keys() - _AMBIGUOUS), "kubernetes"])
NAMES = re.compile(
    rf"(?i:{_NAMES})|(?<![a-zA-Z])(?:pai|PAI|Pai)(?![a-z])|(?<=[a-z])Pai(?![a-z])"
    r"|^remote$|(?i:machine_?list|remote_?(?:machine|section|config))"
)


def check(content: str) -> Iterator[tuple[int, str]]:
    """The line number of each mention of a platform, and the name there."""
    tree = ast.parse(content)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        for text in _texts_of(node):
            if id(node) not in docstrings and (found := NAMES.search(text)):
                yield getattr(node, "lineno", 0), found[0]


def _texts_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Constant(str(text)) | ast.Name(text) | ast.Attribute(_, text):
            yield text
        case ast.arg(text) | ast.keyword(str(text)) | ast.alias(text, None):
            yield text
        case ast.alias(text, str(name)):
            yield from (text, name)
        case ast.ImportFrom(str(module)):
            yield module
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            yield name


def problems() -> Iterator[str]:
    """A line for each problem, and for each exempt file that needs no exemption."""
    for path in sorted(PRODUCT.rglob("*.py")):
        if any(path.is_relative_to(home) for home in HOMES):
            continue
        name = str(path.relative_to(PRODUCT))
        found = list(check(path.read_text()))
        if name in EXEMPT and not found:
            yield f"{path.relative_to(ROOT)}: names no platform; remove it from EXEMPT of {Path(__file__).name}"
        for line, word in () if name in EXEMPT else found:
            yield (
                f"{path.relative_to(ROOT)}:{line}: names the platform {word}; ask Platform, PlatformFile or ClusterConfig, "
                "which the platform's package implements"
            )


def main() -> int:
    """Print the problems; the exit code is 1 if there is one."""
    found = list(problems())
    for each in found:
        print(each)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
