"""The rate of job submissions while the cluster rejects the login or a quota is exceeded."""

import asyncio
from itertools import pairwise

import pytest
from deadlines import DEADLINE_S

from nni_manager.engine import submission_gate
from nni_manager.engine.submission_gate import MOST_AT_ONCE, SubmissionGate
from nni_manager.training_services.errors import QuotaExceeded, Unauthenticated


class Cluster:
    """A cluster that accepts `room` jobs and raises `error` for all others. It counts refusals and the maximum of simultaneous
    calls.
    """

    def __init__(self, room, error):
        self.room, self.error = room, error
        self.accepted = []
        self.refusals = self.most_at_once = self._under_way = 0
        self.was_called = asyncio.Event()

    async def submit(self, job, slot):
        async with slot:
            return await self._answer(job)

    async def _answer(self, job):
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        await asyncio.sleep(0)
        self._under_way -= 1
        self.was_called.set()
        if not self.room:
            self.refusals += 1
            raise self.error
        self.room -= 1
        self.accepted.append(job)
        return True

    async def refuses_again(self):
        """Wait for one more refusal."""
        before = self.refusals
        while self.refusals == before:
            self.was_called.clear()
            await self.was_called.wait()


@pytest.fixture(autouse=True)
def short_pause(monkeypatch):
    monkeypatch.setattr(submission_gate, "RETRY_S", 0.01)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def submissions(gate, cluster, count):
    return [
        asyncio.ensure_future(
            gate.submit(lambda slot, job=job: cluster.submit(job, slot), lambda error: None)
        )
        for job in range(count)
    ]


def test_submissions_run_at_the_same_time_while_the_cluster_accepts_them():
    async def scenario():
        gate, cluster = SubmissionGate(), Cluster(1000, None)
        await asyncio.gather(*submissions(gate, cluster, 100))
        assert (len(cluster.accepted), cluster.most_at_once, gate.reason) == (100, MOST_AT_ONCE, "")

    run(scenario)


def test_submissions_run_one_at_a_time_after_a_rejected_login_until_the_login_is_accepted():
    async def scenario():
        gate, cluster = SubmissionGate(), Cluster(0, Unauthenticated("log in again"))
        jobs = submissions(gate, cluster, 100)
        await cluster.refuses_again()
        assert gate.reason == "log in again"
        while cluster.refusals < MOST_AT_ONCE:
            await cluster.refuses_again()
        cluster.most_at_once = 0
        await cluster.refuses_again()
        await cluster.refuses_again()
        assert (cluster.most_at_once, cluster.accepted) == (1, [])
        cluster.room, refusals = 1000, cluster.refusals
        await asyncio.gather(*jobs)
        assert (cluster.refusals, gate.reason) == (refusals, "")
        assert cluster.most_at_once > 1

    run(scenario)


def test_a_refused_job_is_not_submitted_again_before_the_pause_has_passed(monkeypatch):
    monkeypatch.setattr(submission_gate, "RETRY_S", 0.05)
    called_at_s = []

    async def refused_three_times(slot):
        async with slot:
            called_at_s.append(asyncio.get_running_loop().time())
        if len(called_at_s) <= 3:
            raise QuotaExceeded("no room")
        return True

    run(lambda: SubmissionGate().submit(refused_three_times, lambda error: None))
    assert min(later - earlier for earlier, later in pairwise(called_at_s)) >= 0.05
    assert len(called_at_s) == 4


def test_jobs_over_a_quota_are_submitted_in_order_and_with_a_bounded_number_of_refusals():
    async def scenario():
        gate, cluster = SubmissionGate(), Cluster(10, QuotaExceeded("at most ten jobs"))
        jobs = submissions(gate, cluster, 100)
        for used in range(10, 100, 10):
            while len(cluster.accepted) < used or cluster.room:
                await cluster.refuses_again()
            await cluster.refuses_again()
            cluster.room = 10
        await asyncio.gather(*jobs)
        assert cluster.accepted == [*range(100)]
        # When the quota is exceeded, up to MOST_AT_ONCE submissions are running and are refused. Each of the nine iterations
        # above adds at most two refusals.
        assert cluster.refusals <= MOST_AT_ONCE + 2 * 9
        assert gate.reason == ""

    run(scenario)


def test_the_next_waiting_job_is_submitted_if_the_submissions_before_it_are_cancelled():
    async def scenario():
        gate, cluster = SubmissionGate(), Cluster(0, QuotaExceeded("no room"))
        jobs = submissions(gate, cluster, 3)
        await cluster.refuses_again()
        for job in jobs[:2]:
            job.cancel()
        await asyncio.gather(*jobs[:2], return_exceptions=True)
        cluster.room = 1
        await jobs[2]
        assert cluster.accepted == [2]

    run(scenario)


def test_an_error_other_than_a_refusal_is_raised_and_the_next_waiting_job_is_submitted():
    async def scenario():
        gate, cluster = SubmissionGate(), Cluster(0, QuotaExceeded("no room"))

        async def fails_later(slot):
            if cluster.refusals:
                raise OSError("no route")
            return await cluster.submit("first", slot)

        failing = asyncio.ensure_future(gate.submit(fails_later, lambda error: None))
        await cluster.refuses_again()
        (waiting,) = submissions(gate, cluster, 1)
        cluster.room = 1
        with pytest.raises(OSError, match="no route"):
            await failing
        await waiting
        assert cluster.accepted == [0]

    run(scenario)


def test_a_waiting_job_is_retried_even_if_the_submission_of_another_job_is_abandoned():
    async def scenario():
        gate, cluster = SubmissionGate(), Cluster(0, QuotaExceeded("no room"))
        waiting = submissions(gate, cluster, 1)
        await cluster.refuses_again()

        async def unwanted(slot):
            return False

        stopped = asyncio.ensure_future(gate.submit(unwanted, lambda error: None))
        cluster.room = 1
        await asyncio.gather(*waiting, stopped)
        assert cluster.accepted == [0]

    run(scenario)
