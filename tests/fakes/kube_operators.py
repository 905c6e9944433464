"""Kubeflow's operators, Kubernetes' Job controller, and Kueue.

Each step is derived from the current objects. A step writes the status that follows from the pods, so a watch receives the same
sequence of changes as from the real controllers. TFJobs and PyTorchJobs follow the recordings in tests/golden/kubernetes. The
other kinds follow their documentation.
"""

import copy
import json
import uuid

from kube_events import tell
from kube_store import JOBS, PODS, Kind, Refused, now

TF_JOBS = Kind("kubeflow.org", "v1", "tfjobs", "TFJob", is_custom=True)
PYTORCH_JOBS = Kind("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob", is_custom=True)
TRAIN_JOBS = Kind("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob", is_custom=True)
RUNTIMES = Kind(
    *("trainer.kubeflow.org", "v1alpha1", "clustertrainingruntimes", "ClusterTrainingRuntime"),
    namespaced=False,
    has_status=False,
    is_custom=True,
)
LOCAL_QUEUES = Kind("kueue.x-k8s.io", "v1beta1", "localqueues", "LocalQueue", is_custom=True)
QUEUE = "kueue.x-k8s.io/queue-name"
_LAST_RETRYABLE_FROM = 128
_NODE = "node"


def owner_of(found):
    return {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "name": found["metadata"]["name"],
        "uid": found["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pods_of(store, found):
    names = [name for kind, _, name in store.dependents(found["metadata"]["uid"]) if kind is PODS]
    return [store.get(PODS, found["metadata"]["namespace"], name) for name in names]


def phases(pods):
    counted = dict.fromkeys(("Pending", "Running", "Succeeded", "Failed"), 0)
    for pod in pods:
        counted[pod["status"]["phase"]] += 1
    return counted


def condition(conditions, type_, status, reason, message):
    """Add a condition, or replace the existing condition of the same type. If nothing has changed, the old condition is kept with
    its times.
    """
    old = next((each for each in conditions if each["type"] == type_), None)
    new = {"type": type_, "status": status, "reason": reason, "message": message}
    if old is not None and {key: old[key] for key in new} == new:
        return conditions
    new |= {"lastTransitionTime": now(), "lastUpdateTime": now()}
    return [new if each is old else each for each in conditions] + ([] if old else [new])


def is_true(found, *types):
    conditions = (found.get("status") or {}).get("conditions", [])
    return any(each["type"] in types and each["status"] == "True" for each in conditions)


def _create_pod(store, job, reason, body):
    try:
        store.create(PODS, job["metadata"]["namespace"], body)
    except Refused as refused:
        tell(store, job, reason, f"Error creating: {refused.message}", f"{job['kind'].lower()}-controller")
        raise


def _write_status(store, kind, found, status):
    meta = found["metadata"]
    store.replace(kind, meta["namespace"], meta["name"], {"status": status}, "status")


# ---- the training operator


_TRAINING = {
    "TFJob": ("tf", "tfReplicaSpecs", ("PS", "Worker", "Chief", "Evaluator")),
    "PyTorchJob": ("pytorch", "pytorchReplicaSpecs", ("Master", "Worker")),
}


def training_step(store, kind, job):
    """Source: kubeflow.org/v1, and recordings of tf-operator and pytorch-operator."""
    prefix, key, types = _TRAINING[kind.kind]
    meta, specs = job["metadata"], job["spec"][key]
    if "deletionTimestamp" in meta:
        return
    specs = {type_: specs[type_] for type_ in types if type_ in specs}
    if not job.get("status"):
        status = {"replicaStatuses": {type_: {} for type_ in specs}, "startTime": now()}
        text = f"{kind.kind} {meta['name']} is created."
        status["conditions"] = condition([], "Created", "True", f"{kind.kind}Created", text)
        _write_status(store, kind, job, status)
        return
    if is_true(job, "Succeeded", "Failed"):
        _clean_pods(store, job)
        _count_again(store, kind, job, prefix, specs)
        return
    restarted = _make_pods(store, kind, job, prefix, specs)
    status = copy.deepcopy(job["status"])
    counted = _replica_statuses(store, job, prefix, specs)
    status["replicaStatuses"] = counted
    status["conditions"] = _training_conditions(kind, job, status["conditions"], specs, counted, restarted)
    if any(each["type"] in ("Succeeded", "Failed") for each in status["conditions"]):
        status["completionTime"] = now()
    _write_status(store, kind, job, status)


def _of_type(pods, prefix, type_):
    return [pod for pod in pods if pod["metadata"]["labels"][f"{prefix}-replica-type"] == type_.lower()]


def _replica_statuses(store, job, prefix, specs):
    made, pods = {}, pods_of(store, job)
    for type_ in specs:
        found = phases(_of_type(pods, prefix, type_))
        words = {"active": found["Running"], "succeeded": found["Succeeded"], "failed": found["Failed"]}
        made[type_] = {word: count for word, count in words.items() if count}
    return made


def _count_again(store, kind, job, prefix, specs):
    status = copy.deepcopy(job["status"])
    counted = _replica_statuses(store, job, prefix, specs)
    # If all pods of a replica type were removed, the status keeps the last counts of this type.
    status["replicaStatuses"] = {type_: counted[type_] or status["replicaStatuses"][type_] for type_ in specs}
    _write_status(store, kind, job, status)


def _clean_pods(store, job):
    policy = job["spec"].get("runPolicy", job["spec"]).get("cleanPodPolicy", "Running")
    for pod in pods_of(store, job):
        if policy == "All" or (policy == "Running" and pod["status"]["phase"] in ("Pending", "Running")):
            store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])


