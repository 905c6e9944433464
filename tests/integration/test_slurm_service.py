"""Behaviour that only the Slurm training service has, on a real Slurm. tests/contract tests the behaviour that all platforms
share.
"""

import asyncio
import errno
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from deadlines import DEADLINE_S
from real_experiment import until
from slurm_here import a_slurm_here

from nni_manager.errors import RetryableError
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.slurm import service as slurm_service
from nni_manager.training_services.slurm.commands import CommandsHere
from nni_manager.training_services.slurm.section import SlurmSection
from nni_manager.training_services.slurm.service import SlurmService
from trial_keeper import processes
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

POLL_S = 0.2


@pytest.fixture
def conf():
    """Further lines of slurm.conf."""
    return ""


@pytest.fixture
def place(tmp_path, monkeypatch, conf):
    """The cluster and an experiment. The jobs of the experiment run the script that a test writes. `ends` lists the reported ends
    of jobs.
    """
    monkeypatch.setattr(slurm_service, "POLL_S", POLL_S)
    workspace, jobs = Workspace(tmp_path / "EXPT"), tmp_path / "jobs"
    workspace.root.mkdir()
    jobs.mkdir()
    folder = SimpleNamespace(workspace=workspace, jobs=jobs)
    with a_slurm_here(conf) as slurm:
        for name, value in slurm.variables.items():
            monkeypatch.setenv(name, value)
        ends = []

        def service(**section):
            return SlurmService(SlurmSection(**section), folder, ends.append)

        def ended(job_id):
            return next((end for end in ends if end.job_id == job_id), None)

        def settings(job_id):
            return KeeperSettings("EXPT", job_id, str(workspace.root), "c0ffee", trial_id=job_id)

        yield SimpleNamespace(
            slurm=slurm,
            workspace=workspace,
            jobs=jobs,
            ends=ends,
            ended=ended,
            service=service,
            settings=settings,
        )


def write(place, script):
    place.workspace.run_sh.write_text(script)


@pytest.mark.parametrize("conf", ["KillWait=600\n"])
async def test_a_killed_job_ends_even_if_its_process_ignores_sigterm(place, tmp_path):
    write(
        place,
        f"trap '' TERM; echo $$ > {tmp_path}/written; mv {tmp_path}/written {tmp_path}/pid; exec sleep 1000",
    )
    service = place.service()
    await service.submit(place.settings("trial1"))
    await until((tmp_path / "pid").exists, "it runs", DEADLINE_S)
    await service.kill("trial1")
    await until(lambda: place.ends, "its end is reported", DEADLINE_S)
    assert place.ends[0].message == "Slurm has ended job 1 (nni-EXPT-trial1) on request"
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: processes.is_dead(pid), "its process has ended", DEADLINE_S)
    await service.close()


async def test_a_started_job_that_slurm_no_longer_lists_counts_as_ended(place):
    write(place, "echo last words; exit 3")
    first = place.service()
    first.on_job_ended = lambda ended: None
    await first.submit(place.settings("trial1"))
    await until(lambda: "FAILED" in place.slurm.states().values(), "the first job has ended", DEADLINE_S)
    place.slurm.run("scontrol", "update", "nodename=n1,n2", "state=drain", "reason=test")
    await first.submit(place.settings("trial2"))
    await first.close()
    place.slurm.stop_controller()
    place.slurm.start_controller("-c")
    assert place.slurm.states() == {}
    second = place.service()
    assert await second.adopt("trial1") is JobPresence.ENDED
    second.report_end("trial1", stop_was_asked=False)
    assert await second.stop("trial1"), "its end will be reported"
    await second.kill("trial1")
    await until(lambda: place.ends, "its end is reported", DEADLINE_S)
    assert (place.ends[0].exit_code, place.ends[0].message) == (None, "last words")
    assert await second.adopt("trial2") is JobPresence.UNKNOWN
    await second.close()


