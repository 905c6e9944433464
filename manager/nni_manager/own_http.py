"""HTTP to this user's own programs on this machine: to whoever else listens in their place, nothing is said."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trial_keeper.wire.own_port import StrangerListens, check_peer

if TYPE_CHECKING:
    import requests


class OwnConnection(http.client.HTTPConnection):
    """A connection that is let go of where somebody else listens: `connect` raises `StrangerListens`."""

    def connect(self) -> None:
        """As ever, and look who it is."""
        super().connect()
        check_peer(self.sock)


def keep_to_own(session: requests.Session) -> None:
    """Let a session say nothing over HTTP to a port of this machine at which somebody else listens."""
    # Costs 100 ms, which only those pay who have a session.
    from requests.adapters import HTTPAdapter
    from urllib3.connection import HTTPConnection
    from urllib3.connectionpool import HTTPConnectionPool

    class Connection(HTTPConnection):
        def connect(self) -> None:
            super().connect()
            check_peer(self.sock)

    class Pool(HTTPConnectionPool):
        ConnectionCls = Connection

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
            super().init_poolmanager(*arguments, **options)
            self.poolmanager.pool_classes_by_scheme = {"http": Pool}

    session.mount("http://", Adapter())


def stranger_in(error: BaseException) -> StrangerListens | None:
    """Why such a session did not speak, where that is behind what it raised."""
    return next((cause for cause in causes_of(error) if isinstance(cause, StrangerListens)), None)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error and what is behind it: libraries wrap what the system said, some twice."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
