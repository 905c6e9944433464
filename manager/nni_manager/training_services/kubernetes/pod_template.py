"""Reads and applies users' own templates of pods: tolerations, node selectors, affinity, more volumes, annotations and the like.

A template must not contain what jobs add: the keeper, its variables, the shared storage, and the labels that identify jobs.

Source: Kubernetes, PodTemplateSpec v1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nni_manager.config import document as documents
from nni_manager.config.diagnostics import ConfigInvalid, KeyPath, key_of, shown
from nni_manager.training_services.kubernetes.section import JOB_LABELS, MOUNT, VOLUME
from trial_keeper.settings import PREFIX

Document = dict[str, Any]

_OF_ROLES = ("image", "command", "args")
_LISTS = ("volumes", "imagePullSecrets", "initContainers")
_LISTS_OF_CONTAINER = ("volumeMounts", "ports")


class TemplateReading:
    """One pass over a template: collects all errors."""

    def __init__(self, document: documents.Document) -> None:
        self.document = document
        self.diagnostics = list(document.diagnostics)

    def refuse(self, key_path: KeyPath, why: str) -> None:
        """Record an error at a key path; `why` ends with the remedy."""
        what = key_of(key_path) or "this template"
        self.diagnostics.append(self.document.diagnostic(key_path, f"cannot use {what}: {why}"))

    def text(self) -> str:
        """The template as JSON.

        Raises:
            ConfigInvalid: with every error of the template.
        """
        text = ""
        try:
            text = json.dumps(self.document.value, allow_nan=False)
        except (TypeError, ValueError):
            self.refuse((), "it contains a date or a number that is not finite; put such text in quotes")
        if self.diagnostics:
            raise ConfigInvalid(self.diagnostics)
        return text

    def mapping(self, key_path: KeyPath, value: Any, *, needed: bool = False) -> Mapping[str, Any]:
        """The mapping at a key path; empty without one."""
        if isinstance(value, dict) and (value or not needed):
            return value
        if value is not None or needed:
            why = "it is missing" if value is None else f"{shown(value)} is not a mapping with keys"
            self.refuse(key_path, f"{why}; write a mapping")
        return {}

    def items(self, key_path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
        """The mappings in the list at a key path, each with its own key path."""
        if value is not None and not isinstance(value, list):
            self.refuse(key_path, f"{shown(value)} is not a list; write one, or remove it")
            return
        for index, each in enumerate(value or ()):
            yield (*key_path, index), self.mapping((*key_path, index), each)

    def check_labels(self, key_path: KeyPath, labels: Any) -> None:
        """Refuse labels that identify jobs."""
        for name in self.mapping(key_path, labels):
            if name in JOB_LABELS:
                self.refuse((*key_path, name), "this label identifies jobs; rename your label")

    def check_spec(self, key_path: KeyPath, spec: Mapping[str, Any]) -> None:
        """Check the fields of a pod outside of its containers."""
        if spec.get("restartPolicy") not in (None, "Never"):
            why = "a job never restarts a task that has ended; write Never, or remove it"
            self.refuse((*key_path, "restartPolicy"), why)
        list(self.items((*key_path, "initContainers"), spec.get("initContainers")))  # reports invalid items
        grace = spec.get("terminationGracePeriodSeconds")
        if grace is not None and (type(grace) is not int or grace < 0):
            why = f"{shown(grace)} is not a number of seconds; write e.g. 60, or remove it"
            self.refuse((*key_path, "terminationGracePeriodSeconds"), why)
        for each, volume in self.items((*key_path, "volumes"), spec.get("volumes")):
            if volume.get("name") == VOLUME:
                why = "the volume of the experiment's storage has this name; rename your volume"
                self.refuse((*each, "name"), why)

    def check_container(self, key_path: KeyPath, container: Mapping[str, Any]) -> None:
        """Check the fields of the trial's container that roles do not have."""
        if "workingDir" in container:
            why = "a trial runs in its own copy of codeDir; remove it, or change the directory in the command"
            self.refuse((*key_path, "workingDir"), why)
        for each, variable in self.items((*key_path, "env"), container.get("env")):
            if str(variable.get("name")).startswith(PREFIX):
                why = f"the prefix {PREFIX} is reserved for keepers; rename your variable"
                self.refuse((*each, "name"), why)
        for each, mount in self.items((*key_path, "volumeMounts"), container.get("volumeMounts")):
            if str(mount.get("mountPath")).rstrip("/") == MOUNT:
                why = "the experiment's storage is mounted there; choose another path"
                self.refuse((*each, "mountPath"), why)