def keep_accounts(folder, monkeypatch, *rows):
    """A sacct that knows these jobs. Returns the file with the arguments of each call."""
    calls, sacct = folder / "calls", folder / "bin" / "sacct"
    sacct.parent.mkdir()
    lines = "\n".join("|".join(row) for row in rows)
    sacct.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncat << END\n{lines}\nEND\n')
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sacct.parent}:{os.environ['PATH']}")
    return calls


async def test_slurm_accounting_explains_the_end_of_a_job_that_squeue_no_longer_lists_after_a_manager_restart(
    place, tmp_path, monkeypatch
):
    first = place.service()
    first.on_job_ended = lambda ended: None
    running, _ = await submit_at_once(place, first, tmp_path, 2)
    tasks = [task_of(place, job_id) for job_id in running]
    (array,) = (path.stem for path in place.jobs.glob("*.tasks"))
    write(place, "echo last words; exit 3")
    await first.submit(place.settings("trial3"))
    alone = place.slurm.run("squeue", "-h", "-o", "%i", "--name=nni-EXPT-trial3").strip()
    await first.close()
    open_gates(tmp_path, running)
    await until(lambda: place.slurm.run("squeue", "-h") == "", "all jobs have ended", DEADLINE_S)
    place.slurm.stop_controller()
    place.slurm.start_controller("-c")
    rows = [
        (tasks[0], array, "PREEMPTED", "0:15", "n1"),
        (tasks[1], array, "OUT_OF_MEMORY", "0:125", "n2"),
        (alone, "nni-EXPT-trial3", "FAILED", "3:0", "n1"),
    ]
    calls = keep_accounts(tmp_path, monkeypatch, *rows)
    second = place.service()
    for job_id in (*running, "trial3"):
        assert await second.adopt(job_id) is JobPresence.ENDED
        assert not calls.exists(), "an adoption does not wait for the accounting"
    for job_id in (*running, "trial3"):
        second.report_end(job_id, stop_was_asked=False)
    await until(lambda: len(place.ends) == 3, "their ends are reported", DEADLINE_S)
    assert [(end.exit_code, end.reason) for end in place.ends] == [
        (None, ExitReason.PREEMPTED),
        (None, ExitReason.OUT_OF_MEMORY),
        (3, ExitReason.KEEPER_LOST),
    ]
    assert place.ends[2].message.endswith("last words")
    asked = re.findall(r"--jobs=(\S+)", calls.read_text())
    assert asked == [",".join((*tasks, alone))], "it is asked once for all of them"
    await second.close()


async def test_a_job_lost_by_slurm_is_reported_as_ended_even_if_the_accounting_shows_it_as_running(
    place, monkeypatch
):
    monkeypatch.setattr(slurm_service, "_RUNAWAY_POLLS", 3)
    write(place, "exec sleep 1000")
    service = place.service()
    await service.submit(place.settings("trial1"))
    await until(lambda: "RUNNING" in place.slurm.states().values(), "the job runs", DEADLINE_S)
    listed = await service._list()
    row = listed.row("trial1")
    monkeypatch.setattr(service._slurm, "ended_jobs", lambda slurm_ids: [row] if slurm_ids else [])
    place.slurm.stop_controller()
    place.slurm.start_controller("-c")
    await until(lambda: place.ends, "its end is reported", DEADLINE_S)
    assert "is not known to Slurm any more" in place.ends[0].message
    await service.close()


async def test_jobs_are_polled_again_after_an_error_of_the_shared_folder(place, monkeypatch):
    write(place, "exit 0")
    service, poll = place.service(), SlurmService._poll_once
    errors = [OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(place.jobs))]

    async def poll_once(service):
        if errors:
            raise errors.pop()
        await poll(service)

    problems = []
    set_problem = SlurmService._set_problem
    monkeypatch.setattr(SlurmService, "_poll_once", poll_once)
    monkeypatch.setattr(
        SlurmService, "_set_problem", lambda self, found: (problems.append(found), set_problem(self, found))
    )
    await service.submit(place.settings("trial1"))
    await until(lambda: place.ends, "its end is reported", DEADLINE_S)
    assert "cannot read the files of jobs on Slurm: " in problems[0]
    assert problems[-1] == ""
    await service.close()


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path):
    script = f"sleep 1000 & echo $! > {tmp_path}/child; wait"
    commands = CommandsHere()
    with pytest.raises(TimeoutError):
        commands.run(["bash", "-c", script], "", {}, 1.0)
    assert processes.is_dead(int((tmp_path / "child").read_text()))


