"""When people are told that a keeper has never been heard."""

import pytest

from nni_manager.domain.silence import LONGEST_SILENCE_S, Silence

SOON, LATE = LONGEST_SILENCE_S - 0.001, LONGEST_SILENCE_S


@pytest.fixture
def silence() -> Silence:
    silence = Silence(("10.0.0.7:8081",))
    silence.submitted("first", 100.0)
    silence.submitted("second", 110.0)
    return silence


def test_a_job_whose_keeper_is_not_heard_for_a_minute_is_a_problem(silence: Silence) -> None:
    assert silence.problem(100 + SOON) == ""
    problem = silence.problem(100 + LATE)
    assert problem.startswith("no keeper has connected for 60 s since job first was submitted")
    assert "it was told 10.0.0.7:8081;" in problem
    assert "run `trial-keeper doctor` in its container" in problem


def test_all_addresses_are_named(silence: Silence) -> None:
    silence.addresses = ("manager:8081", "10.0.0.7:8081")
    assert "it was told manager:8081 or 10.0.0.7:8081;" in silence.problem(100 + LATE)


def test_the_words_stay_the_same_however_long_it_lasts(silence: Silence) -> None:
    assert silence.problem(100 + LATE) == silence.problem(1e6)


def test_a_keeper_that_connects_ends_the_problem_of_its_job_only(silence: Silence) -> None:
    silence.broken("first")
    assert silence.problem(100 + LATE) == ""
    assert "job second" in silence.problem(110 + LATE)
    silence.broken("second")
    assert silence.problem(1e6) == ""


def test_the_job_that_has_waited_longest_is_the_one_that_is_named(silence: Silence) -> None:
    assert "job first" in silence.problem(1e6)


def test_a_job_that_is_taken_over_again_keeps_its_time(silence: Silence) -> None:
    silence.submitted("first", 1000.0)
    assert "job first" in silence.problem(100 + LATE)


def test_a_keeper_that_nobody_waits_for_changes_nothing(silence: Silence) -> None:
    silence.broken("unknown")
    assert "job first" in silence.problem(100 + LATE)


def test_a_problem_is_news_once(silence: Silence) -> None:
    assert silence.news(100 + SOON) == ""
    assert "job first" in silence.news(100 + LATE)
    assert silence.news(1e6) == ""
    silence.broken("first")
    assert "job second" in silence.news(1e6)
    silence.broken("second")
    assert silence.news(1e6) == ""
    silence.submitted("first", 1e6)
    assert "job first" in silence.news(1e6 + LATE), "a problem that comes again is news again"


def test_a_job_that_is_found_at_work_is_told_of_in_other_words_and_after_those_that_are_not(
    silence: Silence,
) -> None:
    silence.found("first")
    assert "job second" in silence.problem(110 + LATE)
    silence.found("second")
    told = silence.problem(110 + LATE)
    assert told.startswith(
        "keepers do not reach 10.0.0.7:8081, so trials are followed over the shared storage"
    )
    silence.broken("first")
    assert silence.problem(110 + LATE) == told, "the same words for any of them"
    silence.broken("second")
    assert silence.problem(1e6) == ""


def test_a_job_that_was_found_is_not_silent_again_and_one_nobody_waits_for_is_not_found(
    silence: Silence,
) -> None:
    silence.found("first")
    silence.submitted("first", 120.0)
    silence.broken("second")
    silence.found("second")
    assert silence.problem(100 + LATE).startswith("keepers do not reach")
    silence.broken("first")
    assert silence.problem(1e6) == ""


def test_jobs_that_need_the_network_say_so(silence: Silence) -> None:
    silence.needs_network = True
    assert "write reuse: false" in silence.problem(100 + LATE)
