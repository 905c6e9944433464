"""The conditions of Kubeflow, its Trainer and Kubernetes, mapped to stages and exit reasons."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.training_services.kubeflow.operators import OPERATORS
from nni_manager.training_services.kubernetes.operator import SUCCESS, Stage
from nni_manager.training_services.kubernetes.section import KubernetesConfig, NfsStorage, RoleConfig
from trial_keeper.wire.reasons import ExitReason

GOLDEN = Path(__file__).parents[1] / "golden" / "kubernetes"
ROLES = (RoleConfig("worker", 1, "true", "me/train:1", 0, 1, 100),)


def operator(word, queue=None):
    config = KubernetesConfig(word, NfsStorage("nas", "/nni"), ROLES, "v1", queue=queue, runtime="r")
    return OPERATORS[word](config)


def job(*conditions, **status):
    met = [
        {"type": each[0], "status": each[1], "message": "".join(each[2:]), "reason": f"Job{each[0]}"}
        for each in conditions
    ]
    return {"metadata": {"name": "j"}, "status": {"conditions": met, **status}}


def failed(code=None, reason="Error", ended_at="2026-01-01T00:00:02Z"):
    ended = [] if code is None else [{"exitCode": code, "reason": reason, "finishedAt": ended_at}]
    statuses = [{"state": {"terminated": each}} for each in ended]
    return {"status": {"phase": "Failed", "containerStatuses": statuses}}


@pytest.mark.parametrize(
    ("name", "word", "stages"),
    [
        ("tfjob_that_succeeds", "tf-operator", ["WAITING"] * 3 + ["RUNNING"] + ["ENDED"] * 3),
        ("pytorchjob_that_fails", "pytorch-operator", ["WAITING"] * 2 + ["RUNNING"] + ["ENDED"] * 2),
    ],
)
def test_every_status_recorded_on_a_cluster_maps_to_the_expected_stage(name, word, stages):
    rows = json.loads((GOLDEN / f"{name}.json").read_text())["jobs"]
    assert [operator(word).stage_of(job(*row[1])).name for row in rows] == stages


@pytest.mark.parametrize(
    ("word", "document", "stage"),
    [
        ("tf-operator", {"metadata": {}}, Stage.WAITING),
        # A job has not ended if a condition was reset to False or if the operator suspended the job.
        ("tf-operator", job(("Running", "False"), ("Restarting", "True")), Stage.RUNNING),
        ("pytorch-operator", job(("Running", "True"), ("Restarting", "False")), Stage.RUNNING),
        ("pytorch-operator", job(("Created", "True"), ("Suspended", "True")), Stage.WAITING),
        ("pytorch-operator", job(("SomethingNew", "True")), Stage.WAITING),
        ("job", job(active=1, ready=0), Stage.WAITING),
        ("job", job(active=1, ready=1), Stage.RUNNING),
        ("job", job(("SuccessCriteriaMet", "True"), succeeded=1), Stage.RUNNING),
        ("job", job(("SuccessCriteriaMet", "True"), ("Complete", "True"), succeeded=1), Stage.ENDED),
        ("job", job(("FailureTarget", "True"), ("Failed", "True"), failed=1), Stage.ENDED),
        ("trainjob", job(("Suspended", "True")), Stage.WAITING),
        ("trainjob", job(jobsStatus=[{"name": "model-initializer", "succeeded": 1}]), Stage.WAITING),
        ("trainjob", job(("Suspended", "False"), jobsStatus=[{"name": "node", "ready": 1}]), Stage.RUNNING),
        ("trainjob", job(("Complete", "True"), jobsStatus=[{"name": "node", "ready": 0}]), Stage.ENDED),
    ],
)
def test_conditions_and_pod_counts_of_a_job_determine_its_stage(word, document, stage):
    assert operator(word).stage_of(document) is stage


def test_the_pod_that_failed_first_determines_exit_code_and_reason():
    document = job(("Failed", "True", "PyTorchJob j is failed because 1 Master replica(s) failed."))
    pods = {"a": failed(143), "b": failed(3, ended_at="2026-01-01T00:00:01Z"), "c": {"status": {}}}
    verdict = operator("pytorch-operator").verdict_of(document, pods)
    assert (verdict.exit_code, verdict.pod, verdict.reason) == (3, "b", ExitReason.KEEPER_LOST)
    assert verdict.message == (
        "Kubeflow reports PyTorchJob j: PyTorchJob j is failed because 1 Master replica(s) failed."
    )
    assert not verdict.awaits_pod


def test_a_pod_that_the_operator_deleted_does_not_determine_the_exit_code():
    ended = failed(143) | {"metadata": {"deletionTimestamp": "2026-01-01T00:00:32Z"}}
    verdict = operator("job").verdict_of(job(("Failed", "True")), {"a": ended, "b": failed(3)})
    assert (verdict.exit_code, verdict.pod) == (3, "b")


def test_an_oom_killed_pod_has_the_reason_out_of_memory():
    pods = {"a": failed(137, "OOMKilled")}
    verdict = operator("job").verdict_of(job(("Failed", "True")), pods)
    assert (verdict.exit_code, verdict.reason) == (137, ExitReason.OUT_OF_MEMORY)
    assert verdict.message == "Kubernetes reports Job j: JobFailed"


def test_a_failed_pod_without_container_status_has_no_exit_code():
    verdict = operator("job").verdict_of(job(("Failed", "True")), {"a": failed()})
    assert (verdict.exit_code, verdict.pod) == (None, "a")


def test_a_failed_job_is_reported_only_after_one_of_its_pods_has_failed():
    verdict = operator("trainjob").verdict_of(
        job(("Failed", "True")), {"a": {"status": {"phase": "Running"}}}
    )
    assert (verdict.exit_code, verdict.pod, verdict.awaits_pod) == (None, None, True)


def test_a_succeeded_job_has_exit_code_0_despite_a_failed_pod():
    assert operator("tf-operator").verdict_of(job(("Succeeded", "True")), {"a": failed(1)}) == SUCCESS


def test_the_pending_reason_of_a_suspended_job_names_the_queue():
    waits = job(("Suspended", "True"))
    assert "kubectl describe localqueue team" in operator("job", "team").pending_reason(waits)
    assert operator("job").pending_reason(waits).startswith("Job is suspended")
    assert operator("job", "team").pending_reason(job(("Suspended", "False"))) == ""


WORDS = ["Created", "Running", "Restarting", "Suspended", "Succeeded", "Complete", "Failed", "FailureTarget"]
CONDITIONS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(WORDS) | st.text(), "status": st.sampled_from(["True", "False", "Unknown"])},
        optional={"message": st.text(), "reason": st.text() | st.none()},
    )
)
COUNTS = st.none() | st.integers(0, 3)
STATUSES = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "conditions": CONDITIONS | st.none(),
        "ready": COUNTS,
        "failed": COUNTS,
        "jobsStatus": st.lists(st.fixed_dictionaries({"name": st.just("node"), "ready": COUNTS})),
    },
)
PHASES = st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"])
PODS = st.dictionaries(
    st.text(max_size=3), st.fixed_dictionaries({"status": PHASES.map(lambda it: {"phase": it})})
)


@pytest.mark.parametrize("word", OPERATORS)
@given(status=STATUSES, pods=PODS)
def test_a_job_ends_if_and_only_if_a_terminal_condition_is_true(word, status, pods):
    document = {"metadata": {"name": "j"}, "status": status}
    met = {each["type"] for each in ((status or {}).get("conditions") or []) if each["status"] == "True"}
    ends = {"Failed", "Succeeded" if word.endswith("-operator") else "Complete"}
    assert (operator(word).stage_of(document) is Stage.ENDED) is bool(met & ends)
    verdict = operator(word).verdict_of(document, pods)
    assert (verdict.exit_code == 0) is ("Failed" not in met)
    assert verdict.pod is None or verdict.pod in pods
    operator(word).pending_reason(document)