async def test_each_poll_of_all_jobs_calls_squeue_once(place, tmp_path, monkeypatch):
    count, calls = 20, tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f'#!/bin/bash\necho >> {calls}\nexec /usr/bin/squeue "$@"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{Path('/usr/bin')}:/bin")
    write(place, f"until [ -e {tmp_path}/gate ]; do sleep 0.1; done")
    service = place.service()
    calls.touch()
    began_s = time.monotonic()
    for number in range(count):
        await service.submit(place.settings(f"trial{number}"))
    await until(lambda: len([*place.jobs.glob("*.started")]) >= 8, "the cluster is full", DEADLINE_S)
    (tmp_path / "gate").touch()
    await until(lambda: len(place.ends) == count, "all have ended", DEADLINE_S)
    assert {end.exit_code for end in place.ends} == {0}
    assert len({end.job_id for end in place.ends}) == count
    assert len(calls.read_text().splitlines()) <= (time.monotonic() - began_s) / POLL_S + 1
    await service.close()


# The cluster runs eight jobs at the same time. A job ends when its gate file exists, and its exit code is its number.
GATED = """\
env > {folder}/$TRIAL_KEEPER_JOB_ID.env
echo output of $TRIAL_KEEPER_JOB_ID
until [ -e {folder}/$TRIAL_KEEPER_JOB_ID.gate ]; do sleep 0.1; done
exit ${{TRIAL_KEEPER_JOB_ID#trial}}
"""


async def submit_at_once(place, service, folder, count):
    """Submit `count` jobs at the same time, and wait until the cluster is full. Return the ids of the running jobs and of the
    pending jobs.
    """
    write(place, GATED.format(folder=folder))
    jobs = [f"trial{number}" for number in range(count)]
    await asyncio.gather(*(service.submit(place.settings(job_id)) for job_id in jobs))
    await until(
        lambda: len([*place.jobs.glob("*.started")]) >= min(count, 8), "the cluster is full", DEADLINE_S
    )
    running = [job_id for job_id in jobs if (place.jobs / f"{job_id}.started").exists()]
    return running, [job_id for job_id in jobs if job_id not in running]


def open_gates(folder, jobs):
    for job_id in jobs:
        (folder / f"{job_id}.gate").touch()


def task_of(place, job_id):
    """Slurm's id of the array task that is this job."""
    lines = place.slurm.run("squeue", "-h", "--array", "-o", "%i %j").splitlines()
    ids = {name: number.partition("_")[0] for number, name in map(str.split, lines)}
    (array,) = (path for path in place.jobs.glob("*.tasks") if job_id in path.read_text().split())
    return f"{ids[array.stem]}_{array.read_text().split().index(job_id)}"


def states_of_tasks(place):
    return place.slurm.run("squeue", "-h", "--array", "-t", "all", "-o", "%T").split()


async def test_jobs_submitted_at_the_same_time_become_an_array_and_keep_their_own_settings(place, tmp_path):
    service = place.service()
    running, pending = await submit_at_once(place, service, tmp_path, 12)
    tasks = place.slurm.states()
    assert len(tasks) == 12
    (name,) = {task.rpartition(".")[0] for task in tasks}
    assert name.startswith("nni-EXPT-array-")
    assert len(pending) == 4
    await until(lambda: service.pending_reason(pending[0]) == "Resources", "its row is known", DEADLINE_S)
    open_gates(tmp_path, running + pending)
    await until(lambda: len(place.ends) == 12, "all have ended", DEADLINE_S)
    assert {end.job_id: end.exit_code for end in place.ends} == {
        f"trial{number}": number for number in range(12)
    }
    assert "output of trial7" in place.ended("trial7").message
    for job_id in running + pending:
        environ = dict(
            re.findall("^(TRIAL_KEEPER_.*?)=(.*)$", (tmp_path / f"{job_id}.env").read_text(), re.MULTILINE)
        )
        assert environ == place.settings(job_id).to_environ()
    await service.close()


