"""Jobs run on a real local OpenPAI cluster, and each task is a real process."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from openpai_jobs import WORKER, a_job, text_of
from real_cluster import (
    commands,
    end_processes_of,
    log,
    over,
    processes_of,
    roles,
    run,
    running,
    settings,
    states,
    summary,
    until,
)
from webhook import a_webhook

from nni_manager.local_openpai.cluster import Cluster
from nni_manager.local_openpai.core.policies import RetryCounts
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.local_openpai.core.states import ExecutionType, State
from nni_manager.local_openpai.errors import ApiError, ClusterClosed, StateDirUnusable
from nni_manager.local_openpai.logs import log_sizes, read_log
from nni_manager.local_openpai.settings import StorageSettings
from nni_manager.local_openpai.store import JobStore
from nni_manager.training_services.openpai.job_checks import ProtocolInvalid

GOLDEN = Path(__file__).parents[1] / "golden/openpai/jobs"
PLUGINS = "com.microsoft.pai.runtimeplugin"


@pytest.fixture
def play(tmp_path):
    """Return a function that runs a scenario on a new cluster, within a deadline. After the test all processes of the cluster
    are killed.
    """

    def make(scenario, **changes):
        async def bounded():
            async with running(settings(tmp_path, **changes)) as cluster:
                return await asyncio.wait_for(scenario(cluster), DEADLINE_S)

        return asyncio.run(bounded())

    yield make
    end_processes_of(tmp_path)


@pytest.fixture
def finished(play):
    """Return a function that runs a job until it ends, and returns the job's detail."""
    return lambda text, **changes: play(lambda cluster: run(cluster, text), **changes)


@contextlib.contextmanager
def an_api_error(code, match=None):
    """Check that the block raises an API error with this code."""
    with pytest.raises(ApiError, match=match) as caught:
        yield
    assert caught.value.code == code


# ---- how jobs end


def completion(min_failed=None, min_succeeded=None):
    made = {"minFailedInstances": min_failed, "minSucceededInstances": min_succeeded}
    return {key: value for key, value in made.items() if value is not None}


BY_INDEX = 'exit "$PAI_TASK_INDEX"'
FOR_EVER = "sleep 1000"


@pytest.mark.parametrize(
    ("policy", "instances", "command", "state", "code", "task_states"),
    [
        # The default policy: one failed task fails the job, and the job succeeds when all tasks have succeeded.
        (completion(), 3, "true", "SUCCEEDED", 0, {"SUCCEEDED"}),
        (
            completion(),
            2,
            f'[ "$PAI_TASK_INDEX" = 0 ] || {FOR_EVER}; false',
            "FAILED",
            255,
            {"FAILED", "STOPPED"},
        ),
        # Two failed tasks fail a job with minFailedInstances 2, but not a job with minFailedInstances 3.
        (
            completion(2, -1),
            3,
            f'[ "$PAI_TASK_INDEX" != 0 ] || {FOR_EVER}; false',
            "FAILED",
            255,
            {"FAILED", "STOPPED"},
        ),
        (completion(3, -1), 3, BY_INDEX, "SUCCEEDED", 0, {"SUCCEEDED", "FAILED"}),
        # The job ends when minSucceededInstances is reached, and the remaining tasks are stopped.
        (
            completion(1, 1),
            3,
            f'[ "$PAI_TASK_INDEX" = 1 ] || {FOR_EVER}',
            "SUCCEEDED",
            0,
            {"SUCCEEDED", "STOPPED"},
        ),
        # If minFailedInstances is -1, failed tasks never fail the job, even if all tasks fail.
        (completion(-1, -1), 2, "false", "SUCCEEDED", 0, {"FAILED"}),
        # If minSucceededInstances is -1, the job does not end before its last task, even if other tasks have succeeded.
        (completion(1, -1), 2, "true", "SUCCEEDED", 0, {"SUCCEEDED"}),
    ],
)
def test_the_completion_policy_determines_the_end_and_the_final_state_of_a_job(
    finished, policy, instances, command, state, code, task_states
):
    role = {"commands": [command], "instances": instances, "completion": policy}
    detail = finished(roles(worker=role))
    assert (detail.job.state.value, detail.job.exit_code, detail.attempt.exit.code) == (state, code, code)
    assert set(states(detail)["worker"]) == task_states


def test_the_parameter_server_is_stopped_when_all_workers_have_succeeded(finished):
    detail = finished(roles(ps=[FOR_EVER], worker={"commands": ["true"], "instances": 2}))
    assert detail.job.state is State.SUCCEEDED
    assert states(detail) == {"ps": ["STOPPED"], "worker": ["SUCCEEDED", "SUCCEEDED"]}
    assert (detail.attempt.trigger.role, detail.attempt.trigger.message) == (
        "worker",
        "SucceededTaskCount 2 has reached MinSucceededTaskCount 2 in the TaskRole",
    )


