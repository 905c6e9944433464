"""Filter and order of trials in the manager.

The cases in tests/page/queries.json are shared with the tests of the web page.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_experiment import made_trial

from nni_manager.domain.remarks import Remarks
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_run import TrialRun
from nni_manager.engine.page_text import number_in, number_text, shown_number, words_of
from nni_manager.engine.trial_query import COLUMNS, AxisFilter, Comparison, Query, flat, parameter_text
from nni_manager.engine.trial_rows import row_view
from nni_manager.web.trial_window_routes import conditions_of
from trial_keeper.wire.reasons import ExitReason

CASES = json.loads((Path(__file__).parents[1] / "page" / "queries.json").read_text())


def trial_of(row: dict[str, Any]) -> Trial:
    """A trial that the API shows as this row."""
    metrics, value = row.get("metrics"), row["value"]
    final = None if value is None and metrics is None else json.dumps(value)
    if metrics is not None:
        final = json.dumps({"default": value, **metrics})
    return Trial(
        trial_id=row["id"],
        sequence_id=row["seq"],
        parameters=row["parameters"],
        metadata={},
        created_at_s=0.0,
        job_id="",
        state=TrialState(row["state"]),
        remarks=Remarks(tuple(row.get("tags", ())), row.get("note", "")),
        run=TrialRun(
            attempt=row["attempt"],
            started_at_s=None if row["start"] is None else row["start"] / 1000,
            ended_at_s=None if row["end"] is None else row["end"] / 1000,
            reason=None if row["reason"] is None else ExitReason(row["reason"]),
            exit_code=row["exitCode"],
            message=row["message"],
            final=final,
            value=value,
            intermediate=None if row["latest"] is None else json.dumps(row["latest"]),
            intermediate_count=row["count"],
        ),
    )


TRIALS = [trial_of(row) for row in CASES["rows"]]


def query_of(case: dict[str, Any]) -> Query:
    conditions = conditions_of(json.dumps(case["conditions"]))
    return Query(frozenset(case["states"]), case["text"], conditions, case["column"], case["descending"])


def test_the_rows_in_the_test_cases_of_the_page_equal_the_rows_of_the_api() -> None:
    for row, trial in zip(CASES["rows"], TRIALS, strict=True):
        shown = row_view(trial)
        shown.pop("why", None)
        assert shown == row


@pytest.mark.parametrize("case", CASES["queries"], ids=lambda case: json.dumps({**case, "ids": []})[:90])
def test_a_query_returns_the_same_trials_as_the_web_page(case: dict[str, Any]) -> None:
    query = query_of(case)
    assert [trial.trial_id for trial in query.arranged(TRIALS)] == case["ids"]
    # The result does not depend on the initial order of the trials.
    assert [trial.trial_id for trial in query.arranged(reversed(TRIALS))] == case["ids"]
    # Inserting trials one at a time uses the same order.
    assert [trial.trial_id for trial in sorted(filter(query.matches, TRIALS), key=query.key)] == case["ids"]


def test_the_test_cases_of_the_page_cover_each_column_and_each_operator() -> None:
    sorted_by = {case["column"] for case in CASES["queries"]}
    assert sorted_by > set(COLUMNS), "add a query that sorts by the column to tests/page/queries.json"
    conditions = [each for case in CASES["queries"] for each in query_of(case).conditions]
    compared = {each.operator for each in conditions if isinstance(each, Comparison)}
    assert compared == set("=≠<≤>≥") | {"contains"}
    assert any(isinstance(each, AxisFilter) for each in conditions)


@pytest.mark.parametrize(("value", "text", "shown"), CASES["numbers"])
def test_numbers_are_formatted_as_on_the_web_page(value: float, text: str, shown: str) -> None:
    assert (number_text(value), shown_number(value)) == (text, shown)
    trial = made_trial(0, 0.0)
    trial.parameters = {"x": value}
    assert parameter_text(trial) == f"x={text}\n{shown}".lower()


@given(st.floats(1e-5, 1e7) | st.floats(1e6, 1e6 + 1) | st.floats(9e-5, 2e-4))
def test_the_searched_text_contains_each_number_in_full_and_as_shown_on_the_page(value: float) -> None:
    trial = made_trial(0, 0.0)
    trial.parameters = {"x": value}
    assert parameter_text(trial) == f"x={number_text(value)}\n{shown_number(value)}".lower()


def test_negative_zero_is_formatted_without_a_sign_as_in_javascript() -> None:
    assert (number_text(-0.0), shown_number(-0.0)) == ("0", "0")


def test_numbers_beyond_the_range_of_floats_are_infinite_as_in_javascript() -> None:
    assert (number_text(10**400), shown_number(-(10**400))) == ("Infinity", "\u2212∞")
    trial = made_trial(0, 0.0)
    trial.parameters = {"x": 10**400}
    assert Query(conditions=(Comparison("x", ">", "1e300"),), column="p:x").arranged([trial]) == [trial]


def test_a_text_is_parsed_as_a_number_if_javascript_parses_it_as_a_number() -> None:
    for text, number in {
        "1": 1,
        " 1e3 ": 1000,
        ".5": 0.5,
        "5.": 5,
        "-Infinity": float("-inf"),
        "0b11": 3,
        "\ufeff2": 2,
    }.items():
        assert number_in(text) == number, text
    for text in ("", " ", "1_000", "nan", "inf", "1 2", "0x", "-0x1", "1e", "١"):
        assert number_in(text) is None, text
    assert words_of(" a\u00a0B\ufeffc\x1cd ") == ["a", "b", "c\x1cd"]


def test_numbers_that_json_cannot_represent_are_shown_as_missing() -> None:
    parameters = {"lr": float("nan"), "net": {"_name": "a", "units": float("inf")}}
    assert flat(parameters) == {"lr": None, "net": "a", "net/units": None}


def test_parameters_nested_below_the_eighth_level_are_shown_as_json() -> None:
    value: Any = {"x": 1}
    for _ in range(8):
        value = {"a": value}
    assert flat(value) == {"a/a/a/a/a/a/a/a": '{"x":1}'}


def test_sorting_trials_by_the_sort_key_gives_the_same_order_as_a_query() -> None:
    rng = random.Random(5)
    trials = [made_trial(number, 0.0) for number in range(60)]
    for trial in trials:
        trial.run.value = rng.choice([None, 0.0, 1.0, rng.random()])
        trial.parameters = {"x": rng.choice([None, "a", "b", True, 1, 2.5])}
        trial.run.ended_at_s = rng.choice([None, 1.0, 2.0])
    for column in (*COLUMNS, "p:x", "m:none"):
        for descends in (False, True):
            query = Query(column=column, is_descending=descends)
            assert sorted(trials, key=query.key) == query.arranged(trials), (column, descends)
