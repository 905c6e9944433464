"""Slurm's commands on a login node over SSH: the checks of `nnictl create`, and the calls of a running manager."""

import os
import sys
from types import SimpleNamespace

import asyncssh
import pytest
from real_experiment import wait_until
from slurm_login_node import a_login_node

from nni_manager.errors import NniManagerError, UserError
from nni_manager.training_services.errors import ClusterUnavailable, Unauthenticated
from nni_manager.training_services.slurm import client
from nni_manager.training_services.slurm.client import Slurm, SlurmMissing
from nni_manager.training_services.slurm.platform import SlurmPlatform
from nni_manager.training_services.slurm.section import SlurmSection
from nni_manager.training_services.ssh.client import MachineAway

# This is the default of MaxSessions. Source: sshd_config(5).
MAX_SESSIONS = 10
COMMANDS = {
    "scontrol": "echo 'ClusterName = there'; echo 'SlurmctldHost[0] = ctl(10.0.0.1)'",
    "sbatch": 'cat /proc/[0-9]*/cmdline > "$HOME"/processes; env > "$HOME"/environ; echo 7',
}


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A login node with Slurm's commands. The PATH of the test process has no such commands."""
    environ = {"CLUSTER": "there", "PATH": f"{tmp_path / 'site/login/bin'}:/usr/bin:/bin"}
    with a_login_node(tmp_path / "site", environ) as node:
        for name, command in COMMANDS.items():
            add(node, name, command)
        for name, value in (node.variables | {"PATH": "/absent"}).items():
            monkeypatch.setenv(name, value)
        yield node


def add(node, name, command):
    """Add a command to the PATH of the node."""
    program = node.machine.bin / name
    program.write_text(f"#!/bin/bash\n{command}\n")
    program.chmod(0o755)


@pytest.fixture
def platform(node, tmp_path):
    section = SlurmSection(partition="gpu", login=node.address)
    return SlurmPlatform(SimpleNamespace(cluster=section, log_dir=tmp_path / "absent" / "experiments"))


def refused(platform, kind=UserError):
    with pytest.raises(kind) as raised:
        platform.check()
    return str(raised.value)


def test_a_login_node_that_shares_the_users_home_is_accepted(node, platform, tmp_path):
    assert platform.check().where == f"Slurm cluster there, partition gpu, by {node.address}"
    assert platform.api() == ("the login node", "ssh://127.0.0.1")
    assert [each.name for each in tmp_path.iterdir()] == ["site"], "the check leaves no folder"


def test_a_login_node_with_an_unknown_host_key_is_refused(node, platform):
    node.known_hosts.write_text("")
    assert refused(platform).startswith(f"cannot trust {node.address}: its host key is not the one in")


def test_the_error_for_a_refused_ssh_key_names_the_login_node_and_a_command_to_try(node, platform):
    (node.machine.folder / "authorized_keys").write_text("")
    said = refused(platform, Unauthenticated)
    assert said.startswith(f"cannot log in to {node.address}: ")
    assert f"`ssh -p {node.machine.port} 127.0.0.1 true` works" in said


def test_an_unreachable_login_node_is_a_retryable_error(node, platform):
    node.machine.stop()
    assert refused(platform, MachineAway).startswith(f"cannot reach {node.address} over SSH: ")


def test_a_login_node_without_the_commands_of_slurm_is_refused(node, platform):
    (node.machine.home / ".bash_profile").write_text("export PATH=/absent\n")
    said = refused(platform, SlurmMissing)
    assert said.startswith(f"cannot find Slurm's scontrol on PATH of {node.address}; ")


def test_the_error_contains_the_message_of_the_login_shell_if_the_shell_exits_immediately(node, platform):
    (node.machine.home / ".bash_profile").write_text("echo the account has expired >&2; exit 1\n")
    assert "its login shell says 'the account has expired'" in refused(platform)


def test_a_login_shell_is_refused_if_it_exits_before_it_receives_commands(node, platform, monkeypatch):
    create_session = asyncssh.SSHClientConnection.create_session

    async def create_and_wait(*arguments, **options):
        channel, session = await create_session(*arguments, **options)
        await channel.wait_closed()
        return channel, session

    monkeypatch.setattr(asyncssh.SSHClientConnection, "create_session", create_and_wait)
    (node.machine.home / ".bash_profile").write_text("echo the account has expired >&2; exit 1\n")
    assert "its login shell says 'the account has expired'" in refused(platform)


def test_a_login_is_refused_if_its_user_id_differs_from_the_user_id_of_nnictl(node, platform):
    add(node, "id", "echo 4711")
    said = refused(platform)
    assert f"its user id is 4711, and nnictl's is {os.geteuid()}" in said


def test_a_login_node_that_lacks_the_python_of_the_manager_is_refused(platform, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/absent/python")
    assert "it has no /absent/python; install trial-keeper on the shared home" in refused(platform)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a namespace of mounts")
def test_a_login_node_is_refused_if_it_does_not_share_the_experiment_working_directory(
    node, platform, tmp_path
):
    platform.config.log_dir = folder = tmp_path / "work"
    folder.mkdir()
    # The login shell has its own mount namespace. In this namespace, another file system is mounted over the folder.
    with (node.machine.home / ".bash_profile").open("a") as profile:
        profile.write(f"exec unshare --mount bash -c 'mount -t tmpfs none {folder}; exec bash'\n")
    assert f"so it does not share {folder}; set experimentWorkingDirectory" in refused(platform)


@pytest.fixture
def slurm(node):
    slurm = Slurm(SlurmSection(login=node.address).ssh_login)
    yield slurm
    slurm.close()


def test_a_job_is_submitted_from_a_login_shell_and_no_command_line_contains_its_token(node, slurm):
    assert slurm.submit(["sbatch", "--parsable"], "#!/bin/bash\n", {"TRIAL_KEEPER_TOKEN": "c0ffee"}) == "7"
    environ = (node.machine.home / "environ").read_text().splitlines()
    assert {"TRIAL_KEEPER_TOKEN=c0ffee", "CLUSTER=there"} <= {*environ}
    processes = (node.machine.home / "processes").read_text(errors="replace")
    assert "--parsable" in processes
    assert "c0ffee" not in processes


def test_a_lost_connection_to_the_login_node_is_opened_again(node, slurm):
    assert slurm.cluster().name == "there"
    node.machine.cut()

    def answers():
        try:
            return slurm.cluster().name == "there"
        except MachineAway:
            return False

    wait_until(answers, "the login node answers again")


def test_commands_that_time_out_leave_enough_ssh_sessions_for_later_commands(node, slurm, monkeypatch):
    with monkeypatch.context() as short:
        short.setattr(client, "_TIMEOUT_S", 0.3)
        add(node, "squeue", "exec sleep 600")
        for _ in range(MAX_SESSIONS + 2):
            with pytest.raises(ClusterUnavailable, match="cannot get an answer of `squeue`"):
                slurm.jobs("nni-EXPT-")
    assert slurm.cluster().name == "there"


def test_a_call_of_a_closed_slurm_client_raises_an_error(slurm):
    slurm.close()
    with pytest.raises(NniManagerError, match="the manager is closing"):
        slurm.cluster()
