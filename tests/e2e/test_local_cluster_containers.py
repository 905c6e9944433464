"""The local OpenPAI cluster with `--sandbox podman`: each task in a real container of its job's image."""

import asyncio
import json
import os

import pytest
import yaml
from deadlines import scaled_s
from mpi_jobs import BENCHMARK, PRINTED, TRAINING, mpi_job
from openpai_jobs import text_of
from real_cluster import (
    commands,
    end_processes_of,
    log,
    over,
    processes_of,
    run,
    running,
    settings,
    states,
    stop,
    until,
)

from nni_manager.local_openpai.container_runtime import _creation_failure
from nni_manager.local_openpai.core.policies import RetryCounts
from nni_manager.local_openpai.core.queue import ResourceCounts
from nni_manager.local_openpai.core.states import State
from nni_manager.local_openpai.errors import ApiError
from nni_manager.local_openpai.sandbox import CLUSTER_LABEL, SandboxMissing, registry_logins
from nni_manager.local_openpai.settings import Sandbox, StorageSettings

pytestmark = [pytest.mark.any_machine, pytest.mark.containers, pytest.mark.timeout(1000)]
PLUGINS = "com.microsoft.pai.runtimeplugin"


@pytest.fixture
def play(podman, tmp_path, monkeypatch):
    """Runs a scenario on a cluster whose tasks are containers of the base image; afterwards no container
    is left.
    """
    image = podman.base()
    for name in ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"):
        monkeypatch.setenv(name, podman.environ[name])

    def containers():
        return podman.run(
            *("podman", "ps", "--all", "--format", "{{.Names}}"),
            *("--filter", f"label={CLUSTER_LABEL}={tmp_path / 'state/containers'}"),
        ).split()

    def make(scenario, **changes):
        async def bounded():
            async with running(settings(tmp_path, sandbox=Sandbox.PODMAN, **changes)) as cluster:
                await asyncio.wait_for(scenario(cluster, image), scaled_s(200))

        asyncio.run(bounded())
        assert containers() == []

    yield make
    end_processes_of(tmp_path)
    for name in containers():
        podman.run("podman", "rm", "--force", name)


def of(image, *lines, **top):
    job = json.loads(commands(*lines, **top))
    job["prerequisites"][0]["uri"] = image
    return text_of(job).encode()


@pytest.mark.smoke
def test_a_task_runs_in_its_image_with_its_variables_and_storages(play, tmp_path):
    (tmp_path / "share").mkdir()
    (tmp_path / "share/hello").write_text("from the storage\n")

    async def scenario(cluster, image):
        around = {
            "plugin": "cmd",
            "parameters": {"preCommands": ["echo before > /x"], "postCommands": ["echo after"]},
        }
        lines = [
            "cat /x /mnt/nfs/hello",
            "echo $PAI_JOB_NAME $PAI_WORK_DIR",
            "ls -d /work || echo alone",
            "echo bad >&2",
        ]
        detail = await run(
            cluster, of(image, *lines, extras={"storages": [{"name": "nfs"}], PLUGINS: [around]})
        )
        assert detail.job.state is State.SUCCEEDED, detail.attempt.exit.diagnostics
        assert await log(cluster) == "before\nfrom the storage\nalice~job /\nalone\n"
        assert "bad\n" in await log(cluster, file="stderr")
        assert "after\n" in await log(cluster, file="runtime.log")
        failed = await run(cluster, of(image, "exit 42", name="failed"))
        assert (failed.attempt.exit.code, failed.attempt.exit.origin_user_exit_code) == (255, 42)
        killed = await run(cluster, of(image, "kill -SEGV $$", name="killed"))
        assert killed.attempt.exit.code == 139

    play(scenario, storages=(StorageSettings("nfs", tmp_path / "share"),))


def test_a_task_runs_as_the_user_of_its_image(play, podman, tmp_path):
    (tmp_path / "Dockerfile").write_text(f"FROM {podman.base()}\nUSER 65534:65534\n")
    mine = "localhost/trial-keeper-test-nobody"
    podman.run("podman", "build", "--file", str(tmp_path / "Dockerfile"), "--tag", mine, str(tmp_path))

    async def scenario(cluster, _):
        detail = await run(cluster, of(mine, "id -u"))
        assert detail.job.state is State.SUCCEEDED, detail.attempt.exit.diagnostics
        assert await log(cluster) == "65534\n"
        await cluster.submit("alice", of(mine, "echo on; sleep 1000", name="endless"))

        async def is_on():
            try:
                return "on" in await log(cluster, "endless")
            except ApiError:
                return False

        await until(is_on)
        await stop(cluster, "endless")
        assert (await over(cluster, "endless")).job.state is State.STOPPED

    play(scenario)


