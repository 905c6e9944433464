"""The local OpenPAI cluster is killed or overloaded, or its disk is full. The states of its jobs stay correct."""

import asyncio
import collections
import json
import os
import random
import resource
import time

import psutil
import pytest
from amounts import amount
from cluster_process import ClusterProcess
from deadlines import DEADLINE_S, scaled_s
from real_cluster import (
    commands,
    end_processes_of,
    log,
    over,
    processes_of,
    roles,
    running,
    settings,
    stop,
    until,
)

from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.core.job import PaiJob
from nni_manager.local_openpai.core.policies import RetryCounts
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.local_openpai.core.states import State
from nni_manager.local_openpai.errors import ClusterClosed, StateBusy
from nni_manager.local_openpai.store import JobStore

JOBS, SEEDS = amount(100, 500), amount(2, 20)


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    end_processes_of(tmp_path)


def wait_for(what, within_s=DEADLINE_S):
    deadline_s = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < deadline_s, "the condition was not met in time"
        time.sleep(0.01)
    return found


def lines_of(path):
    return path.read_text().split() if path.exists() else []


def supervisor_of(folder, name):
    """The pid of the supervisor of a job's only running container."""
    for document in (folder / "state/containers").glob("*/process.json"):
        pid = json.loads(document.read_text())["pid"]
        environ = psutil.Process(pid).children()[0].environ()
        if environ["PAI_JOB_NAME"] == f"alice~{name}":
            return pid
    raise AssertionError(name)


@pytest.mark.smoke
def test_a_restarted_cluster_reports_jobs_that_ended_while_no_cluster_ran(folder):
    """The cluster is killed while it runs 20 jobs. Before its restart, some jobs end, the test kills some, and a stopped job
    ends; the other jobs continue.
    """
    begun = folder / "begun"
    begin = f"echo $PAI_JOB_NAME >> {begun}"

    def waits_for(file):
        return f"until [ -e {folder}/{file} ]; do sleep 0.05; done"

    texts = {f"on{number}": commands(begin, waits_for("go"), "echo went") for number in range(8)}
    texts |= {f"fails{number}": commands(begin, waits_for("down"), "exit 42") for number in range(4)}
    texts |= {
        f"killed{number}": commands(begin, '[ "$FC_FRAMEWORK_ATTEMPT_ID" = 1 ] || sleep 1000')
        for number in range(3)
    }
    pair = {"commands": [begin, waits_for("go")], "instances": 2}
    texts |= {f"pair{number}": roles(worker=pair) for number in range(3)}
    texts |= {"stopped": commands(begin, "trap 'sleep 1; exit 0' TERM", "while true; do sleep 0.02; done")}
    texts |= {"ends": commands(begin, waits_for("down"), "echo done")}
    assert len(texts) == 20
    cluster = ClusterProcess(folder)
    for name, text in texts.items():
        job = json.loads(text)
        cluster.order(submit=json.dumps({**job, "name": name}))
    assert {cluster.answer() for _ in texts} == set(texts)
    wait_for(lambda: len(lines_of(begun)) == 23)
    supervisors = [supervisor_of(folder, f"killed{number}") for number in range(3)]
    cluster.order(stop="stopped")
    assert cluster.answer() == "stopped"
    cluster.kill()
    (folder / "down").touch()
    for pid in supervisors:
        os.kill(pid, 9)
    # Six jobs end while no cluster runs: the four `fails` jobs, the job `ends`, and the stopped job. Each writes an exit.json.
    wait_for(lambda: len(list((folder / "state/containers").glob("*/exit.json"))) == 6)

    async def look():
        async with running(settings(folder)) as following:
            for number in range(4):
                detail = await over(following, f"fails{number}")
                assert (detail.job.state, detail.attempt.exit.origin_user_exit_code) == (State.FAILED, 42)
                assert detail.job.retries.total == 0
            assert (await over(following, "ends")).job.state is State.SUCCEEDED
            assert (await over(following, "stopped")).job.state is State.STOPPED
            for number in range(3):
                detail = await over(following, f"killed{number}")
                assert (detail.job.state, detail.job.retries) == (State.SUCCEEDED, RetryCounts(platform=1))
            going_on = {job.name for job in await following.read(JobStore.jobs) if job.state is State.RUNNING}
            assert going_on == {name for name in texts if name.startswith(("on", "pair"))}
            (folder / "go").touch()
            for name in going_on:
                detail = await over(following, name)
                assert (detail.job.state, detail.job.retries.total) == (State.SUCCEEDED, 0)
            assert await log(following, "on0") == "went\n"
            assert following.virtual_clusters[0].used == ResourceCounts(0, 0, 0)

    asyncio.run(asyncio.wait_for(look(), DEADLINE_S))
    counts = collections.Counter(lines_of(begun))
    assert {name for name, count in counts.items() if count == 2} == {
        f"alice~{name}" for name in texts if name.startswith(("pair", "killed"))
    }
    assert processes_of(folder) == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_repeatedly_killed_cluster_runs_every_confirmed_job_exactly_once(folder, seed):
    """The cluster is killed repeatedly while jobs are submitted, start and end."""
    chance = random.Random(seed)
    ran = folder / "ran"
    # If an attempt ran twice, its second mkdir would fail, and so would the job.
    line = f"mkdir {folder}/$PAI_JOB_NAME-$FC_FRAMEWORK_ATTEMPT_ID && sleep 0.0$RANDOM && echo $PAI_JOB_NAME >> {ran}"
    confirmed, number = [], 0
    for _ in range(3):
        cluster = ClusterProcess(folder)
        for _ in range(8):
            cluster.order(submit=json.dumps({**json.loads(commands(line)), "name": f"j{number}"}))
            number += 1
        time.sleep(chance.random() * 0.6)  # a random delay before the kill; there is no event to wait for
        confirmed += cluster.kill()

    async def look():
        async with running(settings(folder)) as following:
            jobs = await following.read(JobStore.jobs)
            assert set(confirmed) <= {job.name for job in jobs}
            assert len({job.name for job in jobs}) == len(jobs)
            for job in jobs:
                detail = await over(following, job.name)
                assert detail.job.state is State.SUCCEEDED, detail.attempt.exit
                assert detail.job.retries.user == 0
            return [job.name for job in jobs]

    known = asyncio.run(asyncio.wait_for(look(), DEADLINE_S))
    assert collections.Counter(lines_of(ran)) == collections.Counter(f"alice~{name}" for name in known)
    assert processes_of(folder) == []


