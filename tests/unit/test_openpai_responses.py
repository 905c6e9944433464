"""Jobs in the responses of OpenPAI's API."""

from pathlib import Path

from openpai_pictures import a_failed_job, a_summary

from nni_manager.local_openpai import response_bodies
from nni_manager.local_openpai.core.job import JobAttempt
from nni_manager.local_openpai.core.policies import RetryCounts
from nni_manager.local_openpai.core.queue import Request, ResourceCounts, VirtualCluster
from nni_manager.local_openpai.core.states import EventType, ExecutionType
from nni_manager.local_openpai.jobs import JobDetail, JobEvent
from nni_manager.local_openpai.settings import StorageSettings

SPEC = {
    "code": 255,
    "phrase": "PAIRuntimeUnknownFailed",
    "issuer": "PAI_RUNTIME",
    "causer": "UNKNOWN",
    "type": "UNKNOWN_FAILURE",
    "stage": "UNKNOWN",
    "behavior": "UNKNOWN",
    "reaction": "RETRY_TO_MAX",
    "reason": "the command failed, and nothing in its log tells why",
    "repro": ("run a command that exits with 1",),
    "solution": ("read the logs of the task", "correct the command"),
}


def test_a_listed_job_has_all_keys_of_openpai_and_times_in_milliseconds():
    job = a_summary(retries=RetryCounts(1, 2, 3), launched_at_s=2.5, execution_type=ExecutionType.STOP)
    assert response_bodies.list_item(job) == {
        "debugId": job.debug_id,
        "name": "job",
        "username": "ada",
        "state": "WAITING",
        "subState": "AttemptCreationPending",
        "executionType": "STOP",
        "retries": 6,
        "retryDetails": {"user": 1, "platform": 2, "resource": 3},
        "retryDelayTime": None,
        "submissionTime": 1000,
        "createdTime": 1000,
        "launchedTime": 2500,
        "completedTime": None,
        "tags": [],
        "appExitCode": None,
        "virtualCluster": "default",
        "totalGpuNumber": 0,
        "totalTaskNumber": 1,
        "totalTaskRoleNumber": 1,
        "jobPriority": None,
    }


def test_the_exit_reason_of_a_failed_job_is_reported_for_the_job_and_for_its_task():
    picture = a_failed_job()
    document = response_bodies.detail(picture)
    assert (document["name"], document["tags"], document["debugId"]) == ("job", ["a"], picture.job.debug_id)
    status = document["jobStatus"]
    assert (status["state"], status["attemptId"], status["attemptState"]) == ("FAILED", 0, "FAILED")
    assert (status["appExitCode"], status["appExitType"], status["appExitSpec"]) == (
        255,
        "UNKNOWN_FAILURE",
        SPEC,
    )
    assert status["appExitMessages"] == {
        "container": "the commands ended with 3",
        "runtime": {"exitCode": 255, "originUserExitCode": 3, "matchedUserLogString": "Traceback"},
        "launcher": None,
    }
    assert status["appExitTriggerMessage"].startswith("FailedTaskCount 1 has reached")
    assert (status["appExitTriggerTaskRoleName"], status["appExitTriggerTaskIndex"]) == ("worker1", 0)
    assert (status["appLaunchedTime"], status["appCompletedTime"], status["appProgress"]) == (2000, 3250, 1)
    role = document["taskRoles"]["worker1"]
    assert role["taskRoleStatus"] == {"name": "worker1"}
    (task,) = role["taskStatuses"]
    assert task == {
        "taskIndex": 0,
        "taskUid": "task-0",
        "taskState": "FAILED",
        "retries": 3,
        "accountableRetries": 1,
        "createdTime": 1500,
        "launchedTime": 2000,
        "completedTime": 3250,
        "attemptId": 0,
        "attemptState": "FAILED",
        "currentAttemptCreatedTime": 1500,
        "currentAttemptLaunchedTime": 2000,
        "currentAttemptCompletedTime": 3250,
        "containerId": "pod-0",
        "containerIp": "127.0.0.1",
        "containerNodeName": "127.0.0.1",
        "containerPorts": {"ssh": "26055", "nni": "1,2"},
        "containerGpus": "5",
        "containerLog": "/api/v2/jobs/ada~job/attempts/0/taskRoles/worker1/taskIndex/0/attempts/0/logs",
        "containerExitCode": 255,
        "containerExitSpec": SPEC,
        "containerExitDiagnostics": "the commands ended with 3",
    }


