"""Behaviour that only jobs on OpenPAI have: job lists, the log server and links. tests/contract/test_platform_jobs.py tests the
behaviour that all platforms share.
"""

import contextlib

import pytest
from deadlines import DEADLINE_S
from fake_pai import USER, FakePai
from real_experiment import until

from nni_manager.errors import RetryableError
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.openpai import job_log, termination
from nni_manager.training_services.openpai.client import OpenPaiService
from nni_manager.training_services.openpai.connection import JobNotOnCluster
from nni_manager.training_services.openpai.job import template_of
from nni_manager.training_services.openpai.rest import OpenPai
from nni_manager.training_services.openpai.section import PaiConfig
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

MOUNT = "/mnt/confignfs-data"
QUICK = ClientRetryPolicy(tries=2, first_s=0.001, longest_s=0.01, connect_within_s=2.0, answer_within_s=5.0)
TRIAL = f"{USER}~nni_exp_EXPT_trial_trial1"


class Site:
    """A fake OpenPAI server, and the training services of successive managers."""

    def __init__(self, folder):
        self.server = FakePai()
        self.server.start()
        self.folder = folder
        self.ends = []

    @contextlib.asynccontextmanager
    async def manager(self, **changed):
        """The training service of a manager. It is closed after the block."""
        described = {"image": "i", "storage_name": "confignfs-data", "virtual_cluster": None} | changed
        pai = PaiConfig(
            *(self.server.host, USER, "t", None, self.folder, MOUNT), gpu=0, cpu=1, memory_mb=100, **described
        )
        cluster = OpenPai(pai.host, USER, token="token-of-the-profile-page", retry_policy=QUICK)
        workspace = Workspace(self.folder / "EXPT")
        service = OpenPaiService(cluster, template_of(pai), MOUNT, workspace, self.ends.append, poll_s=0.05)
        try:
            yield service
        finally:
            await service.close()

    def settings(self, job_id, trial_id=None):
        return KeeperSettings("EXPT", job_id, str(self.folder / "EXPT"), "c0ffee", trial_id=trial_id)

    async def polled(self, times=2):
        """Wait until the service has listed the jobs `times` more times."""
        seen = self.server.counted()["GET", "/jobs"]
        await until(
            lambda: self.server.counted()["GET", "/jobs"] >= seen + times, "the list is requested", DEADLINE_S
        )


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    yield site
    site.server.close()


async def test_a_job_has_a_link_to_its_page_on_openpai(site):
    async with site.manager() as service:
        link = service.link("trial1")
        assert link.startswith(f"{service._cluster.address}/job-detail.html?username={USER}&jobName=")
        assert link.endswith("trial1")


async def test_a_job_receives_the_workspace_path_inside_the_container(site):
    async with site.manager() as service:
        await service.submit(site.settings("trial1", "trial1"))
        (command,) = site.server.jobs[TRIAL].protocol.task_roles[0].commands
        assert "WORKSPACE=/mnt/confignfs-data/EXPT " in command
        assert "MOUNT=/mnt/confignfs-data " in command
        assert "RELAY_OUTPUT=true " in command


async def test_all_jobs_are_polled_with_one_list_call(site):
    async with site.manager() as service:
        for number in range(20):
            await service.submit(site.settings(f"env-{number}"))
        assert f"{USER}~nni_exp_EXPT_env_19" in site.server.jobs
        await site.polled(1)
        asked = site.server.counted()
        await site.polled(5)
        counted = site.server.counted() - asked
        assert set(counted) == {("GET", "/jobs")}
        assert 5 <= counted["GET", "/jobs"] <= 10


async def test_a_job_that_returned_to_the_queue_will_restart_unless_its_stop_was_requested(site):
    async with site.manager() as service:
        assert not service.will_restart("trial1")
        await service.submit(site.settings("trial1", "trial1"))
        job = site.server.jobs[TRIAL]
        job.state = "RUNNING"
        await site.polled()
        assert not service.will_restart("trial1")
        # A job that was evicted waits again, because OpenPAI retries transient failures without limit.
        job.state = "WAITING"
        await until(lambda: service.will_restart("trial1"), "the queue is seen", DEADLINE_S)
        job.state = "RUNNING"
        await until(lambda: not service.will_restart("trial1"), "the next attempt is seen", DEADLINE_S)
        job.state = "WAITING"
        await until(lambda: service.will_restart("trial1"), "the queue is seen", DEADLINE_S)
        await service.stop("trial1")
        assert not service.will_restart("trial1")


