"""Admission of submissions while the cluster refuses the login."""

import asyncio

from deadlines import DEADLINE_S

from nni_manager.engine import submission_gate
from nni_manager.engine.submission_gate import SubmissionGate


class Cluster:
    """Refuses the login while `is_valid` is false. Counts all calls, and the maximum of simultaneous calls."""

    def __init__(self):
        self.is_valid = False
        self.calls = self.most_at_once = self._under_way = 0
        self.was_called = asyncio.Event()

    async def call(self):
        self.calls += 1
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        await asyncio.sleep(0)
        self._under_way -= 1
        self.was_called.set()
        return self.is_valid


async def submit(gate, cluster):
    while True:
        async with gate.admitted():
            if await cluster.call():
                gate.resume()
                return
            await gate.suspend()


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_all_submissions_are_admitted_while_the_login_is_valid():
    async def scenario():
        gate, cluster = SubmissionGate(), Cluster()
        cluster.is_valid = True
        await asyncio.gather(*(submit(gate, cluster) for _ in range(10)))
        assert (cluster.calls, cluster.most_at_once) == (10, 10)

    run(scenario)


def test_only_one_submission_at_a_time_retries_a_refused_login(monkeypatch):
    monkeypatch.setattr(submission_gate, "LOGIN_RETRY_S", 0.01)

    async def scenario():
        gate, cluster = SubmissionGate(), Cluster()
        first = asyncio.ensure_future(submit(gate, cluster))
        await cluster.was_called.wait()
        others = [asyncio.ensure_future(submit(gate, cluster)) for _ in range(9)]
        while cluster.calls < 5:
            cluster.was_called.clear()
            await cluster.was_called.wait()
        assert cluster.most_at_once == 1
        assert not any(each.done() for each in others)
        cluster.is_valid = True
        before = cluster.calls
        await asyncio.gather(first, *others)
        assert cluster.calls <= before + 10

    run(scenario)


def test_a_cancelled_submission_passes_the_retry_to_the_next_submission(monkeypatch):
    monkeypatch.setattr(submission_gate, "LOGIN_RETRY_S", 0.01)

    async def scenario():
        gate, cluster = SubmissionGate(), Cluster()
        jobs = [asyncio.ensure_future(submit(gate, cluster)) for _ in range(3)]
        await cluster.was_called.wait()
        for job in jobs[:2]:
            job.cancel()
        await asyncio.gather(*jobs[:2], return_exceptions=True)
        cluster.is_valid = True
        await jobs[2]

    run(scenario)
