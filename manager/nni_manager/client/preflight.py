"""What can be seen to be wrong before anything is started: ports, the trial's command, GPUs, a cluster and its job file."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nni_manager.client.experiments import known_experiments
from nni_manager.errors import NniManagerError, UserMistake

if TYPE_CHECKING:
    from nni_manager.config.model import ExperimentConfig, KubernetesConfig

HOST = "127.0.0.1"
DEFAULT_PORT = 8080
HIGHEST_PORT = 65534  # keepers use the next one
# A word that bash takes as it stands, followed by the end of the line or by arguments. What comes after it is not a
# parenthesis, or the word is the name of a function being defined.
_PLAIN_WORD = re.compile(r"[ \t\n]*([A-Za-z0-9_./+-]+)(?=$|[ \t\n](?![ \t]*\())")
# Start-up files that BASH_ENV names may take a while; a check must not.
_CHECK_WITHIN_S = 10.0


class PortTaken(UserMistake):
    """cannot use the port; choose another with --port N, or --port auto"""


class ClusterUnfit(UserMistake):
    """cannot run the experiment on this cluster; mend what it lacks"""


class CommandMissing(UserMistake):
    """cannot find the trial's command; mend trial.command"""


def check_ports(port: int, host: str = HOST, count: int = 2) -> None:
    """See that the manager can listen on `port` of `host`, and keepers find it on the next one; a view needs but the first.

    Raises:
        PortTaken: one of them cannot be used; the message says who has it, if that is one of our experiments.
    """
    for each in range(port, port + count):
        problem = _port_problem(each, host if each == port else HOST)
        if problem is None:
            continue
        for known in known_experiments():
            if known.view is not None and each == known.view.port:
                raise PortTaken(
                    f"cannot use port {each}: a view of experiment {known.experiment_id} is served there; "
                    f"end it with `nnictl stop --port {each}`, or choose another with --port N or --port auto"
                )
            if known.manager is not None and each in (known.manager.port, known.manager.port + 1):
                raise PortTaken(
                    f"cannot use port {each}: experiment {known.experiment_id} runs there; "
                    f"stop it with `nnictl stop {known.experiment_id}`, or choose another with --port N or --port auto"
                )
        which = "" if each == port else f" (keepers connect to the one after --port {port})"
        raise PortTaken(
            f"cannot use port {each}{which}: {problem}; choose another with --port N or --port auto"
        )


def free_ports(host: str = HOST) -> Iterator[int]:
    """Ports that are free now, and the next one with each: 8080, 8082, … Another program may still be quicker.

    Raises:
        PortTaken: after the last one.
    """
    for port in range(DEFAULT_PORT, HIGHEST_PORT, 2):
        if ports_are_free(port, host):
            yield port
    raise PortTaken(f"cannot find two free ports from {DEFAULT_PORT} on; stop some experiments")


def ports_are_free(port: int, host: str = HOST) -> bool:
    """Whether `port` and the next one can be used now."""
    return _port_problem(port, host) is None and _port_problem(port + 1, HOST) is None


def _port_problem(port: int, host: str) -> str | None:
    way_out = "write an address of this machine, or 0.0.0.0 for all it has"
    if not host.strip():
        raise UserMistake(f"cannot use --host {host!r}: it names no address; {way_out}")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the manager does: connections that are just closing do not keep it from listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except PermissionError:
            return "only root may use ports below 1024"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "another program uses it"
            raise UserMistake(f"cannot use --host {host}: {error.strerror}; {way_out}") from error
        except (TypeError, UnicodeError) as error:  # it is not even asked for
            raise UserMistake(f"cannot use --host {host}: no machine has such a name; {way_out}") from error
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """Where trials run, in words (empty: on this machine), and what else the user should know of it."""

    where: str = ""
    warnings: tuple[str, ...] = ()


def check_platform(config: ExperimentConfig) -> Place:
    """See that trials can run where the experiment file wants them.

    Raises:
        GpusMissing, CommandMissing: not on this machine.
        UserMistake, TryAgain: not on the cluster.
    """
    if config.kubernetes is not None:
        return check_kubernetes(config, config.kubernetes)
    if config.pai is not None:
        return check_cluster(config)
    check_gpus(config)
    check_command(config)
    return Place()


