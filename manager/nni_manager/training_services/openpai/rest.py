"""OpenPAI's REST API, version 2, as its clients need it: a job in, its states, logs and description out.

Blocking; may be used from several threads at once. A call that meets a cluster which is away, overloaded or restarting is made
again, ever more seldom; what cannot be helped by that is an error of ours with the way out. No token and no password is in
any message, log or repr.

Source: microsoft/pai v1.8.1, src/rest-server (routes, error codes, limits) and docs of its REST API.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

import requests
from requests.auth import AuthBase

from nni_manager.errors import TryAgain, UserMistake
from nni_manager.own_http import keep_to_own, stranger_in
from nni_manager.training_services.openpai.export import dumped
from nni_manager.training_services.openpai.states import JobState
from nni_manager.training_services.patience import Patience

logger = logging.getLogger(__name__)

# Source: the default limit of OpenPAI's job list, whatever limit is asked for it takes up to 50000.
PAGE_ROWS = 5000
# The REST server itself listens here, without the gateway's prefix.
_REST_SERVER_PORT = 9186
_LONGEST_WORDS = 300
_BLANKS = re.compile(r"\s+")


class ClusterAway(TryAgain):
    """cannot reach OpenPAI now; see that its host is right and its services run"""


class LoginRefused(TryAgain):
    """cannot log in to OpenPAI; write a token that is valid into the experiment file"""


class NotAllowed(UserMistake):
    """cannot do this on OpenPAI with this account; ask an administrator of the cluster"""


class JobRefused(UserMistake):
    """cannot run this job on OpenPAI; mend what its answer names"""


class JobExists(UserMistake):
    """cannot submit the job: there is one of that name already; choose another name"""


class JobUnknown(UserMistake):
    """cannot find the job on OpenPAI; `nnictl openpai jobs` shows those there are"""


class RequestRefused(UserMistake):
    """cannot do this on OpenPAI; see its answer"""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as a list shows it. `document` is OpenPAI's own. Times in milliseconds since the epoch."""

    name: str
    user: str
    state: JobState
    execution_type: str
    document: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class JobDetail:
    """A job as its own page shows it. `document` is OpenPAI's own.

    `exit_code` is the one that the task's command ended with, where the runtime tells, else OpenPAI's.
    """

    name: str
    user: str
    state: JobState
    attempt: int
    exit_code: int | None
    reason: str
    trigger: tuple[str, int] | None
    document: Mapping[str, Any] = field(repr=False)


