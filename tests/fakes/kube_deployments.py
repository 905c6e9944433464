"""Deployments, and the other kinds of deploy/kubernetes, which the fake API server stores only for tests that need them."""

import copy
import uuid

from kube_controllers import STEPS
from kube_operators import owner_of, pods_of
from kube_store import PODS, Kind

DEPLOYMENTS = Kind("apps", "v1", "deployments", "Deployment")
_KINDS = (
    Kind("rbac.authorization.k8s.io", "v1", "roles", "Role", has_status=False),
    Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding", has_status=False),
    DEPLOYMENTS,
    Kind("", "v1", "services", "Service"),
    Kind("networking.k8s.io", "v1", "ingresses", "Ingress"),
)


def serve(store):
    """Let the fake server store the kinds, and its controllers start the pods of Deployments."""
    for kind in _KINDS:
        store.kinds[kind.group, kind.plural] = kind
        store._objects[kind] = {}
    STEPS[DEPLOYMENTS.group, DEPLOYMENTS.plural] = _step


def _step(store, kind, found):
    """Keep `replicas` pods, as with the strategy Recreate.

    Ended pods are replaced, because the kubelet of the tests runs each container only once. The fake creates no ReplicaSets.
    """
    meta, spec = found["metadata"], found["spec"]
    if "deletionTimestamp" in meta:
        return
    pods = pods_of(store, found)
    for pod in pods:
        if pod["status"]["phase"] in ("Succeeded", "Failed"):
            store.delete(PODS, meta["namespace"], pod["metadata"]["name"])
    for _ in range(spec["replicas"] - len(pods)):
        template = copy.deepcopy(spec["template"])
        template["metadata"] |= {
            "name": f"{meta['name']}-{uuid.uuid4().hex[:5]}",
            "ownerReferences": [owner_of(found)],
        }
        store.create(PODS, meta["namespace"], template)
