"""When people are told that a keeper has never been heard."""

import pytest

from nni_manager.domain.connect_watchdog import MAX_SILENCE_S, ConnectWatchdog

SOON, LATE = MAX_SILENCE_S - 0.001, MAX_SILENCE_S


@pytest.fixture
def connect_watchdog() -> ConnectWatchdog:
    connect_watchdog = ConnectWatchdog(("10.0.0.7:8081",))
    connect_watchdog.submitted("first", 100.0)
    connect_watchdog.submitted("second", 110.0)
    return connect_watchdog


def test_a_job_whose_keeper_is_not_heard_for_a_minute_is_a_problem(connect_watchdog: ConnectWatchdog) -> None:
    assert connect_watchdog.problem(100 + SOON) == ""
    problem = connect_watchdog.problem(100 + LATE)
    assert problem.startswith("no keeper has connected for 60 s since job first was submitted")
    assert "it was told 10.0.0.7:8081;" in problem
    assert "run `trial-keeper doctor` in its container" in problem


def test_all_addresses_are_named(connect_watchdog: ConnectWatchdog) -> None:
    connect_watchdog.addresses = ("manager:8081", "10.0.0.7:8081")
    assert "it was told manager:8081 or 10.0.0.7:8081;" in connect_watchdog.problem(100 + LATE)


def test_the_words_stay_the_same_however_long_it_lasts(connect_watchdog: ConnectWatchdog) -> None:
    assert connect_watchdog.problem(100 + LATE) == connect_watchdog.problem(1e6)


def test_a_keeper_that_connects_ends_the_problem_of_its_job_only(connect_watchdog: ConnectWatchdog) -> None:
    connect_watchdog.broken("first")
    assert connect_watchdog.problem(100 + LATE) == ""
    assert "job second" in connect_watchdog.problem(110 + LATE)
    connect_watchdog.broken("second")
    assert connect_watchdog.problem(1e6) == ""


def test_the_job_that_has_waited_longest_is_the_one_that_is_named(connect_watchdog: ConnectWatchdog) -> None:
    assert "job first" in connect_watchdog.problem(1e6)


def test_a_job_that_is_taken_over_again_keeps_its_time(connect_watchdog: ConnectWatchdog) -> None:
    connect_watchdog.submitted("first", 1000.0)
    assert "job first" in connect_watchdog.problem(100 + LATE)


def test_a_keeper_that_nobody_waits_for_changes_nothing(connect_watchdog: ConnectWatchdog) -> None:
    connect_watchdog.broken("unknown")
    assert "job first" in connect_watchdog.problem(100 + LATE)


def test_a_problem_is_news_once(connect_watchdog: ConnectWatchdog) -> None:
    assert connect_watchdog.news(100 + SOON) == ""
    assert "job first" in connect_watchdog.news(100 + LATE)
    assert connect_watchdog.news(1e6) == ""
    connect_watchdog.broken("first")
    assert "job second" in connect_watchdog.news(1e6)
    connect_watchdog.broken("second")
    assert connect_watchdog.news(1e6) == ""
    connect_watchdog.submitted("first", 1e6)
    assert "job first" in connect_watchdog.news(1e6 + LATE), "a problem that comes again is news again"


def test_a_job_that_is_found_at_work_is_told_of_in_other_words_and_after_those_that_are_not(
    connect_watchdog: ConnectWatchdog,
) -> None:
    connect_watchdog.found("first")
    assert "job second" in connect_watchdog.problem(110 + LATE)
    connect_watchdog.found("second")
    told = connect_watchdog.problem(110 + LATE)
    assert told.startswith(
        "keepers do not reach 10.0.0.7:8081, so trials are followed over the shared storage"
    )
    connect_watchdog.broken("first")
    assert connect_watchdog.problem(110 + LATE) == told, "the same words for any of them"
    connect_watchdog.broken("second")
    assert connect_watchdog.problem(1e6) == ""


def test_a_job_that_was_found_is_not_silent_again_and_one_nobody_waits_for_is_not_found(
    connect_watchdog: ConnectWatchdog,
) -> None:
    connect_watchdog.found("first")
    connect_watchdog.submitted("first", 120.0)
    connect_watchdog.broken("second")
    connect_watchdog.found("second")
    assert connect_watchdog.problem(100 + LATE).startswith("keepers do not reach")
    connect_watchdog.broken("first")
    assert connect_watchdog.problem(1e6) == ""


def test_jobs_that_need_the_network_say_so(connect_watchdog: ConnectWatchdog) -> None:
    connect_watchdog.needs_network = True
    assert "write reuse: false" in connect_watchdog.problem(100 + LATE)
