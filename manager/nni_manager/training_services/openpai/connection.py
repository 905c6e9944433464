"""HTTP to OpenPAI's REST API: logins, retries, and an error of ours for each failure. Blocking and thread-safe.

Calls are retried with exponential backoff while the cluster is unreachable, overloaded or restarting. Other failures raise an
error that ends with a remedy. No message, log or repr contains a token or password.

The loop replaces urllib3's `Retry`: a retry may need a new token, `close` must end the delay, and `Retry-After` is
converted by the server's own clock.

Source: microsoft/pai v1.8.1, src/rest-server (routes, error codes, limits) and docs of its REST API.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import field
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from nni_manager.errors import UserError
from nni_manager.support.loopback_auth import untrusted_listener_in, verify_connections
from nni_manager.training_services.errors import ClusterUnavailable, QuotaExceeded, Unauthenticated
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from trial_keeper.frozen_dataclass import dataclass

logger = logging.getLogger(__name__)

# The REST server itself listens on this port, without the gateway's path prefix.
_REST_SERVER_PORT = 9186
_MAX_MESSAGE = 300
# The lookarounds exclude account and virtual cluster names that contain "quota".
_EXCEEDS_QUOTA = re.compile(
    r"(exceed|used up|full|reach|insufficient|not enough).*(?<![\w-])quota(?![\w-])|"
    r"(?<![\w-])quota(?![\w-]).*(exceed|used up|full|reach|insufficient|not enough)",
    re.IGNORECASE,
)
# The server has not completed the request. The same applies to every 5xx.
_RETRYABLE = (requests.codes.request_timeout, requests.codes.too_many_requests)


class JobRefused(UserError):
    """cannot run this job on OpenPAI, or lacks the right to do so; fix what its answer names"""


class JobNotOnCluster(UserError):
    """cannot find the job on OpenPAI; list the jobs with `nnictl openpai jobs`"""


class RequestRejected(UserError):
    """cannot complete the request: OpenPAI rejects it; see its answer"""


class JobAlreadyExists(UserError):
    """cannot submit the job: its name is in use; choose another name"""

    def __init__(self, message: str, may_be_ours: bool) -> None:
        """`may_be_ours`: an earlier try of the same call may have created it."""
        super().__init__(message)
        self.may_be_ours = may_be_ours


# By status and code; None: any code.
_REFUSALS: dict[tuple[int, str | None], tuple[type[UserError], str]] = {
    **dict.fromkeys(
        [(404, code) for code in ("NoJobError", "NoJobConfigError", "NoTaskLogError", "NoTaskError")],
        (JobNotOnCluster, "list the jobs with `nnictl openpai jobs`"),
    ),
    (404, "NoStorageError"): (JobRefused, "correct paiStorageConfigName"),
    (404, "NoVirtualClusterError"): (JobRefused, "correct virtualCluster"),
    **dict.fromkeys(
        [(code, None) for code in (400, 413, 415, 422)], (JobRefused, "fix the fields that the answer names")
    ),
}


def _authorize(token: str, request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Add the token. Passed as `auth`, so that requests does not add a login from the user's .netrc."""
    request.headers["Authorization"] = f"Bearer {token}"
    return request


@dataclass(frozen=True, slots=True)
class PaiLogin:
    """A user's token or password, and the CA certificates to trust.

    `source` follows the remedy in messages about a refused login, such as " (/path/config.yml)": where the login is read.
    """

    token: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    source: str = ""


_INVALID_TOKEN = "cannot use this token: it contains blanks or other invalid characters; copy it again from your profile page"


def _is_token(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


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
            f"cannot use {host!r} as the host of OpenPAI: it is not an address; write e.g. openpai.example.com or "
            "https://openpai.example.com"
        )
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{scheme}://{name}:{parts.port}" if has_port else f"{scheme}://{name}"


