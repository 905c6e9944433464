"""`.nniignore`: excludes files of a code folder, by the rules of `.gitignore`."""

import re
from collections.abc import Iterable

from trial_keeper.frozen_dataclass import dataclass

IGNORE_FILE = ".nniignore"


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The patterns of one `.nniignore`. They match paths below its folder, `folder` ("" or ending with /)."""

    folder: str
    _rules: tuple[tuple[re.Pattern[str], bool], ...]

    @classmethod
    def of(cls, folder: str, text: str) -> "IgnoreRules":
        """Parse the file's text.

        Raises:
            ValueError: a line is not a pattern; the message has its number.
        """
        from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern  # few code folders have this file

        rules = []
        for number, line in enumerate(re.split("\r?\n", text), 1):
            try:
                # In git `x/**/` matches the folders below x, in pathspec x itself.
                pattern = GitIgnoreSpecPattern(f"{line}*/" if line.endswith("/**/") else line)
            except ValueError as error:
                raise ValueError(f"line {number}, {line!r}, is not a gitignore pattern") from error
            if pattern.include is not None and pattern.regex is not None:
                rules.append((pattern.regex, pattern.include))
        # The last line that matches a path decides.
        return cls(folder, tuple(reversed(rules)))

    def verdict(self, path: str) -> bool | None:
        """True if the path is excluded, False if it is included; None if no line matches. A folder's path ends with /."""
        below = path.removeprefix(self.folder)
        return next((is_out for regex, is_out in self._rules if _matches(regex, below)), None)


def is_left_out(rules: Iterable[IgnoreRules], path: str) -> bool:
    """True if these rules exclude the path. The outermost folder's rules come first; inner rules override them."""
    verdicts = (each.verdict(path) for each in reversed(tuple(rules)))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _matches(regex: re.Pattern[str], path: str) -> bool:
    """True if a pattern matches this path itself, and not only a parent folder: parents were checked before.

    pathspec's expressions also match everything below a folder. Their one group is the slash after the matched name.
    """
    for match in regex.finditer(path):
        if match.lastindex is not None:
            if match.end() == len(path):
                return True
        elif match.end() < len(path) or not path.endswith("/"):
            return True  # `folder/**` matches the folder's contents, not the folder
    return False
