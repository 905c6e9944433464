"""The environment variables that a cluster sets in a container: `PAI_*`, `FC_*`, and those of a pod.

Exactly one function reads each family. On a plain machine all are absent. FrameworkController without OpenPAI sets only `FC_*`,
OpenPAI sets both, and any other operator of Kubernetes only a pod's. `task_name` returns what the rest of the keeper needs.

There are two kinds of names. OpenPAI passes FrameworkController a *mangled* role name: lower-cased, with everything
outside a–z and 0–9 removed. Variables of the REST server (`PAI_RESOURCE_*`, `PAI_TASK_ROLE_LIST`, …) use the name of the job
file; variables set inside the container (`PAI_HOST_IP_*`, `PAI_PORT_LIST_*`, …) use the mangled name.

Gaps are normal: without gang allocation a task starts before the others have an address. A value that is present and
malformed is an error, even if the keeper does not use it: what overwrites one variable may overwrite others. A wrong guess of
the task could count a metric twice.

Source: OpenPAI 1.8 rest-server and openpai-runtime; FrameworkController v1; Kubernetes, Job v1; kubeflow.org/v1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trial_keeper.errors import SettingsInvalid

# A role becomes part of a folder's name on the shared storage. The first character excludes "..", hidden folders and options.
# The limit of 200 leaves space for the index in the 255 bytes of a file name.
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
# Eighteen digits exceed any real count, and stay below Python's conversion limit.
_NUMBER = r"[0-9]{1,18}"
# From 1 to 65535.
_PORT = r"0*(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_PORTS = rf"{_PORT}(?:,{_PORT})*"
_COUNT = "a whole number from 0"
_REMEDY = "let only the cluster set PAI_* and FC_* variables, not the image or the job's commands"

# Patterns of a variable's name and value, and a description of the value.
_JOB_FORMATS = (
    (
        "PAI_TASK_ROLE_INSTANCES",
        rf"[^,]+:-?{_NUMBER}(?:,[^,]+:-?{_NUMBER})*",
        "role:index with commas between them",
    ),
    # OpenPAI writes a semicolon after each label.
    ("PAI_CONTAINER_HOST_PORT_LIST", rf"(?:;|[^:;]+:{_PORTS}(?:;|$))*", "label:port,port; for each label"),
)
# For each role: %s is its name in the job file, %m the mangled name.
_ROLE_FORMATS = (
    ("PAI_TASK_ROLE_TASK_COUNT_%s", _NUMBER, _COUNT),
    ("PAI_RESOURCE_%s", rf"{_NUMBER}(?:,{_NUMBER}){{3}}", "gpu,cpu,memoryMB,shmMB in whole numbers"),
    ("PAI_MIN_(?:FAILED|SUCCEEDED)_TASK_COUNT_%s", rf"-0*[01]|{_NUMBER}", "a whole number from -1"),
    # An IPv6 address contains colons.
    (
        "PAI_TASK_ROLE_%m_HOST_LIST",
        rf"[^,]+:{_PORT}(?:,[^,]+:{_PORT})*",
        "host:port with commas between them",
    ),
    (rf"PAI_PORT_LIST_%m_{_NUMBER}_\w+", _PORTS, "ports from 1 to 65535 with commas between them"),
)


def node_name(environ: Mapping[str, str]) -> str:
    """The cluster's name or address of the machine of this container; empty if the cluster sets none."""
    if name := environ.get("NODE_NAME") or environ.get("SLURMD_NODENAME"):
        return name
    role = environ.get("PAI_CURRENT_TASK_ROLE_NAME", "")
    index = environ.get("PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX", "")
    return environ.get(f"PAI_HOST_IP_{_mangled(role)}_{index}", "")


def task_name(environ: Mapping[str, str], role: str | None = None) -> str:
    """The name of this container's task within its job: role and index, or main-0 if there is no cluster.

    It also names the task's folder in the workspace. OpenPAI's names have precedence: they are the job file's. In any other pod,
    `role` is the manager's setting.

    Raises:
        SettingsInvalid: a variable is malformed, only a part of a family is set, the two families contradict each other, or the
            role cannot be the name of a folder.
    """
    pai, fc = _openpai_task(environ), _frameworkcontroller_task(environ)
    if pai and fc and (_mangled(pai[0]), pai[1]) != (_mangled(fc[0]), fc[1]):
        raise SettingsInvalid(
            f"cannot determine this container's task: OpenPAI's variables name {_shown(pai[0])} {pai[1]}, "
            f"FrameworkController's {_shown(fc[0])} {fc[1]}; {_REMEDY}"
        )
    own_role, index = pai or fc or _pod_task(environ, role) or ("main", 0)
    if not _FOLDER_NAME.fullmatch(own_role):
        raise SettingsInvalid(
            f"cannot use task role {_shown(own_role)} as a folder name; rename it in the job: at most 200 "
            "letters, digits, '_', '.' and '-', not starting with '.' or '-'"
        )
    return f"{own_role}-{index}"