class PaiConnection:
    """Calls to one cluster for one user.

    Every call raises ClusterUnavailable or Unauthenticated if a later call may succeed, and JobRefused,
    JobNotOnCluster or RequestRejected if not.
    """

    def __init__(
        self,
        host: str,
        user: str,
        *,
        token: str | None = None,
        password: str | None = None,
        current_login: Callable[[], PaiLogin | None] = lambda: None,
        retry_policy: ClientRetryPolicy | None = None,
        ca_file: Path | None = None,
        is_own: bool = False,
    ) -> None:
        """`host` is given with or without scheme. With a password, a token is fetched when needed. `ca_file` has the CA
        certificates to trust, in PEM format; None: those that this machine trusts.

        `current_login` is called before each login and when a token has expired; its answer replaces token and password. None:
        they are unchanged. It may be called from any thread.

        `is_own`: the server belongs to this user on this machine; connections to a listener of another uid are refused.

        Raises:
            UserError: `host` is not a valid host.
            Unauthenticated: `token` contains characters that no token has.
        """
        if token is not None and not _is_token(token):
            raise Unauthenticated(_INVALID_TOKEN)
        self.address = address_of(host)
        self.user = user
        self.limited_lists = 0
        """The answers to list calls that exceeded the server's limit (429)."""
        self._token = token
        self._password = password
        self._current_login = current_login
        self._login_source = ""
        self._ca_file = None if ca_file is None else str(ca_file)
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
        return f"{type(self).__name__}({self.address!r}, {self.user!r})"

    def close(self) -> None:
        """Make calls that wait for a retry fail now."""
        self._closed.set()

    def _ask(self, verb: str, path: str, what: str, **options: Any) -> Any:
        """Returns the JSON value of the answer; None if it is empty. `what` completes "cannot" in messages."""
        answer = self._send(verb, self._api + path, what, **options)
        if not answer.content:
            return None
        try:
            return answer.json()
        except requests.JSONDecodeError as error:
            raise RequestRejected(
                f"cannot {what}: the answer of {self.address} is not OpenPAI's; correct paiConfig.host"
            ) from error

    def _send(
        self,
        verb: str,
        url: str,
        what: str,
        *,
        with_token: bool = True,
        **options: Any,
    ) -> requests.Response:
        """Returns a successful answer, or a 416 answer to a range request. `options` are those of `requests.request`."""
        has_new_token = may_be_done = False
        failures, problem, limit = 0, "", None
        policy = self._retry_policy
        while failures < policy.tries:
            token = self._valid_token() if with_token else None
            retry_after_s: float | None = None
            try:
                answer = self._session().request(
                    verb,
                    url,
                    auth=None if token is None else partial(_authorize, token),
                    timeout=(policy.connect_within_s, policy.answer_within_s),
                    allow_redirects=False,
                    # Only as an argument of the call it takes precedence over REQUESTS_CA_BUNDLE.
                    verify=self._ca_file,
                    **options,
                )
            except OSError as error:  # requests raises it for a file of certificates that is missing
                problem, may_be_done, limit = why_no_answer(error), True, None
            else:
                status = answer.status_code
                has_range = "Range" in (options.get("headers") or ())
                if status < 300 or (has_range and status == requests.codes.requested_range_not_satisfiable):
                    return answer
                is_expired = status == requests.codes.unauthorized and token is not None
                if is_expired and not has_new_token and self._replace(token):
                    has_new_token = True
                    continue
                code, message = self._error_of(answer)
                problem = f"it answers {status}: {message}"
                if status not in _RETRYABLE and status < 500:
                    raise self._refusal(what, answer, code, message, may_be_done)
                may_be_done = may_be_done or status >= 500
                retry_after_s = _retry_after_s(answer)
                limit = _rate_limit(answer)
                self.limited_lists += limit is not None and (verb, url) == ("GET", f"{self._api}/jobs")
            failures += 1
            if failures < policy.tries:
                logger.info("cannot %s: %s; retrying", what, problem)
                if self._closed.wait(policy.delay_s(failures, retry_after_s)):
                    break
        if limit is not None:
            raise ClusterUnavailable(
                f"cannot {what}: OpenPAI at {self.address} accepts {limit}; {self._rest_of(verb, url)}"
            )
        raise ClusterUnavailable(
            f"cannot {what}: OpenPAI at {self.address} is unreachable: {problem}; check that it runs and that its host is correct"
        )

    def _rest_of(self, verb: str, url: str) -> str:
        """The remedy for a call that exceeds a limit of the server."""
        if (verb, url) == ("POST", f"{self._api}/jobs"):
            return "wait, or set `reuse: true`: one job then runs many trials (a cluster's submitJobPerHour is 60 by default)"
        return "wait, or run fewer experiments at a time"

    def _refusal(
        self, what: str, answer: requests.Response, code: str, message: str, may_be_ours: bool
    ) -> Exception:
        status, refusal = answer.status_code, f"cannot {what}: OpenPAI answers: {message}"
        if (known := _REFUSALS.get((status, code)) or _REFUSALS.get((status, None))) is not None:
            kind, remedy = known
            return kind(f"{refusal}; {remedy}")
        match status:
            case 301 | 302 | 303 | 307 | 308:
                to = urlsplit(answer.headers.get("Location", ""))
                where = f"{to.scheme}://{to.netloc}" if to.netloc else "another address"
                return RequestRejected(
                    f"cannot {what}: {self.address} redirects to {where}; write that as host"
                )
            case 401 if self._password:
                return self._unauthenticated(f"{refusal}; correct paiConfig.passWord")
            case 401 if self._is_own:
                return Unauthenticated(f"{refusal}; run `nnictl openpai start`, which makes a new token")
            case 401:
                remedy = "create a new token on OpenPAI's profile page (application tokens do not expire)"
                return self._unauthenticated(f"{refusal}; {remedy}, and write it into the experiment file")
            case 403 if "quota" in code.lower() or _EXCEEDS_QUOTA.search(message):
                return QuotaExceeded(
                    f"{refusal}; the call is retried until the quota has room; end other jobs, or request more"
                )
            case 403:
                return JobRefused(
                    f"{refusal}; ask an administrator of the cluster, or use another account or virtual cluster"
                )
            case 404 if code in ("", "NoApiError"):
                # The gateway's own 404 page, which is not about a job.
                return RequestRejected(
                    f"cannot {what}: {self.address} has no such page; check that OpenPAI runs there"
                )
            case 409:
                return JobAlreadyExists(f"{refusal}; choose another name", may_be_ours)
        return RequestRejected(f"cannot {what}: OpenPAI answers {status}: {message}; check the request")

    def _error_of(self, answer: requests.Response) -> tuple[str, str]:
        """Returns code and message of an error, the message on one line and without our secrets.

        Long pages of gateways and rate limiters are truncated.
        """
        code, text = "", ""
        try:
            document = answer.json()
        except requests.JSONDecodeError:
            text = re.sub(r"<[^>]*>", " ", answer.text)
        else:
            if isinstance(document, dict):
                code, text = str(document.get("code", "")), _of_violations(str(document.get("message", "")))
        text = " ".join(text.split()).rstrip(".") or str(answer.reason)
        text = text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 1]}…"
        for secret in filter(None, (self._token, self._password)):
            text = text.replace(secret, "******")
        return code, text

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._sessions, "session", None)
        if session is None:
            session = self._sessions.session = requests.Session()
            session.trust_env = self._may_use_proxy
            if not self._may_use_proxy:
                # Of the environment only this counts then, for a tunnel that ends on this machine.
                session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
            if self._is_own:
                verify_connections(session)
        return session

    # ---- logging in

    def _valid_token(self) -> str:
        with self._login:
            if self._token is None:
                self._read_login()
            if self._token is None:
                self._token = self._new_token()
            return self._token

    def _replace(self, token: str | None) -> bool:
        """True if a token other than the expired `token` is available or can be fetched."""
        with self._login:
            if self._token == token:  # else another thread has replaced it
                self._read_login()
                if self._password is not None:
                    self._token = None
            return self._token != token

    def _read_login(self) -> None:
        login = self._current_login()
        if login is None:
            return
        self._login_source = login.source
        if login.token is not None and not _is_token(login.token):
            self._login_source = f" ({_INVALID_TOKEN})"
            return
        self._token, self._password = login.token, login.password
        self._ca_file = None if login.ca_file is None else str(login.ca_file)

    def _unauthenticated(self, message: str) -> Unauthenticated:
        return Unauthenticated(f"{message}{self._login_source}")

    def _new_token(self) -> str:
        if self._password is None:
            raise self._unauthenticated(
                f"cannot log in to OpenPAI at {self.address}: neither token nor password is set; set one of them"
            )
        body = {"username": self.user, "password": self._password}
        try:
            answer = self._ask(
                "POST", "/authn/basic/login", f"log in as {self.user}", json=body, with_token=False
            )
        except JobRefused as error:  # 400: no such user, wrong password
            raise self._unauthenticated(
                f"{str(error).rpartition(';')[0]}; correct userName and passWord"
            ) from error
        except RequestRejected as error:
            if self._has_passwords():
                raise
            raise self._unauthenticated(
                f"cannot log in as {self.user} at {self.address}: this cluster has no passwords (OpenID Connect); "
                "create an application token on its profile page, and write it as token instead of passWord"
            ) from error
        token = answer.get("token") if isinstance(answer, dict) else None
        if not isinstance(token, str):
            raise self._unauthenticated(
                f"cannot log in as {self.user}: OpenPAI's answer has no token; use a token of OpenPAI's profile page"
            )
        return token

    def _has_passwords(self) -> bool:
        """False if users log in at another server. Source: microsoft/pai v1.8.1, routers/authn.js."""
        try:
            answer = self._ask("GET", "/authn/info", "find out how to log in", with_token=False)
        except RequestRejected:  # older releases lack this route
            return True
        return not isinstance(answer, dict) or answer.get("authn_type") != "OIDC"


