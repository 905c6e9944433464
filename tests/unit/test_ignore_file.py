"""`.nniignore` follows the rules of git's ignore files. The tests compare its result with the result of git."""

import os
import subprocess
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nni_manager.config.ignore_file import IgnoreRules, is_left_out

NAMES = ["a", "b", "ab", "x.py"]
PARTS = st.sampled_from(["*", "**", "a", "b", "*.py", "a*", "?", "x.py", "[ab]", "[!a]", "*b"])


@st.composite
def patterns(draw):
    parts = draw(st.lists(PARTS, min_size=1, max_size=4))
    # Keep only the first of two "**" in a row: a/**/**/b matches the same paths as a/**/b.
    parts = [part for i, part in enumerate(parts) if part != "**" or parts[i - 1 : i] != ["**"]]
    return (
        draw(st.sampled_from(["", "", "!", "/", "!/"])) + "/".join(parts) + draw(st.sampled_from(["", "/"]))
    )


FILES = st.lists(patterns(), min_size=1, max_size=5).map("\n".join)
PATHS = st.sets(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join), min_size=5, max_size=25
)


def kept_by_git(root: Path) -> set[str]:
    command = ["git", "ls-files", "--others", "-z", "--exclude-per-directory=.nniignore"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    return {path for path in listed.stdout.split("\0") if path}


def kept_by_us(root: Path, folder: str = "", outer: tuple[IgnoreRules, ...] = ()) -> set[str]:
    rules = outer
    if (root / folder / ".nniignore").is_file():
        rules = (*outer, IgnoreRules.of(folder, (root / folder / ".nniignore").read_text()))
    kept: set[str] = set()
    for entry in os.scandir(root / folder):
        path = folder + entry.name
        if entry.name == ".git":
            continue
        if not entry.is_dir():
            kept |= set() if is_left_out(rules, path) else {path}
        elif not is_left_out(rules, f"{path}/"):
            kept |= kept_by_us(root, f"{path}/", rules)
    return kept


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    paths=PATHS, outer=FILES, inner=st.dictionaries(st.sampled_from(["a/", "b/", "a/b/"]), FILES, max_size=2)
)
def test_ignore_rules_keep_the_same_files_as_git(tmp_path_factory, paths, outer, inner):
    root = tmp_path_factory.mktemp("tree")
    subprocess.run(["git", "init", "-q", root], check=True, timeout=DEADLINE_S)
    for path in sorted(paths):
        if any(other.startswith(f"{path}/") for other in paths):
            continue  # a parent folder of another path cannot be a file
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    (root / ".nniignore").write_text(outer)
    for folder, text in inner.items():
        if (root / folder).is_dir():
            (root / folder / ".nniignore").write_text(text)
    assert kept_by_us(root) == kept_by_git(root)


@pytest.mark.parametrize(
    ("text", "path", "is_out"),
    [
        ("*\n!*/\n!*.py", "sub/train.py", False),
        ("*\n!*/\n!*.py", "sub/train.txt", True),
        ("data/", "data/", True),
        ("data/", "data", False),
        ("/data", "sub/data", False),
        ("# a comment\n\n*.log\r\n", "x.log", True),
        ("logs/**\n!logs/keep", "logs/", False),
        ("\\#file", "#file", True),
        ("name with spaces", "name with spaces", True),
        ("*.log", "b\udce9.log", True),
    ],
)
def test_common_gitignore_patterns_match_the_intended_paths(text, path, is_out):
    assert is_left_out([IgnoreRules.of("", text)], path) is is_out


@pytest.mark.parametrize("line", ["!", "\\", "a\\"])
def test_the_error_for_an_invalid_pattern_contains_the_line_number(line):
    with pytest.raises(ValueError, match=r"line 2, .* is not a gitignore pattern"):
        IgnoreRules.of("", f"*.log\n{line}\n")
