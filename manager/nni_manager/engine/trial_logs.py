"""Reads the logs of trials: the collected copy or the file in the workspace, whichever is longer.

Both have the same bytes at the same offsets. Workspace files belong to the trial, so links are not followed and pipes do not
block. Only the requested range of a log is read, however long the log is.
"""

import codecs
import os
import stat
from operator import itemgetter
from pathlib import Path

from nni_manager.domain.attempts import Attempts, RegisteredAttempt
from nni_manager.engine.shared_files import is_signed
from nni_manager.errors import UserError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.writer import log_path
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.wire.attempt_ids import sort_key
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.safe_open import UnsafePath, open_beneath

LOGS = (Stream.STDOUT, Stream.STDERR, Stream.KEEPER)
MAX_RANGE_BYTES = 256 * 1024
# A smaller range may not contain a whole character, so a reader of successive ranges would not advance.
MIN_RANGE_BYTES = 4
# The longest character of UTF-8 has four bytes.
_BYTES_BEFORE = 3


class LogReplaced(UserError):
    """cannot show the log: the trial has replaced it by something that is not a regular file; inspect it with care"""


@dataclass(frozen=True, slots=True)
class LogLocation:
    """The path of a log, the trusted folder above it, and the attempt that wrote it."""

    attempt: RegisteredAttempt
    root: Path
    path: Path
    owned_as: Path | None = None
    """The directory of the attempt, whose owner the file must have."""

    def open(self) -> int:
        """Open the file and return its descriptor.

        Raises:
            LogReplaced: the path is not a regular file.
            OSError: the file cannot be read.
        """
        try:
            return open_beneath(self.root, self.path, owned_as=self.owned_as, may_be_shared=True)
        except UnsafePath as error:
            raise LogReplaced(
                f"cannot show {self.path}: the trial has replaced this log ({error.strerror}); inspect it with care"
            ) from error


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a log from byte `first`; the next part starts at byte `following`. `size_bytes`: the whole log."""

    size_bytes: int
    first: int
    following: int
    text: str


def attempts_of(folder: ExperimentFolder, trial_id: str) -> list[RegisteredAttempt]:
    """The attempts with files, with their numbers, sorted by start.

    Unregistered attempts get the next numbers if a keeper of the experiment has signed them.

    Raises:
        OSError: the storage cannot be read.
        StoreUnusable, StoreBusy: the database cannot be read.
    """
    with StoreReader(folder.database) as reader:
        attempts, stored = Attempts(reader.attempts(trial_id)), reader.experiment()
    workspace = folder.workspace
    collected = (folder.collected_logs / trial_id).glob("*/*")
    keys = {AttemptKey(trial_id, path.parent.name, path.name) for path in collected}
    try:
        keys.update(workspace.attempts_of(trial_id))
    except PermissionError:  # the container's umask closed them to this user
        if not keys:
            raise
    for key in sorted(keys, key=_by_start):
        if attempts.find(key) is None and is_signed(workspace, key, stored.experiment_id, stored.secret):
            attempts.register(key)
    left = [attempt for attempt in attempts.registered if attempt.key in keys]
    return sorted(left, key=lambda attempt: _by_start(attempt.key))


def _by_start(key: AttemptKey) -> tuple[tuple[int, str], str]:
    return sort_key(key.attempt_id), key.task


def location_of(folder: ExperimentFolder, attempt: RegisteredAttempt, stream: Stream) -> LogLocation | None:
    """The location of a log of an attempt: the longer one of its two files; None: no file exists.

    Raises:
        OSError: the storage cannot be read, and there is no collected copy.
    """
    key, workspace, collected = attempt.key, folder.workspace, folder.collected_logs
    candidates = [
        LogLocation(attempt, collected, log_path(collected, key, stream)),
        LogLocation(
            attempt, workspace.root, workspace.attempt(key).stream(stream), workspace.attempt(key).path
        ),
    ]
    found: list[tuple[int, LogLocation]] = []
    for location in candidates:
        try:
            status = location.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            if not found:
                raise
            continue
        is_closed = stat.S_ISREG(status.st_mode) and not os.access(location.path, os.R_OK)
        if is_closed and found:
            continue
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            found.append((status.st_size, location))
    return max(found, key=itemgetter(0))[1] if found else None


def log_location(
    folder: ExperimentFolder,
    trial_id: str,
    stream: Stream,
    attempt: int | None = None,
    task: str | None = None,
) -> LogLocation | None:
    """The location of the log of the newest attempt that has a log, or of attempt number `attempt`; of several tasks, the first.

    `task`: only this task of the numbered attempt.
    """
    attempts = attempts_of(folder, trial_id)
    if attempt is None:
        attempts.sort(key=lambda each: (each.is_lost, -each.number, each.key.task))
    else:
        attempts = [each for each in attempts if each.number == attempt and task in (None, each.key.task)]
    locations = (location_of(folder, each, stream) for each in attempts)
    return next((location for location in locations if location is not None), None)


def output_location(folder: ExperimentFolder, trial_id: str, name: str) -> LogLocation | None:
    """The location of a file that the newest attempt may have written to its output directory; None: there is no attempt."""
    attempts = attempts_of(folder, trial_id)
    if not attempts:
        return None
    workspace = folder.workspace
    directory = workspace.attempt(attempts[-1].key)
    return LogLocation(attempts[-1], workspace.root, directory.output / name, directory.path)


def sizes_of(folder: ExperimentFolder, attempt: RegisteredAttempt) -> dict[Stream, int]:
    """The size in bytes of each existing log of an attempt."""
    locations = {stream: location_of(folder, attempt, stream) for stream in LOGS}
    return {
        stream: location.path.lstat().st_size
        for stream, location in locations.items()
        if location is not None
    }


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
    """A part of a log of the given attempt, or of the newest one; empty if there is no log, or no data in the range.

    `most_bytes`: at least MIN_RANGE_BYTES. `first`: the start; a negative number counts from the end. Invalid UTF-8 is shown as
    U+FFFD. Characters are never split: the text may start up to three bytes later, and end up to three bytes earlier. The
    text includes an incomplete character at the end of the log if `is_whole` (the log no longer grows).

    Raises:
        LogReplaced: the path is not a regular file.
        OSError: the storage cannot be read.
    """
    location = log_location(folder, trial_id, stream, attempt, task)
    if location is None:
        return Range(0, 0, 0, "")
    with open(location.open(), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        first = max(size + first, 0) if first < 0 else min(first, size)
        before = os.pread(file.fileno(), min(first, _BYTES_BEFORE), first - min(first, _BYTES_BEFORE))
        content = os.pread(file.fileno(), min(most_bytes, size - first), first)
    rest = _rest_of_character(before, content)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(content[rest:], is_whole and first + len(content) == size)
    held = decoder.getstate()[0]
    return Range(size, first + rest, first + len(content) - len(held), text)


def _rest_of_character(before: bytes, content: bytes) -> int:
    """The number of bytes at the start of `content` that belong to a character which starts before it."""
    for length in range(1, len(before) + 1):
        for more in range(1, min(len(content), 3) + 1):
            try:
                character = (before[-length:] + content[:more]).decode()
            except UnicodeDecodeError:
                continue
            if len(character) == 1:
                return more
    return 0
