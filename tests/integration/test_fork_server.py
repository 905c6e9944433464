"""The fork server of keepers on the manager's machine."""

import asyncio
import contextlib
import errno
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from deadlines import DEADLINE_S
from real_experiment import until, wait_until

from nni_manager.errors import RetryableError
from nni_manager.training_services.local.fork_server import KeeperForkServer
from nni_manager.training_services.platform import platform_of
from trial_keeper import processes
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.fork_requests import FORK_SERVER

# The first trial waits for the file `go`. Each trial reports the pid of its parent, which is its keeper.
WAITS = """
import os, time
import nni_sdk
parameters = nni_sdk.get_next_parameter()
while not os.path.exists("go"):
    time.sleep(0.01)
nni_sdk.report_final_result(os.getppid())
"""
BROKEN = f"import os, sys\nif {FORK_SERVER!r} in sys.orig_argv: os._exit(3)\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


@contextmanager
def a_server(folder):
    server = KeeperForkServer(folder)
    try:
        yield server
    finally:
        server.close()


def incomplete_settings(**more):
    """An environment that lacks settings, so that a keeper exits immediately with an error message."""
    return os.environ | {"TRIAL_KEEPER_JOB_ID": "JOB1"} | more


async def forked(server, tmp_path, environ):
    """Return the pid of a keeper, the future of its exit code, and whether the server has forked the keeper."""
    watched = []
    with (tmp_path / "log").open("ab") as log:
        is_forked = await server.start(environ, log.fileno(), lambda *found: watched.append(found))
    return (*watched[0], True) if is_forked else (None, None, False)


def fork_servers(of):
    """The fork servers among the children of a process."""
    found = []
    for each in psutil.Process(of).children():
        # A process that another test has started may end during this check.
        with contextlib.suppress(psutil.NoSuchProcess):
            # The command line of a process is empty for a moment after Popen has returned, so wait until it is set.
            wait_until(each.cmdline, "the process has a command line")
            found += [each] if FORK_SERVER in each.cmdline() else []
    return found


async def test_a_forked_keeper_returns_its_exit_code_and_writes_to_its_log(tmp_path):
    with a_server(tmp_path) as server:
        _, exit_code, _ = await forked(server, tmp_path, incomplete_settings())
        assert await asyncio.wait_for(exit_code, DEADLINE_S) == KeeperExit.SETTINGS
    assert "cannot read the keeper's settings" in (tmp_path / "log").read_text()


async def test_the_fork_server_starts_with_the_training_service_before_any_job(a_real_experiment):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=1)
    service = platform_of(experiment.config).make_service(experiment.folder)(lambda _: None)
    try:
        assert len(fork_servers(os.getpid())) == 1
    finally:
        await service.close()
    assert fork_servers(os.getpid()) == []


async def test_a_job_ends_without_a_trial_if_it_is_stopped_while_its_keeper_is_forked(a_real_experiment):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=1)
    ends = []
    service = platform_of(experiment.config).make_service(experiment.folder)(ends.append)
    workspace = str(experiment.folder.workspace.root)
    try:
        submission = asyncio.create_task(
            service.submit(KeeperSettings("TESTEXPT", "JOB1", workspace, "c0ffee", trial_id="JOB1"))
        )
        await asyncio.sleep(0)
        assert not submission.done()
        assert await service.stop("JOB1")
        await service.kill("JOB1")
        await submission
        await until(lambda: ends, "the job has ended")
        assert [end.job_id for end in ends] == ["JOB1"]
        assert "cannot find" not in ends[0].message, "the keeper has looked for its trial"
    finally:
        await service.close()


