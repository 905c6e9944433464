"""Jobs of one experiment on a server of ours: what is told of their ends, and what happens when the cluster is away."""

import asyncio
import contextlib

import pytest
from fake_pai import USER, FakePai
from real_experiment import until

from nni_manager.config.model import PaiConfig
from nni_manager.errors import TryAgain
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.openpai import client
from nni_manager.training_services.openpai.client import OpenPaiService
from nni_manager.training_services.openpai.job import template_of
from nni_manager.training_services.openpai.rest import OpenPai
from nni_manager.training_services.patience import Patience
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

MOUNT = "/mnt/confignfs-data"
QUICK = Patience(tries=2, first_s=0.001, longest_s=0.01, connect_within_s=2.0, answer_within_s=5.0)
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
        cluster = OpenPai(pai.host, USER, token="token-of-the-profile-page", patience=QUICK)
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
            "OpenPAI says of job nni_exp_EXPT_trial_trial1: PAIRuntimeUnknownFailed, code 255" in end.message
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
            "OpenPAI has stopped job nni_exp_EXPT_trial_trial1 as we asked"
            if we_ask
            else "somebody has stopped job nni_exp_EXPT_trial_trial1 on OpenPAI"
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
        assert "nni_exp_EXPT_trial_trial1 on OpenPAI is gone: somebody has removed it there" in end.message
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
            with pytest.raises(TryAgain):
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
            with pytest.raises(TryAgain):
                await service.submit(site.settings("trial1", "trial1"))
            assert await service.stop("trial1")
            await until(lambda: site.ends, "the end is told")
        (end,) = site.ends
        assert "was stopped before it was there" in end.message

    run(work())


def test_what_openpai_refuses_is_no_end_of_one_trial_since_it_would_be_the_end_of_all(site):
    async def work():
        async with site.manager(virtual_cluster="none") as service:
            with pytest.raises(TryAgain, match="correct virtualCluster"):
                await service.submit(site.settings("trial1", "trial1"))
            assert await service.stop("trial1")
            await until(lambda: site.ends, "the end is told")

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
    monkeypatch.setattr(client, "_LONGEST_QUEUE_S", 0.0)

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1", "trial1"))
            await until(lambda: service.problem, "the problem is told")
            assert (
                "OpenPAI has not started 1 of 1 jobs, nni_exp_EXPT_trial_trial1 the first of them"
                in service.problem
            )
            site.server.wait_for_job().state = "RUNNING"
            await until(lambda: not service.problem, "it is over")

    run(work())
