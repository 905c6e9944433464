"""The environment variables that a cluster sets in a container: `PAI_*`, `FC_*`, and those of a pod.

Exactly one class reads each family. On a plain machine all are absent. FrameworkController without OpenPAI sets only `FC_*`,
OpenPAI sets both, and any other operator of Kubernetes only a pod's. `task_identity` returns what the rest of the keeper needs:
the job, the task and the attempt of this container.

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
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class PaiEnvironment:
    """The task of a container, from its `PAI_*` variables."""

    job_name: str
    """`user~job`, the name in the REST API."""
    role: str
    """This task's role, under its name in the job file."""
    index: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PaiEnvironment | None:
        """Parse OpenPAI's variables; None outside OpenPAI (neither job, nor role, nor index is set).

        Raises:
            SettingsInvalid: a variable is malformed, or only a part of job, role and index is set.
        """
        job_name = environ.get("PAI_JOB_NAME") or environ.get("PAI_FRAMEWORK_NAME")
        role = environ.get("PAI_CURRENT_TASK_ROLE_NAME")
        index_name = _first_set(environ, "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX", "PAI_TASK_INDEX")
        if not (job_name or role or index_name):
            return None
        if not job_name:
            raise _incomplete("PAI_JOB_NAME")
        if not role:
            raise _incomplete("PAI_CURRENT_TASK_ROLE_NAME")
        if not index_name:
            raise _incomplete("PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX")
        _check_roles(environ, role)
        return cls(job_name, role, _whole_number(environ, index_name))


@dataclass(frozen=True, slots=True)
class FrameworkControllerEnvironment:
    """The task of a container, from its `FC_*` variables."""

    framework: str
    """The Framework object's name; under OpenPAI the MD5 of `user~job`."""
    role: str
    """This task's role, by its name in the Framework; mangled if OpenPAI created the Framework."""
    index: int
    framework_attempt: int
    """Counts from 0; the task attempts of a retried job restart at 0."""
    task_attempt: int
    """Counts from 0."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> FrameworkControllerEnvironment | None:
        """Parse FrameworkController's variables; None outside it (neither framework, nor role, nor index is set).

        Raises:
            SettingsInvalid: a variable is malformed, or only a part of framework, role and index is set.
        """
        names = ("FC_FRAMEWORK_NAME", "FC_TASKROLE_NAME", "FC_TASK_INDEX")
        if not any(environ.get(name) for name in names):
            return None
        for name in names:
            if not environ.get(name):
                raise _incomplete(name)
        return cls(
            framework=environ["FC_FRAMEWORK_NAME"],
            role=environ["FC_TASKROLE_NAME"],
            index=_whole_number(environ, "FC_TASK_INDEX"),
            framework_attempt=_whole_number(environ, "FC_FRAMEWORK_ATTEMPT_ID"),
            task_attempt=_whole_number(environ, "FC_TASK_ATTEMPT_ID"),
        )


@dataclass(frozen=True, slots=True)
class PodEnvironment:
    """A pod's own variables, under any operator. The manager sets the pod's name with the downward API."""

    pod: str
    completion_index: int | None
    """The pod's index in an Indexed Job."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PodEnvironment | None:
        """Parse the pod's variables; None if its name is not set.

        Raises:
            SettingsInvalid: a variable is malformed.
        """
        if not environ.get("POD_NAME"):
            return None
        name = "JOB_COMPLETION_INDEX"
        return cls(environ["POD_NAME"], _whole_number(environ, name) if environ.get(name) else None)

    @property
    def index(self) -> int:
        """The task's index in its role: the Indexed Job's completion index, or the number that ends a Kubeflow pod's name.

        Raises:
            SettingsInvalid: there is neither.
        """
        if self.completion_index is not None:
            return self.completion_index
        ending = self.pod.rpartition("-")[2]
        if not ending.isdecimal():
            raise SettingsInvalid(
                f"cannot determine the task of pod {_shown(self.pod)}: its name does not end with a number, and "
                "JOB_COMPLETION_INDEX is not set; start the job with nnictl"
            )
        return _whole_number({"POD_NAME": ending}, "POD_NAME")


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """The job, the task and the attempt of this container."""

    job: str | None
    """The job's name on the cluster; None outside any cluster."""
    role: str
    index: int
    framework_attempt: int
    """Number of earlier starts of the whole job; from 0."""
    task_attempt: int
    """Number of earlier starts of this task within the current framework attempt; from 0."""

    def __post_init__(self) -> None:
        if not _FOLDER_NAME.fullmatch(self.role):
            raise SettingsInvalid(
                f"cannot use task role {_shown(self.role)} as a folder name; rename it in the job: at most 200 "
                "letters, digits, '_', '.' and '-', not starting with '.' or '-'"
            )

    @property
    def task(self) -> str:
        """The task's name within its job, and the name of its folder in the workspace."""
        return f"{self.role}-{self.index}"


def task_identity(environ: Mapping[str, str], role: str | None = None) -> TaskIdentity:
    """The identity of this container; role "main", index 0, first attempt if there is no cluster.

    OpenPAI's names have precedence: they are the job file's. The attempts are FrameworkController's, as OpenPAI has none of its
    own. In any other pod, `role` is the manager's setting.

    Raises:
        SettingsInvalid: a variable is malformed, the two families contradict each other, or the role cannot
            be the name of a folder.
    """
    pai = PaiEnvironment.from_environ(environ)
    fc = FrameworkControllerEnvironment.from_environ(environ)
    if pai and fc and (mangled(pai.role), pai.index) != (mangled(fc.role), fc.index):
        raise SettingsInvalid(
            f"cannot determine this container's task: OpenPAI's variables name {_shown(pai.role)} {pai.index}, "
            f"FrameworkController's {_shown(fc.role)} {fc.index}; {_REMEDY}"
        )
    attempts = (fc.framework_attempt, fc.task_attempt) if fc else (0, 0)
    if pai:
        return TaskIdentity(pai.job_name, pai.role, pai.index, *attempts)
    if fc:
        return TaskIdentity(fc.framework, fc.role, fc.index, *attempts)
    pod = PodEnvironment.from_environ(environ) if role is not None else None
    if role is not None and pod is not None:
        return TaskIdentity(None, role, pod.index, 0, 0)
    return TaskIdentity(None, "main", 0, 0, 0)


def mangled(role: str) -> str:
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
    if mangled(own_role) not in map(mangled, names):
        raise _unreadable(
            "PAI_CURRENT_TASK_ROLE_NAME", own_role, f"one of the job's roles {', '.join(names)}"
        )
    formats = list(_JOB_FORMATS)
    for role in names:
        for pattern, value, expected in _ROLE_FORMATS:
            name = pattern.replace("%s", re.escape(role)).replace("%m", mangled(role))
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