def check_cluster(config: ExperimentConfig) -> Place:
    """See that OpenPAI lets this user in and has what jobs ask for. Starts the one of this machine, if that is meant.

    Raises:
        ProtocolInvalid: the job file cannot be used.
        ClusterUnfit: there is no such storage or virtual cluster.
        UserMistake, TryAgain: OpenPAI cannot be asked.
    """
    from nni_manager import services
    from nni_manager.training_services.openpai.job import template_of
    from nni_manager.training_services.patience import Patience

    assert config.pai is not None
    template = template_of(config.pai)
    cluster = services.open_cluster(config.pai, template, Patience(tries=2))
    owner = cluster.user_of_token()
    if owner not in (None, cluster.user):
        # Its jobs would be another one's, and never found again.
        raise ClusterUnfit(
            f"cannot use paiConfig.userName {cluster.user} of {config.config_path.name}: the token is {owner}'s; write "
            f"userName: {owner}, or a token of {cluster.user}"
        )
    wanted = {
        "storage": tuple(storage.name for storage in template.storages),
        "virtual cluster": (template.virtual_cluster,),
    }
    there = {"storage": cluster.storages(), "virtual cluster": cluster.virtual_clusters()}
    for what, names in wanted.items():
        for name in names:
            if name not in there[what]:
                known = ", ".join(there[what]) or "none"
                raise ClusterUnfit(
                    f"cannot run jobs on OpenPAI at {cluster.address}: there is no {what} {name!r} that {cluster.user} may "
                    f"use; correct it in {config.config_path.name} (known: {known})"
                )
    return Place(f"OpenPAI at {cluster.address}, as {cluster.user}", template.warnings)


def check_kubernetes(config: ExperimentConfig, kubernetes: KubernetesConfig) -> Place:
    """See that Kubernetes lets this user in and has what jobs ask for.

    Raises:
        ClusterLacks: it has not; with all that is missing.
        NotMounted: this machine does not have the storage.
        UserMistake, TryAgain: this version does not run such jobs, or Kubernetes cannot be asked.
    """
    from nni_manager import services
    from nni_manager.training_services.kubernetes.api import Kubernetes
    from nni_manager.training_services.kubernetes.preflight import check, needs_of
    from nni_manager.training_services.patience import Patience

    services.refuse_nameless_claim(config)
    services.storage_here(config)
    operator = services.operator_of(kubernetes)
    with contextlib.closing(Kubernetes(patience=Patience(tries=2))) as cluster:
        namespace = kubernetes.namespace or cluster.namespace
        warnings = check(cluster, needs_of(operator, namespace), _lacks_of_share(config))
        where = f"{operator.title} at {cluster.address}, in namespace {namespace}"
        return Place(where, operator.warnings + warnings)


def _lacks_of_share(config: ExperimentConfig) -> list[str]:
    """What is missing for the share that jobs mount."""
    from nni_manager import services
    from nni_manager.training_services.patience import Patience
    from trial_keeper.wire.workspace import Workspace

    try:
        share = services.share_of(config, Workspace(config.log_dir), Patience(tries=2))
        if share is not None:
            with contextlib.closing(share):
                share.check()
    except NniManagerError as error:
        return [str(error)]
    return []


def check_command(config: ExperimentConfig) -> None:
    """See that bash finds the first word of the trial's command, where that can be told for sure.

    Bash itself is asked, in the code folder and with the environment trials inherit, so that aliases, functions and
    builtins count. Words with anything bash would expand are left to it.

    Raises:
        CommandMissing: every trial would end with "command not found".
    """
    match = _PLAIN_WORD.match(config.trial_command)
    if match is None:
        return
    word = match.group(1)
    # A handler of unknown commands may make anything run.
    found = _bash('type -t -- "$1" || type -t command_not_found_handle', word, config)
    if found is None or found.returncode == 0 or found.stdout.strip():
        return
    where = f"trial.command in {config.config_path.name}"
    path = config.code_dir / word
    if "/" in word:
        if not path.exists():
            raise CommandMissing(
                f"cannot find the command {word!r} of {where}: there is no {path}; mend the path (it starts from codeDir)"
            )
        if path.is_file() and not os.access(path, os.X_OK):
            raise CommandMissing(
                f"cannot run the command {word!r} of {where}: {path} is not executable; `chmod +x {path}` makes it so"
            )
        return
    commands = _bash("compgen -c", word, config)
    near = difflib.get_close_matches(word, sorted(set(commands.stdout.split())), n=1) if commands else []
    hint = f"did you mean {near[0]}?" if near else "install it, or write the full path"
    raise CommandMissing(
        f"cannot find the command {word!r} of {where}: it is no program on PATH, and bash knows no such builtin; {hint}"
    )


def _bash(script: str, argument: str, config: ExperimentConfig) -> subprocess.CompletedProcess[str] | None:
    """The answer of bash; None when it gave none, and nothing can be said for sure."""
    try:
        return subprocess.run(
            ["bash", "-c", script, "bash", argument],
            cwd=config.code_dir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    except FileNotFoundError as error:
        raise CommandMissing(
            "cannot run trials on this machine: there is no bash on PATH; install bash"
        ) from error


def check_gpus(config: ExperimentConfig) -> None:
    """See that this machine has the GPUs trials ask for.

    Raises:
        GpusMissing: it has not.
    """
    from nni_manager.training_services.local.gpus import GpuShares, gpus_of_this_machine

    GpuShares.of(config.local, config.gpu_num, gpus_of_this_machine())
