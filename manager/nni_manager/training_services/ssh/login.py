"""The login to a host over SSH. Imports no SSH client."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import StringConstraints

from nni_manager.errors import UserError
from trial_keeper.frozen_dataclass import dataclass

DEFAULT_PORT = 22
# Refused, as by OpenSSH: what a ProxyCommand could pass to a shell, or read as an option. A user may be DOMAIN\user.
_REFUSED = r"""\s\x00-\x1f\x7f'"`;&<>|(){}$"""
HOST = rf"^[^-\\{_REFUSED}][^\\{_REFUSED}]*$"
USER = rf"^[^-\\{_REFUSED}]([^{_REFUSED}]*[^\\{_REFUSED}])?$"
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
ADDRESS = rf"^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*(:{_PORT})?$"
"""The form `user@host:port`, of which user and port may be missing."""


@dataclass(frozen=True, slots=True)
class SshLogin:
    """A host and its user. None: what `~/.ssh/config` says for the host, or the default of ssh.

    Port 22 stands for that as well. With a password there is no key file.
    """

    host: Annotated[str, StringConstraints(pattern=HOST)]
    port: int = DEFAULT_PORT
    user: Annotated[str, StringConstraints(pattern=USER)] | None = None
    password: str | None = field(default=None, repr=False)
    ssh_key_file: str | None = None
    ssh_passphrase: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, address: str) -> SshLogin:
        """The login to an address `user@host:port`, of which user and port may be missing."""
        user, _, host = address.rpartition("@")
        name, colon, port = host.rpartition(":")
        return cls(name, int(port), user or None) if colon else cls(host, user=user or None)

    @property
    def address(self) -> str:
        """The host for messages: user, host, and a port that is not 22."""
        user = "" if self.user is None else f"{self.user}@"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{user}{host}" if self.port == DEFAULT_PORT else f"{user}{host}:{self.port}"

    @property
    def url(self) -> str:
        """The host as a URL."""
        return f"ssh://[{self.host}]" if ":" in self.host else f"ssh://{self.host}"

    def command(self, command: str) -> str:
        """The call of ssh with which a person runs a command on the host."""
        port = "" if self.port == DEFAULT_PORT else f"-p {self.port} "
        user = "" if self.user is None else f"{self.user}@"
        return f"ssh {port}{user}{self.host} {command}"


def require_client(user: str) -> None:
    """Check that the SSH client is installed. `user`: what needs it, for the message.

    Raises:
        UserError: it is not.
    """
    try:
        import asyncssh  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            f"cannot use {user}: the SSH client is not installed; run `pip install 'trial-keeper[remote]'`"
        ) from error
