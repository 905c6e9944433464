"""The names of an experiment's keys in each kind of source: a file of NNI's first or second schema, or Python.

Checks name each key by its path in the second schema. In a message, `ref` marks a key; a dialect renders it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from nni_manager.config.diagnostics import MARK, KeyPath, key_of, steps_of
from trial_keeper.frozen_dataclass import dataclass

Keys = tuple[str, ...]
"""A path of keys; `*` replaces the index of an item."""
EACH = "*"
SERVICE: Keys = ("trainingService",)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of keys in files. `names` has the path of each key whose path is not that of the second schema.

    `examples` replaces examples of values by other text, and `values` replaces values.
    """

    space: ClassVar = ("searchSpaceFile", "the path of a JSON file", "search_space.json")
    """The key that messages suggest for the search space, what it must be, and an example."""
    names: Mapping[Keys, Keys] = field(default_factory=dict)
    examples: Mapping[Keys, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)

    def path(self, key_path: KeyPath) -> KeyPath:
        """The path in the source of the key at `key_path`."""
        for length in range(len(key_path), 0, -1):
            if (there := self.names.get(without_indices(key_path[:length]))) is not None:
                return (*with_indices(there, key_path[:length]), *key_path[length:])
        return tuple(key_path)

    def key(self, key_path: KeyPath) -> str:
        """The dotted name of the key at `key_path`."""
        return key_of(self.path(key_path))

    def example(self, key_path: KeyPath, written: str) -> str:
        """The notation of a value. `written` is the value in YAML, with the keys of the second schema."""
        above = without_indices(key_path)
        if above in self.examples:
            return self.examples[above]
        lasts = {v2[-1]: there[-1] for v2, there in self.names.items() if v2[: len(above)] == above != v2}
        inner = re.sub(r"\w+(?=: )", lambda found: lasts.get(found[0], found[0]), written)
        return f"{self.path(key_path)[-1]}: {self.values.get(inner, inner)}"

    def text(self, message: str) -> str:
        """The message with each marked key, example and value in the terms of this source."""
        return MARK.sub(self._rendered, message)

    def _rendered(self, found: re.Match[str]) -> str:
        if found["value"] is not None:
            return self.values.get(found["value"], found["value"])
        key_path = steps_of(found["key"])
        return self.key(key_path) if found["example"] is None else self.example(key_path, found["example"])


def without_indices(path: KeyPath) -> Keys:
    """A path with `*` in place of the indices of items."""
    return tuple(EACH if isinstance(step, int) else step for step in path)


def with_indices(key_path: Keys, path: KeyPath) -> KeyPath:
    """The path with each `*` replaced by the indices in `path`, in order."""
    indices = iter([step for step in path if isinstance(step, int)])
    return tuple(next(indices, 0) if step == EACH else step for step in key_path)


OF_FILES = Dialect()
"""The names of files in the second schema, and of other files, whose keys have one name."""
