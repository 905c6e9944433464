"""Calls to the manager of one experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nni_manager.errors import TryAgain, UserMistake
from nni_manager.store.folders import ManagerProcess

if TYPE_CHECKING:
    import requests

# The manager answers in milliseconds; a machine under full load gets some patience.
_ANSWER_WITHIN_S = 10.0
# A change is answered when the tuner knows of it, and that may be busy with a suggestion.
_CHANGED_WITHIN_S = 120.0


class ManagerSilent(TryAgain):
    """cannot reach the manager; wait and try again"""


class ConnectionClosed(ManagerSilent):
    """cannot hear the manager to the end; try again"""


class RequestRefused(UserMistake):
    """cannot do what was asked of the manager; see its answer"""


class ManagerClient:
    """The HTTP API of one manager. Answers are the documents of that API."""

    def __init__(self, experiment_id: str, process: ManagerProcess) -> None:
        self.experiment_id = experiment_id
        self.url = api_url(process)
        self._session = session_with(process)

    def summary(self) -> dict[str, Any]:
        """The experiment at a glance.

        Raises:
            ManagerSilent: nobody answers, or another program does.
        """
        summary: dict[str, Any] = self.get("/summary")
        if summary.get("id") != self.experiment_id:
            # The port in the folder is that of an earlier manager, and somebody else has it by now.
            raise self._silent("another experiment answers there")
        return summary

    def get(self, path: str, *names: str) -> Any:
        """What the manager says of `path`, or of what has `names` below it; they may be any text but "", "." and "..".

        Raises:
            ManagerSilent: nobody answers, or another program does.
            RequestRefused: the manager's own words.
        """
        return self._ask("GET", path, names)

    def delete(self, path: str, *names: str) -> Any:
        """Ask for the end of something; as with `get`.

        Raises:
            ManagerSilent: nobody answers, or another program does.
            RequestRefused: the manager's own words.
        """
        return self._ask("DELETE", path, names)

    def put(self, path: str, document: Any, **query: str) -> Any:
        """Change something to what the document says; as with `get`.

        Raises:
            ManagerSilent: nobody answers, or another program does.
            RequestRefused: the manager's own words.
        """
        return self._ask("PUT", path, (), within_s=_CHANGED_WITHIN_S, json=document, params=query)

    def post(self, path: str, *names: str, document: Any = None) -> Any:
        """Begin something, with the document that it is made of; as with `get`.

        Raises:
            ManagerSilent: nobody answers, or another program does.
            RequestRefused: the manager's own words.
        """
        return self._ask("POST", path, names, within_s=_CHANGED_WITHIN_S, json=document)

    def _ask(
        self,
        verb: str,
        path: str,
        names: tuple[str, ...],
        within_s: float = _ANSWER_WITHIN_S,
        **options: Any,
    ) -> Any:
        import requests

        # No quoting keeps these from naming something else: a folder above, or all there is.
        assert not {"", ".", ".."} & set(names), names
        url = "/".join((self.url + path, *(quote(name, safe="") for name in names)))
        try:
            answer = self._session.request(verb, url, timeout=within_s, **options)
            document = answer.json()
        except requests.Timeout as error:
            raise self._silent(f"no answer within {within_s:.0f} s") from error
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            raise self._unheard(error) from error
        except requests.RequestException as error:
            raise self._silent("another program answers there") from error
        if answer.ok:
            return document
        problem = document.get("error") if isinstance(document, dict) else None
        if not problem:
            raise self._silent(f"what answers there says {answer.status_code}")
        raise RequestRefused(str(problem))

    def _unheard(self, error: requests.RequestException) -> ManagerSilent:
        import ssl
        from http.client import IncompleteRead

        import requests

        from nni_manager.own_http import causes_of, stranger_in

        # What the other end's closing looks like, in the words of the system, of TLS and of HTTP.
        closed = (
            ConnectionResetError,
            ConnectionAbortedError,
            BrokenPipeError,
            ssl.SSLEOFError,
            ssl.SSLZeroReturnError,
            IncompleteRead,
        )

        if (stranger := stranger_in(error)) is not None:
            return self._silent(str(stranger))
        causes = tuple(causes_of(error))
        if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
            return self._silent("nobody listens there")
        if any(isinstance(cause, closed) for cause in causes):
            # It had to make room for others, or has just ended.
            return self._silent("the connection was closed before it had answered", ConnectionClosed)
        if isinstance(error, requests.exceptions.SSLError):
            return self._silent("what answers there has not its certificate")
        why = next(
            (cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror), None
        )
        return self._silent(why or "the connection was lost")

    def _silent(self, why: str, kind: type[ManagerSilent] = ManagerSilent) -> ManagerSilent:
        return kind(
            f"cannot reach the manager of experiment {self.experiment_id} at {self.url}: {why}; "
            f"wait and try again, or see `nnictl log stderr {self.experiment_id}`"
        )


def session_with(process: ManagerProcess) -> requests.Session:
    """What lets the owner of the experiment in, and speaks to nobody but its manager."""
    # All this costs 150 ms, which only those pay who talk to a manager.
    import requests
    from requests.adapters import HTTPAdapter

    from nni_manager.own_http import keep_to_own

    session = requests.Session()
    # A proxy of the environment cannot reach this machine's loopback, and .netrc has another token.
    session.trust_env = False
    session.headers["Authorization"] = f"Bearer {process.token}"
    # Over HTTP, on loopback: its port may be another user's by now.
    keep_to_own(session)
    if process.certificate_sha256 is not None:
        adapter = HTTPAdapter()
        # The certificate is known: who signed it, for which address, does not matter.
        adapter.init_poolmanager(1, 1, assert_fingerprint=process.certificate_sha256)
        session.mount("https://", adapter)
        session.verify = False
    return session


def api_url(process: ManagerProcess) -> str:
    """Where this machine's programs find the manager's HTTP API."""
    return f"{process.origin}/api/v1/nni"
