"""The problem report for jobs whose keepers have never connected."""

import pytest

from nni_manager.domain.transports import MAX_SILENCE_S, TransportTracker

SOON, LATE = MAX_SILENCE_S - 0.001, MAX_SILENCE_S


@pytest.fixture
def transports() -> TransportTracker:
    transports = TransportTracker(addresses=("10.0.0.7:8081",))
    transports.track("first", 100.0)
    transports.track("second", 110.0)
    return transports


def test_a_problem_is_reported_if_the_keeper_of_a_job_does_not_connect_for_a_minute(
    transports: TransportTracker,
) -> None:
    assert transports.problem(100 + SOON) == ""
    problem = transports.problem(100 + LATE)
    assert problem.startswith("no keeper has connected within 60 s after job first was submitted")
    assert "keepers use 10.0.0.7:8081;" in problem
    assert "run `trial-keeper doctor` in its container" in problem


def test_the_problem_report_names_all_manager_addresses(transports: TransportTracker) -> None:
    transports.addresses = ("manager:8081", "10.0.0.7:8081")
    assert "keepers use manager:8081 or 10.0.0.7:8081;" in transports.problem(100 + LATE)


def test_the_problem_report_stays_unchanged_while_the_problem_lasts(transports: TransportTracker) -> None:
    assert transports.problem(100 + LATE) == transports.problem(1e6)


def test_the_end_of_a_job_clears_the_problem_of_that_job_but_not_of_other_jobs(
    transports: TransportTracker,
) -> None:
    transports.forget("first")
    assert transports.problem(100 + LATE) == ""
    assert "job second" in transports.problem(110 + LATE)
    transports.forget("second")
    assert transports.problem(1e6) == ""


def test_the_problem_report_names_the_longest_waiting_job(transports: TransportTracker) -> None:
    assert "job first" in transports.problem(1e6)


def test_tracking_a_job_again_does_not_restart_its_timeout(transports: TransportTracker) -> None:
    transports.track("first", 1000.0)
    assert "job first" in transports.problem(100 + LATE)


def test_a_connection_of_an_unknown_keeper_has_no_effect(transports: TransportTracker) -> None:
    transports.forget("unknown")
    assert "job first" in transports.problem(100 + LATE)


def test_each_new_problem_is_returned_only_once(transports: TransportTracker) -> None:
    assert transports.new_problem(100 + SOON) == ""
    assert "job first" in transports.new_problem(100 + LATE)
    assert transports.new_problem(1e6) == ""
    transports.forget("first")
    assert "job second" in transports.new_problem(1e6)
    transports.forget("second")
    assert transports.new_problem(1e6) == ""
    transports.track("first", 1e6)
    assert "job first" in transports.new_problem(1e6 + LATE), "a problem that returns is new again"


def test_silent_jobs_are_reported_before_jobs_seen_only_on_the_shared_storage(
    transports: TransportTracker,
) -> None:
    transports.found("first", "main-0", 110.0, has_new_data=True)
    assert "job second" in transports.problem(110 + LATE)
    assert [text.split(";")[0] for text in transports.problems(110 + LATE)] == [
        "no keeper has connected within 60 s after job second was submitted",
        "keepers cannot reach 10.0.0.7:8081",
    ]
    transports.found("second", "main-0", 110.0, has_new_data=True)
    message = transports.problem(110 + LATE)
    assert message.startswith(
        "keepers cannot reach 10.0.0.7:8081; their reports are read from the shared storage"
    )
    transports.forget("first")
    assert transports.problem(110 + LATE) == message, "the same message for any of these jobs"
    transports.forget("second")
    assert transports.problem(1e6) == ""


def test_a_job_seen_on_storage_is_not_silent_and_a_removed_job_is_not_tracked(
    transports: TransportTracker,
) -> None:
    transports.found("first", "main-0", 110.0, has_new_data=True)
    transports.track("first", 120.0)
    transports.forget("second")
    transports.found("second", "main-0", 110.0, has_new_data=True)
    assert transports.problem(100 + LATE).startswith("keepers cannot reach")
    transports.forget("first")
    assert transports.problem(1e6) == ""


def test_the_problem_report_suggests_to_disable_reuse_if_jobs_need_a_connection(
    transports: TransportTracker,
) -> None:
    transports.needs_network = True
    assert "set reuse: false" in transports.problem(100 + LATE)
