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
_PREFIX = re.escape(RUNTIME_PLUGINS)

# Python's $ also matches before a trailing line feed, JavaScript's does not.
_END = r"$(?!\n)"
_IDENTIFIER = f"^[a-zA-Z_][a-zA-Z0-9_]*{_END}"


def _must_be(what: str, example: Any, **rules: Any) -> dict[str, Any]:
    return {"description": what, "examples": [example], **rules}


def _whole(what: str, example: int, minimum: int = -MAX_EXACT, maximum: int = MAX_EXACT) -> dict[str, Any]:
    return _must_be(what, example, type="integer", minimum=minimum, maximum=maximum)


def _mapping(properties: dict[str, Any], required: tuple[str, ...] = (), **rules: Any) -> dict[str, Any]:
    """Returns the schema of a mapping with these keys and, unless `rules` say otherwise, no others."""
    return {
        "description": "a mapping",
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **rules,
    }


def _named(what: str, value: dict[str, Any], **rules: Any) -> dict[str, Any]:
    """Returns the schema of a mapping whose keys are identifiers."""
    return {
        "description": f"a mapping with at least one {what}",
        "type": "object",
        "patternProperties": {_IDENTIFIER: value},
        "additionalProperties": False,
        "minProperties": 1,
        **rules,
    }


def _commands() -> dict[str, Any]:
    command = _must_be("a string", '"echo 1"', type="string")
    return _must_be(
        "a list of at least one command", '["echo hello"]', type="array", items=command, minItems=1
    )


_TEXT = _must_be("a string", "some text", type="string")
_PROTOCOL_VERSION = _must_be("2", 2, enum=["2", 2])
_NAME = _must_be(
    "a name of 1 to 255 letters, digits, _ and -",
    "my_job-1",
    type="string",
    pattern=f"^[a-zA-Z0-9_-]+{_END}",
    maxLength=255,
)
_NAMES = _must_be("a list of names", "[install-git]", type="array", items=_TEXT)
_ANY_MAPPING = _must_be("a mapping", "{key: value}", type="object")
_COUNT_OR_NULL = _must_be(
    "a whole number, or nothing", 1, type=["integer", "null"], minimum=-MAX_EXACT, maximum=MAX_EXACT
)

_OF_ANY_PART = {
    "protocolVersion": _PROTOCOL_VERSION,
    "name": _NAME,
    "version": _must_be("a string or a number", "1.0.0", type=["string", "number"]),
    "contributor": _TEXT,
    "description": _TEXT,
}


def _parameters(
    properties: dict[str, Any], required: tuple[str, ...] = (), kind: Any = ("object", "null")
) -> dict[str, Any]:
    """Returns the schema of a plugin's parameters. Numbers may also be text with a template; unlisted parameters are allowed."""
    kind = kind if isinstance(kind, str) else list(kind)
    return _mapping(
        properties,
        required,
        additionalProperties=True,
        type=kind,
        examples=[f"{{{', '.join(f'{key}: …' for key in required)}}}"],
    )


