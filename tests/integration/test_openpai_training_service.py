"""Jobs of one experiment on a server of ours: what is told of their ends, and what happens when the cluster is away."""

import asyncio
import contextlib

import pytest
from fake_pai import USER, FakePai
from real_experiment import until

from nni_manager.config.model import PaiConfig
from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.errors import ClusterUnavailable, QuotaExceeded, Unauthenticated
from nni_manager.training_services.openpai import client, termination
from nni_manager.training_services.openpai.client import OpenPaiService
from nni_manager.training_services.openpai.connection import JobAlreadyExists
from nni_manager.training_services.openpai.job import template_of
from nni_manager.training_services.openpai.protocol import parse
from nni_manager.training_services.openpai.rest import OpenPai
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

MOUNT = "/mnt/confignfs-data"
QUICK = ClientRetryPolicy(tries=2, first_s=0.001, longest_s=0.01, connect_within_s=2.0, answer_within_s=5.0)
TRIAL = f"{USER}~nni_exp_EXPT_trial_trial1"


class Site:
    """A server, and the services of managers that follow one another."""

    def __init__(self, folder):
        self.server = FakePai()
        self.server.start()
        self.folder = folder
        self.ends = []

    @contextlib.asynccontextmanager
    async def manager(self, **changed):
        """A manager's service from its start to its end."""
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

    async def looked(self, times=2):
        """The server was asked for its list so many times more."""
        seen = self.server.counted()["GET", "/jobs"]
        await until(
            lambda: self.server.counted()["GET", "/jobs"] >= seen + times, "the list is asked for", 20
        )


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    yield site
    site.server.close()


def run(work):
    asyncio.run(asyncio.wait_for(work, 60))


def test_people_find_a_job_on_the_pages_of_openpai(site):
    async def work():
        async with site.manager() as service:
            link = service.link("trial1")
            assert link.startswith(f"{service._cluster.address}/job-detail.html?username={USER}&jobName=")
            assert link.endswith("trial1")

    asyncio.run(work())