def _make_pods(store, kind, job, prefix, specs):
    """Create missing pods, and delete the pods that must be restarted. Return the replica types of the restarted pods."""
    meta, restarted = job["metadata"], set()
    there = {pod["metadata"]["name"]: pod for pod in pods_of(store, job)}
    for type_, spec in specs.items():
        for index in range(spec["replicas"]):
            name = f"{meta['name']}-{type_.lower()}-{index}"
            if name not in there:
                _create_pod(
                    store, job, "FailedCreatePod", _replica(kind, job, prefix, specs, type_, index, name)
                )
            elif _is_to_restart(spec, there[name]):
                restarted.add(type_)
                store.delete(PODS, meta["namespace"], name)
    return restarted


def _is_to_restart(spec, pod):
    if spec.get("restartPolicy") != "ExitCode" or pod["status"]["phase"] != "Failed":
        return False
    ended = [each["state"].get("terminated", {}) for each in pod["status"].get("containerStatuses", [])]
    return any(each.get("exitCode", 0) >= _LAST_RETRYABLE_FROM for each in ended)


def _replica(kind, job, prefix, specs, type_, index, name):
    template, meta = specs[type_]["template"], job["metadata"]
    labels = {
        "controller-name": f"{prefix}-operator",
        "group-name": "kubeflow.org",
        "job-name": meta["name"],
        f"{prefix}-job-name": meta["name"],
        f"{prefix}-replica-index": str(index),
        f"{prefix}-replica-type": type_.lower(),
    }
    is_first = type_ in ("Master", "Chief") or (kind.kind == "TFJob" and type_ == "Worker" and index == 0)
    if is_first:
        labels["job-role"] = "master"
    spec = copy.deepcopy(template["spec"])
    policy = specs[type_].get("restartPolicy", "Never")
    spec["restartPolicy"] = "Never" if policy == "ExitCode" else policy
    own = (
        _tf_environment(job, specs, type_, index)
        if prefix == "tf"
        else _torch_environment(job, specs, type_, index)
    )
    for each in spec["containers"]:
        if each["name"] in ("tensorflow", "pytorch"):
            each["env"] = [*each.get("env", []), *own]
    given = template.get("metadata") or {}
    return {
        "metadata": {
            "name": name,
            "labels": given.get("labels", {}) | labels,
            "ownerReferences": [owner_of(job)],
        },
        "spec": spec,
    }


