"""HTTP client for the manager of one experiment."""

from __future__ import annotations

import json
import reprlib
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nni_manager.errors import RetryableError, UserError
from nni_manager.store.folders import ManagerProcess

if TYPE_CHECKING:
    import requests

# The manager answers in milliseconds; a machine under full load needs longer.
_ANSWER_TIMEOUT_S = 10.0
# The manager answers a change after the tuner has applied it, and the tuner may be busy with a suggestion.
_CHANGED_TIMEOUT_S = 120.0


class ManagerUnresponsive(RetryableError):
    """cannot reach the manager; wait and try again"""


class ConnectionClosed(ManagerUnresponsive):
    """cannot read the manager's answer: the connection was closed; try again"""


class ManagerRefusal(UserError):
    """cannot do this: the manager refused the request; see its answer"""


class ManagerClient:
    """Client of one manager's HTTP API. Results are the JSON documents of that API."""

    def __init__(self, experiment_id: str, process: ManagerProcess) -> None:
        self.experiment_id = experiment_id
        self.url = api_url(process)
        self._session = session_with(process)

    def summary(self) -> dict[str, Any]:
        """The summary of the experiment.

        Raises:
            ManagerUnresponsive: no answer, or another program answers.
        """
        summary: dict[str, Any] = self.get("/summary")
        if summary.get("id") != self.experiment_id:
            # The folder names the port of an earlier manager, which another manager uses now.
            raise self._unresponsive("another experiment answers there")
        return summary

    def get(self, path: str, *names: str, **query: str) -> Any:
        """The document at `path`, or at `names` below it. Names are quoted; they may be any text but "", "." and "..".

        Raises:
            ManagerUnresponsive: no answer, or another program answers.
            ManagerRefusal: with the manager's error message.
        """
        return self._request("GET", path, names, params=query)

    def delete(self, path: str, *names: str) -> Any:
        """Send a DELETE request; arguments and errors as for `get`."""
        return self._request("DELETE", path, names)

    def put(self, path: str, document: Any, **query: str) -> Any:
        """Send a PUT request with the document; `path` and errors as for `get`."""
        return self._request(
            "PUT", path, (), within_s=_CHANGED_TIMEOUT_S, data=_encoded(document), params=query
        )

    def post(self, path: str, *names: str, document: Any = None, **query: str) -> Any:
        """Send a POST request with the document; other arguments and errors as for `get`."""
        body = None if document is None else _encoded(document)
        return self._request("POST", path, names, within_s=_CHANGED_TIMEOUT_S, data=body, params=query)

    def patch(self, path: str, *names: str, document: Any) -> Any:
        """Send a PATCH request with the document; other arguments and errors as for `get`."""
        return self._request("PATCH", path, names, within_s=_CHANGED_TIMEOUT_S, data=_encoded(document))

    def _request(
        self,
        verb: str,
        path: str,
        names: tuple[str, ...],
        within_s: float = _ANSWER_TIMEOUT_S,
        **options: Any,
    ) -> Any:
        import requests

        # Quoting does not change these names, which would address the parent or the whole collection.
        assert not {"", ".", ".."} & set(names), names
        url = "/".join((self.url + path, *(quote(name, safe="") for name in names)))
        try:
            answer = self._session.request(verb, url, timeout=within_s, **options)
            document = answer.json()
        except requests.Timeout as error:
            effect = "" if verb == "GET" else ", and the change may still take effect"
            raise self._unresponsive(f"no answer within {within_s:.0f} s{effect}") from error
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            raise self._connection_error(error) from error
        except requests.RequestException as error:
            raise self._unresponsive("another program answers there") from error
        if answer.ok:
            return document
        if answer.status_code == requests.codes.unauthorized:
            # The manager accepts its own token. It has exited, and another one uses its port now.
            raise self._unresponsive("another manager answers there")
        problem = document.get("error") if isinstance(document, dict) else None
        if not problem:
            raise self._unresponsive(f"the server there answered with HTTP status {answer.status_code}")
        raise ManagerRefusal(str(problem))

    def _connection_error(self, error: requests.RequestException) -> ManagerUnresponsive:
        import ssl
        from http.client import IncompleteRead

        import requests

        from nni_manager.support.loopback_auth import causes_of, untrusted_listener_in

        # Errors by which the kernel, TLS and HTTP report that the other end has closed the connection.
        closed = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError, IncompleteRead)
        if (untrusted := untrusted_listener_in(error)) is not None:
            return self._unresponsive(str(untrusted))
        causes = tuple(causes_of(error))
        if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
            return self._unresponsive("no program listens there")
        if any(isinstance(cause, closed) for cause in causes):
            # The manager has evicted this connection at its limit, or has just exited.
            return self._unresponsive("the connection was closed before the answer", ConnectionClosed)
        if isinstance(error, requests.exceptions.SSLError):
            return self._unresponsive("the server there has another certificate")
        why = next(
            (cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror), None
        )
        return self._unresponsive(why or "the connection was lost")

    def _unresponsive(
        self, why: str, kind: type[ManagerUnresponsive] = ManagerUnresponsive
    ) -> ManagerUnresponsive:
        return kind(
            f"cannot reach the manager of experiment {self.experiment_id} at {self.url}: {why}; "
            f"wait and try again, or see `nnictl log manager {self.experiment_id}`"
        )


def _encoded(document: Any) -> bytes:
    """The body of a request.

    Raises:
        UserError: the document is not JSON.
    """
    # Text in UTF-8 is smaller than JSON's escapes, and the manager limits a body.
    try:
        return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"cannot send {reprlib.repr(document)} to the manager: it is not JSON ({error}); use only text, finite numbers, "
            "True, False, None, and lists and mappings of these"
        ) from error


def session_with(process: ManagerProcess) -> requests.Session:
    """An authenticated session that connects to this manager only."""
    # Imported here: the imports take 150 ms, and most commands do not call a manager.
    import requests
    from requests.adapters import HTTPAdapter

    from nni_manager.support.loopback_auth import verify_connections

    session = requests.Session()
    # A proxy from the environment cannot reach this machine's loopback, and .netrc holds another token.
    session.trust_env = False
    session.headers["Authorization"] = f"Bearer {process.token}"
    # Over HTTP on loopback there is no certificate, and another user may have taken over the port.
    verify_connections(session)
    if process.certificate_sha256 is not None:
        adapter = HTTPAdapter()
        # The certificate is pinned, so its issuer and its host name do not matter.
        adapter.init_poolmanager(1, 1, assert_fingerprint=process.certificate_sha256)
        session.mount("https://", adapter)
        session.verify = False
    return session


def api_url(process: ManagerProcess) -> str:
    """The base URL of the manager's HTTP API, for programs on this machine."""
    return f"{process.base_url}/api/v1/nni"
