"""A job counts as over after its tasks have ended, although sidecars keep its pods running."""

import pytest

from nni_manager.domain.completion import Completion, TaskRole
from nni_manager.training_services.kubernetes.sidecars import are_over, outcome_of
from trial_keeper.wire.reasons import ExitReason

MASTER, WORKERS = TaskRole("master"), TaskRole("worker", 2, min_failed_tasks=2, min_succeeded_tasks=-1)
JOB = Completion((MASTER, WORKERS))
RUNNING = {"running": {}}


def ended(code, reason="Error"):
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": "2026-01-01T00:00:30Z"}}


def a_pod(role, state, sidecar=RUNNING, phase="Running", restart_policy="Never", **meta):
    """A pod whose keeper and sidecar are in these states."""
    env = [{"name": "TRIAL_KEEPER_JOB_ID", "value": "j"}, {"name": "TRIAL_KEEPER_ROLE", "value": role}]
    containers = [{"name": "istio-proxy"}, {"name": "trial", "env": env}]
    statuses = [{"name": "istio-proxy", "state": sidecar}, {"name": "trial", "state": state}]
    spec = {"containers": containers, "restartPolicy": restart_policy}
    return {"metadata": meta, "spec": spec, "status": {"phase": phase, "containerStatuses": statuses}}


def terminal(role, code):
    return a_pod(role, ended(code), ended(0), "Failed" if code else "Succeeded")


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([a_pod("master", ended(0)), a_pod("worker", ended(0)), a_pod("worker", ended(1))], True),
        ([terminal("master", 0), a_pod("worker", ended(0)), terminal("worker", 1)], True),
        ([a_pod("master", ended(1)), a_pod("worker", RUNNING), a_pod("worker", RUNNING)], True),
        ([a_pod("master", RUNNING), a_pod("worker", ended(1)), terminal("worker", 1)], True),
        ([a_pod("master", RUNNING), a_pod("worker", ended(1)), a_pod("worker", RUNNING)], False),
        ([a_pod("master", ended(0)), a_pod("worker", RUNNING), a_pod("worker", RUNNING)], False),
        ([a_pod("master", ended(0)), a_pod("worker", ended(0))], False),
        ([terminal("master", 0), terminal("worker", 0), terminal("worker", 0)], False),
        ([], False),
    ],
    ids=[
        "every task has ended",
        "one pod is held",
        "the master has failed",
        "two workers have failed",
        "one worker has failed",
        "workers run",
        "a pod is missing",
        "no pod is held",
        "no pod is shown",
    ],
)
def test_a_job_is_over_if_its_tasks_are_over_and_a_sidecar_keeps_a_pod_running(pods, expected):
    assert are_over(pods, [], JOB) is expected


@pytest.mark.parametrize(("state", "expected"), [(ended(0), True), (RUNNING, False)])
def test_a_deleted_pod_counts_as_ended_only_if_its_task_had_ended_before_the_deletion(state, expected):
    present = [a_pod("worker", ended(0)), a_pod("worker", ended(0))]
    assert are_over(present, [a_pod("master", state)], JOB) is expected


@pytest.mark.parametrize(
    "pod",
    [
        a_pod("main", ended(1), restart_policy="OnFailure"),
        a_pod("main", ended(1), deletionTimestamp="2026-01-01T00:00:40Z"),
        a_pod("main", ended(1), ended(0)),
        a_pod("main", RUNNING, ended(1)),
        {"metadata": {}},
    ],
    ids=[
        "the container starts again",
        "the pod is deleted",
        "no container runs",
        "the sidecar has ended",
        "new",
    ],
)
def test_a_job_is_not_over_while_its_pod_terminates_or_its_task_may_still_run(pod):
    assert not are_over([pod], [], Completion())


def named(name, pod, finished_at):
    pod["metadata"]["name"] = name
    pod["status"]["containerStatuses"][1]["state"]["terminated"]["finishedAt"] = finished_at
    return pod


@pytest.mark.parametrize(
    ("how", "reason"), [("OOMKilled", ExitReason.OUT_OF_MEMORY), ("Error", ExitReason.KEEPER_LOST)]
)
def test_the_outcome_of_a_job_with_a_sidecar_is_the_outcome_of_its_first_failed_task(how, reason):
    pods = [
        named("m", a_pod("master", ended(0)), "2026-01-01T00:00:29Z"),
        named("w-0", terminal("worker", 1), "2026-01-01T00:00:31Z"),
        named("w-1", a_pod("worker", ended(137, how)), "2026-01-01T00:00:30Z"),
    ]
    outcome = outcome_of(pods, JOB)
    assert (outcome.exit_code, outcome.reason, outcome.pod) == (137, reason, "w-1")
    assert outcome.message.endswith("sidecar istio-proxy still runs")


@pytest.mark.parametrize(("codes", "expected"), [((0, 1, 0), 0), ((0, 0, 0), 0), ((1, 0, 0), 1)])
def test_the_outcome_of_a_job_with_a_sidecar_ignores_failures_that_the_completion_policy_tolerates(
    codes, expected
):
    roles = ("master", "worker", "worker")
    pods = [
        named(f"p-{number}", a_pod(role, ended(code)), "2026-01-01T00:00:30Z")
        for number, (role, code) in enumerate(zip(roles, codes, strict=True))
    ]
    assert outcome_of(pods, JOB).exit_code == expected


def test_a_job_fails_if_all_its_tasks_have_failed_although_the_completion_policy_tolerates_failures():
    pods = [named("p", a_pod("main", ended(3)), "2026-01-01T00:00:30Z")]
    assert outcome_of(pods, Completion((TaskRole("main", min_failed_tasks=-1),))).exit_code == 3
