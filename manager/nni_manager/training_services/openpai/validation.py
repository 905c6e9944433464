"""Finds all errors of a job at once: the schema checks its form, and rules of ours check its meaning.

The rules also run on jobs with form errors, so that one pass reports everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, cast

from nni_manager.config.diagnostics import key_of, remedy_for_unknown, shown
from nni_manager.startup.schema_validators import Draft7Validator, ValidationError
from nni_manager.training_services.openpai.document import JobDocument
from nni_manager.training_services.openpai.job_checks import Path, ProtocolDiagnostic, Violation
from nni_manager.training_services.openpai.schema import (
    CHANGES,
    JOB_SCHEMA,
    PLUGIN_KEYS,
    PLUGINS,
    PREREQUISITE_TYPES,
    PROTOTYPE,
    RUNTIME_PLUGINS,
)

# Limits the suggested names: a job may have thousands of them, and as many diagnostics.
MAX_NAMES_SHOWN = 20

# Source: microsoft/pai v1.8.1, src/rest-server/src/models/v2/job/k8s.js.
PRIORITY_CLASSES = ("crit", "prod", "test", "oppo")

# Keys of a task role that name a prerequisite, and the type of that prerequisite.
_REFERENCES = {"dockerImage": "dockerimage", "data": "data", "output": "output", "script": "script"}


def mangled(role: str) -> str:
    """Returns a role's name inside a cluster: lower case, letters and digits only.

    Source: microsoft/pai, src/rest-server/src/models/v2/job/k8s.js.
    """
    return re.sub("[^a-z0-9]", "", role.lower())


def cycle_in(requires: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a cycle of names, each of which requires the next, from the first that `requires` lists; empty if there is none."""
    try:
        TopologicalSorter(requires).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1][:0:-1]
        first = next(cycle.index(name) for name in requires if name in cycle)
        return cycle[first:] + cycle[:first]
    return []


def diagnostics_of(document: JobDocument) -> list[ProtocolDiagnostic]:
    """Returns all errors that keep a job from running; empty if it is valid."""
    form = _schema_violations(document)
    if not isinstance(document.value, dict):
        return form
    paths_with_violations = {each.path for each in form}
    meaning = (
        each for each in _SemanticRules(document).diagnostics() if each.path not in paths_with_violations
    )
    return [*document.diagnostics, *form, *meaning]


def warnings_of(document: JobDocument) -> list[ProtocolDiagnostic]:
    """Returns the parts of a valid job that lack the likely intended effect."""
    return list(_SemanticRules(document).warnings())


def _schema_violations(document: JobDocument) -> list[ProtocolDiagnostic]:
    """Returns the schema violations, the first one of each path."""
    found: dict[Path, ProtocolDiagnostic] = {}
    for error in Draft7Validator(JOB_SCHEMA).iter_errors(document.value):
        for path, message, params in _sentences(error):
            rule = Violation(str(error.validator), tuple(error.absolute_schema_path), params)
            found.setdefault(path, document.diagnostic(path, message, rule))
    return list(found.values())


def _sentences(error: ValidationError) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yields the path, the message and ajv's `params` of each violation in a schema error."""
    path: Path = tuple(error.absolute_path)
    assert isinstance(error.schema, Mapping)
    schema, value, limit = error.schema, cast(Any, error.instance), cast(Any, error.validator_value)
    match error.validator:
        case "required":
            for name in limit:
                if name not in value:
                    must_be = schema["properties"].get(name, {})
                    yield (*path, name), _missing((*path, name), must_be), {"missingProperty": name}
        case "additionalProperties":
            for name in value:
                if not _is_known(name, schema):
                    yield (*path, name), _unknown((*path, name), schema), {"additionalProperty": name}
        case "type":
            types = ",".join(limit) if isinstance(limit, list) else limit
            yield path, _wrong(path, value, schema), {"type": types}
        case "enum":
            yield path, _wrong(path, value, schema), {"allowedValues": limit}
        case "pattern":
            yield path, _wrong(path, value, schema), {"pattern": limit}
        case _:
            yield path, _wrong(path, value, schema), {"limit": limit}


