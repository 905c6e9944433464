"""Calls to a Kubernetes API server: create, read, delete and watch objects as plain documents.

Blocking and thread-safe. Calls are retried with exponential backoff while the server is unreachable or overloaded, or reports
a conflict. Other failures raise an error of ours that ends with a remedy. An expired login is reloaded once, since tools
renew it in its file. No message, log or repr contains a token.

Source: Kubernetes API Concepts (verbs, resource versions, watches, bookmarks), and its Status document.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import urllib3

from nni_manager.errors import NniManagerError, UserError
from nni_manager.training_services.errors import ClusterUnavailable, QuotaExceeded, Unauthenticated
from nni_manager.training_services.kubernetes import errors
from nni_manager.training_services.kubernetes.login import log_in
from nni_manager.training_services.kubernetes.resources import Resource
from nni_manager.training_services.retry_policy import ClientRetryPolicy

logger = logging.getLogger(__name__)

Document = dict[str, Any]
PAGE_OBJECTS = 500
# Restarting a watch this often detects half-open connections. NNI polled even more often.
WATCH_S = 120
_ANSWER_AFTER_WATCH_S = 30.0
_MAX_MESSAGE_CHARS = 500
# The server has not completed the request. The same applies to every 5xx.
_RETRYABLE = (408, 429)
# Source: Kubernetes, the admission plugin ResourceQuota. Its other message, "failed quota", is about a missing field.
_QUOTA_EXCEEDED = "exceeded quota"
# Source: Kubernetes, errors of admission webhooks.
_DENIED_BY_WEBHOOK = "denied the request"


class Kubernetes:
    """Client of one cluster for one user."""

    def __init__(self, kubeconfig: Path | None = None, retry_policy: ClientRetryPolicy | None = None) -> None:
        """See `log_in` for the sources of the login.

        Raises:
            UserError: no usable login.
        """
        self._kubeconfig = kubeconfig
        self._retry_policy = retry_policy or ClientRetryPolicy()
        self.login = log_in(kubeconfig)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._streams: set[Any] = set()

    # ---- objects

    def create(self, resource: Resource, namespace: str, document: Mapping[str, Any]) -> Document:
        """Create an object and return it as stored.

        Raises:
            AlreadyExists: the name is in use, perhaps by an earlier try of this call whose answer was lost.
        """
        name = document["metadata"]["name"]
        return self._ask(
            "POST", resource.path(namespace), f"create {_title_of(resource, namespace, name)}", body=document
        )

    def refusal(self, resource: Resource, namespace: str, document: Mapping[str, Any]) -> str:
        """Returns why the cluster would refuse to create an object, in its own words; empty if it would create it.

        Raises:
            Forbidden: the login may not create such objects.
        """
        what = f"create {resource.plural} in namespace {namespace}"
        response = self._send("POST", resource.path(namespace), {"dryRun": "All"}, document, what)
        if response.status in (400, 403, 422):
            message = str((_parsed(response.read()) or {}).get("message", ""))[:_MAX_MESSAGE_CHARS]
            if f'cannot create resource "{resource.plural}"' not in message:
                return " ".join(message.split())
        if not 200 <= response.status < 300:
            raise _error(response.status, response.read(), what)
        return ""

    def get(self, resource: Resource, namespace: str, name: str) -> Document:
        """Returns the object.

        Raises:
            NotFound: there is none.
        """
        what = f"read {_title_of(resource, namespace, name)}"
        return self._ask_about("GET", resource.path(namespace, name), what)

    def objects(
        self,
        resource: Resource,
        namespace: str,
        selector: str,
        fields: str = "",
        concerns: Callable[[Document], bool] = lambda _: True,
    ) -> tuple[list[Document], str]:
        """Returns all objects that match the label and field selectors, and the resource version to start a watch from.

        Objects for which `concerns` is false are dropped page by page.
        """
        found: list[Document] = []
        query = _selectors(selector, fields) | {"limit": str(PAGE_OBJECTS)}
        what = f"list {resource.plural} in namespace {namespace}"
        while True:
            page = self._ask("GET", resource.path(namespace), what, query=query)
            found += filter(concerns, page["items"])
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return found, str(page["metadata"]["resourceVersion"])

    def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str | None = None, waits: bool = False
    ) -> None:
        """Delete an object and all that it owns; `waits`: its dependents first. `uid`: only the object with this uid.

        Raises:
            NotFound: there is none.
        """
        options: Document = {"propagationPolicy": "Foreground" if waits else "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        what = f"delete {_title_of(resource, namespace, name)}"
        try:
            self._ask_about("DELETE", resource.path(namespace, name), what, body=options)
        except errors.Conflict as error:
            if uid is None or self.get(resource, namespace, name)["metadata"]["uid"] == uid:
                raise
            raise errors.NotFound(
                f"cannot {what}: another object has that name now; list the objects with kubectl"
            ) from error

    def watch(
        self, resource: Resource, namespace: str, selector: str, since: str, fields: str = ""
    ) -> Iterator[tuple[str, Document]]:
        """Yields changes from a resource version on. Ends after `WATCH_S`, and when this object is closed.

        A change is ADDED, MODIFIED or DELETED, with the object; or BOOKMARK, which carries only a resource version.
        The watch is established on return. Both this call and the iterator may raise.

        Raises:
            ResourceExpired: the server no longer has that version.
            ClusterUnavailable: the connection failed or broke.
        """
        query = _selectors(selector, fields) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(WATCH_S),
        }
        what = f"watch {resource.plural} in namespace {namespace}"
        response = self._send("GET", resource.path(namespace), query, None, what, is_watch=True)
        if response.status == 401:
            self._log_in_anew()  # for the next try
        if response.status != 200:
            raise _error(response.status, response.read(), what)
        return self._events(response.response, what)

    def _events(self, raw: Any, what: str) -> Iterator[tuple[str, Document]]:
        with self._following(raw):
            try:
                for line in filter(bytes.strip, raw):
                    event = json.loads(line)
                    document = event["object"]
                    if event["type"] == "ERROR":
                        raise _error(int(document.get("code") or 500), json.dumps(document).encode(), what)
                    yield event["type"], document
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                if not self._is_closed.is_set():
                    raise ClusterUnavailable(
                        f"cannot {what}: the connection to {self.login.address} was lost; the watch is resumed"
                    ) from error

    # ---- capabilities and rights

    def version(self) -> tuple[int, int] | None:
        """Returns the major and the minor version of the server, such as (1, 32); None if it does not tell."""
        try:
            found = self._find("/version", "read the version of the server")
        except errors.Forbidden:
            return None
        # Some providers append to the numbers: `20+`.
        numbers = re.match(r"(\d+)\D*;(\d+)", f"{found.get('major')};{found.get('minor')}")
        return None if numbers is None else (int(numbers[1]), int(numbers[2]))

    def served_versions(self, group: str) -> list[str]:
        """Returns the served versions of an API group; empty if its operator is not installed."""
        found = self._find(f"/apis/{group}", f"list the versions of {group}")
        return [str(each["version"]) for each in found.get("versions", [])]

    def serves(self, resource: Resource) -> bool:
        """True if the server serves this kind of object."""
        found = self._find(resource.root, f"list the resources of {resource.api_version}")
        return any(each.get("name") == resource.plural for each in found.get("resources", []))

    def spec_fields(self, resource: Resource) -> frozenset[str] | None:
        """Returns the `spec` fields that the server keeps for this kind; None if its schema does not list them.

        Source: Kubernetes API Concepts, OpenAPI V3.
        """
        try:
            found = self._find(f"/openapi/v3{resource.root}", f"read the schema of {resource.plural}")
        except UserError:
            return None
        own = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        for schema in ((found.get("components") or {}).get("schemas") or {}).values():
            if own in (schema.get("x-kubernetes-group-version-kind") or ()):
                spec = (schema.get("properties") or {}).get("spec") or {}
                return frozenset(spec["properties"]) if spec.get("properties") else None
        return None

    def allows(self, verb: str, resource: Resource, namespace: str) -> bool:
        """True if this login may use `verb` on the resource."""
        asked = {
            "namespace": namespace,
            "verb": verb,
            "group": resource.group,
            "version": resource.version,
            "resource": resource.plural,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = self._ask("POST", path, "check the rights of this login", body=review)
        return bool(answer["status"].get("allowed"))

    def close(self) -> None:
        """End every watch and every wait. Calls in progress raise or return."""
        self._is_closed.set()
        with self._lock:
            streams = list(self._streams)
        for raw in streams:
            _cut(raw)
        self.login.client.close()
        self.login.client.rest_client.close()

    # ---- calls

    def _find(self, path: str, what: str) -> Document:
        """Returns a document; empty if there is none."""
        try:
            return self._ask("GET", path, what)
        except errors.NotFound:
            return {}

    def _ask_about(self, verb: str, path: str, what: str, body: Mapping[str, Any] | None = None) -> Document:
        """Make a call about an object. `NotFound` is the cluster's word: not that of a gateway, or of a server that starts."""
        try:
            return self._ask(verb, path, what, body=body)
        except errors.NotServed as error:
            raise ClusterUnavailable(str(error)) from error

    def _ask(
        self,
        verb: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Document:
        failures, has_new_login = 0, False
        while True:
            retry_after_s: float | None = None
            try:
                response = self._send(verb, path, query or {}, body, what)
                if 200 <= response.status < 300:
                    return self._document(response.read(), what)
                retry_after_s = _seconds(response.headers.get("Retry-After"))
                raise _error(response.status, response.read(), what)
            except Unauthenticated:
                if has_new_login:
                    raise
                has_new_login = True
                self._log_in_anew()
            except (ClusterUnavailable, errors.Conflict) as error:
                failures += 1
                if failures >= self._retry_policy.tries:
                    raise
                logger.info("%s: retrying", error)
                if self._is_closed.wait(self._retry_policy.delay_s(failures, retry_after_s)):
                    raise

    def _send(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        what: str,
        *,
        is_watch: bool = False,
    ) -> Any:
        """Returns the response, read to its end unless it is an established watch."""
        if self._is_closed.is_set():
            raise ClusterUnavailable(
                f"cannot {what}: the client of this cluster is closed; resume the experiment"
            )
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        client = self.login.client
        request = client.param_serialize(
            *(verb, path, None, list(query.items()), headers, dict(body) if body is not None else None),
            auth_settings=["BearerToken"],
        )
        answer_within_s = WATCH_S + _ANSWER_AFTER_WATCH_S if is_watch else self._retry_policy.answer_within_s
        try:
            response = client.call_api(
                *request, _request_timeout=(self._retry_policy.connect_within_s, answer_within_s)
            )
            if not (is_watch and response.status == 200):
                response.read()
        except Exception as error:
            # The client is an optional extra, so its error types cannot be imported here.
            is_of_client = type(error).__module__.startswith("kubernetes.")
            if not is_of_client and not isinstance(error, (urllib3.exceptions.HTTPError, OSError)):
                raise
            raise ClusterUnavailable(
                f"cannot {what}: {self.login.address} does not answer ({_reason(error)}); check that the API server runs and "
                f"that {self.login.where} has its address"
            ) from error
        return response

    def _document(self, content: bytes, what: str) -> Document:
        if (found := _parsed(content)) is None:
            # Perhaps the login page of a gateway, so the call is retried.
            raise ClusterUnavailable(
                f"cannot {what}: {self.login.address} does not answer as a Kubernetes API server; correct its address in "
                f"{self.login.where}, or log in to the gateway in front of it"
            )
        return found

    def _log_in_anew(self) -> None:
        try:
            newer = log_in(self._kubeconfig)
        except NniManagerError as error:
            raise Unauthenticated(str(error)) from error
        with self._lock:
            self.login = newer

    @contextlib.contextmanager
    def _following(self, raw: Any) -> Iterator[None]:
        with self._lock:
            self._streams.add(raw)
        try:
            if self._is_closed.is_set():
                _cut(raw)
            yield
        finally:
            with self._lock:
                self._streams.discard(raw)
            raw.close()


def _title_of(resource: Resource, namespace: str, name: str) -> str:
    return f"{resource.kind} {name}" + (f" in namespace {namespace}" if resource.is_in_namespace else "")


def _selectors(labels: str, fields: str) -> dict[str, str]:
    selectors = {"labelSelector": labels, "fieldSelector": fields}
    return {name: selector for name, selector in selectors.items() if selector}


def _cut(raw: Any) -> None:
    """Shut the connection down, so that its reader gets EOF."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        raw.shutdown()


def _parsed(content: bytes) -> Document | None:
    """Returns the JSON object; None if it is none."""
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(content), dict):
            return found
    return None


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdigit() else None


def _error(status: int, content: bytes, what: str) -> NniManagerError:
    """Maps an answer to one of our errors. Source: Kubernetes API Conventions, HTTP status codes and reasons."""
    document = _parsed(content) or {}
    message = str(document.get("message") or content.decode(errors="replace").strip() or status)[
        :_MAX_MESSAGE_CHARS
    ]
    match status:
        case 401:
            return Unauthenticated(
                f"cannot {what}: Kubernetes rejects the login; renew the login in your kubeconfig file"
            )
        case 403 if document.get("kind") != "Status":
            return ClusterUnavailable(
                f"cannot {what}: a server in front of Kubernetes answers {status}, {message}; the call is retried; if this "
                "persists, check the server's address, the proxy and the VPN"
            )
        case 403 if _QUOTA_EXCEEDED in message:
            return QuotaExceeded(
                f"cannot {what}: {message}; the call is retried until the quota has room; end other jobs, or request more"
            )
        case 400 | 403 if _DENIED_BY_WEBHOOK in message:
            return errors.RequestInvalid(
                f"cannot {what}: {message}; change what the webhook names, or ask an administrator for an exception"
            )
        case 403:
            return errors.Forbidden(
                f"cannot {what}: {message}; ask an administrator of the cluster for the right, or use another namespace"
            )
        case 404 if document.get("reason") == "NotFound":
            return errors.NotFound(f"cannot {what}: {message}; list the objects with kubectl")
        case 404:
            return errors.NotServed(
                f"cannot {what}: {message}; check the server's address, and list the served kinds with `kubectl api-resources`"
            )
        case 409 if document.get("reason") == "AlreadyExists":
            return errors.AlreadyExists(
                f"cannot {what}: {message}; delete the object with kubectl if it is not needed"
            )
        case 409:
            return errors.Conflict(f"cannot {what}: {message}; the call is retried")
        case 410:
            return errors.ResourceExpired(f"cannot {what}: {message}; the objects are listed again")
        case _ if status in _RETRYABLE or status >= 500:
            return ClusterUnavailable(
                f"cannot {what}: Kubernetes answers {status}, {message}; the call is retried; if this persists, check the server"
            )
        case _:
            return errors.RequestInvalid(
                f"cannot {what}: Kubernetes answers {status}, {message}; fix the fields that the answer names"
            )


def _reason(error: BaseException) -> str:
    """Returns the root cause of a chain of errors, e.g. "Connection refused"."""
    while True:
        inner = getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            inner = error.__cause__
        if inner is None:
            break
        error = inner
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).rpartition(": ")[2].partition("\n")[0]
    return text[:_MAX_MESSAGE_CHARS] or type(error).__name__
