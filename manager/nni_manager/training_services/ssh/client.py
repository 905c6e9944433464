"""Opens SSH connections. Runs on the loop of an `SshThread`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import asyncssh

from nni_manager.errors import NniManagerError, UserError
from nni_manager.training_services.errors import ClusterUnavailable, Unauthenticated
from nni_manager.training_services.ssh.login import DEFAULT_PORT, SshLogin

# asyncssh logs each connection and each channel.
asyncssh.set_log_level(logging.WARNING)

CONNECT_TIMEOUT_S = 15.0
# 45 s of silence end a connection: a machine that is only busy answers, as sshd does so itself.
_KEEP_ALIVE_S = 15
_MAX_MISSED = 3


class MachineAway(ClusterUnavailable):
    """cannot reach a machine over SSH now; its jobs continue, and the connection is tried again"""


async def open_connection(login: SshLogin) -> asyncssh.SSHClientConnection:
    """A connection to the host.

    Raises:
        UserError: the host is not trusted, or refuses the login.
        MachineAway: it cannot be reached now.
    """
    try:
        options = await asyncio.to_thread(_options, login)
        return await asyncssh.connect(login.host, options=options)
    except (asyncssh.Error, OSError, ValueError, asyncio.TimeoutError) as error:
        # The last is no OSError before Python 3.11.
        raise error_of(login, error) from error


def _options(login: SshLogin) -> asyncssh.SSHClientConnectionOptions:
    given: dict[str, Any] = {
        "port": None if login.port == DEFAULT_PORT else login.port,
        "username": login.user,
        "password": login.password,
        "client_keys": None if login.ssh_key_file is None else [login.ssh_key_file],
        "passphrase": login.ssh_passphrase,
        # The agent may hold a key whose passphrase is not known here.
        "ignore_encrypted": login.ssh_passphrase is None,
        # As NNI does; and a server refuses further tries after a few keys of the agent.
        "preferred_auth": None if login.password is None else "password,keyboard-interactive,publickey",
    }
    options = asyncssh.SSHClientConnectionOptions(
        host=login.host,
        connect_timeout=CONNECT_TIMEOUT_S,
        login_timeout=CONNECT_TIMEOUT_S,
        # What ~/.ssh/config may have for sessions of people.
        request_pty=False,
        agent_forwarding=False,
        keepalive_interval=_KEEP_ALIVE_S,
        keepalive_count_max=_MAX_MISSED,
        **{name: value for name, value in given.items() if value is not None},
    )
    if options.known_hosts is None:  # asyncssh would accept any key
        raise UserError(
            f"cannot trust {login.address}: UserKnownHostsFile is none in the configuration of ssh; remove that line"
        )
    return options


def error_of(login: SshLogin, error: Exception) -> NniManagerError:
    """The error for people, with the remedy."""
    where = login.address
    log_in = login.command("true")
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        port = "" if login.port == DEFAULT_PORT else f"-p {login.port} "
        return UserError(
            f"cannot trust {where}: its host key is not the one in ~/.ssh/known_hosts, or there is none; run `{log_in}` once and "
            f"compare the key that it shows (or `ssh-keyscan {port}{login.host} >> ~/.ssh/known_hosts` in a network you trust)"
        )
    if isinstance(error, asyncssh.PermissionDenied):
        if login.ssh_passphrase is None and _has_passphrase(login.ssh_key_file):
            return Unauthenticated(
                f"cannot use sshKeyFile {login.ssh_key_file} for {where}: it has a passphrase, and no agent holds the key; write "
                "sshPassphrase, or add the key to ssh-agent"
            )
        return Unauthenticated(
            f"cannot log in to {where}: {error.reason}; check user, key and password, and that `{log_in}` works"
        )
    if isinstance(error, asyncssh.KeyEncryptionError):
        if login.ssh_key_file is None:
            return UserError(f"cannot use a key of ~/.ssh for {where}: {error}; add the key to ssh-agent")
        return UserError(
            f"cannot use sshKeyFile {login.ssh_key_file} for {where}: {error}; correct sshPassphrase, or use ssh-agent"
        )
    if isinstance(error, asyncssh.KeyImportError | asyncssh.ConfigParseError | FileNotFoundError):
        key = "" if login.ssh_key_file is None else "sshKeyFile, or "
        return UserError(f"cannot log in to {where}: {words(error)}; correct {key}~/.ssh/config")
    return MachineAway(f"cannot reach {where} over SSH: {words(error)}; check that `{log_in}` works")


def _has_passphrase(key_file: str | None) -> bool:
    if key_file is None:
        return False
    try:
        asyncssh.read_private_key(key_file)
    except asyncssh.KeyImportError as error:
        return "Passphrase" in str(error)
    return False


def words(error: BaseException) -> str:
    """Describe an error on one line."""
    if isinstance(error, TimeoutError | asyncio.TimeoutError) and not str(error):
        return "it does not answer in time"
    if isinstance(error, asyncssh.DisconnectError):
        return error.reason
    return str(error) or type(error).__name__
