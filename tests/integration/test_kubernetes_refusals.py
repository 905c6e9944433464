"""Whole experiments, with the real manager and keepers, on a Kubernetes cluster of ours that refuses jobs."""

import contextlib

import pytest
from kube_place import our_cluster, worker_role
from real_experiment import RealExperiment, wait_until

pytest.importorskip("kubernetes")

TRAIN = """\
import nni_sdk
nni_sdk.report_final_result(nni_sdk.get_next_parameter()["x"])
"""
CREATE = ("create", "frameworks")
LIMIT = "frameworks is forbidden: maximum cpu usage per Container is 2, but limit is 99"
QUOTA = "frameworks is forbidden: exceeded quota: team, requested: count/frameworks=1, used: 2, limited: 2"
TIMEOUT_S = 180


@pytest.fixture
def around(tmp_path):
    with our_cluster(tmp_path) as around:
        yield around


@pytest.fixture
def start(tmp_path, around):
    """Starts the manager of an experiment on the cluster."""
    with contextlib.ExitStack() as until_the_end:

        def start(*, reuse=False, **config):
            experiment = RealExperiment(
                *(tmp_path / "experiment", TRAIN),
                environ={"KUBECONFIG": str(around.kubeconfig)},
                trainingServicePlatform="frameworkcontroller",
                trial={"codeDir": ".", "taskRoles": [worker_role("python3 train.py", around.image)]},
                frameworkcontrollerConfig=around.storage | {"namespace": around.namespace, "reuse": reuse},
                **config,
            )
            experiment.create()
            until_the_end.callback(experiment.close)
            experiment.start()
            return experiment

        yield start


def statuses(experiment):
    return [trial["status"] for trial in experiment.get("/trial-jobs")]


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("refusal", [(403, "Forbidden", LIMIT), (422, "Invalid", "spec: Invalid value: 99")])
def test_a_cluster_that_refuses_every_job_ends_the_experiment_with_its_words(start, around, refusal, reuse):
    around.double.api.misbehave(refusal, 100, at=CREATE)
    experiment = start(reuse=reuse, trialConcurrency=2, maxTrialNum=50)
    experiment.wait_for_status("ERROR", timeout_s=TIMEOUT_S)
    (error,) = experiment.get("/check-status")["errors"]
    assert error.startswith("cannot submit jobs: the cluster refused 3 jobs in a row, ")
    assert refusal[2] in error
    wait_until(lambda: set(statuses(experiment)) == {"FAILED"}, "no trial waits any more")
    trials = experiment.get("/trial-jobs")
    assert 3 <= len(trials) <= 5, "those that were there when the third was refused"
    assert all(refusal[2] in trial["message"] for trial in trials)


def test_trials_wait_for_a_quota_with_that_reason_and_outlast_what_passes(start, around):
    api = around.double.api
    api.misbehave((403, "Forbidden", QUOTA), 1000, at=CREATE)
    experiment = start(trialConcurrency=2, maxTrialNum=2)
    wait_until(
        lambda: [QUOTA in trial["message"] for trial in experiment.get("/trial-jobs")] == [True, True],
        "both wait with the reason",
    )
    assert statuses(experiment) == ["WAITING"] * 2
    api.stop_misbehaving(CREATE)
    for how in ("conflict", 429, 503, "drop"):
        api.misbehave(how, 1, at=CREATE, retry_after=0)
    experiment.wait_for_status("DONE", timeout_s=TIMEOUT_S)
    assert statuses(experiment) == ["SUCCEEDED"] * 2


def test_a_login_that_has_expired_suspends_submission_until_it_is_renewed(start, around):
    api = around.double.api
    api.misbehave((401, "Unauthorized", "Unauthorized"), 1000, at=CREATE)
    experiment = start(trialConcurrency=2, maxTrialNum=2)

    def problem():
        return experiment.get("/check-status").get("problem", "")

    wait_until(lambda: "submission is suspended until the login is valid" in problem(), "it is told")
    assert "renew the login in your kubeconfig file" in problem()
    assert statuses(experiment) == ["WAITING"] * 2
    api.stop_misbehaving(CREATE)
    experiment.wait_for_status("DONE", timeout_s=TIMEOUT_S)
    assert statuses(experiment) == ["SUCCEEDED"] * 2
    assert problem() == ""