def test_a_job_is_handed_in_as_containers_see_the_workspace_and_its_end_is_told_once(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            job = site.server.jobs[TRIAL]
            for said in (
                "WORKSPACE=/mnt/confignfs-data/EXPT ",
                "MOUNT=/mnt/confignfs-data ",
                "RELAY_OUTPUT=true ",
            ):
                assert said in job.protocol.task_roles[0].commands[0]
            await site.looked()
            job.state = "RUNNING"
            await site.looked()
            assert site.ends == []
            job.end("SUCCEEDED", 0)
            await until(lambda: site.ends, "the end is told")
            await service.submit(site.settings("trial2", "trial2"))
            await site.looked()
        (end,) = site.ends
        assert (end.job_id, end.exit_code, end.message) == ("trial1", 0, "")

    run(work())


def test_a_job_that_fails_brings_its_own_exit_code_and_its_last_words(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            job = site.server.wait_for_job()
            job.state, job.logs["stderr"] = "RUNNING", b"first\ntrial-keeper: cannot find the mount\n"
            job.end("FAILED", 105)
            await until(lambda: site.ends, "the end is told")
        (end,) = site.ends
        assert (end.exit_code, end.reason) == (105, ExitReason.KEEPER_LOST)
        assert (
            "OpenPAI reports job nni_exp_EXPT_trial_trial1: PAIRuntimeUnknownFailed, code 255" in end.message
        )
        assert end.message.endswith("trial-keeper: cannot find the mount")

    run(work())


def test_a_container_whose_memory_was_full_ends_its_trial_with_that_reason(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            site.server.wait_for_job().end("FAILED", -1200)
            await until(lambda: site.ends, "the end is told")
        assert site.ends[0].reason is ExitReason.OUT_OF_MEMORY

    run(work())


def test_all_jobs_are_looked_at_with_one_list(site):
    async def work():
        async with site.manager() as service:
            for number in range(20):
                await service.submit(site.settings(f"env-{number}"))
            assert f"{USER}~nni_exp_EXPT_env_19" in site.server.jobs
            await site.looked(1)
            asked = site.server.counted()
            await site.looked(5)
            counted = site.server.counted() - asked
            assert set(counted) == {("GET", "/jobs")}
            assert 5 <= counted["GET", "/jobs"] <= 10

    run(work())


@pytest.mark.parametrize("we_ask", [True, False])
def test_a_job_that_we_stopped_is_told_apart_from_one_that_somebody_stopped(site, we_ask):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            if we_ask:
                assert await service.stop("trial1")
            else:
                site.server.wait_for_job().end("STOPPED")
            await until(lambda: site.ends, "the end is told")
        (end,) = site.ends
        told = (
            "OpenPAI has stopped job nni_exp_EXPT_trial_trial1 on request"
            if we_ask
            else "job nni_exp_EXPT_trial_trial1 was stopped on OpenPAI, but not by this manager"
        )
        assert (end.exit_code, end.message, end.reason) == (None, told, ExitReason.JOB_LOST)

    run(work())


def test_a_job_that_somebody_removed_has_ended_with_that_reason(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            await site.looked()
            site.server.jobs.clear()
            await until(lambda: site.ends, "the end is told")
        (end,) = site.ends
        assert "nni_exp_EXPT_trial_trial1 on OpenPAI no longer exists: it was removed there" in end.message
        assert end.reason is ExitReason.JOB_LOST

    run(work())


def test_a_job_that_openpai_does_not_show_yet_is_waited_for(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            hidden = site.server.jobs.pop(TRIAL)
            await site.looked()
            assert site.server.counted()["GET", "/jobs/{name}"] >= 1
            site.server.jobs[TRIAL] = hidden
            await site.looked()
            assert site.ends == []

    run(work())


@pytest.mark.parametrize("how", [429, 500, 401, "drop"])
def test_a_cluster_that_is_away_for_a_while_is_a_problem_and_no_end(site, how):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            await site.looked()
            site.server.misbehave(how, 30, at=("GET", "/jobs"))
            await until(lambda: service.problem, "the problem is told")
            assert "cannot list jobs: " in service.problem
            await until(lambda: not service.problem, "it is over")
            assert site.ends == []
            site.server.wait_for_job().end("SUCCEEDED", 0)
            await until(lambda: site.ends, "the end is told")

    run(work())


def test_a_submission_that_fails_for_the_moment_may_be_repeated(site):
    async def work():
        async with site.manager() as service:
            site.server.misbehave(503, 2, at=("POST", "/jobs"))
            with pytest.raises(RetryableError):
                await service.submit(site.settings("trial1", "trial1"))
            await service.submit(site.settings("trial1", "trial1"))
            await service.submit(site.settings("trial1", "trial1"))  # as after an answer that was lost
            assert len(site.server.jobs) == 1

    run(work())


def test_a_job_that_never_came_to_be_can_be_stopped(site):
    async def work():
        async with site.manager() as service:
            assert not await service.stop("trial1")
            site.server.misbehave(503, 2, at=("POST", "/jobs"))
            with pytest.raises(RetryableError):
                await service.submit(site.settings("trial1", "trial1"))
            assert await service.stop("trial1")
            await until(lambda: site.ends, "the end is told")
        (end,) = site.ends
        assert "was stopped before it was created" in end.message

    run(work())


SUBMIT = ("POST", "/jobs")
QUOTA = (403, "ForbiddenUserError", "exceeds the quota of ada")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            (400, "InvalidProtocolError", "no such image"),
            "no such image; fix the fields that the answer names",
        ),
        ((403, "ForbiddenUserError", "not in this one"), "not in this one; ask an administrator"),
        ((403, "ForbiddenUserError", "bob may not use low-quota, nor quota"), "ask an administrator"),
        ((404, "NoVirtualClusterError", "no such cluster"), "no such cluster; correct virtualCluster"),
        ((404, "NoStorageError", "no such storage"), "no such storage; correct paiStorageConfigName"),
        (
            (422, "Unprocessable", "not so many GPUs"),
            "not so many GPUs; fix the fields that the answer names",
        ),
    ],
)
def test_what_openpai_refuses_for_good_is_said_once_and_leaves_no_job(site, answer, says):
    async def work():
        async with site.manager() as service:
            site.server.misbehave(answer, 1, at=SUBMIT)
            with pytest.raises(UserError, match=says):
                await service.submit(site.settings("trial1", "trial1"))
            assert site.server.counted()[SUBMIT] == 1
            assert not await service.stop("trial1"), "there is no such job"
        assert not site.server.jobs
        assert not site.ends

    run(work())


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (QUOTA, QuotaExceeded),
        ((401, "UnauthorizedUserError", "Your token is invalid."), Unauthenticated),
        (408, ClusterUnavailable),
        (429, ClusterUnavailable),
        (500, ClusterUnavailable),
        (503, ClusterUnavailable),
        ("drop", ClusterUnavailable),
        ((404, "NoApiError", "a gateway whose server starts"), RetryableError),
    ],
)
def test_what_may_pass_is_tried_again(site, answer, kind):
    async def work():
        async with site.manager() as service:
            site.server.misbehave(answer, QUICK.tries, at=SUBMIT)
            with pytest.raises(RetryableError) as raised:
                await service.submit(site.settings("trial1", "trial1"))
            assert isinstance(raised.value, kind)
            site.server.stop_misbehaving(SUBMIT)
            await service.submit(site.settings("trial1", "trial1"))
            assert list(site.server.jobs) == [TRIAL]

    run(work())


