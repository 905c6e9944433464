"""Exit codes, retries, completion, ports and the queue of local OpenPAI, as OpenPAI defines them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.local_openpai.core.exit_explanations import EXIT_EXPLANATIONS
from nni_manager.local_openpai.core.exits import (
    EXIT_SPECS,
    STOPPED,
    Behavior,
    TaskExit,
    container_exit,
    exit_spec,
)
from nni_manager.local_openpai.core.policies import (
    CompletionPolicy,
    RetryCounts,
    RetryPolicy,
    TaskEnd,
    retried,
    verdict,
)
from nni_manager.local_openpai.core.ports import PortsExhausted, chosen_ports, hashed_port
from nni_manager.local_openpai.core.queue import Request, ResourceCounts, virtual_clusters

JOB = RetryPolicy(is_fancy=True, max_retries=0)
CODES = st.sampled_from(sorted(EXIT_SPECS))

# ---- exit codes


@pytest.mark.parametrize(
    ("user_code", "log", "code"),
    [
        (0, "ImportError: handled", 0),
        (1, "", 255),
        (42, "", 255),
        (200, "", 255),
        (254, "", 255),
        (128, "", 255),
        (130, "", 130),
        (137, "", 137),
        (139, "ImportError: x", 139),
        (143, "", 143),
        (138, "", 255),
        (127, "bash: line 3: nope: command not found", 220),
        (127, "", 255),
        (1, "bash: nope: command not found", 255),
        (1, "ImportError: no such module", 232),
        (1, "ModuleNotFoundError: no such module", 255),
        (2, "invalid argument: 'x'", 228),
        (1, "RuntimeError: CUDA out of memory. Tried", 226),
        (1, "CUDA_ERROR_ECC_UNCORRECTABLE", 223),
        (1, "FileNotFoundError: [Errno 2] No such file or directory: 'x'", 255),
    ],
)
def test_container_exit_codes_map_to_the_exit_codes_of_openpai(user_code, log, code):
    found = container_exit(user_code, f"before\n{log}\nafter")
    assert (found.code, found.origin_user_exit_code) == (code, user_code)


def test_the_log_line_that_explains_the_exit_code_is_reported():
    assert container_exit(1, "a\nImportError: torch\nb").matched_log == "ImportError: torch"


def test_an_unlisted_exit_code_keeps_its_number_and_gets_a_generic_phrase():
    assert len(EXIT_SPECS) == 62
    assert (exit_spec(1).code, exit_spec(1).phrase) == (1, "PAIRuntimeExitAbnormally")
    assert (exit_spec(-7).code, exit_spec(-7).phrase) == (-7, "ContainerUndefinedNegativeExitCode")


def test_every_exit_code_has_an_explanation_and_every_failure_has_a_remedy():
    assert EXIT_EXPLANATIONS.keys() == EXIT_SPECS.keys()
    decided_by_users = {0, *STOPPED, -230}
    for code, explained in EXIT_EXPLANATIONS.items():
        assert explained.repro, code
        assert bool(explained.solution) == (code not in decided_by_users), code
    assert exit_spec(1).explanation is EXIT_EXPLANATIONS[256]
    assert exit_spec(-7).explanation is EXIT_EXPLANATIONS[-8000]


@given(CODES)
def test_a_failure_is_retried_up_to_the_limit_only_if_its_exit_code_has_an_unknown_cause(code):
    spec = exit_spec(code)
    assert (spec.reaction == "RETRY_TO_MAX") == (spec.behavior is Behavior.UNKNOWN and code != 0)


# ---- retries


@pytest.mark.parametrize("code", [-210, -220])
@given(most=st.integers(-2, 5), is_fancy=st.booleans())
def test_a_stopped_job_is_never_retried(code, most, is_fancy):
    assert retried(RetryPolicy(is_fancy, most), code, RetryCounts(), 10) is None


def test_retries_after_platform_failures_are_counted_separately_from_user_retries():
    assert retried(JOB, 137, RetryCounts(), 10) == RetryCounts(platform=1)
    assert retried(JOB, 253, RetryCounts(platform=9), 10) == RetryCounts(platform=10)
    assert retried(JOB, 251, RetryCounts(), 10) == RetryCounts(resource=1)


def test_platform_failures_are_retried_a_limited_number_of_times():
    assert retried(JOB, 137, RetryCounts(platform=10), 10) is None
    assert retried(JOB, 137, RetryCounts(platform=6, resource=4), 10) is None


def test_a_permanent_failure_is_not_retried():
    assert retried(RetryPolicy(True, 5), 232, RetryCounts(), 10) is None


def test_an_unknown_failure_is_retried_up_to_the_retry_count_of_the_job():
    assert retried(RetryPolicy(True, 2), 255, RetryCounts(user=1), 10) == RetryCounts(user=2)
    assert retried(RetryPolicy(True, 2), 255, RetryCounts(user=2, platform=1), 10) is None
    assert retried(RetryPolicy(True, -1), 255, RetryCounts(user=99), 10) == RetryCounts(user=100)


def test_a_successful_job_is_retried_only_if_the_retry_count_is_minus_two():
    assert retried(RetryPolicy(True, 5), 0, RetryCounts(), 10) is None
    assert retried(RetryPolicy(True, -1), 0, RetryCounts(), 10) is None
    assert retried(RetryPolicy(True, -2), 0, RetryCounts(), 10) == RetryCounts(user=1)


def test_a_task_in_a_gang_is_never_retried_separately():
    assert retried(RetryPolicy(False, 0), 137, RetryCounts(), 10) is None


@given(CODES, st.integers(0, 4), st.integers(0, 4))
def test_the_number_of_retries_is_bounded(code, most, most_platform):
    counts, tries = RetryCounts(), 0
    while (following := retried(RetryPolicy(True, most), code, counts, most_platform)) is not None:
        assert following.total == counts.total + 1
        counts, tries = following, tries + 1
        assert tries <= most + most_platform


# ---- completion


def ends(*codes, role="worker"):
    return [TaskEnd(role, index, TaskExit(code)) for index, code in enumerate(codes)]


def judged(min_failed, min_succeeded, tasks, found):
    return verdict([("worker", CompletionPolicy(min_failed, min_succeeded))], tasks, found)


def test_a_job_fails_with_the_exit_code_of_the_task_whose_failure_reaches_the_limit():
    decided = judged(2, -1, 4, ends(255, 0, 232))
    assert decided.exit.code == 232
    assert decided.trigger.message == "FailedTaskCount 2 has reached MinFailedTaskCount 2 in the TaskRole"
    assert (decided.trigger.role, decided.trigger.index) == ("worker", 2)


def test_a_job_succeeds_once_enough_tasks_have_succeeded_even_if_other_tasks_still_run():
    decided = judged(1, 1, 3, ends(0))
    assert decided.exit.code == 0
    assert (
        decided.trigger.message == "SucceededTaskCount 1 has reached MinSucceededTaskCount 1 in the TaskRole"
    )


def test_the_first_fulfilled_completion_policy_determines_the_result_of_a_job():
    assert judged(1, 1, 2, ends(0, 255)).exit.code == 0
    assert judged(1, 1, 2, ends(255, 0)).exit.code == 255


def test_a_failure_tolerant_job_succeeds_even_if_all_tasks_failed():
    decided = judged(-1, -1, 2, ends(255, 255))
    assert (decided.exit.code, decided.trigger.role) == (0, None)
    assert "CompletedTaskCount 2 has reached TotalTaskCount 2" in decided.trigger.message


def test_a_job_has_no_result_while_tasks_run_and_no_policy_is_fulfilled():
    assert judged(2, -1, 3, ends(255, 0)) is None


def test_completed_tasks_are_counted_separately_for_each_role():
    policies = [("ps", CompletionPolicy(1, 1)), ("worker", CompletionPolicy(2, 2))]
    found = [*ends(255, 0), *ends(role="ps")]
    assert verdict(policies, 4, found) is None
    assert verdict(policies, 4, [*found, TaskEnd("ps", 0, TaskExit(255))]).trigger.role == "ps"


@given(
    st.integers(-1, 4),
    st.integers(-1, 4),
    st.lists(st.sampled_from([0, 255, 137]), min_size=1, max_size=6),
)
def test_the_result_of_a_job_never_changes_and_exists_when_the_last_task_has_ended(
    min_failed, min_succeeded, codes
):
    found = ends(*codes)
    verdicts = [
        judged(min_failed, min_succeeded, len(codes), found[:count]) for count in range(len(codes) + 1)
    ]
    first = next(each for each in verdicts if each is not None)
    assert all(each == first for each in verdicts[verdicts.index(first) :])
    failed, succeeded = sum(code != 0 for code in codes), sum(code == 0 for code in codes)
    if first.exit.code != 0:
        assert 1 <= min_failed <= failed
    elif first.trigger.role is not None:
        assert 1 <= min_succeeded <= succeeded
    else:
        assert not 1 <= min_failed <= failed
        assert not 1 <= min_succeeded <= succeeded


# ---- ports


def test_chosen_ports_are_equal_to_the_ports_that_openpai_computes():
    uid = "2320bc0d-db98-4969-965f-077953c6aee9"
    chosen = chosen_ports(uid, {"ssh": 1, "http": 1, "nni": 3}, 15000, 40000, lambda _: True)
    assert chosen == {"ssh": (26055,), "http": (25895,), "nni": (38675, 32000, 20803)}


def test_a_port_in_use_is_replaced_by_the_next_free_port():
    start = hashed_port("c", "http", 0, 15000, 40000)
    taken = {start, start + 1}
    assert chosen_ports("c", {"http": 1}, 15000, 40000, lambda port: port not in taken) == {
        "http": (start + 2,)
    }


@given(st.text(), st.dictionaries(st.sampled_from("abc"), st.integers(-1, 5)), st.integers(15, 40))
def test_chosen_ports_are_distinct_and_free_and_within_the_range(container_id, wanted, size):
    free = {1000 + step for step in range(size)} - {1003, 1007}
    chosen = (
        chosen_ports(container_id, wanted, 1000, 1000 + size, free.__contains__)
        if sum(max(0, count) for count in wanted.values()) <= len(free)
        else {}
    )
    ports = [port for each in chosen.values() for port in each]
    assert len(set(ports)) == len(ports)
    assert free.issuperset(ports)


def test_a_port_range_without_enough_free_ports_raises_an_error():
    with pytest.raises(PortsExhausted):
        chosen_ports("c", {"http": 2}, 1000, 1001, lambda _: True)


# ---- the queue


def a_request(job_id, **needs):
    return Request(job_id, {name: ResourceCounts(*need) for name, need in needs.items()})


def a_cluster(cpu=4, memory_mb=100, gpu=2):
    return virtual_clusters({"default": ResourceCounts(cpu, memory_mb, gpu)})["default"]


def granted(cluster):
    return [grant.request.job_id for grant in cluster.grants()]


def test_requests_are_granted_in_the_order_of_submission():
    cluster = a_cluster()
    cluster.enqueue(a_request(1, a=(3, 1, 0)))
    cluster.enqueue(a_request(2, b=(2, 1, 0)))
    cluster.enqueue(a_request(3, c=(1, 1, 0)))
    assert granted(cluster) == [1]
    cluster.release("a")
    assert granted(cluster) == [2, 3]


def test_all_containers_of_a_request_are_granted_together():
    cluster = a_cluster()
    cluster.enqueue(a_request(1, a=(1, 1, 0)))
    cluster.enqueue(a_request(2, b=(2, 1, 0), c=(2, 1, 0)))
    assert granted(cluster) == [1]
    cluster.release("a")
    assert granted(cluster) == [2]


def test_each_gpu_is_assigned_to_one_container_of_its_virtual_cluster():
    first, second = virtual_clusters({"a": ResourceCounts(9, 9, 2), "b": ResourceCounts(9, 9, 1)}).values()
    first.enqueue(a_request(1, a=(0, 0, 1), b=(0, 0, 1)))
    second.enqueue(a_request(2, c=(0, 0, 1)))
    assert next(first.grants()).gpus == {"a": (0,), "b": (1,)}
    assert next(second.grants()).gpus == {"c": (2,)}


def test_a_queued_request_is_not_granted_if_it_leaves_the_queue_after_another_request_was_granted():
    cluster = a_cluster()
    for job_id, name in enumerate("abc"):
        cluster.enqueue(a_request(job_id, **{name: (1, 1, 0)}))
    grants = cluster.grants()
    assert next(grants).request.job_id == 0
    cluster.dequeue(["b"])
    assert [grant.request.job_id for grant in grants] == [2]


def test_a_request_that_leaves_the_queue_unblocks_the_next_request():
    cluster = a_cluster()
    cluster.enqueue(a_request(1, a=(9, 1, 0)))
    cluster.enqueue(a_request(2, b=(1, 1, 0)))
    cluster.dequeue(["a"])
    assert granted(cluster) == [2]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100), st.integers(0, 2)), max_size=12), st.data())
def test_queued_containers_start_in_order_and_never_exceed_the_resources_of_the_cluster(needs, data):
    cluster = a_cluster()
    for number, need in enumerate(needs):
        cluster.enqueue(a_request(number, **{f"c{number}": need}))
    order, running = [], []
    while len(order) < len(needs) or running:
        found = granted(cluster)
        order += found
        running += found
        assert cluster.used.fits_into(cluster.capacity)
        held = [gpu for _, gpus in cluster._held.values() for gpu in gpus]
        assert len(set(held)) == len(held)
        assert running, "no container runs, and a request is queued"
        cluster.release(f"c{running.pop(data.draw(st.integers(0, len(running) - 1)))}")
    assert order == sorted(order)
    assert cluster.used == ResourceCounts()


@pytest.mark.parametrize(
    "line", ["tensorflow step 1 of 2\r", "Loaded runtime CuDNN library 1 ", "CUDA error\n"]
)
def test_a_log_of_megabytes_without_line_ends_is_scanned_quickly(line: str) -> None:
    assert container_exit(1, line * (5_000_000 // len(line))).code == 255


def test_a_log_pattern_matches_only_if_its_words_occur_in_order_on_one_line() -> None:
    log = "tensorflow begins\nTensorFlow: ResourceExhaustedError: OOM when allocating\nmore"
    found = container_exit(1, log)
    assert (found.code, found.matched_log) == (221, "TensorFlow: ResourceExhaustedError: OOM when allocating")
    assert container_exit(1, "OOM ResourceExhaustedError tensorflow").code == 255
    assert container_exit(1, "tensorflow\nResourceExhaustedError\nOOM").code == 255
