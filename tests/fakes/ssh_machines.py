"""Machines with real sshd servers on loopback, each with a port, a host key and a home of its own.

Source: OpenSSH 9.2 of Debian 12; sshd_config(5).
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from real_experiment import wait_until

from trial_keeper import processes

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_CONF = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
SetEnv HOME={folder}/home PATH={path} MACHINE={name}
"""


class SshMachine:
    """One machine. Its sessions have the variable MACHINE with its name, and a home below `folder`."""

    def __init__(self, name: str, folder: Path, client_key: Path, conf: str = "") -> None:
        """`conf`: further lines of sshd_config."""
        self.name, self.folder, self.home = name, folder, folder / "home"
        self.home.mkdir(parents=True)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.port = free_port_pair()
        make_key(folder / "host_key")
        shutil.copyfile(client_key.with_suffix(".pub"), folder / "authorized_keys")
        self._conf = conf
        self._sshd: subprocess.Popen[bytes] | None = None
        self._write_conf(f"{Path(sys.executable).parent}:/usr/bin:/bin")

    def _write_conf(self, path: str) -> None:
        text = _CONF.format(port=self.port, folder=self.folder, path=f"{self.bin}:{path}", name=self.name)
        (self.folder / "sshd_config").write_text(text + self._conf)

    def set_path(self, path: str) -> None:
        """Set the PATH of sessions. The folder `bin` of the machine stays its first entry. Restarts sshd."""
        self.stop()
        self._write_conf(path)
        self.start()

    @property
    def known_host(self) -> str:
        """The machine's line of known_hosts."""
        kind, key, *_ = (self.folder / "host_key.pub").read_text().split()
        return f"[127.0.0.1]:{self.port} {kind} {key}\n"

    def set_gpus(self, count: int, *, in_use: int = 0) -> None:
        """Let a fake nvidia-smi show `count` GPUs, and running programs on the first `in_use` of them."""
        gpus = "".join(f"{index}, GPU-{index}\n" for index in range(count))
        used = "".join(f"GPU-{index}\n" for index in range(in_use))
        (self.folder / "gpus").write_text(gpus)
        (self.folder / "used").write_text(used)
        program = self.bin / "nvidia-smi"
        program.write_text(
            f'#!/bin/bash\ncase "$*" in *query-gpu*) cat {self.folder}/gpus;; *) cat {self.folder}/used;; esac\n'
        )
        program.chmod(0o755)

    def start(self) -> None:
        """Start sshd; returns once it listens."""
        assert SSHD is not None
        with (self.folder / "sshd.log").open("ab") as log:
            command = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
            self._sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._listens, f"sshd of {self.name} listens")

    def _listens(self) -> bool:
        assert self._sshd is not None
        assert self._sshd.poll() is None, (self.folder / "sshd.log").read_text()
        return b"Server listening" in (self.folder / "sshd.log").read_bytes()

    def cut(self) -> None:
        """Kill the sshd processes of all connections. The programs that they have started are not killed."""
        for pid in self._sessions():
            processes.kill(pid)

    def freeze(self) -> list[int]:
        """Suspend the sshd processes of all connections, as if the network dropped all packets. Return their pids."""
        sessions = self._sessions()
        for pid in sessions:
            os.kill(pid, signal.SIGSTOP)
        return sessions

    def stop(self) -> None:
        """Kill sshd, and its connections."""
        if self._sshd is not None:
            sessions = self._sessions()
            self._sshd.kill()
            self._sshd.wait(DEADLINE_S)
            for pid in sessions:
                processes.kill(pid)
            self._sshd = None
            (self.folder / "sshd.log").unlink()

    def _sessions(self) -> list[int]:
        assert self._sshd is not None
        return [pid for pid in processes.descendants([self._sshd.pid]) if _is_sshd(pid)]

    def processes(self) -> list[int]:
        """The processes of the machine, except sshd's."""
        return processes.pids_where(lambda environ: environ.get("HOME") == str(self.home))

    def close(self) -> None:
        """End everything on the machine."""
        self.stop()
        processes.end_all(self.processes)


def _is_sshd(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).exe().endswith(("/sshd", "/sshd-session"))
    return False


def make_key(path: Path, passphrase: str = "") -> None:
    """Make a pair of keys."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path), "-C", "test"]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)


class SshSite:
    """Some machines, and the home of a user who may log in to them."""

    def __init__(self, folder: Path, names: tuple[str, ...], conf: str = "") -> None:
        self.home = folder / "home"
        ssh = self.home / ".ssh"
        ssh.mkdir(0o700, parents=True)
        self.key = ssh / "id_ed25519"
        make_key(self.key)
        self.machines = {name: SshMachine(name, folder / name, self.key, conf) for name in names}
        self.known_hosts = ssh / "known_hosts"
        self.known_hosts.write_text("".join(each.known_host for each in self.machines.values()))
        self.variables = {"HOME": str(self.home), "SSH_AUTH_SOCK": ""}
        """What the user has in the environment."""

    def machine_list(self, **keys: object) -> list[dict[str, object]]:
        """The value of `machineList` in an experiment file. `keys`: further keys of each machine."""
        return [{"host": "127.0.0.1", "port": each.port, **keys} for each in self.machines.values()]

    def processes(self) -> list[int]:
        """The processes of all machines."""
        return [pid for each in self.machines.values() for pid in each.processes()]


@contextlib.contextmanager
def ssh_machines_here(folder: Path, *names: str, conf: str = "") -> Iterator[SshSite]:
    """Machines whose sshd is running. `conf`: further lines of sshd_config. Skips the test without an SSH server."""
    pytest.importorskip("asyncssh")
    if SSHD is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd and ssh-keygen: apt-get install openssh-server")
    if os.geteuid() == 0 and not Path("/run/sshd").is_dir():
        Path("/run/sshd").mkdir(0o755)
    if pwd.getpwuid(os.geteuid()).pw_shell.endswith(("nologin", "false")):
        pytest.skip("needs a user with a login shell")
    site = SshSite(folder, names, conf)
    try:
        for machine in site.machines.values():
            machine.start()
        yield site
    finally:
        for machine in site.machines.values():
            machine.close()
