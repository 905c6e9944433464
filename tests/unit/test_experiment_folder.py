"""The folder of an experiment: its lock and the link to its workspace."""

import fcntl
from contextlib import suppress

import pytest

from nni_manager.store import owner_lock
from nni_manager.store.folders import ExperimentFolder, FolderUnreadable
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


def test_a_lock_is_owned_only_while_a_process_holds_it(tmp_path):
    lock = OwnerLock(tmp_path / "owner.lock")
    assert not lock.is_owned()
    with lock.owned():
        assert lock.is_owned()
        with suppress(BlockingIOError), lock.owned():
            pytest.fail("the lock has two owners")
    assert not lock.is_owned()


@pytest.mark.parametrize("is_replaced", [False, True], ids=["removed", "replaced"])
def test_a_lock_file_that_is_removed_while_a_process_waits_for_it_is_not_owned(
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
