"""A fake Kubernetes API server on a real socket, for the official client and kubectl. It can inject faults.

It stores any kind of object (kube_store), with resource versions, resumable watches, conflicts, selectors,
pages, patches and deletion like a real one. Permissions depend on the token. `KubeCluster` is a whole
cluster: this server, the controllers (kube_controllers), and a node that runs pods as processes of this
machine (kube_kubelet).
"""

import base64
import contextlib
import json
import re
import socket
import ssl
import threading
import time
from collections import Counter, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kube_controllers import Controllers
from kube_kubelet import Kubelet
from kube_patches import merged, operated, strategically_merged
from kube_store import PODS, Refused, Store, chosen

from nni_manager.store.certificate import Certificate

TOKEN, LOW_TOKEN = "token-of-the-owner", "token-of-a-guest"
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/(?!status$|finalize$)))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>[^/]+))?"
)
_PATCHES = {
    "application/merge-patch+json": merged,
    "application/strategic-merge-patch+json": strategically_merged,
    "application/json-patch+json": operated,
}
_MAX_HANG_S = 60
_REVIEWS = ("authorization.k8s.io", "selfsubjectaccessreviews")


class KubeApi:
    """The server.

    `asked` contains the received calls, as (verb, plural). `denied` contains the calls that TOKEN does not permit.
    """

    def __init__(self, folder):
        self.store = Store()
        self._certificate = Certificate.of(Path(folder) / "api-server.pem", {"127.0.0.1"})
        self.asked: list[tuple[str, str]] = []
        self.user_agents: set[str | None] = set()
        self.tokens = {TOKEN}
        self.minor_version = "32"
        self.denied: set[tuple[str, str]] = set()
        self.logs = lambda namespace, name: ""
        self.evicts = lambda namespace, name: None
        self._faults: dict[tuple[str, str], deque] = {}
        self.is_hung = threading.Event()
        self._connections: set[socket.socket] = set()
        self.watch_epoch = 0
        self._is_closed = False
        self.port = 0

    # ---- lifecycle

    def start(self):
        """Listen, for the first time or again."""
        self._server = _Server(("127.0.0.1", self.port), self)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self):
        """Stop listening and close all connections."""
        self._server.shutdown()
        self._server.server_close()
        self.drop_watches()
        self._thread.join()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._is_closed = True
        self.is_hung.set()
        self.stop()

    @property
    def url(self):
        return f"https://127.0.0.1:{self.port}"

    def kubeconfig(self, token=TOKEN, namespace=None):
        """The text of a kubeconfig file with this login."""
        authority = base64.b64encode(self._certificate.certificate_pem.encode()).decode()
        context = {"cluster": "c", "user": "u"} | ({"namespace": namespace} if namespace else {})
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "double",
                "clusters": [
                    {"name": "c", "cluster": {"server": self.url, "certificate-authority-data": authority}}
                ],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "double", "context": context}],
            }
        )

    # ---- methods for tests

    def misbehave(self, how, times=1, *, at=("", ""), retry_after=None):
        """Make the next `times` calls fail as `how` says: with a status, or by "drop", "conflict", "page STATUS" or "hang".

        `at` restricts the fault to calls of this verb and plural. A status may have a reason and a message. A hanging call
        continues when `is_hung` is set.
        """
        self._faults.setdefault(at, deque()).extend([(how, retry_after)] * times)

    def stop_misbehaving(self, at):
        """Answer calls of this verb and plural normally again."""
        self._faults.pop(at, None)

    def drop_watches(self):
        """Close the connections of all watches."""
        with self.store.changed:
            self.watch_epoch += 1
            self.store.changed.notify_all()

    def forget_history(self):
        """End all watches with 410. New watches can only start from the current version."""
        self.store.forget_history()

    def counted(self):
        return Counter(self.asked)

    # ---- responses

    def fault(self, verb, plural):
        for at in ((verb, plural), (verb, ""), ("", plural), ("", "")):
            if self._faults.get(at):
                return self._faults[at].popleft()
        return None

    def may(self, token, verb, plural):
        return token in self.tokens and (verb, plural) not in self.denied and ("*", plural) not in self.denied

    def watch(self, kind, query, epoch):
        """The events of one watch; None means that there is nothing to send at the moment. `epoch`: the watch epoch when the
        request arrived.
        """
        labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
        namespace, since = query["namespace"], query.get("resourceVersion", "")
        ends_at_s = time.monotonic() + float(query.get("timeoutSeconds", 1800))
        with self.store.changed:
            found = [] if since not in ("", "0") else self.store.list(kind, namespace, labels, fields)
            since = int(since) if since not in ("", "0") else self.store.version
            at = self._first_after(since)
        yield from ({"type": "ADDED", "object": each} for each in found)
        while True:
            with self.store.changed:
                oldest = self.store.oldest
                if since < oldest:
                    break
                if epoch != self.watch_epoch:
                    raise ConnectionAbortedError
                if self._is_closed or time.monotonic() > ends_at_s:
                    break
                if at == len(self.store.history):
                    self.store.changed.wait(max(0, min(ends_at_s - time.monotonic(), 1.0)))
                    continue  # check again, because the watch may have been closed
                news = self.store.history[at:]
                at += len(news)
                since = max(since, self.store.version if news else since)
            for entry in news:
                if entry.kind == kind and (event := _seen_by(entry, namespace, labels, fields)):
                    yield event
        # The lock is released before the events are sent: otherwise, a slow reader would block all other calls.
        if since < oldest:
            text = f"too old resource version: {since} ({oldest})"
            yield {"type": "ERROR", "object": Refused(410, "Expired", text).document()}
            return
        if query.get("allowWatchBookmarks") in ("true", "True", "1"):
            meta = {"resourceVersion": str(since)}
            yield {
                "type": "BOOKMARK",
                "object": {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": meta},
            }

    def _first_after(self, version):
        history = self.store.history
        low, high = 0, len(history)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if history[middle].version > version else (middle + 1, high)
        return low

    def list(self, kind, query):
        store, limit = self.store, int(query.get("limit") or 0)
        with store.changed:
            found = store.list(
                kind, query["namespace"], query.get("labelSelector"), query.get("fieldSelector")
            )
            meta = {"resourceVersion": str(store.version)}
        if query.get("continue"):
            version, *last = json.loads(base64.b64decode(query["continue"]))
            if version < store.oldest:
                raise Refused(410, "Expired", "The provided continue parameter is too old")
            meta["resourceVersion"] = str(version)
            found = [each for each in found if _key(each) > last]
        if limit and len(found) > limit:
            last = [int(meta["resourceVersion"]), *_key(found[limit - 1])]
            meta |= {"continue": base64.b64encode(json.dumps(last).encode()).decode()}
            meta["remainingItemCount"] = len(found) - limit
            found = found[:limit]
        return {
            "kind": f"{kind.kind}List",
            "apiVersion": kind.api_version,
            "metadata": meta,
            "items": found,
        }

    def discovery(self, path):
        """The discovery documents of all kinds; None for any other path."""
        kinds = list(self.store.kinds.values())
        groups = sorted({(kind.group, kind.version) for kind in kinds if kind.group})
        if path == "/version":
            return {
                "major": "1",
                "minor": self.minor_version,
                "gitVersion": f"v1.{self.minor_version}.0-double",
                "gitCommit": "",
                "gitTreeState": "clean",
                "buildDate": "2026-01-01T00:00:00Z",
                "goVersion": "",
                "compiler": "",
                "platform": "",
            }
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        if path == "/apis":
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(group, version) for group, version in groups],
            }
        if path.startswith("/openapi/v3/apis/"):
            root = path.removeprefix("/openapi/v3/apis/")
            return {"openapi": "3.0.0", "components": {"schemas": self._schemas(root)}}
        match = re.fullmatch(r"/(?:api/v1|apis/([^/]+)(?:/([^/]+))?)", path)
        if match is None:
            return None
        group, version = match[1] or "", match[2] or ("v1" if not match[1] else "")
        if group and not version:
            return next((_group(*each) for each in groups if each[0] == group), None)
        served = [kind for kind in kinds if (kind.group, kind.version) == (group, version)]
        if not served:
            return None
        resources = [
            {
                "name": kind.plural + suffix,
                "singularName": kind.kind.lower(),
                "kind": kind.kind,
                "namespaced": kind.namespaced,
                "verbs": ["get", "update", "patch"]
                if suffix
                else [
                    *("create", "delete", "deletecollection"),
                    *("get", "list", "patch", "update", "watch"),
                ],
            }
            for kind in served
            for suffix in ("", "/status")[: 1 + kind.has_status]
        ]
        name = f"{group}/{version}" if group else version
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources}

    def _schemas(self, root):
        return {
            kind.kind: schema
            | {
                "x-kubernetes-group-version-kind": [
                    {"group": kind.group, "version": kind.version, "kind": kind.kind}
                ]
            }
            for kind, schema in self.store.schemas.items()
            if kind.api_version == root
        }