async def test_a_later_manager_finds_each_task_of_an_array(place, tmp_path):
    first = place.service()
    first.on_job_ended = lambda ended: None
    running, pending = await submit_at_once(place, first, tmp_path, 12)
    await first.close()
    open_gates(tmp_path, ["trial7"])
    await until(lambda: "FAILED" in states_of_tasks(place), "a job has ended", DEADLINE_S)
    second = place.service()
    found = {job_id: await second.adopt(job_id) for job_id in running + pending}
    assert found.pop("trial7") is JobPresence.ENDED
    assert {*found.values()} == {JobPresence.RUNNING}
    second.report_end("trial7", stop_was_asked=False)
    await until(lambda: place.ends, "its end is reported", DEADLINE_S)
    assert place.ended("trial7").message.endswith("output of trial7")
    open_gates(tmp_path, found)
    await until(lambda: len(place.ends) == 12, "all others have ended", DEADLINE_S)
    assert all(end.exit_code == int(end.job_id.removeprefix("trial")) for end in place.ends)
    await second.close()


async def test_stopping_or_cancelling_one_array_task_does_not_end_the_other_tasks(place, tmp_path):
    service = place.service()
    running, pending = await submit_at_once(place, service, tmp_path, 12)
    assert service.removal_command(pending[0]) == f"scancel {task_of(place, pending[0])}"
    # stop() takes effect at the next poll, so no node becomes free before that. The blocking call of scancel delays this poll. So
    # the last job is cancelled before it starts.
    await service.stop(pending[0])
    await service.stop("trial6")
    place.slurm.run("scancel", task_of(place, pending[1]))
    await until(lambda: len(place.ends) == 3, "three have ended", DEADLINE_S)
    assert place.ended(pending[0]).message.endswith("on request")
    assert place.ended("trial6").message.endswith("on request")
    assert "it was cancelled before it started" in place.ended(pending[1]).message
    assert [*tmp_path.glob(f"{pending[0]}.env"), *tmp_path.glob(f"{pending[1]}.env")] == []
    open_gates(tmp_path, running + pending)
    await until(lambda: len(place.ends) == 12, "all others have ended", DEADLINE_S)
    assert [*tmp_path.glob(f"{pending[1]}.env")] == []
    await service.close()


async def test_a_task_that_was_cancelled_while_no_manager_ran_counts_as_ended_for_the_next_manager(
    place, tmp_path
):
    first = place.service()
    first.on_job_ended = lambda ended: None
    _, pending = await submit_at_once(place, first, tmp_path, 12)
    await first.close()
    cancelled = task_of(place, pending[0])
    place.slurm.run("scancel", cancelled)
    second = place.service()
    assert await second.adopt(pending[0]) is JobPresence.ENDED
    second.report_end(pending[0], stop_was_asked=False)
    await until(lambda: place.ends, "its end is reported", DEADLINE_S)
    assert place.ends[0].message.startswith(f"job {cancelled} (nni-EXPT-array-")
    assert place.ends[0].reason is ExitReason.JOB_LOST
    assert await second.adopt(pending[1]) is JobPresence.RUNNING
    await second.close()


async def test_all_tasks_of_a_pending_array_end_when_they_are_stopped_or_cancelled(place):
    service = place.service()
    place.slurm.run("scontrol", "update", "nodename=n1,n2", "state=drain", "reason=test")
    write(place, "exit 0")
    jobs = [f"trial{number}" for number in range(4)]
    await asyncio.gather(*(service.submit(place.settings(job_id)) for job_id in jobs))
    for job_id in jobs[:2]:
        await service.stop(job_id)
    await until(lambda: len(place.ends) == 2, "the stopped ones have ended", DEADLINE_S)
    assert [place.ended(job_id).message.endswith("on request") for job_id in jobs[:2]] == [True, True]
    place.slurm.run("scancel", task_of(place, jobs[2]), task_of(place, jobs[3]))
    await until(lambda: len(place.ends) == 4, "the cancelled ones have ended", DEADLINE_S)
    assert place.slurm.live() == []
    assert [*place.jobs.glob("*.started")] == []
    await service.close()


