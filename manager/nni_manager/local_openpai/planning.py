"""Makes a job's plan from its text, with warnings for parts that have no meaning on one machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nni_manager.config.diagnostics import key_of
from nni_manager.local_openpai.core.plan import JobPlan, RolePlan, SshKeyPair, StorageMount
from nni_manager.local_openpai.core.policies import CompletionPolicy, RetryPolicy
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.training_services.openpai.export import without_secrets
from nni_manager.training_services.openpai.job_checks import ProtocolInvalid
from nni_manager.training_services.openpai.plugins import TaskEnvironment, is_on
from nni_manager.training_services.openpai.protocol import JobProtocol, parse
from nni_manager.training_services.openpai.render import RenderedRole, render
from nni_manager.training_services.openpai.scalars import javascript_text
from trial_keeper.frozen_dataclass import dataclass

# Placeholder for a container's runtime folder. The scripts are rendered once per job.
RUNTIME_DIR = "/folder-of-this-container"
_SSH = "ssh"
# A shorter value would also mask unrelated text in logs.
_MIN_SECRET = 4


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job's plan, its text with the secrets masked, and warnings for its author."""

    plan: JobPlan
    masked_text: str
    warnings: tuple[str, ...]


def planned(
    user: str, text: str, default_storages: tuple[str, ...], host_ip: str, no_ssh: str | None = None
) -> PlannedJob:
    """The plan of a job that this user submits.

    `default_storages` are for jobs that request storages without a name. Each task's sshd listens at `host_ip`; `no_ssh` is why
    tasks cannot run sshd here.

    Raises:
        ProtocolInvalid: the job is invalid, or needs ssh between its tasks where there is none; the error lists all problems.
    """
    protocol = parse(text)
    local = protocol if no_ssh is None else _without_ssh(protocol, no_ssh)
    rendered = render(local, TaskEnvironment(runtime_dir=RUNTIME_DIR, sshd_address=host_ip))
    runs_sshd = any(role.scripts.runs_sshd for role in rendered.roles)
    framework_name = f"{user}~{protocol.name}"
    plan = JobPlan(
        user=user,
        name=protocol.name,
        debug_id=hashlib.md5(framework_name.encode(), usedforsecurity=False).hexdigest(),
        virtual_cluster=protocol.virtual_cluster,
        priority=_priority(protocol.extras),
        is_gang=protocol.gang_allocation,
        job_retry=RetryPolicy(True, protocol.job_retry_count),
        task_retry={
            role.name: RetryPolicy(False, 0)
            if protocol.gang_allocation
            else RetryPolicy(True, max(0, role.task_retry_count))
            for role in protocol.task_roles
        },
        roles=tuple(map(_role, rendered.roles)),
        storages=_storages(protocol, default_storages),
        tells=protocol.notify_of,
        secrets=tuple(dict.fromkeys(_texts(protocol.secrets))),
        ssh_keys=_new_ssh_keys() if runs_sshd else None,
    )
    warnings = [str(warning) for warning in rendered.warnings]
    if local is not protocol:
        warnings.append(f"the plugin ssh is ignored: {no_ssh}")
    return PlannedJob(plan, without_secrets(protocol), tuple(warnings))


def _role(rendered: RenderedRole) -> RolePlan:
    role, scripts = rendered.role, rendered.scripts
    return RolePlan(
        name=role.name,
        mangled_name=role.mangled_name,
        tasks=role.instances,
        # OpenPAI accepts negative counts, which would increase the available resources.
        need=ResourceCounts(
            max(0, role.resources.cpu), max(0, role.resources.memory_mb), max(0, role.resources.gpu)
        ),
        shm_mb=role.resources.shm_mb or 0,
        ports=dict(role.resources.ports),
        completion=CompletionPolicy(role.completion.min_failed, role.completion.min_succeeded),
        image=rendered.image,
        image_auth=None if rendered.image_auth is None else dict(rendered.image_auth),
        init=tuple(scripts.init),
        pre=tuple(scripts.pre),
        user=scripts.user,
        post=tuple(scripts.post),
        runs_sshd=scripts.runs_sshd,
    )


def _new_ssh_keys() -> SshKeyPair:
    from cryptography.hazmat.primitives import serialization  # takes 60 ms, and few jobs need it
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return SshKeyPair(private.decode(), f"{public.decode()}\n")


def _without_ssh(protocol: JobProtocol, why: str) -> JobProtocol:
    """The job without the plugin ssh, if its tasks do not need to reach each other."""
    plugins = (*protocol.plugin_calls, *(each.plugin_call for each in protocol.prerequisites))
    between_tasks = protocol.gang_allocation and sum(role.instances for role in protocol.task_roles) > 1
    for call in plugins:
        if (
            between_tasks
            and call is not None
            and call.plugin == _SSH
            and is_on(call.parameters.get("jobssh"))
        ):
            problem = f"{key_of(call.path)} needs ssh between tasks: {why}"
            raise ProtocolInvalid([protocol.document.diagnostic(call.path, problem)])
    calls = tuple(call for call in protocol.plugin_calls if call.plugin != _SSH)
    prerequisites = tuple(
        replace(each, plugin_call=None)
        if each.plugin_call is not None and each.plugin_call.plugin == _SSH
        else each
        for each in protocol.prerequisites
    )
    if calls == protocol.plugin_calls and prerequisites == protocol.prerequisites:
        return protocol
    return replace(protocol, plugin_calls=calls, prerequisites=prerequisites)


def _storages(protocol: JobProtocol, default_storages: tuple[str, ...]) -> tuple[StorageMount, ...]:
    if protocol.storages is None:
        return ()
    if not protocol.storages:
        return tuple(StorageMount(name, f"/mnt/{name}") for name in default_storages)
    return tuple(StorageMount(each.name, each.mount_path) for each in protocol.storages)


def _priority(extras: Mapping[str, Any]) -> str | None:
    scheduler = extras.get("hivedScheduler")
    priority = scheduler.get("jobPriorityClass") if isinstance(scheduler, dict) else None
    return priority if isinstance(priority, str) else None


def _texts(value: Any) -> Iterator[str]:
    """The text forms of secrets, as templates write them into logs."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif value is not None and not isinstance(value, bool):
        for text in (javascript_text(value), str(value)):
            if len(text) >= _MIN_SECRET:
                yield text
