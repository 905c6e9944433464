"""Client of OpenPAI's REST API, version 2: submits jobs, reads their states, logs and descriptions.

Blocking and thread-safe. Calls are retried with exponential backoff while the cluster is unreachable, overloaded or
restarting. Other failures raise an error of ours that ends with a remedy. No message, log or repr contains a token or password.

Source: microsoft/pai v1.8.1, src/rest-server (routes, error codes, limits) and docs of its REST API.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

import requests
from requests.auth import AuthBase

from nni_manager.errors import RetryableError, UserError
from nni_manager.loopback_auth import untrusted_listener_in, verify_connections
from nni_manager.training_services.errors import QuotaExceeded, Unauthenticated
from nni_manager.training_services.openpai.export import dumped
from nni_manager.training_services.openpai.states import PaiJobState
from nni_manager.training_services.retry_policy import ClientRetryPolicy

logger = logging.getLogger(__name__)

# Source: the default limit of OpenPAI's job list. It also accepts explicit limits up to 50000.
PAGE_ROWS = 5000
# The REST server itself listens on this port, without the gateway's path prefix.
_REST_SERVER_PORT = 9186
_MAX_WORDS = 300
_BLANKS = re.compile(r"\s+")
# The lookarounds exclude account and virtual cluster names that contain "quota".
_EXCEEDS_QUOTA = re.compile(
    r"(exceed|used up|full|reach|insufficient|not enough).*(?<![\w-])quota(?![\w-])|"
    r"(?<![\w-])quota(?![\w-]).*(exceed|used up|full|reach|insufficient|not enough)",
    re.IGNORECASE,
)
# The server has not handled the request, or not completely. The same applies to every 5xx.
_RETRYABLE = (requests.codes.request_timeout, requests.codes.too_many_requests)
_LOG_CHUNK_BYTES = 4096
# A log server without tail-mode sends the whole log.
_MAX_LOG_BYTES = 2**20


class ClusterUnavailable(RetryableError):
    """cannot reach OpenPAI now; see that its host is right and its services run"""


class LoginRejected(Unauthenticated):
    """cannot log in to OpenPAI; write a token that is valid into the experiment file"""


class NotAllowed(UserError):
    """cannot do this on OpenPAI with this account; ask an administrator of the cluster"""


class JobRefused(UserError):
    """cannot run this job on OpenPAI; fix what its answer names"""


class JobAlreadyExists(UserError):
    """cannot submit the job: there is one of that name already; choose another name"""


class JobNotOnCluster(UserError):
    """cannot find the job on OpenPAI; `nnictl openpai jobs` shows those there are"""


class RequestRejected(UserError):
    """cannot do this on OpenPAI; see its answer"""


@dataclass(frozen=True, slots=True)
class JobListEntry:
    """One row of a job list. `document` is OpenPAI's own. Times are in milliseconds since the epoch."""

    name: str
    user: str
    state: PaiJobState
    execution_type: str
    document: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The details of one job. `document` is OpenPAI's own.

    `exit_code` is that of the task's command if the runtime reports it, else OpenPAI's.
    """

    name: str
    user: str
    state: PaiJobState
    attempt: int
    exit_code: int | None
    reason: str
    trigger: tuple[str, int] | None
    document: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The total resources of a node. None: not reported by OpenPAI."""

    gpu: int | None
    cpu: int | None
    memory_mb: int | None


