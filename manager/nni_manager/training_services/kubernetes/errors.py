"""Errors of calls to a Kubernetes cluster."""

from nni_manager.errors import RetryableError, UserError


class Forbidden(UserError):
    """cannot access the Kubernetes object: the login lacks the right; ask an administrator of the cluster for the right"""


class NotFound(UserError):
    """cannot find the object on Kubernetes; list the objects with kubectl"""


class NotServed(NotFound):
    """cannot find this path on Kubernetes; check the server's address, and list the served kinds with `kubectl api-resources`"""


class AlreadyExists(UserError):
    """cannot create the Kubernetes object: the name is in use; delete the existing object with kubectl"""


class RequestInvalid(UserError):
    """cannot complete the request: Kubernetes rejects it; fix the fields that its answer names"""


class Conflict(RetryableError):
    """cannot change the Kubernetes object: other clients change it repeatedly; find and stop these clients"""


class ResourceExpired(RetryableError):
    """cannot resume the watch: Kubernetes no longer has that resource version; list the objects again"""
