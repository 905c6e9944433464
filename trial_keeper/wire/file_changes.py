"""The keeper's warnings about a stream's file that was changed other than by appending."""

from enum import Enum

from trial_keeper.wire.messages import Stream


class FileChange(Enum):
    """The kind of change. The value completes the sentence "its metrics file was …"."""

    TRUNCATED = "truncated: what was written to it afterwards may be missing"
    REPLACED = "removed or replaced: what was written to a new file is not collected"
    REWRITTEN = "rewritten: bytes that were collected have changed, and what was written in their place may be missing"


METRICS_FILE_WAS = "its metrics file was "
"""The start of a warning about the metrics file."""


def file_warning(stream: Stream, change: FileChange) -> str:
    """Return the warning as one readable line."""
    return f"its {stream.value} file was {change.value}; let the training code only append to it"
