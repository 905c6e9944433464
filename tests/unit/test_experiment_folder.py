"""The folder of an experiment: its files, its locks and processes, and the link to its workspace."""

import fcntl
import os
from contextlib import suppress

import pytest

from nni_manager.store import owner_lock
from nni_manager.store.folders import (
    ExperimentExists,
    ExperimentFolder,
    ExperimentLocked,
    FolderUnreadable,
    ManagerProcess,
    WorkspaceUnusable,
)
from nni_manager.store.owner_lock import OwnerLock


@pytest.fixture
def storage(tmp_path):
    path = tmp_path / "storage"
    path.mkdir()
    return path


@pytest.fixture
def folder(tmp_path, storage):
    folder = ExperimentFolder(tmp_path / "EXPTEST1")
    folder.make(storage)
    return folder


def test_the_link_to_a_workspace_is_restored_if_it_is_missing_and_kept_if_it_exists(folder, storage):
    link = folder.path / "workspace"
    for prepare in (link.unlink, lambda: None):
        prepare()
        folder.restore_link(storage)
        assert link.readlink() == storage / "EXPTEST1"
        assert folder.workspace.root == storage / "EXPTEST1"


def test_a_folder_in_place_of_the_link_to_a_workspace_is_refused_and_kept(folder, storage):
    link = folder.path / "workspace"
    link.unlink()
    link.mkdir()
    with pytest.raises(FolderUnreadable, match=r"it is not the link to .*/storage/EXPTEST1; move it away"):
        folder.restore_link(storage)
    assert link.is_dir()
    assert not link.is_symlink()


def test_a_manager_whose_process_file_cannot_be_read_is_not_regarded_as_absent(folder):
    record = folder.path / "manager-process.json"
    with folder.owned():
        record.mkdir()
        with pytest.raises(
            FolderUnreadable, match=r"cannot read .*/manager-process\.json: Is a directory; give"
        ):
            folder.running_process()
        record.rmdir()
        assert folder.running_process() is None


@pytest.mark.slow
def test_a_lock_is_owned_only_while_a_process_holds_it(tmp_path):
    lock = OwnerLock(tmp_path / "owner.lock")
    assert not lock.is_owned()
    with lock.owned():
        assert lock.is_owned()
        with suppress(BlockingIOError), lock.owned():
            pytest.fail("the lock has two owners")
    assert not lock.is_owned()


@pytest.mark.parametrize("is_replaced", [False, True], ids=["removed", "replaced"])
def test_a_process_does_not_acquire_a_lock_whose_file_is_removed_while_the_process_waits(
    tmp_path, monkeypatch, is_replaced
):
    path, lock = tmp_path / "owner.lock", fcntl.flock

    def removed_before(descriptor, operation):
        path.unlink()
        if is_replaced:
            path.touch()
        lock(descriptor, operation)

    monkeypatch.setattr(owner_lock.fcntl, "flock", removed_before)
    with (
        pytest.raises(BlockingIOError, match="another process has just replaced the lock file"),
        OwnerLock(path).owned(),
    ):
        pytest.fail("the lock of a removed file protects nothing")


# ---- files


@pytest.mark.parametrize(
    "name",
    [
        "db/experiment.sqlite",
        "db/experiment.sqlite-wal",
        "owner.lock",
        "view.lock",
        "manager-process.json",
        "view-process.json",
        "leftover-jobs.json",
    ],
)
def test_a_pipe_in_place_of_a_file_that_every_command_opens_is_refused(folder, name):
    (folder.path / "db" / "experiment.sqlite").touch()
    folder.check_files()
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    for check in (folder.check_files, folder.check_files_of_manager):
        with pytest.raises(FolderUnreadable, match=rf"{name}: it is a pipe, not a file; "):
            check()


