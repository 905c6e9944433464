"""Pods as real containers.

The fake node passes pod specifications to `podman play kube`. Before that, it fills in the values that a kubelet would fill in:
variables from secrets and fields, and the folders of volumes. All containers share the network of this machine.
"""

import json
import secrets
import signal
import subprocess

from kube_kubelet import Pod, expanded
from real_containers import STEP_TIMEOUT_S

ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_OF_EACH_CONTAINER = ("runAsUser", "runAsGroup", "runAsNonRoot")


class ContainerPod(Pod):
    """A pod that podman runs.

    `Kubelet` calls the class with (node, pod); use functools.partial for the other arguments. `accounts` maps the name of a
    service account to a folder and to variables. The folder contains the account's login. The variables contain the address of
    the API server.
    """

    def __init__(self, podman, node, pod, *, accounts=None):
        super().__init__(node, pod)
        self._podman = podman
        self._made = []
        self._account = (accounts or {}).get(pod["spec"].get("serviceAccountName"))

    def _start(self, plans):
        name = f"trial-keeper-test-{secrets.token_hex(4)}"
        file = self._node.folder / f"{name}.json"
        if self._account is not None:
            folder, address = self._account
            plans = [
                (container, mounts | {ACCOUNT_PATH: folder}, variables | address)
                for container, mounts, variables in plans
            ]
        file.write_text(json.dumps(specification(name, plans, self._pod["spec"])))
        self._made.append(name)
        self._podman.run("podman", "play", "kube", "--quiet", str(file))
        started = [
            RealContainer(self._podman, f"{name}-{container['name']}", self._log) for container, _, _ in plans
        ]
        self._take(started)
        return started

    def _kill(self, process):
        process.send_signal(signal.SIGKILL)

    def _clear_away(self):
        for name in self._made:
            self._podman.run("podman", "pod", "rm", "--force", "--ignore", "--time", "0", name)


def specification(name, plans, spec=None):
    """A pod specification for podman in which all references are resolved. JSON is valid YAML. `spec` is the specification of the
    pod; its security context applies to all containers.
    """
    spec = spec or {}
    user = {key: value for key, value in spec.get("securityContext", {}).items() if key in _OF_EACH_CONTAINER}
    containers, volumes = [], {}
    for container, mounts, variables in plans:
        kept = {key: container[key] for key in ("name", "image")}
        for part in ("command", "args"):
            if part in container:
                kept[part] = [expanded(word, variables) for word in container[part]]
        for path, folder in mounts.items():
            source = volumes.setdefault(str(folder), f"volume{len(volumes)}")
            kept.setdefault("volumeMounts", []).append({"name": source, "mountPath": path})
        kept["env"] = [{"name": each, "value": value} for each, value in variables.items()]
        kept["resources"] = {"limits": container.get("resources", {}).get("limits", {})}
        kept["securityContext"] = user | container.get("securityContext", {})
        containers.append(kept)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "hostNetwork": True,
            "shareProcessNamespace": spec.get("shareProcessNamespace", False),
            "restartPolicy": "Never",
            "containers": containers,
            "volumes": [{"name": each, "hostPath": {"path": folder}} for folder, each in volumes.items()],
        },
    }


class RealContainer:
    """A running container, with the interface of a process."""

    def __init__(self, podman, name, log):
        self._podman, self._name, self._log = podman, name, log
        self._code = None
        self._waiting = subprocess.Popen(
            ["podman", "wait", name],
            env=podman.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def poll(self):
        return self._code

    def wait(self):
        said, _ = self._waiting.communicate()
        with open(self._log, "ab") as log:
            subprocess.run(
                ["podman", "logs", self._name],
                env=self._podman.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=STEP_TIMEOUT_S,
                check=False,
            )
        self._code = int(said)
        return self._code

    def send_signal(self, number):
        # `podman kill` fails if the container has already exited. This is no error here, so the exit code of podman is ignored.
        subprocess.run(
            ["podman", "kill", "--signal", signal.Signals(number).name, self._name],
            env=self._podman.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
