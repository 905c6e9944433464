"""The tables of docs/tuners.md and docs/assessors.md match the declarations. `make golden` writes the tables."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nni_manager.config.algorithm import AssessorArgs, BuiltIn, BuiltInTuner, RandomArgs
from nni_manager.config.algorithms import ASSESSORS, TUNERS

DOCS = Path(__file__).parents[2] / "docs"
MARKS = "<!-- generated -->\n", "<!-- end of the generated table -->\n"
HEADS = {
    "tuners.md": ("Tuner", "Proposes", "classArgs with defaults", "Direction", "Objectives", "Install"),
    "assessors.md": ("Assessor", "Stops a trial", "classArgs with defaults", "Direction"),
}


def arguments(declared: BuiltIn) -> str:
    """The arguments that only some algorithms have, with their defaults. For an optional argument without a default, only the
    name is listed.
    """
    of_all = {*RandomArgs.model_fields, *AssessorArgs.model_fields}
    found = []
    for name, field in declared.args.model_fields.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        shown = " required" if field.is_required() else "" if default is None else f" {default}"
        if name not in of_all:
            found.append(f"`{name}`{shown}")
    return ", ".join(found)


def row(declared: BuiltIn, page: str) -> str:
    has_section = f"\n## {declared.name}\n" in page
    name = f"[`{declared.name}`](#{declared.name.lower()})" if has_section else f"`{declared.name}`"
    mode = declared.args.model_fields["optimize_mode"].default or "the tuner's"
    what = str(declared.doc).partition("\n")[0].removeprefix(f"{declared.name}: ").rstrip(".")
    cells = [name, what, arguments(declared)]
    if isinstance(declared, BuiltInTuner):
        objectives = "several" if declared.has_several_objectives else "one"
        cells += [mode if declared.learns else ""]
        cells += [objectives + (", constraints" if declared.learns_constraints else "")]
        cells += [f"`trial-keeper[{declared.need.extra}]`" if declared.need is not None else ""]
    else:
        cells += [mode if declared.has_direction else ""]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


@pytest.mark.parametrize(("name", "table"), [("tuners.md", TUNERS), ("assessors.md", ASSESSORS)])
def test_the_algorithm_table_of_a_page_matches_the_declarations(name, table):
    path = DOCS / name
    page = path.read_text()
    before, written, after = re.split("|".join(MARKS), page)
    lines = [f"| {' | '.join(HEADS[name])} |", "|---" * len(HEADS[name]) + "|"]
    generated = "\n".join([*lines, *(row(each, page) for each in table.values())]) + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(before + MARKS[0] + generated + MARKS[1] + after)
    else:
        assert written == generated, "run `make golden` after a change of a declaration"


@pytest.mark.slow
def test_the_algorithm_declarations_import_neither_optuna_nor_numpy():
    code = "import sys, nni_manager.config.algorithms; print({'numpy', 'optuna', 'scipy'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