@pytest.mark.parametrize(
    "name",
    [
        "log/nnimanager.log",
        "log/nnictl_stdout.log",
        "log/nnictl_stderr.log",
        "log/notifications.log",
        "ended-sessions.json",
        "tls.pem",
        "jobs/job1.json",
        "workspace/manager.json",
        "workspace/run.sh",
        "workspace/code-0a1b.tar.gz",
    ],
)
def test_a_pipe_in_place_of_a_file_of_the_manager_is_refused(folder, name):
    folder.check_files_of_manager()
    os.mkfifo(folder.path / name)
    folder.check_files()
    name = name.removeprefix("workspace/")
    remedy = "move it away, and the manager creates a new one"
    with pytest.raises(FolderUnreadable, match=rf"{name}: it is a pipe, not a file; {remedy}"):
        folder.check_files_of_manager()


def test_a_file_in_place_of_the_folder_of_trials_is_refused(folder):
    folder.workspace.trials.rmdir()
    folder.workspace.trials.touch()
    with pytest.raises(FolderUnreadable, match="it is not a folder; move it away"):
        folder.check_files_of_manager()


def test_a_new_experiment_folder_and_its_workspace_are_closed_to_other_users(folder, storage):
    modes = [path.stat().st_mode & 0o777 for path in (folder.path, storage / "EXPTEST1")]
    assert modes == [0o700, 0o700]
    assert (storage / "EXPTEST1" / "trials").stat().st_mode & 0o777 == 0o755
    with pytest.raises(ExperimentExists, match="EXPTEST1 has this id; choose another id, or resume it"):
        folder.make(storage)


def test_a_removed_experiment_leaves_neither_its_folder_nor_its_workspace(folder, storage):
    folder.remove()
    assert not folder.path.exists()
    assert [*storage.iterdir()] == []


def test_a_lost_folder_of_trials_is_created_again_and_reported_as_lost(folder, storage):
    trials = storage / "EXPTEST1" / "trials"
    assert folder.open_workspace(is_private=True, reuses_jobs=False) is False
    trials.rmdir()
    assert folder.open_workspace(is_private=True, reuses_jobs=False) is True
    assert trials.is_dir()


def test_a_workspace_that_is_missing_or_has_a_file_in_place_of_its_trials_folder_is_refused(folder, storage):
    trials = storage / "EXPTEST1" / "trials"
    trials.rmdir()
    trials.touch()
    with pytest.raises(WorkspaceUnusable, match="trials: it is not a folder; move it away"):
        folder.open_workspace(is_private=True, reuses_jobs=False)
    trials.unlink()
    (storage / "EXPTEST1").rmdir()
    with pytest.raises(WorkspaceUnusable, match=r"cannot find workspace .*/EXPTEST1; mount its storage"):
        folder.open_workspace(is_private=True, reuses_jobs=False)
    assert not (storage / "EXPTEST1").exists()


# ---- processes

PROCESS = ManagerProcess(7, "127.0.0.1", 8080, "0.7.0", "token", url_prefix="/lab")


@pytest.mark.parametrize("is_brief", [False, True])
def test_a_command_restores_the_process_file_of_the_last_manager_but_a_new_manager_does_not(folder, is_brief):
    folder.write_process(PROCESS)
    assert folder.token_file(is_view=False).stat().st_mode & 0o777 == 0o600
    with folder.owned(is_brief=is_brief):
        assert folder.process() is None
    assert folder.process() == (PROCESS if is_brief else None)


@pytest.mark.slow
def test_an_experiment_has_one_view_at_a_time_and_the_view_removes_its_process_file_when_it_ends(folder):
    with folder.viewed():
        assert folder.running_view() is None
        folder.write_process(PROCESS, is_view=True)
        assert (folder.running_view(), folder.running_process(), folder.process()) == (PROCESS, None, None)
        with pytest.raises(ExperimentLocked, match="cannot view experiment EXPTEST1"), folder.viewed():
            pytest.fail("the experiment has two views")
        assert folder.running_view() == PROCESS
        with folder.owned():
            pass
    assert not folder.token_file(is_view=True).exists()
    assert folder.running_view() is None


def test_the_process_file_that_a_manager_holds_open_is_found_after_the_folder_was_deleted(folder):
    folder.write_process(PROCESS)
    assert folder.held_process(os.getpid()) is None
    descriptor = folder.open_process_file()
    assert folder.held_process(os.getpid()) == PROCESS
    folder.remove()
    assert folder.held_process(os.getpid()) == PROCESS
    os.close(descriptor)
    assert folder.held_process(os.getpid()) is None