def test_hundreds_of_concurrent_jobs_each_run_once_in_bounded_memory(folder):
    ran = folder / "ran"
    names = [f"j{number}" for number in range(JOBS)]

    def text(name):
        return json.dumps({**json.loads(commands(f"echo {name} >> {ran}")), "name": name}).encode()

    async def rss_mb():
        return psutil.Process().memory_info().rss / 2**20

    async def scenario():
        place = {"default": ResourceCounts(8, 10**6, 0)}
        async with running(settings(folder, virtual_clusters=place)) as cluster:
            before_s = time.monotonic()
            after = []
            step = JOBS // 5
            for begin in range(0, JOBS, step):
                found = await asyncio.gather(
                    *(cluster.submit("alice", text(n)) for n in names[begin : begin + step])
                )
                assert found == names[begin : begin + step]
                after.append(await rss_mb())
            submitted_s = time.monotonic() - before_s

            async def all_over():
                return all(job.completed_at_s is not None for job in await cluster.read(JobStore.jobs))

            await until(all_over)
            took_s = time.monotonic() - before_s
            jobs = await cluster.read(JobStore.jobs)
            assert collections.Counter(job.name for job in jobs) == collections.Counter(names)
            assert {job.state for job in jobs} == {State.SUCCEEDED}
            for job in jobs[::25]:
                assert (await cluster.read(JobStore.detail, "alice", job.name)).job == job
            print(
                f"{JOBS} jobs: submitted in {submitted_s:.1f} s, over in {took_s:.1f} s, {after} MB, then {await rss_mb()}"
            )
            # A waiting job needs only a few kilobytes, because the cluster does not keep the job's text in memory.
            assert after[-1] - after[0] < 20
            assert await rss_mb() - after[0] < 20
            assert not cluster._worker._jobs
            assert not cluster._worker._containers
            assert not cluster._allocator._ports

    asyncio.run(asyncio.wait_for(scenario(), scaled_s(150)))
    assert collections.Counter(lines_of(ran)) == collections.Counter(names)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert len(os.listdir("/proc/self/fd")) < min(soft, 60)


