"""Which cluster, and as whom: a kubeconfig file, or the service account of the pod that this process runs in.

Source: kubectl's rules, in their order; NNI for KUBECONFIG and ~/.kube/config.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nni_manager.training_services.kubernetes.errors import ClientMissing, LoginInvalid

_USUAL = Path("~/.kube/config")
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Login:
    """What the official client needs to make calls. `where` names it for people; `namespace` is that of the login."""

    client: Any
    namespace: str
    where: str
    address: str


def log_in(kubeconfig: Path | None = None) -> Login:
    """The login that the file holds; without one, that of KUBECONFIG, ~/.kube/config, or of the pod that this process runs in.

    Raises:
        ClientMissing: the extra is not installed.
        LoginInvalid: there is none, or it cannot be used.
    """
    try:
        # Takes half a second, which only those pay who use it.
        import yaml
        from kubernetes import client, config
    except ImportError as error:
        raise ClientMissing from error
    settings = client.Configuration()
    # Whether and when a call is made again is ours to say.
    settings.retries = False
    files = str(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG", "")
    usual = _USUAL.expanduser()
    if not files and not usual.exists() and os.environ.get("KUBERNETES_SERVICE_HOST"):
        try:
            config.load_incluster_config(client_configuration=settings)
            namespace = _OWN_NAMESPACE.read_text().strip()
        except (config.ConfigException, OSError) as error:
            raise LoginInvalid(
                f"cannot use the service account of this pod: {error}; let the pod have one, or set KUBECONFIG"
            ) from error
        return _login(client, settings, namespace, "the service account of this pod")
    files = files or str(usual)
    if not any(each and Path(each).expanduser().exists() for each in files.split(os.pathsep)):
        # The client's own word for it is that it is invalid.
        raise LoginInvalid(
            f"cannot log in to Kubernetes: there is no {files}; ask whoever runs the cluster for a kubeconfig file, and put it "
            "there or name it in KUBECONFIG"
        )
    try:
        _, context = config.list_kube_config_contexts(files)
        config.load_kube_config(files, client_configuration=settings, persist_config=False)
    except (config.ConfigException, OSError, yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        words = str(error).partition("\n")[0]
        raise LoginInvalid(
            f"cannot use the kubeconfig file {files}: {words}; correct it, or set KUBECONFIG to the right one"
        ) from error
    return _login(client, settings, (context.get("context") or {}).get("namespace") or "default", files)


def _login(client: Any, settings: Any, namespace: str, where: str) -> Login:
    return Login(client.ApiClient(settings), namespace, where, str(settings.host))