def _is_known(name: str, schema: Mapping[str, Any]) -> bool:
    patterns = schema.get("patternProperties", {})
    return name in schema.get("properties", {}) or any(re.search(pattern, name) for pattern in patterns)


def _missing(path: Path, schema: Mapping[str, Any]) -> str:
    return (
        f"cannot do without {key_of(path)}: it must be {schema.get('description')}; {_written(path, schema)}"
    )


def _unknown(path: Path, schema: Mapping[str, Any]) -> str:
    key, name = key_of(path), str(path[-1])
    if "patternProperties" in schema:
        rule = f"letters, digits and _ with no digit first, not {PROTOTYPE}"
        better = "proto" if name == PROTOTYPE else re.sub(r"\W", "_", name, flags=re.ASCII) or "a"
        better = f"_{better}" if better[0].isdigit() else better
        return f"cannot use {key}: {shown(name)} is not a valid name ({rule}); rename it, e.g. {better}"
    remedy = remedy_for_unknown(name, schema["properties"], verb="remove it or use")
    return f"cannot use {key}: there is no such key here; {remedy}"


def _wrong(path: Path, value: Any, schema: Mapping[str, Any]) -> str:
    subject = f"use {key_of(path)}" if path else "run this job"
    # People who may not see secrets can see diagnostics.
    is_secret = "secrets" in path[:1] or "auth" in path
    quoted = "its value" if is_secret else shown(value)
    return f"cannot {subject}: {quoted} is not {schema.get('description')}; {_written(path, schema)}"


def _written(path: Path, schema: Mapping[str, Any]) -> str:
    examples = schema.get("examples")
    if not path or not examples:
        return "write it as `key: value` lines"
    example = str(examples[0])
    return f"write e.g. {example}" if isinstance(path[-1], int) else f"write e.g. {path[-1]}: {example}"


