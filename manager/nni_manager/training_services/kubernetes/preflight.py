"""What a cluster lacks for an experiment, all of it at once, before anything is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nni_manager.config.model import ClaimStorage
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.errors import ClusterLacks, Forbidden, NotThere
from nni_manager.training_services.kubernetes.operator import Operator
from nni_manager.training_services.kubernetes.resources import (
    CLAIMS,
    EVENTS,
    PODS,
    SECRETS,
    SERVICE_ACCOUNTS,
    Resource,
)


@dataclass(frozen=True, slots=True)
class Needs:
    """What jobs need: a kind of objects, rights (verbs on resources), and things that have to be there, by name.

    `names_version`: the version of the jobs' resource is one that users write. `some_of`: fields of their spec; one will do.
    """

    namespace: str
    jobs: Resource
    rights: tuple[tuple[str, Resource], ...]
    things: tuple[tuple[Resource, str], ...] = ()
    names_version: bool = False
    some_of: tuple[str, ...] = ()


def needs_of(operator: Operator, namespace: str) -> Needs:
    """What the jobs of an experiment need."""
    config = operator.config
    verbs = {
        operator.resource: ("create", "get", "list", "watch", "delete"),
        PODS: ("list", "watch"),
        SECRETS: ("create", "get"),
    }
    rights = tuple((verb, resource) for resource, each in verbs.items() for verb in each)
    storage = config.storage
    things = list(operator.things)
    if isinstance(storage, ClaimStorage) and storage.name:
        things.append((CLAIMS, storage.name))
    if config.service_account is not None:
        things.append((SERVICE_ACCOUNTS, config.service_account))
    names_version = config.api_version is not None
    return Needs(namespace, operator.resource, rights, tuple(things), names_version, operator.some_of)


def check(cluster: Kubernetes, needs: Needs, others: Sequence[str] = ()) -> tuple[str, ...]:
    """See that the cluster has it all; what users should know of what it has not, and that can be done without.

    `others` is what is missing elsewhere.

    Raises:
        ClusterLacks: it does not; names everything that is missing, a line each.
        ClusterAway, LoginRefused: it cannot be asked.
    """
    missing = [*_missing(cluster, needs), *others]
    if missing:
        lines = "\n".join(f"  {each}" for each in missing)
        raise ClusterLacks(f"cannot run the experiment on {cluster.address}:\n{lines}")
    if all(cluster.allows(verb, EVENTS, needs.namespace) for verb in ("list", "watch")):
        return ()
    return (
        f"this login may not list and watch events in namespace {needs.namespace}: of a pod that does not start you are told "
        "what is in its status, and no more, e.g. not that a mount fails; ask an administrator of the cluster for the right",
    )


def _missing(cluster: Kubernetes, needs: Needs) -> list[str]:
    missing = []
    if not cluster.serves(needs.jobs):
        missing.append(_unserved(cluster, needs.jobs, names_version=needs.names_version))
    elif needs.some_of and (known := cluster.spec_fields(needs.jobs)) and not known & set(needs.some_of):
        missing.append(
            f"its {needs.jobs.operator} is too old: {needs.jobs.plural} have no {' or '.join(needs.some_of)}; have it upgraded"
        )
    if not _has_namespace(cluster, needs.namespace):
        return [*missing, f"there is no namespace {needs.namespace}; correct it, or make it with kubectl"]
    for verb, resource in needs.rights:
        if not cluster.allows(verb, resource, needs.namespace):
            missing.append(
                f"this login may not {verb} {resource.plural} in namespace {needs.namespace}; "
                "ask an administrator of the cluster for the right"
            )
    for wanted, name in needs.things:
        resource = wanted
        if wanted.operator:
            # Which version of another's objects it is does not matter: they are only asked for.
            served = _served(cluster, wanted)
            if not served:
                missing.append(_unserved(cluster, wanted))
                continue
            resource = wanted if wanted.version in served else replace(wanted, version=served[0])
        try:
            cluster.get(resource, needs.namespace, name)
        except NotThere:
            where = f" in namespace {needs.namespace}" if resource.is_in_namespace else ""
            missing.append(f"there is no {resource.kind} {name}{where}; correct it, or make it with kubectl")
        except Forbidden:
            pass  # the cluster will say so of the job, if it is missing
    return missing


def _has_namespace(cluster: Kubernetes, namespace: str) -> bool:
    try:
        return cluster.has_namespace(namespace)
    except Forbidden:
        return True  # whoever may only use a namespace need not be allowed to read it


def _served(cluster: Kubernetes, resource: Resource) -> list[str]:
    """In which versions: its group may have others for other kinds."""
    versions = cluster.served_versions(resource.group)
    return [each for each in versions if cluster.serves(replace(resource, version=each))]


def _unserved(cluster: Kubernetes, jobs: Resource, *, names_version: bool = False) -> str:
    served = _served(cluster, jobs)
    if not served:
        return f"it has no {jobs.plural}.{jobs.group}; install {jobs.operator} there"
    versions = ", ".join(served)
    remedy = f"write apiVersion: {served[0]}, or " if names_version else ""
    return (
        f"it has no {jobs.plural} of {jobs.api_version} (served: {versions}); {remedy}install {jobs.operator} for "
        f"{jobs.version}"
    )
