"""The remarks of people on a trial or on an experiment: a set of tags, and a note."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass

MAX_TAGS = 20
MAX_TAG_LENGTH = 64
MAX_NOTE_LENGTH = 10_000
_MARKS = "-_.:/"
_TAG_FORM = f"a tag has 1 to {MAX_TAG_LENGTH} letters, digits and {' '.join(_MARKS)}, and starts with a letter or a digit"
# An error message quotes at most this much of a wrong value.
_MAX_QUOTED = 80


class RemarksInvalid(UserError, ValueError):
    """cannot use these tags or this note; see the message for their form"""


@dataclass(frozen=True, slots=True)
class Remarks:
    """Tags in alphabetical order, each once, and a note, which may have several lines; empty: none."""

    tags: tuple[str, ...] = ()
    note: str = ""

    @classmethod
    def of(cls, tags: Iterable[Any], note: Any) -> Remarks:
        """The remarks with these tags and this note.

        Raises:
            RemarksInvalid: a tag or the note has another form, or there are too many tags.
        """
        return RemarksChange.of(add=tags, note=note).applied_to(cls())

    def to_json(self) -> dict[str, Any]:
        """The fields `tags` and `note`."""
        return {"tags": list(self.tags), "note": self.note}


NO_REMARKS = Remarks()


@dataclass(frozen=True, slots=True)
class RemarksChange:
    """Tags to add and to remove, and a new note; `note` None: the note stays. A repeated change has no further effect."""

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    note: str | None = None

    @classmethod
    def of(cls, add: Iterable[Any] = (), remove: Iterable[Any] = (), note: Any = None) -> RemarksChange:
        """The change with these values, which may come from anywhere. A tag to remove may have any form.

        Raises:
            RemarksInvalid: a tag or the note has another form, or a tag is both added and removed.
        """
        change = cls(
            tuple(map(tag_of, add)),
            tuple(unicodedata.normalize("NFC", str(tag)) for tag in remove),
            None if note is None else _note_of(note),
        )
        for tag in change.add:
            if tag in change.remove:
                raise RemarksInvalid(f"cannot both add and remove tag {tag}; leave one out")
        return change

    @classmethod
    def from_json(cls, document: Any) -> RemarksChange:
        """The change that a document of the HTTP API describes.

        Raises:
            RemarksInvalid: it is another document, or the change is not valid.
        """
        names = {"addTags": list, "removeTags": list, "note": str}
        is_known = isinstance(document, Mapping) and document.keys() <= names.keys()
        if not is_known or not all(isinstance(value, names[name]) for name, value in document.items()):
            raise RemarksInvalid(
                'cannot change tags or note: the body is another document; send e.g. {"addTags": ["keep"], '
                '"removeTags": ["bad"], "note": "converges late"}, or a part of it'
            )
        return cls.of(document.get("addTags", ()), document.get("removeTags", ()), document.get("note"))

    def to_json(self) -> dict[str, Any]:
        """The document from which `from_json` makes this change."""
        note = {} if self.note is None else {"note": self.note}
        return {"addTags": list(self.add), "removeTags": list(self.remove), **note}

    def applied_to(self, remarks: Remarks) -> Remarks:
        """The remarks after the change.

        Raises:
            RemarksInvalid: there would be more than `MAX_TAGS` tags.
        """
        tags = sorted({*remarks.tags, *self.add} - {*self.remove})
        # A set from an earlier version with a higher limit may still shrink.
        if len(tags) > max(MAX_TAGS, len(remarks.tags)):
            raise RemarksInvalid(
                f"cannot add {', '.join(self.add)}: there would be {len(tags)} tags, and the limit is {MAX_TAGS}; "
                "remove some tags first"
            )
        return Remarks(tuple(tags), remarks.note if self.note is None else self.note)


def tag_of(text: Any) -> str:
    """The tag that a text spells, in Unicode's composed form: equal letters make equal tags.

    Raises:
        RemarksInvalid: it has another form.
    """
    tag = unicodedata.normalize("NFC", text) if isinstance(text, str) else ""
    if 0 < len(tag) <= MAX_TAG_LENGTH and tag[0].isalnum() and all(c.isalnum() or c in _MARKS for c in tag):
        return tag
    raise RemarksInvalid(f"cannot use tag {_quoted(text)}: {_TAG_FORM}; write it in that form, such as keep")


def _note_of(text: Any) -> str:
    if not isinstance(text, str):
        raise RemarksInvalid(f"cannot use note {_quoted(text)}: it is no text; write a text")
    note = text.replace("\r\n", "\n").strip()
    if len(note) > MAX_NOTE_LENGTH:
        raise RemarksInvalid(
            f"cannot use a note of {len(note)} characters: the limit is {MAX_NOTE_LENGTH}; shorten it"
        )
    # SQLite stores no text with half a surrogate pair, and some programs end a text at a NUL.
    wrong = next((c for c in note if c == "\0" or "\ud800" <= c <= "\udfff"), None)
    if wrong is not None:
        raise RemarksInvalid(f"cannot use a note with the character {wrong!a}; leave it out")
    return note


def _quoted(value: Any) -> str:
    return ascii(value)[:_MAX_QUOTED] if not isinstance(value, str) else repr(value[:_MAX_QUOTED])
