"""Runtime plugins: shell scripts that OpenPAI's runtime runs around the commands of a task.

`init` scripts run first in the task, `pre` scripts before its commands, `post` scripts after successful commands.
Each is a bash script of its own. All have the task's PAI_* variables.

Source: microsoft/openpai-runtime v0.1.12 (src/init.d/initializer.py, src/plugins).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from nni_manager.config.diagnostics import key_of, shown
from nni_manager.training_services.openpai.job_checks import Path, ProtocolDiagnostic, ProtocolInvalid
from nni_manager.training_services.openpai.protocol import JobProtocol, PluginCall, ProtocolTaskRole
from nni_manager.training_services.openpai.scalars import javascript_text
from nni_manager.training_services.openpai.templates import fill_parameter
from trial_keeper.frozen_dataclass import dataclass

SSH_BARRIER_INTERVAL_S = 10
# Five hours. The runtime uses this value, although the documentation states 30 minutes.
SSH_BARRIER_TRIES = 1800
# The delay after each of the ten tries.
GIT_WAITS_S = (1, 2, 4, 8, 16, 32, 64, 128, 256, 300)


@dataclass(frozen=True, slots=True)
class TaskEnvironment:
    """The inputs of a plugin's script besides the job. `runtime_dir` is the runtime's folder inside tasks.

    `jobssh` expects the job's key pair there as ssh-secret/ssh-publickey and ssh-secret/ssh-privatekey.
    `ssh_public_keys` are those in the profile of the job's owner. A task's sshd listens at `sshd_address`; "" means everywhere.
    """

    runtime_dir: str = "/usr/local/pai"
    ssh_public_keys: tuple[str, ...] = ()
    sshd_address: str = ""


@dataclass(slots=True)
class TaskScripts:
    """The bash scripts of a task, in execution order: all of `init`, all of `pre`, `user`; after success, all of `post`.

    `runs_sshd`: one of `pre` starts the task's sshd. `warnings` and `diagnostics` are about its plugins, for the author.
    """

    user: str
    runs_sshd: bool = False
    init: list[str] = field(default_factory=list)
    pre: list[str] = field(default_factory=list)
    post: list[str] = field(default_factory=list)
    warnings: list[ProtocolDiagnostic] = field(default_factory=list)
    diagnostics: list[ProtocolDiagnostic] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Lines:
    """The lines of shell that one plugin adds. Each warning continues a sentence that starts with the plugin's key."""

    init: tuple[str, ...] = ()
    pre: tuple[str, ...] = ()
    post: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    runs_sshd: bool = False


@dataclass(frozen=True, slots=True)
class _Task:
    job: JobProtocol
    role: ProtocolTaskRole
    environment: TaskEnvironment


def calls_of(job: JobProtocol, role: ProtocolTaskRole) -> tuple[PluginCall, ...]:
    """Returns a role's plugin calls in order: those of its prerequisites (dependencies first), then those of `extras`."""
    requires = {each.name: each.values.get("require", ()) for each in job.prerequisites}
    needed = [job.prerequisite(name).plugin_call for name in in_order(role.prerequisites, requires)]
    extra = [call for call in job.plugin_calls if call.task_roles is None or role.name in call.task_roles]
    return (*(call for call in needed if call is not None), *extra)


