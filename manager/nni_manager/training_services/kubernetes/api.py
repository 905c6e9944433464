"""The calls to a Kubernetes API server: objects made, read, deleted and watched, as plain documents.

Blocking; may be used from several threads at once. A call that meets a server which is away, overloaded or changes its mind is
made again, ever more seldom; what cannot be helped by that is an error of ours with the way out. A login that has expired is
read anew once, since tools renew it in its file. No token is in any message, log or repr.

Source: Kubernetes API Concepts (verbs, resource versions, watches, bookmarks), and its Status document.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3

from nni_manager.errors import NniManagerError
from nni_manager.training_services.kubernetes.errors import (
    AlreadyThere,
    ClusterAway,
    Conflict,
    Forbidden,
    HistoryGone,
    LoginRefused,
    NotThere,
    Refused,
)
from nni_manager.training_services.kubernetes.login import Login, log_in
from nni_manager.training_services.kubernetes.resources import Resource
from nni_manager.training_services.patience import Patience

logger = logging.getLogger(__name__)

Document = dict[str, Any]
PAGE_OBJECTS = 500
# A watch is begun again this often, so that a connection that is dead without saying so is noticed; less often than NNI asked.
WATCH_S = 120
_ANSWER_AFTER_WATCH_S = 30.0
_LONGEST_WORDS = 500
_OVERLOADED = (429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a watch: ADDED, MODIFIED, DELETED, or BOOKMARK, which says only how far the watch has come."""

    kind: str
    document: Document

    @property
    def version(self) -> str:
        """From where a watch that has seen this goes on."""
        return str(self.document["metadata"]["resourceVersion"])


