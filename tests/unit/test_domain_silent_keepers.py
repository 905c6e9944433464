"""When a keeper that has never connected is reported as a problem."""

import pytest

from nni_manager.domain.transports import MAX_SILENCE_S, TransportTracker

SOON, LATE = MAX_SILENCE_S - 0.001, MAX_SILENCE_S


@pytest.fixture
def transports() -> TransportTracker:
    transports = TransportTracker(addresses=("10.0.0.7:8081",))
    transports.track("first", 100.0)
    transports.track("second", 110.0)
    return transports


def test_a_job_whose_keeper_is_not_heard_for_a_minute_is_a_problem(transports: TransportTracker) -> None:
    assert transports.problem(100 + SOON) == ""
    problem = transports.problem(100 + LATE)
    assert problem.startswith("no keeper has connected within 60 s after job first was submitted")
    assert "keepers use 10.0.0.7:8081;" in problem
    assert "run `trial-keeper doctor` in its container" in problem


def test_all_addresses_are_named(transports: TransportTracker) -> None:
    transports.addresses = ("manager:8081", "10.0.0.7:8081")
    assert "keepers use manager:8081 or 10.0.0.7:8081;" in transports.problem(100 + LATE)


def test_the_words_stay_the_same_however_long_it_lasts(transports: TransportTracker) -> None:
    assert transports.problem(100 + LATE) == transports.problem(1e6)


def test_a_keeper_that_connects_ends_the_problem_of_its_job_only(transports: TransportTracker) -> None:
    transports.forget("first")
    assert transports.problem(100 + LATE) == ""
    assert "job second" in transports.problem(110 + LATE)
    transports.forget("second")
    assert transports.problem(1e6) == ""


def test_the_job_that_has_waited_longest_is_the_one_that_is_named(transports: TransportTracker) -> None:
    assert "job first" in transports.problem(1e6)


def test_a_job_that_is_taken_over_again_keeps_its_time(transports: TransportTracker) -> None:
    transports.track("first", 1000.0)
    assert "job first" in transports.problem(100 + LATE)


def test_a_keeper_that_nobody_waits_for_changes_nothing(transports: TransportTracker) -> None:
    transports.forget("unknown")
    assert "job first" in transports.problem(100 + LATE)


def test_a_problem_is_news_once(transports: TransportTracker) -> None:
    assert transports.new_problem(100 + SOON) == ""
    assert "job first" in transports.new_problem(100 + LATE)
    assert transports.new_problem(1e6) == ""
    transports.forget("first")
    assert "job second" in transports.new_problem(1e6)
    transports.forget("second")
    assert transports.new_problem(1e6) == ""
    transports.track("first", 1e6)
    assert "job first" in transports.new_problem(1e6 + LATE), "a problem that comes again is news again"


def test_a_job_that_is_found_at_work_is_told_of_in_other_words_and_after_those_that_are_not(
    transports: TransportTracker,
) -> None:
    transports.found("first", "main-0", 110.0, has_new_data=True)
    assert "job second" in transports.problem(110 + LATE)
    transports.found("second", "main-0", 110.0, has_new_data=True)
    told = transports.problem(110 + LATE)
    assert told.startswith(
        "keepers cannot reach 10.0.0.7:8081; their reports are read from the shared storage"
    )
    transports.forget("first")
    assert transports.problem(110 + LATE) == told, "the same words for any of them"
    transports.forget("second")
    assert transports.problem(1e6) == ""


def test_a_job_that_was_found_is_not_silent_again_and_one_nobody_waits_for_is_not_found(
    transports: TransportTracker,
) -> None:
    transports.found("first", "main-0", 110.0, has_new_data=True)
    transports.track("first", 120.0)
    transports.forget("second")
    transports.found("second", "main-0", 110.0, has_new_data=True)
    assert transports.problem(100 + LATE).startswith("keepers cannot reach")
    transports.forget("first")
    assert transports.problem(1e6) == ""


def test_jobs_that_need_the_network_say_so(transports: TransportTracker) -> None:
    transports.needs_network = True
    assert "set reuse: false" in transports.problem(100 + LATE)