class _SemanticRules:
    """The rules beyond form. They skip values that do not have the expected form."""

    def __init__(self, document: JobDocument) -> None:
        self._document = document
        job = _mapping(document.value)
        self._roles = {name: _mapping(role) for name, role in _mapping(job.get("taskRoles")).items()}
        self._prerequisites = _items(job, ("prerequisites",))
        self._names = [item.get("name") for _, item in self._prerequisites]
        self._deployments = _items(job, ("deployments",))
        self._defaults = _mapping(job.get("defaults"))
        self._extras = _mapping(job.get("extras"))

    def diagnostics(self) -> Iterator[ProtocolDiagnostic]:
        yield from self._repeated()
        yield from self._references()
        yield from self._requirements()
        yield from self._role_names()
        yield from self._default_deployment()
        yield from self._two_forms_of_commands()

    def warnings(self) -> Iterator[ProtocolDiagnostic]:
        yield from self._idle_gang_keys()
        yield from self._images_with_templates()
        yield from self._names_of_no_role()
        yield from self._names_that_clusters_change()
        yield from self._idle_scheduler_values()
        yield from self._idle_prerequisites()
        for key in _mapping(self._extras.get("jobStatusChangeNotification")):
            if key not in CHANGES:
                remedy = remedy_for_unknown(key, CHANGES)
                yield self._no_effect(
                    ("extras", "jobStatusChangeNotification", key), "no such change", remedy
                )
        for path, call in self._plugin_calls():
            if str(call.get("failurePolicy", "fail")).lower() not in ("fail", "ignore"):
                message = f"failurePolicy {shown(call['failurePolicy'])} counts as fail; write fail or ignore"
                yield self._document.diagnostic((*path, "failurePolicy"), message)
            for key in call if path[0] == "extras" else ():
                if key not in PLUGIN_KEYS:
                    yield self._no_effect((*path, key), "no such key", remedy_for_unknown(key, PLUGIN_KEYS))

    def _idle_gang_keys(self) -> Iterator[ProtocolDiagnostic]:
        gang = self._extras.get("gangAllocation")
        if gang is not None and not isinstance(gang, bool):
            message = (
                f"extras.gangAllocation: {shown(gang)} counts as true; write true or false without quotes"
            )
            yield self._document.diagnostic(("extras", "gangAllocation"), message)
        for name, role in self._roles.items():
            if role.get("taskRetryCount") and gang is not False:
                path: Path = ("taskRoles", name, "taskRetryCount")
                message = (
                    f"{key_of(path)} has no effect; set extras.gangAllocation to false to retry single tasks"
                )
                yield self._document.diagnostic(path, message)

    def _images_with_templates(self) -> Iterator[ProtocolDiagnostic]:
        for path, item in self._prerequisites:
            uri = item.get("uri")
            if item.get("type") == "dockerimage" and isinstance(uri, str) and "<%" in uri:
                key = key_of((*path, "uri"))
                message = f"{key} stays as it is: OpenPAI fills in no template there; write the image's name"
                yield self._document.diagnostic((*path, "uri"), message)

    def _idle_prerequisites(self) -> Iterator[ProtocolDiagnostic]:
        """The runtime ignores a plugin's name without the prefix, which the names in `extras` do not have."""
        for path, item in self._prerequisites:
            plugin = item.get("plugin")
            if isinstance(plugin, str) and not plugin.startswith(f"{RUNTIME_PLUGINS}."):
                remedy = f"write {RUNTIME_PLUGINS}.{plugin if plugin in PLUGINS else PLUGINS[0]}"
                yield self._no_effect((*path, "plugin"), f"no plugin {shown(plugin)}", remedy)
            elif plugin is None and "callbacks" in item:
                remedy = f"write plugin: {RUNTIME_PLUGINS}.cmd beside it"
                yield self._no_effect((*path, "callbacks"), "no plugin that runs them", remedy)

    def _names_of_no_role(self) -> Iterator[ProtocolDiagnostic]:
        named: list[tuple[Path, str]] = []
        for at, deployment in self._deployments:
            named += [((*at, "taskRoles", name), name) for name in _mapping(deployment.get("taskRoles"))]
        scheduled = _mapping(_mapping(self._extras.get("hivedScheduler")).get("taskRoles"))
        named += [(("extras", "hivedScheduler", "taskRoles", name), name) for name in scheduled]
        for path, call in _items(self._extras, ("extras", RUNTIME_PLUGINS)):
            named += [
                ((*path, "taskroles", index), name) for index, name in enumerate(_list(call.get("taskroles")))
            ]
        for place, name in named:
            if name not in self._roles:
                remedy = remedy_for_unknown(str(name), list(self._roles)[:MAX_NAMES_SHOWN])
                yield self._no_effect(place, "no such task role", remedy)

    def _names_that_clusters_change(self) -> Iterator[ProtocolDiagnostic]:
        """Source: openpai-runtime issue 47."""
        for name in self._roles:
            if mangled(name) != name:
                message = (
                    f"taskRoles.{name} is {mangled(name)} on a cluster, whose runtime finds no such role in the job and fails; "
                    f"rename it with lower-case letters and digits, e.g. {mangled(name)}"
                )
                yield self._document.diagnostic(("taskRoles", name), message)

    def _idle_scheduler_values(self) -> Iterator[ProtocolDiagnostic]:
        scheduler = _mapping(self._extras.get("hivedScheduler"))
        priority = scheduler.get("jobPriorityClass")
        if priority is not None and priority not in PRIORITY_CLASSES:
            remedy = f"use {', '.join(PRIORITY_CLASSES)}"
            what = f"no priority class {shown(priority)}"
            yield self._no_effect(("extras", "hivedScheduler", "jobPriorityClass"), what, remedy)

    def _no_effect(self, path: Path, what: str, remedy: str) -> ProtocolDiagnostic:
        message = f"{key_of(path)} has no effect: there is {what}; {remedy}"
        return self._document.diagnostic(path, message)

    def _plugin_calls(self) -> Iterator[tuple[Path, Mapping[str, Any]]]:
        yield from ((path, item) for path, item in self._prerequisites if "plugin" in item)
        yield from _items(self._extras, ("extras", RUNTIME_PLUGINS))

    def _repeated(self) -> Iterator[ProtocolDiagnostic]:
        seen: dict[tuple[str, ...], Path] = {}
        for path, item in self._prerequisites:
            what = (shown(item.get("name")), shown(item.get("type")))
            if "name" in item and seen.setdefault(what, path) != path:
                first = f"{key_of(seen[what])} is a prerequisite {what[0]} of type {item.get('type')}"
                yield self._document.invalid_value((*path, "name"), f"{first} too; rename one of them")
        for path, item in self._deployments:
            name = shown(item.get("name"))
            if "name" in item and seen.setdefault((name,), path) != path:
                problem = f"{key_of(seen[name,])} has the same name {name}; rename one of them"
                yield self._document.invalid_value((*path, "name"), problem)

    def _references(self) -> Iterator[ProtocolDiagnostic]:
        names = {
            kind: [i.get("name") for _, i in self._prerequisites if i.get("type") == kind]
            for kind in PREREQUISITE_TYPES
        }
        for role_name, role in self._roles.items():
            at: Path = ("taskRoles", role_name)
            for key, kind in _REFERENCES.items():
                if isinstance(role.get(key), str) and role[key] not in names[kind]:
                    yield self._unknown((*at, key), role[key], names[kind], f"prerequisite of type {kind}")
            for index, name in enumerate(_list(role.get("prerequisites"))):
                if name not in self._names:
                    yield self._unknown((*at, "prerequisites", index), name, self._names, "prerequisite")

    def _requirements(self) -> Iterator[ProtocolDiagnostic]:
        requires: dict[str, list[str]] = {}
        for path, item in self._prerequisites:
            required = [name for name in _list(item.get("require")) if isinstance(name, str)]
            requires[str(item.get("name"))] = required
            for index, name in enumerate(required):
                if name not in self._names:
                    yield self._unknown((*path, "require", index), name, self._names, "prerequisite")
        cycle = cycle_in(requires)
        if cycle:
            path = next(path for path, item in self._prerequisites if str(item.get("name")) == cycle[0])
            problem = f"{' requires '.join([*cycle, cycle[0]])}; remove one of these"
            yield self._document.invalid_value((*path, "require"), problem)

    def _role_names(self) -> Iterator[ProtocolDiagnostic]:
        seen: dict[str, str] = {}
        for name in self._roles:
            short = mangled(name)
            if not 1 <= len(short) <= 63:
                problem = f"its name on a cluster, {shown(short)}, must have 1 to 63 letters and digits"
                yield self._document.invalid_value(
                    ("taskRoles", name), f"{problem}; rename it with letters a to z"
                )
            elif seen.setdefault(short, name) != name:
                problem = f"its name on a cluster is {short}, as that of {seen[short]}"
                remedy = "rename one so that they differ in letters or digits"
                yield self._document.invalid_value(("taskRoles", name), f"{problem}; {remedy}")

    def _default_deployment(self) -> Iterator[ProtocolDiagnostic]:
        name = self._defaults.get("deployment")
        names = [item.get("name") for _, item in self._deployments]
        if isinstance(name, str) and name not in names:
            yield self._unknown(("defaults", "deployment"), name, names, "deployment")

    def _two_forms_of_commands(self) -> Iterator[ProtocolDiagnostic]:
        for path, call in self._plugin_calls():
            in_extras = path[0] == "extras"
            parameters = _mapping(call.get("parameters")) if in_extras else call
            others = [key for key in ("preCommands", "postCommands") if key in parameters]
            is_cmd = call.get("plugin") == ("cmd" if in_extras else f"{RUNTIME_PLUGINS}.cmd")
            if is_cmd and "callbacks" in parameters and others:
                at: Path = (*path, "parameters", "callbacks") if in_extras else (*path, "callbacks")
                problem = f"{others[0]} is set too; keep one of the two forms"
                yield self._document.invalid_value(at, problem)

    def _unknown(self, path: Path, name: Any, known: Iterable[Any], what: str) -> ProtocolDiagnostic:
        known = [each for each in known if isinstance(each, str)][:MAX_NAMES_SHOWN]
        remedy = remedy_for_unknown(str(name), known) if known else f"add a {what} of that name"
        return self._document.invalid_value(path, f"there is no {what} named {shown(name)}; {remedy}")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _items(parent: Mapping[str, Any], path: tuple[str, ...]) -> list[tuple[Path, Mapping[str, Any]]]:
    """Returns the mappings of the list at the last key of the path, each with its own path."""
    return [((*path, index), _mapping(item)) for index, item in enumerate(_list(parent.get(path[-1])))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
