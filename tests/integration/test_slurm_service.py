"""Behaviour that only the Slurm training service has, on a real Slurm. tests/contract tests the behaviour that all platforms
share.
"""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from deadlines import DEADLINE_S
from real_experiment import until
from slurm_here import a_slurm_here

from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.slurm import service as slurm_service
from nni_manager.training_services.slurm.section import SlurmSection
from nni_manager.training_services.slurm.service import SlurmService
from trial_keeper import processes
from trial_keeper.settings import KeeperSettings
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

        def settings(job_id):
            return KeeperSettings("EXPT", job_id, str(workspace.root), "c0ffee", trial_id=job_id)

        yield SimpleNamespace(
            slurm=slurm, workspace=workspace, jobs=jobs, ends=ends, service=service, settings=settings
        )


def write(place, script):
    place.workspace.run_sh.write_text(script)


@pytest.mark.parametrize("conf", ["KillWait=600\n"])
async def test_a_killed_job_ends_at_once_although_its_process_ignores_sigterm(place, tmp_path):
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
    assert second.termination_message("trial1") == "last words"
    assert await second.adopt("trial2") is JobPresence.UNKNOWN
    await second.close()


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
