"""The task identity in a cluster's environment variables: recorded, malformed and arbitrary environments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_keeper.cluster_environment import task_name
from trial_keeper.errors import KeeperError, SettingsInvalid
from trial_keeper.exit_codes import KeeperExit

RECORDED = Path(__file__).parents[1] / "golden" / "environments"


def recorded(name: str, **changes: str | None) -> dict[str, str]:
    """A recorded environment with changes; `NAME=None` removes a variable."""
    lines = (RECORDED / f"{name}.env").read_text().splitlines()
    environ = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {key: value for key, value in {**environ, **changes}.items() if value is not None}


def task_of(name: str, **changes: str | None) -> str:
    return task_name(recorded(name, **changes))


# ---- outside a cluster


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HOME": "/home/me", "PATH": "/usr/bin", "NNI_PLATFORM": "local"},
        {"PAI_JOB_NAME": "", "PAI_CURRENT_TASK_ROLE_NAME": ""},
    ],
)
def test_outside_a_cluster_the_only_task_is_named_main_0(environ: dict[str, str]):
    assert task_name(environ) == "main-0"


# ---- OpenPAI, one task


def test_the_task_name_of_a_single_openpai_task_contains_its_role_name():
    assert task_of("openpai-single-task") == "taskrole-0"


def test_the_keeper_determines_its_task_name_from_openpai_variables_alone():
    environ = recorded("openpai-single-task")
    assert task_name({name: environ[name] for name in environ if name[:3] != "FC_"}) == "taskrole-0"


def test_the_keeper_accepts_minus_one_as_minimum_number_of_succeeded_tasks():
    environ = recorded("openpai-single-task")
    assert environ["PAI_MIN_SUCCEEDED_TASK_COUNT_taskrole"] == "-1"
    assert task_name(environ) == "taskrole-0"


# ---- OpenPAI, two roles, without gang allocation


def test_the_keeper_determines_its_task_name_without_gang_allocation():
    assert task_of("openpai-two-roles-no-gang", PAI_HOST_IP_worker_0=None) == "worker-1"


def test_the_older_variable_names_of_openpai_are_read():
    environ = {"PAI_FRAMEWORK_NAME": "a~j", "PAI_CURRENT_TASK_ROLE_NAME": "w", "PAI_TASK_INDEX": "7"}
    assert task_name(environ) == "w-7"


def test_the_keeper_accepts_an_ipv6_address_in_the_host_list():
    hosts = {"PAI_TASK_ROLE_worker_HOST_LIST": "fd00::1:8080"}
    assert task_of("openpai-two-roles-no-gang", **hosts) == "worker-1"


# ---- mangled role names


def test_openpai_variables_with_the_original_or_the_simplified_role_name_are_validated():
    for name in ("PAI_RESOURCE_Bert_Large", "PAI_TASK_ROLE_bertlarge_HOST_LIST"):
        with pytest.raises(SettingsInvalid, match=f"^cannot read {name}: "):
            task_name(recorded("openpai-upper-case-role", **{name: "many"}))


def test_the_task_name_contains_the_original_role_name_instead_of_the_simplified_role_name():
    assert task_name(recorded("openpai-upper-case-role")) == "Bert_Large-1"


# ---- FrameworkController without OpenPAI


def test_the_keeper_determines_its_task_name_in_a_frameworkcontroller_pod():
    assert task_of("frameworkcontroller") == "worker-0"


def test_the_keeper_determines_its_task_name_in_a_pod_without_attempt_numbers():
    assert task_of("frameworkcontroller", FC_FRAMEWORK_ATTEMPT_ID=None, FC_TASK_ATTEMPT_ID=None) == "worker-0"


# ---- malformed values


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
def test_the_error_for_a_malformed_environment_variable_contains_its_name(name: str, value: str):
    with pytest.raises(SettingsInvalid, match=f"^cannot read {name}: .* is not .*; ") as refused:
        task_name(recorded("openpai-two-roles-no-gang", **{name: value}))
    assert len(str(refused.value)) < 300
    assert refused.value.exit_code == KeeperExit.SETTINGS


@pytest.mark.parametrize(
    "name", ["PAI_JOB_NAME", "PAI_CURRENT_TASK_ROLE_NAME", "FC_FRAMEWORK_NAME", "FC_TASK_INDEX"]
)
def test_an_incomplete_task_identity_is_rejected(name: str):
    environ = recorded("openpai-two-roles-no-gang", PAI_FRAMEWORK_NAME=None, **{name: None})
    with pytest.raises(SettingsInvalid, match=f"^cannot read {name}: it is not set, but other"):
        task_name(environ)


def test_an_openpai_identity_without_a_task_index_is_rejected():
    environ = {"PAI_JOB_NAME": "a~j", "PAI_CURRENT_TASK_ROLE_NAME": "worker"}
    with pytest.raises(SettingsInvalid, match="PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX: it is not set"):
        task_name(environ)


def test_contradictory_variables_of_two_platforms_are_rejected():
    with pytest.raises(
        SettingsInvalid, match="OpenPAI's variables name 'worker' 1, FrameworkController's 'worker' 2"
    ):
        task_name(recorded("openpai-two-roles-no-gang", FC_TASK_INDEX="2"))


@pytest.mark.parametrize(
    "role", ["..", "../worker", ".hidden", "a/b", "-x", "a b", "wörker", "w\n", "w" * 201]
)
def test_a_role_that_is_not_a_valid_folder_name_is_rejected(role: str):
    with pytest.raises(SettingsInvalid, match=r"^cannot use task role .* as a folder name; rename it"):
        task_name({"FC_FRAMEWORK_NAME": "f", "FC_TASKROLE_NAME": role, "FC_TASK_INDEX": "0"})


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
def test_the_task_name_consists_of_the_requested_role_and_the_pod_index_if_the_pod_has_no_framework(
    environ: dict[str, str], task: str
):
    assert task_name(environ, "worker") == task


def test_a_pod_without_an_index_is_rejected_only_if_a_role_is_requested():
    with pytest.raises(
        SettingsInvalid, match=r"^cannot determine the task of pod 'job-x7k2p': .*with nnictl"
    ):
        task_name({"POD_NAME": "job-x7k2p"}, "worker")
    assert task_name({"POD_NAME": "job-x7k2p"}) == "main-0", "no role was requested"


# ---- arbitrary environments

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
def test_the_keeper_returns_a_task_name_or_raises_a_keeper_error_for_any_environment(
    start: dict[str, str], changed: dict[str, str], removed: set[str], role: str | None
):
    environ = {name: value for name, value in {**start, **changed}.items() if name not in removed}
    try:
        task = task_name(environ, role)
    except KeeperError as error:
        assert str(error).startswith("cannot ")  # noqa: PT017 - both outcomes are correct, and each has its own assertion
        return
    assert re.search(r"-[0-9]+$", task, re.ASCII)
    assert Path(task).name == task
