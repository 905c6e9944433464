"""The kinds of resources in use, and their API paths."""

from __future__ import annotations

from trial_keeper.frozen_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of resource. `group` is empty for Kubernetes' core; `operator` is what must be installed for it.

    A resource outside namespaces is cluster-wide.
    """

    group: str
    version: str
    plural: str
    kind: str
    operator: str = ""
    is_in_namespace: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its documents."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """The API path of its group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str, name: str = "") -> str:
        """Returns the API path of a namespace's collection, or of one object."""
        inside = f"/namespaces/{namespace}" if self.is_in_namespace else ""
        return f"{self.root}{inside}/{self.plural}" + (f"/{name}" if name else "")


PODS = Resource("", "v1", "pods", "Pod")
SECRETS = Resource("", "v1", "secrets", "Secret")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_in_namespace=False)
EVENTS = Resource("", "v1", "events", "Event")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
LOCAL_QUEUES = Resource("kueue.x-k8s.io", "v1beta1", "localqueues", "LocalQueue", operator="Kueue")
