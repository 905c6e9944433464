"""The readers of what clusters say, on recorded environments, on broken ones, and on any at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_keeper.cluster_environment import (
    FrameworkControllerEnvironment,
    PaiEnvironment,
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
    assert pai("openpai-single-task") == PaiEnvironment("bob~nni_exp_GhDs2xQa_trial_Rf3kT", "taskrole", 0)


def test_minus_one_succeeded_task_is_a_number():
    environ = recorded("openpai-single-task")
    assert environ["PAI_MIN_SUCCEEDED_TASK_COUNT_taskrole"] == "-1"
    assert task_identity(environ).index == 0


def test_a_task_s_identity_has_openpai_s_names_and_frameworkcontroller_s_attempts():
    identity = task_identity(recorded("openpai-single-task"))
    assert identity == TaskIdentity("bob~nni_exp_GhDs2xQa_trial_Rf3kT", "taskrole", 0, 0, 2)
    assert identity.task == "taskrole-0"


# OpenPAI, two roles, no gang


def test_a_task_without_gang_allocation_knows_itself():
    assert pai("openpai-two-roles-no-gang", PAI_HOST_IP_worker_0=None).index == 1


def test_a_job_that_says_little_is_read_with_holes():
    found = PaiEnvironment.from_environ(
        {"PAI_FRAMEWORK_NAME": "a~j", "PAI_CURRENT_TASK_ROLE_NAME": "w", "PAI_TASK_INDEX": "7"}
    )
    assert found == PaiEnvironment("a~j", "w", 7)


def test_an_ipv6_host_keeps_its_colons():
    assert pai("openpai-two-roles-no-gang", PAI_TASK_ROLE_worker_HOST_LIST="fd00::1:8080").role == "worker"


# The mangling trap


def test_variables_of_a_mangled_role_are_checked_under_both_names():
    for name in ("PAI_RESOURCE_Bert_Large", "PAI_TASK_ROLE_bertlarge_HOST_LIST"):
        with pytest.raises(SettingsInvalid, match=f"^cannot read {name}: "):
            task_identity(recorded("openpai-upper-case-role", **{name: "many"}))


def test_openpai_and_frameworkcontroller_agree_on_a_role_with_two_names():
    assert task_identity(recorded("openpai-upper-case-role")).task == "Bert_Large-1"


# FrameworkController alone


def test_a_frameworkcontroller_pod_knows_itself():
    expected = FrameworkControllerEnvironment("nniexpghds2xqatrialrf3kt", "worker", 0, 0, 1)
    assert fc("frameworkcontroller") == expected


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
    with pytest.raises(SettingsInvalid, match=f"^cannot read {name}: it is not set, but other"):
        task_identity(environ)


def test_an_identity_without_index_is_refused():
    environ = {"PAI_JOB_NAME": "a~j", "PAI_CURRENT_TASK_ROLE_NAME": "worker"}
    with pytest.raises(SettingsInvalid, match="PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX: it is not set"):
        PaiEnvironment.from_environ(environ)


def test_families_that_contradict_each_other_are_refused():
    with pytest.raises(
        SettingsInvalid, match="OpenPAI's variables name 'worker' 1, FrameworkController's 'worker' 2"
    ):
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
        SettingsInvalid, match=r"^cannot determine the task of pod 'job-x7k2p': .*with nnictl"
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
