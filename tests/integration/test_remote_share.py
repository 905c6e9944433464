"""The files of an experiment on its machines, which are real SSH servers."""

import asyncio
import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from deadlines import DEADLINE_S
from real_experiment import wait_until
from ssh_machines import ssh_machines_here

from nni_manager.training_services.remote.pool import MachinePool, RemoteShare
from nni_manager.training_services.remote.render import key_of
from nni_manager.training_services.remote.section import RemoteMachine
from nni_manager.training_services.share import StorageUnavailable
from trial_keeper.wire.workspace import Workspace


@pytest.fixture
def site(tmp_path, monkeypatch):
    with ssh_machines_here(tmp_path / "site", "one", "two") as site:
        for name, value in site.variables.items():
            monkeypatch.setenv(name, value)
        yield site


@pytest.fixture
def pool(site, tmp_path):
    workspace = Workspace(tmp_path / "EXPT")
    workspace.trial("trial1").path.mkdir(parents=True)
    pool = MachinePool([RemoteMachine("127.0.0.1", each.port) for each in site.machines.values()], workspace)
    wait_until(lambda: all(each.is_up for each in pool.clients.values()), "the machines answer")
    yield pool
    pool.close()


def key(site, name):
    return key_of(RemoteMachine("127.0.0.1", site.machines[name].port))


def has(site, name, path):
    """True if the experiment's folder on the machine `name` contains the file."""
    return stored(site, name, path).exists()


def stored(site, name, path):
    """The file in the experiment's folder on the machine `name`."""
    return site.machines[name].home / ".cache/trial-keeper" / key(site, name) / "EXPT" / path


def test_files_reach_the_new_machine_of_a_trial_even_if_its_previous_machine_is_unreachable(site, pool):
    path = pool.workspace.trial("trial1").trial_json
    path.write_text("{}")
    name = path.relative_to(pool.workspace.root)
    pool.note_trial("trial1", key(site, "one"))
    site.machines["one"].stop()
    wait_until(lambda: not pool.clients[key(site, "one")].is_up, "the first machine is away")
    share = RemoteShare(pool)
    with pytest.raises(StorageUnavailable):
        share.send(path)
    pool.note_trial("trial1", key(site, "two"))
    share.send(path)
    assert has(site, "two", name)
    site.machines["one"].start()
    wait_until(lambda: has(site, "one", name), "the earlier machine gets the file as well")


def _opened_for_writing(pipe):
    """A descriptor of a named pipe, or None while no process reads from the pipe."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def test_a_storage_error_is_raised_if_the_connection_is_lost_while_a_file_is_sent(site, pool):
    path = pool.workspace.trial("trial1").trial_json
    os.mkfifo(path)  # a read from this named pipe lasts until the test closes its writing end
    pool.note_trial("trial1", key(site, "one"))
    with ThreadPoolExecutor(1) as other_thread:
        sent = other_thread.submit(RemoteShare(pool).send, path)
        descriptor = wait_until(lambda: _opened_for_writing(path), "the client reads the file")
        site.machines["one"].stop()
        wait_until(lambda: pool.clients[key(site, "one")].problem, "the machine is away")
        os.write(descriptor, b"{}")
        os.close(descriptor)
        with pytest.raises(StorageUnavailable, match=r"cannot reach .*127\.0\.0\.1"):
            sent.result()


def _start_to_send(path, pool, site):
    """Queue a named pipe as a file for the first machine while this machine is unreachable. Return the client and the writing end
    of the pipe when the new connection reads from the pipe.
    """
    client = pool.clients[key(site, "one")]
    site.machines["one"].stop()
    wait_until(lambda: client.problem, "the machine is away")
    os.mkfifo(path)
    pool.thread.run(client.send_later(path))
    site.machines["one"].start()
    return client, wait_until(lambda: _opened_for_writing(path), "the client reads the file")


def test_a_reconnected_machine_is_not_used_before_it_has_received_the_queued_files(site, pool):
    path = pool.workspace.run_sh
    client, descriptor = _start_to_send(path, pool, site)
    assert not client.is_up
    os.write(descriptor, b"exit 0")
    os.close(descriptor)
    wait_until(lambda: client.is_up, "the machine is used")
    assert has(site, "one", path.name)


def test_a_machine_receives_the_newest_content_of_a_file_that_changes_during_its_transfer(site, pool):
    path = pool.workspace.run_sh
    client, descriptor = _start_to_send(path, pool, site)
    path.unlink()
    path.write_text("new")
    pool.thread.run(client.send_later(path))
    os.write(descriptor, b"old")
    os.close(descriptor)
    wait_until(lambda: client.is_up, "the machine is used")
    assert stored(site, "one", path.name).read_text() == "new"


def test_a_machine_is_used_even_if_a_file_in_its_send_queue_was_removed(site, pool):
    path = pool.workspace.root / "removed"
    client = pool.clients[key(site, "one")]
    site.machines["one"].stop()
    wait_until(lambda: client.problem, "the machine is away")
    pool.thread.run(client.send_later(path))
    site.machines["one"].start()
    wait_until(lambda: client.is_up, "the machine is used")


def test_a_file_is_sent_even_while_the_job_lookup_of_a_new_connection_hangs(site, tmp_path):
    workspace, looks = Workspace(tmp_path / "EXPT"), threading.Event()
    workspace.root.mkdir()

    async def look_for_ever(client):
        looks.set()
        await asyncio.Event().wait()

    machine = site.machines["one"]
    machine.stop()
    pool = MachinePool([RemoteMachine("127.0.0.1", machine.port)], workspace, on_up=look_for_ever)
    with contextlib.closing(pool):
        client = pool.clients[key(site, "one")]
        wait_until(lambda: client.problem, "the machine is away")
        machine.start()
        assert looks.wait(DEADLINE_S)
        workspace.run_sh.write_text("exit 0")
        RemoteShare(pool).send(workspace.run_sh)
        assert has(site, "one", workspace.run_sh.name)