def _tf_environment(job, specs, type_, index):
    meta = job["metadata"]
    cluster = {
        each.lower(): [
            f"{meta['name']}-{each.lower()}-{number}.{meta['namespace']}.svc:2222"
            for number in range(spec["replicas"])
        ]
        for each, spec in specs.items()
    }
    told = {
        "cluster": cluster,
        "task": {"type": type_.lower(), "index": index},
        "environment": "cloud",
    }
    return [{"name": "TF_CONFIG", "value": json.dumps(told, separators=(",", ":"))}]


def _torch_environment(job, specs, type_, index):
    is_master = type_ == "Master"
    told = {
        "MASTER_PORT": "23456",
        "MASTER_ADDR": "localhost" if is_master else f"{job['metadata']['name']}-master-0",
        "WORLD_SIZE": str(sum(spec["replicas"] for spec in specs.values())),
        "RANK": str(0 if is_master else index + 1),
        "PYTHONUNBUFFERED": "0",
    }
    return [{"name": name, "value": value} for name, value in told.items()]


def _training_conditions(kind, job, conditions, specs, counted, restarted):
    word, name = kind.kind, job["metadata"]["name"]
    for type_ in restarted:
        conditions = [each for each in conditions if each["type"] != "Running"]
        text = f"{word} {name} is restarting because {counted[type_].get('failed', 0)} {type_} replica(s) failed."
        return condition(conditions, "Restarting", "True", f"{word}Restarting", text)
    for type_ in specs:
        if failed := counted[type_].get("failed"):
            text = f"{word} {name} is failed because {failed} {type_} replica(s) failed."
            return _ended(conditions, "Failed", f"{word}Failed", text)
    decides = next(each for each in ("Chief", "Master", "Worker") if each in specs)
    succeeded, wanted = counted[decides].get("succeeded", 0), specs[decides]["replicas"]
    needs_all = decides != "Worker" or job["spec"].get("successPolicy") == "AllWorkers"
    if succeeded >= (wanted if needs_all else 1):
        return _ended(conditions, "Succeeded", f"{word}Succeeded", f"{word} {name} successfully completed.")
    if counted[decides].get("active"):
        conditions = [each for each in conditions if each["type"] != "Restarting"]
        return condition(conditions, "Running", "True", f"{word}Running", f"{word} {name} is running.")
    return conditions


def _ended(conditions, type_, reason, message):
    running = next((each for each in conditions if each["type"] == "Running"), None)
    if running is not None:
        conditions = condition(conditions, "Running", "False", running["reason"], running["message"])
    return condition(conditions, type_, "True", reason, message)


# ---- Jobs


def job_step(store, kind, job):
    """Source: Kubernetes 1.32, Job v1 with completionMode Indexed."""
    meta, spec = job["metadata"], job["spec"]
    if "deletionTimestamp" in meta or is_true(job, "Complete", "Failed"):
        return
    _queue(store, kind, job)
    pods, status = pods_of(store, job), copy.deepcopy(job.get("status") or {})
    conditions = status.get("conditions", [])
    if spec.get("suspend"):
        for pod in pods:
            store.delete(PODS, meta["namespace"], pod["metadata"]["name"])
        status["conditions"] = condition(conditions, "Suspended", "True", "JobSuspended", "Job suspended")
        _write_status(store, kind, job, status)
        return
    if is_true(job, "Suspended"):
        conditions = condition(conditions, "Suspended", "False", "JobResumed", "Job resumed")
    status.setdefault("startTime", now())
    found = phases(pods)
    if found["Failed"] > spec.get("backoffLimit", 6):
        for pod in pods:
            if pod["status"]["phase"] in ("Pending", "Running"):
                store.delete(PODS, meta["namespace"], pod["metadata"]["name"])
        text = "Job has reached the specified backoff limit"
        for type_ in ("FailureTarget", "Failed"):
            conditions = condition(conditions, type_, "True", "BackoffLimitExceeded", text)
    elif found["Succeeded"] == spec["completions"]:
        text = "Reached expected number of succeeded pods"
        for type_ in ("SuccessCriteriaMet", "Complete"):
            conditions = condition(conditions, type_, "True", "CompletionsReached", text)
        status["completionTime"] = now()
    else:
        _make_indexed_pods(store, job, pods)
    status |= {"active": found["Pending"] + found["Running"], "ready": found["Running"]}
    status |= {"succeeded": found["Succeeded"], "failed": found["Failed"], "conditions": conditions}
    _write_status(store, kind, job, status)


