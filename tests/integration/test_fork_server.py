"""The fork server of keepers on the manager's machine."""

import asyncio
import contextlib
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from deadlines import DEADLINE_S
from real_experiment import wait_until

from nni_manager.training_services.local.fork_server import KeeperForkServer
from nni_manager.training_services.platform import platform_of
from trial_keeper import processes
from trial_keeper.exit_codes import KeeperExit
from trial_keeper.wire.fork_requests import FORK_SERVER

# The first trial waits for the file `go`; each reports its parent, which is its keeper.
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
    """An environment with which a keeper ends at once, with a message."""
    return os.environ | {"TRIAL_KEEPER_JOB_ID": "JOB1"} | more


async def forked(server, tmp_path, environ):
    """The pid of a keeper, the future of its exit code, and whether it was forked."""
    watched = []
    with (tmp_path / "log").open("ab") as log:
        is_forked = await server.start(environ, log.fileno(), lambda *found: watched.append(found))
    return (*watched[0], True) if is_forked else (None, None, False)


def fork_servers(of):
    """The fork servers of a manager."""
    found = []
    for each in psutil.Process(of).children():
        with contextlib.suppress(psutil.ZombieProcess):  # of another test
            found += [each] if FORK_SERVER in each.cmdline() else []
    return found


async def test_the_exit_code_and_the_output_of_a_fork_are_those_of_a_keeper(tmp_path):
    with a_server(tmp_path) as server:
        _, exit_code, _ = await forked(server, tmp_path, incomplete_settings())
        assert await asyncio.wait_for(exit_code, DEADLINE_S) == KeeperExit.SETTINGS
    assert "cannot read the keeper's settings" in (tmp_path / "log").read_text()


async def test_the_server_starts_with_the_training_service_before_any_job(a_real_experiment):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=1)
    service = platform_of(experiment.config).make_service(experiment.folder)(lambda _: None)
    try:
        assert len(fork_servers(os.getpid())) == 1
    finally:
        await service.close()
    assert fork_servers(os.getpid()) == []


async def test_a_server_that_was_opened_before_forks_the_keepers(tmp_path):
    with a_server(tmp_path) as server:
        server.open()
        (opened,) = fork_servers(os.getpid())
        _, exit_code, _ = await forked(server, tmp_path, incomplete_settings())
        assert fork_servers(os.getpid()) == [opened]
        assert await asyncio.wait_for(exit_code, DEADLINE_S) == KeeperExit.SETTINGS


async def test_proc_shows_the_environment_and_the_command_of_a_fork(tmp_path):
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


async def test_a_fork_that_the_manager_does_not_watch_ends_before_it_runs(tmp_path):
    pids = []

    def fail(pid, exit_code):
        pids.append(pid)
        raise ProcessLookupError(0, "as if it was killed")

    with a_server(tmp_path) as server, (tmp_path / "log").open("ab") as log:
        with pytest.raises(ProcessLookupError):
            await server.start(incomplete_settings(), log.fileno(), fail)
        wait_until(lambda: processes.is_dead(pids[0]), "the fork has ended")
        assert (tmp_path / "log").read_text() == ""
        # The next request gets the next answer.
        pid, exit_code, _ = await forked(server, tmp_path, incomplete_settings())
        assert pid != pids[0]
        assert await asyncio.wait_for(exit_code, DEADLINE_S) == KeeperExit.SETTINGS


async def test_an_environment_that_does_not_fit_is_refused(tmp_path):
    with a_server(tmp_path) as server:
        for size in (10_000, 200_000):
            assert await forked(server, tmp_path, incomplete_settings(LARGE="x" * size)) == (
                None,
                None,
                False,
            )
        assert (await forked(server, tmp_path, incomplete_settings()))[2]


async def test_a_killed_server_fails_one_start_and_hides_no_end(tmp_path):
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
async def test_a_server_that_cannot_fork_safely_refuses(tmp_path, monkeypatch, site):
    (tmp_path / "sitecustomize.py").write_text(site)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with a_server(tmp_path) as server:
        assert not (await forked(server, tmp_path, incomplete_settings()))[2]


# ---- in an experiment


def keeper_of(experiment):
    """The keeper of the only trial, which runs."""
    wait_until(lambda: experiment.summary()["counts"].get("RUNNING"), "the trial runs")
    (pid,) = experiment.keeper_pids()
    return psutil.Process(pid)


def test_keepers_outlive_the_manager_and_the_server_does_not(a_real_experiment):
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
    """The process that has the keeper's environment and is not the keeper."""
    environ = processes.environ_of(keeper.pid)
    (pid,) = (pid for pid in processes.pids_where(environ.__eq__) if pid != keeper.pid)
    return psutil.Process(pid)


def has_ended(process):
    return processes.is_dead(process.pid)


def test_the_guard_of_a_forked_keeper_ends_its_trial_without_manager_and_server(a_real_experiment):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    keeper = keeper_of(experiment)
    guard = guard_of(keeper)
    (trial,) = keeper.children()
    experiment.kill_manager()
    keeper.kill()
    wait_until(lambda: has_ended(trial), "the trial has ended")
    wait_until(lambda: has_ended(guard), "the guard has ended")


def test_a_suspended_guard_of_a_forked_keeper_ends_with_it(a_real_experiment):
    experiment = a_real_experiment(WAITS, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    guard = guard_of(keeper_of(experiment))
    guard.suspend()
    Path(experiment.code, "go").touch()
    experiment.wait_for_status("DONE")
    wait_until(lambda: has_ended(guard), "the guard has ended")


def test_trials_continue_when_the_server_is_killed_and_the_next_ones_start(a_real_experiment):
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


def test_a_frozen_server_hides_no_end(a_real_experiment):
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
