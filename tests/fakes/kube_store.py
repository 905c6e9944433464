"""The state of a fake Kubernetes API server: objects of all kinds with one counter of resource versions, and their history.

The HTTP server, the controllers and the kubelet use it through the same few calls, each of which is one
transaction. Each call copies the objects that it stores and returns.
"""

import base64
import copy
import json
import re
import threading
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from nni_manager.startup.schema_validators import Draft202012Validator

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
FOREGROUND = "foregroundDeletion"


class Refused(Exception):
    """An error response of the server."""

    def __init__(self, status, reason, message, **details):
        super().__init__(message)
        self.status, self.reason, self.message, self.details = status, reason, message, details

    def document(self):
        answer = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return answer | {
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.status,
        }


@dataclass(frozen=True)
class Kind:
    """A kind of object. `has_status`: the status is a subresource and written only through it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    has_status: bool = True
    is_custom: bool = False

    @property
    def api_version(self):
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full(self):
        return f"{self.plural}.{self.group}" if self.group else self.plural


NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
NODES = Kind("", "v1", "nodes", "Node", namespaced=False)
PODS = Kind("", "v1", "pods", "Pod")
SECRETS = Kind("", "v1", "secrets", "Secret", has_status=False)
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap", has_status=False)
EVENTS = Kind("", "v1", "events", "Event", has_status=False)
ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount", has_status=False)
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
QUOTAS = Kind("", "v1", "resourcequotas", "ResourceQuota")
JOBS = Kind("batch", "v1", "jobs", "Job")
DEFINITIONS = Kind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
BUILT_IN = (
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    CONFIG_MAPS,
    EVENTS,
    ACCOUNTS,
    CLAIMS,
    QUOTAS,
    JOBS,
    DEFINITIONS,
)


@dataclass(frozen=True)
class Entry:
    """One change of an object. `before` is None for a new object. `after` is the object after the change; for a deletion, its
    last version.
    """

    version: int
    kind: Kind
    type: str
    before: dict | None
    after: dict


def now(later_s=0):
    at = datetime.now(timezone.utc) + timedelta(seconds=later_s)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def labels_match(selector, labels):
    """True if the labels match `a=b,c!=d,e,!f` or `a in (b, c)`."""
    for term in filter(None, re.split(r",(?![^(]*\))", selector or "")):
        if found := re.fullmatch(r"\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*", term):
            among = labels.get(found[1]) in {value.strip() for value in found[3].split(",")}
            if among is not (found[2] == "in"):
                return False
            continue
        name, differs, value = re.fullmatch(r"\s*(!?[^=!\s]+)\s*(?:(!?)==?\s*(\S*))?\s*", term).groups()
        if value is None:
            if (name.lstrip("!") in labels) is name.startswith("!"):
                return False
        elif (labels.get(name) == value) is bool(differs):
            return False
    return True


def fields_match(selector, found):
    for term in filter(None, (selector or "").split(",")):
        path, differs, value = re.fullmatch(r"([^=!]+)(!?)==?(.*)", term).groups()
        at = found
        for step in path.split("."):
            at = (at or {}).get(step)
        if ((at or "") == value) is bool(differs):
            return False
    return True


class Store:
    """`changed` is a condition: its lock protects the state, and each change notifies the waiting threads."""

    def __init__(self):
        self.changed = threading.Condition(threading.RLock())
        self.kinds = {(kind.group, kind.plural): kind for kind in BUILT_IN}
        self.schemas = {}
        self.history: list[Entry] = []
        # The first version is above 1, so that a watch from version 1 is always refused as expired.
        self.version = self.oldest = 1000
        self._objects: dict[Kind, dict[tuple[str, str], dict]] = {kind: {} for kind in BUILT_IN}
        self.webhooks: list = []
        """Mutating admission webhooks: each is called with the kind and the document of a new object, which it may change."""
        self._owned: dict[str, set] = {}
        self._known: dict[str, tuple] = {}
        self.create(NAMESPACES, "", {"metadata": {"name": "default"}})
        self.create(ACCOUNTS, "default", {"metadata": {"name": "default"}})

    # ---- reading

    def kind(self, group, version, plural):
        """The kind that is served under this name; None if there is none."""
        found = self.kinds.get((group, plural))
        return found if found is not None and found.version == version else None

    def get(self, kind, namespace, name):
        with self.changed:
            return copy.deepcopy(self._get(kind, namespace, name))

    def find(self, kind, namespace, name):
        with self.changed:
            found = self._objects.get(kind, {}).get((namespace, name))
            return copy.deepcopy(found)

    def list(self, kind, namespace="", labels="", fields=""):
        """All objects, sorted by name; of all namespaces if `namespace` is empty."""
        with self.changed:
            return [
                copy.deepcopy(found)
                for (inside, _), found in sorted(self._objects.get(kind, {}).items())
                if namespace in ("", inside) and chosen(found, labels, fields)
            ]

    def count(self, kind, is_one=lambda found: True):
        """The number of objects, without copies; `is_one` must not change them."""
        with self.changed:
            return sum(map(is_one, self._objects.get(kind, {}).values()))

    def chosen(self, kind, is_one):
        """Objects of all namespaces for which `is_one` is true, sorted by name; the others are not copied."""
        with self.changed:
            found = sorted(self._objects.get(kind, {}).items())
            return [copy.deepcopy(each) for _, each in found if is_one(each)]

    def dependents(self, uid):
        """The kinds, namespaces and names of the objects that the object with this uid owns."""
        with self.changed:
            return sorted(self._owned.get(uid, ()), key=str)

    def exists(self, uid):
        with self.changed:
            return uid in self._known

    def by_uid(self, uid):
        with self.changed:
            kind, namespace, name = self._known[uid]
            return kind, copy.deepcopy(self._objects[kind][namespace, name])

    # ---- writing

    def create(self, kind, namespace, body, is_dry_run=False):
        with self.changed:
            new = copy.deepcopy(body)
            for webhook in self.webhooks:
                webhook(kind, new)
            new.setdefault("apiVersion", kind.api_version)
            new.setdefault("kind", kind.kind)
            meta = new.setdefault("metadata", {})
            if not meta.get("name") and meta.get("generateName"):
                meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
            name = meta.get("name", "")
            self._check(kind, namespace, name, new)
            if (namespace, name) in self._objects[kind]:
                raise Refused(
                    *(409, "AlreadyExists", f'{kind.full} "{name}" already exists'),
                    name=name,
                    kind=kind.plural,
                )
            for key in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"):
                meta.pop(key, None)
            meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            if kind.namespaced:
                meta["namespace"] = namespace
            if kind.is_custom or kind is JOBS:
                meta["generation"] = 1
            if kind.has_status:
                new.pop("status", None)
            _fill_in(kind, new)
            if kind is DEFINITIONS and not is_dry_run:
                self._serve(new)
            elif kind is PODS:
                self._check_quota(namespace, name)
            if is_dry_run:
                return new
            return self._write(kind, "ADDED", None, new)

    def replace(self, kind, namespace, name, body, part=""):
        """Replace an object. If `part` is "status", only the status is replaced."""
        with self.changed:
            before = self._get(kind, namespace, name)
            given = body.get("metadata", {}).get("resourceVersion")
            if given not in (None, "", before["metadata"]["resourceVersion"]):
                raise Refused(
                    *(
                        409,
                        "Conflict",
                        f'Operation cannot be fulfilled on {kind.full} "{name}": it has been modified',
                    ),
                    name=name,
                    kind=kind.plural,
                )
            after = copy.deepcopy(before)
            if part == "status":
                after["status"] = copy.deepcopy(body.get("status", {}))
            else:
                kept = {"status"} if kind.has_status else set()
                kept |= {"apiVersion", "kind", "metadata"}
                after = {key: value for key, value in after.items() if key in kept}
                after |= {key: copy.deepcopy(value) for key, value in body.items() if key not in kept}
                self._set_meta(after, body.get("metadata", {}))
                self._check(kind, namespace, name, body | {"metadata": after["metadata"]})
                _fill_in(kind, after)
            if after == before:
                return copy.deepcopy(before)
            counted = ("spec",) if kind.has_status else [key for key in after if key != "metadata"]
            if "generation" in before["metadata"] and any(
                after.get(key) != before.get(key) for key in counted
            ):
                after["metadata"]["generation"] += 1
            meta = after["metadata"]
            if "deletionTimestamp" in meta and not meta.get("finalizers") and kind is not PODS:
                return self._remove(kind, after)
            return self._write(kind, "MODIFIED", before, after)

    def change(self, kind, namespace, name, change, part=""):
        """Change the object's newest version in place with `change`."""
        with self.changed:
            found = self.get(kind, namespace, name)
            change(found)
            return self.replace(kind, namespace, name, found, part)

    def delete(self, kind, namespace, name, options=None):
        """Delete an object, or mark it as being deleted. Return its resulting version, and whether it is gone."""
        options = options or {}
        with self.changed:
            found = copy.deepcopy(self._get(kind, namespace, name))
            meta = found["metadata"]
            wanted = options.get("preconditions") or {}
            if any(wanted.get(key) not in (None, meta[key]) for key in ("uid", "resourceVersion")):
                raise Refused(409, "Conflict", f'Precondition failed: {kind.full} "{name}" is another one')
            policy = options.get("propagationPolicy") or "Background"
            finalizers = meta.get("finalizers", [])
            if policy == "Orphan":
                for each_kind, inside, each in self.dependents(meta["uid"]):
                    self.change(each_kind, inside, each, lambda it: _disown(it, meta["uid"]))
            elif policy == "Foreground" and FOREGROUND not in finalizers:
                finalizers = [*finalizers, FOREGROUND]
            grace_s = options.get("gracePeriodSeconds")
            if kind is PODS and found["spec"].get("nodeName"):
                if grace_s is None:
                    grace_s = found["spec"]["terminationGracePeriodSeconds"]
                if grace_s and meta.get("deletionGracePeriodSeconds", grace_s + 1) <= grace_s:
                    # The pod is already being deleted, with at most this grace period, so nothing changes.
                    return copy.deepcopy(found), False
            elif kind is PODS:
                grace_s = 0
            if not finalizers and not (kind is PODS and grace_s) and kind is not NAMESPACES:
                return self._remove(kind, found), True
            before = self._objects[kind][found["metadata"].get("namespace", ""), name]
            meta.setdefault("deletionTimestamp", now(int(grace_s or 0)))
            if finalizers:
                meta["finalizers"] = finalizers
            meta["deletionGracePeriodSeconds"] = int(grace_s or 0)
            if kind is NAMESPACES:
                found["status"] = {"phase": "Terminating"}
            return (
                copy.deepcopy(found) if found == before else self._write(kind, "MODIFIED", before, found)
            ), False

    def remove(self, kind, namespace, name):
        """Remove the object regardless of its finalizers."""
        with self.changed:
            return self._remove(kind, copy.deepcopy(self._get(kind, namespace, name)))

    def forget_history(self):
        """Forget all earlier versions, like a compaction. Later watches from an earlier version are refused as expired."""
        with self.changed:
            self.version += 1
            self.oldest = self.version
            self.changed.notify_all()

    # ---- parts

    def _get(self, kind, namespace, name):
        found = self._objects[kind].get((namespace if kind.namespaced else "", name))
        if found is None:
            raise Refused(404, "NotFound", f'{kind.full} "{name}" not found', name=name, kind=kind.plural)
        return found

    def _check(self, kind, namespace, name, body):
        problems = []
        if body["kind"] != kind.kind or body["apiVersion"] != kind.api_version:
            problems.append(f"kind: Invalid value: {body['kind']}: must be {kind.kind} of {kind.api_version}")
        if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
            problems.append(
                f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain is needed'
            )
        for key, value in (body["metadata"].get("labels") or {}).items():
            if not _LABEL_VALUE.fullmatch(value) or len(value) > 63:
                problems.append(f'metadata.labels: Invalid value: "{value}" of {key}')
        for problem in Draft202012Validator(self.schemas.get(kind, {})).iter_errors(body):
            problems.append(f"{'.'.join(map(str, problem.absolute_path))}: Invalid value: {problem.message}")
        if kind is PODS:
            problems += _pod_problems(body.get("spec") or {})
        if problems:
            text = f'{kind.kind}.{kind.group} "{name}" is invalid: {", ".join(problems)}'
            raise Refused(422, "Invalid", text, name=name, kind=kind.kind)
        if kind.namespaced:
            home = self._objects[NAMESPACES].get(("", namespace))
            if home is None:
                raise Refused(404, "NotFound", f'namespaces "{namespace}" not found', kind="namespaces")
            if "deletionTimestamp" in home["metadata"] and (namespace, name) not in self._objects[kind]:
                raise Refused(
                    403,
                    "Forbidden",
                    f'{kind.full} "{name}" is forbidden: namespace {namespace} is being terminated',
                )

    def _check_quota(self, namespace, name):
        """Check the number of pods, the only quota that is enforced here."""
        used = sum(
            pod["status"]["phase"] not in ("Succeeded", "Failed") for pod in self.list(PODS, namespace)
        )
        for quota in self.list(QUOTAS, namespace):
            if used >= int(quota["spec"]["hard"]["pods"]):
                raise Refused(
                    *(403, "Forbidden"),
                    f'pods "{name}" is forbidden: exceeded quota: {quota["metadata"]["name"]}, requested: pods=1, '
                    f"used: pods={used}, limited: pods={quota['spec']['hard']['pods']}",
                    name=name,
                    kind="pods",
                )

    @staticmethod
    def _set_meta(after, given):
        for key in ("labels", "annotations", "ownerReferences", "finalizers"):
            if given.get(key):
                after["metadata"][key] = copy.deepcopy(given[key])
            else:
                after["metadata"].pop(key, None)

    def _serve(self, definition):
        spec = definition["spec"]
        version = next(each for each in spec["versions"] if each["storage"])
        kind = Kind(
            *(spec["group"], version["name"], spec["names"]["plural"], spec["names"]["kind"]),
            namespaced=spec["scope"] == "Namespaced",
            has_status="status" in version.get("subresources", {}),
            is_custom=True,
        )
        self.kinds[kind.group, kind.plural] = kind
        self._objects[kind] = {}
        self.schemas[kind] = version.get("schema", {}).get("openAPIV3Schema", {})
        conditions = [{"type": word, "status": "True"} for word in ("NamesAccepted", "Established")]
        definition["status"] = {
            "conditions": conditions,
            "acceptedNames": spec["names"],
            "storedVersions": [],
        }

    def _write(self, kind, type_, before, after):
        self.version += 1
        meta = after["metadata"]
        meta["resourceVersion"] = str(self.version)
        key = (meta.get("namespace", ""), meta["name"])
        self._objects[kind][key] = after
        self._known[meta["uid"]] = (kind, *key)
        for owner in _owners(before):
            self._owned.get(owner, set()).discard((kind, *key))
        for owner in _owners(after):
            self._owned.setdefault(owner, set()).add((kind, *key))
        self._note(Entry(self.version, kind, type_, before, after))
        return copy.deepcopy(after)

    def _remove(self, kind, last):
        meta = last["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        before = self._objects[kind].pop(key)
        self._known.pop(meta["uid"])
        if kind is DEFINITIONS:
            served = self.kinds.pop((last["spec"]["group"], last["spec"]["names"]["plural"]))
            for inside, name in list(self._objects[served]):
                self.remove(served, inside, name)
            del self._objects[served]
        for owner in _owners(before):
            self._owned.get(owner, set()).discard((kind, *key))
        self.version += 1
        last["metadata"]["resourceVersion"] = str(self.version)
        self._note(Entry(self.version, kind, "DELETED", before, last))
        return copy.deepcopy(last)

    def _note(self, entry):
        self.history.append(entry)
        self.changed.notify_all()


def chosen(found, labels, fields):
    """True if both selectors match the object."""
    return labels_match(labels, found["metadata"].get("labels") or {}) and fields_match(fields, found)


def _owners(found):
    return [owner["uid"] for owner in (found or {}).get("metadata", {}).get("ownerReferences", [])]


def _disown(found, uid):
    references = found["metadata"]["ownerReferences"]
    found["metadata"]["ownerReferences"] = [each for each in references if each["uid"] != uid]


def _fill_in(kind, new):
    if kind is PODS:
        usual = {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "serviceAccountName": "default",
            "schedulerName": "default-scheduler",
        }
        new["spec"] = usual | new["spec"]
        new.setdefault("status", {"phase": "Pending", "qosClass": "BestEffort"})
    elif kind is SECRETS:
        for name, text in new.pop("stringData", {}).items():
            new.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()
        new.setdefault("type", "Opaque")
    elif kind is NAMESPACES:
        new.setdefault("status", {"phase": "Active"})


def _pod_problems(spec):
    containers = spec.get("containers") or []
    if not containers:
        yield "spec.containers: Required value"
    volumes = {volume["name"] for volume in spec.get("volumes") or []}
    for each in [*containers, *(spec.get("initContainers") or [])]:
        if not each.get("name") or not each.get("image"):
            yield f"spec.containers: name and image are required: {json.dumps(each)[:80]}"
        for mount in each.get("volumeMounts") or []:
            if mount["name"] not in volumes:
                yield f'spec.containers.volumeMounts: Not found: "{mount["name"]}"'
        for env in each.get("env") or []:
            if not isinstance(env.get("value", ""), str):
                yield f"spec.containers.env.value: must be a string: {env['name']}"
