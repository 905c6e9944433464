"""The three kinds of patches to Kubernetes objects."""

import copy

from kube_store import Refused

# A strategic merge patch merges these lists item by item. The value is the key that identifies an item. A patch replaces each
# list that is not named here.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "conditions": "type",
    "ownerReferences": "uid",
}


def merged(found, change):
    """A JSON merge patch. Source: RFC 7396."""
    if not isinstance(change, dict):
        return change
    made = dict(found) if isinstance(found, dict) else {}
    for key, value in change.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merged(made.get(key), value)
    return made


def strategically_merged(found, change, key=""):
    """A strategic merge patch: like a merge patch, but items of some lists are merged by name."""
    if isinstance(change, list) and key in _KEYS and all(isinstance(each, dict) for each in change):
        name, made = _KEYS[key], [dict(each) for each in found or []]
        for item in change:
            same = next((at for at, each in enumerate(made) if each.get(name) == item.get(name)), None)
            if item.get("$patch") == "delete":
                if same is not None:
                    del made[same]
            elif same is None:
                made.append(item)
            else:
                made[same] = strategically_merged(made[same], item)
        return made
    if not isinstance(change, dict):
        return change
    if change.get("$patch") == "replace":
        return {each: value for each, value in change.items() if each != "$patch"}
    made = dict(found) if isinstance(found, dict) else {}
    for each, value in change.items():
        if value is None:
            made.pop(each, None)
        else:
            made[each] = strategically_merged(made.get(each), value, each)
    return made


def operated(found, operations):
    """A JSON patch. Source: RFC 6902."""
    made = copy.deepcopy(found)
    for operation in operations:
        try:
            _operate(made, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            text = f"the server rejected our request due to an error in our request: {operation}"
            raise Refused(422, "Invalid", text) from error
    return made


def _operate(made, operation):
    kind, value = operation["op"], operation.get("value")
    if kind in ("move", "copy"):
        at, last = _at(made, operation["from"])
        value = copy.deepcopy(at[last])
        if kind == "move":
            del at[last]
        kind = "add"
    at, last = _at(made, operation["path"])
    if kind == "add" and isinstance(at, list):
        at.insert(len(at) if last == "-" else last, value)
    elif kind == "add":
        at[last] = value
    elif kind == "replace":
        at[last]  # the path of the operation must exist
        at[last] = value
    elif kind == "remove":
        del at[last]
    elif kind == "test":
        if at[last] != value:
            raise ValueError(operation["path"])
    else:
        raise ValueError(kind)


def _at(made, pointer):
    *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    for step in steps:
        made = made[int(step) if isinstance(made, list) else step]
    return made, int(last) if isinstance(made, list) and last != "-" else last
