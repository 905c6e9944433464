"""OpenPAI jobs: which jobs the server accepts or rejects, reports of all errors, and the parsed job."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openpai_jobs import ACCEPTED, PLUGINS, REJECTED, REMOVED, WORKER, a_job, text_of

from nni_manager.errors import UserError
from nni_manager.training_services.openpai.job_checks import ProtocolInvalid
from nni_manager.training_services.openpai.protocol import (
    JobCompletion,
    Storage,
    TaskResources,
    parse,
)
from nni_manager.training_services.openpai.render import render


def diagnostics(job):
    with pytest.raises(ProtocolInvalid) as caught:
        parse(text_of(job))
    assert isinstance(caught.value, UserError)
    return str(caught.value).splitlines()


def is_well_formed(each):
    place, message = (each.line, each.column), each.message
    return min(place) >= 1 and message.startswith("cannot ") and "; " in message and "None" not in message


@pytest.mark.parametrize("job", ACCEPTED.values(), ids=ACCEPTED)
def test_the_parser_accepts_every_job_that_openpai_accepts(job):
    assert parse(text_of(job)).name.startswith(("job", "n"))


@pytest.mark.parametrize(("job", "key"), REJECTED.values(), ids=REJECTED)
def test_the_parser_refuses_every_job_that_openpai_rejects_and_reports_position_and_remedy(job, key):
    with pytest.raises(ProtocolInvalid) as caught:
        parse(text_of(job), "job.yml")
    assert caught.value.diagnostics[0].key == key
    assert all(is_well_formed(each) for each in caught.value.diagnostics)


def test_all_errors_are_reported_in_the_order_of_their_lines():
    text = """\
protocolVersion: 2
name: a~b
prerequisites:
- {name: i, type: dockerimage, uri: u, plugin: x}
taskRoles:
  Worker:
    instances: 0
    dockerImage: j
    resourcePerInstance: {cpu: 1, gpu: one}
    commands: []
  worker_:
    dockerImage: i
    resourcePerInstance: {cpu: 1, gpu: 1, memoryMB: 1}
    comands: [a]
    commands: [a]