def _make_indexed_pods(store, job, pods):
    meta, template = job["metadata"], job["spec"]["template"]
    label = "batch.kubernetes.io/job-completion-index"
    done = {pod["metadata"]["labels"][label] for pod in pods if pod["status"]["phase"] != "Failed"}
    for index in map(str, range(job["spec"]["completions"])):
        if index in done:
            continue
        given, spec = template.get("metadata") or {}, copy.deepcopy(template["spec"])
        for each in spec["containers"]:
            each["env"] = [*each.get("env", []), {"name": "JOB_COMPLETION_INDEX", "value": index}]
        of_job = {"batch.kubernetes.io/job-name": meta["name"], "job-name": meta["name"], label: index}
        body = {
            "metadata": {
                "name": f"{meta['name']}-{index}-{uuid.uuid4().hex[:5]}",
                "labels": given.get("labels", {}) | of_job,
                "ownerReferences": [owner_of(job)],
            },
            "spec": spec,
        }
        _create_pod(store, job, "FailedCreate", body)


# ---- Kubeflow Trainer


def train_job_step(store, kind, job):
    """One Job represents all nodes of a TrainJob. The fake creates no JobSet between them.

    Source: Kubeflow Trainer 2.2, or 2.1 if the definition has podTemplateOverrides.
    """
    meta = job["metadata"]
    if "deletionTimestamp" in meta or is_true(job, "Complete", "Failed"):
        return
    _queue(store, kind, job)
    status = copy.deepcopy(job.get("status") or {})
    conditions = status.get("conditions", [])
    runtime = _runtime(store, job)
    made = store.find(JOBS, meta["namespace"], f"{meta['name']}-{_NODE}-0")
    if runtime is None:
        text = f'TrainingRuntime "{job["spec"]["runtimeRef"]["name"]}" is not supported'
        conditions = condition(conditions, "Failed", "True", "TrainingRuntimeNotSupported", text)
    elif job["spec"].get("suspend"):
        conditions = condition(conditions, "Suspended", "True", "Suspended", "TrainJob is suspended")
    elif made is None:
        if conditions:
            conditions = condition(conditions, "Suspended", "False", "Resumed", "TrainJob is resumed")
        store.create(JOBS, meta["namespace"], _nodes(store, kind, job, runtime))
    else:
        found = made.get("status") or {}
        nodes, count = made["spec"]["completions"], found.get
        is_ready = count("ready", 0) + count("succeeded", 0) >= nodes
        told = {"ready": is_ready, "succeeded": is_true(made, "Complete"), "failed": is_true(made, "Failed")}
        told |= {"active": bool(count("active", 0)), "suspended": False}
        status["jobsStatus"] = [{"name": _NODE} | {word: int(value) for word, value in told.items()}]
        if is_true(made, "Complete"):
            text = "jobset completed successfully"
            conditions = condition(conditions, "Complete", "True", "AllJobsCompleted", text)
        elif is_true(made, "Failed"):
            text = "jobset failed due to one or more job failures"
            conditions = condition(conditions, "Failed", "True", "FailedJobs", text)
    _write_status(store, kind, job, status | {"conditions": conditions})