_SCALAR = _must_be("a string, a number, true or false", "some text", type=["string", "number", "boolean"])
_LINES = _must_be("a list of commands", '["echo hello"]', type="array", items=_SCALAR)
_PLUGIN_PARAMETERS = {
    "cmd": _parameters(
        {
            "preCommands": _LINES,
            "postCommands": _LINES,
            "callbacks": _must_be(
                "a list of callbacks",
                "[{event: taskStarts, commands: [echo hello]}]",
                type="array",
                items=_mapping(
                    {
                        "event": _must_be("taskStarts or taskSucceeds", "taskStarts", type="string"),
                        "commands": _LINES,
                    },
                    required=("event", "commands"),
                    additionalProperties=True,
                    examples=["{event: taskStarts, commands: [echo hello]}"],
                ),
            ),
        }
    ),
    "ssh": _parameters(
        {
            "jobssh": _SCALAR,
            "sshbarrier": _SCALAR,
            "sshbarrierTimeout": _must_be("a number of minutes", 30, type=["number", "string"]),
            "userssh": _mapping(
                {"type": _TEXT, "value": _TEXT},
                additionalProperties=True,
                examples=["{type: custom, value: …}"],
            ),
        }
    ),
    "git": _parameters(
        {
            "repo_uri": _must_be("the address of a repository", "https://host/code.git", type="string"),
            "options": _must_be("a list of options of git clone", "[--depth=1]", type="array", items=_SCALAR),
            "clone_dir": _must_be("a folder", "/code", type="string"),
        },
        required=("repo_uri",),
        kind="object",
    ),
    "tensorboard": _parameters(
        {
            "port": _must_be("a number", 6006, type=["integer", "string"]),
            "logdir": _must_be(
                "a mapping of names to folders",
                "{run: /logs}",
                type="object",
                minProperties=1,
                additionalProperties=_TEXT,
            ),
        },
        required=("port", "logdir"),
    ),
    "teamwise_storage": _parameters({"storageConfigNames": _NAMES}),
}
PLUGINS = tuple(_PLUGIN_PARAMETERS)

_PLUGIN = _must_be(
    f"a plugin there is ({', '.join(PLUGINS)})",
    f"{RUNTIME_PLUGINS}.cmd",
    type="string",
    # The runtime ignores plugin names without the prefix.
    pattern=rf"^(?!{_PREFIX})|^{_PREFIX}\.({'|'.join(PLUGINS)}){_END}",
)


def _with_plugin(name: str, then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": {"plugin": {"const": name}}, "required": ["plugin"]}, "then": then}


PREREQUISITE_TYPES = ("dockerimage", "script", "data", "output")


def _prerequisite(kind: str) -> dict[str, Any]:
    properties = {**_OF_ANY_PART, "type": _must_be("one of " + ", ".join(PREREQUISITE_TYPES), kind)}
    if kind == "dockerimage":
        auth = _mapping(
            {"username": _TEXT, "password": _TEXT, "registryuri": _TEXT},
            additionalProperties=True,
            examples=["{username: ada}"],
        )
        uri = _must_be("the name of an image", "ubuntu:22.04", type="string")
        return _mapping({**properties, "uri": uri, "auth": auth}, required=("name", "type", "uri"))
    links = _must_be("a list of strings", "[https://…]", type="array", items=_TEXT)
    properties |= {
        "uri": links if kind == "data" else _TEXT,
        "plugin": _PLUGIN,
        "require": _NAMES,
        "failurePolicy": _TEXT,
    }
    return _mapping(properties, required=("name", "type"), additionalProperties=True)


_PREREQUISITE = {
    "description": "a mapping with name and type",
    "examples": ["{name: image, type: dockerimage, uri: ubuntu:22.04}"],
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": _must_be(
            "one of " + ", ".join(PREREQUISITE_TYPES), "dockerimage", enum=list(PREREQUISITE_TYPES)
        )
    },
    "allOf": [
        {"if": {"properties": {"type": {"const": kind}}, "required": ["type"]}, "then": _prerequisite(kind)}
        for kind in PREREQUISITE_TYPES
    ]
    # All other keys of the prerequisite are its plugin's parameters.
    + [
        _with_plugin(f"{RUNTIME_PLUGINS}.{name}", parameters)
        for name, parameters in _PLUGIN_PARAMETERS.items()
    ],
}