def test_the_list_and_the_detail_of_a_job_agree_on_all_shared_keys():
    picture = a_failed_job()
    item, status = response_bodies.list_item(picture.job), response_bodies.detail(picture)["jobStatus"]
    shared = item.keys() & status.keys()
    assert {"state", "retries", "completedTime", "appExitCode", "executionType", "virtualCluster"} <= shared
    assert {key: item[key] for key in shared} == {key: status[key] for key in shared}


def test_a_newly_submitted_job_has_no_exit_fields():
    job = a_summary()
    document = response_bodies.detail(JobDetail(job, JobAttempt(0, 1.0), {}))
    ends = {key: value for key, value in document["jobStatus"].items() if key.startswith("appExit")}
    assert len(ends) == 8
    assert set(ends.values()) == {None}
    assert (document["taskRoles"], document["jobStatus"]["appProgress"]) == ({}, 0)


def test_the_history_of_a_task_lists_each_attempt_with_its_log():
    picture = a_failed_job()
    history = response_bodies.task_history(picture.job, 0, "worker1", picture.tasks["worker1"])
    assert (history["taskRoleName"], history["taskIndex"], history["taskState"]) == ("worker1", 0, "FAILED")
    (attempt,) = history["attempts"]
    assert attempt["containerLog"].endswith("/attempts/0/logs")
    assert attempt["containerExitCode"] == 255


def test_only_task_events_contain_a_task_name():
    job = a_summary()
    of_task = JobEvent(EventType.WARNING, "Failed", "ended with 3", 0, "worker1", 4, "pod-0", 1, 2.5)
    document = response_bodies.event(of_task, job)
    assert (document["taskName"], document["podUid"]) == (f"{job.debug_id}-worker1-4", "pod-0")
    assert (document["type"], document["firstTimestamp"], document["frameworkName"]) == (
        "Warning",
        "1970-01-01T00:00:02.500Z",
        "ada~job",
    )
    of_job = response_bodies.event(JobEvent(EventType.NORMAL, "Submitted", "waits", 0), job)
    assert (of_job["taskName"], of_job["taskroleName"], of_job["taskIndex"]) == (None, None, None)


def test_the_capacity_of_a_virtual_cluster_is_a_percentage_of_gpus_or_else_of_cpus():
    half = VirtualCluster("a", ResourceCounts(1, 10, 2), (0, 1), used=ResourceCounts(1, 5, 1))
    for job_id in range(3):
        half.enqueue(Request(job_id, {f"c{job_id}": ResourceCounts(1, 1, 1)}))
    rest = VirtualCluster("b", ResourceCounts(9, 10, 2), (2, 3))
    document = response_bodies.virtual_clusters([half, rest])["a"]
    assert (document["capacity"], document["usedCapacity"], document["waitingJobs"]) == (50.0, 25.0, 3)
    assert document["resourcesTotal"] == {"cpu": 1, "vCores": 1, "memory": 10, "gpu": 2, "GPUs": 2}
    of_one_cpu = VirtualCluster("a", ResourceCounts(1, 10, 0), ())
    of_nine_cpus = VirtualCluster("b", ResourceCounts(9, 10, 0), ())
    assert response_bodies.virtual_clusters([of_one_cpu, of_nine_cpus])["b"]["capacity"] == 90.0
    empty = VirtualCluster("c", ResourceCounts(0, 0, 0), ())
    assert response_bodies.virtual_clusters([empty])["c"]["capacity"] == 0.0
    (node,) = response_bodies.node([half, rest]).values()
    assert (node["total"]["gpu"], node["available"]) == (
        4,
        {"cpu": 9, "vCores": 9, "memory": 15, "gpu": 3, "GPUs": 3},
    )


def test_the_description_of_a_storage_shows_its_path_and_whether_it_is_mounted():
    document = response_bodies.storage_detail(
        StorageSettings("team", Path("/srv/team"), True, True), is_mounted=False
    )
    assert (document["name"], document["default"], document["readOnly"]) == ("team", True, True)
    assert (document["data"], document["type"], document["mounted"]) == (
        {"path": "/srv/team"},
        "unknown",
        False,
    )