async def test_a_new_keeper_process_that_the_manager_cannot_watch_is_killed(a_real_experiment, monkeypatch):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=1)
    service = platform_of(experiment.config).make_service(experiment.folder)(lambda _: None)
    refused = []

    def refuse(pid):
        refused.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(service, "forks_keepers", False)
    monkeypatch.setattr(processes, "open_pidfd", refuse)
    workspace = str(experiment.folder.workspace.root)
    try:
        with pytest.raises(RetryableError, match="Too many open files"):
            await service.submit(KeeperSettings("TESTEXPT", "JOB1", workspace, "c0ffee", trial_id="JOB1"))
        assert [psutil.pid_exists(pid) for pid in refused] == [False]
    finally:
        monkeypatch.undo()
        await service.close()


async def test_keepers_are_forked_by_a_fork_server_that_already_runs(tmp_path):
    with a_server(tmp_path) as server:
        server.open()
        (opened,) = fork_servers(os.getpid())
        _, exit_code, _ = await forked(server, tmp_path, incomplete_settings())
        assert fork_servers(os.getpid()) == [opened]
        assert await asyncio.wait_for(exit_code, DEADLINE_S) == KeeperExit.SETTINGS


async def test_the_proc_file_system_shows_the_environment_and_command_line_of_a_forked_keeper(tmp_path):
    shown = []

    def watch(pid, exit_code):
        process = psutil.Process(pid)
        wait_until(lambda: "fork-server" not in process.cmdline(), "the fork has replaced its command line")
        shown.append((processes.environ_of(pid), process.cmdline()[:3], os.getsid(pid), pid))

    environ = incomplete_settings(NEW="ü")
    with a_server(tmp_path) as server, (tmp_path / "log").open("ab") as log:
        assert await server.start(environ, log.fileno(), watch)
    ((found, command, session, pid),) = shown
    assert found == environ
    assert command == [sys.executable, "-m", "trial_keeper"]
    assert session == pid


async def test_a_forked_process_exits_before_it_runs_the_keeper_if_the_manager_cannot_watch_the_process(
    tmp_path,
):
    pids = []

    def fail(pid, exit_code):
        pids.append(pid)
        raise ProcessLookupError(0, "as if it was killed")

    with a_server(tmp_path) as server, (tmp_path / "log").open("ab") as log:
        with pytest.raises(ProcessLookupError):
            await server.start(incomplete_settings(), log.fileno(), fail)
        wait_until(lambda: processes.is_dead(pids[0]), "the fork has ended")
        assert (tmp_path / "log").read_text() == ""
        # The next request must receive its own response, and not the response to the failed request.
        pid, exit_code, _ = await forked(server, tmp_path, incomplete_settings())
        assert pid != pids[0]
        assert await asyncio.wait_for(exit_code, DEADLINE_S) == KeeperExit.SETTINGS


async def test_an_environment_is_refused_if_it_is_too_large_for_a_request(tmp_path):
    with a_server(tmp_path) as server:
        for size in (10_000, 200_000):
            assert await forked(server, tmp_path, incomplete_settings(LARGE="x" * size)) == (
                None,
                None,
                False,
            )
        assert (await forked(server, tmp_path, incomplete_settings()))[2]


async def test_only_one_exit_code_is_lost_if_the_fork_server_is_killed_during_a_fork(tmp_path):
    with a_server(tmp_path) as server:
        _, first, _ = await forked(server, tmp_path, incomplete_settings())
        await asyncio.wait_for(first, DEADLINE_S)
        (process,) = fork_servers(os.getpid())
        gone = []

        def kill_server(pid, exit_code):
            process.kill()
            gone.append((pid, exit_code))

        with (tmp_path / "log").open("ab") as log:
            await server.start(incomplete_settings(), log.fileno(), kill_server)
        ((pid, exit_code),) = gone
        assert await asyncio.wait_for(exit_code, DEADLINE_S) is None
        wait_until(lambda: processes.is_dead(pid), "the keeper runs to its own end")
        assert (tmp_path / "log").read_text().count("cannot read the keeper's settings") == 2
        _, exit_code, _ = await forked(server, tmp_path, incomplete_settings())
        assert await asyncio.wait_for(exit_code, DEADLINE_S) == KeeperExit.SETTINGS


