"""The errors of the manager: one base and three kinds, distinguished by who must act.

This module is below every layer and imports nothing. A message starts with "cannot", names the thing and the value, and ends
with the remedy. The docstring of a class is its default message.
"""

from __future__ import annotations

import inspect


class NniManagerError(Exception):
    """cannot continue; see the manager's log for the cause"""

    exit_code = 1
    """The exit code of a command that ends with this error."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or NniManagerError.__doc__ or ""))


class UserError(NniManagerError):
    """cannot carry out the request; change the request, because a repetition fails too"""


class RetryableError(NniManagerError):
    """cannot reach a service or a storage now; wait and try again"""


class InternalError(NniManagerError):
    """cannot continue because of a bug of trial-keeper; please report it with the manager's log"""


CANNOT_LISTEN = "cannot listen"
"""Prefix of the error message of a server that has lost a race for its port."""