class _Bearer(AuthBase):
    """Given as `auth`, so that no .netrc of the user replaces it."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def address_of(host: str) -> str:
    """The scheme and host that `paiConfig.host` means: http where it names none, as in NNI. A page's path is dropped.

    Raises:
        UserMistake: it is no host.
    """
    scheme, separator, rest = host.strip().rpartition("://")
    scheme = scheme.lower() if separator else "http"
    parts = urlsplit(f"{scheme}://{rest}")
    try:
        has_port = parts.port is not None
    except ValueError:
        has_port, parts = False, urlsplit("")
    if scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise UserMistake(
            f"cannot use {host!r} as the host of OpenPAI: it is no address; write e.g. openpai.example.com or "
            "https://openpai.example.com"
        )
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{scheme}://{name}:{parts.port}" if has_port else f"{scheme}://{name}"


class OpenPai:
    """One cluster, seen by one user."""

    def __init__(
        self,
        host: str,
        user: str,
        *,
        token: str | None = None,
        password: str | None = None,
        newer_token: Callable[[], str | None] = lambda: None,
        patience: Patience | None = None,
        is_own: bool = False,
    ) -> None:
        """`host` with or without scheme. With a password, a token is got when one is needed.

        `newer_token` is asked when a token has expired: somebody may have written down another one. Called from any thread.

        `is_own`: it is a program of this user on this machine, and spoken to nobody else who has its port by now.

        Raises:
            UserMistake: `host` is no host.
            LoginRefused: `token` cannot be one.
        """
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise LoginRefused(
                "cannot use this token: it holds blanks or letters that no token has; copy it again from your profile page"
            )
        self.address = address_of(host)
        self.user = user
        self._token = token
        self._password = password
        self._newer_token = newer_token
        self._is_own = is_own
        self._patience = patience or Patience()
        self._login = threading.Lock()
        self._closed = threading.Event()
        self._sessions = threading.local()
        parts = urlsplit(self.address)
        prefix = "" if parts.port == _REST_SERVER_PORT else "/rest-server"
        self._api = f"{self.address}{prefix}/api/v2"
        # A proxy of the environment cannot reach this machine's loopback.
        self._may_use_proxy = parts.hostname not in ("localhost", "127.0.0.1", "::1")

    def __repr__(self) -> str:
        return f"OpenPai({self.address!r}, {self.user!r})"

    def close(self) -> None:
        """Let calls that wait to be made again fail now."""
        self._closed.set()

    # ---- jobs

    def submit(self, text: str) -> None:
        """Hand in a job, as YAML. When this returns it is in OpenPAI's store, and some seconds later in its lists.

        Raises:
            JobExists, JobRefused, NotAllowed, RequestRefused, LoginRefused, ClusterAway
        """
        try:
            self._ask("POST", "/jobs", "submit the job", data=text.encode(), content_type="text/yaml")
        except _AlreadyThere as error:
            # An answer that got lost on the way was a success: nobody else uses this name at the same time.
            if not error.may_be_ours:
                raise JobExists(str(error)) from error

    def jobs(
        self,
        *,
        keyword: str = "",
        states: Iterable[JobState] = (),
        tags: Iterable[str] = (),
        user: str | None = "",
    ) -> list[JobRow]:
        """The jobs whose name holds `keyword`, newest first; in these states, or all; with one of these tags, or any.

        `user`: whose; empty for those of this one, None for all.

        Raises:
            LoginRefused, NotAllowed, RequestRefused, ClusterAway
        """
        query: dict[str, str] = {"order": "submissionTime,DESC", "limit": str(PAGE_ROWS)}
        if user is not None:
            query["username"] = user or self.user
        if keyword:
            query["keyword"] = keyword
        if words := ",".join(state.value for state in states):
            query["state"] = words
        if words := ",".join(tags):
            query["tagsContain"] = words
        rows: dict[tuple[str, str], JobRow] = {}
        while True:
            answer = self._ask("GET", "/jobs", "list jobs", query={**query, "offset": str(len(rows))})
            page = answer.get("data", []) if isinstance(answer, dict) else answer
            before = len(rows)
            for document in page if isinstance(page, list) else []:
                row = _row(document)
                rows.setdefault((row.user, row.name), row)
            # Jobs submitted meanwhile push others to the next page, where they are seen again.
            if not isinstance(page, list) or len(page) < PAGE_ROWS or len(rows) == before:
                return list(rows.values())

    def job(self, name: str) -> JobDetail:
        """One job. `name` may be `user~job`.

        Raises:
            JobUnknown, LoginRefused, NotAllowed, RequestRefused, ClusterAway
        """
        return _detail(self._ask("GET", self._path(name), f"look at job {name}"))

    def stop(self, name: str) -> None:
        """Ask for the end of a job; no matter if it has ended.

        Raises:
            JobUnknown, NotAllowed, LoginRefused, RequestRefused, ClusterAway
        """
        self._ask("PUT", f"{self._path(name)}/executionType", f"stop job {name}", json_body={"value": "STOP"})

    def tag(self, name: str, tag: str) -> None:
        """Give a job a tag, which holds no comma; no matter if it has it.

        Raises:
            JobUnknown, NotAllowed, LoginRefused, RequestRefused, ClusterAway
        """
        self._ask("PUT", f"{self._path(name)}/tag", f"tag job {name}", json_body={"value": tag})

    def config(self, name: str) -> str:
        """The job as YAML, its secrets masked.

        Raises:
            JobUnknown, LoginRefused, NotAllowed, RequestRefused, ClusterAway
        """
        text = self._send("GET", f"{self._api}{self._path(name)}/config", f"read job {name}").text
        try:
            document = json.loads(text)
        except ValueError:
            return text
        return document if isinstance(document, str) else dumped(document)

    def log_tails(self, name: str, attempt: int, role: str, index: int, task_attempt: int) -> dict[str, str]:
        """As `log_locations`, of no more than the last 16 kB of each log."""
        return self.log_locations(name, attempt, role, index, task_attempt, {"tail-mode": "true"})

    def log_locations(
        self,
        name: str,
        attempt: int,
        role: str,
        index: int,
        task_attempt: int,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Where each log of a task is, by its name (stdout, stderr, all, stdout.1, …). The addresses hold for two minutes.

        Raises:
            JobUnknown: there is no such log, or not yet.
            LoginRefused, NotAllowed, RequestRefused, ClusterAway
        """
        path = (
            f"{self._path(name)}/attempts/{attempt}/taskRoles/{quote(role, safe='')}/taskIndex/{index}"
            f"/attempts/{task_attempt}/logs"
        )
        answer = self._ask("GET", path, f"find the logs of {role}-{index} of job {name}", query=query)
        locations = answer.get("locations", []) if isinstance(answer, dict) else []
        return {str(each["name"]): str(each["uri"]) for each in locations if "name" in each and "uri" in each}

    def log(self, location: str, since: int = 0) -> bytes:
        """The bytes of a log from `since` on; none when there are no more. `location` is one of `log_locations`.

        Raises:
            JobUnknown: the log is gone.
            LoginRefused, NotAllowed, RequestRefused, ClusterAway
        """
        is_own = location.startswith(("/", f"{self.address}/"))
        url = f"{self.address}{location}" if location.startswith("/") else location
        answer = self._send("GET", url, "read the log", since=since, with_token=is_own)
        if answer.status_code == requests.codes.partial or since == 0:
            return (
                answer.content
                if answer.status_code != requests.codes.requested_range_not_satisfiable
                else b""
            )
        return b"" if answer.status_code != requests.codes.ok else answer.content[since:]

    # ---- the cluster

    def info(self) -> dict[str, Any]:
        """Name and version of the REST server; needs no account.

        Raises:
            ClusterAway, RequestRefused
        """
        answer = self._ask("GET", "/info", "ask for its version", with_token=False)
        return answer if isinstance(answer, dict) else {}

    def user_of_token(self) -> str | None:
        """Whose token this is; None where this OpenPAI does not tell.

        Raises:
            LoginRefused, NotAllowed, ClusterAway
        """
        try:
            answer = self._ask("GET", "/tokens/check", "check the token")
        except RequestRefused:  # older ones have no such page
            return None
        name = answer.get("username") if isinstance(answer, dict) else None
        return name if isinstance(name, str) else None

    def storages(self) -> list[str]:
        """The names of the storages that this user may mount.

        Raises:
            LoginRefused, NotAllowed, RequestRefused, ClusterAway
        """
        answer = self._ask("GET", "/storages", "list storages")
        found = answer.get("storages", []) if isinstance(answer, dict) else []
        return [str(each["name"]) for each in found if "name" in each]

    def virtual_clusters(self) -> list[str]:
        """The names of the virtual clusters there are.

        Raises:
            LoginRefused, NotAllowed, RequestRefused, ClusterAway
        """
        answer = self._ask("GET", "/virtual-clusters", "list virtual clusters")
        return [str(name) for name in answer] if isinstance(answer, dict) else []

    # ---- calls

    def _path(self, name: str) -> str:
        whole = name if "~" in name else f"{self.user}~{name}"
        return f"/jobs/{quote(whole, safe='~')}"

    def _ask(self, verb: str, path: str, what: str, **options: Any) -> Any:
        answer = self._send(verb, self._api + path, what, **options)
        if not answer.content:
            return None
        try:
            return answer.json()
        except requests.JSONDecodeError as error:
            raise RequestRefused(
                f"cannot {what}: {self.address} answers with something that is not OpenPAI's; correct paiConfig.host"
            ) from error

    def _send(
        self,
        verb: str,
        url: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        data: bytes | None = None,
        content_type: str = "application/json",
        json_body: Mapping[str, Any] | None = None,
        since: int = 0,
        with_token: bool = True,
    ) -> requests.Response:
        """The answer, when it is a good one. Tries again when that can help.

        Raises:
            ClusterAway, LoginRefused: it may be good later.
            UserMistake: it will not.
        """
        headers = {} if data is None else {"Content-Type": content_type}
        if since:
            headers["Range"] = f"bytes={since}-"
        has_new_token = False
        may_be_done = False
        failures, problem = 0, ""
        while failures < self._patience.tries:
            token = self._valid_token() if with_token else None
            asked_s: float | None = None
            try:
                answer = self._session().request(
                    verb,
                    url,
                    params=query,
                    data=data,
                    json=json_body,
                    headers=headers,
                    auth=None if token is None else _Bearer(token),
                    timeout=(self._patience.connect_within_s, self._patience.answer_within_s),
                    allow_redirects=False,
                )
            except requests.RequestException as error:
                problem, may_be_done = _why_no_answer(error), True
            else:
                status = answer.status_code
                if status < 300 or (since and status == requests.codes.requested_range_not_satisfiable):
                    return answer
                is_expired = status == requests.codes.unauthorized and token is not None
                if is_expired and not has_new_token and self._replace(token):
                    has_new_token = True
                    continue
                problem = f"it answers {status}: {self._words(answer)}"
                if status != requests.codes.too_many_requests and status < 500:
                    raise self._refusal(what, answer, may_be_done)
                may_be_done = may_be_done or status >= 500
                asked_s = _retry_after_s(answer)
            failures += 1
            if failures < self._patience.tries:
                logger.info("cannot %s for now: %s", what, problem)
                if self._closed.wait(self._patience.delay_s(failures, asked_s)):
                    break
        raise ClusterAway(
            f"cannot {what}: OpenPAI at {self.address} is out of reach, {problem}; see that it runs, and its host is right"
        )

    def _refusal(self, what: str, answer: requests.Response, may_be_ours: bool) -> Exception:
        status, code, words = answer.status_code, _code(answer), self._words(answer)
        said = f"cannot {what}: OpenPAI says {words}"
        match status:
            case 301 | 302 | 303 | 307 | 308:
                to = urlsplit(answer.headers.get("Location", ""))
                where = f"{to.scheme}://{to.netloc}" if to.netloc else "another address"
                return RequestRefused(
                    f"cannot {what}: {self.address} sends everybody to {where}; write that as host"
                )
            case 401:
                way_out = (
                    "correct paiConfig.passWord"
                    if self._password
                    else "get a new token on your profile page there (one for applications does not expire), and write it into "
                    "the experiment file"
                )
                return LoginRefused(f"{said}; {way_out}")
            case 403:
                return NotAllowed(
                    f"{said}; ask an administrator of the cluster, or use another account or virtual cluster"
                )
            case 404 if code in ("NoJobError", "NoJobConfigError", "NoTaskLogError", "NoTaskError"):
                return JobUnknown(f"{said}; `nnictl openpai jobs` shows those there are")
            case 404 if code == "NoStorageError":
                return JobRefused(f"{said}; correct paiStorageConfigName")
            case 404 if code == "NoVirtualClusterError":
                return JobRefused(f"{said}; correct virtualCluster")
            case 404 if code in ("", "NoApiError"):
                # The gateway's own page, which says nothing about a job.
                return RequestRefused(
                    f"cannot {what}: there is no such page at {self.address}; see that OpenPAI is there, and runs"
                )
            case 409:
                return _AlreadyThere(f"{said}; choose another name", may_be_ours)
            case 400 | 413:
                return JobRefused(f"{said}; mend what it names")
        return RequestRefused(f"cannot {what}: OpenPAI answers {status}: {words}; see to the request")

    def _words(self, answer: requests.Response) -> str:
        words = _words(answer)
        for secret in (self._token, self._password):
            words = words.replace(secret, "******") if secret else words
        return words

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._sessions, "session", None)
        if session is None:
            session = self._sessions.session = requests.Session()
            session.trust_env = self._may_use_proxy
            if self._is_own:
                keep_to_own(session)
        return session

    # ---- logging in

    def _valid_token(self) -> str:
        with self._login:
            if self._token is None:
                self._token = self._new_token()
            return self._token

    def _replace(self, token: str | None) -> bool:
        """Whether there is, or can be got, another token than this one, which has expired."""
        with self._login:
            if self._token == token:  # and no other thread has got a new one
                newer = None if self._password else self._newer_token()
                if newer == token or (newer is None and self._password is None):
                    return False
                self._token = newer
            return True

    def _new_token(self) -> str:
        if self._password is None:
            raise LoginRefused(
                f"cannot log in to OpenPAI at {self.address}: there is neither token nor password; give one of them"
            )
        body = {"username": self.user, "password": self._password}
        try:
            answer = self._ask(
                "POST", "/authn/basic/login", f"log in as {self.user}", json_body=body, with_token=False
            )
        except (JobRefused, NotAllowed) as error:  # 400: no such user, wrong password
            raise LoginRefused(f"{str(error).rpartition(';')[0]}; correct userName and passWord") from error
        token = answer.get("token") if isinstance(answer, dict) else None
        if not isinstance(token, str):
            raise LoginRefused(
                f"cannot log in as {self.user}: OpenPAI gave no token; use one of your profile page there"
            )
        return token


