"""Checks before anything starts: ports, the trial's command, GPUs, a cluster and its job file."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import socket
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nni_manager.client.experiments import known_experiments
from nni_manager.domain.message_summary import HOW_TO_USE_CONDA
from nni_manager.errors import NniManagerError, UserError
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from trial_keeper.wire.workspace import Workspace

if TYPE_CHECKING:
    from nni_manager.config.model import ExperimentSpec, KubernetesConfig
    from nni_manager.training_services.openpai.job import JobTemplate
    from nni_manager.training_services.openpai.rest import OpenPai

HOST = "127.0.0.1"
DEFAULT_PORT = 8080
HIGHEST_PORT = 65534  # keepers use the next port
# A word that bash does not expand, followed by the end of the line or by arguments. No parenthesis may follow: that would
# define a function.
_PLAIN_WORD = re.compile(r"[ \t\n]*([A-Za-z0-9_./+-]+)(?=$|[ \t\n](?![ \t]*\())")
# Python without options, and a script that bash does not expand.
_PYTHON_SCRIPT = re.compile(
    r"[ \t\n]*(?:[A-Za-z0-9_./+-]*/)?python[0-9.]*[ \t]+([A-Za-z0-9_./+-]+\.py)(?=$|[ \t\n])"
)
# Keys of NNI's first schema in the second one.
_KEYS_OF_V2 = {
    "trial.command": "trialCommand",
    "trial.codeDir": "trialCodeDirectory",
    "logDir": "experimentWorkingDirectory",
}
_URL_SEGMENT = re.compile(r"[A-Za-z0-9_-]{1,100}")
# BASH_ENV may name slow start-up files; the check is limited in time.
_CHECK_TIMEOUT_S = 10.0


def free_ports(host: str = HOST) -> Iterator[int]:
    """Ports that are free and whose next port is free: 8080, 8082, … Another program may still take them first.

    Raises:
        UserError: no further port is free.
    """
    for port in range(DEFAULT_PORT, HIGHEST_PORT, 2):
        if ports_are_free(port, host):
            yield port
    raise UserError(f"cannot find two free ports from {DEFAULT_PORT} on; stop some experiments")


def usable_ports(port: int | None, host: str = HOST, count: int = 2) -> Iterable[int]:
    """The port, if `count` ports from it on are free: the port of `host` for the API, the next one for keepers.

    A view needs only the first one. `port` None: `free_ports`.

    Raises:
        UserError: a port is not available; the message names the experiment that uses it, if it is one of this user.
    """
    if port is None:
        return free_ports(host)
    for each in range(port, port + count):
        problem = _port_problem(each, host if each == port else HOST)
        if problem is None:
            continue
        for known in known_experiments():
            if known.view is not None and each == known.view.port:
                raise UserError(
                    f"cannot use port {each}: a view of experiment {known.experiment_id} is served there; "
                    f"end it with `nnictl stop --port {each}`, or choose another with --port N or --port auto"
                )
            if known.manager is not None and each in (known.manager.port, known.manager.port + 1):
                raise UserError(
                    f"cannot use port {each}: experiment {known.experiment_id} runs there; "
                    f"stop it with `nnictl stop {known.experiment_id}`, or choose another with --port N or --port auto"
                )
        which = "" if each == port else f" (keepers connect to the one after --port {port})"
        raise UserError(
            f"cannot use port {each}{which}: {problem}; choose another with --port N or --port auto"
        )
    return [port]


def ports_are_free(port: int, host: str = HOST) -> bool:
    """True if `port` and `port` + 1 are free now."""
    return is_free(port, host) and is_free(port + 1)


def is_free(port: int, host: str = HOST) -> bool:
    """True if the port is free now."""
    return _port_problem(port, host) is None


def _port_problem(port: int, host: str) -> str | None:
    remedy = "write an address of this machine, or 0.0.0.0 for all of them"
    if not host.strip():
        raise UserError(f"cannot use --host {host!r}: the address is empty; {remedy}")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As in the manager: connections in TIME_WAIT do not prevent listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except PermissionError:
            return "only root may use ports below 1024"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "another program uses it"
            raise UserError(f"cannot use --host {host}: {error.strerror}; {remedy}") from error
        except (TypeError, UnicodeError) as error:  # raised before the name is resolved
            raise UserError(f"cannot use --host {host}: no machine has such a name; {remedy}") from error
    return None


def url_prefix(text: str) -> str:
    """The prefix of all addresses, with one slash before it and none after it; "" for none.

    Raises:
        UserError: it has other characters than letters, digits, - and _ in its segments.
    """
    segments = text.strip("/").split("/")
    if segments == [""]:
        return ""
    if not all(map(_URL_SEGMENT.fullmatch, segments)):
        raise UserError(
            f"cannot use --url-prefix {text}: write letters, digits, - and _, with slashes between them, such as lab/digits"
        )
    return "/" + "/".join(segments)


@dataclass(frozen=True, slots=True)
class PlatformCheck:
    """The place where trials run, as text (empty: this machine), and warnings for the user."""

    where: str = ""
    warnings: tuple[str, ...] = ()


def check_platform(config: ExperimentSpec) -> PlatformCheck:
    """Check that trials can run on the experiment's platform.

    Raises:
        UserError: this machine cannot run them.
        UserError, RetryableError: the cluster cannot run them.
    """
    if config.kubernetes is not None:
        return check_kubernetes(config, config.kubernetes)
    if config.pai is not None:
        return check_cluster(config)
    check_this_machine(config)
    return PlatformCheck()


def check_this_machine(config: ExperimentSpec) -> None:
    """Check that this machine has the GPUs of a trial, and the program of its command.

    Raises:
        UserError: it lacks one of them.
    """
    from nni_manager.training_services.local.gpus import GpuShares, gpus_of_this_machine

    GpuShares.of(config.local, config.gpu_num, gpus_of_this_machine())
    check_command(config)


def check_cluster(config: ExperimentSpec) -> PlatformCheck:
    """Check that OpenPAI accepts this user and has the resources of the jobs. Starts the local OpenPAI if the config uses it.

    Raises:
        ProtocolInvalid: the job file is invalid.
        UserError: the storage or virtual cluster is not available to this user, or no node is large enough.
        RetryableError: OpenPAI is unreachable.
    """
    from nni_manager import training_service_factory
    from nni_manager.training_services.openpai.job import template_of

    assert config.pai is not None
    template = template_of(config.pai)
    cluster = training_service_factory.open_cluster(config.pai, template, ClientRetryPolicy(tries=2))
    owner = cluster.user_of_token()
    if owner not in (None, cluster.user):
        # Jobs would belong to the token's user, and the manager searches for those of userName.
        raise UserError(
            f"cannot use paiConfig.userName {cluster.user} of {config.config_path.name}: the token is {owner}'s; write "
            f"userName: {owner}, or a token of {cluster.user}"
        )
    wanted = {
        "storage": tuple(storage.name for storage in template.job.storages or ()),
        "virtual cluster": (template.job.virtual_cluster,),
    }
    own = cluster.virtual_clusters_of_user()
    usable = cluster.virtual_clusters() if own is None else own
    available = {"storage": cluster.storages(), "virtual cluster": usable}
    for what, names in wanted.items():
        for name in names:
            if name not in available[what]:
                known = ", ".join(available[what]) or "none"
                raise UserError(
                    f"cannot run jobs on OpenPAI at {cluster.address}: there is no {what} {name!r} that {cluster.user} may "
                    f"use; correct the name in {config.config_path.name} (known: {known})"
                )
    _check_nodes(config, cluster, template)
    return PlatformCheck(f"OpenPAI at {cluster.address}, as {cluster.user}", template.warnings)


def _check_nodes(config: ExperimentSpec, cluster: OpenPai, template: JobTemplate) -> None:
    """Check that a node is large enough for one task of each role, if OpenPAI reports node sizes."""
    nodes = cluster.nodes()
    for role in template.sized_roles:
        need = role.resources
        required = {"GPUs": need.gpu, "CPUs": need.cpu, "MB of memory": need.memory_mb}
        counts = [(node.gpu, node.cpu, node.memory_mb) for node in nodes]
        is_fitting = (
            all(size is None or number <= size for number, size in zip(required.values(), node, strict=True))
            for node in counts
        )
        if not nodes or any(is_fitting):
            continue
        known = [[each for each in column if each is not None] for column in zip(*counts, strict=True)]
        largest = ", ".join(
            f"{max(column)} {unit}" for unit, column in zip(required, known, strict=True) if column
        )
        raise UserError(
            f"cannot run jobs on OpenPAI at {cluster.address}: a task of role {role.name} requires "
            f"{', '.join(f'{number} {unit}' for unit, number in required.items())}, and no node is that large (maximum "
            f"of a node: {largest}); require less in {config.config_path.name}"
        )


def check_kubernetes(config: ExperimentSpec, kubernetes: KubernetesConfig) -> PlatformCheck:
    """Check that Kubernetes accepts this user and has what the jobs need.

    Raises:
        UserError: with everything that is missing, or the storage is not mounted on this machine.
        UserError, RetryableError: this version does not support such jobs, or Kubernetes is unreachable.
    """
    from nni_manager import training_service_factory
    from nni_manager.training_services.kubernetes.api import Kubernetes
    from nni_manager.training_services.kubernetes.preflight import check

    training_service_factory.refuse_nameless_claim(config)
    training_service_factory.storage_here(config)
    operator = training_service_factory.operator_of(kubernetes)
    with contextlib.closing(Kubernetes(retry_policy=ClientRetryPolicy(tries=2))) as cluster:
        namespace = kubernetes.namespace or cluster.login.namespace
        warnings = check(cluster, operator, namespace, _share_problems(config))
        where = f"{operator.title} at {cluster.login.address}, in namespace {namespace}"
        return PlatformCheck(where, operator.warnings + warnings)


def _share_problems(config: ExperimentSpec) -> list[str]:
    """The problems of the share that jobs mount; empty: none."""
    from nni_manager import training_service_factory

    try:
        share = training_service_factory.share_of(
            config, Workspace(config.log_dir), ClientRetryPolicy(tries=2)
        )
        if share is not None:
            with contextlib.closing(share):
                share.check()
    except NniManagerError as error:
        return [str(error)]
    return []


def key_of(config: ExperimentSpec, key: str) -> str:
    """A key of NNI's first schema, as the file of this experiment writes it.

    A configuration in Python keeps the key: `to_python_names` translates it.
    """
    # Imported here: it takes 0.1 s, and other commands do not need it.
    from nni_manager.config.python_document import CALLED

    is_file_of_v2 = config.schema == "v2" and config.config_path.name != CALLED
    return _KEYS_OF_V2[key] if is_file_of_v2 else key


def check_command(config: ExperimentSpec) -> None:
    """Check that bash finds the first word of the trial's command, and that a script for Python is not misspelt.

    Skipped if the answer would be uncertain.

    Bash itself resolves the word, in the code folder and with the environment of trials, so aliases, functions and
    builtins count. Words that bash would expand are not checked.

    Raises:
        UserError: every trial would end with "command not found", or because its script is not there.
    """
    folder, where = (
        key_of(config, "trial.codeDir"),
        f"{key_of(config, 'trial.command')} in {config.config_path.name}",
    )
    _check_script(config, where, folder)
    match = _PLAIN_WORD.match(config.trial_command)
    if match is None:
        return
    word = match.group(1)
    # A command_not_found_handle may run any command.
    found = _bash('type -t -- "$1" || type -t command_not_found_handle', word, config)
    if found is None or found.returncode == 0 or found.stdout.strip():
        return
    path = config.code_dir / word
    if "/" in word:
        if not path.exists():
            raise UserError(
                f"cannot find the command {word!r} of {where}: {path} does not exist; fix the path, which is relative to {folder}"
            )
        if path.is_file() and not os.access(path, os.X_OK):
            raise UserError(
                f"cannot run the command {word!r} of {where}: {path} is not executable; run `chmod +x {path}`"
            )
        return
    commands = _bash("compgen -c", word, config)
    near = difflib.get_close_matches(word, sorted(set(commands.stdout.split())), n=1) if commands else []
    hint = f"did you mean {near[0]}?" if near else "install it, or write the full path"
    if word == "conda":
        hint = HOW_TO_USE_CONDA
    raise UserError(
        f"cannot find the command {word!r} of {where}: it is neither a program on PATH nor a builtin of bash; {hint}"
    )


def _check_script(config: ExperimentSpec, where: str, folder: str) -> None:
    # An absent script may still come to be, such as by an earlier part of the command; a similar name shows a slip.
    match = _PYTHON_SCRIPT.match(config.trial_command)
    path = config.code_dir / match.group(1) if match else None
    if path is None or path.exists() or not path.parent.is_dir():
        return
    near = difflib.get_close_matches(path.name, sorted(each.name for each in path.parent.glob("*.py")), n=1)
    if near:
        raise UserError(
            f"cannot find the script {path.name!r} of {where}: there is no file {path}; did you mean {near[0]}? The path is "
            f"relative to {folder}"
        )


def _bash(script: str, argument: str, config: ExperimentSpec) -> subprocess.CompletedProcess[str] | None:
    """The result of a bash script; None after a timeout."""
    try:
        return subprocess.run(
            ["bash", "-c", script, "bash", argument],
            cwd=config.code_dir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    except FileNotFoundError as error:
        raise UserError("cannot run trials on this machine: bash is not on PATH; install bash") from error
