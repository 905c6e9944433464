"""What trials wrote, as it lies on the disk: what was collected of it, or the workspace's own file, whichever has more.

Both have the same bytes at the same offsets. Files of the workspace are the trial's, so no link is followed and no pipe waited
for; and of a log only the range that is asked for is read, however long it is.
"""

import codecs
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nni_manager.errors import UserMistake
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.store import log_path
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.own_files import NotOwnFile, open_inside
from trial_keeper.wire.workspace import is_safe_name

LOGS = (Stream.STDOUT, Stream.STDERR, Stream.KEEPER)
LONGEST_RANGE_BYTES = 256 * 1024
# In less there may be no room for one character, and who asks for the next range would not come forward.
SHORTEST_RANGE_BYTES = 4
# The longest character of UTF-8 has four bytes.
_BYTES_BEFORE = 3


class LogReplaced(UserMistake):
    """cannot show the log: the trial has put something else in its place; look at it with care"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a log lies, below which folder that the trial does not choose, and of which attempt it is."""

    key: AttemptKey
    root: Path
    path: Path

    def open(self) -> int:
        """A descriptor of the file.

        Raises:
            LogReplaced: it is no file.
            OSError: it cannot be read.
        """
        try:
            return open_inside(self.root, self.path)
        except NotOwnFile as error:
            raise LogReplaced(
                f"cannot show {self.path}: the trial has put something else in its place ({error.strerror}); "
                "look at it with care"
            ) from error


@dataclass(frozen=True, slots=True)
class Range:
    """Some text of a log: it begins with byte `first`, and goes on with byte `following`. `size_bytes` is all of the log."""

    size_bytes: int
    first: int
    following: int
    text: str


def attempts_of(folder: ExperimentFolder, trial_id: str) -> list[AttemptKey]:
    """The attempts that have left anything, oldest first.

    Raises:
        OSError: the storage does not show them.
    """
    keys = set(folder.workspace.attempts_of(trial_id))
    for attempt in (folder.collected_logs / trial_id).glob("[0-9]*"):
        keys |= {AttemptKey(trial_id, int(attempt.name), task.name) for task in attempt.iterdir()}
    return sorted(keys, key=lambda key: (key.attempt, key.task))


def place_of(folder: ExperimentFolder, key: AttemptKey, stream: Stream) -> Place | None:
    """Where a log of an attempt lies, the fuller one of two; None: nowhere."""
    workspace, collected = folder.workspace, folder.collected_logs
    there = [
        Place(key, collected, log_path(collected, key, stream)),
        Place(key, workspace.root, workspace.attempt(key).stream(stream)),
    ]
    places = [place for place in there if place.path.is_file() or place.path.is_symlink()]
    return max(places, key=lambda place: place.path.lstat().st_size, default=None)


def newest_place(folder: ExperimentFolder, trial_id: str, stream: Stream) -> Place | None:
    """The same of the newest attempt that left this log; of several tasks, the first."""
    keys = sorted(attempts_of(folder, trial_id), key=lambda key: (-key.attempt, key.task))
    return next((place for key in keys if (place := place_of(folder, key, stream)) is not None), None)


def sizes_of(folder: ExperimentFolder, key: AttemptKey) -> dict[Stream, int]:
    """How many bytes there are of each log of an attempt; those that there are not are left out."""
    places = {stream: place_of(folder, key, stream) for stream in LOGS}
    return {stream: place.path.lstat().st_size for stream, place in places.items() if place is not None}


def read_range(
    folder: ExperimentFolder,
    trial_id: str,
    stream: Stream,
    *,
    first: int,
    most_bytes: int,
    attempt: int | None = None,
    task: str | None = None,
    is_whole: bool = False,
) -> Range:
    """Some of a log, of the newest attempt or of the one that is named; empty when there is none, or none there.

    `most_bytes`: at least SHORTEST_RANGE_BYTES. `first`: where it begins; less than 0 counts from the end. What is no UTF-8 is
    shown as U+FFFD. No character is cut: the text may begin up to three bytes later, and end so much earlier, unless the log
    ends there and `is_whole`: grows no more.

    Raises:
        LogReplaced: it is no file.
        OSError: the storage does not show it.
    """
    place = _place(folder, trial_id, stream, attempt, task)
    if place is None:
        return Range(0, 0, 0, "")
    with open(place.open(), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        first = max(size + first, 0) if first < 0 else min(first, size)
        before = os.pread(file.fileno(), min(first, _BYTES_BEFORE), first - min(first, _BYTES_BEFORE))
        content = os.pread(file.fileno(), min(most_bytes, size - first), first)
    rest = _rest_of_character(before, content)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(content[rest:], is_whole and first + len(content) == size)
    held = decoder.getstate()[0]
    return Range(size, first + rest, first + len(content) - len(held), text)


def _place(
    folder: ExperimentFolder, trial_id: str, stream: Stream, attempt: int | None, task: str | None
) -> Place | None:
    if attempt is None:
        return newest_place(folder, trial_id, stream)
    keys: Sequence[AttemptKey] = (
        [AttemptKey(trial_id, attempt, task)]
        if task is not None and is_safe_name(task)
        else [key for key in attempts_of(folder, trial_id) if key.attempt == attempt and task is None]
    )
    return next((place for key in keys if (place := place_of(folder, key, stream)) is not None), None)


def _rest_of_character(before: bytes, content: bytes) -> int:
    """How many bytes of the content belong to a character that begins before it."""
    for length in range(1, len(before) + 1):
        for more in range(1, min(len(content), 3) + 1):
            try:
                character = (before[-length:] + content[:more]).decode()
            except UnicodeDecodeError:
                continue
            if len(character) == 1:
                return more
    return 0
