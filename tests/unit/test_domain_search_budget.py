"""The number of requests to the tuner, and the limits that end them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.search_budget import Limits, SearchBudget

LIMITS = Limits(concurrency=3, max_trials=5, max_duration_s=None)


def test_the_search_requests_a_trial_for_every_free_slot() -> None:
    budget = SearchBudget(LIMITS)
    assert budget.ask(0) == [0, 1, 2]
    assert budget.ask(0) == []
    budget.note_suggested()
    assert budget.ask(0) == [], "the slot belongs to the trial"
    budget.note_ended()
    assert budget.ask(0) == [3]


def test_the_search_requests_additional_trials_for_prefetch() -> None:
    assert SearchBudget(LIMITS).ask(1) == [0, 1, 2, 3]


def test_a_request_that_is_repeated_because_the_tuner_was_not_ready_keeps_its_sequence_id() -> None:
    budget = SearchBudget(LIMITS)
    budget.ask(0)
    budget.note_suggested()
    budget.note_suggested()
    budget.note_not_ready(1)
    assert budget.ask(0) == [], "nothing has happened since the tuner was not ready"
    budget.note_ended()
    assert budget.ask(0) == [1, 3]


def test_a_tuner_counts_as_exhausted_if_it_is_not_ready_while_no_trial_runs() -> None:
    budget = SearchBudget(replace(LIMITS, concurrency=1))
    budget.ask(0)
    budget.note_not_ready(0)
    assert budget.is_exhausted


def test_the_experiment_duration_excludes_times_when_the_experiment_does_not_run() -> None:
    budget = SearchBudget(replace(LIMITS, max_duration_s=10.0))
    budget.count_time(100.0, counts=True)
    assert budget.time_runs_out_at_s == 110.0
    budget.count_time(104.0, counts=False)
    assert (budget.duration_s(1000.0), budget.time_runs_out_at_s) == (4.0, None)
    budget.count_time(200.0, counts=True)
    assert not budget.is_spent(205.9)
    assert budget.is_spent(206.0)


@given(
    st.lists(
        st.sampled_from(["ask", "suggest", "not ready", "exhausted", "drop", "end", "propose"]), max_size=40
    )
)
def test_requests_never_exceed_the_concurrency_or_the_trial_limit(steps: list[str]) -> None:
    budget, open_ids, proposed = SearchBudget(LIMITS), list[int](), 0
    used: set[int] = set()
    for step in steps:
        match step:
            case "ask":
                asked = budget.ask(0)
                open_ids += asked
                assert not used & set(asked), "an answered sequence id is never used again"
                assert not asked or budget.unfinished + budget.asked <= LIMITS.concurrency
            case "suggest" if open_ids:
                used.add(open_ids.pop(0))
                budget.note_suggested()
            case "not ready" if open_ids:
                budget.note_not_ready(open_ids.pop())
            case "exhausted" if open_ids:
                budget.note_exhausted(open_ids.pop())
            case "drop" if open_ids:
                open_ids.pop()
                budget.note_unanswered()
            case "end" if budget.unfinished:
                budget.note_ended()
            case "propose":
                used.add(budget.note_proposed())
                proposed += 1
        assert budget.asked == len(open_ids)
        assert budget.added - proposed + budget.asked <= (LIMITS.max_trials or 0)
    if "drop" not in steps:
        unused = set(range(len(steps) * LIMITS.concurrency + 1)) - used - set(open_ids)
        assert budget.note_proposed() == min(unused), "the numbers of trials have no gaps"
