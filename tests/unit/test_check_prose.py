"""The prose checker: retired names and phrases, and long sentences, in each kind of file."""

import importlib.util
import re
from pathlib import Path

import pytest

PROSE = Path(__file__).parents[1] / "prose"
_spec = importlib.util.spec_from_file_location("check_prose", PROSE / "check_prose.py")
assert _spec is not None
assert _spec.loader is not None
check_prose = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_prose)

RETIRED = check_prose.Retired.parse("""\
# A comment.
[names]
ask_back -> revoke

[prose]
way out -> remedy
mend(?:s|ed)? -> fix
""")


def problems(name: str, content: str) -> list[str]:
    return list(check_prose.check(Path(name), content, RETIRED))


def test_the_report_of_a_retired_name_contains_its_line_and_its_replacement() -> None:
    assert problems("a.py", "x = 1\nask_back(x)\n") == ["a.py:2: retired name ask_back; use revoke"]
    assert problems("a.py", "ask_backwards = 'ask_back'\n") == []


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.md", "A message\nends with the way out.\n", 2),
        ("a.md", "It names a way\nout.\n", 1),
        ("a.py", '"""A module.\n\nIt mends files.\n"""\n', 3),
        ("a.py", "x = 1\ny = 2  # the way out\n", 2),
        ("a.py", 'class A:\n    x = 1\n    """Mended."""\n', 3),
        ("test_a.py", "\ndef test_a_message_ends_with_the_way_out():\n    pass\n", 2),
        ("test_a.py", "async def test_it_mends_a_file(): ...\n", 1),
        ("a.toml", 'a = 1\nb = "#"  # mended\n', 2),
        ("a.toml", 'a = """\n#\n"""\n# mended\n', 4),
        ("a.sql", "SELECT '--';\n-- the way out\n", 2),
        ("a.sql", "/* one\nmended */\n", 2),
        ("a.proto", 'string a = 1;  // mended\noption x = "//";\n', 1),
        ("a.proto", "/* one\n * mended */\n", 2),
    ],
)
def test_the_report_of_a_retired_phrase_contains_its_line(name: str, content: str, line: int) -> None:
    (problem,) = problems(name, content)
    assert re.fullmatch(
        rf"{name}:{line}: retired phrase '(the )?(way out|mended|Mended|mends)'; use \w+", problem
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.md", "The word `mended` is code.\n\n```\nmended\n```\n"),
        ("a.py", "x = 'mended'\n"),
        ("a.py", "def mends_a_file(): ...\n"),
        ("a.toml", "a = \"# mended\"\nb = '# mended'\n"),
        ("a.sql", "SELECT '-- mended', \"-- mended\";\n"),
        ("a.proto", 'option x = "// mended";\n'),
    ],
)
def test_code_and_quoted_text_are_not_checked_as_prose(name: str, content: str) -> None:
    assert problems(name, content) == []


def test_a_long_sentence_is_reported_in_documentation_and_docstrings_only() -> None:
    sentence = "word " * (check_prose.MAX_WORDS + 1)
    expected = f"{check_prose.MAX_WORDS + 1} words in one sentence"
    for name, content in (("a.md", f"Short.\n\n{sentence}.\n"), ("a.py", f'"""Short.\n\n{sentence}.\n"""\n')):
        (problem,) = problems(name, content)
        assert problem.startswith(f"{name}:3: {expected}")
    assert problems("a.py", f"# {sentence}\n") == []
    assert problems("a.sql", f"-- {sentence}\n") == []


def test_every_retired_phrase_is_a_valid_pattern_with_a_replacement() -> None:
    retired = check_prose.Retired.parse((PROSE / "retired.txt").read_text())
    assert all(retired.names.values())
    assert all(retired.prose.values())
    assert all(not phrase.match("") for phrase in retired.prose)
