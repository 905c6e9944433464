"""The supervisor of a container, without a cluster."""

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from deadlines import DEADLINE_S

from nni_manager.local_openpai.container_runtime import ContainerRuntime
from nni_manager.local_openpai.core.job import ContainerEnded, ContainerStarted
from nni_manager.local_openpai.fork_server import ProcessNotStarted, SupervisorForkServer, program
from nni_manager.local_openpai.settings import ClusterSettings
from nni_manager.local_openpai.supervisor import BEGUN, FORKS, claim
from trial_keeper.processes import ProcessIdentity

SETPRIV = shutil.which("setpriv")
USER_NAMESPACES = (
    subprocess.run(["unshare", "--user", "--mount", "true"], capture_output=True).returncode == 0
    if shutil.which("unshare")
    else False
)
# A bind mount with these fields is optional: if it fails, the task runs without it.
PLAIN = {"size_mb": 0, "is_required": False}


def a_spec(folder, script, **changed):
    """Write the files of a container that runs the script."""
    folder.mkdir(parents=True)
    (folder / "user.sh").write_text(script)
    spec = {
        "stages": [["user", str(folder / "user.sh")]],
        "environ": dict(os.environ),
        "work_dir": str(folder),
        "logs": str(folder.parents[1] / "logs"),
        "log_file_bytes": 10**6,
        "old_log_files": 2,
        "grace_s": 5.0,
        "secrets": [],
        "sandbox": None,
        "mounts": [],
        **changed,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    return folder


def forked(folder, before=()):
    """Ask the fork server to start a supervisor; return its response."""
    asked = os.fsencode(folder) + b"\0"
    done = subprocess.run([*before, *program(FORKS)], input=asked, capture_output=True, timeout=DEADLINE_S)
    assert (done.stderr, done.returncode) == (b"", 0)
    return done.stdout


@pytest.fixture
def container(tmp_path):
    """Return a function that runs a script in a container and returns the container's exit record."""

    def run(script, before=(), mounts=(), **spec):
        folder = a_spec(tmp_path / "containers/c", script, mounts=list(mounts), **spec)
        assert forked(folder, before) == BEGUN
        deadline_s = time.monotonic() + DEADLINE_S
        while not (folder / "exit.json").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert (folder / "supervisor.stderr").read_text() == ""
        return json.loads((folder / "exit.json").read_text())

    return run


@pytest.fixture
def said(tmp_path):
    """Return a function that reads a log: the task's stdout, or the log of the supervisor."""
    return lambda log="user-stdout": (tmp_path / "logs" / log / "current").read_text()


@pytest.mark.skipif(not SETPRIV or os.getuid() != 0, reason="only root can give up being allowed to mount")
@pytest.mark.skipif(not USER_NAMESPACES, reason="this kernel makes no user namespaces")
def test_a_storage_is_mounted_in_a_user_namespace_without_cap_sys_admin(container, said, tmp_path):
    share = tmp_path / "share"
    share.mkdir()
    (share / "hello").write_text("hi\n")
    mount = {"name": "nfs", "path": str(share), "mount_path": "/mnt/n", "is_read_only": False, **PLAIN}
    unprivileged = [SETPRIV, "--bounding-set", "-sys_admin"]
    ended = container("cat /mnt/n/hello; touch /mnt/n/new", unprivileged, [mount])
    assert (said(), ended["exit_code"]) == ("hi\n", 0), said("runtime")
    assert (share / "new").exists()


@pytest.mark.skipif(not USER_NAMESPACES, reason="this kernel, or this user, makes no mount namespaces")
def test_a_read_only_mount_refuses_writes_but_the_folder_around_it_accepts_writes(container, said, tmp_path):
    parent, share = tmp_path / "parent", tmp_path / "share"
    for folder in (parent, share, parent / "folder"):
        folder.mkdir()
    (parent / "folder/file").write_text("kept\n")
    (parent / "link").symlink_to("folder/file")
    target = parent / "a/b"
    mount = {"name": "nfs", "path": str(share), "mount_path": str(target), "is_read_only": True, **PLAIN}
    script = (
        f"cat {parent}/link; touch {target}/x && echo wrong; echo kept too > {parent}/folder/file; exit 0"
    )
    ended = container(script, mounts=[mount])
    assert (said(), ended["exit_code"]) == ("kept\n", 0), said("runtime")
    assert (parent / "folder/file").read_text() == "kept too\n"
    assert not list(share.iterdir())
    assert sorted(each.name for each in parent.iterdir()) == ["folder", "link"]


@pytest.mark.skipif(not USER_NAMESPACES, reason="this kernel, or this user, makes no mount namespaces")
def test_the_shared_memory_of_a_task_is_private_and_has_the_requested_size(container, said):
    size = {"name": "", "path": "tmpfs", "mount_path": "/dev/shm", "is_read_only": False}
    script = "ls -A /dev/shm; head -c 3000000 /dev/zero > /dev/shm/fits && echo fits; head -c 9000000 /dev/zero > /dev/shm/large"
    ended = container(script, mounts=[{**size, **PLAIN, "size_mb": 8}])
    assert (said(), ended["exit_code"]) == ("fits\n", 1), said("runtime")
    assert "No space left on device" in said("user-stderr")


def test_the_script_of_a_task_does_not_run_if_a_required_mount_fails(container, said, tmp_path):
    mount = {"name": "", "path": f"{tmp_path}/absent", "mount_path": f"{tmp_path}", "is_read_only": False}
    ended = container("echo ran", mounts=[{**mount, **PLAIN, "is_required": True}])
    assert (ended["stage"], ended["exit_code"], said()) == ("init", 1, "")
    assert f"cannot give this task its own {tmp_path}: " in said("runtime")


def test_a_supervisor_does_not_start_in_a_container_folder_that_is_already_claimed(container, tmp_path):
    container(f"echo ran >> {tmp_path}/ran")
    folder = tmp_path / "containers/c"
    assert forked(folder) != BEGUN
    (folder / "process.json").unlink()
    assert claim(folder, {"pid": None})
    assert forked(folder) != BEGUN
    assert (tmp_path / "ran").read_text() == "ran\n"


# The child calls end_with(), so that it ends together with its parent. The test kills the parent after the child has printed
# its pid. In the case `before`, the child then waits for a line of input before it calls end_with().
PARENT_AND_CHILD = """
import os, signal, sys
from nni_manager.local_openpai.supervisor import end_with
parent = os.getpid()
if os.fork():
    signal.pause()
if sys.argv[1] == "before":
    print(os.getpid(), flush=True)
    sys.stdin.readline()
end_with(parent)
print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_function_end_with_ends_a_child_whose_parent_is_killed_before_or_after_the_call(when):
    command = [sys.executable, "-c", PARENT_AND_CHILD, when]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(DEADLINE_S)
        # In the case `before`, the parent has ended before the child calls end_with(). This line of input lets the child call it.
        if when == "before":
            parent.stdin.write("\n")
            parent.stdin.flush()
        child.wait(DEADLINE_S)


def test_an_error_with_the_cause_is_raised_if_a_supervisor_cannot_start(tmp_path):
    starter = SupervisorForkServer()
    with pytest.raises(ProcessNotStarted, match=r"No such file or directory: .*spec\.json"):
        starter.start(tmp_path)
    with pytest.raises(ProcessNotStarted, match="cannot fork a supervisor"):
        starter.start(tmp_path / "nowhere")
    starter.close()


def test_a_killed_fork_server_is_replaced(tmp_path):
    starter = SupervisorForkServer()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        if number == 0:
            with pytest.raises(ProcessNotStarted, match="spec"):
                starter.start(tmp_path / "0")
        else:
            assert starter.start(tmp_path / "1")["pid"] is not None
        starter._process.kill()
        starter._process.wait()
    starter.close()


class _Unanswered(SupervisorForkServer):
    """A fork server that is killed between a fork and its answer."""

    def start(self, folder):
        super().start(folder)
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("fault", ["no answer", "no descriptor", "no supervisor"])
def test_a_container_is_reported_as_ended_only_if_its_supervisor_does_not_run(tmp_path, monkeypatch, fault):
    """A job that is reported as ended starts again elsewhere, so its containers must have ended."""
    open_pidfd, refusals = ProcessIdentity.open_pidfd, [OSError(errno.EMFILE, "Too many open files")]

    def refused_once(identity):
        if refusals:
            raise refusals.pop()
        return open_pidfd(identity)

    def start_supervisor(_plan, effect):
        folder = a_spec(tmp_path / "containers" / effect.task.container_id, f"echo ran; cat {tmp_path}/gate")
        if fault == "no supervisor":
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return runtime._starter.start(folder)

    async def run():
        runtime.start(
            SimpleNamespace(debug_id="d", role=lambda _: SimpleNamespace(mangled_name="r")),
            SimpleNamespace(task=SimpleNamespace(role="r", container_id="c")),
        )
        first = await asyncio.wait_for(queue.get(), DEADLINE_S)
        if fault == "no supervisor":
            assert isinstance(first, ContainerEnded)
            assert "cannot start the container's supervisor: [Errno 32] Broken pipe" in first.exit.diagnostics
        else:
            assert first == ContainerStarted("c")
            assert queue.empty()
            await asyncio.to_thread((tmp_path / "gate").write_text, "")
            ended = await asyncio.wait_for(queue.get(), DEADLINE_S)
            assert (ended.container_id, ended.exit.code) == ("c", 0)
        await runtime.close()

    queue = asyncio.Queue()
    monkeypatch.setattr("nni_manager.local_openpai.container_runtime._NEXT_TRY_S", 0.01)
    if fault == "no descriptor":
        monkeypatch.setattr(ProcessIdentity, "open_pidfd", refused_once)
    os.mkfifo(tmp_path / "gate")
    runtime = ContainerRuntime(ClusterSettings(state_dir=tmp_path), queue.put_nowait)
    runtime._start_supervisor = start_supervisor
    if fault == "no answer":
        runtime._starter = _Unanswered()
    asyncio.run(run())


def test_a_task_ends_with_exit_code_127_and_a_logged_cause_if_it_cannot_start(container, said):
    ended = container("true", work_dir="/nowhere")
    assert ended["exit_code"] == 127
    assert "cannot start bash in /nowhere" in said("runtime")


def test_the_stored_output_of_a_task_is_bounded(container, tmp_path):
    ended = container("head -c 50000000 /dev/zero", log_file_bytes=10**6)
    assert ended["exit_code"] == 0
    kept = list((tmp_path / "logs/user-stdout").iterdir())
    assert len(kept) == 3
    assert sum(each.stat().st_size for each in kept) <= 3 * 10**6


def test_a_task_keeps_its_own_exit_code_if_a_full_disk_prevents_the_storage_of_its_output(
    container, tmp_path
):
    for name in ("user-stdout", "user-all"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "current").symlink_to("/dev/full")
    assert container("for i in $(seq 1000); do echo line; done; exit 3")["exit_code"] == 3


@pytest.mark.parametrize(
    ("stop", "exit_code", "expected"), [("", 0, "hi\n"), ("trap '' TERM; kill -TERM $PPID", 143, "")]
)
def test_a_container_is_removed_while_its_watcher_runs_and_a_failed_removal_is_retried(
    container, said, tmp_path, stop, exit_code, expected
):
    watcher, tries = tmp_path / "watcher", tmp_path / "tries"
    begins = f"{stop}\nsetsid sleep 1000 >/dev/null 2>&1 & echo $! > {watcher}"
    # A killed watcher may be a zombie for a moment. The script tests /proc/PID/exe, which the kernel does not show for a zombie.
    is_watched = f"[ -e /proc/$(< {watcher})/exe ]"
    removes = f"{is_watched} && echo watched >> {tries} || echo alone >> {tries}; [ $(wc -l < {tries}) = 2 ]"
    sandbox = {
        "begin": ["bash", "-c", begins],
        "run": ["bash"],
        "stop": ["true"],
        "end": ["bash", "-c", removes],
    }
    assert container("echo hi", sandbox=sandbox)["exit_code"] == exit_code
    assert tries.read_text() == "watched\nalone\n"
    assert said() == expected
    assert ("user starts" in said("runtime")) is (exit_code == 0)
    assert not os.path.exists(f"/proc/{watcher.read_text().strip()}/exe")
