"""Windows and samples of the trials of a large experiment, for a page that does not hold all of them.

A view is the list of the trials that match a query, in order. It is computed in a thread, and kept: the next window of a table
costs no sort. After changes, only the changed trials are filtered and inserted.
"""

import asyncio
from bisect import insort
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from nni_manager.domain.trial import Trial
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.engine.trial_query import Query, names_in, parameter_text
from nni_manager.engine.trial_rows import row_view
from nni_manager.engine.trial_sample import sampled
from nni_manager.web.json_encoding import to_json

MAX_LIMIT = 5000
"""Maximum number of trials in one document."""
# Each holds 8 bytes per trial.
_MAX_VIEWS = 8
# More changes cost more than a new sort in a thread; fewer block the event loop for some milliseconds.
_MAX_INSERTED = 200
_TEXTS_TIMEOUT_S = 300.0
"""The searched texts are kept so long after the last search: some hundred bytes per trial, and 20 µs to compute."""
# Encoding a row takes 15 µs; the event loop yields to other tasks after this many rows.
_ROWS_AT_ONCE = 500
# A whole row may have a megabyte, so it is encoded in a thread, and few are in memory at a time.
_WHOLE_ROWS_AT_ONCE = 20


@dataclass(slots=True)
class _View:
    """The ids of the trials of a query at a revision."""

    revision: int
    ids: list[str]
    place: dict[str, int] | None = None
    """The index of each id; None: not needed yet."""
    results: int = 0
    """Of a sample: the number of trials that have ended with a result, out of which it was drawn."""


