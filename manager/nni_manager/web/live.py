"""What is new of an experiment, for a page that shows all of its trials.

A version names what somebody has seen: of which manager's process, up to which change of a trial, and which summary. What has
changed since is told in one document; asked by a version of another process, all is told. Rows are written once for each change
of their trial, however many look.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from nni_manager.engine import views
from nni_manager.engine.picture import Picture
from nni_manager.web.json_text import to_json

EVERY_S = 0.5
"""How often there may be a document."""
TIME_GOES_ON_S = 5.0
"""After so long a follower of an experiment that goes on is told the time it has taken."""
STILL_THERE_S = 15.0
"""After so long without anything, a follower is told that nothing is new."""
# Each holds a connection, of which there are 200. A person has a page or two in sight.
MOST_FOLLOWERS = 50
# One takes 15 µs to write; between so many others have their turn.
_ROWS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Version:
    """What somebody has seen."""

    process: str
    revision: int
    summary: int

    def __str__(self) -> str:
        return f"{self.process}.{self.revision}.{self.summary}"

    @classmethod
    def read(cls, text: str) -> "Version | None":
        """None: this is none."""
        process, *numbers = text.split(".")
        if len(numbers) != 2 or not all(
            each.isascii() and each.isdecimal() and len(each) < 16 for each in numbers
        ):
            return None
        return cls(process, int(numbers[0]), int(numbers[1]))


class Live:
    """Tells what is new. Lives on the loop of what it looks at."""

    def __init__(self, look: Callable[[], Picture]) -> None:
        self._look = look
        self._process = secrets.token_hex(4)
        self._rows: dict[str, tuple[int, bytes]] = {}
        """The row of each trial, and of which of its changes it is."""
        self._looked_at_s = float("-inf")
        self._seen = ""
        self._summaries = 0
        self._summary = b""
        self._revision = 0
        self.followers = 0

    async def news(self, since: Version | None) -> AsyncIterator[bytes]:
        """The document of what has changed, in pieces; without `since`, of everything."""
        picture = self._glance()
        if not self._knows(since):
            since = None
        version = Version(self._process, self._revision, self._summaries)
        yield (
            f'{{"version":"{version}","reset":{"true" if since is None else "false"},"summary":'.encode()
            + self._summary
            + b',"trials":['
        )
        changed = list(picture.experiment.revisions.since(0 if since is None else since.revision))
        # In the order of the changes.
        changed.reverse()
        for first in range(0, len(changed), _ROWS_AT_ONCE):
            if first:
                await asyncio.sleep(0)
                # While others had their turn, or a slow client took what there was, trials may have changed: a row of before
                # would be kept as that of the change, and told to all who ask later.
                picture = self._look()
            rows = [self._row(picture, trial_id) for trial_id in changed[first : first + _ROWS_AT_ONCE]]
            yield (b"," if first else b"") + b",".join(rows)
        yield b"]}"

    async def follow(self, since: Version | None) -> AsyncIterator[bytes]:
        """Events of a text/event-stream, without end: all that is new, and then whatever becomes so."""
        told_at_s = time.monotonic()
        self.followers += 1
        try:
            while True:
                goes_on = self._glance().experiment.state.counts_time
                now = Version(self._process, self._revision, self._summaries)
                silent_s = time.monotonic() - told_at_s
                if since != now or (goes_on and silent_s >= TIME_GOES_ON_S):
                    # What changes while it is written is told with the next one.
                    document = b"".join([piece async for piece in self.news(since)])
                    yield b"event: changes\nid: %b\ndata: %b\n\n" % (str(now).encode(), document)
                    since, told_at_s = now, time.monotonic()
                elif silent_s >= STILL_THERE_S:
                    yield b": nothing new\n\n"
                    told_at_s = time.monotonic()
                await asyncio.sleep(EVERY_S)
        finally:
            self.followers -= 1

    def _knows(self, version: Version | None) -> bool:
        return (
            version is not None
            and version.process == self._process
            and version.revision <= self._revision
            and version.summary <= self._summaries
        )

    def _glance(self) -> Picture:
        """The experiment now, and its summary as of at most `EVERY_S` ago: it costs as much as a hundred rows."""
        picture, now_s = self._look(), time.monotonic()
        self._revision = picture.experiment.revisions.latest
        if now_s - self._looked_at_s >= EVERY_S / 2:
            self._looked_at_s = now_s
            summary = views.summary_view(picture)
            self._summary = to_json(summary)
            seen = json.dumps(_without_clocks(summary), sort_keys=True)
            if seen != self._seen:
                self._seen, self._summaries = seen, self._summaries + 1
        return picture

    def _row(self, picture: Picture, trial_id: str) -> bytes:
        revision = picture.experiment.revisions.of(trial_id)
        known = self._rows.get(trial_id)
        if known is None or known[0] != revision:
            known = revision, to_json(views.row_view(picture.experiment.trials[trial_id]))
            self._rows[trial_id] = known
        return known[1]


def _without_clocks(summary: dict[str, Any]) -> dict[str, Any]:
    """What makes a summary another one: time passes by itself."""
    return {name: value for name, value in summary.items() if name != "elapsedS"}
