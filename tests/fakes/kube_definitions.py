"""Definitions of the operators' custom resources, with the same validation as the real definitions."""


def definition(group, plural, kind, *, has_status, schema=None, version="v1", scope="Namespaced"):
    """A CustomResourceDefinition with one version."""
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema or anything},
    }
    if has_status:
        served["subresources"] = {"status": {}}
    spec = {"group": group, "scope": scope, "names": names, "versions": [served]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": spec,
    }


_RETRY = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "fancyRetryPolicy": {"type": "boolean"},
        "maxRetryCount": {"type": "integer", "minimum": -2},
    },
}
_COUNT = {"type": "integer", "minimum": -1}
_POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {"spec": {"type": "object", "required": ["containers"]}},
}
_ROLE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "taskNumber", "task"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]{1,63}$"},
        "taskNumber": {"type": "integer", "minimum": 0, "maximum": 10000},
        "frameworkAttemptCompletionPolicy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"minFailedTaskCount": _COUNT, "minSucceededTaskCount": _COUNT},
        },
        "task": {
            "type": "object",
            "additionalProperties": False,
            "required": ["pod"],
            "properties": {
                "retryPolicy": _RETRY,
                "podGracefulDeletionTimeoutSec": {"type": ["integer", "null"]},
                "pod": _POD,
            },
        },
    },
}
# A Framework has no status subresource: FrameworkController writes the status as part of the whole object.
FRAMEWORK = definition(
    *("frameworkcontroller.microsoft.com", "frameworks", "Framework"),
    has_status=False,
    schema={
        "type": "object",
        "required": ["spec"],
        "properties": {
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[a-z0-9]{1,63}$"}},
            },
            "spec": {
                "type": "object",
                "additionalProperties": False,
                "required": ["executionType", "taskRoles"],
                "properties": {
                    "description": {"type": "string"},
                    "executionType": {"enum": ["Create", "Start", "Stop"]},
                    "retryPolicy": _RETRY,
                    "taskRoles": {"type": "array", "items": _ROLE},
                },
            },
        },
    },
)

# ---- Kubeflow


def _replicas(types, **others):
    spec = {
        "type": "object",
        "additionalProperties": False,
        "required": ["replicas", "template"],
        "properties": {
            "replicas": {"type": "integer", "minimum": 0},
            "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
            "template": {
                "type": "object",
                "additionalProperties": False,
                "required": ["spec"],
                "properties": {"metadata": {"type": "object"}, **_POD["properties"]},
            },
        },
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": dict.fromkeys(types, spec),
        **others,
    }


def _with_spec(required, **properties):
    spec = {"type": "object", "additionalProperties": False, "required": required, "properties": properties}
    return {"type": "object", "required": ["spec"], "properties": {"spec": spec}}


_CLEAN = {"enum": ["All", "Running", "None"]}
_RUN_POLICY = {
    "type": "object",
    "properties": {"cleanPodPolicy": _CLEAN, "backoffLimit": {"type": "integer"}},
}


def tf_job(version="v1"):
    """TFJobs, as defined by the training operator and tf-operator."""
    schema = _with_spec(
        ["tfReplicaSpecs"],
        tfReplicaSpecs=_replicas(("PS", "Worker", "Chief", "Master", "Evaluator")),
        successPolicy={"enum": ["", "AllWorkers"]},
        runPolicy=_RUN_POLICY,
        cleanPodPolicy=_CLEAN,
    )
    return definition("kubeflow.org", "tfjobs", "TFJob", has_status=True, schema=schema, version=version)


def pytorch_job(version="v1"):
    """PyTorchJobs, as defined by the training operator and pytorch-operator."""
    schema = _with_spec(
        ["pytorchReplicaSpecs"],
        pytorchReplicaSpecs=_replicas(("Master", "Worker")),
        runPolicy=_RUN_POLICY,
        cleanPodPolicy=_CLEAN,
    )
    return definition(
        "kubeflow.org", "pytorchjobs", "PyTorchJob", has_status=True, schema=schema, version=version
    )