class TrialViews:
    """Views of one experiment. Must run on the event loop that owns it."""

    def __init__(self, snapshot: Callable[[], ExperimentSnapshot]) -> None:
        self._snapshot = snapshot
        self._views: OrderedDict[Query, _View] = OrderedDict()
        self._samples: OrderedDict[tuple[Query, int], _View] = OrderedDict()
        self._lock = asyncio.Lock()
        self._texts: dict[str, str] = {}
        self._texts_timer: asyncio.TimerHandle | None = None
        self._named_revision = 0
        self._parameters: dict[str, None] = {}
        self._metrics: dict[str, None] = {}
        self._has_tags = False

    async def window(
        self, query: Query, first: int, limit: int, around: str | None = None, *, is_whole: bool = False
    ) -> AsyncIterator[bytes]:
        """A range of a view as a JSON document, in chunks. `around`: a trial that the range has in its middle, if it matches.

        `is_whole`: see `row_view`.
        """
        view = await self._view(query)
        place = None
        if around is not None:
            if view.place is None:
                view.place = {trial_id: index for index, trial_id in enumerate(view.ids)}
            place = view.place.get(around)
            first = max(0, place - limit // 2) if place is not None else first
        head = {"matching": len(view.ids), "offset": first, "place": place}
        return self._document(head, view.ids[first : first + limit], is_whole=is_whole)

    async def sample(self, query: Query, limit: int) -> AsyncIterator[bytes]:
        """A sample of the trials that match, as a JSON document in chunks, with the names of all parameters and metrics.

        `hasTags`: true once a trial had a tag.
        """
        query = replace(query, column="seq", is_descending=False)
        view = await self._view(query)
        revision, ids = view.revision, view.ids
        async with self._lock:
            known = self._samples.get((query, limit))
            if known is None or known.revision != revision:
                experiment = self._snapshot().experiment
                trials = [experiment.trials[trial_id] for trial_id in ids]
                leaderboard = experiment.leaderboard
                front = leaderboard.front if leaderboard.objectives.has_several else ()
                chosen = await asyncio.to_thread(
                    sampled, trials, limit, maximize=leaderboard.maximize, front=front
                )
                results = sum(
                    trial.run.value is not None and trial.run.ended_at_s is not None for trial in trials
                )
                known = _View(revision, [trial.trial_id for trial in chosen], results=results)
                _keep(self._samples, (query, limit), known)
            await self._name()
        head = {
            "matching": len(ids),
            "results": known.results,
            "parameters": list(self._parameters),
            "metrics": list(self._metrics),
            "hasTags": self._has_tags,
        }
        return self._document(head, known.ids)

    async def _document(
        self, head: dict[str, Any], ids: list[str], *, is_whole: bool = False
    ) -> AsyncIterator[bytes]:
        head = {"total": len(self._snapshot().experiment.trials)} | head
        yield to_json(head)[:-1] + b',"trials":['
        rows_at_once = _WHOLE_ROWS_AT_ONCE if is_whole else _ROWS_AT_ONCE
        for first in range(0, len(ids), rows_at_once):
            if first:
                await asyncio.sleep(0)
            trials = self._snapshot().experiment.trials
            chosen = [trials[trial_id] for trial_id in ids[first : first + rows_at_once]]
            rows = await asyncio.to_thread(_rows, chosen, is_whole=True) if is_whole else _rows(chosen)
            yield (b"," if first else b"") + rows
        yield b"]}"

    async def _view(self, query: Query) -> _View:
        """The current view of a query."""
        known = self._views.get(query)
        if known is None or not self._update(query, known):
            async with self._lock:
                # Another request may have computed it meanwhile.
                known = self._views.get(query)
                if known is None or not self._update(query, known):
                    experiment = self._snapshot().experiment
                    # Trials that change during the sort have a later revision, and are inserted again.
                    revision, trials = experiment.change_log.latest, list(experiment.trials.values())
                    arranged = await asyncio.to_thread(query.arranged, trials, self._text_of)
                    self._expire_texts()
                    known = _View(revision, [trial.trial_id for trial in arranged])
        _keep(self._views, query, known)
        return known

    def _update(self, query: Query, view: _View) -> bool:
        """Update a view by the changed trials; False if they are too many."""
        experiment = self._snapshot().experiment
        changed = self._changed(experiment.change_log.since(view.revision))
        if changed is None:
            return False
        if changed:
            gone = set(changed)
            ids = [trial_id for trial_id in view.ids if trial_id not in gone]
            for trial_id in changed:
                if query.matches(experiment.trials[trial_id], self._text_of):
                    insort(ids, trial_id, key=lambda each: query.key(experiment.trials[each]))
            view.ids, view.place = ids, None
        view.revision = experiment.change_log.latest
        return True

    def _text_of(self, trial: Trial) -> str:
        """The searched text of a trial's parameters, which never change. Called from a thread, too."""
        text = self._texts.get(trial.trial_id)
        if text is None:
            text = self._texts[trial.trial_id] = parameter_text(trial)
        return text

    def _expire_texts(self) -> None:
        if self._texts_timer is not None:
            self._texts_timer.cancel()
        self._texts_timer = asyncio.get_running_loop().call_later(_TEXTS_TIMEOUT_S, self._texts.clear)

    @staticmethod
    def _changed(since: Any) -> list[str] | None:
        changed = list(islice(since, _MAX_INSERTED + 1))
        return changed if len(changed) <= _MAX_INSERTED else None

    async def _name(self) -> None:
        """Add the names of the trials that have changed since the last call."""
        experiment = self._snapshot().experiment
        changed: list[Trial] = [
            experiment.trials[each] for each in experiment.change_log.since(self._named_revision)
        ]
        self._named_revision = experiment.change_log.latest
        self._has_tags = self._has_tags or any(trial.remarks.tags for trial in changed)
        changed.sort(key=lambda trial: trial.sequence_id)
        await asyncio.to_thread(names_in, changed, self._parameters, self._metrics)


def _rows(trials: list[Trial], *, is_whole: bool = False) -> bytes:
    return b",".join(to_json(row_view(trial, is_whole=is_whole)) for trial in trials)


def _keep(kept: "OrderedDict[Any, _View]", key: Any, view: _View) -> None:
    """Keep a view as the newest, and drop the oldest."""
    kept[key] = view
    kept.move_to_end(key)
    while len(kept) > _MAX_VIEWS:
        kept.popitem(last=False)
