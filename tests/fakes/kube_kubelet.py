"""A fake node: it accepts every unscheduled pod, and runs its containers, by default as processes of this
machine.

A process has no file system of its own. Paths of mounted volumes in its command and variables are replaced by
the folders of the volumes. Containers run once, as with restartPolicy Never. The reason of a pending pod is
in its status, in events, or in both, as with the real scheduler and kubelet.
"""

import base64
import contextlib
import os
import re
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import psutil
from deadlines import DEADLINE_S
from kube_controllers import FRAMEWORKS
from kube_events import tell
from kube_store import CLAIMS, NODES, PODS, SECRETS, Refused, now

from trial_keeper.settings import without_settings

NODE = "n1"
_CPUS = 64
BARRIER = "frameworkcontroller/frameworkbarrier"
# Kubernetes uses at most the last 2048 bytes of a log as termination message. Source: Kubernetes, terminationMessagePolicy.
_LAST_WORDS_BYTES = 2048


def _cpus(quantity):
    """The number of processors that a quantity such as `2` or `500m` denotes."""
    return int(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


class Waiting(Exception):
    """A container cannot start now. The container's status gets `reason` and `message`; `events` are also reported."""

    def __init__(self, reason, message, *events):
        super().__init__(message)
        self.reason, self.message, self.events = reason, message, events


class Kubelet:
    """`exports` maps sources of volumes to folders.

    A source is an NFS export ("server:/path"), the name of a claim, or a tuple of Azure account, share and key. `runs` creates a
    pod: the class Pod or one of its subclasses.
    """

    def __init__(self, store, folder, exports, runs=None):
        self._store, self._folder, self.exports = store, Path(folder), exports
        self._runs = runs or Pod
        self.missing_images: set[str] = set()
        self.is_full = self.is_lost = False
        self._pods: dict[str, Pod] = {}
        self._told: dict[str, tuple] = {}
        """The last reported reason why a pod does not start, by its uid."""
        self._is_closed = self._must_look = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        self._store.create(NODES, "", {"metadata": {"name": NODE}})
        self._store.replace(NODES, "", NODE, ready, "status")
        self._thread.start()

    def close(self):
        """End every process."""
        with self._store.changed:
            self._is_closed = True
            self._store.changed.notify_all()
        self._thread.join(DEADLINE_S)
        for pod in self._pods.values():
            pod.kill()
        for pod in self._pods.values():
            pod.thread.join(DEADLINE_S)

    def look_again(self):
        """Check all pods again after this node, or a pod that runs on it, has changed."""
        with self._store.changed:
            # A check that is already running does not wait for the notification. The flag makes the node check the pods once
            # more.
            self._must_look = True
            self._store.changed.notify_all()

    def log(self, namespace, name):
        return (self._folder / f"{namespace}-{name}.log").read_text(errors="replace")

    def kill(self, namespace, name, reason="Error"):
        """Send SIGKILL to all processes of a pod, e.g. because its memory is full ("OOMKilled")."""
        pod = self._of(namespace, name)
        pod.killed_for = reason
        pod.kill()

    def evict(self, namespace, name):
        """Evict a pod because the node needs its resources."""
        pod = self._of(namespace, name)
        pod.evicted_for = "The node was low on resource: memory."
        pod.kill()

    def exceed_deadline(self, namespace, name):
        """End a pod that runs longer than its activeDeadlineSeconds. Source: the kubelet's active deadline handler."""
        pod = self._of(namespace, name)
        pod.failed_for = "DeadlineExceeded", "Pod was active on the node longer than the specified deadline"
        pod.stop(self._store.get(PODS, namespace, name)["spec"]["terminationGracePeriodSeconds"])

    def drain(self, namespace, name):
        """Evict a pod through the API, as `kubectl drain` does.

        Source: Kubernetes, the subresource eviction: from 1.26 on a condition, then the deletion.
        """
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        condition |= {"message": "Eviction API: evicting", "lastTransitionTime": now()}
        self._store.change(
            *(PODS, namespace, name),
            lambda it: it["status"].setdefault("conditions", []).append(condition),
            "status",
        )
        self._store.delete(PODS, namespace, name)

    def preempt(self, pod):
        """End a pod to make room for a pod of higher priority. The pod's object remains until its controller has counted the end.

        Source: Kubernetes' scheduler, preemption: the condition, then the end of the pod.
        """
        self.announce_preemption(pod)
        meta = pod["metadata"]
        self._of(meta["namespace"], meta["name"]).stop(pod["spec"]["terminationGracePeriodSeconds"])

    def announce_preemption(self, pod):
        """Report that a pod will be ended to make room for a pod of higher priority. The report is a condition, and an event as
        in older schedulers.
        """
        meta = pod["metadata"]
        tell(
            self._store, pod, "Preempted", "Preempted by pod 1f on node node-1", "default-scheduler", "Normal"
        )
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        self._store.change(
            *(PODS, meta["namespace"], meta["name"]),
            lambda it: it["status"].setdefault("conditions", []).append(condition),
            "status",
        )

    def lose(self):
        """Make the node unreachable.

        Its processes are killed, and the control plane reports the state of its pods. Source: Kubernetes' node lifecycle
        controller, but without its tolerance of five minutes.
        """
        with self._store.changed:
            self.is_lost = True
            for pod in self._pods.values():
                pod.is_lost = True
                pod.kill()
            unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
            self._store.change(
                *(NODES, "", NODE), lambda it: it["status"].update(conditions=[unknown]), "status"
            )
            for pod in self._store.list(PODS):
                if pod["spec"].get("nodeName") == NODE and pod["status"]["phase"] == "Running":
                    self.write(
                        pod, conditions=[{"type": "Ready", "status": "False", "lastTransitionTime": now()}]
                    )
                    tell(self._store, pod, "NodeNotReady", "Node is not ready", "node-controller")
                    self._store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def bury(self):
        """Delete the lost node, and with it the pods that were bound to it."""
        self._store.delete(NODES, "", NODE)
        for pod in self._store.list(PODS):
            if pod["spec"].get("nodeName") == NODE:
                self._store.remove(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def processes(self, namespace, name):
        return list(self._of(namespace, name).processes)

    def _of(self, namespace, name):
        return self._pods[self._store.get(PODS, namespace, name)["metadata"]["uid"]]

    def _run(self):
        seen = -1
        while True:
            with self._store.changed:
                if seen == self._store.version and not self._is_closed and not self._must_look:
                    self._store.changed.wait()
                if self._is_closed:
                    return
                seen, self._must_look = self._store.version, False
                pods = self._store.chosen(PODS, self._is_mine_to_do)
            for pod in pods:
                # If the pod has changed in the meantime, the step is refused, and the next loop checks the pod.
                with contextlib.suppress(Refused):
                    self._look(pod)

    def _is_mine_to_do(self, pod):
        """True if a pod may need an action here: it neither runs here nor has ended."""
        meta, has_node = pod["metadata"], "nodeName" in pod["spec"]
        return "deletionTimestamp" in meta or not has_node or meta["uid"] not in self._pods

    def _look(self, pod):
        meta, uid = pod["metadata"], pod["metadata"]["uid"]
        running = self._pods.get(uid)
        if self.is_lost:
            if "nodeName" not in pod["spec"]:
                self._bind(pod)
        elif "deletionTimestamp" in meta:
            if running is None or running.is_terminal:
                self._store.remove(PODS, meta["namespace"], meta["name"])
            elif not running.is_stopping:
                running.stop(meta["deletionGracePeriodSeconds"])
        elif "nodeName" not in pod["spec"]:
            if pod["spec"]["schedulerName"] == "default-scheduler":
                self._bind(pod)
        elif running is None and pod["spec"]["nodeName"] == NODE and pod["status"]["phase"] == "Pending":
            try:
                made = self._runs(self, pod)
            except Waiting as waiting:
                self.tell_waiting(pod, waiting)
            else:
                self._pods[uid] = made
                made.thread.start()

    def _bind(self, pod):
        meta, status = pod["metadata"], dict(pod["status"])
        why = self._why_nowhere(pod)
        scheduled = {"type": "PodScheduled", "status": "False" if why else "True"}
        if why:
            scheduled |= {"reason": "Unschedulable", "message": f"0/1 nodes are available: {why}."}
        status["conditions"] = [scheduled]
        if status == pod["status"]:
            return
        with self._store.changed:
            # The status and the node's name change in one step, as in the recording of a real cluster.
            found = self._store.get(PODS, meta["namespace"], meta["name"])
            found["status"] = status
            if not why:
                found["spec"]["nodeName"] = NODE
            before = self._store.get(PODS, meta["namespace"], meta["name"])
            self._store._write(PODS, "MODIFIED", before, found)
        if why:
            tell(self._store, pod, "FailedScheduling", scheduled["message"], "default-scheduler")
        else:
            where = f"Successfully assigned {meta['namespace']}/{meta['name']} to {NODE}"
            tell(self._store, pod, "Scheduled", where, "default-scheduler", "Normal")

    def _why_nowhere(self, pod):
        """The reason why no node accepts the pod; empty if one does."""
        if self.is_lost:
            return "1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }"
        asked = (each.get("resources", {}).get("requests", {}) for each in pod["spec"]["containers"])
        if self.is_full or sum(_cpus(str(each.get("cpu", 0))) for each in asked) > _CPUS:
            return "1 Insufficient cpu"
        for volume in pod["spec"].get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and self._store.find(CLAIMS, pod["metadata"]["namespace"], claim) is None:
                return f'persistentvolumeclaim "{claim}" not found'
        return ""

    def tell_waiting(self, pod, waiting):
        uid, all_of_it = pod["metadata"]["uid"], (waiting.reason, waiting.message, waiting.events)
        if self._told.get(uid) == all_of_it:
            return
        self._told[uid] = all_of_it
        state = {"waiting": {"reason": waiting.reason}}
        if waiting.message:
            state["waiting"]["message"] = waiting.message
        states = [container_status(pod, each, False, state) for each in pod["spec"]["containers"]]
        self.write(pod, containerStatuses=states)
        for reason, message in waiting.events:
            tell(self._store, pod, reason, message)

    def write(self, pod, **status):
        meta = pod["metadata"]
        self._store.change(
            *(PODS, meta["namespace"], meta["name"]), lambda it: it["status"].update(status), "status"
        )

    def tell(self, pod, reason, message):
        tell(self._store, pod, reason, message)

    def is_there(self, image):
        """True if the image can be pulled. False for an image in `missing_images`, or from a registry in the domain .invalid,
        which never exists (RFC 2606).
        """
        return image not in self.missing_images and not image.partition("/")[0].endswith(".invalid")

    # ---- inputs of containers

    def folders(self, pod):
        """The local folder of each of the pod's volumes."""
        meta, found = pod["metadata"], {}
        for volume in pod["spec"].get("volumes", []):
            name = volume["name"]
            if "emptyDir" in volume:
                found[name] = self._folder / f"{meta['uid']}-{name}"
                found[name].mkdir(exist_ok=True)
                continue
            if "azureFile" in volume:
                found[name] = self._azure_share(meta["namespace"], name, volume["azureFile"])
                continue
            if "nfs" in volume:
                source = f"{volume['nfs']['server']}:{volume['nfs']['path']}"
            else:
                source = volume["persistentVolumeClaim"]["claimName"]
            if source not in self.exports:
                text = f'MountVolume.SetUp failed for volume "{name}" : mount failed: exit status 32: {source}: no such export'
                # As on a real cluster, only an event has this text. The status of the pod does not contain it.
                raise Waiting("ContainerCreating", "", ("FailedMount", text))
            found[name] = Path(self.exports[source])
        return found

    def _azure_share(self, namespace, name, volume):
        """The folder in `exports` for an Azure share with the account and the key in the volume's secret."""
        failed = f'MountVolume.SetUp failed for volume "{name}" : '
        secret = self._store.find(SECRETS, namespace, volume["secretName"])
        if secret is None:
            text = f"{failed}couldn't get secret {namespace}/{volume['secretName']}"
            raise Waiting("ContainerCreating", "", ("FailedMount", text))
        keys = ("azurestorageaccountname", "azurestorageaccountkey")
        account, key = (base64.b64decode(secret["data"][each]).decode() for each in keys)
        folder = self.exports.get((account, volume["shareName"], key))
        if folder is None:
            text = f"{failed}mount failed: exit status 32: mount error(13): Permission denied"
            raise Waiting("ContainerCreating", "", ("FailedMount", text))
        return Path(folder)

    def environment(self, pod, container):
        """The container's variables, with resolved references."""
        meta, made = pod["metadata"], {}
        for entry in container.get("env", []):
            given = entry.get("valueFrom")
            if given is None:
                made[entry["name"]] = expanded(entry.get("value", ""), made)
            elif "secretKeyRef" in given:
                name, key = given["secretKeyRef"]["name"], given["secretKeyRef"]["key"]
                secret = self._store.find(SECRETS, meta["namespace"], name)
                if secret is None:
                    text = f'secret "{name}" not found'
                    raise Waiting("CreateContainerConfigError", text, ("Failed", f"Error: {text}"))
                made[entry["name"]] = base64.b64decode(secret["data"][key]).decode()
            else:
                path = given["fieldRef"]["fieldPath"].split(".")
                known = pod | {"status": pod["status"] | {"podIP": "127.0.0.1", "hostIP": "127.0.0.1"}}
                made[entry["name"]] = str(known[path[0]].get(path[1], ""))
        return made

    def pull_secrets(self, pod):
        for each in pod["spec"].get("imagePullSecrets", []):
            secret = self._store.find(SECRETS, pod["metadata"]["namespace"], each["name"])
            if secret is None or secret["type"] != "kubernetes.io/dockerconfigjson":
                text = f'cannot use the pull secret "{each["name"]}"'
                raise Waiting("ErrImagePull", text, ("Failed", "Error: ErrImagePull"))

    def pass_barrier(self, pod, folders):
        """FrameworkController's barrier: wait until all tasks have an address, and write the addresses."""
        annotations, namespace = pod["metadata"]["annotations"], pod["metadata"]["namespace"]
        while True:
            with self._store.changed:
                framework = self._store.find(FRAMEWORKS, namespace, annotations["FC_FRAMEWORK_NAME"])
                if framework is None or self._is_closed:
                    return 1
                ips = {
                    role["name"]: [task["attemptStatus"]["podIP"] for task in role["taskStatuses"]]
                    for role in framework["status"]["attemptStatus"]["taskRoleStatuses"]
                }
                if all(ip for each in ips.values() for ip in each):
                    break
                self._store.changed.wait(5)
        lines = []
        for name, each in ips.items():
            role = name.upper()
            lines += [
                f"export FB_{role}_IPS={','.join(each)}",
                f"export FB_{role}_ADDRESSES={','.join(f'{ip}:${{FB_{role}_PORT}}' for ip in each)}",
            ]
        (folders["/mnt/frameworkbarrier"] / "injector.sh").write_text("\n".join(lines) + "\n")
        return 0

    @property
    def folder(self):
        return self._folder


class Pod:
    """A pod on this node, one process per container.

    Raises:
        Waiting: it cannot start yet.
    """

    def __init__(self, node, pod):
        self._node, self._pod = node, pod
        self.processes: list[subprocess.Popen] = []
        self.is_stopping = self.is_terminal = self.is_lost = self._is_killed = False
        self.killed_for, self.evicted_for = "Error", ""
        self.failed_for = None
        """The reason and the message of a pod that its node ends as a whole."""
        self._grace: threading.Timer | None = None
        self._signals = threading.Lock()
        """A stop concerns the processes that run then, and those that start afterwards."""
        folders = node.folders(pod)
        containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        self._plans = []
        for each in containers:
            if not node.is_there(each["image"]):
                text = f'Back-off pulling image "{each["image"]}": not found'
                failed = f'Failed to pull image "{each["image"]}": not found'
                raise Waiting(
                    *("ImagePullBackOff", text), ("Failed", failed), ("Failed", "Error: ImagePullBackOff")
                )
            if not each.get("command") and not each.get("args") and not each["image"].startswith(BARRIER):
                text = "no command specified"
                raise Waiting("CreateContainerError", text, ("Failed", f"Error: {text}"))
            mounts = {
                mount["mountPath"]: folders[mount["name"]] / mount.get("subPath", "")
                for mount in each.get("volumeMounts", [])
            }
            self._plans.append((each, mounts, node.environment(pod, each)))
        node.pull_secrets(pod)
        meta = pod["metadata"]
        self._log = node.folder / f"{meta['namespace']}-{meta['name']}.log"
        self.thread = threading.Thread(target=self._run, daemon=True)

    def stop(self, grace_s):
        """Send SIGTERM to the first process of each container. After `grace_s`, send SIGKILL to all processes."""
        with self._signals:
            self.is_stopping = True
            self._terminate(self.processes)
            self._grace = threading.Timer(grace_s, self.kill)
            self._grace.daemon = True
            self._grace.start()

    def _terminate(self, processes):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def kill(self):
        self._is_killed = True
        for process in self.processes:
            if process.poll() is None:
                self._kill(process)

    def _run(self):
        try:
            self._run_all()
        except Refused:
            self.kill()  # the pod was deleted
        finally:
            if self._grace is not None:
                self._grace.cancel()
            self._clear_away()
            self.is_terminal = True
            self._node.look_again()

    def _run_all(self):
        here = {
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "hostIP": "127.0.0.1",
            "startTime": now(),
        }
        init = self._pod["spec"].get("initContainers", [])
        plans = self._plans[len(init) :]
        for plan in self._plans[: len(init)]:
            started_at = now()
            self._tell_init(plan, {"running": {"startedAt": started_at}}, plans, here)
            code = self._run_init(plan)
            self._tell_init(plan, {"terminated": self._end(plan[0], code, started_at)}, plans, here)
            if code:
                self._node.write(self._pod, phase="Failed")
                return
        started_at = now()
        started = self._start(plans)
        statuses = [
            container_status(self._pod, plan[0], True, {"running": {"startedAt": started_at}})
            for plan in plans
        ]
        self._node.write(self._pod, phase="Running", containerStatuses=statuses, **here)
        codes = []
        with ThreadPoolExecutor(len(started)) as waiters:
            numbers = {waiters.submit(process.wait): number for number, process in enumerate(started)}
            for ended in as_completed(numbers):
                if self.is_lost:
                    return
                codes.append(ended.result())
                number = numbers[ended]
                end = {"terminated": self._end(plans[number][0], codes[-1], started_at)}
                statuses[number] = container_status(self._pod, plans[number][0], False, end)
                if len(codes) < len(started):
                    self._node.write(self._pod, containerStatuses=statuses)
        phase = "Failed" if any(codes) else "Succeeded"
        if self.evicted_for:
            self._node.write(
                *(self._pod,),
                phase="Failed",
                reason="Evicted",
                message=self.evicted_for,
                containerStatuses=[],
            )
            self._node.tell(self._pod, "Evicted", self.evicted_for)
        else:
            why = dict(zip(("reason", "message"), self.failed_for or (), strict=False))
            self._node.write(self._pod, phase="Failed" if why else phase, containerStatuses=statuses, **why)

    def _tell_init(self, plan, state, plans, here):
        initialising = {"waiting": {"reason": "PodInitializing"}}
        self._node.write(
            self._pod,
            initContainerStatuses=[container_status(self._pod, plan[0], False, state)],
            containerStatuses=[container_status(self._pod, each[0], False, initialising) for each in plans],
            **here,
        )

    def _run_init(self, plan):
        container, mounts, _ = plan
        if container["image"].startswith(BARRIER):
            return self._node.pass_barrier(self._pod, mounts)
        (process,) = self._start([plan])
        return process.wait()

    # ---- how containers run here

    def _start(self, plans):
        """Start the container of each plan (container, folders by mount path, variables). The results have the interface of
        processes.
        """
        started = []
        for container, mounts, variables in plans:
            command = [*container.get("command", []), *container.get("args", [])]
            command = [seen_here(expanded(word, variables), mounts) for word in command]
            with open(self._log, "ab") as log:
                process = subprocess.Popen(
                    command,
                    cwd=self._node.folder,
                    env=without_settings(os.environ)
                    | {name: seen_here(value, mounts) for name, value in variables.items()},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            started.append(process)
        self._take(started)
        return started

    def _take(self, started):
        with self._signals:
            self.processes += started
            if self.is_stopping:
                self._terminate(started)
        if self._is_killed:
            self.kill()

    def _kill(self, process):
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
        # The first process is killed before its child processes. Otherwise it could report the end of a child process.
        process.kill()
        for each in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    def _clear_away(self):
        """Do nothing: an ended process leaves nothing to remove."""

    def _end(self, container, code, started_at):
        told = {
            "exitCode": 128 - code if code < 0 else code,
            "reason": "Completed" if code == 0 else self.killed_for,
            "startedAt": started_at,
            "finishedAt": now(),
        }
        has_log = self._log.exists()  # the barrier writes no log
        if code and has_log and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            told["message"] = self._log.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace")
        return told


class StillPod(Pod):
    """A pod without processes: it runs until it is stopped, and then has succeeded."""

    def _start(self, plans):
        started = [Still() for _ in plans]
        self._take(started)
        return started

    def _kill(self, process):
        process.send_signal(signal.SIGKILL)


class Still:
    """A simulated process that does nothing. It ends when it receives a signal, or when a test ends it with exit code 0."""

    def __init__(self):
        self._has_ended = threading.Event()
        self._code = None

    def send_signal(self, number):
        self._code = -number
        self._has_ended.set()

    def poll(self):
        return self._code

    def wait(self):
        self._has_ended.wait()
        return self._code


def container_status(pod, container, is_ready, state):
    return {
        "name": container["name"],
        "state": state,
        "lastState": {},
        "ready": is_ready,
        "restartCount": 0,
        "image": container["image"],
        "imageID": "",
        "containerID": f"fake://{pod['metadata']['uid']}",
    }


def expanded(text, variables):
    """Expand `$(NAME)` if there is such a variable; `$$` is a dollar. Source: Kubernetes, Container.args."""
    return re.sub(
        r"\$\$|\$\(([A-Za-z0-9_.-]+)\)",
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
        text,
    )


def seen_here(text, mounts):
    """The text with paths below a mounted volume replaced by paths in the volume's folder."""
    for path in sorted(mounts, key=len, reverse=True):
        text = re.sub(
            rf"(?<![\w/.-]){re.escape(path)}(?![\w.-])", lambda _, path=path: str(mounts[path]), text
        )
    return text