class _AlreadyThere(UserMistake):
    """A job of that name exists. `may_be_ours`: an earlier try of the same call may have made it."""

    def __init__(self, message: str, may_be_ours: bool) -> None:
        super().__init__(message)
        self.may_be_ours = may_be_ours


# ---- reading answers


def _row(document: Any) -> JobRow:
    values = document if isinstance(document, dict) else {}
    return JobRow(
        str(values.get("name", "")),
        str(values.get("username", "")),
        JobState.of(values.get("state")),
        str(values.get("executionType", "")),
        values,
    )


def _detail(document: Any) -> JobDetail:
    values = document if isinstance(document, dict) else {}
    status = values.get("jobStatus") or {}
    messages = status.get("appExitMessages") or {}
    runtime = messages.get("runtime") if isinstance(messages, dict) else None
    origin = runtime.get("originUserExitCode") if isinstance(runtime, dict) else None
    role, index = status.get("appExitTriggerTaskRoleName"), status.get("appExitTriggerTaskIndex")
    return JobDetail(
        name=str(values.get("name", "")),
        user=str(status.get("username", "")),
        state=JobState.of(status.get("state")),
        attempt=int(status.get("attemptId") or 0),
        exit_code=origin if isinstance(origin, int) else status.get("appExitCode"),
        reason=_reason(status),
        trigger=(role, index) if isinstance(role, str) and isinstance(index, int) else None,
        document=values,
    )


