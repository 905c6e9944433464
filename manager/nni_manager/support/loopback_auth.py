"""HTTP to this user's own programs on this machine. Nothing is sent to a listener of another user."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trial_keeper.wire.listener_uid import UntrustedListener, check_peer

if TYPE_CHECKING:
    import requests


class VerifiedConnection(http.client.HTTPConnection):
    """A connection that verifies the uid of its listener: `connect` raises `UntrustedListener` if it is another user's."""

    def connect(self) -> None:
        """Connect, then verify the listener's uid."""
        super().connect()
        check_peer(self.sock)


def verify_connections(session: requests.Session) -> None:
    """Prevent a session from sending HTTP to a port of this machine that belongs to another user."""
    # Imported here: the import takes 100 ms, and only callers with a session need it.
    from requests.adapters import HTTPAdapter
    from urllib3.connection import HTTPConnection
    from urllib3.connectionpool import HTTPConnectionPool

    class Connection(VerifiedConnection, HTTPConnection):
        pass

    class Pool(HTTPConnectionPool):
        ConnectionCls = Connection

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
            super().init_poolmanager(*arguments, **options)
            self.poolmanager.pool_classes_by_scheme = {"http": Pool}

    session.mount("http://", Adapter())


def untrusted_listener_in(error: BaseException) -> UntrustedListener | None:
    """The `UntrustedListener` among the causes of a session's error; None if there is none."""
    return next((cause for cause in causes_of(error) if isinstance(cause, UntrustedListener)), None)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes: libraries wrap the system's error, some twice."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