async def test_a_pending_task_is_cancelled_even_if_the_cluster_does_not_permit_a_hold(
    place, tmp_path, monkeypatch
):
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text('#!/bin/bash\necho "$2: Access/permission denied" >&2\nexit 1\n')
    scontrol.chmod(0o755)
    service = place.service()
    running, pending = await submit_at_once(place, service, tmp_path, 10)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{Path('/usr/bin')}:/bin")
    await service.stop(pending[0])
    await until(lambda: place.ends, "it has ended", DEADLINE_S)
    assert place.ended(pending[0]).message.endswith("on request")
    open_gates(tmp_path, running + pending)
    await until(lambda: len(place.ends) == 10, "all others have ended", DEADLINE_S)
    await service.close()


async def test_tasks_that_are_adopted_while_slurmctld_is_down_are_found_after_its_restart(place, tmp_path):
    first = place.service()
    first.on_job_ended = lambda ended: None
    running, pending = await submit_at_once(place, first, tmp_path, 10)
    await first.close()
    command = f"scancel {task_of(place, pending[0])}"
    place.slurm.save_state()
    place.slurm.stop_controller()
    second = place.service()
    assert [await second.adopt(job_id) for job_id in running + pending] == [JobPresence.RUNNING] * 10
    place.slurm.start_controller()
    shown = second.removal_command(pending[0])
    assert place.slurm.run("bash", "-c", f"echo {shown}") == command
    open_gates(tmp_path, running + pending)
    await until(lambda: len(place.ends) == 10, "all have ended", DEADLINE_S)
    assert {end.job_id: end.exit_code for end in place.ends} == {
        f"trial{number}": number for number in range(10)
    }
    await second.close()


async def test_the_pending_tasks_of_a_lost_array_are_submitted_again(place, tmp_path):
    service = place.service()
    place.slurm.run("scontrol", "update", "nodename=n1,n2", "state=drain", "reason=test")
    write(place, "exit 0")
    await asyncio.gather(*(service.submit(place.settings(f"trial{number}")) for number in range(6)))
    assert len([*place.jobs.glob("*.tasks")]) == 1
    place.slurm.stop_controller()
    place.slurm.start_controller("-c")
    await until(lambda: len(place.ends) == 6, "all have ended", DEADLINE_S)
    assert {end.exit_code for end in place.ends} == {0}
    await service.close()


async def test_a_submission_without_a_response_does_not_count_as_refused_if_squeue_refuses_the_next_call(
    place, tmp_path, monkeypatch
):
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{Path('/usr/bin')}:/bin")
    write(place, "exit 0")

    def replace(name, script):
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)

    service = place.service()
    replace("sbatch", '/usr/bin/sbatch "$@" > /dev/null')
    replace("squeue", 'echo "slurm_load_jobs error: Access/permission denied" >&2; exit 1')
    for remedy in ("look for a wrapper of sbatch", "Access/permission denied"):
        with pytest.raises(RetryableError, match=remedy):
            await service.submit(place.settings("trial1"))
    (programs / "squeue").unlink()
    await service.submit(place.settings("trial1"))
    await until(lambda: place.ends, "the job has ended", DEADLINE_S)
    assert len(place.slurm.states()) == 1
    await service.close()


@pytest.mark.parametrize("conf", ["MaxArraySize=0\n"])
async def test_each_job_is_submitted_separately_if_the_cluster_refuses_job_arrays(place, tmp_path):
    service = place.service()
    running, _ = await submit_at_once(place, service, tmp_path, 8)
    assert {*place.slurm.states()} == {f"nni-EXPT-{job_id}" for job_id in running}
    open_gates(tmp_path, running)
    await until(lambda: len(place.ends) == 8, "all have ended", DEADLINE_S)
    assert {end.exit_code for end in place.ends} == {*range(8)}
    await service.close()