async def test_a_job_does_not_count_as_ended_if_openpai_does_not_list_it_yet(site):
    async with site.manager() as service:
        await service.submit(site.settings("trial1", "trial1"))
        hidden = site.server.jobs.pop(TRIAL)
        await site.polled()
        assert site.server.counted()["GET", "/jobs/{name}"] >= 1
        site.server.jobs[TRIAL] = hidden
        await site.polled()
        assert site.ends == []


async def test_a_restarted_manager_finds_a_job_that_openpai_does_not_list_yet(site):
    async with site.manager() as first:
        await first.submit(site.settings("trial1", "trial1"))
    site.server.lists_are_late = True
    async with site.manager() as second:
        assert await second.adopt("trial1") is JobPresence.RUNNING
        assert await second.adopt("trial2") is JobPresence.UNKNOWN
        site.server.wait_for_job().end("SUCCEEDED", 0)
        await until(lambda: site.ends, "the end is reported")
    async with site.manager() as third:
        assert await third.adopt("trial1") is JobPresence.ENDED


@pytest.mark.parametrize("at", [("GET", "/jobs"), ("GET", "/jobs/{name}")])
@pytest.mark.parametrize("how", [200, 403, 500])
async def test_a_restarted_manager_adopts_a_job_as_running_if_the_call_for_its_state_fails(site, at, how):
    async with site.manager() as service:
        site.server.misbehave(how, QUICK.tries, at=at)
        assert await service.adopt("trial1") is JobPresence.RUNNING
        await until(lambda: site.ends, "the end is reported")
    # OpenPAI has no such job. The service reports its end with `is_unknown`, so that the manager submits the job again.
    (end,) = site.ends
    assert (end.reason, end.is_unknown) == (ExitReason.JOB_LOST, True)


@pytest.mark.parametrize("how", [429, 500, 401, "drop", [{"name": "x", "state": ["RUNNING"]}]], ids=str)
async def test_failed_list_calls_are_reported_as_a_problem_but_do_not_end_any_job(site, how):
    async with site.manager() as service:
        await service.submit(site.settings("trial1", "trial1"))
        await site.polled()
        site.server.misbehave(how, 30, at=("GET", "/jobs"))
        await until(lambda: service.problem, "the problem is shown")
        assert "cannot list jobs: " in service.problem
        await until(lambda: not service.problem, "the problem is cleared")
        assert site.ends == []
        site.server.misbehave(how, 2, at=("GET", "/jobs/{name}"))
        site.server.wait_for_job().end("SUCCEEDED", 0)
        await until(lambda: site.ends, "the end is reported")


async def test_a_rate_limit_lengthens_the_poll_interval_until_calls_succeed_again(site):
    async with site.manager() as service:
        await service.submit(site.settings("trial1", "trial1"))
        await site.polled()
        # The server refuses one list call because of its rate limit. The client retries the call with success, but the service
        # lengthens its interval.
        site.server.misbehave(429, 1, at=("GET", "/jobs"))
        await until(lambda: service.problem, "the problem is shown")
        assert "limits this user's calls: jobs are listed every 0.1 s instead of 0.05 s" in service.problem
        assert service._interval_s > service._poll_s
        await until(lambda: not service.problem, "the interval is the usual one again")
        assert service._interval_s == service._poll_s
        site.server.misbehave(429, 1, at=("POST", "/jobs"))
        await service.submit(site.settings("trial2", "trial2"))
        await site.polled()
        # The rate limit has refused a submission. This must not lengthen the interval of list calls.
        assert not service.problem


SUBMIT = ("POST", "/jobs")


async def test_a_submission_adopts_a_job_that_was_created_before_the_response_was_lost(site):
    async with site.manager() as service:
        await service.submit(site.settings("trial1", "trial1"))
    async with site.manager() as another:
        site.server.misbehave((403, "ForbiddenUserError", "not any more"), 1, at=SUBMIT)
        await another.submit(site.settings("trial1", "trial1"))
        site.server.wait_for_job().end("SUCCEEDED", 0)
        await until(lambda: site.ends, "the end is reported")


