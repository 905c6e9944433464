"""The JSON schema of a job, protocol version 2, as OpenPAI's REST server checks it at submission.

It differs from the published schema, which refuses almost half of the jobs that servers accept. Diagnostics quote
`description` (what the value must be) and `examples` (the remedy). A prerequisite is checked against its own type only, so
its diagnostics are about that type.

Source: microsoft/pai v1.8.1, src/rest-server/src/config/v2/protocol.js. We add rules where the server accepts a job that then
fails: bounds of integers (FrameworkController allows 10,000 tasks per role), storages, and unknown plugins.
"""

from __future__ import annotations

import re
from typing import Any

from nni_manager.training_services.openpai.scalars import MAX_EXACT

# Source: frameworkcontroller.microsoft.com/v1, taskNumber.
MAX_INSTANCES = 10_000

RUNTIME_PLUGINS = "com.microsoft.pai.runtimeplugin"
CHANGES = ("running", "succeeded", "stopped", "failed", "retried")
"""The keys of extras.jobStatusChangeNotification."""
_PREFIX = re.escape(RUNTIME_PLUGINS)

# Python's $ also matches before a trailing line feed, JavaScript's does not.
_END = r"$(?!\n)"
PROTOTYPE = "__proto__"
"""A name that the server loses: for js-yaml 3, it is the prototype of the mapping."""
_IDENTIFIER = f"^(?!{PROTOTYPE}{_END})[a-zA-Z_][a-zA-Z0-9_]*{_END}"


def _must_be(what: str, example: Any, **rules: Any) -> dict[str, Any]:
    return {"description": what, "examples": [example], **rules}


def _whole(what: str, example: int, minimum: int = -MAX_EXACT, maximum: int = MAX_EXACT) -> dict[str, Any]:
    return _must_be(what, example, type="integer", minimum=minimum, maximum=maximum)


def _list(what: str, example: str, items: dict[str, Any], **rules: Any) -> dict[str, Any]:
    return _must_be(what, example, type="array", items=items, **rules)


def _mapping(
    properties: dict[str, Any], required: tuple[str, ...] = (), example: str = "", **rules: Any
) -> dict[str, Any]:
    """Returns the schema of a mapping with these keys and, unless `rules` say otherwise, no others."""
    return {
        "description": "a mapping",
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **({"examples": [example]} if example else {}),
        **rules,
    }


def _open_mapping(
    properties: dict[str, Any], required: tuple[str, ...] = (), example: str = "", **rules: Any
) -> dict[str, Any]:
    """Like `_mapping`, with any other keys."""
    return _mapping(properties, required, example, additionalProperties=True, **rules)


def _named(what: str, value: dict[str, Any], example: str) -> dict[str, Any]:
    """Returns the schema of a mapping whose keys are identifiers."""
    return {
        "description": f"a mapping with at least one {what}",
        "type": "object",
        "patternProperties": {_IDENTIFIER: value},
        "additionalProperties": False,
        "minProperties": 1,
        "examples": [example],
    }


_TEXT = _must_be("a string", "some text", type="string")
_NUMBER = _whole("a whole number", 0)
_PROTOCOL_VERSION = _must_be("2", 2, enum=["2", 2])
_NAME = _must_be(
    "a name of 1 to 255 letters, digits, _ and -",
    "my_job-1",
    type="string",
    pattern=f"^[a-zA-Z0-9_-]+{_END}",
    maxLength=255,
)
_NAMES = _list("a list of names", "[install-git]", _TEXT)
_ANY_MAPPING = _must_be("a mapping", "{key: value}", type="object")
_COUNT_OR_NULL = {**_whole("a whole number, or nothing", 1), "type": ["integer", "null"]}
_COMMAND = _must_be("a string", '"echo 1"', type="string")
_COMMANDS = _list("a list of at least one command", '["echo hello"]', _COMMAND, minItems=1)

_OF_ANY_PART = {
    "protocolVersion": _PROTOCOL_VERSION,
    "name": _NAME,
    "version": _must_be("a string or a number", "1.0.0", type=["string", "number"]),
    "contributor": _TEXT,
    "description": _TEXT,
}

