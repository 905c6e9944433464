"""Reports everything that a cluster lacks for an experiment, before any object is created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nni_manager.config.model import ClaimStorage
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.errors import Forbidden, MissingCapability, NotFound
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
    """What jobs need: a kind of resource, rights (verbs on resources), and existing objects by name (`things`).

    `names_version`: the experiment file sets the version of the jobs' resource. `required_fields`: any one of these spec fields.
    """

    namespace: str
    jobs: Resource
    rights: tuple[tuple[str, Resource], ...]
    things: tuple[tuple[Resource, str], ...] = ()
    names_version: bool = False
    required_fields: tuple[str, ...] = ()


def needs_of(operator: Operator, namespace: str) -> Needs:
    """Returns what the jobs of an experiment need."""
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
    return Needs(namespace, operator.resource, rights, tuple(things), names_version, operator.required_fields)


def check(cluster: Kubernetes, needs: Needs, others: Sequence[str] = ()) -> tuple[str, ...]:
    """Check the cluster against all needs. Returns warnings about optional capabilities that it lacks.

    `others`: needs that are known to be missing elsewhere.

    Raises:
        MissingCapability: lists everything that is missing, a line each.
        ApiServerUnavailable, CredentialsRejected: the cluster cannot be queried.
    """
    missing = [*_missing(cluster, needs), *others]
    if missing:
        lines = "\n".join(f"  {each}" for each in missing)
        raise MissingCapability(f"cannot run the experiment on {cluster.address}:\n{lines}")
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
    elif (
        needs.required_fields
        and (known := cluster.spec_fields(needs.jobs))
        and not known & set(needs.required_fields)
    ):
        missing.append(
            f"its {needs.jobs.operator} is too old: {needs.jobs.plural} have no {' or '.join(needs.required_fields)}; "
            "have it upgraded"
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
            # Any served version will do: these objects are only read.
            served = _served(cluster, wanted)
            if not served:
                missing.append(_unserved(cluster, wanted))
                continue
            resource = wanted if wanted.version in served else replace(wanted, version=served[0])
        try:
            cluster.get(resource, needs.namespace, name)
        except NotFound:
            where = f" in namespace {needs.namespace}" if resource.is_in_namespace else ""
            missing.append(f"there is no {resource.kind} {name}{where}; correct it, or make it with kubectl")
        except Forbidden:
            pass  # if the object is missing, the cluster reports it at submission
    return missing


def _has_namespace(cluster: Kubernetes, namespace: str) -> bool:
    try:
        return cluster.has_namespace(namespace)
    except Forbidden:
        return True  # the right to use a namespace does not include the right to read it


def _served(cluster: Kubernetes, resource: Resource) -> list[str]:
    """Returns the versions that serve this kind. The group may have further versions for other kinds."""
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
