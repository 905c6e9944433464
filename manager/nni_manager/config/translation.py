"""Moves the values of a file to their paths in the second schema, and diagnoses unknown keys. `v1.py` and `v2.py` extend it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from nni_manager.config.diagnostics import (
    MAX_DIAGNOSTICS,
    Diagnostic,
    KeyPath,
    folded,
    ref,
    remedy_for_unknown,
    shown,
)
from nni_manager.config.dialect import EACH, Dialect, Keys, with_indices
from nni_manager.config.document import Document
from nni_manager.config.platforms import UNSUPPORTED

_SNAKE_CASE = re.compile("[^_]+(_[^_]+)+")
# NNI's default image.
DEFAULT_IMAGE = "msranni/nni:latest"
# The arguments that users most often indent too little.
_OF_ALGORITHMS = ("optimize_mode", "seed")


class Translation:
    """One pass over one file. `leaves` is the path in the second schema of each key, by its path in the file.

    `sections` is the same for mappings; a section of the file that is absent there has no counterpart. `aliases` are keys
    that messages do not suggest. `knows_any_case`: keys are known in any spelling, not only in snake_case.
    """

    knows_any_case: ClassVar = False

    def __init__(
        self, document: Document, dialect: Dialect, leaves: Mapping[Keys, Keys], sections: Mapping[Keys, Keys]
    ) -> None:
        self.document = document
        self.dialect = dialect
        self.leaves = leaves
        self.sections = sections
        self.aliases: Mapping[Keys, Keys] = {}
        # The keys of each mapping of the file, in order.
        self.children: dict[Keys, dict[str, None]] = {}
        for path in (*leaves, *sections):
            for length in range(len(path)):
                self.children.setdefault(path[:length], {})[path[length]] = None
        self.value: dict[str, Any] = {"trainingService": {}}
        self.diagnostics: list[Diagnostic] = list(document.diagnostics)
        self.warnings: list[str] = []
        self.refused: set[Keys] = set()

    def document_of_v2(self) -> Document:
        """The document with its value in the second schema."""
        return dataclasses.replace(
            self.document,
            value=self.value,
            dialect=self.dialect,
            diagnostics=tuple(self.diagnostics),
            warnings=tuple(self.warnings),
            refused=frozenset(self.refused),
        )

    def move(self, value: Mapping[Any, Any], key_path: Keys = (), here: KeyPath = ()) -> None:
        """Move the values of the mapping at `key_path`; `here` is the same path with the indices of items."""
        if key_path in self.sections:
            put(self.value, with_indices(self.sections[key_path], here), {})
        seen: set[str] = set()
        for key, item in value.items():
            name = self.known_name(key, key_path)
            if name in seen:
                self.refuse((*here, str(key)), f"it is another spelling of {name}; keep one of the two")
                continue
            seen.add(name)
            self._move_key(item, (*key_path, name), (*here, name))

    def _move_key(self, item: Any, key_path: Keys, here: KeyPath) -> None:
        is_list = (*key_path, EACH) in self.children
        if key_path in self.leaves:
            self.put_value(self.leaves[key_path], key_path, here, item)
        elif key_path not in self.children:
            self.refuse_unknown(key_path, here, item)
        elif is_list and isinstance(item, list) and item:
            for index, each in enumerate(item):
                is_mapping = isinstance(each, Mapping)
                v2 = with_indices((*self.sections[key_path], EACH), (*here, index))
                put(self.value, v2, {} if is_mapping else each)
                if is_mapping:
                    self.move(each, (*key_path, EACH), (*here, index))
        elif isinstance(item, Mapping) and not is_list:
            self.move(item, key_path, here)
        elif key_path in self.sections:
            self.put_value(self.sections[key_path], key_path, here, item)
        else:
            self.refuse_section(key_path, here, item)

    def put_value(self, v2: Keys, key_path: Keys, here: KeyPath, item: Any) -> None:
        """Move a value to its path `v2`."""
        put(self.value, with_indices(v2, here), item)

    def answer(self, key_path: Keys, here: KeyPath, item: Any) -> str | None:
        """The reason against an unknown key, with the remedy; None: no particular one, empty: ignore the key."""
        raise NotImplementedError

    def refuse_section(self, key_path: Keys, here: KeyPath, item: Any) -> None:
        """Refuse a value that is not a mapping."""
        raise NotImplementedError

    def set_default_image(self, section: dict[str, Any], key_path: KeyPath) -> None:
        """Set NNI's image in the section at `key_path`, with a warning."""
        section["dockerImage"] = DEFAULT_IMAGE
        self.warn(
            f"{ref((*key_path, 'dockerImage'))} is not set: NNI's default {DEFAULT_IMAGE} is used, which lacks trial-keeper; "
            "`nnictl help images` describes how to build an image with trial-keeper"
        )

    def known_name(self, key: Any, key_path: Keys) -> str:
        """The known key of the mapping at `key_path` that differs from `key` at most in its spelling; else `key` itself."""
        if not isinstance(key, str) or not (self.knows_any_case or _SNAKE_CASE.fullmatch(key)):
            return str(key)
        known = {folded(name): name for name in self.children.get(key_path, ())}
        return known.get(folded(key), key)

    def refuse_platform(self, here: KeyPath, word: Any, known: Collection[str]) -> None:
        """Refuse the name of an unknown platform; the schema reports other values than text."""
        if not isinstance(word, str) or word in known:
            return
        if word in UNSUPPORTED:
            self.refuse(here, f"{shown(word)}: {UNSUPPORTED[word].reason}")
        else:
            remedy = remedy_for_unknown(word, known, otherwise=", or install the package that provides it")
            self.refuse(here, f"{shown(word)} is not a platform; {remedy}")

    def refuse_unknown(self, key_path: Keys, here: KeyPath, item: Any) -> None:
        """Refuse a key that is not in the table."""
        answer = self.answer(key_path, here, item)
        if answer is None:
            last, above = key_path[-1], key_path[:-1]
            known = [name for name in self.children[above] if (*above, name) not in self.aliases]
            homes = [name for name in known if last in self.children.get((*above, name), ())]
            if homes:
                one = homes[0] if len(homes) == 1 else f"one of {', '.join(homes)}"
                answer = f"it is not a key of this section; indent it below {one}"
            elif last in _OF_ALGORITHMS and "classArgs" in known:
                answer = "it is an argument of the algorithm; indent it below classArgs"
            else:
                remedy = remedy_for_unknown(last, known, verb="remove it or use")
                answer = f"there is no such key here; {remedy}"
        if answer:
            self.refuse(here, answer)

    def warn(self, message: str) -> None:
        """Record a warning."""
        self.warnings.append(self.document.dialect.text(message))

    def refuse(self, here: KeyPath, why: str, cannot: str = "use") -> None:
        """Record an error of a key of the file; `why` ends with the remedy."""
        is_refused = any(here[: len(section)] == section for section in self.refused)
        if not is_refused and len(self.diagnostics) < MAX_DIAGNOSTICS:
            message = f"cannot {cannot} {ref(here)}: {self.dialect.text(why)}"
            self.diagnostics.append(self.document.diagnostic(here, message))


def put(value: dict[str, Any], path: KeyPath, item: Any) -> None:
    """Set the item at a path and create the mappings and lists above it. An empty mapping replaces no existing mapping."""
    inside: Any = value
    for step, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(inside, list) and isinstance(step, int):
            inside += [{} for _ in range(step + 1 - len(inside))]
        if following is None:
            if item != {} or not isinstance(_at(inside, step), dict):
                inside[step] = item
            return
        if not isinstance(_at(inside, step), dict | list):
            inside[step] = [] if isinstance(following, int) else {}
        inside = inside[step]


def _at(inside: Any, step: str | int) -> Any:
    if isinstance(inside, list):
        return inside[step] if isinstance(step, int) and step < len(inside) else None
    return inside.get(step)
