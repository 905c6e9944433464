"""Changes of an experiment, for a page that shows all of its trials.

A cursor (the version in the API) is the position of a client: the manager's process, the last change of a trial, and the
summary. One document has all changes since a cursor; for a cursor of another process it has all trials. The row of a trial is
encoded once per change, regardless of the number of clients. A client that can read windows of the trials gets a document without
trials in place of too many: it then reads what it shows from `trial_views`.
"""

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from itertools import islice

from starlette.exceptions import HTTPException

from nni_manager.engine import serializers
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.engine.trial_rows import row_view
from nni_manager.web.json_encoding import to_json
from trial_keeper.frozen_dataclass import dataclass

INTERVAL_S = 0.5
"""Minimum interval between documents."""
ELAPSED_INTERVAL_S = 5.0
"""Interval at which followers of a running experiment receive its elapsed time."""
KEEPALIVE_INTERVAL_S = 15.0
"""Interval of keep-alive comments to followers without changes."""
MAX_ROWS = 5_000
"""Maximum number of trials in a document for a client that can read windows of them."""
# Each follower uses one of 200 connections. A person usually has one or two visible pages.
MAX_FOLLOWERS = 50
# Encoding a row takes 15 µs; the event loop yields to other tasks after this many rows.
_ROWS_AT_ONCE = 500
_CURSOR = re.compile(r"([^.]*)\.([0-9]{1,15})\.([0-9]{1,15})")


def too_many_followers() -> HTTPException:
    """Error: no further event stream can be opened."""
    return HTTPException(
        503, f"cannot open an event stream: the limit of {MAX_FOLLOWERS} followers is reached; poll /changes"
    )


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of a client in the changes."""

    process: str
    revision: int
    summary: int

    def __str__(self) -> str:
        return f"{self.process}.{self.revision}.{self.summary}"

    @classmethod
    def read(cls, text: str) -> "Cursor | None":
        """Parse a cursor; None if the text is not one."""
        match = _CURSOR.fullmatch(text)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]))


class ChangeFeed:
    """Streams changes. Must run on the event loop that owns the experiment."""

    def __init__(self, snapshot: Callable[[], ExperimentSnapshot]) -> None:
        self._snapshot = snapshot
        self._process = secrets.token_hex(4)
        self._rows: dict[str, tuple[int, bytes]] = {}
        """The encoded row of each trial, with the revision it was encoded at."""
        self._summarised_at_s = float("-inf")
        self._seen = ""
        self._summaries = 0
        self._summary = b""
        self._revision = 0
        self.followers = 0
        """Number of open event streams."""

    async def delta(self, since: Cursor | None, *, may_window: bool = False) -> AsyncIterator[bytes]:
        """The document of changes since a cursor, in chunks; without a cursor, of everything.

        `may_window`: in place of more than `MAX_ROWS` trials, the document has `"windowed": true`.
        """
        snapshot = self._refreshed()
        version = Cursor(self._process, self._revision, self._summaries)
        is_known = (
            since is not None
            and since.process == self._process
            and since.revision <= self._revision
            and since.summary <= self._summaries
        )
        if not is_known:
            since = None
        revisions = snapshot.experiment.change_log.since(0 if since is None else since.revision)
        changed = list(islice(revisions, MAX_ROWS + 1) if may_window else revisions)
        is_windowed = may_window and len(changed) > MAX_ROWS
        if is_windowed:
            since, changed = None, []
        yield (
            f'{{"version":"{version}","reset":{"true" if since is None else "false"},'.encode()
            + (b'"windowed":true,' if is_windowed else b"")
            + b'"summary":'
            + self._summary
            + b',"trials":['
        )
        # Oldest change first.
        changed.reverse()
        for first in range(0, len(changed), _ROWS_AT_ONCE):
            if first:
                await asyncio.sleep(0)
                # Trials may have changed while other tasks ran or a slow client read. An outdated row would be cached under the
                # newer revision and sent to all later clients.
                snapshot = self._snapshot()
            rows = [self._row(snapshot, trial_id) for trial_id in changed[first : first + _ROWS_AT_ONCE]]
            yield (b"," if first else b"") + b",".join(rows)
        yield b"]}"

    async def follow(self, since: Cursor | None, *, may_window: bool = False) -> AsyncIterator[bytes]:
        """An endless text/event-stream: the changes since a cursor, then each new change."""
        sent_at_s = time.monotonic()
        while True:
            time_advances = self._refreshed().experiment.state.counts_time
            now = Cursor(self._process, self._revision, self._summaries)
            unsent_s = time.monotonic() - sent_at_s
            if since != now or (time_advances and unsent_s >= ELAPSED_INTERVAL_S):
                # Changes during encoding are part of the next document.
                document = b"".join([piece async for piece in self.delta(since, may_window=may_window)])
                yield b"event: changes\nid: %b\ndata: %b\n\n" % (str(now).encode(), document)
                since, sent_at_s = now, time.monotonic()
            elif unsent_s >= KEEPALIVE_INTERVAL_S:
                yield b": nothing new\n\n"
                sent_at_s = time.monotonic()
            await asyncio.sleep(INTERVAL_S)

    def _refreshed(self) -> ExperimentSnapshot:
        """The current experiment. Refreshes the summary at most every `INTERVAL_S` / 2: it costs as much as a hundred rows."""
        snapshot, now_s = self._snapshot(), time.monotonic()
        self._revision = snapshot.experiment.change_log.latest
        if now_s - self._summarised_at_s >= INTERVAL_S / 2:
            self._summarised_at_s = now_s
            summary = serializers.summary_view(snapshot)
            self._summary = to_json(summary)
            # The elapsed time alone is no change.
            seen = json.dumps(summary | {"elapsedS": None}, sort_keys=True)
            if seen != self._seen:
                self._seen, self._summaries = seen, self._summaries + 1
        return snapshot

    def _row(self, snapshot: ExperimentSnapshot, trial_id: str) -> bytes:
        revision = snapshot.experiment.change_log.of(trial_id)
        known = self._rows.get(trial_id)
        if known is None or known[0] != revision:
            known = revision, to_json(row_view(snapshot.experiment.trials[trial_id]))
            self._rows[trial_id] = known
        return known[1]