@pytest.mark.parametrize(
    ("lines", "code", "origin"),
    [
        (["exit 0"], 0, 0),
        (["exit 1"], 255, 1),
        (["exit 42"], 255, 42),
        (["exit 254"], 255, 254),
        (["no-such-command-anywhere"], 220, 127),
        (["echo $NOT_SET_ANYWHERE"], 255, 1),
        (["false | true"], 255, 1),
        (["false", "true"], 255, 1),
        (["echo 'ImportError: torch' >&2; exit 1"], 232, 1),
        (["echo 'ImportError: handled'"], 0, 0),
        (["kill -SEGV $$"], 139, 139),
        (["kill -FPE $$"], 136, 136),
        (["kill -USR1 $$"], 255, 138),
        (["cat <<'EOF'", "a # b \\", "EOF", "exit 3"], 255, 3),
    ],
)
def test_the_exit_code_of_a_task_is_mapped_as_in_openpai_and_the_original_code_is_stored(
    finished, lines, code, origin
):
    detail = finished(commands(*lines))
    (task,) = detail.tasks["worker"]
    assert (task.exit.code, detail.job.exit_code) == (code, code)
    assert task.exit.origin_user_exit_code == origin


def plugin(**parameters):
    return {"extras": {PLUGINS: [{"plugin": "cmd", "parameters": parameters}]}}


def test_post_commands_run_only_if_the_commands_have_succeeded(play):
    async def scenario(cluster):
        around = plugin(preCommands=["echo before > f"], postCommands=["cat f; echo after"])
        detail = await run(cluster, commands("cat f", **around))
        assert detail.job.state is State.SUCCEEDED
        assert await log(cluster) == "before\n"
        told = re.sub(r"(?m)^\[.*?\] ", "", await log(cluster, file="runtime.log"))
        assert "post starts\nbefore\nafter\npost has ended with exit code 0\n" in told
        failed = await run(cluster, commands("exit 7", name="failed", **around))
        assert failed.job.exit_code == 255
        assert "after" not in await log(cluster, "failed", file="runtime.log")

    play(scenario)


@pytest.mark.parametrize(("when", "origin"), [("preCommands", None), ("postCommands", 0)])
def test_a_task_fails_with_diagnostics_if_a_pre_or_post_command_fails(finished, when, origin):
    detail = finished(commands("echo ran", **plugin(**{when: ["exit 9"]})))
    ended = detail.attempt.exit
    assert (ended.code, ended.origin_user_exit_code) == (255, origin)
    assert "failed with exit code 9" in ended.diagnostics


def test_the_diagnostics_contain_the_last_output_and_the_exit_code(finished):
    detail = finished(commands("echo one", "echo two >&2", "exit 5"))
    words = detail.attempt.exit.diagnostics
    assert "the commands ended with exit code 5" in words
    assert {"one", "two"} <= set(words.splitlines())


# ---- retries

ATTEMPTS = 'echo "$FC_FRAMEWORK_ATTEMPT_ID $FC_TASK_ATTEMPT_ID"'


def test_a_failed_job_is_retried_until_it_succeeds_and_all_attempts_are_stored(play):
    async def scenario(cluster):
        once = '[ "$FC_FRAMEWORK_ATTEMPT_ID" = 2 ]'
        detail = await run(cluster, commands(ATTEMPTS, once, jobRetryCount=3))
        assert (detail.job.state, detail.job.attempt_id) == (State.SUCCEEDED, 2)
        assert detail.job.retries == RetryCounts(user=2)
        attempts = [
            (await cluster.read(JobStore.detail, "alice", "job", number)).attempt for number in range(3)
        ]
        assert [each.attempt_id for each in attempts] == [0, 1, 2]
        assert [each.exit.code for each in attempts] == [255, 255, 0]
        assert [await log(cluster, attempt=number) for number in range(3)] == ["0 0\n", "1 0\n", "2 0\n"]
        assert (await cluster.read(JobStore.detail, "alice", "job", 1)).attempt.state is State.FAILED

    play(scenario)


def test_a_job_fails_when_its_retries_are_used_up(finished):
    detail = finished(commands("false", jobRetryCount=1))
    assert (detail.job.state, detail.job.retries) == (State.FAILED, RetryCounts(user=1))


