"""Windows and samples of the trials of a large experiment."""

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from made_experiment import made_trial

from nni_manager.domain.change_log import ChangeLog
from nni_manager.domain.leaderboard import Leaderboard
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.domain.remarks import Remarks
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.trial_query import Comparison, Query
from nni_manager.web import trial_views
from nni_manager.web.trial_views import TrialViews


class Made:
    """An experiment whose trials have random results."""

    def __init__(self, count: int) -> None:
        self.rng = random.Random(3)
        self.change_log = ChangeLog()
        self.leaderboard = Leaderboard(MAXIMIZE)
        self.trials: dict[str, Trial] = {}
        for number in range(count):
            self.change(number)
        self.sorts = 0
        self.views = TrialViews(lambda: SimpleNamespace(experiment=self))  # type: ignore[arg-type, return-value]

    def change(self, number: int, **fields: Any) -> None:
        trial = made_trial(number, 0.0)
        trial.run.value, trial.parameters = (
            self.rng.random(),
            {"x": self.rng.randrange(5), "name": f"n{number % 3}"},
        )
        for name, value in fields.items():
            setattr(trial if hasattr(trial, name) else trial.run, name, value)
        self.trials[trial.trial_id] = trial
        self.change_log.note(trial.trial_id)

    def window(self, query: Query, first: int = 0, limit: int = 10, around: str | None = None) -> Any:
        return asyncio.run(self._read(lambda: self.views.window(query, first, limit, around)))

    def sample(self, query: Query, limit: int) -> Any:
        return asyncio.run(self._read(lambda: self.views.sample(query, limit)))

    @staticmethod
    async def _read(start: Any) -> Any:
        return json.loads(b"".join([piece async for piece in await start()]))


def ids(document: Any) -> list[str]:
    return [row["id"] for row in document["trials"]]


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[Query]:
    """Records each query that sorts all trials."""
    computed: list[Query] = []
    arranged = Query.arranged

    def counted(query: Query, *arguments: Any) -> list[Trial]:
        computed.append(query)
        return arranged(query, *arguments)

    monkeypatch.setattr(Query, "arranged", counted)
    return computed


def test_consecutive_windows_contain_all_matching_trials_in_order(sorts: list[Query]) -> None:
    made = Made(1234)
    query = Query(conditions=(Comparison("x", "<", "3"),), column="value", is_descending=True)
    wanted = [trial.trial_id for trial in query.arranged(made.trials.values())]
    sorts.clear()
    found: list[str] = []
    for first in range(0, 1400, 100):
        window = made.window(query, first, 100)
        assert (window["total"], window["matching"], window["offset"]) == (1234, len(wanted), first)
        found += ids(window)
    assert found == wanted
    assert len(sorts) == 1, "the view is kept"


def test_a_window_around_a_trial_reports_the_position_of_the_trial() -> None:
    made = Made(300)
    query = Query(column="value")
    wanted = [trial.trial_id for trial in query.arranged(made.trials.values())]
    for trial_id in (wanted[0], wanted[150], wanted[-1]):
        window = made.window(query, 0, 20, trial_id)
        place = window["place"]
        assert wanted[place] == trial_id
        assert window["trials"][place - window["offset"]]["id"] == trial_id
    assert made.window(query, 0, 20, "unknown")["place"] is None
    filtered = Query(conditions=(Comparison("name", "=", "n1"),))
    assert made.window(filtered, 0, 20, "00000")["place"] is None