class _Bearer(AuthBase):
    """Bearer authentication. Passed as `auth`, so that requests does not replace it from the user's .netrc."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def address_of(host: str) -> str:
    """Returns the scheme and host of `paiConfig.host`; the default scheme is http, as in NNI. A path is dropped.

    Raises:
        UserError: `host` is not a valid host.
    """
    scheme, separator, rest = host.strip().rpartition("://")
    scheme = scheme.lower() if separator else "http"
    parts = urlsplit(f"{scheme}://{rest}")
    try:
        has_port = parts.port is not None
    except ValueError:
        has_port, parts = False, urlsplit("")
    if scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise UserError(
            f"cannot use {host!r} as the host of OpenPAI: it is no address; write e.g. openpai.example.com or "
            "https://openpai.example.com"
        )
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{scheme}://{name}:{parts.port}" if has_port else f"{scheme}://{name}"


class OpenPai:
    """Client of one cluster for one user."""

    def __init__(
        self,
        host: str,
        user: str,
        *,
        token: str | None = None,
        password: str | None = None,
        newer_token: Callable[[], str | None] = lambda: None,
        retry_policy: ClientRetryPolicy | None = None,
        is_own: bool = False,
    ) -> None:
        """`host` is given with or without scheme. With a password, a token is fetched when needed.

        `newer_token` is called when a token has expired; it may return a replacement. It may be called from any thread.

        `is_own`: the server belongs to this user on this machine; connections to a listener of another uid are refused.

        Raises:
            UserError: `host` is not a valid host.
            LoginRejected: `token` contains characters that no token has.
        """
        if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
            raise LoginRejected(
                "cannot use this token: it holds blanks or letters that no token has; copy it again from your profile page"
            )
        self.address = address_of(host)
        self.user = user
        self._token = token
        self._password = password
        self._newer_token = newer_token
        self._is_own = is_own
        self._retry_policy = retry_policy or ClientRetryPolicy()
        self._login = threading.Lock()
        self._closed = threading.Event()
        self._sessions = threading.local()
        parts = urlsplit(self.address)
        prefix = "" if parts.port == _REST_SERVER_PORT else "/rest-server"
        self._api = f"{self.address}{prefix}/api/v2"
        # A proxy from the environment cannot reach this machine's loopback.
        self._may_use_proxy = parts.hostname not in ("localhost", "127.0.0.1", "::1")

    def __repr__(self) -> str:
        return f"OpenPai({self.address!r}, {self.user!r})"

    def close(self) -> None:
        """Make calls that wait for a retry fail now."""
        self._closed.set()

    def within(self, retry_policy: ClientRetryPolicy) -> OpenPai:
        """Returns a client of the same cluster and login with another retry policy."""
        other = copy.copy(self)
        other._retry_policy = retry_policy
        return other

    # ---- jobs

    def submit(self, text: str) -> None:
        """Submit a job as YAML. On return OpenPAI has stored it; its lists show the job some seconds later.

        Raises:
            JobAlreadyExists, JobRefused, NotAllowed: permanent; submitting again does not help.
            RequestRejected: the answer is not OpenPAI's answer to a job, e.g. a gateway's error page.
            QuotaExceeded, LoginRejected, ClusterUnavailable: a later submit may succeed.
        """
        try:
            self._ask("POST", "/jobs", "submit the job", data=text.encode(), content_type="text/yaml")
        except _AlreadyThere as error:
            # An earlier try whose answer was lost has succeeded: no other process uses this name.
            if not error.may_be_ours:
                raise JobAlreadyExists(str(error)) from error

    def jobs(
        self,
        *,
        keyword: str = "",
        states: Iterable[PaiJobState] = (),
        tags: Iterable[str] = (),
        user: str | None = "",
    ) -> list[JobListEntry]:
        """Returns the jobs whose name contains `keyword`, newest first.

        `states` and `tags`: a job must have one of them; empty means any. `user`: the owner; empty means this client's user, None
        means all users.

        Raises:
            LoginRejected, NotAllowed, RequestRejected, ClusterUnavailable
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
        rows: dict[tuple[str, str], JobListEntry] = {}
        while True:
            answer = self._ask("GET", "/jobs", "list jobs", query={**query, "offset": str(len(rows))})
            page = answer.get("data", []) if isinstance(answer, dict) else answer
            before = len(rows)
            for document in page if isinstance(page, list) else []:
                row = _row(document)
                rows.setdefault((row.user, row.name), row)
            # Jobs submitted during the listing shift others to the next page, so rows may repeat.
            if not isinstance(page, list) or len(page) < PAGE_ROWS or len(rows) == before:
                return list(rows.values())

    def job(self, name: str) -> JobStatus:
        """Returns one job. `name` may be `user~job`.

        Raises:
            JobNotOnCluster, LoginRejected, NotAllowed, RequestRejected, ClusterUnavailable
        """
        return _detail(self._ask("GET", self._path(name), f"look at job {name}"))

    def stop(self, name: str) -> None:
        """Request the end of a job. A terminal job is left as it is.

        Raises:
            JobNotOnCluster, NotAllowed, LoginRejected, RequestRejected, ClusterUnavailable
        """
        self._ask("PUT", f"{self._path(name)}/executionType", f"stop job {name}", json_body={"value": "STOP"})

    def tag(self, name: str, tag: str) -> None:
        """Add a tag to a job; idempotent. A tag must not contain a comma.

        Raises:
            JobNotOnCluster, NotAllowed, LoginRejected, RequestRejected, ClusterUnavailable
        """
        self._ask("PUT", f"{self._path(name)}/tag", f"tag job {name}", json_body={"value": tag})

    def config(self, name: str) -> str:
        """Returns the job as YAML with masked secrets.

        Raises:
            JobNotOnCluster, LoginRejected, NotAllowed, RequestRejected, ClusterUnavailable
        """
        text = self._send("GET", f"{self._api}{self._path(name)}/config", f"read job {name}").text
        try:
            document = json.loads(text)
        except ValueError:
            return text
        return document if isinstance(document, str) else dumped(document)

    def log_tails(self, name: str, attempt: int, role: str, index: int, task_attempt: int) -> dict[str, str]:
        """Like `log_locations`, limited to the last 16 kB of each log."""
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
        """Returns the address of each log of a task, by log name (stdout, stderr, all, stdout.1, …).

        Addresses expire after two minutes.

        Raises:
            JobNotOnCluster: the log does not exist, or not yet.
            LoginRejected, NotAllowed, RequestRejected, ClusterUnavailable
        """
        path = (
            f"{self._path(name)}/attempts/{attempt}/taskRoles/{quote(role, safe='')}/taskIndex/{index}"
            f"/attempts/{task_attempt}/logs"
        )
        answer = self._ask("GET", path, f"find the logs of {role}-{index} of job {name}", query=query)
        locations = answer.get("locations", []) if isinstance(answer, dict) else []
        return {str(each["name"]): str(each["uri"]) for each in locations if "name" in each and "uri" in each}

    def log(self, location: str, since: int = 0) -> bytes:
        """Returns the bytes of a log from offset `since`; empty at the end. `location` is a value of `log_locations`.

        Raises:
            JobNotOnCluster: the log no longer exists.
            LoginRejected, NotAllowed, RequestRejected, ClusterUnavailable
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

    def log_tail(self, location: str, most_bytes: int, deadline_s: float) -> bytes:
        """Returns at most the last `most_bytes` of what the log's first MiB yields until `deadline_s` (monotonic clock).

        Raises:
            JobNotOnCluster: the log no longer exists.
            LoginRejected, NotAllowed, RequestRejected, ClusterUnavailable
        """
        is_own = location.startswith(("/", f"{self.address}/"))
        url = f"{self.address}{location}" if location.startswith("/") else location
        answer = self._send("GET", url, "read the log", with_token=is_own, stream=True)
        text = bytearray()
        with contextlib.closing(answer):
            try:
                for chunk in answer.iter_content(_LOG_CHUNK_BYTES):
                    text += chunk
                    if len(text) >= _MAX_LOG_BYTES or time.monotonic() >= deadline_s:
                        break
            except requests.RequestException as error:
                raise ClusterUnavailable(
                    f"cannot read the log: {_why_no_answer(error)}; see the job's page"
                ) from error
        return bytes(text[-most_bytes:])

    # ---- the cluster

    def info(self) -> dict[str, Any]:
        """Returns name and version of the REST server; needs no account.

        Raises:
            ClusterUnavailable, RequestRejected
        """
        answer = self._ask("GET", "/info", "ask for its version", with_token=False)
        return answer if isinstance(answer, dict) else {}

    def user_of_token(self) -> str | None:
        """Returns the user that the token belongs to; None if this OpenPAI does not report it.

        Raises:
            LoginRejected, NotAllowed, ClusterUnavailable
        """
        try:
            answer = self._ask("GET", "/tokens/check", "check the token")
        except RequestRejected:  # older releases lack this route
            return None
        name = answer.get("username") if isinstance(answer, dict) else None
        return name if isinstance(name, str) else None

    def storages(self) -> list[str]:
        """Returns the names of the storages that this user may mount.

        Raises:
            LoginRejected, NotAllowed, RequestRejected, ClusterUnavailable
        """
        answer = self._ask("GET", "/storages", "list storages")
        found = answer.get("storages", []) if isinstance(answer, dict) else []
        return [str(each["name"]) for each in found if "name" in each]

    def virtual_clusters(self) -> list[str]:
        """Returns the names of all virtual clusters.

        Raises:
            LoginRejected, NotAllowed, RequestRejected, ClusterUnavailable
        """
        answer = self._ask("GET", "/virtual-clusters", "list virtual clusters")
        return [str(name) for name in answer] if isinstance(answer, dict) else []

    def virtual_clusters_of_user(self) -> list[str] | None:
        """Returns the names of the virtual clusters that this user may submit to.

        None if this OpenPAI does not report them, or for an administrator, who may use all.

        Raises:
            LoginRejected, ClusterUnavailable
        """
        path = f"/users/{quote(self.user, safe='')}"
        try:
            answer = self._ask("GET", path, f"read what {self.user} may use")
        except (JobRefused, NotAllowed, RequestRejected):
            return None  # older releases lack this route, and some restrict it to administrators
        if not isinstance(answer, dict) or answer.get("admin") is True:
            return None
        names = answer.get("virtualCluster")
        return [str(name) for name in names] if isinstance(names, list) else None

    def nodes(self) -> list[NodeResources]:
        """Returns the total resources of each node; empty if this OpenPAI does not report them.

        Raises:
            LoginRejected, ClusterUnavailable
        """
        try:
            answer = self._ask("GET", "/virtual-clusters", "list nodes", query={"nodes": ""})
        except (JobRefused, NotAllowed, RequestRejected):
            return []
        documents = answer.values() if isinstance(answer, dict) else []
        return [_node(document) for document in documents if isinstance(document, dict)]

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
            raise RequestRejected(
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
        stream: bool = False,
    ) -> requests.Response:
        """Returns a successful answer. Retries transient failures.

        Raises:
            ClusterUnavailable, LoginRejected: a later call may succeed.
            UserError: permanent.
        """
        headers = {} if data is None else {"Content-Type": content_type}
        if since:
            headers["Range"] = f"bytes={since}-"
        has_new_token = False
        may_be_done = False
        failures, problem = 0, ""
        while failures < self._retry_policy.tries:
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
                    timeout=(self._retry_policy.connect_within_s, self._retry_policy.answer_within_s),
                    allow_redirects=False,
                    stream=stream,
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
                if status not in _RETRYABLE and status < 500:
                    raise self._refusal(what, answer, may_be_done)
                may_be_done = may_be_done or status >= 500
                asked_s = _retry_after_s(answer)
            failures += 1
            if failures < self._retry_policy.tries:
                logger.info("cannot %s for now: %s", what, problem)
                if self._closed.wait(self._retry_policy.delay_s(failures, asked_s)):
                    break
        raise ClusterUnavailable(
            f"cannot {what}: OpenPAI at {self.address} is out of reach, {problem}; see that it runs, and its host is right"
        )

    def _refusal(self, what: str, answer: requests.Response, may_be_ours: bool) -> Exception:
        status, code, words = answer.status_code, _code(answer), self._words(answer)
        said = f"cannot {what}: OpenPAI says {words}"
        match status:
            case 301 | 302 | 303 | 307 | 308:
                to = urlsplit(answer.headers.get("Location", ""))
                where = f"{to.scheme}://{to.netloc}" if to.netloc else "another address"
                return RequestRejected(
                    f"cannot {what}: {self.address} sends everybody to {where}; write that as host"
                )
            case 401:
                remedy = (
                    "correct paiConfig.passWord"
                    if self._password
                    else "get a new token on your profile page there (one for applications does not expire), and write it into "
                    "the experiment file"
                )
                return LoginRejected(f"{said}; {remedy}")
            case 403 if "quota" in code.lower() or _EXCEEDS_QUOTA.search(words):
                return QuotaExceeded(
                    f"{said}; it is tried again until the quota has room: end other jobs, or ask for more"
                )
            case 403:
                return NotAllowed(
                    f"{said}; ask an administrator of the cluster, or use another account or virtual cluster"
                )
            case 404 if code in ("NoJobError", "NoJobConfigError", "NoTaskLogError", "NoTaskError"):
                return JobNotOnCluster(f"{said}; `nnictl openpai jobs` shows those there are")
            case 404 if code == "NoStorageError":
                return JobRefused(f"{said}; correct paiStorageConfigName")
            case 404 if code == "NoVirtualClusterError":
                return JobRefused(f"{said}; correct virtualCluster")
            case 404 if code in ("", "NoApiError"):
                # The gateway's own 404 page, which is not about a job.
                return RequestRejected(
                    f"cannot {what}: there is no such page at {self.address}; see that OpenPAI is there, and runs"
                )
            case 409:
                return _AlreadyThere(f"{said}; choose another name", may_be_ours)
            case 400 | 413 | 415 | 422:
                return JobRefused(f"{said}; fix what it names")
        return RequestRejected(f"cannot {what}: OpenPAI answers {status}: {words}; see to the request")

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
                verify_connections(session)
        return session

    # ---- logging in

    def _valid_token(self) -> str:
        with self._login:
            if self._token is None:
                self._token = self._new_token()
            return self._token

    def _replace(self, token: str | None) -> bool:
        """True if a token other than the expired `token` is available or can be fetched."""
        with self._login:
            if self._token == token:  # else another thread has replaced it
                newer = None if self._password else self._newer_token()
                if newer == token or (newer is None and self._password is None):
                    return False
                self._token = newer
            return True

    def _new_token(self) -> str:
        if self._password is None:
            raise LoginRejected(
                f"cannot log in to OpenPAI at {self.address}: there is neither token nor password; give one of them"
            )
        body = {"username": self.user, "password": self._password}
        try:
            answer = self._ask(
                "POST", "/authn/basic/login", f"log in as {self.user}", json_body=body, with_token=False
            )
        except (JobRefused, NotAllowed) as error:  # 400: no such user, wrong password
            raise LoginRejected(f"{str(error).rpartition(';')[0]}; correct userName and passWord") from error
        token = answer.get("token") if isinstance(answer, dict) else None
        if not isinstance(token, str):
            raise LoginRejected(
                f"cannot log in as {self.user}: OpenPAI gave no token; use one of your profile page there"
            )
        return token


class _AlreadyThere(UserError):
    """A job of that name exists. `may_be_ours`: an earlier try of the same call may have created it."""

    def __init__(self, message: str, may_be_ours: bool) -> None:
        super().__init__(message)
        self.may_be_ours = may_be_ours


# ---- reading answers


def _row(document: Any) -> JobListEntry:
    values = document if isinstance(document, dict) else {}
    return JobListEntry(
        str(values.get("name", "")),
        str(values.get("username", "")),
        PaiJobState.of(values.get("state")),
        str(values.get("executionType", "")),
        values,
    )


def _node(document: Mapping[str, Any]) -> NodeResources:
    """Source: microsoft/pai v1.8.1, models/v2/virtual-cluster (`gpuTotal`). The local OpenPAI reports `total` instead."""
    total = document.get("total")
    told = total if isinstance(total, dict) else {"gpu": document.get("gpuTotal")}
    gpu, cpu, memory_mb = (told.get(key) for key in ("gpu", "cpu", "memory"))
    return NodeResources(*(each if isinstance(each, int) else None for each in (gpu, cpu, memory_mb)))


def _detail(document: Any) -> JobStatus:
    values = document if isinstance(document, dict) else {}
    status = values.get("jobStatus") or {}
    messages = status.get("appExitMessages") or {}
    runtime = messages.get("runtime") if isinstance(messages, dict) else None
    origin = runtime.get("originUserExitCode") if isinstance(runtime, dict) else None
    role, index = status.get("appExitTriggerTaskRoleName"), status.get("appExitTriggerTaskIndex")
    return JobStatus(
        name=str(values.get("name", "")),
        user=str(status.get("username", "")),
        state=PaiJobState.of(status.get("state")),
        attempt=int(status.get("attemptId") or 0),
        exit_code=origin if isinstance(origin, int) else status.get("appExitCode"),
        reason=_reason(status),
        trigger=(role, index) if isinstance(role, str) and isinstance(index, int) else None,
        document=values,
    )


def _reason(status: Mapping[str, Any]) -> str:
    """Returns why a job ended, in OpenPAI's words on one line."""
    spec = status.get("appExitSpec") or {}
    code = status.get("appExitCode")
    words = [
        str(spec.get("phrase", "")),
        "" if code is None else f"code {code}",
        str(status.get("appExitTriggerMessage") or ""),
    ]
    return ", ".join(word for word in words if word)


def _words(answer: requests.Response) -> str:
    """Returns the message of an answer on one line. Long pages of gateways and rate limiters are truncated."""
    try:
        document = answer.json()
    except requests.JSONDecodeError:
        text = re.sub(r"<[^>]*>", " ", answer.text)
    else:
        text = str(document.get("message", "")) if isinstance(document, dict) else ""
        text = _of_violations(text)
    text = _BLANKS.sub(" ", text).strip().rstrip(".") or str(answer.reason)
    return text if len(text) <= _MAX_WORDS else f"{text[: _MAX_WORDS - 1]}…"


def _of_violations(text: str) -> str:
    """Returns the joined messages if `text` is a JSON list of schema errors (OpenPAI's answer to an invalid job), else `text`."""
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
    # The library's message contains the whole address, which may hold a token.
    if (stranger := untrusted_listener_in(error)) is not None:
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
        # The delay is computed from the server's own clock; ours may be wrong.
        asked_at = parsedate_to_datetime(answer.headers.get("Date", ""))
        return max((parsedate_to_datetime(text) - asked_at).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None
