"""Errors of calls to a Kubernetes cluster."""

from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.errors import Unauthenticated


class CredentialsRejected(Unauthenticated):
    """cannot log in to Kubernetes; renew the login in your kubeconfig file"""


class ApiServerUnavailable(RetryableError):
    """cannot reach Kubernetes now; check that its API server runs and your kubeconfig file has its address"""


class Forbidden(UserError):
    """cannot access the Kubernetes object: the login lacks the right; ask an administrator of the cluster for the right"""


class NotFound(UserError):
    """cannot find the object on Kubernetes; list the objects with kubectl"""


class AlreadyExists(UserError):
    """cannot create the Kubernetes object: the name is in use; delete the existing object with kubectl"""


class RequestInvalid(UserError):
    """cannot complete the request: Kubernetes rejects it; fix the fields that its answer names"""


class Conflict(RetryableError):
    """cannot change the Kubernetes object: other clients change it repeatedly; find and stop these clients"""


class ResourceExpired(RetryableError):
    """cannot resume the watch: Kubernetes no longer has that resource version; list the objects again"""
