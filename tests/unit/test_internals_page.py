"""The state diagrams of docs/internals.md match the tables in the code. `make golden` writes the diagrams."""

import ast
import importlib
import inspect
import itertools
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals.md"
ROOTS = (ROOT / "manager" / "nni_manager", ROOT)
MARK = "<!-- generated -->\n"
# Each entry has a module, the prefix of CHANGES and IGNORED in that module, and a heading. The last item is the name that the
# diagram shows for the state None.
TABLES = [
    ("nni_manager.domain.experiment", "", "Experiment", ""),
    ("nni_manager.domain.trial", "", "Trial", "terminal (by reason)"),
    ("nni_manager.domain.attempts", "", "Attempt, in the manager", ""),
    ("nni_manager.domain.jobs", "", "Job", ""),
    ("nni_manager.domain.stop_escalation", "", "Stop of a job", ""),
    ("nni_manager.domain.lost_jobs", "", "Job that seems to be lost", "not tracked"),
    ("nni_manager.domain.transports", "", "Transport of a task", ""),
    ("nni_manager.training_services.kubernetes.job_states", "", "Job on Kubernetes", ""),
    ("trial_keeper.core.attempt", "", "Attempt, in the keeper", ""),
    ("trial_keeper.core.link", "", "Connection of a keeper", ""),
    ("nni_manager.local_openpai.core.states", "TASK_", "Task of the local OpenPAI", ""),
    ("nni_manager.local_openpai.core.states", "JOB_", "Job of the local OpenPAI", ""),
]


def section(module: str, prefix: str, heading: str, open_state: str) -> str:
    """A diagram of the state changes, and a table of the events that each state ignores."""
    tables = importlib.import_module(module)
    changes: Mapping[tuple[Enum, Enum], Enum | None] = getattr(tables, f"{prefix}CHANGES")
    lines = [f"### {heading}", "", f"`{module}`", "", "```mermaid", "stateDiagram-v2"]
    if open_state:
        lines.append(f'    state "{open_state}" as END')
    for (state, event), after in changes.items():
        lines.append(f"    {state.name} --> {'END' if after is None else after.name}: {event.name}")
    ignored: dict[str, list[str]] = defaultdict(list)
    for state, event in getattr(tables, f"{prefix}IGNORED"):
        ignored[state.name].append(event.name)
    lines += ["```", "", "| State | Meaning | Ignored events |", "|---|---|---|"]
    states = dict.fromkeys(
        state for change, after in changes.items() for state in (change[0], after) if state
    )
    explained = meanings(type(next(iter(states))))
    lines += [
        f"| {state.name} | {explained[state.name]} | {', '.join(sorted(ignored[state.name]))} |"
        for state in states
    ]
    events = meanings(type(next(iter(changes))[1]))
    if named := [f"{name} ({text})" for name, text in events.items() if text]:
        lines += ["", f"Events: {'; '.join(named)}."]
    return "\n".join(lines) + "\n"


def meanings(states: type[Enum]) -> dict[str, str]:
    """The description of each enum member: the docstring below the member, otherwise its value if the value has several words,
    otherwise an empty string.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(states))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for member, following in itertools.pairwise([*tree.body, ast.Pass()]):
        match member, following:
            case ast.Assign([ast.Name(name)]), ast.Expr(ast.Constant(str(text))):
                found[name] = " ".join(text.split()).rstrip(".")
    by_value = {state.name: state.value for state in states if state.value.count(" ") > 1}
    return {state.name: found.get(state.name) or by_value.get(state.name, "") for state in states}


def test_the_internals_page_has_the_diagrams_generated_from_the_state_tables() -> None:
    before, _, written = PAGE.read_text().partition(MARK)
    generated = "\n" + "\n".join(section(*table) for table in TABLES)
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(before + MARK + generated)
    else:
        assert written == generated, "run `make golden` after a change of a table"


def test_every_file_named_on_the_internals_page_exists() -> None:
    written_by_hand = PAGE.read_text().partition(MARK)[0]
    paths = re.findall(r"`([\w/]+/(?:[\w.]+)?)`", written_by_hand)
    assert len(paths) > 50
    assert [path for path in paths if not any((root / path).exists() for root in ROOTS)] == []


@pytest.mark.parametrize(("module", "prefix"), [table[:2] for table in TABLES])
def test_every_state_in_the_state_tables_has_an_explanation(module: str, prefix: str) -> None:
    changes = getattr(importlib.import_module(module), f"{prefix}CHANGES")
    states = {state for change, after in changes.items() for state in (change[0], after) if state}
    explained = meanings(type(next(iter(states))))
    assert [state.name for state in states if not explained[state.name]] == []


@pytest.mark.parametrize(("module", "prefix"), [table[:2] for table in TABLES])
def test_no_event_that_changes_a_state_is_also_listed_as_ignored(module: str, prefix: str) -> None:
    tables = importlib.import_module(module)
    changes, ignored = getattr(tables, f"{prefix}CHANGES"), getattr(tables, f"{prefix}IGNORED")
    assert not changes.keys() & ignored
    assert all(after is not state for (state, _), after in changes.items())