def in_order(names: Sequence[str], requires: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns `names` and all they require, each once and after its requirements. Ties keep the order of the lists.

    `requires` has no cycle. OpenPAI documents `require` ("will be parsed by backend automatically") but never reads the key.
    """
    done: dict[str, None] = {}
    todo = list(reversed(names))
    while todo:
        name = todo[-1]
        missing = [each for each in requires.get(name, ()) if each not in done]
        if missing:
            todo += reversed(missing)
        else:
            done[todo.pop()] = None
    return tuple(done)


def scripts_of(
    job: JobProtocol, role: ProtocolTaskRole, environment: TaskEnvironment, user: str
) -> TaskScripts:
    """Returns the scripts of the role's plugins with their parameters filled in, around the script `user`.

    `diagnostics` report parameters with unresolved references, and those of the wrong type after filling in.
    """
    task, scripts = _Task(job, role, environment), TaskScripts(user)
    for call in calls_of(job, role):
        try:
            lines = _PLUGINS[call.plugin](_filled(task, call), task, call)
        except ProtocolInvalid as error:
            scripts.diagnostics.extend(error.diagnostics)
            continue
        scripts.init.extend(_script(lines.init, call))
        scripts.pre.extend(_script(lines.pre, call))
        scripts.post[:0] = _script(lines.post, call)
        scripts.runs_sshd |= lines.runs_sshd
        scripts.warnings.extend(
            job.document.diagnostic(call.path, f"{key_of(call.path)} {text}") for text in lines.warnings
        )
    return scripts


def _script(lines: Sequence[str], call: PluginCall) -> list[str]:
    if not lines:
        return []
    around = ("set +o errexit", "set -o errexit") if call.failure_is_ignored else ("set -o errexit",)
    return ["".join(f"{line}\n" for line in ("#!/bin/bash", around[0], *lines, *around[1:]))]


def _filled(task: _Task, call: PluginCall) -> Mapping[str, Any]:
    """Fills in the references of the parameters. A reference that would fail in OpenPAI's container is a diagnostic here."""
    variables = {**variables_of(task.job, task.role), "$secrets": task.job.secrets}
    diagnostics: list[ProtocolDiagnostic] = []

    def filled(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {key: filled(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        result = fill_parameter(value, variables)
        for name in result.unknown:
            problem = f"{name} is not defined for task role {task.role.name}; define it in the job"
            diagnostics.append(task.job.document.invalid_value(path, problem))
        return result.text

    parameters: Mapping[str, Any] = filled(call.parameters, _place(call))
    if diagnostics:
        raise ProtocolInvalid(diagnostics)
    return parameters


def _place(call: PluginCall) -> Path:
    """Returns the path of the call's parameters in the job. A prerequisite's own keys are its parameters."""
    return (*call.path, "parameters") if call.path[0] == "extras" else call.path


def variables_of(job: JobProtocol, role: ProtocolTaskRole) -> dict[str, Any]:
    """Returns the variables of a role's templates at submission; `$data` etc. only if the role has one."""
    names = {"data": role.data, "output": role.output, "script": role.script}
    bound = {
        f"${kind}": job.prerequisite(name, kind).values for kind, name in names.items() if name is not None
    }
    return {"$parameters": job.parameters, **bound}


def _cmd(parameters: Mapping[str, Any], _: _Task, __: PluginCall) -> _Lines:
    callbacks = parameters.get("callbacks")
    if callbacks is None:
        before, after = (_text(parameters.get(key, ())) for key in ("preCommands", "postCommands"))
        return _Lines(pre=before, post=after)
    lines: dict[str, list[Any]] = {"taskStarts": [], "taskSucceeds": []}
    warnings = []
    for each in callbacks:
        if each["event"] in lines:
            lines[each["event"]] += each["commands"]
        else:
            warnings.append(f"does nothing on event {shown(each['event'])}; use taskStarts or taskSucceeds")
    return _Lines(pre=_text(lines["taskStarts"]), post=_text(lines["taskSucceeds"]), warnings=tuple(warnings))


def _text(lines: Iterable[Any]) -> tuple[str, ...]:
    return tuple(javascript_text(line) for line in lines)


def _git(parameters: Mapping[str, Any], task: _Task, call: PluginCall) -> _Lines:
    code = shlex.quote(f"{task.environment.runtime_dir}/code")
    options = " ".join(
        shlex.quote(word)
        for index, option in enumerate(_text(parameters.get("options", ())))
        for word in _shell_arguments(option, task, (*_place(call), "options", index))
    )
    clone = " ".join(f"git clone {options} -- {shlex.quote(parameters['repo_uri'])} {code}".split())
    init = _all_or_nothing(
        (
            f"for wait_s in {' '.join(map(str, GIT_WAITS_S))}; do",
            f"  {clone} && exit",
            '  sleep "$wait_s"',
            "done",
            'echo "cannot clone; check repo_uri and the network" >&2',
            "exit 1",
        )
    )
    folder = parameters.get("clone_dir")
    pre = (f"mkdir -p {folder}", f"cp -a {code}/. {folder}") if folder else ()
    return _Lines(init=init, pre=pre)


def _shell_arguments(text: str, task: _Task, path: Path) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        problem = f"{shown(text)} has a quote that is not closed; close it"
        raise ProtocolInvalid([task.job.document.invalid_value(path, problem)]) from error


def _tensorboard(parameters: Mapping[str, Any], task: _Task, _: PluginCall) -> _Lines:
    if not parameters or task.role != task.job.task_roles[0]:
        return _Lines()
    folders: Mapping[str, str] = parameters["logdir"]
    named = ",".join(f"{name}:{folder}" for name, folder in folders.items())
    of_2 = f"--logdir={next(iter(folders.values()))}" if len(folders) == 1 else f"--logdir_spec={named}"
    port = f"--port={parameters['port']}"
    return _Lines(
        pre=(
            'if [ "$PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX" = 0 ]; then',
            '  case "$(tensorboard --version_tb)" in',
            f"    1*) tensorboard --logdir={named} {port} & ;;",
            f"    *) tensorboard {of_2} {port} --bind_all & ;;",
            "  esac",
            "fi",
        )
    )


def _ssh(parameters: Mapping[str, Any], task: _Task, call: PluginCall) -> _Lines:
    wanted = is_on(parameters.get("jobssh"))
    between_tasks = wanted and task.job.gang_allocation
    problem = "ignores jobssh: without gangAllocation, tasks have no addresses of other tasks; set gangAllocation to true"
    warnings = (problem,) if wanted and not between_tasks else ()
    user, keys = parameters.get("userssh") or {}, []
    if user.get("type") in ("custom", "system"):
        keys = [*task.environment.ssh_public_keys, *filter(None, [user.get("value")])]
    if not between_tasks and not keys:
        return _Lines(warnings=warnings)
    pre = [*_SSHD.format(runtime_dir=shlex.quote(task.environment.runtime_dir)).splitlines()]
    pre += [f"printf '%s\\n' {shlex.quote(key)} >> \"$ssh_dir/authorized_keys\"" for key in keys]
    pre += _JOB_SSH.splitlines() if between_tasks else []
    pre += _START_SSHD.format(address=shlex.quote(task.environment.sshd_address)).splitlines()
    if between_tasks and is_on(parameters.get("sshbarrier")):
        tries = _barrier_tries(parameters.get("sshbarrierTimeout"), task, call)
        pre += _SSH_BARRIER.format(tries=tries, interval_s=SSH_BARRIER_INTERVAL_S).splitlines()
    return _Lines(pre=_all_or_nothing(pre), warnings=warnings, runs_sshd=True)


def _all_or_nothing(lines: Sequence[str]) -> tuple[str, ...]:
    """Wraps lines in a subshell that ends at the first failure, so that ignoring failures skips these lines only."""
    return ("(", "set -o errexit", *lines, ")")


def is_on(value: Any) -> bool:
    """True if a plugin takes the value of its switch for true."""
    return str(value).lower() == "true"


def _barrier_tries(minutes: Any, task: _Task, call: PluginCall) -> int:
    if minutes is None:
        return SSH_BARRIER_TRIES
    try:
        return max(1, int(float(minutes) * 60 / SSH_BARRIER_INTERVAL_S))
    except (ValueError, OverflowError) as error:
        problem = f"{shown(minutes)} is not a number of minutes; write e.g. 30"
        raise ProtocolInvalid(
            [task.job.document.invalid_value((*_place(call), "sshbarrierTimeout"), problem)]
        ) from error


# OpenSSH reads the files of the home that the system knows for this user, whatever HOME is.
_SSHD = """\
if [ ! -x /usr/sbin/sshd ]; then apt-get update; apt-get install -y openssh-client openssh-server; fi
if [ -z "$PAI_CONTAINER_SSH_PORT" ]; then echo "cannot start sshd: this task has no port labelled ssh" >&2; exit 1; fi
ssh_dir={runtime_dir}/ssh
secret_dir={runtime_dir}/ssh-secret
user_dir=$(eval "echo ~$(id -un)")/.ssh
mkdir -p "$ssh_dir" "$user_dir"
if [ "$(id -u)" = 0 ]; then mkdir -p /run/sshd; fi
chmod 700 "$ssh_dir" "$user_dir"
[ -f "$ssh_dir/host_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$ssh_dir/host_key"
: > "$ssh_dir/authorized_keys"
env > "$user_dir/environment\""""

_JOB_SSH = """\
cat "$secret_dir/ssh-publickey" >> "$ssh_dir/authorized_keys"
install -m 600 "$secret_dir/ssh-privatekey" "$ssh_dir/job_key"
for task in ${PAI_TASK_ROLE_INSTANCES//,/ }; do
  ip="PAI_HOST_IP_${task%%:*}_${task##*:}"
  port="PAI_PORT_LIST_${task%%:*}_${task##*:}_ssh"
  port="${!port}"
  printf 'Host %s-%s\\n  HostName %s\\n  Port %s\\n' "${task%%:*}" "${task##*:}" "${!ip}" "${port%%,*}"
  printf '  User %s\\n  IdentityFile %s\\n' "$(id -un)" "$ssh_dir/job_key"
  printf '  StrictHostKeyChecking no\\n  UserKnownHostsFile /dev/null\\n  LogLevel ERROR\\n'
done >> "$user_dir/config"
chmod 600 "$user_dir/config\""""

# Without the machine's own settings of sshd, which are for its users. The log joins that of the task's scripts. sshd writes its
# id once it listens.
_START_SSHD = """\
address={address}
/usr/sbin/sshd -f /dev/null -p "$PAI_CONTAINER_SSH_PORT" ${{address:+-o ListenAddress="$address"}} -h "$ssh_dir/host_key" \\
  -E /dev/stderr -o PidFile="$ssh_dir/sshd.pid" -o UsePAM=no -o PasswordAuthentication=no -o Subsystem='sftp internal-sftp' \\
  -o AuthorizedKeysFile="$ssh_dir/authorized_keys" -o StrictModes=no -o PermitUserEnvironment=yes
for try in $(seq 0 100); do
  [ ! -s "$ssh_dir/sshd.pid" ] || break
  if [ "$try" = 100 ]; then echo "cannot start sshd: it does not listen on port $PAI_CONTAINER_SSH_PORT" >&2; exit 1; fi
  sleep 0.1
done"""

_SSH_BARRIER = """\
waiting="${{PAI_TASK_ROLE_INSTANCES//:/-}}"
for try in $(seq 0 {tries}); do
  silent=""
  for host in ${{waiting//,/ }}; do
    ssh -q -n -o BatchMode=yes -o ConnectTimeout={interval_s} "$host" true || silent="$silent,$host"
  done
  waiting="${{silent#,}}"
  [ -z "$waiting" ] && break
  if [ "$try" = {tries} ]; then echo "cannot reach $waiting by ssh; see their logs" >&2; exit 10; fi
  sleep {interval_s}
done"""

_PLUGINS: Mapping[str, Callable[[Mapping[str, Any], _Task, PluginCall], _Lines]] = {
    "cmd": _cmd,
    "ssh": _ssh,
    "git": _git,
    "tensorboard": _tensorboard,
    "teamwise_storage": lambda *_: _Lines(),  # the protocol parser has turned it into the job's storages
}
