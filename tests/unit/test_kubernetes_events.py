"""What a cluster warns of: whose it is, which is the newest, and what is kept."""

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


def test_a_warning_is_of_its_pod_and_of_its_job_and_of_no_other():
    warnings = WarningEventCache("EXPT")
    warnings.take(an_event("nniexpexpttrial1-ps-0"))
    assert warnings.of("nniexpexpttrial1-ps-0") == warnings.of("nniexpexpttrial1") == "Failed: no"
    assert warnings.of("nniexpexpttrial1-ps-1") == warnings.of("nniexpexpttrial11") == ""


def test_what_has_not_the_experiments_id_in_its_name_is_no_concern():
    warnings = WarningEventCache("EXPT")
    assert warnings.concerns(an_event("nniexpexpttrial1-ps-0"))
    assert not warnings.concerns(an_event("coredns-0"))
    assert not warnings.concerns({})


def test_the_newest_counts_in_whatever_order_and_field_it_comes():
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


def test_that_no_node_was_found_says_nothing_once_there_is_one():
    warnings = WarningEventCache("expt")
    warnings.take(an_event("expt-a", reason="FailedScheduling"))
    assert (warnings.of("expt-a"), warnings.of("expt-a", has_node=True)) == ("FailedScheduling: no", "")


def test_a_long_message_of_many_lines_is_one_line_that_can_be_read():
    warnings = WarningEventCache("expt")
    warnings.take(an_event("expt-a", message="mount failed:\n  exit " + "status 32 " * 100))
    assert warnings.of("expt-a").startswith("Failed: mount failed: exit status 32 status")
    assert len(warnings.of("expt-a")) == 500


NAMES = st.sampled_from(["expt1", "expt1-ps-0", "expt1-ps-1", "expt12-ps-0", "expt2-worker-0"])


@given(st.lists(st.tuples(st.sampled_from(["take", "drop"]), NAMES, st.integers(1, 9))))
def test_what_was_dropped_or_forgotten_is_not_kept(steps):
    warnings = WarningEventCache("expt")
    for step, name, second in steps:
        getattr(warnings, step)(an_event(name, f"2026-01-01T00:00:0{second}Z", uid=f"{name}{second}"))
    jobs = {name.partition("-")[0] for _, name, _ in steps}
    for job in jobs:
        warnings.forget(job)
        assert not warnings.of(job)
    assert warnings._newest == {}


def test_what_goes_first_is_told_and_is_no_reason_of_its_own():
    init = {"name": "frameworkbarrier", "state": {"running": {}}}
    waiting = {"name": "c", "state": {"waiting": {"reason": "PodInitializing"}}}
    pod = {"status": {"phase": "Pending", "initContainerStatuses": [init], "containerStatuses": [waiting]}}
    assert pending_reason(pod) == ""
    assert blocking_init_step(pod) == "its init container frameworkbarrier has not ended"
    assert blocking_init_step({"status": {"phase": "Running"}}) == ""
