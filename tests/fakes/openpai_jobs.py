"""Jobs for tests: one that runs, and what differs from it."""

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
    """JOB with each change, a path and the value to be there (REMOVED: none), and with these keys at the top."""
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
    """The job as text: JSON, which OpenPAI reads as YAML."""
    return job if isinstance(job, str) else json.dumps(job, indent=2)
