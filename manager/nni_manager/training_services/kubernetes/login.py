"""The login to a cluster: from a kubeconfig file, or the service account of this process's pod.

Source: kubectl's rules, in their order; NNI for KUBECONFIG and ~/.kube/config.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nni_manager.errors import UserError
from trial_keeper import __version__
from trial_keeper.frozen_dataclass import dataclass

_USUAL = Path("~/.kube/config")
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Login:
    """A login of the official client. `where` is its source, for people; `namespace` is the login's default."""

    client: Any
    namespace: str
    where: str
    address: str


def log_in(kubeconfig: Path | None = None) -> Login:
    """Returns the login of `kubeconfig`. None: that of KUBECONFIG, ~/.kube/config, or this process's pod.

    Raises:
        UserError: no usable login, or the extra is not installed.
    """
    try:
        # The import takes half a second, so it is lazy.
        import yaml
        from kubernetes import client, config
    except ImportError as error:
        raise UserError(
            "cannot use Kubernetes: its Python client is not installed; run `pip install 'trial-keeper[kubernetes]'`"
        ) from error
    settings = client.Configuration()
    # Our retry policy decides about retries.
    settings.retries = False
    files = str(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG", "")
    usual = _USUAL.expanduser()
    if not files and not usual.exists() and os.environ.get("KUBERNETES_SERVICE_HOST"):
        try:
            config.load_incluster_config(client_configuration=settings)
            namespace = _OWN_NAMESPACE.read_text().strip()
        except (config.ConfigException, OSError) as error:
            raise UserError(
                f"cannot use the service account of this pod: {error}; give the pod a service account, or set KUBECONFIG"
            ) from error
        return _login(client, settings, namespace, "the service account of this pod")
    files = files or str(usual)
    if not any(each and Path(each).expanduser().exists() for each in files.split(os.pathsep)):
        # The client would call the missing file invalid.
        raise UserError(
            f"cannot log in to Kubernetes: file {files} does not exist; ask the cluster's administrator for the file, and "
            "save it there or set KUBECONFIG to its path"
        )
    try:
        _, context = config.list_kube_config_contexts(files)
        config.load_kube_config(files, client_configuration=settings, persist_config=False)
    except (config.ConfigException, OSError, yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"cannot use the kubeconfig file {files}: {reason}; fix the file, or set KUBECONFIG to another file"
        ) from error
    return _login(client, settings, (context.get("context") or {}).get("namespace") or "default", files)


def _login(client: Any, settings: Any, namespace: str, where: str) -> Login:
    made = client.ApiClient(settings)
    made.user_agent = f"trial-keeper/{__version__}"  # replaces a header of the same name in each call
    return Login(made, namespace, where, str(settings.host))
