"""Definitions of the kinds that operators bring along. What the real ones check is checked here too."""


def definition(group, plural, kind, *, has_status, schema=None):
    """A CustomResourceDefinition of one version, v1."""
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema or anything},
    }
    if has_status:
        version["subresources"] = {"status": {}}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": spec,
    }


_RETRY = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "fancyRetryPolicy": {"type": "boolean"},
        "maxRetryCount": {"type": "integer", "minimum": -2},
    },
}
_COUNT = {"type": "integer", "minimum": -1}
_POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {"spec": {"type": "object", "required": ["containers"]}},
}
_ROLE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "taskNumber", "task"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]{1,63}$"},
        "taskNumber": {"type": "integer", "minimum": 0, "maximum": 10000},
        "frameworkAttemptCompletionPolicy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"minFailedTaskCount": _COUNT, "minSucceededTaskCount": _COUNT},
        },
        "task": {
            "type": "object",
            "additionalProperties": False,
            "required": ["pod"],
            "properties": {
                "retryPolicy": _RETRY,
                "podGracefulDeletionTimeoutSec": {"type": ["integer", "null"]},
                "pod": _POD,
            },
        },
    },
}
# As its author has it: one document, whose status is written like all the rest.
FRAMEWORK = definition(
    *("frameworkcontroller.microsoft.com", "frameworks", "Framework"),
    has_status=False,
    schema={
        "type": "object",
        "required": ["spec"],
        "properties": {
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[a-z0-9]{1,63}$"}},
            },
            "spec": {
                "type": "object",
                "additionalProperties": False,
                "required": ["executionType", "taskRoles"],
                "properties": {
                    "description": {"type": "string"},
                    "executionType": {"enum": ["Create", "Start", "Stop"]},
                    "retryPolicy": _RETRY,
                    "taskRoles": {"type": "array", "items": _ROLE},
                },
            },
        },
    },
)
