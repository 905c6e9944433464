"""Who owns an experiment: told across machines, and never by a file that nobody keeps up."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from real_experiment import wait_until

from nni_manager.store.folders import ExperimentFolder, ExperimentTaken, ManagerProcess
from nni_manager.store.ownership import WATCHED_FOR_S, Ownership, owner_elsewhere, owner_in


@pytest.fixture
def folder(tmp_path):
    folder = ExperimentFolder(tmp_path / "EXPTEST1")
    folder.make()
    return folder


def lock_of(folder):
    return folder.path / "owner.lock"


def written_elsewhere(folder, beat, pid=7):
    """As the manager of another machine does, whose lock this one's kernel does not see."""
    owner = {"pid": pid, "host": "node7", "machine": "another start of another machine", "since_s": 1e9}
    lock_of(folder).write_text(json.dumps({"owner": owner, "beat": beat}))


def test_the_lock_file_names_its_owner_and_is_empty_when_that_has_left(folder):
    with folder.owned() as held:
        found = owner_in(lock_of(folder))
        assert found is not None
        assert (found[0].pid, found[0].host) == (os.getpid(), os.uname().nodename)
        assert found[0] == held.owner
    assert owner_in(lock_of(folder)) is None


def test_who_comes_second_is_told_the_owner_and_the_way_out(folder):
    with folder.owned(), pytest.raises(ExperimentTaken) as refused, folder.owned():
        pass
    assert str(refused.value).startswith(
        f"cannot own experiment EXPTEST1: manager process {os.getpid()} on {os.uname().nodename}, since 2"
    )
    assert str(refused.value).endswith("; stop it first with `nnictl stop EXPTEST1`")


OWN_UNTIL_KILLED = """
import pathlib, signal, sys
from nni_manager.store.folders import ExperimentFolder
with ExperimentFolder(pathlib.Path(sys.argv[1])).owned():
    print("owns", flush=True)
    signal.pause()
"""


def test_an_owner_that_was_killed_here_is_none_at_once(folder):
    command = [sys.executable, "-c", OWN_UNTIL_KILLED, folder.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"owns\n"
        owner.kill()
    assert owner_in(lock_of(folder))[0].pid == owner.pid  # it could not clean up
    began_s = time.monotonic()
    with folder.owned() as held:
        assert held.owner.pid == os.getpid()
        assert time.monotonic() - began_s < WATCHED_FOR_S / 2


def test_an_owner_of_another_machine_that_lives_is_not_replaced(folder):
    written_elsewhere(folder, 0)
    stop = threading.Event()

    def count():
        beat = 0
        while not stop.wait(0.05):
            written_elsewhere(folder, beat := beat + 1)

    counting = threading.Thread(target=count)
    counting.start()
    try:
        with pytest.raises(ExperimentTaken) as refused, folder.owned():
            pass
    finally:
        stop.set()
        counting.join()
    assert str(refused.value).startswith("cannot own experiment EXPTEST1: manager process 7 on node7, since ")
    assert "stop it there first with `nnictl stop EXPTEST1`" in str(refused.value)


def test_an_owner_of_another_machine_that_counts_no_more_is_replaced(folder):
    written_elsewhere(folder, 3)
    assert owner_elsewhere(lock_of(folder), watched_for_s=1.0) is None
    assert owner_elsewhere(lock_of(folder), watched_for_s=0.0) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"owner": {}, "beat": 1}', b"\0" * 512])
def test_a_lock_file_that_names_nobody_is_nobodys(folder, content):
    lock_of(folder).write_bytes(content)
    assert owner_elsewhere(lock_of(folder)) is None
    with folder.owned():
        pass


def test_an_owner_that_was_replaced_meanwhile_hears_of_it_and_leaves_the_file_alone(folder):
    lock_of(folder).touch()
    held, heard = Ownership(lock_of(folder), beat_every_s=0.05), threading.Event()
    held.call_when_lost(heard.set)
    wait_until(lambda: owner_in(lock_of(folder))[1] > 0, "it counts")
    # Again, should both have written in the same moment.
    wait_until(lambda: written_elsewhere(folder, 9) or heard.is_set(), "it hears of it")
    held.give_up()
    assert owner_in(lock_of(folder))[0].host == "node7"
    late = threading.Event()
    held.call_when_lost(late.set)
    assert late.is_set()


def test_an_owner_whose_folder_was_deleted_goes_on(folder):
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(folder.owned())
        folder.remove()
    assert not held.is_lost


def test_a_manager_that_is_still_starting_is_not_taken_for_the_one_before_it(folder):
    with folder.owned():
        folder.write_process(ManagerProcess(1, "127.0.0.1", 9000, "0.6.0", "token"))
        assert folder.running_process().port == 9000
    assert folder.process().port == 9000, "who was the last"
    with folder.owned():
        assert folder.running_process() is None


def test_a_view_that_has_ended_leaves_no_note_for_the_next_one(folder):
    with folder.viewed():
        folder.write_view(ManagerProcess(1, "127.0.0.1", 9000, "0.6.0", "token"))
        assert folder.running_view().port == 9000
    note = folder.path / "view-process.json"
    assert not note.exists()
    note.write_bytes(b"of one that was killed")
    with folder.viewed():
        assert folder.running_view() is None