_TRAINER = "trainer.kubeflow.org"
_TEXTS = {"type": "array", "items": {"type": "string", "maxLength": 65536}, "maxItems": 128}
_ENV = {"type": "array", "maxItems": 128, "items": {"type": "object", "required": ["name"]}}
# Kubeflow Trainer accepts no `env` in these containers. The environment of the training container can only be set in the field
# `trainer`.
_CONTAINERS = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "volumeMounts": {"type": "array"}},
    },
}
_PATCHED_POD = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "serviceAccountName": {"type": "string", "maxLength": 253},
        "volumes": {"type": "array", "maxItems": 128},
        "containers": _CONTAINERS,
        "initContainers": _CONTAINERS,
        "imagePullSecrets": {"type": "array", "maxItems": 64},
        "nodeSelector": {"type": "object"},
        "tolerations": {"type": "array"},
    },
}


def _only(**properties):
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _patches_of_2_2():
    pod = _only(metadata={"type": "object"}, spec=_PATCHED_POD)
    job = _only(
        name={"type": "string"}, template=_only(metadata={"type": "object"}, spec=_only(template=pod))
    )
    jobs = _only(replicatedJobs={"type": "array", "items": job})
    runtime = _only(template=_only(metadata={"type": "object"}, spec=jobs))
    patch = _only(manager={"type": "string", "minLength": 1, "maxLength": 253}, trainingRuntimeSpec=runtime)
    return {"runtimePatches": {"type": "array", "maxItems": 16, "items": patch}}


def _patches_of_2_1():
    target = {"type": "array", "items": _only(name={"type": "string"})}
    override = _only(targetJobs=target, metadata={"type": "object"}, spec=_PATCHED_POD)
    return {"podTemplateOverrides": {"type": "array", "items": override}}


def _patches_of_2_0():
    return {"podSpecOverrides": {"type": "array"}}


_PATCHES = {"2.0": _patches_of_2_0, "2.1": _patches_of_2_1, "2.2": _patches_of_2_2}


def train_job(release="2.2"):
    """TrainJobs of a release of Kubeflow Trainer. A release drops unknown fields without an error."""
    patches = _PATCHES[release]()
    spec = _with_spec(
        ["runtimeRef"],
        runtimeRef=_only(
            apiGroup={"type": "string"}, kind={"type": "string"}, name={"type": "string", "minLength": 1}
        ),
        trainer=_only(
            image={"type": "string", "maxLength": 500},
            command=_TEXTS,
            args=_TEXTS,
            env=_ENV,
            numNodes={"type": "integer"},
            resourcesPerNode={"type": "object"},
            numProcPerNode={"type": "integer"},
        ),
        suspend={"type": "boolean"},
        **patches,
    )
    spec["properties"]["spec"]["additionalProperties"] = True
    name = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
    spec["properties"]["metadata"] = {"type": "object", "properties": {"name": name}}
    return definition(_TRAINER, "trainjobs", "TrainJob", has_status=True, schema=spec, version="v1alpha1")


CLUSTER_RUNTIME = definition(
    *(_TRAINER, "clustertrainingruntimes", "ClusterTrainingRuntime"),
    has_status=False,
    version="v1alpha1",
    scope="Cluster",
)
RUNTIME = definition(_TRAINER, "trainingruntimes", "TrainingRuntime", has_status=False, version="v1alpha1")
LOCAL_QUEUE = definition("kueue.x-k8s.io", "localqueues", "LocalQueue", has_status=True, version="v1beta1")
# These are all custom resources of Kubeflow and Kueue that the fake API server has.
OF_KUBEFLOW = (tf_job(), pytorch_job(), train_job(), CLUSTER_RUNTIME, RUNTIME, LOCAL_QUEUE)
# Kubeflow Trainer installs this runtime. The fields that no test needs are omitted.
TORCH_DISTRIBUTED = {
    "metadata": {"name": "torch-distributed"},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "spec": {
                                "backoffLimit": 0,
                                "template": {
                                    "spec": {
                                        "restartPolicy": "Never",
                                        "containers": [{"name": "node", "image": "pytorch/pytorch:2.9"}],
                                    }
                                },
                            }
                        },
                    }
                ]
            }
        },
    },
}
