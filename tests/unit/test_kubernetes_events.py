"""Warning events of a cluster: their assignment to jobs, their order, and the cache that stores them."""

from hypothesis import given
from hypothesis import strategies as st

from nni_manager.training_services.kubernetes.observed import WarningEventCache
from nni_manager.training_services.kubernetes.pods import blocking_init_step, pending_reason


def an_event(name, at="2026-01-01T00:00:05Z", reason="Failed", message="no", uid="u", **more):
    return {
        "metadata": {"name": f"{name}.1", "uid": uid, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "involvedObject": {"kind": "Pod", "name": name},
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
    } | more


def test_a_warning_is_assigned_only_to_its_pod_and_job():
    warnings = WarningEventCache("EXPT")
    warnings.take(an_event("nniexpexpttrial1-ps-0"))
    assert warnings.of("nniexpexpttrial1-ps-0") == warnings.of("nniexpexpttrial1") == "Failed: no"
    assert warnings.of("nniexpexpttrial1-ps-1") == warnings.of("nniexpexpttrial11") == ""


def test_events_without_the_experiment_id_in_their_name_are_ignored():
    warnings = WarningEventCache("EXPT")
    assert warnings.concerns(an_event("nniexpexpttrial1-ps-0"))
    assert not warnings.concerns(an_event("coredns-0"))
    assert not warnings.concerns({})


def test_the_newest_event_of_a_pod_is_shown_even_if_older_events_arrive_later():
    newest = an_event("expt-a", None, message="newest", series={"lastObservedTime": "2026-01-01T00:00:09Z"})
    events = [
        an_event("expt-a", "2026-01-01T00:00:07Z"),
        newest,
        an_event("expt-a", None, eventTime="2026-01-01T00:00:08Z"),
    ]
    for order in (events, events[::-1]):
        warnings = WarningEventCache("expt")
        for each in order:
            warnings.take(each)
        assert warnings.of("expt-a") == "Failed: newest"


def test_a_scheduling_failure_is_dropped_once_the_pod_has_a_node():
    warnings = WarningEventCache("expt")
    warnings.take(an_event("expt-a", reason="FailedScheduling"))
    assert (warnings.of("expt-a"), warnings.of("expt-a", has_node=True)) == ("FailedScheduling: no", "")


def test_a_long_multi_line_message_becomes_one_short_line():
    warnings = WarningEventCache("expt")
    warnings.take(an_event("expt-a", message="mount failed:\n  exit " + "status 32 " * 100))
    assert warnings.of("expt-a").startswith("Failed: mount failed: exit status 32 status")
    assert len(warnings.of("expt-a")) == 500


NAMES = st.sampled_from(["expt1", "expt1-ps-0", "expt1-ps-1", "expt12-ps-0", "expt2-worker-0"])


@given(st.lists(st.tuples(st.sampled_from(["take", "drop"]), NAMES, st.integers(1, 9))))
def test_the_event_cache_is_empty_after_all_jobs_are_removed(steps):
    warnings = WarningEventCache("expt")
    for step, name, second in steps:
        getattr(warnings, step)(an_event(name, f"2026-01-01T00:00:0{second}Z", uid=f"{name}{second}"))
    jobs = {name.partition("-")[0] for _, name, _ in steps}
    for job in jobs:
        warnings.forget(job)
        assert not warnings.of(job)
    assert warnings._newest == {}


def test_a_running_init_container_is_reported_as_the_blocking_step():
    init = {"name": "frameworkbarrier", "state": {"running": {}}}
    waiting = {"name": "c", "state": {"waiting": {"reason": "PodInitializing"}}}
    pod = {"status": {"phase": "Pending", "initContainerStatuses": [init], "containerStatuses": [waiting]}}
    assert pending_reason(pod) == ""
    assert blocking_init_step(pod) == "its init container frameworkbarrier has not ended"
    assert blocking_init_step({"status": {"phase": "Running"}}) == ""
