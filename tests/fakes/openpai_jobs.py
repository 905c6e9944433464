"""Jobs for tests: a valid one, and variations of it."""

import copy
import json

JOB = {
    "protocolVersion": 2,
    "name": "job",
    "type": "job",
    "prerequisites": [
        {"name": "i", "type": "dockerimage", "uri": "ubuntu:22.04"},
        {"name": "d", "type": "data", "uri": ["/data"]},
        {"name": "s", "type": "script", "uri": "https://host/code"},
        {"name": "o", "type": "output", "uri": "/out"},
    ],
    "taskRoles": {
        "worker": {
            "instances": 2,
            "dockerImage": "i",
            "resourcePerInstance": {"cpu": 1, "memoryMB": 1024, "gpu": 0},
            "commands": ["echo hello"],
        }
    },
}
REMOVED = object()
WORKER = ("taskRoles", "worker")


def a_job(*changes, **top):
    """JOB with the given changes and top-level keys.

    Each change is a path and its new value; the value REMOVED deletes the path.
    """
    job = copy.deepcopy(JOB)
    for *path, last, value in [*((*path, value) for path, value in changes), *top.items()]:
        place = job
        for step in path:
            place = place[step]
        if value is REMOVED:
            del place[last]
        elif isinstance(place, list) and last == len(place):
            place.append(value)
        else:
            place[last] = value
    return job


def text_of(job):
    """The job as JSON text. OpenPAI accepts it, because JSON is valid YAML."""
    return job if isinstance(job, str) else json.dumps(job, indent=2)


RESOURCES = (*WORKER, "resourcePerInstance")
PLUGINS = "com.microsoft.pai.runtimeplugin"

# A real server responds to these jobs with 202.
ACCEPTED = {
    "protocolVersion as text": a_job(protocolVersion="2"),
    "version as a number": text_of(a_job(version=1.0)),
    "unknown key in defaults": a_job(defaults={"virtualCluster": "default", "other": 1}),
    "anything in extras": a_job(
        extras={"submitFrom": 5, "other": {"a": [1, None]}, "hivedScheduler": {"taskRoles": {}}}
    ),
    "role W_1": a_job((("taskRoles", "W_1"), JOB["taskRoles"]["worker"])),
    "minFailed -5": a_job(((*WORKER, "completion"), {"minFailedInstances": -5})),
    "minFailed null": a_job(((*WORKER, "completion"), {"minFailedInstances": None})),
    "minSucceeded 0": a_job(((*WORKER, "completion"), {"minSucceededInstances": 0})),
    "taskRetryCount -5": a_job(((*WORKER, "taskRetryCount"), -5)),
    "gpu -1": a_job(((*RESOURCES, "gpu"), -1)),
    "cpu 0": a_job(((*RESOURCES, "cpu"), 0)),
    "port count 0": a_job(((*RESOURCES, "ports"), {"a": 0})),
    "unknown key in extraContainerOptions": a_job(
        ((*WORKER, "extraContainerOptions"), {"shmMB": 64, "other": 1})
    ),
    "same name of another type": a_job((("prerequisites", 4), {"name": "i", "type": "script", "uri": "u"})),
    "deployment for an unknown role": a_job(
        deployments=[{"name": "x", "taskRoles": {"nope": {"preCommands": ["a"]}}}]
    ),
    # The examples in the documentation of OpenPAI do not contain these jobs. They follow from its tables of fields.
    "script without uri and with other keys": a_job(
        (("prerequisites", 2), {"name": "s", "type": "script", "other": 1})
    ),
    "data without uri": a_job((("prerequisites", 1), {"name": "d", "type": "data"})),
    "null skuType": a_job(extras={"hivedScheduler": {"taskRoles": {"worker": {"skuType": None}}}}),
    "no instances": a_job(((*WORKER, "instances"), REMOVED)),
    "a whole number with a point": text_of(a_job()).replace('"instances": 2', '"instances": 2.0'),
    "other keys in auth": a_job((("prerequisites", 0, "auth"), {"username": "u", "email": "e"})),
    "other keys in a deployment": a_job(deployments=[{"name": "x", "taskRoles": {"worker": {}}, "other": 1}]),
    "name of 255": a_job(name="n" * 255),
    "prerequisite with a foreign plugin": a_job((("prerequisites", 2, "plugin"), "org.other")),
}

