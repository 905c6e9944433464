"""The kinds of objects that are of interest here, and where they are served."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of objects. `group` is empty for those of Kubernetes' core; `operator` is who has to be installed for it.

    Those that are not in a namespace are the whole cluster's.
    """

    group: str
    version: str
    plural: str
    kind: str
    operator: str = ""
    is_in_namespace: bool = True

    @property
    def api_version(self) -> str:
        """As documents name it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """The path below which its group and version are served."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str, name: str = "") -> str:
        """Where all of a namespace are, or one of them."""
        inside = f"/namespaces/{namespace}" if self.is_in_namespace else ""
        return f"{self.root}{inside}/{self.plural}" + (f"/{name}" if name else "")


PODS = Resource("", "v1", "pods", "Pod")
SECRETS = Resource("", "v1", "secrets", "Secret")
EVENTS = Resource("", "v1", "events", "Event")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
LOCAL_QUEUES = Resource("kueue.x-k8s.io", "v1beta1", "localqueues", "LocalQueue", operator="Kueue")
