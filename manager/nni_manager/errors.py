"""The errors of the manager: one base and three kinds, distinguished by who must act.

This module is below every layer and imports nothing. A message starts with "cannot", names the thing and the value, and ends
with the remedy. The docstring of a class is its default message.
"""

from __future__ import annotations

import inspect


class NniManagerError(Exception):
    """cannot go on; see the manager's log for what happened before"""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or inspect.cleandoc(type(self).__doc__ or NniManagerError.__doc__ or ""))


class UserError(NniManagerError):
    """cannot do what was asked; change the request, repeating it will not help"""


class RetryableError(NniManagerError):
    """cannot reach something just now; wait and try again"""


class InternalError(NniManagerError):
    """cannot happen, and did: this is a bug of trial-keeper; please report it with the manager's log"""


CANNOT_LISTEN = "cannot listen"
"""Prefix of the error message of a server that has lost a race for its port."""
