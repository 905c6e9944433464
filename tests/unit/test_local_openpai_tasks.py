"""The inputs of a local OpenPAI task (plan, environment), and its logs."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openpai_jobs import WORKER, a_job, text_of

from nni_manager.local_openpai.container_logs import MASK, Redactor, RotatedLog, old_logs
from nni_manager.local_openpai.core.job import Allocated, Allocation, PaiJob, Submitted
from nni_manager.local_openpai.environment import inherited, task_variables
from nni_manager.local_openpai.planning import RUNTIME_DIR, planned
from nni_manager.local_openpai.supervisor import claim
from trial_keeper.cluster_environment import task_name

PLUGINS = "com.microsoft.pai.runtimeplugin"


def a_plan(*changes, **top):
    return planned("alice", text_of(a_job(*changes, **top)), ("nfs",), "127.0.0.1")


def placed(plan, *only):
    """A job in which the tasks with the indices `only` have allocations, or all tasks if no index is given."""
    numbers = iter(range(1000))
    job = PaiJob(1, plan, 0.0, lambda: f"id{next(numbers)}", 3)
    job.handle(Submitted(), 1.0)
    tasks = [task for task in job.tasks.values() if not only or task.index in only]
    allocations = {
        task.container_id: Allocation("10.0.0.1", {"ssh": (1000 + n,), "http": (2000 + n, 3000 + n)}, (n,))
        for n, task in enumerate(tasks)
    }
    job.handle(Allocated(allocations), 2.0)
    return job


def variables(plan, role, index, *only):
    job = placed(plan, *only)
    return task_variables(plan, 1, job.tasks[role, index], tuple(job.tasks.values()), "/work")


def test_the_keeper_reads_its_task_name_from_the_environment_variables_of_the_cluster():
    plan = a_plan(((*WORKER, "resourcePerInstance", "ports"), {"tcp": 1})).plan
    environ = variables(plan, "worker", 1)
    expected = {
        "PAI_JOB_NAME": "alice~job",
        "PAI_USER_NAME": "alice",
        "PAI_VIRTUAL_CLUSTER": "default",
        "PAI_CURRENT_CONTAINER_IP": "10.0.0.1",
        "PAI_WORK_DIR": "/work",
        "PAI_CONTAINER_HOST_PORT_LIST": "ssh:1001;http:2001,3001;",
        "PAI_PORT_LIST_worker_0_http": "2000,3000",
        "PAI_PORT_LIST_worker_1_http": "2001,3001",
        "PAI_RESOURCE_worker": "0,1,1024,0",
        "PAI_TASK_ROLE_TASK_COUNT_worker": "2",
        "PAI_MIN_FAILED_TASK_COUNT_worker": "1",
        "PAI_MIN_SUCCEEDED_TASK_COUNT_worker": "2",
        "FC_POD_NAME": f"{plan.debug_id}-worker-1",
        "FC_FRAMEWORK_NAME": plan.debug_id,
        "FC_FRAMEWORK_ATTEMPT_ID": "1",
        "FC_TASK_ATTEMPT_ID": "0",
    }
    assert {name: environ[name] for name in expected} == expected
    for family in ("PAI_", "FC_"):
        assert task_name({name: environ[name] for name in environ if name.startswith(family)}) == "worker-1"
    assert task_name(environ) == "worker-1"


def test_every_role_variable_exists_under_the_original_and_the_simplified_role_name():
    job = a_job()
    job["taskRoles"] = {"W_1": job["taskRoles"]["worker"]}
    environ = variables(planned("alice", text_of(job), (), "127.0.0.1").plan, "W_1", 0)
    for name in (
        "PAI_HOST_IP_{}_1",
        "PAI_PORT_LIST_{}_1_http",
        "PAI_{}_1_http_PORT",
        "PAI_TASK_ROLE_{}_HOST_LIST",
        "PAI_TASK_ROLE_TASK_COUNT_{}",
        "PAI_RESOURCE_{}",
        "PAI_MIN_FAILED_TASK_COUNT_{}",
        "PAI_MIN_SUCCEEDED_TASK_COUNT_{}",
    ):
        assert environ[name.format("W_1")] == environ[name.format("w1")]
    assert environ["PAI_CURRENT_TASK_ROLE_NAME"] == environ["PAI_TASK_ROLE_LIST"] == "W_1"
    assert environ["FC_TASKROLE_NAME"] == "w1"
    assert task_name(environ) == "W_1-0"


def test_a_task_has_no_addresses_of_unallocated_tasks_if_gang_allocation_is_disabled():
    environ = variables(a_plan(extras={"gangAllocation": False}).plan, "worker", 1, 1)
    assert "PAI_HOST_IP_worker_0" not in environ
    assert environ["PAI_HOST_IP_worker_1"] == "10.0.0.1"
    assert environ["PAI_TASK_ROLE_INSTANCES"] == "worker:0,worker:1"


def test_a_semicolon_follows_each_entry_of_the_port_list():
    environ = variables(a_plan().plan, "worker", 0)
    assert environ["PAI_CONTAINER_HOST_PORT_LIST"] == "ssh:1000;http:2000,3000;"
    assert environ["PAI_CONTAINER_HOST_http_PORT_LIST"] == "2000,3000"


def test_a_task_does_not_inherit_the_environment_variables_of_an_outer_platform():
    assert inherited({"PATH": "/bin", "PAI_JOB_NAME": "x", "FC_TASK_INDEX": "1", "NNI_EXP_ID": "y"}) == {
        "PATH": "/bin"
    }


def test_tasks_are_retried_only_in_a_job_without_gang_allocation():
    gang = a_plan(((*WORKER, "taskRetryCount"), 3), jobRetryCount=2).plan
    assert (gang.job_retry.is_fancy, gang.job_retry.max_retries) == (True, 2)
    assert (gang.task_retry["worker"].is_fancy, gang.task_retry["worker"].max_retries) == (False, 0)
    alone = a_plan(((*WORKER, "taskRetryCount"), 3), extras={"gangAllocation": False}).plan
    assert (alone.task_retry["worker"].is_fancy, alone.task_retry["worker"].max_retries) == (True, 3)


@pytest.mark.parametrize(
    ("extras", "mounts"),
    [
        ({}, []),
        ({"storages": []}, [("nfs", "/mnt/nfs")]),
        (
            {"storages": [{"name": "a"}, {"name": "b", "mountPath": "/data"}]},
            [("a", "/mnt/a"), ("b", "/data")],
        ),
        (
            {PLUGINS: [{"plugin": "teamwise_storage", "parameters": {"storageConfigNames": ["a"]}}]},
            [("a", "/mnt/a")],
        ),
    ],
)
def test_a_job_mounts_the_storages_it_names_or_the_default_storages_if_it_names_none(extras, mounts):
    found = [(mount.name, mount.mount_path) for mount in a_plan(extras=extras).plan.storages]
    assert found == mounts


def test_each_job_with_jobssh_enabled_has_its_own_key_pair_and_an_sshd_on_loopback():
    extras = {PLUGINS: [{"plugin": "ssh", "parameters": {"jobssh": True}}]}
    first, second = (a_plan(extras=extras).plan for _ in range(2))
    (script,) = first.roles[0].pre
    assert "address=127.0.0.1" in script
    assert first.roles[0].runs_sshd
    assert first.ssh_keys.private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----")
    assert first.ssh_keys.public.startswith("ssh-ed25519 ")
    assert first.ssh_keys != second.ssh_keys
    plain = a_plan().plan
    assert (plain.ssh_keys, plain.roles[0].runs_sshd) == (None, False)


def test_plugin_scripts_contain_a_placeholder_for_the_runtime_folder():
    extras = {PLUGINS: [{"plugin": "git", "parameters": {"repo_uri": "https://host/code"}}]}
    (script,) = a_plan(extras=extras).plan.roles[0].init
    assert RUNTIME_DIR in script


def test_a_negative_gpu_count_is_treated_as_0():
    need = a_plan(((*WORKER, "resourcePerInstance", "gpu"), -1)).plan.roles[0].need
    assert need.gpu == 0


def test_all_secret_values_except_very_short_values_are_redacted():
    plan = a_plan(secrets={"a": "hunter22", "b": {"c": [12345.5, "abc"]}, "d": None, "e": True}).plan
    assert plan.secrets == ("hunter22", "12345.5")


# ---- logs


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("ab\n", max_size=6), max_size=8),
)
def test_redaction_in_chunks_hides_all_secrets(secrets, pieces):
    redactor = Redactor(secret.encode() for secret in secrets)
    shown = b"".join([redactor.feed(piece.encode()) for piece in pieces] + [redactor.flush()])
    whole = Redactor(secret.encode() for secret in secrets)
    at_once = whole.feed("".join(pieces).encode()) + whole.flush()
    rest = b"".join(shown.split(MASK))
    assert not any(secret.encode() in part for secret in secrets for part in shown.split(MASK))
    assert len(rest) <= len("".join(pieces))
    if len({secret[0] for secret in secrets}) == len(secrets) == 1:
        assert shown == at_once


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20))
def test_a_secret_split_between_two_chunks_is_redacted(pieces):
    secret = b"\x00secret\x01"
    data = secret.join(pieces)
    redactor = Redactor([secret])
    shown = b"".join(redactor.feed(data[at : at + 5]) for at in range(0, len(data), 5)) + redactor.flush()
    assert shown == data.replace(secret, MASK)


def test_a_chunk_that_cannot_contain_part_of_a_secret_is_forwarded_immediately():
    assert Redactor([]).feed(b"abc") == b"abc"
    assert Redactor([b"xyz1"]).feed(b"abc") == b"abc"


def test_a_log_is_rotated_and_the_oldest_file_is_deleted(tmp_path):
    log = RotatedLog(tmp_path / "log", file_bytes=10, old_files=2)
    for number in range(10):
        log.write(b"%d23456\n" % number)
    log.write(b"x" * 25)
    files = [tmp_path / "log" / "current", *old_logs(tmp_path / "log")]
    assert [len(file.read_bytes()) for file in files] == [5, 10, 10]


def test_the_oldest_log_file_is_deleted_even_if_the_clock_was_set_back(tmp_path, monkeypatch):
    days = iter(range(10, 0, -1))
    monkeypatch.setattr(
        "nni_manager.local_openpai.container_logs.time.time_ns", lambda: next(days) * 86_400 * 10**9
    )
    log = RotatedLog(tmp_path / "log", file_bytes=1, old_files=2)
    log.write(b"abcdef")
    files = [*reversed(old_logs(tmp_path / "log")), tmp_path / "log" / "current"]
    assert b"".join(file.read_bytes() for file in files) == b"def"


@pytest.mark.parametrize("call", ["open", "rename"])
def test_a_log_that_could_not_be_rotated_is_rotated_by_the_next_write(tmp_path, monkeypatch, call):
    log = RotatedLog(tmp_path / "log", file_bytes=4, old_files=5)
    log.write(b"abcd")

    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, call, fail)
        log.write(b"lost")
    log.write(b"efgh")
    log.write(b"ij")
    files = [*reversed(old_logs(tmp_path / "log")), tmp_path / "log" / "current"]
    assert [file.read_bytes() for file in files] == [b"abcd", b"efgh", b"ij"]


def test_the_rotated_log_files_together_contain_every_byte_in_order(tmp_path):
    log = RotatedLog(tmp_path / "log", file_bytes=16, old_files=100)
    text = os.urandom(200)
    for at in range(0, 200, 7):
        log.write(text[at : at + 7])
    files = [*reversed(old_logs(tmp_path / "log")), tmp_path / "log" / "current"]
    assert b"".join(file.read_bytes() for file in files) == text


def test_a_container_can_be_claimed_only_once(tmp_path):
    assert claim(tmp_path, {"pid": None})
    assert not claim(tmp_path, {"pid": os.getpid()})
