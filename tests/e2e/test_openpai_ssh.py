"""The plugin `ssh` on a real local OpenPAI cluster. Each task consists of processes of this machine, among them a real sshd."""

import asyncio
import os
import pwd
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from deadlines import scaled_s
from mpi_jobs import BENCHMARK, PRINTED, TRAINING, mpi_job
from real_cluster import end_processes_of, log, over, roles, run, running, settings, states

from nni_manager.local_openpai import container_runtime
from nni_manager.local_openpai.container_runtime import SSHD
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.local_openpai.store import JobStore
from nni_manager.training_services.openpai.job_checks import ProtocolInvalid

NEEDS_SSHD = pytest.mark.skipif(
    not os.access(SSHD, os.X_OK), reason="sshd is not installed (Debian: openssh-server)"
)
USERS_FOLDER = Path(pwd.getpwuid(os.getuid()).pw_dir, ".ssh")


def of(user_parameters=None, *, task_roles=None, **parameters):
    """Top-level keys of a job with the plugin."""
    call = {"plugin": "ssh", "parameters": {"jobssh": True, **parameters}}
    if user_parameters is not None:
        call["parameters"]["userssh"] = user_parameters
    if task_roles is not None:
        call["taskroles"] = task_roles
    return {"extras": {"com.microsoft.pai.runtimeplugin": [call]}}


WAITS = {"commands": ["sleep infinity"], "completion": {"minSucceededInstances": 1}}
ENDS_THE_JOB = {"completion": {"minSucceededInstances": 1}}


@pytest.fixture
def play(tmp_path):
    """Runs a scenario on a new cluster; afterwards all its processes are ended."""

    def make(scenario, **changes):
        async def bounded():
            async with running(settings(tmp_path, **changes)) as cluster:
                return await asyncio.wait_for(scenario(cluster), scaled_s(120))

        return asyncio.run(bounded())

    yield make
    end_processes_of(tmp_path)


def files_of_the_user():
    return {path: path.read_bytes() for path in USERS_FOLDER.rglob("*") if path.is_file()}


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@NEEDS_SSHD
@pytest.mark.smoke
def test_tasks_run_commands_on_other_tasks_over_ssh_and_leave_the_users_ssh_files_unchanged(play):
    ask = 'ssh worker-1 \'echo "$PAI_CURRENT_TASK_ROLE_NAME-$PAI_TASK_INDEX"; cat ~/.ssh/config | grep -c ^Host; '
    ask += "echo $OMPI_MCA_orte_tmpdir_base'"
    text = roles(
        top=of(sshbarrier=True),
        master={"commands": [ask, "ls -a ~/.ssh"], **ENDS_THE_JOB},
        worker={**WAITS, "instances": 2},
    )
    before = files_of_the_user()

    async def scenario(cluster):
        detail = await run(cluster, text)
        logs = [await log(cluster, role="master", file=name) for name in ("stdout", "runtime.log")]
        return detail, logs

    detail, (printed, runtime) = play(scenario)
    state = states(detail)["master"]
    assert state == ["SUCCEEDED"], runtime
    # The third word is the folder for temporary files of Open MPI on the worker. It is not shared between tasks, because daemons
    # of Open MPI that start on one machine at the same time fail if they share the folder.
    assert printed.split() == ["worker-1", "3", "/dev/shm", ".", "..", "config", "environment"]
    assert files_of_the_user() == before
    ports = [task.allocation.ports["ssh"][0] for tasks in detail.tasks.values() for task in tasks]
    assert not any(map(listens, ports))


@NEEDS_SSHD
def test_an_ssh_barrier_names_the_unreachable_tasks_when_it_times_out(play):
    text = roles(
        top=of(sshbarrier=True, sshbarrierTimeout=0.1, task_roles=["master"]),
        master={"commands": ["true"]},
        worker=WAITS,
    )

    async def scenario(cluster):
        detail = await run(cluster, text)
        return states(detail)["master"], await log(cluster, role="master", file="runtime.log")

    state, runtime = play(scenario)
    assert state == ["FAILED"]
    assert "cannot reach worker-0 by ssh" in runtime


