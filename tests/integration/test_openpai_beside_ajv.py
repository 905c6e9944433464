"""This project and the rules of OpenPAI's server check the same mutated jobs. The server must accept every job that this project
accepts.
"""

import copy
import math
import random
from pathlib import Path

import pytest
import yaml
from amounts import amount
from node_program import output_of

from nni_manager.training_services.openpai.job_checks import ProtocolInvalid
from nni_manager.training_services.openpai.protocol import parse

# The checks of the jobs need 5 s of processor time. The timeout is far longer, because a pytest worker on a busy machine may get
# only a tenth of a processor.
pytestmark = pytest.mark.timeout(amount(300, 1200))

JOBS = amount(150, 8000)
# This job has every key that the server of OpenPAI checks, so that mutations can change each of them.
JOB = yaml.safe_load("""
protocolVersion: 2
name: a_job-1
type: job
version: 1.0
contributor: ada
description: all keys
prerequisites:
- {protocolVersion: 2, name: img, type: dockerimage, version: "1", contributor: ada, description: an image, uri: "ubuntu:22.04",
   auth: {username: ada, password: <% $secrets.password %>, registryuri: registry}}
- {name: out, type: output, uri: "hdfs://out"}
- {name: scr, type: script, uri: "http://script", plugin: com.example, require: [img]}
- {name: dat, type: data, uri: ["http://a", "http://b"]}
parameters: {lr: 0.1, sizes: [1, 2]}
secrets: {password: hidden}
jobRetryCount: 1
taskRoles:
  worker:
    protocolVersion: 2
    instances: 2
    completion: {minFailedInstances: 1, minSucceededInstances: -1}
    taskRetryCount: 0
    prerequisites: [scr]
    dockerImage: img
    data: dat
    output: out
    script: scr
    extraContainerOptions: {shmMB: 64}
    resourcePerInstance: {cpu: 1, memoryMB: 100, gpu: 0, ports: {ssh: 1, http: 2}}
    commands: [echo <% $parameters.lr %>]
  ps: {dockerImage: img, resourcePerInstance: {cpu: 1, memoryMB: 100, gpu: 0}, commands: ["true"]}
deployments:
- {name: prod, taskRoles: {worker: {preCommands: [a], postCommands: [b]}}}
defaults: {deployment: prod, virtualCluster: default}
extras: {submitFrom: here, hivedScheduler: {jobPriorityClass: prod, taskRoles: {worker: {skuType: null}}}}
""")
VALUES = (
    *(None, True, False, 0, 1, -1, 2, 2.0, 1.5, 1e300, 10**20, math.nan, math.inf, [], {}, [None], [1], ["a"], {"a": 1}),
    *("", " ", "2", "2.0", "null", "a b", "ä", "a" * 300, "constructor", "__proto__", "toString", "<% $parameters.lr %>", "<% x"),
)  # fmt: skip
NAMES = ("", "constructor", "__proto__", "toString", "1a", "a-b", "é", "name", "type", "uri", "auth", "gpu")


def paths(value, path=()):
    """The paths of all parts of a value."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, each in entries:
        yield (*path, key)
        yield from paths(each, (*path, key))


def part(value, path):
    for key in path:
        value = value[key]
    return value


def mutate(job, choices):
    """Change one part of a job: remove it, rename it, duplicate it, replace its value, or add a key beside it."""
    everywhere = list(paths(job))
    path = choices.choice(everywhere)
    parent, key = part(job, path[:-1]), path[-1]
    value = choices.choice([*VALUES, part(job, choices.choice(everywhere))])
    match choices.randrange(5):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[choices.choice([f"{key}x", str(key).upper(), *NAMES])] = parent.pop(key)
        case 2 if isinstance(parent, dict):
            parent[choices.choice(NAMES)] = copy.deepcopy(value)
        case 3 if isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        case _:
            parent[key] = copy.deepcopy(value)


def mutated_text(choices):
    """The text of a job with one to three changes. Errors of the text itself are compared in test_openpai_beside_js_yaml.py."""
    job = copy.deepcopy(JOB)
    for _ in range(choices.choice((1, 1, 1, 2, 3))):
        mutate(job, choices)
    return yaml.safe_dump(job, allow_unicode=True, sort_keys=False)


def refusals_there(texts):
    return output_of(Path(__file__).with_name("job_rules.js"), "ajv", texts)


def refusal_here(text):
    try:
        parse(text)
    except ProtocolInvalid as error:
        return str(error)
    return ""


def test_openpai_accepts_every_mutated_job_that_this_project_accepts():
    choices = random.Random(amount(1, None))
    texts = [yaml.safe_dump(JOB), *(mutated_text(choices) for _ in range(JOBS))]
    verdicts = [
        (text, refusal_here(text), there) for text, there in zip(texts, refusals_there(texts), strict=True)
    ]
    assert verdicts[0][1:] == ("", "")
    assert [(text, there) for text, here, there in verdicts if there and not here] == []
    accepted = sum(not here for _, here, _ in verdicts)
    assert JOBS / 10 < accepted < JOBS / 2, "both verdicts occur"


@pytest.mark.parametrize("where", ["taskRoles", "ports", "deployments"])
def test_this_project_and_openpai_both_refuse_a_job_with_the_javascript_key_proto(where):
    job = copy.deepcopy(JOB)
    named = {
        "taskRoles": job["taskRoles"],
        "ports": job["taskRoles"]["worker"]["resourcePerInstance"]["ports"],
        "deployments": job["deployments"][0]["taskRoles"],
    }[where]
    value = named.popitem()[1]
    named.clear()
    named["__proto__"] = value
    text = yaml.safe_dump(job)
    (there,) = refusals_there([text])
    assert there
    assert "__proto__" in refusal_here(text)
    assert "rename it, e.g. proto" in refusal_here(text)
