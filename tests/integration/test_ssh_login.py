"""Logins to a real sshd with the keys that users have: of an agent, and with a passphrase."""

import os
import shutil
import subprocess

import pytest
from deadlines import DEADLINE_S, scaled_s
from ssh_machines import make_key, ssh_machines_here

from nni_manager.errors import UserError
from nni_manager.training_services.errors import Unauthenticated
from nni_manager.training_services.ssh.login import SshLogin

PASSPHRASE = "correct horse"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A remote machine. This process has the home and the SSH agent of a user who has no key file."""
    with ssh_machines_here(tmp_path, "one") as site:
        for name, value in site.variables.items():
            monkeypatch.setenv(name, value)
        yield site


@pytest.fixture
def agent(site, tmp_path, monkeypatch):
    """Adds keys to an agent of this process."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("needs ssh-agent: apt-get install openssh-client")
    socket = tmp_path / "agent"
    command = ["ssh-agent", "-D", "-a", socket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout.readline().startswith(b"SSH_AUTH_SOCK="), running.stderr.read()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        yield lambda key: subprocess.run(["ssh-add", "-q", key], stdin=subprocess.DEVNULL, check=True)
        running.kill()


def logged_in(site, **keys):
    """What a command on the machine prints."""
    from nni_manager.training_services.ssh.remote_shell import RemoteShell

    shell = RemoteShell(SshLogin("127.0.0.1", site.machines["one"].port, **keys))
    try:
        return shell.run("echo hello", scaled_s(30)).stdout.strip()
    finally:
        shell.close()


def test_a_login_with_a_key_of_the_ssh_agent_needs_no_key_file(site, agent):
    agent(site.key)
    site.key.unlink()
    assert logged_in(site) == "hello"


def test_a_login_without_any_key_is_refused_with_the_command_to_try(site):
    site.key.unlink()
    with pytest.raises(Unauthenticated, match=r"check user, key and password, and that `ssh -p \d+ 127"):
        logged_in(site)


@pytest.fixture
def encrypted(site, tmp_path):
    """A key with a passphrase, which the machine accepts."""
    key = tmp_path / "encrypted"
    make_key(key, PASSPHRASE)
    accepted = site.machines["one"].folder / "authorized_keys"
    accepted.write_text(key.with_suffix(".pub").read_text())
    return key


def test_an_ssh_key_with_a_passphrase_works_if_ssh_passphrase_is_set(site, encrypted):
    assert logged_in(site, ssh_key_file=str(encrypted), ssh_passphrase=PASSPHRASE) == "hello"


@pytest.mark.parametrize(
    ("passphrase", "remedy"),
    [
        ("wrong", "correct sshPassphrase, or use ssh-agent"),
        (
            None,
            "it has a passphrase, and no agent holds the key; write sshPassphrase, or add the key to ssh-agent",
        ),
    ],
)
def test_a_key_is_refused_with_a_remedy_if_its_passphrase_is_wrong_or_missing(
    site, encrypted, passphrase, remedy
):
    with pytest.raises((UserError, Unauthenticated), match=remedy):
        logged_in(site, ssh_key_file=str(encrypted), ssh_passphrase=passphrase)


def test_the_passphrase_of_a_key_is_not_needed_if_the_agent_holds_the_key(site, agent, encrypted, tmp_path):
    ask = tmp_path / "ask"
    ask.write_text(f"#!/bin/sh\necho '{PASSPHRASE}'\n")
    ask.chmod(0o755)
    subprocess.run(
        ["ssh-add", "-q", encrypted],
        env=os.environ | {"SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"},
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE_S,
        check=True,
    )
    assert logged_in(site, ssh_key_file=str(encrypted)) == "hello"