@NEEDS_SSHD
def test_the_job_author_logs_in_to_a_task_with_the_users_key(play, tmp_path):
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    user = {"type": "custom", "value": (tmp_path / "key.pub").read_text().strip()}
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    text = roles(top=of(user, jobssh=False), worker={"commands": [f"read _ < {gate}"]})

    async def scenario(cluster):
        await cluster.submit("alice", text)
        # open() returns when the task opens the pipe, so the commands of the task have started.
        writer = await asyncio.to_thread(gate.open, "w")
        detail = await cluster.read(JobStore.detail, "alice", "job")
        (task,) = [task for tasks in detail.tasks.values() for task in tasks]
        port = str(task.allocation.ports["ssh"][0])
        options = (
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "-o",
            "BatchMode=yes",
        )
        name = pwd.getpwuid(os.getuid()).pw_name
        ask = [
            "ssh",
            "-F",
            "/dev/null",
            *options,
            "-i",
            key,
            "-p",
            port,
            f"{name}@127.0.0.1",
            "echo $PAI_JOB_NAME",
        ]
        answer = await asyncio.to_thread(subprocess.run, ask, capture_output=True, text=True)
        with writer:
            writer.write("go\n")
        await over(cluster)
        return answer

    answer = play(scenario)
    assert answer.stdout == "alice~job\n", answer.stderr


@NEEDS_SSHD
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed (Debian: openmpi-bin)")
def test_the_open_mpi_job_from_the_openpai_manual_can_be_run(play, tmp_path):
    (tmp_path / TRAINING).write_text(BENCHMARK)
    eight = {"default": ResourceCounts(cpu=64, memory_mb=1_000_000, gpu=8)}

    async def scenario(cluster):
        detail = await run(cluster, mpi_job(f"{tmp_path}/{TRAINING}"), "alice")
        names = ("stdout", "stderr", "runtime.log")
        return states(detail), [await log(cluster, role="master", file=name) for name in names]

    found, logs = play(scenario, virtual_clusters=eight)
    assert found["master"] == ["SUCCEEDED"], logs
    assert set(logs[0].splitlines()) == PRINTED


def test_a_job_with_the_ssh_plugin_is_refused_if_sshd_is_missing(play, monkeypatch):
    monkeypatch.setattr(container_runtime, "SSHD", "/nonexistent/sshd")
    two = roles(top=of(), master=["true"], worker=["true"])

    async def scenario(cluster):
        with pytest.raises(ProtocolInvalid) as refused:
            await cluster.submit("alice", two)
        (problem,) = refused.value.diagnostics
        assert problem.message == (
            "extras.com.microsoft.pai.runtimeplugin[0] needs ssh between tasks: /nonexistent/sshd does not exist; "
            "install Debian's openssh-server, or start the service with --sandbox podman"
        )

    play(scenario)


@NEEDS_SSHD
@pytest.mark.parametrize("has_entry", [True, False])
def test_a_job_with_the_ssh_plugin_is_refused_for_a_user_without_a_home(
    play, monkeypatch, tmp_path, has_entry
):
    home = str(tmp_path / "absent") if has_entry else ""
    users = {os.getuid(): pwd.struct_passwd(("u", "x", os.getuid(), 0, "", home, ""))} if home else {}
    monkeypatch.setattr(pwd, "getpwuid", users.__getitem__)
    two = roles(top=of(), master=["true"], worker=["true"])

    async def scenario(cluster):
        with pytest.raises(
            ProtocolInvalid, match="has no home directory, where OpenSSH looks for keys; run the service"
        ):
            await cluster.submit("alice", two)

    play(scenario)


def test_a_job_of_one_task_runs_without_sshd_and_an_event_reports_the_missing_sshd(play, monkeypatch):
    monkeypatch.setattr(container_runtime, "SSHD", "/nonexistent/sshd")

    async def scenario(cluster):
        detail = await run(cluster, roles(top=of(), worker=["echo done"]))
        events = await cluster.read(JobStore.events, "alice", "job")
        return states(detail), [event.message for event in events]

    found, events = play(scenario)
    assert found == {"worker": ["SUCCEEDED"]}
    assert any(
        "the plugin ssh is ignored: /nonexistent/sshd does not exist; install" in each for each in events
    )
