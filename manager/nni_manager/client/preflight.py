"""Checks before a manager starts: ports and addresses."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterable, Iterator

from nni_manager.client import output
from nni_manager.client.experiments import known_experiments
from nni_manager.errors import UserError
from nni_manager.support.server_tls import TlsFiles

HOST = "127.0.0.1"
DEFAULT_PORT = 8080
HUB_PORT = 8070
"""The first port of the page of all experiments."""
HIGHEST_PORT = 65534  # keepers use the next port
_URL_SEGMENT = re.compile(r"[A-Za-z0-9_-]{1,100}")


def free_ports(host: str = HOST, first: int = DEFAULT_PORT) -> Iterator[int]:
    """Ports that are free and whose next port is free: 8080, 8082, … Another program may still take them first.

    Raises:
        UserError: no further port is free.
    """
    for port in range(first, HIGHEST_PORT, 2):
        if ports_are_free(port, host):
            yield port
    raise UserError(f"cannot find two free ports from {first} on; stop some experiments")


def usable_ports(
    port: int | None, host: str = HOST, count: int = 2, first: int = DEFAULT_PORT
) -> Iterable[int]:
    """The port, if `count` ports from it on are free: the port of `host` for the API, the next one for keepers.

    A view needs only the first one. `port` None: `free_ports` from `first` on.

    Raises:
        UserError: a port is not available; the message names the experiment that uses it, if it is one of this user.
    """
    if port is None:
        return free_ports(host, first)
    for each in range(port, port + count):
        problem = _port_problem(each, host if each == port else HOST)
        if problem is None:
            continue
        for known in known_experiments():
            if known.view is not None and each == known.view.port:
                raise UserError(
                    f"cannot use port {each}: a view of experiment {known.experiment_id} is served there; "
                    f"end it with `nnictl stop --port {each}`, or choose another with --port N or --port auto"
                )
            if known.manager is not None and each in (known.manager.port, known.manager.port + 1):
                raise UserError(
                    f"cannot use port {each}: experiment {known.experiment_id} runs there; "
                    f"stop it with `nnictl stop {known.experiment_id}`, or choose another with --port N or --port auto"
                )
        which = "" if each == port else f" (keepers connect to the one after --port {port})"
        raise UserError(
            f"cannot use port {each}{which}: {problem}; choose another with --port N or --port auto"
        )
    return [port]


def ports_are_free(port: int, host: str = HOST) -> bool:
    """True if `port` and `port` + 1 are free now."""
    return is_free(port, host) and is_free(port + 1)


def is_free(port: int, host: str = HOST) -> bool:
    """True if the port is free now."""
    return _port_problem(port, host) is None


def _port_problem(port: int, host: str) -> str | None:
    remedy = "write an address of this machine, or 0.0.0.0 for all of them"
    if not host.strip():
        raise UserError(f"cannot use --host {host!r}: the address is empty; {remedy}")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As in the manager: connections in TIME_WAIT do not prevent listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except PermissionError:
            return "only root may use ports below 1024"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "another program uses it"
            raise UserError(f"cannot use --host {host}: {error.strerror}; {remedy}") from error
        except (TypeError, UnicodeError) as error:  # raised before the name is resolved
            raise UserError(f"cannot use --host {host}: no machine has such a name; {remedy}") from error
    return None


def tls_files(
    certificate: str | os.PathLike[str] | None, key: str | os.PathLike[str] | None
) -> TlsFiles | None:
    """The files of the two options, checked; None: neither is given. An expired certificate is a warning.

    Raises:
        TlsFilesUnusable: they cannot be used.
    """
    files = TlsFiles.of(certificate, key)
    if files is not None and (warning := files.read().warning):
        output.warning(warning)
    return files


def url_prefix(text: str) -> str:
    """The prefix of all addresses, with one slash before it and none after it; "" for none.

    Raises:
        UserError: it has other characters than letters, digits, - and _ in its segments.
    """
    segments = text.strip("/").split("/")
    if segments == [""]:
        return ""
    if not all(map(_URL_SEGMENT.fullmatch, segments)):
        raise UserError(
            f"cannot use --url-prefix {text}: write letters, digits, - and _, with slashes between them, such as lab/digits"
        )
    return "/" + "/".join(segments)
