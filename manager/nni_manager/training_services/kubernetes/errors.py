"""What a Kubernetes cluster can answer in place of what it was asked for."""

from nni_manager.errors import TryAgain, UserMistake


class ClientMissing(UserMistake):
    """cannot use Kubernetes: its Python client is not installed; run `pip install 'trial-keeper[kubernetes]'`"""


class LoginInvalid(UserMistake):
    """cannot find out which Kubernetes cluster to use; set KUBECONFIG to your kubeconfig file"""


class LoginRefused(TryAgain):
    """cannot log in to Kubernetes; renew the login in your kubeconfig file"""


class ClusterAway(TryAgain):
    """cannot reach Kubernetes now; see that its API server runs and your kubeconfig file has its address"""


class Forbidden(UserMistake):
    """cannot do this on Kubernetes with this login; ask an administrator of the cluster for the right"""


class NotThere(UserMistake):
    """cannot find the object on Kubernetes; see what there is with kubectl"""


class AlreadyThere(UserMistake):
    """cannot make the object on Kubernetes: there is one of that name; remove it with kubectl"""


class Refused(UserMistake):
    """cannot do this on Kubernetes; mend what its answer names"""


class Conflict(TryAgain):
    """cannot change the object on Kubernetes: others change it all the time; see who does"""


class HistoryGone(TryAgain):
    """cannot go on watching from there: Kubernetes has forgotten it; list the objects again"""


class ClusterLacks(UserMistake):
    """cannot run the experiment on this cluster; mend what it lacks"""


class AzureMissing(UserMistake):
    """cannot use Azure's storage: its Python clients are not installed; run `pip install 'trial-keeper[azure]'`"""


class KeyUnreadable(UserMistake):
    """cannot read the key of the storage account; log in to Azure as somebody who may"""


class VaultAway(TryAgain):
    """cannot reach the vault that has the key of the storage account; see to the network"""