def test_a_job_that_was_made_by_a_try_whose_answer_got_lost_is_not_refused_afterwards(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
        async with site.manager() as another:
            site.server.misbehave((403, "ForbiddenUserError", "not any more"), 1, at=SUBMIT)
            await another.submit(site.settings("trial1", "trial1"))
            site.server.wait_for_job().end("SUCCEEDED", 0)
            await until(lambda: site.ends, "the end is told")

    run(work())


def test_a_job_of_others_that_has_the_name_is_a_refusal_and_is_left_alone(site):
    async def work():
        async with site.manager() as first:
            await first.submit(site.settings("trial1", "trial1"))
            theirs = site.server.jobs[TRIAL]
            theirs.text = theirs.text.replace("WORKSPACE=/mnt", "WORKSPACE=/another")
            theirs.protocol = parse(theirs.text)
        async with site.manager() as service:
            with pytest.raises(JobAlreadyExists, match="already exists; choose another name"):
                await service.submit(site.settings("trial1", "trial1"))
            assert not await service.stop("trial1")
        assert theirs.state == "WAITING"

    run(work())


@pytest.mark.parametrize("how", ["hangs", "trickles"])
def test_a_log_server_that_hangs_delays_neither_the_poll_nor_the_end_of_another_job(site, how, monkeypatch):
    # Far longer than a poll, and shorter than the test waits.
    monkeypatch.setattr(termination, "TIMEOUT_S", 3.0)
    site.server.log_server = how

    async def work():
        async with site.manager() as service:
            for number in range(3):
                await service.submit(site.settings(f"trial{number}", f"trial{number}"))
            jobs = list(site.server.jobs.values())
            for job in jobs:
                job.state = "RUNNING"
            jobs[0].end("FAILED", 1)
            jobs[1].end("FAILED", 2)
            await until(lambda: site.server.log_calls == 2, "both messages are asked for at once", 20)
            await site.looked(3)
            jobs[2].end("SUCCEEDED", 0)
            await until(lambda: site.ends, "the other's end is told")
            assert [end.job_id for end in site.ends] == ["trial2"]
            await until(lambda: len(site.ends) == 3, "the time-out ends the wait", 20)
            assert site.server.log_calls == 2, "once for each"
        assert {end.exit_code for end in site.ends} == {0, 1, 2}
        assert all("OpenPAI reports job" in end.message for end in site.ends if end.exit_code)

    run(work())


def test_a_job_that_ends_with_a_hanging_log_can_be_stopped_meanwhile(site):
    site.server.log_server = "hangs"

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            site.server.wait_for_job().end("FAILED", 1)
            await until(lambda: site.server.log_calls, "the message is asked for", 20)
            assert await service.stop("trial1")
            await until(lambda: site.ends, "the end is told", 20)
        assert len(site.ends) == 1

    run(work())


def test_a_stop_reaches_the_cluster_once_it_is_back(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            job = site.server.wait_for_job()
            job.state = "RUNNING"
            site.server.misbehave(503, 8, at=("PUT", "/jobs/{name}/executionType"))
            assert await service.stop("trial1")
            await until(lambda: service.problem, "the problem is told")
            await until(lambda: site.ends, "the job is stopped")
            assert job.state == "STOPPED"

    run(work())


def test_a_job_that_may_not_be_stopped_keeps_no_other_from_its_end(site):
    async def work():
        async with site.manager() as service:
            for job_id in ("trial1", "trial2"):
                await service.submit(site.settings(job_id, job_id))
            site.server.jobs[TRIAL].user = "somebody else"
            site.server.jobs[TRIAL].state = "RUNNING"
            site.server.jobs[f"{USER}~nni_exp_EXPT_trial_trial2"].state = "RUNNING"
            assert await service.stop("trial1")
            assert await service.stop("trial2")
            await until(lambda: [end.job_id for end in site.ends] == ["trial2"], "the other's end is told")

    run(work())


def test_a_later_manager_finds_the_jobs_of_an_earlier_one(site):
    async def work():
        async with site.manager() as first:
            for job_id in ("trial1", "trial2", "trial3"):
                await first.submit(site.settings(job_id, job_id))
        assert site.ends == []
        site.server.jobs[TRIAL].state = "RUNNING"
        site.server.jobs[f"{USER}~nni_exp_EXPT_trial_trial2"].end("FAILED", 1)
        async with site.manager() as second:
            assert [await second.adopt(f"trial{number}") for number in (1, 2, 3, 4)] == [
                JobPresence.RUNNING,
                JobPresence.ENDED,
                JobPresence.RUNNING,
                JobPresence.UNKNOWN,
            ]
            site.server.jobs[TRIAL].end("SUCCEEDED", 0)
            await until(lambda: site.ends, "the end is told")
        assert [end.job_id for end in site.ends] == ["trial1"]

    run(work())


def test_while_the_cluster_is_away_jobs_of_before_pass_for_running_and_are_looked_at_later(site):
    async def work():
        async with site.manager() as first:
            await first.submit(site.settings("trial1", "trial1"))
        site.server.misbehave(503, 20, at=("GET", "/jobs"))
        site.server.jobs[TRIAL].end("SUCCEEDED", 0)
        async with site.manager() as second:
            assert await second.adopt("trial1") is JobPresence.RUNNING
            assert await second.adopt("trial2") is JobPresence.RUNNING
            await until(lambda: len(site.ends) == 2, "the truth is told")
        assert {end.job_id: end.exit_code for end in site.ends} == {"trial1": 0, "trial2": None}

    run(work())


def test_a_job_that_waits_for_long_is_what_people_are_told(site, monkeypatch):
    monkeypatch.setattr(client, "_MAX_QUEUE_S", 0.0)

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            await until(lambda: service.problem, "the problem is told")
            assert (
                "OpenPAI has not started 1 of 1 jobs, nni_exp_EXPT_trial_trial1 the longest"
                in service.problem
            )
            site.server.wait_for_job().state = "RUNNING"
            await until(lambda: not service.problem, "it is over")

    run(work())