@pytest.mark.smoke
def test_a_stopped_container_exits_within_its_grace_period_and_leaves_no_process(play, tmp_path):
    async def scenario(cluster, image):
        script = [
            "setsid sleep 1000 &",
            "trap 'echo saved; exit 0' TERM",
            "echo ready",
            "while true; do sleep 0.1; done",
        ]
        await cluster.submit("alice", of(image, *script))

        async def is_ready():
            try:
                return "ready" in await log(cluster)
            except ApiError:
                return False

        await until(is_ready)
        await stop(cluster)
        detail = await over(cluster)
        assert detail.job.state is State.STOPPED
        assert await log(cluster) == "ready\nsaved\n"

        async def is_quiet():
            return processes_of(tmp_path) == []

        await until(is_quiet)

    play(scenario, grace_s=20.0)


def test_a_task_fails_with_the_message_of_podman_if_its_image_cannot_be_pulled(play):
    async def scenario(cluster, _):
        detail = await run(cluster, of("localhost:1/image:1", "true"))
        assert (detail.job.state, detail.attempt.exit.code) == (State.FAILED, -1201)
        assert "connection refused" in detail.attempt.exit.diagnostics

    play(scenario)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("Error: initializing source docker://x/y:1: reading manifest 1 in x/y: manifest unknown", 254),
        ("docker: Error response from daemon: pull access denied for y, repository does not exist", 254),
        ("Error: pinging container registry x: connection refused", -1201),
    ],
)
def test_a_missing_image_and_an_unreachable_registry_have_different_exit_codes(tmp_path, said, code):
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/current").write_text(said)
    assert _creation_failure(tmp_path).code == code


def test_a_container_is_removed_and_its_task_is_retried_if_the_supervisor_is_killed(play, tmp_path):
    async def scenario(cluster, image):
        await cluster.submit(
            "alice", of(image, '[ "$FC_FRAMEWORK_ATTEMPT_ID" = 1 ] || { echo on; sleep 1000; }')
        )

        async def is_on():
            try:
                return "on" in await log(cluster)
            except ApiError:
                return False

        await until(is_on)
        (document,) = (tmp_path / "state/containers").glob("*/process.json")
        os.kill(json.loads(document.read_text())["pid"], 9)
        detail = await over(cluster)
        assert (detail.job.state, detail.job.retries) == (State.SUCCEEDED, RetryCounts(platform=1))

    play(scenario)


def test_the_local_openpai_refuses_to_start_without_podman_and_docker(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxMissing, match="neither podman nor docker"):
        asyncio.run(running(settings(tmp_path, sandbox=Sandbox.PODMAN)).__aenter__())


def test_a_registry_login_is_written_in_dockers_format():
    auth = {"username": "ada", "password": "p:w", "registryuri": "https://reg.example"}
    assert json.loads(registry_logins(auth)) == {"auths": {"https://reg.example": {"auth": "YWRhOnA6dw=="}}}


def test_the_open_mpi_example_from_the_openpai_manual_can_be_run_across_containers(play, podman, tmp_path):
    image = podman.with_mpi()
    (tmp_path / TRAINING).write_text(BENCHMARK)
    job = yaml.safe_load(mpi_job(f"/mnt/examples/{TRAINING}", image=image))
    job["extras"]["storages"] = []
    for role in job["taskRoles"].values():
        # The manual's job requests GPUs, but podman can give a container only GPUs that this machine has.
        role["resourcePerInstance"]["gpu"] = 0

    async def scenario(cluster, _):
        detail = await run(cluster, yaml.safe_dump(job, sort_keys=False).encode())
        names = ("stdout", "stderr", "runtime.log")
        logs = [await log(cluster, role="master", file=name) for name in names]
        assert states(detail)["master"] == ["SUCCEEDED"], logs
        assert set(logs[0].splitlines()) == PRINTED

    play(
        scenario,
        virtual_clusters={"default": ResourceCounts(cpu=64, memory_mb=1_000_000, gpu=8)},
        storages=(StorageSettings("examples", tmp_path),),
    )
