"""Checks the arguments with which an experiment starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from nni_manager.client import preflight
from nni_manager.errors import UserError
from nni_manager.experiment.config import check_current_directory
from nni_manager.support.web_server_options import WebServerOptions

Port: TypeAlias = int | Literal["auto"]
"""A port of this machine; keepers use the next one. "auto": the first two free ports from 8080 on."""
_File: TypeAlias = str | os.PathLike[str] | None
# Job names contain the id.
_ID = re.compile(r"[A-Za-z0-9]{1,32}")


def check_id(given: Any) -> None:
    """Check the id of an experiment, which may be of any type.

    Raises:
        UserError: it has another form.
    """
    if given is None:
        raise UserError(
            "cannot find an experiment without its id; pass the id, as in Experiment.resume('GvTf2bVe')"
        )
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise UserError(
            f"cannot use {given!r} as the id of an experiment: job names contain the id; write 1 to 32 letters and digits"
        )


def check_start(port: Any) -> None:
    """Check what would otherwise be reported as an error of the configuration, or by Python itself.

    Raises:
        UserError: the port is a function, or the current directory does not exist.
    """
    if callable(port):
        raise UserError(
            f"cannot use {port!r} as the port; a function is the objective: write run(objective=f), or search(f, space)"
        )
    check_current_directory()


def ports_from(port: Port, count: int = 2) -> Iterable[int]:
    """The usable ports for the manager.

    Raises:
        UserError: this is no port, or it is in use.
    """
    if port == "auto":
        return preflight.usable_ports(None)
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= preflight.HIGHEST_PORT:
        raise UserError(
            f'cannot use port={port!r}: it is not a number from 1 to {preflight.HIGHEST_PORT}; pass one, or port="auto"'
        )
    return preflight.usable_ports(port, count=count)


def web_server(url_prefix: str | None, tls_certificate: _File, tls_key: _File) -> WebServerOptions:
    """The options of the manager's web server.

    Raises:
        UserError: the prefix has another form, or the files cannot be used.
    """
    prefix = preflight.url_prefix(url_prefix or "")
    return WebServerOptions(url_prefix=prefix, tls=preflight.tls_files(tls_certificate, tls_key))
