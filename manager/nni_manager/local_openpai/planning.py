"""Makes a job's plan from its text, with warnings for parts that have no meaning on one machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nni_manager.local_openpai.core.plan import JobPlan, RolePlan, StorageMount
from nni_manager.local_openpai.core.policies import CompletionPolicy, RetryPolicy
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.training_services.openpai.export import without_secrets
from nni_manager.training_services.openpai.plugins import TaskEnvironment
from nni_manager.training_services.openpai.protocol import JobProtocol, parse
from nni_manager.training_services.openpai.render import RenderedRole, render
from nni_manager.training_services.openpai.scalars import javascript_text

# Placeholder for a container's runtime folder. The scripts are rendered once per job.
RUNTIME_DIR = "/folder-of-this-container"
# The plugin would change the sshd and the keys of this machine, where all tasks run anyway.
_IGNORED_PLUGIN = "ssh"
# A shorter value would also mask unrelated text in logs.
_MIN_SECRET = 4


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job's plan, its text with the secrets masked, and warnings for its author."""

    plan: JobPlan
    masked_text: str
    warnings: tuple[str, ...]


def planned(user: str, text: str, default_storages: tuple[str, ...]) -> PlannedJob:
    """The plan of a job that this user submits.

    `default_storages` are for jobs that request storages without a name.

    Raises:
        ProtocolInvalid: the job is invalid; the error lists all problems.
    """
    protocol = parse(text)
    local = _without_ssh(protocol)
    rendered = render(local, TaskEnvironment(runtime_dir=RUNTIME_DIR))
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
    )
    warnings = [str(warning) for warning in rendered.warnings]
    if local is not protocol:
        warnings.append("the plugin ssh is ignored: all tasks run on this machine, as the same user")
    return PlannedJob(plan, without_secrets(protocol), tuple(warnings))


def _role(rendered: RenderedRole) -> RolePlan:
    role = rendered.role
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
        **asdict(rendered.scripts),
    )


def _without_ssh(protocol: JobProtocol) -> JobProtocol:
    calls = tuple(call for call in protocol.plugin_calls if call.plugin != _IGNORED_PLUGIN)
    prerequisites = tuple(
        replace(each, plugin_call=None)
        if each.plugin_call is not None and each.plugin_call.plugin == _IGNORED_PLUGIN
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
