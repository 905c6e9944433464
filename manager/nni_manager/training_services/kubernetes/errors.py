"""Errors of calls to a Kubernetes cluster."""

from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.errors import Unauthenticated


class ClientMissing(UserError):
    """cannot use Kubernetes: its Python client is not installed; run `pip install 'trial-keeper[kubernetes]'`"""


class LoginInvalid(UserError):
    """cannot find out which Kubernetes cluster to use; set KUBECONFIG to your kubeconfig file"""


class CredentialsRejected(Unauthenticated):
    """cannot log in to Kubernetes; renew the login in your kubeconfig file"""


class ApiServerUnavailable(RetryableError):
    """cannot reach Kubernetes now; check that its API server runs and your kubeconfig file has its address"""


class Forbidden(UserError):
    """cannot do this on Kubernetes with this login; ask an administrator of the cluster for the right"""


class NotFound(UserError):
    """cannot find the object on Kubernetes; list the objects with kubectl"""


class AlreadyExists(UserError):
    """cannot make the object on Kubernetes: there is one of that name; remove it with kubectl"""


class RequestInvalid(UserError):
    """cannot do this on Kubernetes; fix what its answer names"""


class AnswerNotUnderstood(RequestInvalid):
    """cannot understand the answer: it is not one of a Kubernetes API server; correct your kubeconfig file"""


class Conflict(RetryableError):
    """cannot change the object on Kubernetes: others change it all the time; find out who does"""


class ResourceExpired(RetryableError):
    """cannot go on watching from there: Kubernetes has forgotten it; list the objects again"""


class MissingCapability(UserError):
    """cannot run the experiment on this cluster; fix what it lacks"""


class AzureMissing(UserError):
    """cannot use Azure's storage: its Python clients are not installed; run `pip install 'trial-keeper[azure]'`"""


class KeyUnreadable(UserError):
    """cannot read the key of the storage account; log in to Azure as somebody who may"""


class VaultUnavailable(RetryableError):
    """cannot reach the vault that has the key of the storage account; see to the network"""