# A real server responds to these jobs with 400 and the position of the error.
REJECTED = {
    "protocolVersion 1": (a_job(protocolVersion=1), "protocolVersion"),
    "name with ~": (a_job(name="a~b"), "name"),
    "name empty": (a_job(name=""), "name"),
    "name of 256": (a_job(name="n" * 256), "name"),
    "name with a line feed": (a_job(name="n\n"), "name"),
    "no type": (a_job(type=REMOVED), "type"),
    "unknown top key": (a_job(other=1), "other"),
    "extras null": (a_job(extras=None), "extras"),
    "role w-1": (a_job((("taskRoles", "w-1"), JOB["taskRoles"]["worker"])), "taskRoles.w-1"),
    "role 1w": (a_job((("taskRoles", "1w"), JOB["taskRoles"]["worker"])), "taskRoles.1w"),
    "unknown role key": (a_job(((*WORKER, "other"), 1)), "taskRoles.worker.other"),
    "instances 0": (a_job(((*WORKER, "instances"), 0)), "taskRoles.worker.instances"),
    "instances 1.5": (a_job(((*WORKER, "instances"), 1.5)), "taskRoles.worker.instances"),
    "unknown completion key": (a_job(((*WORKER, "completion"), {"x": 1})), "taskRoles.worker.completion.x"),
    "jobRetryCount -2": (a_job(jobRetryCount=-2), "jobRetryCount"),
    "shmMB 1.5": (
        a_job(((*WORKER, "extraContainerOptions"), {"shmMB": 1.5})),
        "taskRoles.worker.extraContainerOptions.shmMB",
    ),
    "no gpu": (a_job(((*RESOURCES, "gpu"), REMOVED)), "taskRoles.worker.resourcePerInstance.gpu"),
    "unknown resource key": (a_job(((*RESOURCES, "x"), 1)), "taskRoles.worker.resourcePerInstance.x"),
    "ports {}": (a_job(((*RESOURCES, "ports"), {})), "taskRoles.worker.resourcePerInstance.ports"),
    "port label a-b": (
        a_job(((*RESOURCES, "ports"), {"a-b": 1})),
        "taskRoles.worker.resourcePerInstance.ports.a-b",
    ),
    "no commands": (a_job(((*WORKER, "commands"), [])), "taskRoles.worker.commands"),
    "a number as command": (a_job(((*WORKER, "commands"), [1])), "taskRoles.worker.commands[0]"),
    "no prerequisites": (a_job(prerequisites=REMOVED), "taskRoles.worker.dockerImage"),
    "prerequisites empty": (a_job(prerequisites=[]), "prerequisites"),
    "dockerimage with another key": (a_job((("prerequisites", 0, "x"), 1)), "prerequisites[0].x"),
    "dockerimage without uri": (a_job((("prerequisites", 0, "uri"), REMOVED)), "prerequisites[0].uri"),
    "data uri as a string": (a_job((("prerequisites", 1, "uri"), "/data")), "prerequisites[1].uri"),
    "data without name": (a_job((("prerequisites", 1, "name"), REMOVED)), "prerequisites[1].name"),
    "deployments []": (a_job(deployments=[]), "deployments"),
    "deployment without taskRoles": (a_job(deployments=[{"name": "x"}]), "deployments[0].taskRoles"),
    "secrets as a list": (a_job(secrets=["x"]), "secrets"),
    "parameters as a list": (a_job(parameters=["x"]), "parameters"),
    "a list": ("- a", ""),
    "null": ("null", ""),
    "nothing": ("", ""),
    # The fields of these jobs have valid types, but their values contradict each other: a name occurs twice or is not defined.
    "prerequisite twice": (a_job((("prerequisites", 4), JOB["prerequisites"][0])), "prerequisites[4].name"),
    "unknown image": (a_job(((*WORKER, "dockerImage"), "nope")), "taskRoles.worker.dockerImage"),
    "unknown data": (a_job(((*WORKER, "data"), "nope")), "taskRoles.worker.data"),
    "an image as data": (a_job(((*WORKER, "data"), "i")), "taskRoles.worker.data"),
    "unknown prerequisite": (
        a_job(((*WORKER, "prerequisites"), ["s", "nope"])),
        "taskRoles.worker.prerequisites[1]",
    ),
    "deployment twice": (
        a_job(deployments=[{"name": "x", "taskRoles": {"worker": {}}}] * 2),
        "deployments[1].name",
    ),
    "unknown default deployment": (a_job(defaults={"deployment": "nope"}), "defaults.deployment"),
    # A real server responds to these jobs with 500.
    "YAML that is none": ("a: b: c", ""),
    "key twice": (text_of(a_job()).replace('"type": "job"', '"type": "job", "type": "job"'), "type"),
    "two documents": ("a: 1\n---\nb: 1", ""),
    # A real server accepts these jobs with 202. After that, the job fails, or does not do what its file describes.
    "dockerImage toString": (a_job(((*WORKER, "dockerImage"), "toString")), "taskRoles.worker.dockerImage"),
    "names one cluster name": (
        a_job((("taskRoles", "WORKER_"), JOB["taskRoles"]["worker"])),
        "taskRoles.WORKER_",
    ),
    "no cluster name": (a_job((("taskRoles", "__"), JOB["taskRoles"]["worker"])), "taskRoles.__"),
    "too many instances": (a_job(((*WORKER, "instances"), 1e300)), "taskRoles.worker.instances"),
    "infinitely many instances": (
        text_of(a_job()).replace(': 2,\n      "docker', ': .inf,\n      "docker'),
        "taskRoles.worker.instances",
    ),
    "cpu beyond a double": (a_job(((*RESOURCES, "cpu"), 2**53)), "taskRoles.worker.resourcePerInstance.cpu"),
    "unknown requirement": (
        a_job((("prerequisites", 2, "require"), ["nope"])),
        "prerequisites[2].require[0]",
    ),
    "requirement of itself": (a_job((("prerequisites", 2, "require"), ["s"])), "prerequisites[2].require"),
    "storages as a word": (a_job(extras={"storages": "x"}), "extras.storages"),
    "storage without name": (a_job(extras={"storages": [{}]}), "extras.storages[0].name"),
    "unknown plugin": (a_job(extras={PLUGINS: [{"plugin": "shh"}]}), f"extras.{PLUGINS}[0].plugin"),
    "unknown plugin of a prerequisite": (
        a_job((("prerequisites", 2, "plugin"), f"{PLUGINS}.shh")),
        "prerequisites[2].plugin",
    ),
    "git without repository": (
        a_job(extras={PLUGINS: [{"plugin": "git"}]}),
        f"extras.{PLUGINS}[0].parameters",
    ),
    "cmd with both forms": (
        a_job(extras={PLUGINS: [{"plugin": "cmd", "parameters": {"callbacks": [], "preCommands": []}}]}),
        f"extras.{PLUGINS}[0].parameters.callbacks",
    ),
    "storage names as a number": (
        a_job(extras={PLUGINS: [{"plugin": "teamwise_storage", "parameters": {"storageConfigNames": 5}}]}),
        f"extras.{PLUGINS}[0].parameters.storageConfigNames",
    ),
}