def test_a_retry_after_a_platform_failure_does_not_count_as_a_job_retry(finished):
    detail = finished(commands('[ "$FC_FRAMEWORK_ATTEMPT_ID" = 1 ] || kill -KILL $$'))
    assert (detail.job.state, detail.job.retries) == (State.SUCCEEDED, RetryCounts(platform=1))


def test_a_job_fails_after_the_maximum_number_of_platform_retries(finished):
    detail = finished(commands("kill -TERM $$"), most_platform_retries=2)
    assert (detail.job.state, detail.job.exit_code) == (State.FAILED, 143)
    assert detail.job.retries == RetryCounts(platform=2)


def test_a_command_that_does_not_exist_is_not_retried(finished):
    detail = finished(commands("no-such-command-anywhere", jobRetryCount=5))
    assert (detail.job.state, detail.job.retries.total) == (State.FAILED, 0)


def test_only_the_failed_task_is_retried_if_gang_allocation_is_off(play):
    async def scenario(cluster):
        role = {
            "commands": [ATTEMPTS, '[ "$FC_TASK_ATTEMPT_ID" = 1 ]'],
            "instances": 2,
            "taskRetryCount": 2,
            "completion": completion(1, -1),
        }
        detail = await run(cluster, roles(worker=role, top={"extras": {"gangAllocation": False}}))
        assert (detail.job.state, detail.job.retries.total) == (State.SUCCEEDED, 0)
        attempts = await cluster.read(JobStore.task_attempts, "alice", "job", 0, "worker", 1)
        assert attempts[0].retries == RetryCounts(user=1)
        assert [(each.attempt_id, each.exit.code, each.attempt_state) for each in attempts] == [
            (1, 0, State.SUCCEEDED),
            (0, 255, State.FAILED),
        ]
        assert await log(cluster, index=1, task_attempt=1) == "0 1\n"

    play(scenario)


# ---- tasks that communicate

SERVER = """\
import os, socket
port = int(os.environ["PAI_PORT_LIST_ps_0_sync"])
listener = socket.create_server(("", port))
got = []
for _ in range(2):
    connection, _ = listener.accept()
    got.append(connection.recv(100).decode())
    connection.sendall(b"thanks")
    connection.close()
print(sorted(got))
"""
WORKER_CODE = """\
import os, socket, time
address = os.environ["PAI_HOST_IP_ps_0"], int(os.environ["PAI_PORT_LIST_ps_0_sync"])
while True:
    try:
        connection = socket.create_connection(address)
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
connection.sendall(f"worker {os.environ['PAI_TASK_INDEX']}".encode())
assert connection.recv(100) == b"thanks"
"""


def python(code):
    return [f"cat > program.py <<'END'\n{code}END", "python3 program.py"]


def test_roles_connect_over_tcp_with_addresses_from_environment_variables(play):
    async def scenario(cluster):
        resources = {"cpu": 1, "memoryMB": 10, "gpu": 0, "ports": {"sync": 1}}
        text = roles(
            ps={
                "commands": python(SERVER),
                "resourcePerInstance": resources,
                "completion": completion(1, -1),
            },
            worker={"commands": python(WORKER_CODE), "instances": 2, "completion": completion(1, -1)},
        )
        detail = await run(cluster, text)
        assert states(detail) == {"ps": ["SUCCEEDED"], "worker": ["SUCCEEDED", "SUCCEEDED"]}
        assert await log(cluster, role="ps") == "['worker 0', 'worker 1']\n"

    play(scenario)


def test_each_task_has_unique_ports_and_a_job_without_free_ports_fails(play):
    async def scenario(cluster):
        ports = {"cpu": 1, "memoryMB": 10, "gpu": 0, "ports": {"many": 5}}
        role = {"commands": [FOR_EVER], "instances": 6, "resourcePerInstance": ports}
        await cluster.submit("alice", roles(worker=role))
        await until(lambda: runs(cluster))
        tasks = (await cluster.read(JobStore.detail, "alice", "job")).tasks["worker"]
        held = [port for task in tasks for numbers in task.allocation.ports.values() for port in numbers]
        assert len(set(held)) == len(held) == 6 * 7
        # The range has 45 ports, and the first job has reserved 42 of them. The remaining 3 ports are too few for the second job.
        # The kernel assigns none of the 45 ports to a process that binds port 0.
        await cluster.submit("alice", roles(name="two", worker={**role, "instances": 1}))
        crowded = await over(cluster, "two")
        assert crowded.tasks["worker"][0].exit.code == 253
        assert "free ports between" in crowded.attempt.exit.diagnostics
        # Without gang allocation, each task is allocated separately. The first task ends the attempt while the second task waits.
        single = {"extras": {"gangAllocation": False}, "jobRetryCount": 1}
        await cluster.submit("alice", roles(name="three", top=single, worker={**role, "instances": 2}))
        assert (await over(cluster, "three")).attempt.code == 253
        await stop(cluster)

    play(scenario, first_port=11900, end_port=11945, most_platform_retries=1)


