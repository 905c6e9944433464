"""Reports everything that a cluster lacks for an experiment, before any object is created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nni_manager.errors import UserError
from nni_manager.training_services.kubernetes import resources
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.errors import Forbidden, NotFound
from nni_manager.training_services.kubernetes.operator import Operator
from nni_manager.training_services.kubernetes.section import ClaimStorage


def check(
    cluster: Kubernetes, operator: Operator, namespace: str, others: Sequence[str] = ()
) -> tuple[str, ...]:
    """Check that the cluster has all that an operator's jobs need. Returns warnings about optional capabilities that it lacks.

    `others`: further missing requirements, which the caller has found.

    Raises:
        UserError: lists everything that is missing, a line each.
        ClusterUnavailable, Unauthenticated: the cluster cannot be queried.
    """
    missing = [*_missing(cluster, operator, namespace), *others]
    if missing:
        lines = "\n".join(f"  {each}" for each in missing)
        raise UserError(f"cannot run the experiment on {cluster.login.address}:\n{lines}")
    if all(cluster.allows(verb, resources.EVENTS, namespace) for verb in ("list", "watch")):
        return ()
    return (
        f"this login may not list and watch events in namespace {namespace}: some reasons of pending "
        "pods, e.g. a failed mount, are not shown; ask an administrator of the cluster for the right",
    )


def _missing(cluster: Kubernetes, operator: Operator, namespace: str) -> Iterator[str]:
    jobs, fields = operator.resource, operator.required_fields
    if not cluster.serves(jobs):
        yield _unserved(cluster, jobs, names_version=operator.config.api_version is not None)
    elif fields and (known := cluster.spec_fields(jobs)) and not known & set(fields):
        yield f"its {jobs.operator} is too old: {jobs.plural} have no {' or '.join(fields)}; upgrade it"
    elif (first := operator.first_server) and (version := cluster.version()) and version < first:
        # It would drop what it does not know: no task of a job would get its index.
        needed, found = (".".join(map(str, each)) for each in (first, version))
        yield f"Kubernetes {found} is too old: {jobs.plural} of trials need {needed}; upgrade it, or use another operator"
    if not _may_exist(cluster, resources.NAMESPACES, "", namespace):
        yield f"namespace {namespace} does not exist; correct the name, or create the namespace with kubectl"
        return
    verbs = {
        jobs: ("create", "get", "list", "watch", "delete"),
        resources.PODS: ("list", "watch"),
        resources.SECRETS: ("create", "get"),
    }
    for resource, verb in ((resource, verb) for resource, each in verbs.items() for verb in each):
        if not cluster.allows(verb, resource, namespace):
            yield (
                f"this login may not {verb} {resource.plural} in namespace {namespace}; "
                "ask an administrator of the cluster for the right"
            )
    for wanted, name in _required_objects(operator):
        resource = wanted
        if wanted.operator:
            # Any served version will do: these objects are only read.
            served = _served(cluster, wanted)
            if not served:
                yield _unserved(cluster, wanted)
                continue
            resource = wanted if wanted.version in served else replace(wanted, version=served[0])
        if not _may_exist(cluster, resource, namespace, name):
            where = f" in namespace {namespace}" if resource.is_in_namespace else ""
            yield f"{resource.kind} {name} does not exist{where}; correct the name, or create the object with kubectl"


def _required_objects(operator: Operator) -> Iterator[tuple[resources.Resource, str]]:
    yield from operator.required_objects
    storage, account = operator.config.storage, operator.config.service_account
    if isinstance(storage, ClaimStorage) and storage.name:
        yield resources.CLAIMS, storage.name
    if account is not None:
        yield resources.SERVICE_ACCOUNTS, account


def _may_exist(cluster: Kubernetes, resource: resources.Resource, namespace: str, name: str) -> bool:
    """False if the object does not exist. The right to use an object does not include the right to read it."""
    try:
        cluster.get(resource, namespace, name)
    except NotFound:
        return False
    except Forbidden:
        pass  # the cluster reports a missing object at submission
    return True


def _served(cluster: Kubernetes, resource: resources.Resource) -> list[str]:
    """Returns the versions that serve this kind. The group may have further versions for other kinds."""
    versions = cluster.served_versions(resource.group)
    return [each for each in versions if cluster.serves(replace(resource, version=each))]


def _unserved(cluster: Kubernetes, jobs: resources.Resource, *, names_version: bool = False) -> str:
    served = _served(cluster, jobs)
    if not served:
        return f"it does not serve {jobs.plural}.{jobs.group}; install {jobs.operator} there"
    versions = ", ".join(served)
    remedy = f"write apiVersion: {served[0]}, or " if names_version else ""
    return (
        f"it does not serve {jobs.plural} of {jobs.api_version} (served: {versions}); {remedy}install {jobs.operator} for "
        f"{jobs.version}"
    )
