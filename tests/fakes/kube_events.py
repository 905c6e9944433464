"""Events: what controllers, the scheduler and nodes report about an object, as `kubectl describe` shows it."""

import uuid

from kube_store import EVENTS, now


def tell(store, about, reason, message, component="kubelet", kind="Warning"):
    """Create an event of an object. Source: events.k8s.io and core/v1 Event, as client-go's recorders
    write them.
    """
    meta, at = about["metadata"], now()
    involved = {key: meta[key] for key in ("namespace", "name", "uid")}
    return store.create(
        *(EVENTS, meta["namespace"]),
        {
            "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:16]}"},
            "involvedObject": {"apiVersion": about["apiVersion"], "kind": about["kind"], **involved},
            "type": kind,
            "reason": reason,
            "message": message,
            "count": 1,
            "source": {"component": component},
            "reportingComponent": component,
            "firstTimestamp": at,
            "lastTimestamp": at,
        },
    )