def test_a_full_disk_delays_the_state_changes_of_jobs_but_no_change_is_lost(folder, monkeypatch):
    """The database refuses writes for a time, as on a full disk."""
    is_full = False
    commit, add_job = JobStore.commit, JobStore.add_job

    def refuse(self, *arguments):
        if is_full:
            raise StateBusy("cannot write: database or disk is full; free some space")

    def commit_or_refuse(self, writes):
        refuse(self)
        commit(self, writes)

    def add_or_refuse(self, *arguments):
        refuse(self)
        return add_job(self, *arguments)

    monkeypatch.setattr(JobStore, "commit", commit_or_refuse)
    monkeypatch.setattr(JobStore, "add_job", add_or_refuse)

    async def scenario():
        nonlocal is_full
        async with running(settings(folder)) as cluster:
            await cluster.submit("alice", commands(f"until [ -e {folder}/go ]; do sleep 0.02; done"))

            async def runs():
                return (await cluster.read(JobStore.detail, "alice", "job")).job.state is State.RUNNING

            await until(runs)
            is_full = True
            with pytest.raises(StateBusy, match="disk is full"):
                await cluster.submit("alice", commands("true", name="late"))
            (folder / "go").touch()
            await asyncio.to_thread(wait_for, lambda: list((folder / "state/containers").glob("*/exit.json")))
            assert (await cluster.read(JobStore.detail, "alice", "job")).job.state is State.RUNNING
            is_full = False
            assert (await over(cluster)).job.state is State.SUCCEEDED
            assert [job.name for job in await cluster.read(JobStore.jobs)] == ["job"]

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_each_job_receives_one_sigterm_if_it_is_stopped_while_the_disk_is_full(folder, monkeypatch):
    """One job ends while the disk is full, and then two jobs are stopped. The cluster records all three ends later."""
    is_full = False
    commit = JobStore.commit

    def commit_or_refuse(self, writes):
        if is_full:
            raise StateBusy("cannot write: database or disk is full; free some space")
        commit(self, writes)

    monkeypatch.setattr(JobStore, "commit", commit_or_refuse)
    # Each job must receive only one SIGTERM. A second SIGTERM would end the grace period, and the job would be killed during its
    # sleep.
    saves = (
        f"trap 'sleep 1; echo $PAI_JOB_NAME >> {folder}/saved; exit 0' TERM; while true; do sleep 0.02; done"
    )

    def exits():
        return list((folder / "state/containers").glob("*/exit.json"))

    async def scenario():
        nonlocal is_full
        async with running(settings(folder)) as cluster:
            await cluster.submit(
                "alice", commands(f"until [ -e {folder}/go ]; do sleep 0.02; done", name="ends")
            )
            for name in ("first", "second"):
                await cluster.submit("alice", commands(saves, name=name))

            async def run():
                return [job.state for job in await cluster.read(JobStore.jobs)] == [State.RUNNING] * 3

            await until(run)
            is_full = True
            (folder / "go").touch()
            await asyncio.to_thread(wait_for, lambda: len(exits()) == 1)
            for name in ("first", "second", "first"):
                await asyncio.wait_for(stop(cluster, name), DEADLINE_S)
            await asyncio.to_thread(wait_for, lambda: len(exits()) == 3)
            assert sorted(lines_of(folder / "saved")) == ["alice~first", "alice~second"]
            is_full = False
            assert (await over(cluster, "ends")).job.state is State.SUCCEEDED
            for name in ("first", "second"):
                assert (await over(cluster, name)).job.state is State.STOPPED

    asyncio.run(asyncio.wait_for(scenario(), scaled_s(120)))


def test_a_cluster_with_an_internal_error_closes_and_the_next_cluster_continues_its_jobs(
    folder, monkeypatch, caplog
):
    async def broken():
        cluster = Cluster(settings(folder))
        await cluster.start()
        with monkeypatch.context() as patched:
            patched.setattr(PaiJob, "_start", lambda *_: 1 / 0)
            await cluster.submit("alice", commands("sleep 0.3; echo ran"))
            await asyncio.wait_for(cluster.wait_until_broken(), DEADLINE_S)
        with pytest.raises(ClusterClosed):
            await cluster.submit("alice", commands("true", name="late"))
        assert len(await cluster.read(JobStore.jobs)) == 1
        with pytest.raises(ZeroDivisionError):
            await cluster.close()

    async def go_on():
        async with running(settings(folder)) as cluster:
            detail = await over(cluster)
            assert (detail.job.state, detail.job.retries.total) == (State.SUCCEEDED, 0)
            assert await log(cluster) == "ran\n"

    asyncio.run(asyncio.wait_for(broken(), DEADLINE_S))
    assert "the cluster has stopped" in caplog.text
    asyncio.run(asyncio.wait_for(go_on(), DEADLINE_S))


@pytest.mark.parametrize("written", [None, "", '{"pid": 1'], ids=["another process", "nothing", "torn"])
def test_the_next_cluster_restarts_a_killed_task_whose_process_record_is_wrong_or_truncated(folder, written):
    async def begin():
        async with running(settings(folder)) as cluster:
            await cluster.submit("alice", commands('[ "$FC_FRAMEWORK_ATTEMPT_ID" = 1 ] || sleep 1000'))

            async def runs():
                return (await cluster.read(JobStore.detail, "alice", "job")).job.state is State.RUNNING

            await until(runs)

    async def go_on():
        async with running(settings(folder)) as cluster:
            detail = await over(cluster)
            assert (detail.job.state, detail.job.retries) == (State.SUCCEEDED, RetryCounts(platform=1))

    asyncio.run(asyncio.wait_for(begin(), DEADLINE_S))
    (document,) = (folder / "state/containers").glob("*/process.json")
    process = json.loads(document.read_text())
    os.kill(process["pid"], 9)
    # In the first case process.json contains the pid of this test, as if the pid had been reused. In the other cases it is empty
    # or cut, as after a power failure.
    document.write_text(json.dumps({**process, "pid": os.getpid()}) if written is None else written)
    asyncio.run(asyncio.wait_for(go_on(), DEADLINE_S))
    assert processes_of(folder) == []
