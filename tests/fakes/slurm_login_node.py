"""A login node of a Slurm cluster: a real sshd on loopback. Only the login shells of this sshd have Slurm's configuration."""

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from ssh_machines import SshMachine, ssh_machines_here


class LoginNode:
    """The node. `variables`: the environment variables of a user who can log in to the node."""

    def __init__(self, machine: SshMachine, known_hosts: Path, variables: dict[str, str]) -> None:
        self.machine, self.known_hosts, self.variables = machine, known_hosts, variables
        self.address = f"127.0.0.1:{machine.port}"
        """The value of `slurmConfig.login`."""


@contextlib.contextmanager
def a_login_node(folder: Path, environ: Mapping[str, str]) -> Iterator[LoginNode]:
    """A running login node. `environ`: the environment variables of its login shells. Skips the test without an SSH server."""
    with ssh_machines_here(folder, "login") as site:
        (machine,) = site.machines.values()
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environ.items())
        (machine.home / ".bash_profile").write_text(f"echo Welcome\n{exports}")
        yield LoginNode(machine, site.known_hosts, site.variables)