def _group(group, version):
    known = {"groupVersion": f"{group}/{version}", "version": version}
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": group,
        "versions": [known],
        "preferredVersion": known,
    }


def _key(found):
    return [found["metadata"].get("namespace", ""), found["metadata"]["name"]]


def _seen_by(entry, namespace, labels, fields):
    if namespace and entry.after["metadata"].get("namespace") != namespace:
        return None
    was = entry.before is not None and chosen(entry.before, labels, fields)
    is_ = entry.type != "DELETED" and chosen(entry.after, labels, fields)
    if not was and not is_:
        return None
    shown = entry.after
    if not is_ and entry.type != "DELETED":
        # The object no longer matches the selectors. Like a real server, send its old content with the version of the change.
        version = {"resourceVersion": entry.after["metadata"]["resourceVersion"]}
        shown = entry.before | {"metadata": entry.before["metadata"] | version}
    return {"type": "DELETED" if not is_ else "MODIFIED" if was else "ADDED", "object": shown}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, address, api):
        self.api = api
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(api._certificate.path)
        super().__init__(address, _Answering)

    def get_request(self):
        connection, address = super().get_request()
        # The TLS handshake runs later, in the thread of the connection, so that a slow client does not block other connections.
        return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request, client_address):
        self.api._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.api._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        """A client that has disconnected is no error."""


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments):
        """Not logged."""

    def do_GET(self):
        self._answer()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _answer(self):
        self.server.api.user_agents.add(self.headers.get("User-Agent"))
        length = int(self.headers.get("Content-Length") or 0)
        self._body = self.rfile.read(length) if length else b""
        parts = urlsplit(self.path)
        self._query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        try:
            self._route(parts.path.rstrip("/"))
        except Refused as refused:
            self._send(refused.status, refused.document())
        except (BrokenPipeError, ConnectionError):
            self.close_connection = True

    def _route(self, path):
        # The scheme is not checked. The official client writes `bearer` for the service account of a pod, and the scheme is
        # case-insensitive (RFC 9110).
        api, token = self.server.api, self.headers.get("Authorization", "").partition(" ")[2]
        # The epoch is read before the login is checked. So a change of logins after this line also closes the watch.
        self._epoch = api.watch_epoch
        match = _PATH.fullmatch(path)
        found = match.groupdict() if match else {}
        plural = found.get("plural") or path
        verb = self._verb(found)
        api.asked.append((verb, plural))
        if (fault := api.fault(verb, plural)) is not None:
            self._fault(*fault)
            return
        if token not in {*api.tokens, LOW_TOKEN}:
            raise Refused(401, "Unauthorized", "Unauthorized")
        if (said := api.discovery(path)) is not None:
            self._send(200, said)
            return
        if path in ("/healthz", "/readyz", "/livez"):
            self._send_text(200, "ok")
            return
        group, version = found.get("group") or "", found.get("version") or ""
        if (group, plural) == _REVIEWS:
            self._review(token)
            return
        kind = api.store.kind(group, version, plural)
        if kind is None:
            # Like a real server, the fake server sends no Status object for an unknown path.
            self._send_text(404, "404 page not found\n")
            return
        if not api.may(token, verb, plural):
            user = "owner" if token in api.tokens else "guest"
            text = f'{kind.full} is forbidden: User "{user}" cannot {verb} resource "{plural}" in API group "{group}"'
            raise Refused(403, "Forbidden", text, group=group, kind=plural)
        self._query["namespace"] = found["namespace"] or ""
        self._serve(verb, kind, found)

    def _verb(self, found):
        has_name = found.get("name") is not None
        match self.command:
            case "GET" if self._query.get("watch") in ("true", "True", "1"):
                return "watch"
            case "GET":
                return "get" if has_name or not found else "list"
            case "DELETE":
                return "delete" if has_name else "deletecollection"
            case command:
                return {"POST": "create", "PUT": "update", "PATCH": "patch"}[command]

    def _serve(self, verb, kind, found):
        api, store = self.server.api, self.server.api.store
        namespace, name, part = self._query["namespace"], found["name"], found["part"] or ""
        if part == "log" and kind is PODS:
            store.get(kind, namespace, name)
            self._send_text(200, api.logs(namespace, name))
        elif part == "binding":
            node = json.loads(self._body)["target"]["name"]
            store.change(kind, namespace, name, lambda it: it["spec"].update(nodeName=node))
            self._send(201, {"kind": "Status", "apiVersion": "v1", "status": "Success"})
        elif part == "eviction" and kind is PODS and verb == "create":
            api.evicts(namespace, name)
            self._send(201, {"kind": "Status", "apiVersion": "v1", "status": "Success"})
        elif part not in ("", "status") or (part == "status" and not kind.has_status):
            self._send_text(404, "404 page not found\n")
        elif verb == "watch":
            self._stream(api.watch(kind, self._query, self._epoch))
        elif verb == "list":
            self._send(200, api.list(kind, self._query))
        elif verb == "get":
            self._send(200, store.get(kind, namespace, name))
        elif verb == "create":
            is_dry_run = self._query.get("dryRun") == "All"
            self._send(201, store.create(kind, namespace, self._document(), is_dry_run=is_dry_run))
        elif verb == "update":
            self._send(200, store.replace(kind, namespace, name, self._document(), part))
        elif verb == "patch":
            self._send(200, self._patched(kind, namespace, name, part))
        elif verb == "delete":
            last, is_gone = store.delete(kind, namespace, name, self._options())
            details = {"name": name, "kind": kind.plural, "uid": last["metadata"]["uid"]}
            done = {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details}
            self._send(200, done if is_gone and kind.is_custom else last)
        else:
            for each in store.list(
                kind, namespace, self._query.get("labelSelector"), self._query.get("fieldSelector")
            ):
                store.delete(
                    kind,
                    each["metadata"].get("namespace", ""),
                    each["metadata"]["name"],
                    self._options(),
                )
            self._send(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _document(self):
        try:
            body = json.loads(self._body)
            assert isinstance(body, dict)
        except (ValueError, AssertionError) as error:
            raise Refused(400, "BadRequest", "the body of the request was no object") from error
        return body

    def _options(self):
        options = json.loads(self._body) if self._body else {}
        for key in ("propagationPolicy", "gracePeriodSeconds"):
            if key in self._query:
                options[key] = int(self._query[key]) if key.startswith("grace") else self._query[key]
        return options

    def _patched(self, kind, namespace, name, part):
        content_type = self.headers.get("Content-Type", "").partition(";")[0]
        apply, change = _PATCHES.get(content_type), json.loads(self._body)
        if apply is None or (kind.is_custom and apply is strategically_merged):
            raise Refused(
                415,
                "UnsupportedMediaType",
                f"the body of the request was in an unknown format: {content_type}",
            )
        if isinstance(change, list) is not (apply is operated):
            raise Refused(422, "Invalid", "the patch is of another shape than its media type says")
        store = self.server.api.store
        with store.changed:
            made = apply(store.get(kind, namespace, name), change)
            return store.replace(kind, namespace, name, made, part)

    def _review(self, token):
        body = self._document()
        asked = body["spec"]["resourceAttributes"]
        allowed = self.server.api.may(token, asked["verb"], asked["resource"])
        self._send(201, body | {"status": {"allowed": allowed}})

    def _fault(self, how, retry_after):
        if isinstance(how, tuple):
            raise Refused(*how)
        if how == "hang":
            self.server.api.is_hung.wait(_MAX_HANG_S)
        if how in ("drop", "hang"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(how, str) and how.startswith("page "):
            status, page = int(how.removeprefix("page ")), b"<html><body>Sign in</body></html>"
            self._send_bytes(status, page, "text/html", {})
            return
        if how == "conflict":
            raise Refused(409, "Conflict", "Operation cannot be fulfilled: the object has been modified")
        words = {401: "Unauthorized", 429: "TooManyRequests", 503: "ServiceUnavailable"}
        refused = Refused(how, words.get(how, "InternalError"), "somewhere something failed")
        self._send(how, refused.document(), {} if retry_after is None else {"Retry-After": str(retry_after)})

    # ---- sending responses

    def _send(self, status, document, headers=()):
        self._send_bytes(status, json.dumps(document).encode(), "application/json", dict(headers))

    def _send_text(self, status, text):
        self._send_bytes(status, text.encode(), "text/plain; charset=utf-8", {})

    def _send_bytes(self, status, content, content_type, headers):
        self.send_response(status)
        for name, value in {
            "Content-Type": content_type,
            "Content-Length": str(len(content)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, events):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in events:
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")
        except ConnectionAbortedError:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)


class KubeCluster:
    """An API server, the controllers of a cluster, and a node. `exports`: the folders of volume sources.

    `runs`: see Kubelet.
    """

    def __init__(self, folder, exports=(), runs=None):
        self.api = KubeApi(folder)
        self.store = self.api.store
        self.controllers = Controllers(self.store)
        self.node = Kubelet(self.store, folder, dict(exports), runs)
        self.api.logs, self.api.evicts = self.node.log, self.node.drain

    def __enter__(self):
        self.api.start()
        self.controllers.start()
        self.node.start()
        return self

    def __exit__(self, *failure):
        self.node.close()
        self.controllers.close()
        self.api.close()
