"""The real manager and keepers run experiments on a fake OpenPAI that refuses jobs, ends them while no manager runs, or has a
hanging log server.
"""

import contextlib
import time

import psutil
import pytest
from deadlines import DEADLINE_S, scaled_s
from fake_pai import STORAGE, USER, FakePai
from openpai_place import make_place, run_nnictl
from real_experiment import RealExperiment, wait_until

TOKEN = "token-of-the-profile-page"
TRAIN = """\
import nni_sdk
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_final_result(x)
"""
WAITS = """\
import signal
import nni_sdk
nni_sdk.get_next_parameter()
nni_sdk.report_intermediate_result(1)
signal.pause()
"""
SUBMIT = ("POST", "/jobs")


@pytest.fixture
def server():
    server = FakePai(run_jobs=True)
    server.start()
    yield server
    server.close()


class Run:
    """An experiment on the server. Its data comes from the API of its manager."""

    def __init__(self, experiment):
        self.experiment = experiment

    def trials(self):
        return self.experiment.get("/trials")

    def statuses(self):
        return [trial["status"] for trial in self.trials()]

    def wait_for_status(self, status):
        self.experiment.wait_for_status(status, timeout_s=DEADLINE_S)


@pytest.fixture
def start(tmp_path, server):
    """Return a function that starts the manager of an experiment on the server."""
    with contextlib.ExitStack() as until_the_end:

        def start(train=TRAIN, **config):
            storage = tmp_path / "storage"
            storage.mkdir()
            trial = {
                "command": "python3 train.py",
                "codeDir": ".",
                "gpuNum": 0,
                "cpuNum": 1,
                "memoryMB": 512,
                "image": "anything",
                "paiStorageConfigName": STORAGE,
                "nniManagerNFSMountPath": str(storage),
                "containerNFSMountPath": str(storage),
            }
            pai = {"userName": USER, "token": TOKEN, "host": server.host}
            experiment = RealExperiment(
                *(tmp_path / "experiment", train),
                **{"trainingServicePlatform": "pai", "trial": trial, "paiConfig": pai, **config},
            )
            experiment.create()
            until_the_end.callback(experiment.close)
            experiment.start()
            return Run(experiment)

        yield start


def test_nnictl_create_reports_a_forbidden_virtual_cluster_if_openpai_hides_the_permissions(tmp_path, server):
    server.shows_rights = False
    place = make_place(tmp_path, server, TRAIN)
    done = run_nnictl(
        *(place, "create", "--config", "config.yml", "--port", "auto", "--foreground"),
        replace={"  image: a": "  virtualCluster: other\n  image: a"},
    )
    assert done.returncode == 3
    assert "User ada is not allowed to do operation in other; ask an administrator" in done.stderr
    assert server.counted()["GET", "/users/{name}"] == 1


def test_an_accepted_job_resets_the_count_of_consecutive_refusals(start, server):
    for how in ("refused", "refused", "accepted", "refused", "refused", "accepted"):
        answer = (400, "InvalidProtocolError", "no good") if how == "refused" else "nothing"
        server.misbehave(answer, 1, at=SUBMIT)
    run = start(trialConcurrency=1, maxTrialNum=6)
    run.wait_for_status("DONE")
    assert run.statuses() == ["FAILED", "FAILED", "SUCCEEDED", "FAILED", "FAILED", "SUCCEEDED"]


def test_the_manager_retries_one_submission_at_a_time_while_the_token_is_rejected(start, server):
    server.tokens = {"a-newer-token"}
    run = start(trialConcurrency=3, maxTrialNum=3)

    def problem():
        return run.experiment.get("/check-status").get("problem", "")

    wait_until(
        lambda: "submission is suspended until the login is valid" in problem(), "the problem is shown"
    )
    assert "create a new token on OpenPAI's profile page" in problem()
    wait_until(lambda: server.counted()[SUBMIT] == 5, "two single retries follow")
    assert run.statuses() == ["WAITING"] * 3
    assert all("create a new token on OpenPAI's profile page" in trial["message"] for trial in run.trials())
    file = run.experiment.config_file
    file.write_text(file.read_text().replace(TOKEN, "a-newer-token"))
    run.wait_for_status("DONE")
    assert run.statuses() == ["SUCCEEDED"] * 3
    assert problem() == ""


def kill(job):
    """Kill all processes of the job, like a failure of the node."""
    for process in job.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid)
            for each in [*family.children(recursive=True), family]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


@pytest.mark.parametrize("how", ["hangs", "trickles"])
def test_a_hanging_log_server_delays_the_end_of_a_trial_only_until_the_request_times_out(start, server, how):
    server.log_server = how
    run = start(WAITS, trialConcurrency=2, maxTrialNum=2)
    wait_until(lambda: run.statuses() == ["RUNNING"] * 2, "both run", DEADLINE_S)
    jobs = list(server.jobs.values())
    for job in jobs:
        kill(job)
    wait_until(lambda: server.log_calls == 2, "both messages are requested", DEADLINE_S)
    requested_at_s = time.monotonic()
    run.wait_for_status("DONE")
    # The log server blocks each request for 40 s. The trials end earlier, because the manager's request times out before that.
    assert time.monotonic() - requested_at_s < scaled_s(20)
    assert run.statuses() == ["FAILED"] * 2
    assert server.log_calls == 2
    for trial in run.trials():
        assert "OpenPAI reports job nni_exp_" in trial["message"]


def end_without_a_manager(server, run, *, code=None, is_stopped=False):
    """Kill the manager of a running trial, and then end its job: with this code on OpenPAI, or stopped on OpenPAI's page."""
    wait_until(lambda: run.statuses() == ["RUNNING"], "the trial runs", DEADLINE_S)
    run.experiment.kill_manager()
    job = server.wait_for_job()
    job.ends_with, job.execution_type = code, "STOP" if is_stopped else "START"
    kill(job)
    wait_until(lambda: job.state in ("FAILED", "STOPPED"), "the job has ended", DEADLINE_S)


@pytest.mark.parametrize(
    ("end", "reason", "message"),
    [
        ({"is_stopped": True}, "job lost", "was stopped on OpenPAI, but not by this manager"),
        ({"code": -1200}, "out of memory", "PAIRuntimeUnknownFailed"),
        ({"code": 112}, "mount", "free some space on the storage"),
    ],
)
def test_a_trial_whose_job_ended_while_no_manager_ran_has_the_reason_that_openpai_reports(
    start, server, end, reason, message
):
    run = start(WAITS, trialConcurrency=1, maxTrialNum=1)
    end_without_a_manager(server, run, **end)
    run.experiment.start()
    run.wait_for_status("DONE")
    (trial,) = run.trials()
    assert (trial["status"], trial["reason"]) == ("FAILED", reason)
    assert message in trial["message"]


def test_a_trial_whose_job_was_preempted_while_no_manager_ran_starts_again(start, server):
    run = start(WAITS, trialConcurrency=1, maxTrialNum=1)
    end_without_a_manager(server, run, code=-1003)
    run.experiment.start()
    server.wait_for_job(2)
    wait_until(lambda: run.statuses() == ["RUNNING"], "the trial runs again", DEADLINE_S)
