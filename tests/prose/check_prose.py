"""Fails when a text uses a retired word, or a sentence of the documentation or of a docstring has more than 35 words.

Usage: check_prose.py [FILE ...]; without files, all that git tracks. retired.txt has a line `word -> replacement` for each
retired name and phrase. Names, below [names], are compared as whole identifiers. Phrases, below [prose], are regular expressions.
They apply to documentation, docstrings, comments (.py, .toml, .sql, .proto) and test names, with spaces for underscores.
"""

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MAX_WORDS = 35
# The check skips the changelog, generated code, and the files that list retired words.
EXEMPT = ("CHANGELOG.md", "_pb2", "tests/prose/", "tests/golden/", "tests/unit/stores/")

_CODE_BLOCK = re.compile(r"^(?:```.*?^```|~~~.*?^~~~|>>> .*?$(?:\n\.\.\. .*?$)*)", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"``?[^`\n]+``?|<[^>\n]+>|\]\([^)\n]*\)")
# Each pattern matches quoted text or a comment, whichever comes first.
_STRING_OR_COMMENT = {
    ".toml": re.compile(
        r"\"\"\".*?\"\"\"|'''.*?'''|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|(?P<comment>#[^\n]*)", re.DOTALL
    ),
    ".sql": re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|(?P<comment>--[^\n]*|/\*.*?\*/)", re.DOTALL),
    ".proto": re.compile(
        r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|(?P<comment>//[^\n]*|/\*.*?\*/)", re.DOTALL
    ),
}
# A table row, a heading, a list item, an indented line and an empty line each end a sentence.
_BREAK = re.compile(r"\n\s*\n|\n(?= {4})|\n\s*(?=[-*|#]|\d+\. |\w+:\s|Raises:|Source:)|\|")
_END = re.compile(r"(?<=[.!?;:])\s+(?=[A-Z`(\"'*\[\d])")
_WORD = re.compile(r"[A-Za-z0-9][\w'’.-]*")


class Text(NamedTuple):
    """A piece of prose, and the number of its first line in its file."""

    line: int
    text: str
    is_sentence: bool
    """False for a comment or a test name, whose length is not checked."""


class Retired(NamedTuple):
    """Retired names and phrases with their replacements."""

    names: dict[str, str]
    prose: dict[re.Pattern[str], str]

    @classmethod
    def parse(cls, content: str) -> "Retired":
        """The lists of retired.txt."""
        found: dict[str, dict[str, str]] = {"[names]": {}, "[prose]": {}}
        section = ""
        for line in content.splitlines():
            if line in found:
                section = line
            elif line and not line.startswith("#"):
                word, _, replacement = line.partition(" -> ")
                found[section][word] = replacement
        # A retired phrase may be split between two lines, so each space matches any whitespace.
        phrases = {word.replace(" ", r"\s+"): new for word, new in found["[prose]"].items()}
        prose = {re.compile(rf"\b(?:{word})\b", re.IGNORECASE): new for word, new in phrases.items()}
        return cls(found["[names]"], prose)


def check(name: Path, content: str, retired: Retired) -> Iterator[str]:
    """A line for each problem of a file."""
    if name.suffix == ".py":
        for line, word in names_of_python(content):
            if word in retired.names:
                yield f"{name}:{line}: retired name {word}; use {retired.names[word]}"
    for text in texts_of(name.suffix, content):
        plain = _INLINE_CODE.sub(lambda code: " `code`" + "\n" * code.group().count("\n"), text.text)
        for phrase, replacement in retired.prose.items():
            for found in phrase.finditer(plain):
                line = text.line + plain.count("\n", 0, found.start())
                yield f"{name}:{line}: retired phrase {' '.join(found.group().split())!r}; use {replacement}"
        if text.is_sentence:
            for line, words, sentence in long_sentences(plain):
                yield f"{name}:{text.line + line}: {words} words in one sentence, at most {MAX_WORDS}: {sentence[:60]}..."


def long_sentences(text: str) -> Iterator[tuple[int, int, str]]:
    """The line, the number of words and the text of each sentence that is too long. Lines count from 0."""
    at = 0
    for block in _BREAK.split(text):
        for sentence in _END.split(block):
            words = len(_WORD.findall(sentence))
            if words > MAX_WORDS:
                start = text.find(sentence, at)
                yield text.count("\n", 0, start), words, " ".join(sentence.split())
                at = start


def texts_of(suffix: str, content: str) -> Iterator[Text]:
    """The prose of a file, by the suffix of its name."""
    if suffix == ".py":
        yield from texts_of_python(content)
    elif suffix in _STRING_OR_COMMENT:
        for found in _STRING_OR_COMMENT[suffix].finditer(content):
            if found["comment"]:
                yield Text(content.count("\n", 0, found.start()) + 1, found["comment"], False)
    else:
        yield Text(1, _without_code_blocks(content), True)


def texts_of_python(content: str) -> Iterator[Text]:
    """The docstrings, comments and test names of a module, and the strings that document attributes."""
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield Text(node.lineno, node.name.replace("_", " "), False)
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield Text(node.lineno, _without_code_blocks(inspect.cleandoc(node.value.value)), True)
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string, False)


def _without_code_blocks(text: str) -> str:
    return _CODE_BLOCK.sub(lambda block: "\n" * block.group().count("\n"), text)


def names_of_python(content: str) -> Iterator[tuple[int, str]]:
    """Each identifier with its line."""
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def main(arguments: list[str]) -> int:
    """Check the files; return the exit code."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.toml", "*.sql", "*.proto"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    files = [Path(each).resolve() for each in arguments] or [ROOT / each for each in tracked]
    retired = Retired.parse(Path(__file__).with_name("retired.txt").read_text())
    problems = [
        problem
        for path in files
        if path.exists() and not any(part in str(path.relative_to(ROOT)) for part in EXEMPT)
        for problem in check(path.relative_to(ROOT), path.read_text(), retired)
    ]
    print("\n".join(problems) if problems else f"the prose of {len(files)} files is in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