@pytest.mark.slow
@pytest.mark.parametrize("column", ["seq", "value", "p:x", "state", "duration"])
def test_a_view_inserts_a_few_changed_trials_but_sorts_all_trials_again_after_many_changes(
    column: str, sorts: list[Query]
) -> None:
    made = Made(500)
    query = Query(text="n1", column=column, is_descending=True)
    made.window(query)
    for _ in range(20):
        for number in {made.rng.randrange(530) for _ in range(15)}:
            state = made.rng.choice([TrialState.RUNNING, TrialState.FAILED, TrialState.SUCCEEDED])
            made.change(number, state=state, ended_at_s=made.rng.choice([None, 5.0]))
        computed = len(sorts)
        found = ids(made.window(query, 0, 1000))
        assert len(sorts) == computed, "no sort"
        assert found == [trial.trial_id for trial in query.arranged(list(made.trials.values()))]
    for number in range(trial_views._MAX_INSERTED + 1):
        made.change(number)
    sorts.clear()
    found = ids(made.window(query, 0, 1000))
    assert len(sorts) == 1
    assert found == [trial.trial_id for trial in query.arranged(list(made.trials.values()))]


def test_the_least_recently_used_views_are_discarded(sorts: list[Query]) -> None:
    made = Made(20)
    queries = [Query(text=f"n{number}") for number in range(trial_views._MAX_VIEWS + 1)]
    for query in (*queries, *queries[1:]):
        made.window(query)
    assert len(sorts) == len(queries)
    made.window(queries[0])
    assert len(sorts) == len(queries) + 1


def test_a_trial_that_changes_during_a_sort_is_inserted_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(50)
    query = Query(column="value")
    arranged = Query.arranged

    def meanwhile(query: Query, *arguments: Any) -> list[Trial]:
        found = arranged(query, *arguments)
        made.change(7, value=-1.0)
        made.change(50, value=-2.0)
        return found

    monkeypatch.setattr(Query, "arranged", meanwhile)
    made.window(query)
    monkeypatch.undo()
    assert ids(made.window(query, 0, 2)) == ["00050", "00007"]


def test_a_sample_reports_the_count_of_all_results_and_the_names_of_all_parameters_and_metrics() -> None:
    made = Made(400)
    made.change(
        123, parameters={"net": {"_name": "a", "units": 2}}, final='{"default": 1, "loss": 2}', value=9.0
    )
    made.change(124, value=None)
    made.change(125, state=TrialState.RUNNING, ended_at_s=None)
    document = made.sample(Query(), 20)
    assert (document["total"], document["matching"], document["results"]) == (400, 400, 398)
    assert document["parameters"] == ["x", "name", "net", "net/units"]
    assert document["metrics"] == ["loss"]
    assert "00123" in ids(document), "the best"
    assert 100 < len(document["trials"]) < 200
    made.change(5, parameters={"late": 1})
    assert made.sample(Query(), 20)["parameters"][-1] == "late"
    filtered = made.sample(Query(conditions=(Comparison("x", "=", "1"),), column="value"), 20)
    assert filtered["matching"] < 200
    sequence = [row["seq"] for row in filtered["trials"]]
    assert sequence == sorted(sequence)


def test_tags_and_notes_are_inserted_into_views_without_a_sort(sorts: list[Query]) -> None:
    made = Made(100)
    query, late = Query(text="tag:keep", column="tags"), Query(text="late")
    assert ids(made.window(query)) == ids(made.window(late)) == []
    assert made.sample(Query(), 20)["hasTags"] is False
    made.change(7, remarks=Remarks(("keep",)))
    made.change(3, remarks=Remarks(("best", "keep"), "converges late"))
    computed = len(sorts)
    assert ids(made.window(query)) == ["00003", "00007"]
    assert ids(made.window(late)) == ["00003"]
    assert len(sorts) == computed, "no sort"
    assert made.sample(Query(), 20)["hasTags"] is True
    made.change(3)
    assert ids(made.window(query)) == ["00007"]


def test_the_search_texts_of_trials_are_removed_from_memory_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial_views, "_TEXTS_TIMEOUT_S", 0.0)
    made = Made(10)

    async def search() -> None:
        await made.views.window(Query(text="n1"), 0, 10)
        assert made.views._texts
        while made.views._texts:
            await asyncio.sleep(0)

    asyncio.run(search())