@pytest.mark.parametrize("how", ["hangs", "trickles"])
async def test_a_hanging_log_server_delays_neither_the_poll_nor_the_end_of_another_job(
    site, how, monkeypatch
):
    # The timeout for a log is far longer than the poll interval, so a wait for the log would be noticed. It is shorter than the
    # timeout of the test.
    monkeypatch.setattr(termination, "TIMEOUT_S", 3.0)
    site.server.log_server = how
    async with site.manager() as service:
        for number in range(3):
            await service.submit(site.settings(f"trial{number}", f"trial{number}"))
        jobs = list(site.server.jobs.values())
        for job in jobs:
            job.state = "RUNNING"
        jobs[0].end("FAILED", 1)
        jobs[1].end("FAILED", 2)
        await until(
            lambda: site.server.log_calls == 2, "both messages are requested concurrently", DEADLINE_S
        )
        await site.polled(3)
        jobs[2].end("SUCCEEDED", 0)
        await until(lambda: site.ends, "the other end is reported")
        assert [end.job_id for end in site.ends] == ["trial2"]
        await until(lambda: len(site.ends) == 3, "the time-out ends the wait", DEADLINE_S)
        assert site.server.log_calls == 2, "one request per failed job"
    assert {end.exit_code for end in site.ends} == {0, 1, 2}
    assert all("OpenPAI reports job" in end.message for end in site.ends if end.exit_code)


async def test_the_last_part_of_the_log_is_read_for_each_task_of_a_job(site, monkeypatch):
    async with site.manager() as service:
        with pytest.raises(JobNotOnCluster, match="trial1"):
            await service.job_log("trial1")
        await service.submit(site.settings("trial1", "trial1"))
        assert await service.job_log("trial1") == {}, "a waiting job has no tasks"
        job = site.server.jobs[TRIAL]
        job.state, job.logs["stdout"] = "RUNNING", b"x" * 20_000 + b"the end\n"
        assert await service.job_log("trial1") == {f"{job.role}-0": "x" * (16_384 - 8) + "the end\n"}
        job.end("FAILED", 1)
        # When a job ends, the service reads this log for its message. The test waits for that request, because the fault below
        # must not hit it.
        await until(lambda: site.ends, "the end is reported", DEADLINE_S)
        assert (await service.job_log("trial1"))[f"{job.role}-0"].endswith("the end\n")
        path = "/jobs/{name}/attempts/0/taskRoles/{role}/taskIndex/{index}/attempts/0/logs"
        site.server.misbehave(500, at=("GET", path))
        assert "500" in (await service.job_log("trial1"))[f"{job.role}-0"]
        monkeypatch.setattr(job_log, "_TIMEOUT_S", -1.0)
        assert (await service.job_log("trial1"))[f"{job.role}-0"].startswith("(not read")
        site.server.misbehave(500, at=("GET", "/jobs/{name}"))
        with pytest.raises(RetryableError):
            await service.job_log("trial1")


async def test_a_job_can_be_stopped_while_the_request_for_its_log_hangs(site):
    site.server.log_server = "hangs"
    async with site.manager() as service:
        await service.submit(site.settings("trial1", "trial1"))
        site.server.wait_for_job().end("FAILED", 1)
        await until(lambda: site.server.log_calls, "the message is requested", DEADLINE_S)
        assert await service.stop("trial1")
        await until(lambda: site.ends, "the end is reported", DEADLINE_S)
    assert len(site.ends) == 1


async def test_a_refused_stop_command_does_not_block_the_report_of_the_end_of_another_job(site):
    async with site.manager() as service:
        for job_id in ("trial1", "trial2"):
            await service.submit(site.settings(job_id, job_id))
        site.server.jobs[TRIAL].user = "somebody else"
        site.server.jobs[TRIAL].state = "RUNNING"
        site.server.jobs[f"{USER}~nni_exp_EXPT_trial_trial2"].state = "RUNNING"
        assert await service.stop("trial1")
        assert await service.stop("trial2")
        await until(lambda: [end.job_id for end in site.ends] == ["trial2"], "the other end is reported")