def _runtime(store, job):
    reference = job["spec"]["runtimeRef"]
    kind = next((each for each in store.kinds.values() if each.kind == reference["kind"]), None)
    if kind is None:
        return None
    return store.find(kind, job["metadata"]["namespace"] if kind.namespaced else "", reference["name"])


def _nodes(store, kind, job, runtime):
    """The Job for the nodes of a training runtime, with all changes that the TrainJob requests."""
    meta, spec = job["metadata"], job["spec"]
    (node,) = [
        each for each in runtime["spec"]["template"]["spec"]["replicatedJobs"] if each["name"] == _NODE
    ]
    made = copy.deepcopy(node["template"])
    template = made["spec"]["template"]
    (container,) = [each for each in template["spec"]["containers"] if each["name"] == _NODE]
    trainer = spec.get("trainer", {})
    container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    container["resources"] = trainer.get("resourcesPerNode", {})
    nodes = trainer.get("numNodes", 1)
    of_torch = {"PET_NNODES": str(nodes), "PET_MASTER_ADDR": f"{meta['name']}-node-0-0.{meta['name']}"}
    container["env"] = [
        *container.get("env", []),
        *trainer.get("env", []),
        *({"name": name, "value": value} for name, value in of_torch.items()),
    ]
    for patch in _patches(store, kind, spec):
        labels = patch.get("metadata", {}).get("labels", {})
        template.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
        template["spec"].setdefault("volumes", []).extend(patch["spec"].get("volumes", []))
        for each in patch["spec"].get("containers", []):
            container.setdefault("volumeMounts", []).extend(each.get("volumeMounts", []))
        for key in ("serviceAccountName", "imagePullSecrets"):
            if key in patch["spec"]:
                template["spec"][key] = patch["spec"][key]
    made["spec"] |= {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed"}
    return {
        "metadata": {"name": f"{meta['name']}-{_NODE}-0", "ownerReferences": [owner_of(job)]},
        "spec": made["spec"],
    }


def _patches(store, kind, spec):
    known = store.schemas[kind]["properties"]["spec"]["properties"]
    if "podTemplateOverrides" in known:
        return [
            each for each in spec.get("podTemplateOverrides", []) if {"name": _NODE} in each["targetJobs"]
        ]
    return [
        each["template"]["spec"]["template"]
        for patch in spec.get("runtimePatches", [])
        for each in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        if each["name"] == _NODE
    ]


# ---- Kueue


def _queue(store, kind, job):
    """Suspend a job until its queue admits it, if the job has a queue."""
    meta, spec = job["metadata"], job["spec"]
    name = meta.get("labels", {}).get(QUEUE)
    served = store.kinds.get((LOCAL_QUEUES.group, LOCAL_QUEUES.plural))
    if name is None or served is None:
        return
    queue = store.find(served, meta["namespace"], name)
    takes = queue is not None and queue.get("spec", {}).get("stopPolicy", "None") == "None"
    if spec.get("suspend") is not (not takes):
        spec["suspend"] = not takes
        store.change(kind, meta["namespace"], meta["name"], lambda it: it["spec"].update(suspend=not takes))


def queued(store, queue):
    """The kinds and documents of all jobs that wait in a queue."""
    meta = queue["metadata"]
    for kind in list(store.kinds.values()):
        if (kind.group, kind.plural) in STEPS:
            for found in store.list(kind, meta["namespace"], f"{QUEUE}={meta['name']}"):
                yield kind, found


STEPS = {
    (TF_JOBS.group, TF_JOBS.plural): training_step,
    (PYTORCH_JOBS.group, PYTORCH_JOBS.plural): training_step,
    (JOBS.group, JOBS.plural): job_step,
    (TRAIN_JOBS.group, TRAIN_JOBS.plural): train_job_step,
}
