"""The readers of what clusters say, on recorded environments, on broken ones, and on any at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_keeper.cluster_environment import (
    Address,
    EnvironmentResources,
    FrameworkControllerEnvironment,
    PaiEnvironment,
    TaskAddress,
    TaskIdentity,
    task_identity,
)
from trial_keeper.errors import KeeperError, SettingsInvalid
from trial_keeper.exit_codes import KeeperExit

RECORDED = Path(__file__).parents[1] / "golden" / "environments"


def recorded(name: str, **changes: str | None) -> dict[str, str]:
    """A recorded environment; `NAME=None` takes a variable away."""
    lines = (RECORDED / f"{name}.env").read_text().splitlines()
    environ = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {key: value for key, value in {**environ, **changes}.items() if value is not None}


def pai(name: str, **changes: str | None) -> PaiEnvironment:
    found = PaiEnvironment.from_environ(recorded(name, **changes))
    assert found is not None
    return found


def fc(name: str, **changes: str | None) -> FrameworkControllerEnvironment:
    found = FrameworkControllerEnvironment.from_environ(recorded(name, **changes))
    assert found is not None
    return found


# Outside a cluster


def test_outside_any_cluster_both_readers_find_nothing():
    environ = {"HOME": "/home/me", "PATH": "/usr/bin", "NNI_PLATFORM": "local"}
    assert PaiEnvironment.from_environ(environ) is None
    assert FrameworkControllerEnvironment.from_environ(environ) is None


def test_without_a_cluster_the_only_task_is_main_0():
    identity = task_identity({})
    assert identity == TaskIdentity(job=None, role="main", index=0, framework_attempt=0, task_attempt=0)
    assert identity.task == "main-0"


def test_an_empty_value_is_as_good_as_none():
    assert PaiEnvironment.from_environ({"PAI_JOB_NAME": "", "PAI_CURRENT_TASK_ROLE_NAME": ""}) is None


# OpenPAI, one task


def test_a_single_task_knows_its_job_and_itself():
    found = pai("openpai-single-task")
    assert (found.job_name, found.user, found.virtual_cluster) == (
        "bob~nni_exp_GhDs2xQa_trial_Rf3kT",
        "bob",
        "default",
    )
    assert (found.role, found.index, found.host_ip, found.work_dir) == (
        "taskrole",
        0,
        "10.151.41.8",
        "/workspace",
    )


def test_resources_are_read_with_their_units():
    assert pai("openpai-single-task").resources == EnvironmentResources(
        gpu=1, cpu=4, memory_mb=8192, shm_mb=0
    )


def test_own_ports_are_found_by_label():
    ports = pai("openpai-single-task").ports
    assert ports == {"nni": (38675, 32000, 20803), "ssh": (26055,), "http": (25895,)}


def test_own_ports_come_from_the_list_of_all_tasks_when_that_is_all_there_is():
    found = pai("openpai-single-task", PAI_CONTAINER_HOST_PORT_LIST=None)
    assert found.ports == {"nni": (38675, 32000, 20803), "ssh": (26055,), "http": (25895,)}


def test_minus_one_succeeded_task_means_all_of_them():
    assert pai("openpai-single-task").own_role.min_succeeded_tasks == -1


def test_a_task_s_identity_has_openpai_s_names_and_frameworkcontroller_s_attempts():
    identity = task_identity(recorded("openpai-single-task"))
    assert identity == TaskIdentity("bob~nni_exp_GhDs2xQa_trial_Rf3kT", "taskrole", 0, 0, 2)
    assert identity.task == "taskrole-0"


# OpenPAI, two roles, no gang


def test_roles_keep_the_order_of_the_job_file():
    roles = pai("openpai-two-roles-no-gang").task_roles
    assert [
        (role.name, role.instances, role.min_failed_tasks, role.min_succeeded_tasks) for role in roles
    ] == [
        ("ps", 1, 1, 1),
        ("worker", 3, 1, 3),
    ]
    assert [role.resources for role in roles] == [
        EnvironmentResources(0, 2, 4096, 0),
        EnvironmentResources(2, 8, 32768, 2048),
    ]


def test_only_tasks_with_an_address_are_listed_without_gang_allocation():
    found = pai("openpai-two-roles-no-gang")
    assert found.tasks == (
        TaskAddress("worker", 0, "10.151.41.11", {"ssh": (39109,), "http": (28805,), "tcp": (17748, 29109)}),
        TaskAddress("worker", 1, "10.151.41.12", {"ssh": (31146,), "http": (31286,), "tcp": (34455, 18275)}),
    )
    assert found.task_roles[0].hosts == ()
    assert found.task_roles[1].hosts == (Address("10.151.41.11", 28805), Address("10.151.41.12", 31286))


def test_a_task_with_ports_and_no_ip_yet_is_listed_without_one():
    found = pai("openpai-two-roles-no-gang", PAI_HOST_IP_worker_0=None)
    assert [(task.index, task.host_ip) for task in found.tasks] == [(0, None), (1, "10.151.41.12")]


def test_instances_are_counted_from_the_list_of_tasks_when_no_count_is_given():
    found = pai("openpai-two-roles-no-gang", PAI_TASK_ROLE_TASK_COUNT_worker=None)
    assert found.own_role.instances == 3


def test_a_job_that_says_little_is_read_with_holes():
    found = PaiEnvironment.from_environ(
        {"PAI_FRAMEWORK_NAME": "a~j", "PAI_CURRENT_TASK_ROLE_NAME": "w", "PAI_TASK_INDEX": "7"}
    )
    assert found is not None
    assert (found.job_name, found.role, found.index, found.user) == ("a~j", "w", 7, None)
    assert (found.resources, found.tasks, found.ports, found.own_role.instances) == (None, (), {}, None)


def test_an_ipv6_host_keeps_its_colons():
    found = pai("openpai-two-roles-no-gang", PAI_TASK_ROLE_worker_HOST_LIST="fd00::1:8080")
    assert found.own_role.hosts == (Address("fd00::1", 8080),)


# The mangling trap


def test_addresses_of_a_mangled_role_are_found_under_its_name_in_the_job_file():
    found = pai("openpai-upper-case-role")
    assert found.own_role.mangled_name == "bertlarge"
    assert [(task.role, task.index, task.host_ip) for task in found.tasks] == [
        ("Bert_Large", 0, "10.151.41.20"),
        ("Bert_Large", 1, "10.151.41.21"),
    ]
    assert found.own_role.hosts == (Address("10.151.41.20", 16400), Address("10.151.41.21", 27220))
    assert found.resources == EnvironmentResources(4, 16, 131072, 16384)
    assert found.ports == {"ssh": (21043,), "http": (27220,)}


def test_openpai_and_frameworkcontroller_agree_on_a_role_with_two_names():
    assert task_identity(recorded("openpai-upper-case-role")).task == "Bert_Large-1"


# FrameworkController alone


def test_a_frameworkcontroller_pod_knows_itself():
    found = fc("frameworkcontroller")
    assert (found.framework, found.namespace, found.role, found.index) == (
        "nniexpghds2xqatrialrf3kt",
        "nni",
        "worker",
        0,
    )
    assert (found.framework_attempt, found.task_attempt) == (0, 1)
    assert found.pod_uid == "d4c3b2a1-f0e9-4d8c-b7a6-958473625105"
    assert found.task_attempt_uid == f"{found.task_attempt}_{found.pod_uid}"
    assert found.framework_attempt_uid == f"{found.framework_attempt}_{found.config_map_uid}"


def test_a_frameworkcontroller_pod_is_identified_without_openpai():
    identity = task_identity(recorded("frameworkcontroller"))
    assert identity == TaskIdentity("nniexpghds2xqatrialrf3kt", "worker", 0, 0, 1)


def test_each_reader_reads_its_own_family_only():
    assert PaiEnvironment.from_environ(recorded("frameworkcontroller")) is None
    environ = {name: value for name, value in recorded("openpai-single-task").items() if name[:3] != "FC_"}
    assert FrameworkControllerEnvironment.from_environ(environ) is None


def test_an_attempt_that_is_not_told_is_the_first():
    found = fc("frameworkcontroller", FC_FRAMEWORK_ATTEMPT_ID=None, FC_TASK_ATTEMPT_ID=None)
    assert (found.framework_attempt, found.task_attempt) == (0, 0)


# What is malformed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PAI_RESOURCE_worker", "2,8,32768"),
        ("PAI_RESOURCE_worker", "2,8,32G,0"),
        ("PAI_RESOURCE_worker", "-2,8,32768,0"),
        ("PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX", "-1"),
        ("PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX", "1_0"),
        ("PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX", "9" * 5000),
        ("PAI_CURRENT_TASK_ROLE_NAME", "nobody"),
        ("PAI_TASK_ROLE_LIST", "ps,,worker"),
        ("PAI_TASK_ROLE_TASK_COUNT_ps", "one"),
        ("PAI_MIN_FAILED_TASK_COUNT_ps", "-2"),
        ("PAI_MIN_SUCCEEDED_TASK_COUNT_ps", "all"),
        ("PAI_TASK_ROLE_INSTANCES", "ps:0,worker"),
        ("PAI_TASK_ROLE_worker_HOST_LIST", "10.0.0.1"),
        ("PAI_TASK_ROLE_worker_HOST_LIST", "10.0.0.1:http"),
        ("PAI_PORT_LIST_worker_0_tcp", "17748,"),
        ("PAI_PORT_LIST_worker_0_tcp", "70000"),
        ("PAI_CONTAINER_HOST_PORT_LIST", "tcp;ssh:1;"),
        ("FC_TASK_INDEX", "first"),
        ("FC_TASK_ATTEMPT_ID", "0_uid"),
        ("FC_FRAMEWORK_ATTEMPT_ID", "-1"),
    ],
)
def test_a_malformed_value_is_named_with_its_variable(name: str, value: str):
    with pytest.raises(SettingsInvalid, match=f"^cannot read {name}: .* is not .*; ") as refused:
        task_identity(recorded("openpai-two-roles-no-gang", **{name: value}))
    assert len(str(refused.value)) < 300
    assert refused.value.exit_code == KeeperExit.SETTINGS


@pytest.mark.parametrize(
    "name", ["PAI_JOB_NAME", "PAI_CURRENT_TASK_ROLE_NAME", "FC_FRAMEWORK_NAME", "FC_TASK_INDEX"]
)
def test_half_an_identity_is_refused(name: str):
    environ = recorded("openpai-two-roles-no-gang", PAI_FRAMEWORK_NAME=None, **{name: None})
    with pytest.raises(SettingsInvalid, match=f"^cannot read {name}: it is not set while others of"):
        task_identity(environ)


def test_an_identity_without_index_is_refused():
    environ = {"PAI_JOB_NAME": "a~j", "PAI_CURRENT_TASK_ROLE_NAME": "worker"}
    with pytest.raises(SettingsInvalid, match="PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX: it is not set"):
        PaiEnvironment.from_environ(environ)


def test_families_that_contradict_each_other_are_refused():
    with pytest.raises(SettingsInvalid, match="OpenPAI says 'worker' 1, FrameworkController says 'worker' 2"):
        task_identity(recorded("openpai-two-roles-no-gang", FC_TASK_INDEX="2"))


@pytest.mark.parametrize(
    "role", ["..", "../worker", ".hidden", "a/b", "-x", "a b", "wörker", "w\n", "w" * 201]
)
def test_a_role_that_cannot_name_a_folder_is_refused(role: str):
    with pytest.raises(SettingsInvalid, match=r"^cannot use task role .* as a folder name; rename it"):
        TaskIdentity("a~j", role, 0, 0, 0)


@pytest.mark.parametrize(
    ("environ", "task"),
    [
        ({"POD_NAME": "nni-exp-e-trial-t-worker-12"}, "worker-12"),
        ({"POD_NAME": "nni-exp-e-trial-t-1-x7k2p", "JOB_COMPLETION_INDEX": "1"}, "worker-1"),
        ({"POD_NAME": "", "JOB_COMPLETION_INDEX": "1"}, "main-0"),
        (
            {"POD_NAME": "x-3", "FC_FRAMEWORK_NAME": "f", "FC_TASKROLE_NAME": "ps", "FC_TASK_INDEX": "1"},
            "ps-1",
        ),
    ],
)
def test_a_pod_of_another_operator_has_its_role_from_the_manager_and_its_number_from_the_cluster(
    environ: dict[str, str], task: str
):
    assert task_identity(environ, "worker").task == task


def test_a_pod_whose_number_nobody_tells_is_refused():
    with pytest.raises(
        SettingsInvalid, match=r"^cannot tell which task pod 'job-x7k2p' is: .*through nnictl"
    ):
        task_identity({"POD_NAME": "job-x7k2p"}, "worker")
    assert task_identity({"POD_NAME": "job-x7k2p"}).task == "main-0", "nobody asked for it"


# Any environment at all

VARIABLES = sorted({name for path in RECORDED.glob("*.env") for name in recorded(path.stem)})
VARIABLES += ["POD_NAME", "JOB_COMPLETION_INDEX"]
VALUES = st.one_of(
    st.text(max_size=30),
    st.text("0123456789,:;-_ps./", max_size=20),
    st.sampled_from(
        sorted({value for path in RECORDED.glob("*.env") for value in recorded(path.stem).values()})
    ),
)


@given(
    start=st.sampled_from([{}, *(recorded(path.stem) for path in sorted(RECORDED.glob("*.env")))]),
    changed=st.dictionaries(
        st.sampled_from(VARIABLES) | st.text(min_size=1, max_size=30), VALUES, max_size=5
    ),
    removed=st.sets(st.sampled_from(VARIABLES), max_size=5),
    role=st.none() | st.just("worker"),
)
def test_no_environment_makes_the_readers_raise_anything_but_their_own_error(
    start: dict[str, str], changed: dict[str, str], removed: set[str], role: str | None
):
    environ = {name: value for name, value in {**start, **changed}.items() if name not in removed}
    try:
        identity = task_identity(environ, role)
    except KeeperError as error:
        assert str(error).startswith("cannot ")  # noqa: PT017 - either outcome is right, and each has its rule
        return
    assert identity.index >= 0
    assert Path(identity.task).name == identity.task