async def runs(cluster, name="job"):
    return (await cluster.read(JobStore.detail, "alice", name)).job.state is State.RUNNING


async def stop(cluster, name="job"):
    await cluster.stop(await summary(cluster, name))
    return await over(cluster, name)


# ---- stopping

DAEMONS = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(1), os.close(2)
            time.sleep(1000)
        os._exit(0)
if os.fork() == 0:
    time.sleep(1000)
time.sleep(1000)
"""


def test_a_stopped_job_leaves_no_process_even_if_it_started_daemons_in_other_sessions(play, tmp_path):
    async def scenario(cluster):
        await cluster.submit("alice", commands(*python(DAEMONS)))

        async def are_there():
            # The processes are the supervisor, bash, Python, one child and three daemons.
            return len(processes_of(tmp_path)) >= 7

        await until(are_there)
        detail = await stop(cluster)
        assert (detail.job.state, detail.job.exit_code) == (State.STOPPED, -210)
        assert detail.job.execution_type is ExecutionType.STOP
        assert processes_of(tmp_path) == []

    play(scenario, grace_s=0.3)


def test_a_stopped_task_has_a_grace_period_to_save_its_work(play):
    async def scenario(cluster):
        await cluster.submit(
            "alice", commands("trap 'sleep 0.3; echo saved; exit 0' TERM", "echo ready", "sleep 1000 & wait")
        )

        async def is_ready():
            with contextlib.suppress(ApiError):
                return "ready" in await log(cluster)

        await until(is_ready)
        detail = await stop(cluster)
        assert detail.job.state is State.STOPPED
        assert await log(cluster) == "ready\nsaved\n"

    play(scenario)


def test_a_queued_job_is_stopped_immediately(play):
    async def scenario(cluster):
        await cluster.submit("alice", commands(FOR_EVER))
        await cluster.submit("alice", commands(FOR_EVER, name="waits"))
        detail = await stop(cluster, "waits")
        assert (detail.job.state, detail.job.launched_at_s) == (State.STOPPED, None)
        await stop(cluster)

    play(scenario, virtual_clusters={"default": ResourceCounts(1, 2000, 0)})


def test_background_processes_of_a_task_are_killed_when_the_task_ends(finished, tmp_path):
    detail = finished(commands("sleep 1000 &", "setsid sleep 1000 &", "echo done"))
    assert detail.job.state is State.SUCCEEDED
    assert processes_of(tmp_path) == []


# ---- the queue


def test_jobs_wait_for_gpus_in_submission_order_and_share_no_gpu(play):
    async def scenario(cluster):
        role = {
            "commands": ['echo "$CUDA_VISIBLE_DEVICES $NVIDIA_VISIBLE_DEVICES"', "sleep 0.2"],
            "resourcePerInstance": {"cpu": 0, "memoryMB": 0, "gpu": 2},
        }
        names = [f"j{number}" for number in range(4)]
        for name in names:
            await cluster.submit("alice", roles(name=name, worker=role))
        found = [await over(cluster, name) for name in names]
        assert {await log(cluster, name) for name in names} == {"0,1 0,1\n", "2,3 2,3\n"}
        # The jobs start in the order of their submission, and two jobs run at the same time.
        began = [detail.job.launched_at_s for detail in found]
        ended = [detail.job.completed_at_s for detail in found]
        assert max(began[:2]) < min(began[2:])
        assert min(ended[:2]) <= min(began[2:])

    play(scenario)


def test_virtual_clusters_report_their_capacity_and_their_usage_and_their_queued_jobs(play):
    async def scenario(cluster):
        await cluster.submit("alice", commands(FOR_EVER, defaults={"virtualCluster": "small"}))
        await cluster.submit("alice", commands(FOR_EVER, name="b", defaults={"virtualCluster": "small"}))
        await until(lambda: runs(cluster))
        large, small = cluster.virtual_clusters
        assert (large.name, large.used.cpu, large.waiting_jobs) == ("default", 0, 0)
        assert (small.name, small.capacity.cpu, small.used.cpu, small.waiting_jobs) == ("small", 1, 1, 1)
        await stop(cluster, "b")
        await stop(cluster)
        assert cluster.virtual_clusters[1].used == ResourceCounts(0, 0, 0)

    both = {"default": ResourceCounts(4, 4000, 0), "small": ResourceCounts(1, 1024, 0)}
    play(scenario, virtual_clusters=both)


# ---- storage, secrets, logs, notifications

CAN_MOUNT = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not CAN_MOUNT, reason="this kernel, or this user, makes no mount namespaces")
def test_a_storage_is_mounted_only_at_the_path_requested_by_the_job(play, tmp_path):
    (tmp_path / "share").mkdir()
    (tmp_path / "share/hello").write_text("from the storage")
    (tmp_path / "fixed").mkdir()
    storages = (
        StorageSettings("nfs", tmp_path / "share"),
        StorageSettings("fixed", tmp_path / "fixed", is_default=False, is_read_only=True),
    )

    async def scenario(cluster):
        assert cluster.mounts_work
        wanted = [{"name": "nfs", "mountPath": "/mnt/deep/er"}, {"name": "fixed"}]
        lines = ["cat /mnt/deep/er/hello", "echo new > /mnt/deep/er/new", "! echo x > /mnt/fixed/x"]
        detail = await run(cluster, commands(*lines, extras={"storages": wanted}))
        assert detail.job.state is State.SUCCEEDED, detail.attempt.exit.diagnostics
        assert await log(cluster) == "from the storage"
        usual = await run(cluster, commands("ls /mnt/nfs", name="usual", extras={"storages": []}))
        assert usual.job.state is State.SUCCEEDED
        without = await run(cluster, commands("! ls /mnt/nfs", name="without"))
        assert without.job.state is State.SUCCEEDED

    play(scenario, storages=storages)
    assert (tmp_path / "share/new").read_text() == "new\n"
    assert not Path("/mnt/deep").exists()


@pytest.mark.skipif(not CAN_MOUNT, reason="this kernel, or this user, makes no mount namespaces")
def test_a_storage_is_not_mounted_over_the_state_folder_and_the_log_names_the_storage_path(play, tmp_path):
    (tmp_path / "share").mkdir()

    async def scenario(cluster):
        wanted = {"storages": [{"name": "nfs", "mountPath": str(tmp_path)}]}
        detail = await run(cluster, commands("true", extras=wanted))
        assert detail.job.state is State.SUCCEEDED
        told = await log(cluster, file="runtime.log")
        assert f"cannot mount storage nfs at {tmp_path}" in told
        assert f"use its path {tmp_path}/share" in told

    play(scenario, storages=(StorageSettings("nfs", tmp_path / "share"),))


def test_a_secret_is_available_to_the_commands_and_stored_in_no_file(play, tmp_path):
    async def scenario(cluster):
        text = commands(
            "set -x; token='<% $secrets.token %>'; [ ${#token} = 13 ]; echo $token",
            "printf %s ${token:0:9} >&2; sleep 0.1; printf %s ${token:9} >&2; exit 42",
            secrets={"token": "correct-horse"},
        )
        detail = await run(cluster, text)
        assert detail.attempt.exit.origin_user_exit_code == 42
        assert "******" in await log(cluster)
        assert "correct-horse" not in await cluster.read(JobStore.config, "alice", "job")

        async def is_tidy():
            return not list((tmp_path / "state/containers").iterdir())

        await until(is_tidy)

    play(scenario)
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert not [path for path in files if b"correct-horse" in path.read_bytes()]


def test_the_returned_config_of_a_job_is_its_submitted_text_with_masked_secrets(play):
    async def scenario(cluster):
        text = (GOLDEN / "parameters_and_secrets.yaml").read_text()
        name = await cluster.submit("alice", text.encode())
        shown = await cluster.read(JobStore.config, "alice", name)
        head, _, rest = text.partition("secrets:")
        assert shown.startswith(f'{head}secrets: "******"')
        assert rest.splitlines()[-1] in shown
        await stop(cluster, name)

    play(scenario)


def test_each_rotated_log_can_be_read_by_name_from_an_offset(play):
    async def scenario(cluster):
        lines = ["for i in $(seq 1000 1300); do echo line $i; done", "echo bad >&2"]
        await run(cluster, commands(*lines))
        logs = await cluster.logs_of("alice", "job", 0, "worker", 0, 0)
        found = log_sizes(logs)
        assert found["stdout"] <= 1000 == found["stdout.1"] == found["stdout.2"]
        assert {"stderr", "all", "all.1", "runtime.log"} <= set(found)
        assert "stdout.3" not in found
        end = read_log(logs, "stdout", max_bytes=10)
        assert end.data == b"line 1300\n"
        assert end.offset + 10 == end.size_bytes
        following = read_log(logs, "stdout", offset=end.size_bytes)
        assert following.data == b""
        everything = "".join([await log(cluster, file=name) for name in ("stdout.2", "stdout.1", "stdout")])
        assert everything.endswith("line 1299\nline 1300\n")

    play(scenario, log_file_bytes=1000)


@pytest.mark.parametrize(
    "name", ["../stdout", "/etc/passwd", "stdout/../../x", "", "stdout.9", "user-stdout/current"]
)
def test_a_log_name_that_is_unknown_or_contains_a_path_is_refused(play, name):
    async def scenario(cluster):
        await run(cluster, commands("true"))
        logs = await cluster.logs_of("alice", "job", 0, "worker", 0, 0)
        with an_api_error("NoTaskLogError", "cannot find the log"):
            read_log(logs, name)

    play(scenario)


def test_the_webhook_and_the_notification_file_receive_the_state_changes_that_a_job_selects(play, tmp_path):
    async def scenario(cluster):
        wanted = {"running": True, "succeeded": True, "retried": True}
        again = '[ "$FC_FRAMEWORK_ATTEMPT_ID" = 1 ]'
        text = commands(again, jobRetryCount=1, extras={"jobStatusChangeNotification": wanted})
        await run(cluster, text)
        await run(cluster, commands("true", name="silent"))
        return [await asyncio.to_thread(webhook.next) for _ in range(4)]

    with a_webhook(503) as webhook:
        sent = play(scenario, notification_url=webhook.url, notification_file=tmp_path / "sent")
        assert webhook.accepted.empty()
    changes = ["running", "retried", "running", "succeeded"]
    assert [each["change"] for each in sent] == changes
    assert {each["job"] for each in sent} == {"job"}
    in_file = [json.loads(line) for line in (tmp_path / "sent").read_text().splitlines()]
    assert [each["change"] for each in in_file] == changes
    assert (in_file[-1]["user"], in_file[-1]["exit_code"]) == ("alice", 0)


# ---- refused jobs


def refused(play, text, error, match, **changes):
    async def scenario(cluster):
        with pytest.raises(error, match=match) as caught:
            await cluster.submit("alice", text)
        assert await cluster.read(JobStore.jobs) == []
        return caught.value

    return play(scenario, **changes)


def test_the_refusal_of_an_invalid_job_contains_all_errors(play):
    text = text_of(a_job(((*WORKER, "instances"), 0), ((*WORKER, "commands"), []), name="no~tilde")).encode()
    error = refused(play, text, ProtocolInvalid, "cannot use")
    assert len(error.diagnostics) == 3
    assert len(json.loads(error.response_message())) == 3


@pytest.mark.parametrize("text", [b"\xff\xfe", b"a: [", b"", b"- 1"])
def test_submitted_text_that_describes_no_job_is_refused(play, text):
    refused(play, text, ProtocolInvalid, "cannot")


def test_an_image_or_mount_path_that_could_inject_options_is_refused(play, tmp_path):
    (tmp_path / "share").mkdir()
    storages = (StorageSettings("nfs", tmp_path / "share"),)
    image = a_job((("prerequisites", 0, "uri"), "--volume=/:/host"))
    refused(
        play, text_of(image).encode(), ProtocolInvalid, "an image name cannot start with", storages=storages
    )
    for path in ("/a:rw,exec", "relative", "/a,b"):
        mount = commands("true", extras={"storages": [{"name": "nfs", "mountPath": path}]})
        refused(play, mount, ProtocolInvalid, "use an absolute path", storages=storages)


def test_the_refusal_contains_the_available_names_if_the_virtual_cluster_or_storage_is_unknown(play):
    elsewhere = commands("true", defaults={"virtualCluster": "gpu"})
    error = refused(play, elsewhere, ApiError, "cannot find virtual cluster gpu; use one of default")
    assert error.code == "NoVirtualClusterError"
    unknown = commands("true", extras={"storages": [{"name": "x"}]})
    error = refused(play, unknown, ApiError, "cannot find storage x; the storages are: none")
    assert error.code == "NoStorageError"


def test_the_refusal_contains_the_capacity_if_a_gang_is_larger_than_the_cluster(play):
    text = commands("true", instances=5)
    refused(
        play,
        text,
        ProtocolInvalid,
        "default has only 4 CPUs",
        virtual_clusters={"default": ResourceCounts(4, 9999, 0)},
    )

    async def scenario(cluster):
        alone = commands("true", instances=5, extras={"gangAllocation": False})
        assert (await run(cluster, alone)).job.state is State.SUCCEEDED

    play(scenario, virtual_clusters={"default": ResourceCounts(4, 9999, 0)})


def test_a_job_name_is_unique_per_user_until_the_job_is_deleted(play):
    async def scenario(cluster):
        await cluster.submit("alice", commands(FOR_EVER))
        with an_api_error("ConflictJobError", "alice~job"):
            await cluster.submit("alice", commands("true"))
        await run(cluster, commands("true"), "bob")
        with an_api_error("ConflictJobError", "stop it first"):
            await cluster.delete(await summary(cluster))
        await stop(cluster)
        await cluster.delete(await summary(cluster))
        with an_api_error("NoJobError"):
            await cluster.read(JobStore.detail, "alice", "job")
        assert [job.user for job in await cluster.read(JobStore.jobs)] == ["bob"]
        assert (await run(cluster, commands("true"))).job.state is State.SUCCEEDED

    play(scenario)


def test_a_query_for_a_missing_job_or_task_raises_an_api_error_with_the_code_nojoberror(play):
    async def scenario(cluster):
        await run(cluster, commands("true"))
        for question in (
            cluster.read(JobStore.detail, "alice", "nothing"),
            cluster.read(JobStore.detail, "alice", "job", 7),
            cluster.read(JobStore.config, "bob", "job"),
            cluster.read(JobStore.events, "alice", "nothing"),
            cluster.read(JobStore.task_attempts, "alice", "job", 0, "worker", 5),
            cluster.logs_of("alice", "job", 0, "nobody", 0, 0),
            cluster.read(JobStore.summary, "alice", "nothing"),
        ):
            with an_api_error("NoJobError", "not found|cannot find"):
                await question

    play(scenario)


def test_tags_are_added_and_removed_idempotently(play):
    async def scenario(cluster):
        await run(cluster, commands("true"))
        job_id = (await summary(cluster)).job_id
        for tag in ("b", "a", "b"):
            await cluster.write(JobStore.commit, [("add_tag", {"job_id": job_id, "tag": tag})])
        for _ in range(2):
            await cluster.write(JobStore.commit, [("remove_tag", {"job_id": job_id, "tag": "b"})])
        (job,) = await cluster.read(JobStore.jobs)
        assert job.tags == (await cluster.read(JobStore.detail, "alice", "job")).job.tags == ("a",)

    play(scenario)


def test_the_events_of_a_job_include_its_scheduling_and_its_start_and_its_failure_and_its_warnings(play):
    async def scenario(cluster):
        await run(cluster, commands("exit 3", "echo <% $parameters.nobody %>"))
        reasons = [event.reason for event in await cluster.read(JobStore.events, "alice", "job")]
        assert {"Scheduled", "Started", "PAIRuntimeUnknownFailed", "Unclear"} == set(reasons)
        warnings = await cluster.read(JobStore.events, "alice", "job", "Warning")
        assert {event.reason for event in warnings} == {"PAIRuntimeUnknownFailed", "Unclear"}

    play(scenario)


def test_a_second_cluster_in_the_same_state_folder_is_refused(play, tmp_path):
    async def scenario(_):
        with pytest.raises(StateDirUnusable, match="another cluster uses this directory"):
            await Cluster(settings(tmp_path)).start()

    play(scenario)


def test_a_state_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StateDirUnusable, match="choose another state directory"):
        asyncio.run(Cluster(settings(tmp_path)).start())


def test_a_closed_cluster_refuses_calls(tmp_path):
    async def scenario():
        async with running(settings(tmp_path)) as cluster:
            pass
        with pytest.raises(ClusterClosed):
            await cluster.submit("alice", commands("true"))
        with pytest.raises(ClusterClosed):
            await cluster.read(JobStore.jobs)

    asyncio.run(scenario())


# ---- the examples of OpenPAI's documentation


def test_the_notification_example_of_the_documentation_runs(finished):
    assert finished((GOLDEN / "notification.yaml").read_bytes()).job.state is State.SUCCEEDED


def test_placeholders_in_the_commands_are_replaced_by_parameters_and_secrets(play):
    async def scenario(cluster):
        text = commands(
            "echo <% $parameters.lr %>; echo -n <% $secrets.token %> | wc -c",
            parameters={"lr": 1e-4},
            secrets={"token": "a&b'c"},
        )
        await run(cluster, text.replace(b"<% $secrets.token %>", b'\\"<% $secrets.token %>\\"'))
        assert (await log(cluster)).split() == ["0.0001", "5"]

    play(scenario)


def test_the_infiniband_example_of_the_documentation_is_refused_with_its_line_number(play):
    text = (GOLDEN / "infiniband.yaml").read_bytes()
    refused(play, text, ProtocolInvalid, "line 11, column 3: cannot read the job")


def test_prerequisites_run_in_order_before_the_commands_and_in_reverse_order_after_the_commands(play):
    def cmd(name, require=()):
        events = [
            {"event": "taskStarts", "commands": [f"echo {name} >> order"]},
            {"event": "taskSucceeds", "commands": [f"echo {name} >> order", "cat order"]},
        ]
        plug = "com.microsoft.pai.runtimeplugin.cmd"
        return {"name": name, "type": "script", "plugin": plug, "callbacks": events, "require": list(require)}

    async def scenario(cluster):
        job = a_job(((*WORKER, "prerequisites"), ["b", "c"]), ((*WORKER, "commands"), ["cat order"]))
        job["taskRoles"]["worker"]["instances"] = 1
        job["prerequisites"] += [cmd("a"), cmd("b", ["a"]), cmd("c")]
        assert (await run(cluster, text_of(job).encode())).job.state is State.SUCCEEDED
        assert (await log(cluster)).split() == ["a", "b", "c"]
        told = (await log(cluster, file="runtime.log")).split()
        assert "".join(word for word in told if word in "abc").endswith("abccba")

    play(scenario)


def test_jobs_of_a_closed_cluster_continue_and_are_adopted_by_the_next_cluster(play, tmp_path):
    async def begin(cluster):
        await cluster.submit("alice", commands("until [ -f go ]; do sleep 0.02; done", "echo went"))
        await until(lambda: runs(cluster))

    async def go_on(cluster):
        (work,) = (tmp_path / "state/containers").glob("*/work")
        assert (await cluster.read(JobStore.detail, "alice", "job")).job.state is State.RUNNING
        (work / "go").touch()
        detail = await over(cluster)
        assert (detail.job.state, detail.job.retries.total) == (State.SUCCEEDED, 0)
        assert await log(cluster) == "went\n"

    play(begin)
    assert processes_of(tmp_path)
    play(go_on)


def test_a_task_is_retried_and_its_old_processes_are_killed_if_its_supervisor_was_killed(play, tmp_path):
    async def scenario(cluster):
        await cluster.submit("alice", commands('[ "$FC_FRAMEWORK_ATTEMPT_ID" = 1 ] || sleep 1000'))
        await until(lambda: runs(cluster))

        async def began():
            return bool(list((tmp_path / "state/logs").rglob("user-stdout/current")))

        await until(began)
        (document,) = (tmp_path / "state/containers").glob("*/process.json")
        os.kill(json.loads(document.read_text())["pid"], 9)
        detail = await over(cluster)
        assert (detail.job.state, detail.job.retries) == (State.SUCCEEDED, RetryCounts(platform=1))
        first = (await cluster.read(JobStore.detail, "alice", "job", 0)).attempt.exit
        assert (first.code, "processes of the container were killed" in first.diagnostics) == (137, True)
        assert processes_of(tmp_path) == []

    play(scenario)


@pytest.mark.parametrize(
    ("left", "why"),
    [
        ({"default": ResourceCounts(1, 2000, 0)}, "became too small"),
        ({"other": ResourceCounts(9, 9999, 0)}, "was removed"),
    ],
)
def test_a_queued_job_fails_when_its_virtual_cluster_is_removed_or_becomes_too_small(play, left, why):
    async def begin(cluster):
        await cluster.submit("alice", commands("sleep 0.5", instances=2))
        await cluster.submit("alice", commands("true", instances=2, name="waits"))
        await until(lambda: runs(cluster))

    async def go_on(cluster):
        detail = await over(cluster, "waits")
        assert (detail.job.state, detail.job.exit_code) == (State.FAILED, -1005)
        assert why in detail.attempt.exit.diagnostics
        assert (await over(cluster)).job.state is State.SUCCEEDED
        after = commands("true", name="after", defaults={"virtualCluster": next(iter(left))})
        assert (await run(cluster, after)).job.state is State.SUCCEEDED

    play(begin, virtual_clusters={"default": ResourceCounts(2, 4000, 0)})
    play(go_on, virtual_clusters=left)


def test_a_queued_job_fails_when_its_storage_is_removed(play, tmp_path):
    (tmp_path / "share").mkdir()
    one = {"default": ResourceCounts(1, 4000, 0)}

    async def begin(cluster):
        await cluster.submit("alice", commands("sleep 0.3"))
        await cluster.submit("alice", commands("true", name="waits", extras={"storages": [{"name": "nfs"}]}))
        await until(lambda: runs(cluster))

    async def go_on(cluster):
        detail = await over(cluster, "waits")
        assert (detail.job.state, detail.job.exit_code) == (State.FAILED, -120)
        assert "storage nfs was removed" in detail.attempt.exit.diagnostics

    play(begin, virtual_clusters=one, storages=(StorageSettings("nfs", tmp_path / "share"),))
    play(go_on, virtual_clusters=one)