class Kubernetes:
    """One cluster, as one user."""

    def __init__(self, kubeconfig: Path | None = None, patience: Patience | None = None) -> None:
        """See `log_in` for where the login comes from.

        Raises:
            ClientMissing, LoginInvalid: there is none.
        """
        self._kubeconfig = kubeconfig
        self._patience = patience or Patience()
        self._login = log_in(kubeconfig)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._streams: set[Any] = set()

    @property
    def namespace(self) -> str:
        """That of the login."""
        return self._login.namespace

    @property
    def address(self) -> str:
        """The API server's."""
        return self._login.address

    @property
    def where(self) -> str:
        """What the login was read from, for people."""
        return self._login.where

    # ---- objects

    def version(self) -> str:
        """The server's own."""
        return str(self._ask("GET", "/version", "ask for the version").get("gitVersion", ""))

    def create(self, resource: Resource, namespace: str, document: Mapping[str, Any]) -> Document:
        """The object as it is then.

        Raises:
            AlreadyThere: there is one of that name; perhaps from a try of this call whose answer got lost.
        """
        name = document["metadata"]["name"]
        return self._ask(
            "POST", resource.path(namespace), f"make {_words(resource, namespace, name)}", body=document
        )

    def get(self, resource: Resource, namespace: str, name: str) -> Document:
        """The object.

        Raises:
            NotThere: there is none.
        """
        return self._ask("GET", resource.path(namespace, name), f"read {_words(resource, namespace, name)}")

    def objects(
        self,
        resource: Resource,
        namespace: str,
        selector: str,
        fields: str = "",
        concerns: Callable[[Document], bool] = lambda _: True,
    ) -> tuple[list[Document], str]:
        """All that the selectors of labels and fields choose, and the version from which a watch shows what comes after.

        What does not concern the caller is thrown away page by page.
        """
        found: list[Document] = []
        query = _chosen(selector, fields) | {"limit": str(PAGE_OBJECTS)}
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
        """Delete the object and all that it owns; `waits`: it goes last. `uid`: no other of that name.

        Raises:
            NotThere: there is none.
        """
        options: Document = {"propagationPolicy": "Foreground" if waits else "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        what = f"delete {_words(resource, namespace, name)}"
        try:
            self._ask("DELETE", resource.path(namespace, name), what, body=options)
        except Conflict as error:
            if uid is None or self.get(resource, namespace, name)["metadata"]["uid"] == uid:
                raise
            raise NotThere(
                f"cannot {what}: another has that name now; see what there is with kubectl"
            ) from error

    def watch(
        self, resource: Resource, namespace: str, selector: str, since: str, fields: str = ""
    ) -> Iterator[Event]:
        """What happens from a version on, as it happens. Ends by itself now and then, and when this object is closed.

        It has begun when this returns. Both this and what it returns may raise.

        Raises:
            HistoryGone: that version is too long ago.
            ClusterAway: there is no connection, or it has broken.
        """
        query = _chosen(selector, fields) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(WATCH_S),
        }
        what = f"watch {resource.plural} in namespace {namespace}"
        response = self._send(
            "GET", resource.path(namespace), query, None, WATCH_S + _ANSWER_AFTER_WATCH_S, what
        )
        if response.status != 200:
            with contextlib.closing(response.response):
                content = response.response.read()
            if response.status == 401:
                self._log_in_anew()  # for the next try
            raise _error(response.status, content, what)
        return self._events(response.response, what)

    def _events(self, raw: Any, what: str) -> Iterator[Event]:
        with self._following(raw):
            try:
                for line in _lines(raw):
                    event = json.loads(line)
                    document = event["object"]
                    if event["type"] == "ERROR":
                        raise _error(int(document.get("code") or 500), line, what, document)
                    yield Event(event["type"], document)
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                if not self._is_closed.is_set():
                    raise ClusterAway(
                        f"cannot {what}: the connection to {self.address} has broken; it is made again"
                    ) from error

    # ---- what the cluster has and allows

    def served_versions(self, group: str) -> list[str]:
        """The versions in which a group of resources is served; none where its operator is not installed."""
        try:
            found = self._ask("GET", f"/apis/{group}", f"ask for the versions of {group}")
        except NotThere:
            return []
        return [str(each["version"]) for each in found.get("versions", [])]

    def serves(self, resource: Resource) -> bool:
        """Whether there is this kind of objects."""
        try:
            found = self._ask("GET", resource.root, f"ask what there is of {resource.api_version}")
        except NotThere:
            return False
        return any(each.get("name") == resource.plural for each in found.get("resources", []))

    def spec_fields(self, resource: Resource) -> frozenset[str] | None:
        """What the server knows in the `spec` of such objects, and does not drop; None where it does not say.

        Source: Kubernetes API Concepts, OpenAPI V3.
        """
        try:
            found = self._ask("GET", f"/openapi/v3{resource.root}", f"read the schema of {resource.plural}")
        except (NotThere, Forbidden, Refused):
            return None
        own = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        for schema in ((found.get("components") or {}).get("schemas") or {}).values():
            if own in (schema.get("x-kubernetes-group-version-kind") or ()):
                spec = (schema.get("properties") or {}).get("spec") or {}
                return frozenset(spec["properties"]) if spec.get("properties") else None
        return None

    def has_namespace(self, name: str) -> bool:
        """Whether there is such a namespace.

        Raises:
            Forbidden: this login may not ask.
        """
        try:
            self._ask("GET", f"/api/v1/namespaces/{name}", f"read namespace {name}")
        except NotThere:
            return False
        return True

    def allows(self, verb: str, resource: Resource, namespace: str) -> bool:
        """Whether this login may do that."""
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
        answer = self._ask("POST", path, "ask what this login may do", body=review)
        return bool(answer["status"].get("allowed"))

    def close(self) -> None:
        """End every watch and every wait; whoever is in a call gets an error or an answer."""
        self._is_closed.set()
        with self._lock:
            streams = list(self._streams)
        for raw in streams:
            _cut(raw)
        self._login.client.close()
        self._login.client.rest_client.close()

    # ---- calls

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
            asked_s: float | None = None
            try:
                response = self._send(verb, path, query or {}, body, self._patience.answer_within_s, what)
                content = response.read()
                if 200 <= response.status < 300:
                    return _document(content, what, self.address)
                asked_s = _seconds(response.headers.get("Retry-After"))
                raise _error(response.status, content, what)
            except LoginRefused:
                if has_new_login:
                    raise
                has_new_login = True
                self._log_in_anew()
                continue
            except (ClusterAway, Conflict) as error:
                failures += 1
                if failures >= self._patience.tries:
                    raise
                problem = error
            except (urllib3.exceptions.HTTPError, OSError) as error:
                failures += 1
                problem = self._away(what, error)
                if failures >= self._patience.tries:
                    raise problem from error
            logger.info("%s: asked again", problem)
            if self._is_closed.wait(self._patience.delay_s(failures, asked_s)):
                raise problem

    def _send(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        answer_within_s: float,
        what: str,
    ) -> Any:
        if self._is_closed.is_set():
            raise ClusterAway(f"cannot {what}: nobody asks any more; begin again")
        headers = {"Accept": "application/json", "User-Agent": "trial-keeper"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        client = self._login.client
        request = client.param_serialize(
            *(verb, path, None, list(query.items()), headers, dict(body) if body is not None else None),
            auth_settings=["BearerToken"],
        )
        within = (self._patience.connect_within_s, answer_within_s)
        try:
            return client.call_api(*request, _request_timeout=within)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._away(what, error) from error
        except Exception as error:
            # Its own kinds of errors; imported only where it is there.
            if not type(error).__module__.startswith("kubernetes."):
                raise
            raise self._away(what, error) from error

    def _away(self, what: str, error: Exception) -> ClusterAway:
        return ClusterAway(
            f"cannot {what}: {self.address} does not answer ({_reason(error)}); see that the API server runs and that "
            f"{self.where} has its address"
        )

    def _log_in_anew(self) -> None:
        try:
            newer: Login = log_in(self._kubeconfig)
        except NniManagerError as error:
            raise LoginRefused(str(error)) from error
        with self._lock:
            self._login = newer

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


def _words(resource: Resource, namespace: str, name: str) -> str:
    return f"{resource.kind} {name} in namespace {namespace}"


def _chosen(labels: str, fields: str) -> dict[str, str]:
    selectors = {"labelSelector": labels, "fieldSelector": fields}
    return {name: selector for name, selector in selectors.items() if selector}


def _cut(raw: Any) -> None:
    """Whoever reads there reads the end."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        raw.shutdown()


def _lines(raw: Any) -> Iterator[bytes]:
    rest = b""
    for piece in raw.stream(decode_content=True):
        *lines, rest = (rest + piece).split(b"\n")
        yield from filter(None, lines)


def _document(content: bytes, what: str, address: str) -> Document:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Refused(f"cannot {what}: {address} is no Kubernetes API server; correct your kubeconfig file")
    return found


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdigit() else None


def _error(status: int, content: bytes, what: str, document: Document | None = None) -> NniManagerError:
    """Which of our errors an answer is. Source: Kubernetes API Conventions, HTTP status codes and reasons."""
    if document is None:
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        document = found if isinstance(found, dict) else {}
    reason = document.get("reason", "")
    words = str(document.get("message") or content.decode(errors="replace").strip() or status)[
        :_LONGEST_WORDS
    ]
    match status:
        case 401:
            return LoginRefused(
                f"cannot {what}: Kubernetes does not accept the login; renew it in your kubeconfig file"
            )
        case 403:
            return Forbidden(
                f"cannot {what}: {words}; ask an administrator of the cluster for the right, or use another namespace"
            )
        case 404:
            return NotThere(f"cannot {what}: {words}; see what there is with kubectl")
        case 409 if reason == "AlreadyExists":
            return AlreadyThere(f"cannot {what}: {words}; remove it with kubectl if nobody needs it")
        case 409:
            return Conflict(f"cannot {what}: {words}; it is tried again")
        case 410:
            return HistoryGone(f"cannot {what}: {words}; the objects are listed again")
        case _ if status in _OVERLOADED:
            return ClusterAway(
                f"cannot {what}: Kubernetes answers {status}, {words}; it is asked again, see to its API server if this lasts"
            )
        case _:
            return Refused(f"cannot {what}: Kubernetes answers {status}, {words}; mend what it names")


def _reason(error: BaseException) -> str:
    """What a chain of errors comes down to, e.g. "Connection refused"."""
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
    return text[:_LONGEST_WORDS] or type(error).__name__