def _reason(status: Mapping[str, Any]) -> str:
    """Why a job ended, in OpenPAI's words on one line."""
    spec = status.get("appExitSpec") or {}
    code = status.get("appExitCode")
    words = [
        str(spec.get("phrase", "")),
        "" if code is None else f"code {code}",
        str(status.get("appExitTriggerMessage") or ""),
    ]
    return ", ".join(word for word in words if word)


def _words(answer: requests.Response) -> str:
    """What an answer says, on one line; the pages that gateways and limits answer with are cut short."""
    try:
        document = answer.json()
    except requests.JSONDecodeError:
        text = re.sub(r"<[^>]*>", " ", answer.text)
    else:
        text = str(document.get("message", "")) if isinstance(document, dict) else ""
        text = _of_violations(text)
    text = _BLANKS.sub(" ", text).strip().rstrip(".") or str(answer.reason)
    return text if len(text) <= _LONGEST_WORDS else f"{text[: _LONGEST_WORDS - 1]}…"


def _of_violations(text: str) -> str:
    """The messages of a list of schema errors, as OpenPAI gives them for a job that is wrong; any other text as it is."""
    try:
        errors = json.loads(text)
    except ValueError:
        return text
    if not isinstance(errors, list) or not all(isinstance(each, dict) for each in errors):
        return text
    return ", ".join(f"{each.get('dataPath', '')} {each.get('message', '')}".strip() for each in errors)


def _code(answer: requests.Response) -> str:
    try:
        document = answer.json()
    except requests.JSONDecodeError:
        return ""
    return str(document.get("code", "")) if isinstance(document, dict) else ""


def _why_no_answer(error: requests.RequestException) -> str:
    # The library's own words name the whole address, which may hold a token.
    if (stranger := stranger_in(error)) is not None:
        return str(stranger)
    match error:
        case requests.exceptions.SSLError():
            return "its certificate is not trusted on this machine (REQUESTS_CA_BUNDLE names others to trust)"
        case requests.ConnectTimeout():
            return "nobody answers there"
        case requests.Timeout():
            return "it takes too long to answer"
        case requests.exceptions.ProxyError():
            return "the proxy of this machine does not let us through"
    return "nobody listens there, or the connection broke"


def _retry_after_s(answer: requests.Response) -> float | None:
    text = answer.headers.get("Retry-After", "")
    if text.isdecimal():
        return float(text)
    try:
        # Its own clock says how far away that is; ours may be wrong.
        asked_at = parsedate_to_datetime(answer.headers.get("Date", ""))
        return max((parsedate_to_datetime(text) - asked_at).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None
