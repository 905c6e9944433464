"""Small files are written completely, atomically and durably, and their descriptors are closed even on errors."""

import errno
import os

import pytest

from trial_keeper.wire.small_files import read_all, replace_file, write_all


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_a_written_file_is_read_back_unchanged(tmp_path, size, is_durable):
    path, content = tmp_path / "small", bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    write_all(descriptor, content, is_durable=is_durable)
    assert read_all(path) == content
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_full_disk_leaves_no_open_descriptor():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_all(descriptor, b"more")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def disk_writes(monkeypatch):
    """The calls that write to the disk and that rename a file, in their order, each with the file's path at that time."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        calls.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(old, new):
        calls.append(("rename", str(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return calls


def test_a_durable_file_is_synced_before_its_rename_and_its_folder_is_synced_after_the_rename(
    tmp_path, disk_writes
):
    path, before = tmp_path / "state.json", open_files()
    replace_file(path, b"new", is_durable=True)
    assert path.read_bytes() == b"new"
    expected = [("sync", str(tmp_path / ".state.json.new")), ("rename", str(path)), ("sync", str(tmp_path))]
    assert disk_writes == expected
    assert open_files() == before


def test_a_durable_file_can_be_written_to_the_current_folder(tmp_path, disk_writes, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replace_file("state.json", b"new", is_durable=True)
    assert disk_writes[-1] == ("sync", str(tmp_path))


def test_a_file_that_need_not_survive_a_power_cut_is_not_synced(tmp_path, disk_writes):
    path = tmp_path / "state.json"
    replace_file(path, b"new")
    assert disk_writes == [("rename", str(path))]
    write_all(os.open(path, os.O_WRONLY), b"newer")
    assert disk_writes == [("rename", str(path))]
    write_all(os.open(path, os.O_WRONLY), b"newest", is_durable=True)
    assert disk_writes == [("rename", str(path)), ("sync", str(path))]


def test_all_users_may_read_a_replaced_file_unless_the_caller_sets_another_mode(tmp_path):
    for arguments, mode in (((), 0o644), ((0o600,), 0o600)):
        path = tmp_path / f"{mode:o}"
        replace_file(path, b"new", *arguments)
        assert path.stat().st_mode & 0o777 == mode


def make_link(path):
    target = path.with_name("target")
    target.write_bytes(b"of another program")
    path.symlink_to(target)


@pytest.mark.parametrize(
    "make", [lambda path: path.write_bytes(b"half a fi"), os.mkfifo, make_link], ids=["file", "pipe", "link"]
)
def test_a_file_or_pipe_or_link_at_the_temporary_path_is_removed_and_not_written_to(tmp_path, make):
    path = tmp_path / "state.json"
    make(tmp_path / ".state.json.new")
    replace_file(path, b"new")
    assert not path.is_symlink()
    assert path.read_bytes() == b"new"
    assert {each.name for each in tmp_path.iterdir()} <= {"state.json", "target"}
    assert all(each.read_bytes() == b"of another program" for each in tmp_path.glob("target"))