def _of_violations(text: str) -> str:
    """Returns the joined messages if `text` is a JSON list of schema errors (OpenPAI's answer to an invalid job), else `text`."""
    try:
        errors = json.loads(text)
    except ValueError:
        return text
    if not isinstance(errors, list) or not all(isinstance(each, dict) for each in errors):
        return text
    return ", ".join(f"{each.get('dataPath', '')} {each.get('message', '')}".strip() for each in errors)


def why_no_answer(error: OSError) -> str:
    """Returns the reason of a failed call, without the library's message: its address may contain a token."""
    if (untrusted := untrusted_listener_in(error)) is not None:
        return str(untrusted)
    match error:
        case requests.exceptions.SSLError():
            return "this machine does not trust its certificate (name that of its CA in paiConfig.caFile or REQUESTS_CA_BUNDLE)"
        case requests.ConnectTimeout():
            return "the connection timed out"
        case requests.Timeout():
            return "the answer timed out"
        case requests.exceptions.ProxyError():
            return "this machine's proxy refuses the connection"
        case OSError() if not isinstance(error, requests.RequestException):
            return f"{error} (correct paiConfig.caFile or REQUESTS_CA_BUNDLE)"
    return "the connection was refused or lost"


def _rate_limit(answer: requests.Response) -> str | None:
    """The limit that a call has exceeded. Source: microsoft/pai v1.8.1, src/rest-server/src/config/rate-limit.js."""
    if answer.status_code != requests.codes.too_many_requests:
        return None
    most = answer.headers.get("X-RateLimit-Limit", "")
    return f"only {most} such calls in its period" if most.isdecimal() else "no more such calls at present"


def _retry_after_s(answer: requests.Response) -> float | None:
    text = answer.headers.get("Retry-After", "")
    if text.isdecimal():
        return float(text)
    try:
        # The delay is computed from the server's own clock; ours may be wrong.
        answered_at = parsedate_to_datetime(answer.headers.get("Date", ""))
        return max((parsedate_to_datetime(text) - answered_at).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None