_TASK_ROLE = _mapping(
    {
        "protocolVersion": _PROTOCOL_VERSION,
        "instances": _whole(f"a whole number from 1 to {MAX_INSTANCES}", 1, minimum=1, maximum=MAX_INSTANCES),
        "completion": _mapping(
            {"minFailedInstances": _COUNT_OR_NULL, "minSucceededInstances": _COUNT_OR_NULL}
        ),
        "taskRetryCount": _whole("a whole number", 0),
        "prerequisites": _NAMES,
        "dockerImage": _must_be(
            "the name of a prerequisite of type dockerimage", "docker_image_0", type="string"
        ),
        "data": _TEXT,
        "output": _TEXT,
        "script": _TEXT,
        "extraContainerOptions": _mapping(
            {
                "shmMB": _whole("a whole number", 512),
                "infiniband": _must_be("true or false", "true", type="boolean"),
            },
            additionalProperties=True,
        ),
        "resourcePerInstance": _mapping(
            {
                "cpu": _whole("a whole number", 1),
                "memoryMB": _whole("a whole number", 1024),
                "gpu": _whole("a whole number", 0),
                "ports": _named(
                    "label, of letters, digits and _", _whole("a whole number", 1), examples=["{http: 1}"]
                ),
            },
            required=("cpu", "memoryMB", "gpu"),
            examples=["{cpu: 1, memoryMB: 1024, gpu: 0}"],
        ),
        "commands": _commands(),
    },
    required=("dockerImage", "resourcePerInstance", "commands"),
)

_DEPLOYMENT = _mapping(
    {
        "protocolVersion": _PROTOCOL_VERSION,
        "name": _NAME,
        "taskRoles": _named(
            "task role",
            _mapping({"preCommands": _commands(), "postCommands": _commands()}),
            examples=["{worker: {}}"],
        ),
    },
    required=("name", "taskRoles"),
    additionalProperties=True,
)

_STORAGE = _mapping(
    {"name": _must_be("the name of a storage", "confignfs-data", type="string"), "mountPath": _TEXT},
    required=("name",),
    additionalProperties=True,
    examples=["{name: confignfs-data}"],
)

_PLUGIN_CALL = {
    "allOf": [
        _with_plugin(name, {"required": needed, "properties": {"parameters": parameters}})
        for name, parameters in _PLUGIN_PARAMETERS.items()
        for needed in [["parameters"] if parameters["type"] == "object" else []]
    ]
} | _mapping(
    {
        "plugin": _must_be("one of " + ", ".join(PLUGINS), "ssh", type="string", enum=list(PLUGINS)),
        "taskroles": _must_be("a list of task roles", "[worker]", type="array", items=_TEXT),
        "parameters": _must_be("a mapping", "{jobssh: true}", type=["object", "null"]),
        "failurePolicy": _TEXT,
    },
    required=("plugin",),
    additionalProperties=True,
    examples=["{plugin: ssh, parameters: {jobssh: true}}"],
)

JOB_SCHEMA = _mapping(
    {
        **_OF_ANY_PART,
        "type": _must_be("the word job", "job", type="string", enum=["job"]),
        "prerequisites": _must_be(
            "a list of at least one prerequisite",
            "[{name: image, type: dockerimage, uri: ubuntu:22.04}]",
            type="array",
            items=_PREREQUISITE,
            minItems=1,
        ),
        "parameters": _ANY_MAPPING,
        "secrets": _ANY_MAPPING,
        "jobRetryCount": _whole("a whole number, 0 or more", 0, minimum=0),
        "taskRoles": _named(
            "task role; its name is of letters, digits and _, and begins with no digit",
            _TASK_ROLE,
            examples=["{worker: …}"],
        ),
        "deployments": _must_be(
            "a list of at least one deployment",
            "[{name: d, taskRoles: …}]",
            type="array",
            items=_DEPLOYMENT,
            minItems=1,
        ),
        "defaults": _mapping(
            {"deployment": _TEXT}, additionalProperties=True, examples=["{virtualCluster: default}"]
        ),
        "extras": _mapping(
            {
                "storages": _must_be(
                    "a list of storages", "[{name: confignfs-data}]", type="array", items=_STORAGE
                ),
                "jobStatusChangeNotification": _must_be("a mapping", "{succeeded: true}", type="object"),
                RUNTIME_PLUGINS: _must_be(
                    "a list of plugins", "[{plugin: ssh}]", type="array", items=_PLUGIN_CALL
                ),
            },
            additionalProperties=True,
            examples=["{submitFrom: submit-job-v2}"],
        ),
    },
    required=("protocolVersion", "name", "type", "taskRoles"),
    description="a mapping with protocolVersion, name, type and taskRoles",
)
