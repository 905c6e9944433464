"""The states of FrameworkController and Kubernetes, mapped to stages and exit reasons."""

import copy
import json
from pathlib import Path

import pytest

from nni_manager.training_services.frameworkcontroller.operator import STAGES, FrameworkController
from nni_manager.training_services.kubernetes.operator import Stage
from nni_manager.training_services.kubernetes.pods import is_terminal, pending_reason, termination_message
from nni_manager.training_services.kubernetes.section import KubernetesConfig, NfsStorage
from trial_keeper.wire.reasons import ExitReason

OPERATOR = FrameworkController(KubernetesConfig("frameworkcontroller", NfsStorage("nas", "/nni"), ()))
GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes" / "framework_that_fails.json"
FAILED = {
    "metadata": {"name": "fw"},
    "status": {
        "state": "Completed",
        "attemptStatus": {
            "completionStatus": {
                "code": 3,
                "phrase": "ContainerUnrecognizedFailed",
                "diagnostics": "Pod failed",
                "type": {"name": "Failed", "attributes": []},
                "trigger": {"message": "enough have failed", "taskRoleName": "worker", "taskIndex": 1},
            },
            "taskRoleStatuses": [
                {
                    "name": "worker",
                    "taskStatuses": [
                        {"index": 0, "attemptStatus": {"podName": "fw-worker-0"}},
                        {
                            "index": 1,
                            "attemptStatus": {
                                "podName": "fw-worker-1",
                                "completionStatus": {
                                    "pod": {
                                        "containers": [{"name": "framework", "code": 3, "reason": "Error"}]
                                    }
                                },
                            },
                        },
                    ],
                }
            ],
        },
    },
}


def changed(code=3, reason="Error", **pod):
    framework = copy.deepcopy(FAILED)
    attempt = framework["status"]["attemptStatus"]
    attempt["completionStatus"]["code"] = code
    pod_status = attempt["taskRoleStatuses"][0]["taskStatuses"][1]["attemptStatus"]["completionStatus"]["pod"]
    pod_status["containers"][0] |= {"code": code, "reason": reason}
    pod_status |= pod
    return framework


def test_the_recorded_framework_counts_as_ended_when_it_reaches_the_state_completed():
    pod_status = [row[1] for row in json.loads(GOLDEN.read_text())["frameworks"] if row[1]]
    assert set(pod_status) <= set(STAGES)
    ends = [OPERATOR.stage_of({"status": {"state": word}}) is Stage.ENDED for word in pod_status]
    assert ends.index(True) == pod_status.index("Completed")
    assert OPERATOR.stage_of({}) is OPERATOR.stage_of({"status": {"state": "New"}}) is Stage.WAITING


def test_a_framework_that_succeeded_has_exit_code_0_and_no_message():
    framework = copy.deepcopy(FAILED)
    framework["status"]["attemptStatus"]["completionStatus"] = {"code": 0, "type": {"name": "Succeeded"}}
    verdict = OPERATOR.verdict_of(framework, {})
    assert (verdict.exit_code, verdict.message) == (0, "")


def test_a_failed_framework_reports_exit_code_and_message_of_the_deciding_task():
    verdict = OPERATOR.verdict_of(FAILED, {})
    assert (verdict.exit_code, verdict.pod, verdict.reason) == (3, "fw-worker-1", ExitReason.KEEPER_LOST)
    assert verdict.awaits_pod, "its pod may have a termination message"
    assert not OPERATOR.verdict_of(FAILED, {"fw-worker-1": {"status": {"phase": "Failed"}}}).awaits_pod
    assert verdict.message == (
        "FrameworkController reports fw: ContainerUnrecognizedFailed, code 3; enough have failed"
    )


@pytest.mark.parametrize(
    ("framework", "reason", "exit_code"),
    [
        (changed(137, "OOMKilled"), ExitReason.OUT_OF_MEMORY, 137),
        (changed(-101, containers=[]), ExitReason.JOB_LOST, None),
        (changed(-210, containers=[]), ExitReason.JOB_LOST, None),
        (changed(-1, containers=[], reason="Evicted"), ExitReason.KEEPER_LOST, None),
    ],
)
def test_oom_killed_tasks_and_evicted_tasks_and_lost_tasks_have_different_exit_reasons(
    framework, reason, exit_code
):
    verdict = OPERATOR.verdict_of(framework, {})
    assert (verdict.reason, verdict.exit_code) == (reason, exit_code)


def test_a_failed_framework_without_completion_status_is_reported_as_failed():
    verdict = OPERATOR.verdict_of({"metadata": {"name": "fw"}, "status": {"state": "Completed"}}, {})
    assert (verdict.exit_code, verdict.pod) == (None, None)
    assert "FrameworkController reports fw: failed" in verdict.message


def pending(**status):
    return {"status": {"phase": "Pending", **status}}


def waiting(reason, message=""):
    return [{"state": {"waiting": {"reason": reason, "message": message}}}]


@pytest.mark.parametrize(
    ("pod", "why"),
    [
        (pending(), ""),
        (pending(containerStatuses=waiting("ContainerCreating")), ""),
        (
            pending(containerStatuses=waiting("ImagePullBackOff", "Back-off pulling image")),
            "ImagePullBackOff: Back-off pulling image",
        ),
        (
            pending(
                conditions=[
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1"}
                ]
            ),
            "Unschedulable: 0/1",
        ),
        (pending(initContainerStatuses=waiting("ErrImagePull")), "ErrImagePull"),
        ({"status": {"phase": "Running", "containerStatuses": waiting("CrashLoopBackOff")}}, ""),
    ],
)
def test_the_pending_reason_of_a_pod_is_the_problem_of_its_container_or_of_its_scheduling(pod, why):
    assert pending_reason(pod) == why


def test_the_termination_message_contains_the_pod_message_and_the_container_message():
    ended = {"state": {"terminated": {"exitCode": 1, "message": "Traceback\n"}}}
    evicted = {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "low on memory",
        "containerStatuses": [ended],
    }
    assert termination_message({"status": evicted}) == "Evicted: low on memory\nTraceback"
    assert termination_message({"status": {"phase": "Running"}}) == termination_message({}) == ""
    assert is_terminal({"status": evicted})
    assert not is_terminal({})