def read_pod_template(document: documents.Document) -> str:
    """The pod template in a document, as JSON: its `metadata` and its `spec`.

    Raises:
        ConfigInvalid: with every error of the template.
    """
    reading = TemplateReading(document)
    value = reading.mapping((), document.value, needed=True)
    for key in value:
        if key not in ("metadata", "spec"):
            reading.refuse((key,), "a pod template has only metadata and spec; remove it")
    meta = reading.mapping(("metadata",), value.get("metadata"))
    for key in meta:
        if key not in ("labels", "annotations"):
            reading.refuse(("metadata", key), "jobs set it; write only labels and annotations")
    reading.check_labels(("metadata", "labels"), meta.get("labels"))
    reading.mapping(("metadata", "annotations"), meta.get("annotations"))
    spec = reading.mapping(("spec",), value.get("spec"))
    reading.check_spec(("spec",), spec)
    reading.mapping(("spec", "nodeSelector"), spec.get("nodeSelector"))
    containers = list(reading.items(("spec", "containers"), spec.get("containers")))
    if len(containers) > 1:
        why = (
            f"there are {len(containers)} containers; write only the trial's, and others as initContainers with "
            "restartPolicy: Always"
        )
        reading.refuse(("spec", "containers"), why)
    for key_path, container in containers:
        for key in _OF_ROLES:
            if key in container:
                reading.refuse((*key_path, key), "the roles of the experiment file have it; remove it here")
        reading.check_container(key_path, container)
        resources = reading.mapping((*key_path, "resources"), container.get("resources"))
        for key in ("limits", "requests"):
            reading.mapping((*key_path, "resources", key), resources.get(key))
    return reading.text()


def with_template(pod: Document, template: Document) -> Document:
    """A role's pod with the user's template. Lists are joined; elsewhere the template counts, except for what a trial needs."""
    given: Document = template.get("spec") or {}
    (own,) = pod["containers"]
    added: Document = (given.get("containers") or [{}])[0]
    resources = added.get("resources") or {}
    container = {
        **own,
        **added,
        **{key: own[key] for key in ("name", "image", "command")},
        "env": with_variables(added.get("env") or (), own["env"]),
        "resources": {
            key: {**(resources.get(key) or {}), **own["resources"][key]} for key in ("requests", "limits")
        },
        **_joined(own, added, _LISTS_OF_CONTAINER),
    }
    grace = (each.get("terminationGracePeriodSeconds") or 0 for each in (pod, given))
    return {
        **pod,
        **given,
        **_joined(pod, given, _LISTS),
        "containers": [container],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(grace),
    }


def _joined(own: Document, added: Document, keys: Iterable[str]) -> Document:
    joined = {key: [*(own.get(key) or ()), *(added.get(key) or ())] for key in keys}
    return {key: items for key, items in joined.items() if items}


def with_variables(given: Iterable[Document], ours: Iterable[Document]) -> list[Document]:
    """The user's variables of a container, and ours.

    The user's keep their order, because one may refer to an earlier one. They replace ours of the same name.
    """
    own = list(given)
    names = {each.get("name") for each in own}
    return [*own, *(each for each in ours if each["name"] not in names)]


def with_labels(metadata: Document | None, labels: dict[str, str]) -> Document:
    """Returns the user's labels and annotations, merged with the job's labels."""
    given = metadata or {}
    notes = {"annotations": given["annotations"]} if given.get("annotations") else {}
    return {"labels": {**(given.get("labels") or {}), **labels}, **notes}