_SCALAR = _must_be("a string, a number, true or false", "some text", type=["string", "number", "boolean"])
_LINES = _list("a list of commands", '["echo hello"]', _SCALAR)
_CALLBACK = _open_mapping(
    {"event": _must_be("taskStarts or taskSucceeds", "taskStarts", type="string"), "commands": _LINES},
    ("event", "commands"),
    "{event: taskStarts, commands: [echo hello]}",
)
_FOLDERS = _must_be(
    "a mapping of names to folders",
    "{run: /logs}",
    type="object",
    minProperties=1,
    additionalProperties=_TEXT,
)


def _parameters(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the schema of a plugin's parameters. Numbers may also be text with a template; unlisted parameters are allowed."""
    example = f"{{{', '.join(f'{key}: …' for key in required)}}}"
    return _open_mapping(properties, required, example, type=["object", "null"])


_PLUGIN_PARAMETERS = {
    "cmd": _parameters(
        {
            "preCommands": _LINES,
            "postCommands": _LINES,
            "callbacks": _list(
                "a list of callbacks", "[{event: taskStarts, commands: [echo hello]}]", _CALLBACK
            ),
        }
    ),
    "ssh": _parameters(
        {
            "jobssh": _SCALAR,
            "sshbarrier": _SCALAR,
            "sshbarrierTimeout": _must_be("a number of minutes", 30, type=["number", "string"]),
            "userssh": _open_mapping({"type": _TEXT, "value": _TEXT}, example="{type: custom, value: …}"),
        }
    ),
    "git": {
        **_parameters(
            {
                "repo_uri": _must_be("the address of a repository", "https://host/code.git", type="string"),
                "options": _list("a list of options of git clone", "[--depth=1]", _SCALAR),
                "clone_dir": _must_be("a folder", "/code", type="string"),
            },
            ("repo_uri",),
        ),
        "type": "object",
    },
    "tensorboard": _parameters(
        {"port": _must_be("a number", 6006, type=["integer", "string"]), "logdir": _FOLDERS},
        ("port", "logdir"),
    ),
    "teamwise_storage": _parameters({"storageConfigNames": _NAMES}),
}
PLUGINS = tuple(_PLUGIN_PARAMETERS)

_PLUGIN = _must_be(
    f"a known plugin ({', '.join(PLUGINS)})",
    f"{RUNTIME_PLUGINS}.cmd",
    type="string",
    # The runtime ignores plugin names without the prefix.
    pattern=rf"^(?!{_PREFIX})|^{_PREFIX}\.({'|'.join(PLUGINS)}){_END}",
)


def _if(key: str, value: str, then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": {key: {"const": value}}, "required": [key]}, "then": then}


PREREQUISITE_TYPES = ("dockerimage", "script", "data", "output")
_ONE_TYPE = "one of " + ", ".join(PREREQUISITE_TYPES)


def _prerequisite(kind: str) -> dict[str, Any]:
    properties = {**_OF_ANY_PART, "type": _must_be(_ONE_TYPE, kind)}
    if kind == "dockerimage":
        auth = {"username": _TEXT, "password": _TEXT, "registryuri": _TEXT}
        uri = _must_be("the name of an image", "ubuntu:22.04", type="string")
        properties |= {"uri": uri, "auth": _open_mapping(auth, example="{username: ada}")}
        return _mapping(properties, ("name", "type", "uri"))
    properties |= {
        "uri": _list("a list of strings", "[https://…]", _TEXT) if kind == "data" else _TEXT,
        "plugin": _PLUGIN,
        "require": _NAMES,
        "failurePolicy": _TEXT,
    }
    return _open_mapping(properties, ("name", "type"))


_PREREQUISITE = {
    "description": "a mapping with name and type",
    "examples": ["{name: image, type: dockerimage, uri: ubuntu:22.04}"],
    "type": "object",
    "required": ["type"],
    "properties": {"type": _must_be(_ONE_TYPE, "dockerimage", enum=list(PREREQUISITE_TYPES))},
    "allOf": [_if("type", kind, _prerequisite(kind)) for kind in PREREQUISITE_TYPES]
    # All other keys of the prerequisite are its plugin's parameters.
    + [
        _if("plugin", f"{RUNTIME_PLUGINS}.{name}", parameters)
        for name, parameters in _PLUGIN_PARAMETERS.items()
    ],
}

_RESOURCES = _mapping(
    {
        "cpu": _whole("a whole number", 1),
        "memoryMB": _whole("a whole number", 1024),
        "gpu": _NUMBER,
        "ports": _named("label of letters, digits and _", _whole("a whole number", 1), "{http: 1}"),
    },
    ("cpu", "memoryMB", "gpu"),
    "{cpu: 1, memoryMB: 1024, gpu: 0}",
)

_TASK_ROLE = _mapping(
    {
        "protocolVersion": _PROTOCOL_VERSION,
        "instances": _whole(f"a whole number from 1 to {MAX_INSTANCES}", 1, minimum=1, maximum=MAX_INSTANCES),
        "completion": _mapping(
            {"minFailedInstances": _COUNT_OR_NULL, "minSucceededInstances": _COUNT_OR_NULL}
        ),
        "taskRetryCount": _NUMBER,
        "prerequisites": _NAMES,
        "dockerImage": _must_be(
            "the name of a prerequisite of type dockerimage", "docker_image_0", type="string"
        ),
        "data": _TEXT,
        "output": _TEXT,
        "script": _TEXT,
        "extraContainerOptions": _open_mapping(
            {
                "shmMB": _whole("a whole number", 512),
                "infiniband": _must_be("true or false", "true", type="boolean"),
            }
        ),
        "resourcePerInstance": _RESOURCES,
        "commands": _COMMANDS,
    },
    ("dockerImage", "resourcePerInstance", "commands"),
)

_ADDED_COMMANDS = _mapping({"preCommands": _COMMANDS, "postCommands": _COMMANDS})
_DEPLOYMENT = _open_mapping(
    {
        "protocolVersion": _PROTOCOL_VERSION,
        "name": _NAME,
        "taskRoles": _named("task role", _ADDED_COMMANDS, "{worker: {}}"),
    },
    ("name", "taskRoles"),
)

_STORAGE = _open_mapping(
    {"name": _must_be("the name of a storage", "confignfs-data", type="string"), "mountPath": _TEXT},
    ("name",),
    "{name: confignfs-data}",
)

_PLUGIN_CALL_KEYS = {
    "plugin": _must_be("one of " + ", ".join(PLUGINS), "ssh", type="string", enum=list(PLUGINS)),
    "taskroles": _list("a list of task roles", "[worker]", _TEXT),
    "parameters": _must_be("a mapping", "{jobssh: true}", type=["object", "null"]),
    "failurePolicy": _TEXT,
}
PLUGIN_KEYS = tuple(_PLUGIN_CALL_KEYS)
_PLUGIN_CALL = {
    "allOf": [
        _if("plugin", name, {"required": needed, "properties": {"parameters": parameters}})
        for name, parameters in _PLUGIN_PARAMETERS.items()
        for needed in [["parameters"] if parameters["type"] == "object" else []]
    ]
} | _open_mapping(
    _PLUGIN_CALL_KEYS,
    ("plugin",),
    "{plugin: ssh, parameters: {jobssh: true}}",
)

_EXTRAS = _open_mapping(
    {
        "storages": _list("a list of storages", "[{name: confignfs-data}]", _STORAGE),
        "jobStatusChangeNotification": _must_be("a mapping", "{succeeded: true}", type="object"),
        RUNTIME_PLUGINS: _list("a list of plugins", "[{plugin: ssh}]", _PLUGIN_CALL),
    },
    example="{submitFrom: submit-job-v2}",
)

JOB_SCHEMA = _mapping(
    {
        **_OF_ANY_PART,
        "type": _must_be("the word job", "job", type="string", enum=["job"]),
        "prerequisites": _list(
            "a list of at least one prerequisite",
            "[{name: image, type: dockerimage, uri: ubuntu:22.04}]",
            _PREREQUISITE,
            minItems=1,
        ),
        "parameters": _ANY_MAPPING,
        "secrets": _ANY_MAPPING,
        "jobRetryCount": _whole("a whole number, 0 or more", 0, minimum=0),
        "taskRoles": _named(
            "task role, named with letters, digits and _, no digit first",
            _TASK_ROLE,
            "{worker: …}",
        ),
        "deployments": _list(
            "a list of at least one deployment", "[{name: d, taskRoles: …}]", _DEPLOYMENT, minItems=1
        ),
        "defaults": _open_mapping({"deployment": _TEXT}, example="{virtualCluster: default}"),
        "extras": _EXTRAS,
    },
    ("protocolVersion", "name", "type", "taskRoles"),
    description="a mapping with protocolVersion, name, type and taskRoles",
)