def _openpai_task(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The role, under its name in the job file, and the index; None outside OpenPAI."""
    names = _names_set(
        environ,
        ("PAI_JOB_NAME", "PAI_FRAMEWORK_NAME"),
        ("PAI_CURRENT_TASK_ROLE_NAME",),
        ("PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX", "PAI_TASK_INDEX"),
    )
    if names is None:
        return None
    _, role, index = names
    _check_roles(environ, environ[role])
    return environ[role], _whole_number(environ, index)


def _frameworkcontroller_task(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The role, under its name in the Framework, and the index; None outside FrameworkController.

    The role is mangled if OpenPAI created the Framework.
    """
    names = _names_set(environ, ("FC_FRAMEWORK_NAME",), ("FC_TASKROLE_NAME",), ("FC_TASK_INDEX",))
    if names is None:
        return None
    _, role, *numbers = (*names, "FC_FRAMEWORK_ATTEMPT_ID", "FC_TASK_ATTEMPT_ID")
    index, *_ = [_whole_number(environ, name) for name in numbers]  # the attempts are only checked
    return environ[role], index


def _pod_task(environ: Mapping[str, str], role: str | None) -> tuple[str, int] | None:
    """The role and the pod's index in it, under any operator; None if the manager set no role, or no name of the pod.

    The index is that of an Indexed Job, or the number that ends a Kubeflow pod's name. The manager sets the pod's name with the
    downward API.
    """
    pod = environ.get("POD_NAME")
    if role is None or not pod:
        return None
    if environ.get("JOB_COMPLETION_INDEX"):
        return role, _whole_number(environ, "JOB_COMPLETION_INDEX")
    ending = pod.rpartition("-")[2]
    if not ending.isdecimal():
        raise SettingsInvalid(
            f"cannot determine the task of pod {_shown(pod)}: its name does not end with a number, and "
            "JOB_COMPLETION_INDEX is not set; start the job with nnictl"
        )
    return role, _whole_number({"POD_NAME": ending}, "POD_NAME")


def _names_set(environ: Mapping[str, str], *required: tuple[str, ...]) -> list[str] | None:
    """The name that is set out of each tuple; None if none is set at all."""
    found = [_first_set(environ, *names) for names in required]
    if not any(found):
        return None
    for names, name in zip(required, found, strict=True):
        if name is None:
            raise _incomplete(names[0])
    return [name for name in found if name is not None]


def _mangled(role: str) -> str:
    """A role's name inside FrameworkController; empty when the name has no letter a–z and no digit."""
    return re.sub("[^a-z0-9]", "", role.lower())


def _check_roles(environ: Mapping[str, str], own_role: str) -> None:
    """Check the variables about the job's roles and tasks.

    Raises:
        SettingsInvalid: a variable is malformed, or `own_role` is none of the job's roles.
    """
    listed = _first_set(environ, "PAI_TASK_ROLE_LIST", "PAI_JOB_TASK_ROLE_LIST")
    names = environ[listed].split(",") if listed else [own_role]
    if listed and not all(names):
        raise _unreadable(listed, environ[listed], "role names with commas between them")
    if _mangled(own_role) not in map(_mangled, names):
        raise _unreadable(
            "PAI_CURRENT_TASK_ROLE_NAME", own_role, f"one of the job's roles {', '.join(names)}"
        )
    formats = list(_JOB_FORMATS)
    for role in names:
        for pattern, value, expected in _ROLE_FORMATS:
            name = pattern.replace("%s", re.escape(role)).replace("%m", _mangled(role))
            formats.append((name, value, expected))
    for name, value in environ.items():
        if not (value and name.startswith("PAI_")):
            continue
        for pattern, wanted, expected in formats:
            if re.fullmatch(pattern, name, re.ASCII) and not re.fullmatch(wanted, value, re.DOTALL):
                raise _unreadable(name, value, expected)


def _whole_number(environ: Mapping[str, str], name: str) -> int:
    """Parse a variable; 0 if it is not set."""
    value = environ.get(name) or "0"
    if not re.fullmatch(_NUMBER, value):
        raise _unreadable(name, value, _COUNT)
    return int(value)


def _first_set(environ: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _unreadable(name: str, value: str, expected: str) -> SettingsInvalid:
    return SettingsInvalid(f"cannot read {name}: {_shown(value)} is not {expected}; {_REMEDY}")


def _incomplete(name: str) -> SettingsInvalid:
    family = name.partition("_")[0]
    return SettingsInvalid(
        f"cannot read {name}: it is not set, but other {family}_* variables are; unset them outside a cluster, "
        "or pass the container's whole environment to the keeper"
    )


def _shown(value: str) -> str:
    # A very long value would hide the message.
    return repr(value if len(value) <= 80 else value[:77] + "...")
