"""The controllers of a cluster: garbage collection, FrameworkController, and those of kube_operators.

Each controller reacts to changes and makes one step at a time towards the desired state. A watch therefore receives the same
sequence of changes as from the real controllers, whose changes are recorded in tests/golden/kubernetes.
"""

import contextlib
import threading
import uuid

from deadlines import DEADLINE_S
from kube_operators import LOCAL_QUEUES, queued
from kube_operators import STEPS as OTHER_STEPS
from kube_store import CONFIG_MAPS, FOREGROUND, NAMESPACES, PODS, QUOTAS, Kind, Refused, now

FRAMEWORKS = Kind(
    "frameworkcontroller.microsoft.com", "v1", "frameworks", "Framework", has_status=False, is_custom=True
)
_OVER = ("Succeeded", "Failed")
_STOPPED, _OTHERS_DECIDED, _POD_GONE, _CONFIG_MAP_GONE = -210, -220, -101, -100


class Controllers:
    """All controllers in one thread, so that they never act at the same time."""

    def __init__(self, store):
        self._store = store
        self.stopped = set()
        """The kinds whose operator does not run."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._thread.start()

    def close(self):
        with self._store.changed:
            self._is_closed = True
            self._store.changed.notify_all()
        self._thread.join(DEADLINE_S)

    def _run(self):
        at = 0
        while True:
            with self._store.changed:
                while at == len(self._store.history) and not self._is_closed:
                    self._store.changed.wait()
                if self._is_closed:
                    return
                news = self._store.history[at:]
                at += len(news)
            for entry in news:
                with self._store.changed:
                    self._collect(entry)
                    self._finish_namespace(entry)
                    for kind, found in [*self._concerned(entry), *self._held_up(entry)]:
                        # If the API refuses a step, the step is repeated at the next change.
                        with contextlib.suppress(Refused):
                            if kind not in self.stopped:
                                STEPS[kind.group, kind.plural](self._store, kind, found)

    # ---- garbage collection

    def _collect(self, entry):
        store, uid = self._store, entry.after["metadata"]["uid"]
        if entry.type == "DELETED":
            for kind, namespace, name in store.dependents(uid):
                owners = store.get(kind, namespace, name)["metadata"]["ownerReferences"]
                if not any(store.exists(owner["uid"]) for owner in owners):
                    store.delete(kind, namespace, name)
            for owner in entry.after["metadata"].get("ownerReferences", []):
                if store.exists(owner["uid"]):
                    self._go_on_deleting(*store.by_uid(owner["uid"]))
        elif store.exists(uid):
            self._go_on_deleting(*store.by_uid(uid))

    def _go_on_deleting(self, kind, found):
        """Delete an object in the foreground, after everything that it owns."""
        meta, store = found["metadata"], self._store
        if "deletionTimestamp" not in meta or FOREGROUND not in meta.get("finalizers", []):
            return
        is_blocked = False
        for each_kind, namespace, name in store.dependents(meta["uid"]):
            each = store.get(each_kind, namespace, name)["metadata"]
            is_gone = False
            if "deletionTimestamp" not in each:
                policy = "Foreground" if store.dependents(each["uid"]) else "Background"
                _, is_gone = store.delete(each_kind, namespace, name, {"propagationPolicy": policy})
            blocks = any(owner.get("blockOwnerDeletion") for owner in each["ownerReferences"])
            is_blocked = is_blocked or (blocks and not is_gone)
        if not is_blocked and not self._completes_first(kind, found):
            store.change(kind, meta.get("namespace", ""), meta["name"], _without_foreground)

    def _completes_first(self, kind, found):
        """True while FrameworkController still has to complete a Framework that is being deleted. The garbage collector waits for
        it, because the real FrameworkController is faster than the real garbage collector.
        """
        return (
            kind == FRAMEWORKS
            and kind not in self.stopped
            and found.get("status", {}).get("attemptStatus", {}).get("configMapUID") is not None
            and found["status"]["state"] != "Completed"
        )

    def _finish_namespace(self, entry):
        store = self._store
        name = entry.after["metadata"].get("namespace") or entry.after["metadata"]["name"]
        home = store.find(NAMESPACES, "", name)
        if home is None or "deletionTimestamp" not in home["metadata"]:
            return
        inside = [
            (kind, found)
            for kind in list(store.kinds.values())
            if kind.namespaced
            for found in store.list(kind, name)
        ]
        for kind, found in inside:
            if "deletionTimestamp" not in found["metadata"]:
                store.delete(kind, name, found["metadata"]["name"])
        if not any(store.list(kind, name) for kind in list(store.kinds.values()) if kind.namespaced):
            store.remove(NAMESPACES, "", name)

    # ---- affected objects

    def _concerned(self, entry):
        """Yield the objects to check after a change: the changed object and its direct and indirect owners, if they have a
        controller.
        """
        store, kind, found = self._store, entry.kind, entry.after
        if (kind.group, kind.plural) == (LOCAL_QUEUES.group, LOCAL_QUEUES.plural):
            yield from queued(store, found)
        while True:
            meta = found["metadata"]
            if (kind.group, kind.plural) in STEPS and (
                there := store.find(kind, meta.get("namespace", ""), meta["name"])
            ):
                yield kind, there
            owners = meta.get("ownerReferences", [])
            if not owners:
                return
            if store.exists(owners[0]["uid"]):
                kind, found = store.by_uid(owners[0]["uid"])
                continue
            # The config map of a Framework may be deleted before its pods. The annotation still names the Framework, so the
            # annotation takes precedence over the owner's name.
            name = meta.get("annotations", {}).get("FC_FRAMEWORK_NAME") or owners[0]["name"]
            served = store.kinds.get((FRAMEWORKS.group, FRAMEWORKS.plural))
            if served and (there := store.find(served, meta["namespace"], name)):
                yield served, there
            return

    def _held_up(self, entry):
        """Objects whose pods may be missing because of a quota, if this change may have freed capacity."""
        is_room = entry.kind == PODS and (entry.type == "DELETED" or entry.after["status"]["phase"] in _OVER)
        if entry.kind == QUOTAS or (is_room and self._store.count(QUOTAS)):
            for kind in list(self._store.kinds.values()):
                if (kind.group, kind.plural) not in STEPS:
                    continue
                for found in self._store.list(kind, entry.after["metadata"]["namespace"]):
                    if kind != FRAMEWORKS or ("status" in found and _pending(found)):
                        yield kind, found


def _without_foreground(found):
    found["metadata"]["finalizers"].remove(FOREGROUND)


# ---- FrameworkController


def framework_step(store, _, framework):
    """The next step of FrameworkController for a Framework, if there is one.

    Source: FrameworkController v1, and its recordings.
    """
    meta, status = framework["metadata"], framework.get("status")
    if "deletionTimestamp" in meta and (status is None or status["state"] == "AttemptCreationPending"):
        return
    if status is None:
        framework["status"] = _first_status(framework)
        framework["spec"].setdefault("description", "")
        store.replace(FRAMEWORKS, meta["namespace"], meta["name"], framework)
        return
    attempt, state = status["attemptStatus"], status["state"]
    if state in ("AttemptCreationRequested", "AttemptPreparing", "AttemptRunning") and (
        how := _config_map_is_deleted(store, meta, attempt)
    ):
        diagnostics = f"ConfigMap {how} by others"
        status["state"] = "AttemptDeleting"
        attempt["completionStatus"] = _completion(
            *(_CONFIG_MAP_GONE, "ConfigMapExternalDeleted", diagnostics, "Failed"), attributes=["Transient"]
        )
    elif framework["spec"]["executionType"] == "Stop" and attempt["completionStatus"] is None:
        _complete(
            status, _completion(_STOPPED, "StopFrameworkRequested", "User has requested to stop", "Failed")
        )
    elif state == "AttemptCreationPending":
        if framework["spec"]["executionType"] == "Create":
            return
        _request_config_map(store, framework)
    elif state == "AttemptCreationRequested":
        _request_pods(store, framework)
        status["state"] = "AttemptPreparing"
    elif state in ("AttemptPreparing", "AttemptRunning"):
        if _pending(framework):
            _request_pods(store, framework)  # create the pods whose creation was refused before
        _go_on_with_tasks(store, framework)
    elif state == "AttemptDeletionPending":
        config_map = store.find(CONFIG_MAPS, meta["namespace"], attempt["configMapName"])
        if config_map is not None:
            store.delete(
                *(CONFIG_MAPS, meta["namespace"], attempt["configMapName"]),
                {"propagationPolicy": "Foreground"},
            )
        status["state"] = "AttemptDeletionRequested"
    elif state in ("AttemptDeletionRequested", "AttemptDeleting"):
        config_map = store.find(CONFIG_MAPS, meta["namespace"], attempt["configMapName"])
        if config_map is not None and not store.dependents(config_map["metadata"]["uid"]):
            return  # the garbage collector is about to delete the config map
        if config_map is not None:
            status["state"] = "AttemptDeleting"
        else:
            for _, _, task in _tasks(framework):
                if task["state"] != "Completed":
                    task["state"] = "Completed"
                    task["attemptStatus"]["completionStatus"] = _completion(
                        *(_OTHERS_DECIDED, "FrameworkAttemptCompletion", "Others have decided", "Failed")
                    )
            status["state"], attempt["completionTime"] = "AttemptCompleted", now()
    elif state == "AttemptCompleted":
        status["state"], status["completionTime"] = "Completed", now()
    store.replace(FRAMEWORKS, meta["namespace"], meta["name"], framework)


def _config_map_is_deleted(store, meta, attempt):
    """FrameworkController's description of a deletion of its config map by another client; empty if the config map is not
    deleted.
    """
    found = store.find(CONFIG_MAPS, meta["namespace"], attempt["configMapName"])
    if found is None or found["metadata"]["uid"] != attempt["configMapUID"]:
        return "was deleted"
    return "is being deleted" if "deletionTimestamp" in found["metadata"] else ""


def _first_status(framework):
    name, retries = (
        framework["metadata"]["name"],
        {"totalRetriedCount": 0, "accountableRetriedCount": 0, "retryDelaySec": None},
    )
    roles = [
        {
            "name": role["name"],
            "instanceUID": str(uuid.uuid4()),
            "taskStatuses": [
                {
                    "index": index,
                    "instanceUID": str(uuid.uuid4()),
                    "state": "AttemptCreationPending",
                    "deletionPending": False,
                    "retryPolicyStatus": dict(retries),
                    "attemptStatus": {
                        "id": 0,
                        "podName": f"{name}-{role['name']}-{index}",
                        "completionStatus": None,
                        **dict.fromkeys(("instanceUID", "podUID", "podIP", "podHostIP", "podNodeName")),
                    },
                }
                for index in range(role["taskNumber"])
            ],
        }
        for role in framework["spec"]["taskRoles"]
    ]
    attempt = {
        "id": 0,
        "startTime": now(),
        "instanceUID": None,
        "configMapName": f"{name}-attempt",
        "configMapUID": None,
        "completionStatus": None,
        "taskRoleStatuses": roles,
    }
    return {
        "state": "AttemptCreationPending",
        "startTime": now(),
        "retryPolicyStatus": retries,
        "attemptStatus": attempt,
    }


def _tasks(framework):
    for role, told in zip(
        framework["spec"]["taskRoles"],
        framework["status"]["attemptStatus"]["taskRoleStatuses"],
        strict=True,
    ):
        for task in told["taskStatuses"]:
            yield role, told, task


def _pending(framework):
    return [task for _, _, task in _tasks(framework) if task["state"] == "AttemptCreationPending"]


def _owner(kind, found):
    return {
        "apiVersion": found["apiVersion"],
        "kind": kind,
        "name": found["metadata"]["name"],
        "uid": found["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _request_config_map(store, framework):
    meta, status = framework["metadata"], framework["status"]
    attempt = status["attemptStatus"]
    made = store.create(
        CONFIG_MAPS,
        meta["namespace"],
        {
            "metadata": {
                "name": attempt["configMapName"],
                "ownerReferences": [_owner("Framework", framework)],
            }
        },
    )
    attempt["configMapUID"] = made["metadata"]["uid"]
    attempt["instanceUID"] = f"{attempt['id']}_{made['metadata']['uid']}"
    status["state"] = "AttemptCreationRequested"


def _request_pods(store, framework):
    meta, attempt = framework["metadata"], framework["status"]["attemptStatus"]
    owner = _owner("ConfigMap", store.get(CONFIG_MAPS, meta["namespace"], attempt["configMapName"]))
    for role, told, task in _tasks(framework):
        if task["state"] != "AttemptCreationPending":
            continue
        template = role["task"]["pod"]
        said = {
            "FC_FRAMEWORK_NAMESPACE": meta["namespace"],
            "FC_FRAMEWORK_NAME": meta["name"],
            "FC_TASKROLE_NAME": role["name"],
            "FC_TASK_INDEX": str(task["index"]),
            "FC_CONFIGMAP_NAME": attempt["configMapName"],
            "FC_POD_NAME": task["attemptStatus"]["podName"],
            "FC_FRAMEWORK_UID": meta["uid"],
            "FC_FRAMEWORK_ATTEMPT_ID": str(attempt["id"]),
            "FC_FRAMEWORK_ATTEMPT_INSTANCE_UID": attempt["instanceUID"],
            "FC_CONFIGMAP_UID": attempt["configMapUID"],
            "FC_TASKROLE_UID": told["instanceUID"],
            "FC_TASK_UID": task["instanceUID"],
            "FC_TASK_ATTEMPT_ID": "0",
        }
        by_field = {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}}
        variables = [
            *({"name": name, "value": value} for name, value in said.items()),
            {"name": "FC_POD_UID", "valueFrom": by_field},
            {"name": "FC_TASK_ATTEMPT_INSTANCE_UID", "value": "0_$(FC_POD_UID)"},
        ]
        spec = {"restartPolicy": "Never"} | template["spec"]
        for part in ("initContainers", "containers"):
            if part in spec:
                spec[part] = [
                    {"terminationMessagePolicy": "FallbackToLogsOnError"}
                    | each
                    | {"env": variables + each.get("env", [])}
                    for each in spec[part]
                ]
        shown = ("FC_FRAMEWORK_NAME", "FC_TASKROLE_NAME", "FC_TASK_INDEX")
        given = template.get("metadata") or {}
        body = {
            "metadata": {
                "name": task["attemptStatus"]["podName"],
                "labels": given.get("labels", {}) | {name: said[name] for name in shown},
                "annotations": given.get("annotations", {}) | said,
                "ownerReferences": [owner],
            },
            "spec": spec,
        }
        try:
            made = store.create(PODS, meta["namespace"], body)
        except Refused as refused:
            if refused.status != 422:
                continue  # the refusal is temporary, as with a quota, and the creation is retried without a report
            task["state"] = "AttemptDeletionPending"
            task["attemptStatus"]["completionStatus"] = _completion(
                *(-200, "PodCreationPermanentError", refused.message, "Failed"), attributes=["Permanent"]
            )
            continue
        task["state"] = "AttemptCreationRequested"
        task["attemptStatus"] |= {
            "podUID": made["metadata"]["uid"],
            "instanceUID": f"0_{made['metadata']['uid']}",
        }


def _go_on_with_tasks(store, framework):
    meta, status = framework["metadata"], framework["status"]
    ended = []
    for role, _, task in _tasks(framework):
        pod = store.find(PODS, meta["namespace"], task["attemptStatus"]["podName"])
        if _go_on_with_task(store, task, pod):
            ended.append((role, task))
        elif task["state"] not in ("AttemptCreationPending", "AttemptCreationRequested", "AttemptPreparing"):
            status["state"] = "AttemptRunning"
    for role, task in ended:
        if status["attemptStatus"]["completionStatus"] is None:
            _decide(framework, role, task)


def _go_on_with_task(store, task, pod):
    """Make the next step of a task. Return True if the task is completed by this step."""
    told, state = task["attemptStatus"], task["state"]
    if state == "AttemptCompleted":
        task["state"] = "Completed"
        return True
    if state == "AttemptDeleting":
        if pod is None:
            task["state"], told["completionTime"] = "AttemptCompleted", now()
        return False
    is_deleted = pod is not None and "deletionTimestamp" in pod["metadata"]
    if is_deleted and state in ("AttemptCreationRequested", "AttemptPreparing", "AttemptRunning"):
        # FrameworkController ignores later reports of the pod's containers.
        told["completionStatus"] = _pod_deleted("is being deleted")
        task["state"] = "AttemptDeleting"
        return False
    if state == "AttemptDeletionPending":
        if pod is not None:
            store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
        task["state"] = "AttemptDeletionRequested"
    elif state == "AttemptDeletionRequested":
        if pod is None:
            task["state"], told["completionTime"] = "AttemptCompleted", now()
    elif state == "AttemptCreationRequested":
        task["state"] = "AttemptPreparing"
        told |= {"podHostIP": "", "podIP": "", "podNodeName": ""}
    elif state in ("AttemptPreparing", "AttemptRunning"):
        if pod is None:
            told["completionStatus"] = _pod_deleted("was deleted")
            task["state"] = "AttemptCompleted"
            return False
        said = pod["status"]
        told["podNodeName"] = pod["spec"].get("nodeName", "")
        told |= {"podIP": said.get("podIP", ""), "podHostIP": said.get("hostIP", "")}
        if state == "AttemptPreparing":
            if said["phase"] != "Pending":
                task["state"], told["runTime"] = "AttemptRunning", now()
        elif said["phase"] in _OVER:
            task["state"], told["completionStatus"] = "AttemptDeletionPending", _pod_completion(said)
    return False


def _pod_deleted(how):
    diagnostics = f"Pod {how} by others"
    return _completion(_POD_GONE, "PodExternalDeleted", diagnostics, "Failed", attributes=["Transient"])


def _decide(framework, role, task):
    """Complete the attempt of the Framework if the end of this task fulfils the completion policy, or if no tasks remain."""
    tasks = list(_tasks(framework))
    if _reaches_policy(framework, role, task) or any(each["state"] != "Completed" for _, _, each in tasks):
        return
    # If several tasks ended at the same time, another task may fulfil the completion policy. Then that task, and not this one,
    # completes the attempt.
    if not any(_reaches_policy(framework, name, each) for name, _, each in tasks):
        message = "All Tasks are completed and no user specified conditions have ever been triggered"
        _complete(
            framework["status"], _completion(0, "", "", "Succeeded") | {"trigger": {"message": message}}
        )


def _reaches_policy(framework, role, task):
    mine = [each for name, _, each in _tasks(framework) if name is role and each["state"] == "Completed"]
    codes = [each["attemptStatus"]["completionStatus"]["code"] for each in mine]
    policy = role["frameworkAttemptCompletionPolicy"]
    told = task["attemptStatus"]["completionStatus"]
    for word, wanted, count in (
        ("Failed", policy["minFailedTaskCount"], sum(code != 0 for code in codes)),
        ("Succeeded", policy["minSucceededTaskCount"], sum(code == 0 for code in codes)),
    ):
        if 1 <= wanted <= count and told["type"]["name"] == word:
            message = f"{word}TaskCount {count} has reached Min{word}TaskCount {wanted} in the TaskRole"
            trigger = {"message": message, "taskRoleName": role["name"], "taskIndex": task["index"]}
            _complete(
                framework["status"], {key: told[key] for key in told if key != "pod"} | {"trigger": trigger}
            )
            return True
    return False


def _complete(status, completion):
    status["attemptStatus"]["completionStatus"] = completion
    status["state"] = "AttemptDeletionPending"


def _pod_completion(said):
    if said["phase"] == "Succeeded":
        return _completion(0, "Succeeded", "Pod succeeded", "Succeeded")
    containers = [
        {"name": each["name"], "code": ended["exitCode"], "reason": ended["reason"]}
        for part in ("initContainerStatuses", "containerStatuses")
        for each in said.get(part, [])
        if (ended := each["state"].get("terminated")) and ended["exitCode"]
    ]
    shown = {"reason": said.get("reason"), "message": said.get("message"), "containers": containers}
    pod = {key: value for key, value in shown.items() if value}
    code = containers[-1]["code"] if containers else -1  # -1 means that the pod failed as a whole
    phrase = "ContainerUnrecognizedFailed" if containers else "PodUnrecognizedFailed"
    return _completion(code, phrase, f"Pod failed: PodPattern unmatched: {pod}", "Failed") | {"pod": pod}


def _completion(code, phrase, diagnostics, word, attributes=()):
    return {
        "code": code,
        "phrase": phrase,
        "diagnostics": diagnostics,
        "type": {"name": word, "attributes": list(attributes)},
    }


STEPS = {(FRAMEWORKS.group, FRAMEWORKS.plural): framework_step} | OTHER_STEPS
