"""Small files are written completely, and their descriptors are closed even on errors."""

import errno
import os

import pytest

from trial_keeper.wire.small_files import read_all, write_all


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
