"""`.nniignore`: which files of a code folder are left out, by the rules of `.gitignore`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

IGNORE_FILE = ".nniignore"


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The lines of one such file. They speak of what lies below the folder that holds it, `folder` ("" or ending with /)."""

    folder: str
    _rules: tuple[tuple[re.Pattern[str], bool], ...]

    @classmethod
    def of(cls, folder: str, text: str) -> "IgnoreRules":
        """Read the file's text.

        Raises:
            ValueError: a line is no pattern; names it with its number.
        """
        rules = []
        for number, line in enumerate(re.split("\r?\n", text), 1):
            try:
                # git means the folders below by `x/**/`, pathspec x itself.
                pattern = GitIgnoreSpecPattern(f"{line}*/" if line.endswith("/**/") else line)
            except ValueError as error:
                raise ValueError(f"line {number}, {line!r}, is no pattern of gitignore") from error
            if pattern.include is not None and pattern.regex is not None:
                rules.append((pattern.regex, pattern.include))
        # The last line that speaks of a path decides.
        return cls(folder, tuple(reversed(rules)))

    def verdict(self, path: str) -> bool | None:
        """Whether the path is left out; None if no line speaks of it. The path of a folder ends with /."""
        below = path.removeprefix(self.folder)
        return next((is_out for regex, is_out in self._rules if _speaks_of(regex, below)), None)


def is_left_out(rules: Iterable[IgnoreRules], path: str) -> bool:
    """Whether the path is left out by these rules, the outermost folder's first: an inner file overrides an outer one."""
    verdicts = (each.verdict(path) for each in reversed(tuple(rules)))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _speaks_of(regex: re.Pattern[str], path: str) -> bool:
    """Whether a pattern means this path itself, and not only a folder that it lies in: those were asked about before.

    pathspec's expressions match everything below a folder too. Their one group is the slash after what the pattern names.
    """
    for match in regex.finditer(path):
        if match.lastindex is not None:
            if match.end() == len(path):
                return True
        elif match.end() < len(path) or not path.endswith("/"):
            return True  # `folder/**` means what lies in the folder, and not the folder
    return False