@pytest.mark.parametrize("site", [THREAD, BROKEN], ids=["has a thread", "cannot start"])
async def test_a_fork_server_that_cannot_fork_safely_refuses_to_fork(tmp_path, monkeypatch, site):
    (tmp_path / "sitecustomize.py").write_text(site)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with a_server(tmp_path) as server:
        assert not (await forked(server, tmp_path, incomplete_settings()))[2]


# ---- in an experiment


def keeper_of(experiment):
    """Wait until the only trial runs, and return its keeper."""
    wait_until(lambda: experiment.summary()["counts"].get("RUNNING"), "the trial runs")
    (pid,) = experiment.keeper_pids()
    return psutil.Process(pid)


def test_the_keepers_continue_and_the_fork_server_exits_after_the_manager_is_killed(a_real_experiment):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    keeper = keeper_of(experiment)
    (server,) = fork_servers(experiment.manager.pid)
    assert keeper.parent() == server
    experiment.kill_manager()
    wait_until(
        lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server has ended"
    )
    assert keeper.is_running()
    Path(experiment.code, "go").touch()
    experiment.start()
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert (trial["status"], trial["value"]) == ("SUCCEEDED", keeper.pid)


def guard_of(keeper):
    """Return the guard of a keeper: the only other process with the same environment."""
    environ = processes.environ_of(keeper.pid)
    (pid,) = (pid for pid in processes.pids_where(environ.__eq__) if pid != keeper.pid)
    return psutil.Process(pid)


def has_ended(process):
    return processes.is_dead(process.pid)


def test_the_guard_of_a_killed_keeper_ends_the_trial_even_if_no_manager_or_fork_server_runs(
    a_real_experiment,
):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    keeper = keeper_of(experiment)
    guard = guard_of(keeper)
    (trial,) = keeper.children()
    experiment.kill_manager()
    keeper.kill()
    wait_until(lambda: has_ended(trial), "the trial has ended")
    wait_until(lambda: has_ended(guard), "the guard has ended")


def test_a_suspended_guard_of_a_forked_keeper_ends_with_the_keeper(a_real_experiment):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    guard = guard_of(keeper_of(experiment))
    guard.suspend()
    Path(experiment.code, "go").touch()
    experiment.wait_for_status("DONE")
    wait_until(lambda: has_ended(guard), "the guard has ended")


def test_running_trials_continue_and_new_trials_start_after_the_fork_server_is_killed(a_real_experiment):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=2)
    experiment.start()
    keeper = keeper_of(experiment)
    (server,) = fork_servers(experiment.manager.pid)
    server.kill()
    Path(experiment.code, "go").touch()
    experiment.wait_for_status("DONE")
    first, second = experiment.get("/trials")
    assert [first["status"], second["status"]] == ["SUCCEEDED"] * 2
    assert first["value"] == keeper.pid
    (successor,) = fork_servers(experiment.manager.pid)
    assert successor != server


def test_the_end_of_a_keeper_is_detected_while_the_fork_server_is_suspended(a_real_experiment):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    keeper = keeper_of(experiment)
    (server,) = fork_servers(experiment.manager.pid)
    server.send_signal(signal.SIGSTOP)
    try:
        keeper.kill()
        experiment.wait_for_status("DONE")
    finally:
        server.send_signal(signal.SIGCONT)
    (trial,) = experiment.get("/trials")
    assert trial["status"] == "FAILED"


def test_a_keeper_with_large_settings_starts_as_a_new_process(a_real_experiment):
    names = ["json"] * 1000
    experiment = a_real_experiment(
        WAITS, trialConcurrency=1, maxTrialNum=1, warmImports=names, localConfig={"reuse": True}
    )
    experiment.start()
    assert keeper_of(experiment).ppid() == experiment.manager.pid
    Path(experiment.code, "go").touch()
    experiment.wait_for_status("DONE")
    (trial,) = experiment.get("/trials")
    assert trial["status"] == "SUCCEEDED"