secrets: [tok3n]
extra: {}
"""
    assert diagnostics(text) == [
        "line 1, column 1: cannot do without type: it must be the word job; write e.g. type: job",
        'line 2, column 1: cannot use name: "a~b" is not a name of 1 to 255 letters, digits, _ and -; write e.g. name: my_job-1',
        "line 4, column 40: cannot use prerequisites[0].plugin: there is no such key here; "
        "remove it or use one of protocolVersion, name, version, contributor, description, type, uri, auth",
        "line 7, column 5: cannot use taskRoles.Worker.instances: 0 is not a whole number from 1 to 10000; "
        "write e.g. instances: 1",
        'line 8, column 5: cannot use taskRoles.Worker.dockerImage: there is no prerequisite of type dockerimage named "j"; '
        "use one of i",
        "line 9, column 5: cannot do without taskRoles.Worker.resourcePerInstance.memoryMB: it must be a whole number; "
        "write e.g. memoryMB: 1024",
        'line 9, column 35: cannot use taskRoles.Worker.resourcePerInstance.gpu: "one" is not a whole number; write e.g. gpu: 0',
        "line 10, column 5: cannot use taskRoles.Worker.commands: [] is not a list of at least one command; "
        'write e.g. commands: ["echo hello"]',
        "line 11, column 3: cannot use taskRoles.worker_: its name on a cluster is worker, as that of Worker; "
        "rename one so that they differ in letters or digits",
        "line 14, column 5: cannot use taskRoles.worker_.comands: there is no such key here; did you mean commands? "
        "(known: protocolVersion, instances, completion, taskRetryCount, prerequisites, dockerImage, data, output, script, "
        "extraContainerOptions, resourcePerInstance, commands)",
        # The message must not contain the secret.
        "line 16, column 1: cannot use secrets: its value is not a mapping; write e.g. secrets: {key: value}",
        "line 17, column 1: cannot use extra: there is no such key here; did you mean extras? (known: protocolVersion, name, "
        "version, contributor, description, type, prerequisites, parameters, secrets, jobRetryCount, taskRoles, deployments, "
        "defaults, extras)",
    ]


def test_the_response_to_a_schema_violation_is_a_list_of_errors():
    with pytest.raises(ProtocolInvalid) as caught:
        parse(text_of(a_job(((*WORKER, "instances"), 0), name=1)))
    errors = json.loads(caught.value.response_message())
    assert [
        {**error, "schemaPath": error["schemaPath"].split("/")[-1], "message": ""} for error in errors
    ] == [
        {
            "keyword": "type",
            "dataPath": ".name",
            "schemaPath": "type",
            "params": {"type": "string"},
            "message": "",
        },
        {
            "keyword": "minimum",
            "dataPath": ".taskRoles.worker.instances",
            "schemaPath": "minimum",
            "params": {"limit": 1},
            "message": "",
        },
    ]


def test_the_response_to_a_semantic_error_is_plain_text():
    with pytest.raises(ProtocolInvalid) as caught:
        parse(text_of(a_job(defaults={"deployment": "nope"})))
    assert caught.value.response_message() == str(caught.value)
    assert "there is no deployment named" in str(caught.value)


def test_the_error_for_a_cycle_of_prerequisites_names_the_prerequisites_in_the_cycle():
    job = a_job(
        (("prerequisites", 1, "require"), ["s"]),
        (("prerequisites", 2, "require"), ["o"]),
        (("prerequisites", 3, "require"), ["d"]),
    )
    (line,) = diagnostics(job)
    assert "d requires s requires o requires d; remove one of these" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "prerequisites:\n"
        + "".join(f"- {{name: p{n}, type: script, require: [q{n}]}}\n" for n in range(800)),
        "prerequisites:\n"
        + "".join(f"- {{name: p{n}, type: script, require: [p{n + 1}]}}\n" for n in range(800)),
        "taskRoles:\n" + "".join(f"  w{n}: {{dockerImage: i{n}, x{n}: 1}}\n" for n in range(800)),
        "parameters:\n" + "  k: 1\n" * 3000,
    ],
    ids=["unknown names", "a long chain", "wrong roles", "one key"],
)
def test_a_job_with_thousands_of_errors_is_refused_in_bounded_time_and_space(text):
    started = time.monotonic()
    with pytest.raises(ProtocolInvalid) as caught:
        parse(text)
    assert time.monotonic() - started < 30
    assert len(str(caught.value)) < 2_000_000


def test_a_job_with_only_the_required_keys_gets_the_default_values():
    job = parse(text_of(a_job(((*WORKER, "instances"), REMOVED))))
    (role,) = job.task_roles
    assert (job.name, job.job_retry_count, job.virtual_cluster) == ("job", 0, "default")
    assert (job.gang_allocation, job.storages, job.deployment, job.plugin_calls) == (True, None, {}, ())
    assert (job.parameters, job.secrets, job.warnings) == ({}, {}, ())
    assert job.notify_of == ()
    assert (role.instances, role.completion, role.task_retry_count) == (1, JobCompletion(1, 1), 0)
    assert role.resources == TaskResources(0, 1, 1024, None, False, {"ssh": 1, "http": 1})
    assert role.mangled_name == "worker"


def test_every_supported_key_of_a_job_is_parsed():
    job = parse(
        text_of(
            a_job(
                (
                    WORKER,
                    {
                        "instances": 4,
                        "completion": {"minFailedInstances": 2, "minSucceededInstances": -1},
                        "taskRetryCount": 3,
                        "dockerImage": "i",
                        "data": "d",
                        "output": "o",
                        "script": "s",
                        "prerequisites": ["s"],
                        "extraContainerOptions": {"shmMB": 64, "infiniband": True},
                        "resourcePerInstance": {"cpu": 4, "memoryMB": 2048, "gpu": 2, "ports": {"tcp": 3}},
                        "commands": ["a", "b"],
                    },
                ),
                jobRetryCount=2,
                parameters={"lr": 0.5},
                secrets={"tok": "x"},
                deployments=[{"name": "dep", "taskRoles": {"worker": {"preCommands": ["p"]}}}],
                defaults={"virtualCluster": "vc1", "deployment": "dep"},
                extras={
                    "gangAllocation": False,
                    "storages": [{"name": "a"}, {"name": "b", "mountPath": "/b"}],
                    "jobStatusChangeNotification": {"running": True, "failed": True, "stopped": "yes"},
                },
            )
        )
    )
    (role,) = job.task_roles
    assert (role.completion, role.task_retry_count) == (JobCompletion(2, -1), 3)
    assert (role.data, role.output, role.script, role.prerequisites) == ("d", "o", "s", ("s",))
    assert role.resources == TaskResources(2, 4, 2048, 64, True, {"ssh": 1, "http": 1, "tcp": 3})
    assert (job.job_retry_count, job.virtual_cluster, job.gang_allocation) == (2, "vc1", False)
    assert job.deployment == {"worker": {"preCommands": ["p"]}}
    assert job.storages == (Storage("a", "/mnt/a"), Storage("b", "/b"))
    assert job.notify_of == ("running", "failed")


@pytest.mark.parametrize(
    ("completion", "effective"),
    [
        ({}, JobCompletion(1, 4)),
        ({"minFailedInstances": None, "minSucceededInstances": None}, JobCompletion(1, 4)),
        ({"minFailedInstances": 0, "minSucceededInstances": 0}, JobCompletion(1, 4)),
        ({"minFailedInstances": -1, "minSucceededInstances": -1}, JobCompletion(-1, -1)),
        ({"minFailedInstances": 3, "minSucceededInstances": 2}, JobCompletion(3, 2)),
    ],
)
def test_the_default_completion_policy_applies_if_an_instance_count_is_missing_or_null_or_zero(
    completion, effective
):
    job = parse(text_of(a_job(((*WORKER, "completion"), completion), ((*WORKER, "instances"), 4))))
    assert job.task_roles[0].completion == effective


@pytest.mark.parametrize(
    ("extras", "storages"),
    [
        ({}, None),
        ({"storages": []}, ()),
        ({PLUGINS: [{"plugin": "teamwise_storage"}]}, ()),
        (
            {PLUGINS: [{"plugin": "teamwise_storage", "parameters": {"storageConfigNames": ["n"]}}]},
            (Storage("n", "/mnt/n"),),
        ),
        (
            {
                "storages": [],
                PLUGINS: [{"plugin": "teamwise_storage", "parameters": {"storageConfigNames": ["n"]}}],
            },
            (),
        ),
    ],
)
def test_the_storages_of_a_job_come_from_its_storages_key_or_the_teamwise_storage_plugin(extras, storages):
    assert parse(text_of(a_job(extras=extras))).storages == storages


def test_a_prerequisite_lookup_without_a_type_returns_the_last_prerequisite_of_that_name():
    job = parse(text_of(a_job((("prerequisites", 4), {"name": "i", "type": "script", "uri": "u"}))))
    assert job.prerequisite("i").values["uri"] == "u"
    assert job.prerequisite("i", "dockerimage").values["uri"] == "ubuntu:22.04"


@pytest.mark.parametrize(
    ("written", "gang"), [(False, False), (True, True), ("false", True), (0, True), (None, True)]
)
def test_only_the_boolean_false_disables_gang_allocation(written, gang):
    assert parse(text_of(a_job(extras={"gangAllocation": written}))).gang_allocation is gang


def test_a_key_without_effect_causes_a_warning():
    job = a_job(
        ((*WORKER, "taskRetryCount"), 2),
        (("prerequisites", 2, "plugin"), f"{PLUGINS}.cmd"),
        (("prerequisites", 2, "failurePolicy"), "skip"),
        (("prerequisites", 3, "plugin"), "cmd"),
        (("prerequisites", 1, "callbacks"), []),
        deployments=[{"name": "x", "taskRoles": {"workr": {}}}],
        extras={
            "gangAllocation": "false",
            "hivedScheduler": {"jobPriorityClass": "high", "taskRoles": {"work": {"skuNum": 1}}},
            "jobStatusChangeNotification": {"running": True, "suceeded": True},
            PLUGINS: [{"plugin": "ssh", "parameters": {}, "taskroles": ["chief"], "taskRoles": ["worker"]}],
        },
    )
    assert [warning.message for warning in parse(text_of(job)).warnings] == [
        'extras.gangAllocation: "false" counts as true; write true or false without quotes',
        "taskRoles.worker.taskRetryCount has no effect; set extras.gangAllocation to false to retry single tasks",
        "deployments[0].taskRoles.workr has no effect: there is no such task role; did you mean worker? (known: worker)",
        "extras.hivedScheduler.taskRoles.work has no effect: there is no such task role; did you mean worker? (known: worker)",
        "extras.com.microsoft.pai.runtimeplugin[0].taskroles[0] has no effect: there is no such task role; use one of worker",
        'extras.hivedScheduler.jobPriorityClass has no effect: there is no priority class "high"; use crit, prod, test, oppo',
        f"prerequisites[1].callbacks has no effect: there is no plugin that runs them; write plugin: {PLUGINS}.cmd beside it",
        f'prerequisites[3].plugin has no effect: there is no plugin "cmd"; write {PLUGINS}.cmd',
        "extras.jobStatusChangeNotification.suceeded has no effect: there is no such change; did you mean succeeded? "
        "(known: running, succeeded, stopped, failed, retried)",
        'failurePolicy "skip" counts as fail; write fail or ignore',
        "extras.com.microsoft.pai.runtimeplugin[0].taskRoles has no effect: there is no such key; did you mean taskroles? "
        "(known: plugin, taskroles, parameters, failurePolicy)",
    ]


def test_a_template_in_an_image_name_and_an_unsupported_role_name_cause_warnings():
    role = a_job()["taskRoles"]["worker"]
    job = a_job(
        (("prerequisites", 0, "uri"), "ubuntu:<% $parameters.tag %>"),
        taskRoles={"Worker_1": role, "ps2": role},
    )
    assert [warning.message for warning in parse(text_of(job)).warnings] == [
        "prerequisites[0].uri stays as it is: OpenPAI fills in no template there; write the image's name",
        "taskRoles.Worker_1 is worker1 on a cluster, whose runtime finds no such role in the job and fails; "
        "rename it with lower-case letters and digits, e.g. worker1",
    ]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "type", "plugin", "require", "parameters", "worker", "x"]),
            values,
            max_size=3,
        )
    ),
    max_leaves=8,
)


def places(value, path=()):
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for step, child in children:
        yield from places(child, (*path, step))


RICH = a_job(
    ((*WORKER, "prerequisites"), ["s"]),
    ((*WORKER, "completion"), {"minFailedInstances": 1}),
    ((*WORKER, "data"), "d"),
    (("prerequisites", 0, "auth"), {"username": "<% $secrets.a %>"}),
    (("prerequisites", 2, "require"), ["d"]),
    (("prerequisites", 2, "plugin"), f"{PLUGINS}.cmd"),
    (("prerequisites", 2, "callbacks"), [{"event": "taskStarts", "commands": ["a <% $data.uri[0] %>"]}]),
    parameters={"p": [1, {"q": 2}]},
    deployments=[{"name": "x", "taskRoles": {"worker": {"preCommands": ["a <% $parameters.p[1].q %>"]}}}],
    defaults={"deployment": "x", "virtualCluster": "v"},
    secrets={"a": "b"},
    extras={
        "gangAllocation": True,
        "storages": [{"name": "n", "mountPath": "/n"}],
        "jobStatusChangeNotification": {"running": True},
        PLUGINS: [
            {
                "plugin": "git",
                "failurePolicy": "ignore",
                "parameters": {"repo_uri": "u", "options": ["-q"], "clone_dir": "d"},
            },
            {
                "plugin": "ssh",
                "parameters": {
                    "jobssh": True,
                    "sshbarrier": True,
                    "sshbarrierTimeout": 3,
                    "userssh": {"type": "custom", "value": "v"},
                },
            },
            {
                "plugin": "tensorboard",
                "taskroles": ["worker"],
                "parameters": {"port": 1, "logdir": {"a": "<% $secrets.a %>"}},
            },
            {"plugin": "teamwise_storage", "parameters": {"storageConfigNames": ["n"]}},
        ],
    },
)


@given(st.sampled_from([path for path in places(RICH) if path]), anything)
def test_a_job_with_any_value_at_any_key_is_parsed_or_refused_without_a_crash(path, value):
    job = json.loads(json.dumps(RICH))
    place = job
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert is_read_or_rejected(json.dumps(job).replace("NaN", ".nan").replace("Infinity", ".inf"))


def is_read_or_rejected(text):
    try:
        render(parse(text))
    except ProtocolInvalid as error:
        return error.response_message() and all(is_well_formed(each) for each in error.diagnostics)
    return True


@given(st.data(), st.sampled_from(sorted((Path(__file__).parents[1] / "golden/openpai/jobs").glob("*.yaml"))))
def test_a_randomly_edited_job_text_is_parsed_or_refused_without_a_crash(data, path):
    text = path.read_text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 30)))
    put_in = data.draw(st.text(alphabet="\t\n :-#'\"{}[]&*!|>%<$a1", max_size=5))
    assert is_read_or_rejected(text[:start] + put_in + text[end:])
