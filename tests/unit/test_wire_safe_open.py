"""Workspace files are read with a size limit. A file that another user has replaced neither blocks nor misleads the reader."""

import errno
import fcntl
import os
import signal
import socket
import stat
import sys
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from real_experiment import wait_until
from strangers import NOBODY

from trial_keeper.wire.safe_open import (
    OthersMayWrite,
    UnsafePath,
    open_beneath,
    open_to_append,
    other_writers,
    read_beneath,
    read_named,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
LIMIT = 4096
CONTENT = b'{"attempt_id": "A"}'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with the modes of a cluster storage: all users may enter it, and create attempts."""
    root = tmp_path / "EXPT"
    for folder in (root, root / "attempts", root / "attempts" / "A", root / "attempts" / "A" / ".nni"):
        folder.mkdir()
        folder.chmod(0o755)
    (root / "attempts").chmod(0o1777)
    file_in(root).write_bytes(CONTENT)
    file_in(root).chmod(0o644)
    return root


def file_in(root: Path) -> Path:
    return root / "attempts" / "A" / ".nni" / "metrics"


def read(root: Path, limit: int = LIMIT) -> bytes:
    return read_beneath(root, file_in(root), limit, owned_as=root / "attempts" / "A").data


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link_to_a_file(path: Path) -> None:
    (path.parent / "other").write_bytes(CONTENT)
    path.symlink_to("other")


def a_link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_dead_link(path: Path) -> None:
    path.symlink_to("nowhere")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        bind(made, path)


def bind(listener: socket.socket, path: Path) -> None:
    """Bind a Unix socket. The kernel limits the path in this call to 107 bytes, so it starts with a descriptor of the folder."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def a_sparse_file(path: Path) -> None:
    path.touch(0o644)
    os.truncate(path, 4 << 30)


def a_file_above_the_limit(path: Path) -> None:
    path.write_bytes(bytes(LIMIT + 1))


TRAPS = [
    a_pipe,
    a_folder,
    a_link_to_a_file,
    a_link_to_zeros,
    a_dead_link,
    a_socket,
    a_sparse_file,
    a_file_above_the_limit,
]


@pytest.mark.parametrize("trap", TRAPS)
def test_the_error_for_a_special_or_large_file_contains_its_path(root, trap: Callable[[Path], None]) -> None:
    file_in(root).unlink()
    trap(file_in(root))
    with pytest.raises(UnsafePath) as caught:
        read(root)
    assert caught.value.filename == str(file_in(root))


def test_a_path_that_contains_a_symbolic_link_to_a_folder_is_refused(root) -> None:
    file_in(root).parent.rename(root / "elsewhere")
    file_in(root).parent.symlink_to(root / "elsewhere")
    with pytest.raises(UnsafePath, match="contains a link"):
        read(root)


def test_a_file_is_refused_without_waiting_if_its_owner_holds_a_kernel_lease_on_it(root, monkeypatch) -> None:
    """Without O_NONBLOCK, `open` waits until the lease ends: 45 s, and longer if the owner takes a new lease."""
    previous = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with file_in(root).open("r+b") as leased:
        try:
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"this file system has no leases: {error.strerror}")
        with pytest.raises(UnsafePath, match="blocks reading it with a lease"):
            read(root)
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    signal.signal(signal.SIGIO, previous)
    assert read(root) == CONTENT


@as_root
def test_a_file_is_refused_if_its_owner_differs_from_the_owner_of_its_attempt(root) -> None:
    os.chown(file_in(root), NOBODY, NOBODY)
    with pytest.raises(UnsafePath, match=f"its owner is user {NOBODY}, but its attempt's is user 0"):
        read(root)
    for path in (root / "attempts" / "A", file_in(root).parent):
        os.chown(path, NOBODY, NOBODY)
    assert read(root) == CONTENT, "the whole attempt is another user's, as in a container"


@as_root
def test_a_folder_of_another_user_inside_an_attempt_does_not_change_the_owner_of_the_attempt(root) -> None:
    for path in (file_in(root).parent, file_in(root)):
        os.chown(path, NOBODY, NOBODY)
    with pytest.raises(UnsafePath, match=f"its owner is user {NOBODY}, but its attempt's is user 0"):
        read(root)


@pytest.mark.parametrize(
    ("mode", "writers"), [(0o664, "its group"), (0o646, "all users"), (0o666, "all users")]
)
def test_a_file_that_is_writable_by_other_users_is_refused_with_a_remedy(
    root, mode: int, writers: str
) -> None:
    file_in(root).chmod(mode)
    with pytest.raises(OthersMayWrite) as caught:
        read(root)
    assert caught.value.strerror == (
        f"{writers} can write to this file (mode {mode:04o}); run `chmod go-w` on it"
    )


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o440, 0o755])
def test_a_file_that_other_users_can_only_read_is_accepted(root, mode: int) -> None:
    file_in(root).chmod(mode)
    assert read(root) == CONTENT


@pytest.mark.parametrize("folder", ["attempts/A/.nni", "attempts/A"])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_folder_is_refused_if_other_users_can_replace_the_file_in_it(root, folder: str, mode: int) -> None:
    (root / folder).chmod(mode)
    with pytest.raises(OthersMayWrite, match=r"can write to this folder .*chmod go-w"):
        read(root)
    (root / folder).chmod(mode | stat.S_ISVTX)
    assert read(root) == CONTENT, "in a sticky folder they cannot"


def test_a_log_is_read_even_if_a_trial_has_made_it_world_writable(root) -> None:
    file_in(root).chmod(0o666)
    file_in(root).parent.chmod(0o777)
    log = open_beneath(root, file_in(root), owned_as=root / "attempts" / "A", may_be_shared=True)
    assert os.read(log, LIMIT) == CONTENT
    os.close(log)


@pytest.mark.parametrize("mode", [0o777, 0o2775, 0o700])
def test_file_modes_are_ignored_if_the_workspace_root_is_world_writable_or_private(root, mode: int) -> None:
    """Such workspace roots are, for example, a CIFS mount, a volume after kubelet has applied an fsGroup, and the folder of a
    local experiment.
    """
    root.chmod(mode)
    file_in(root).chmod(0o664)
    assert read(root) == CONTENT


@given(
    file=st.integers(0, 0o777),
    root=st.integers(0, 0o1777),
    is_folder=st.booleans(),
    is_sticky=st.booleans(),
    groups=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
def test_write_access_to_a_file_is_ignored_for_users_who_can_also_replace_the_workspace_root(
    file: int, root: int, is_folder: bool, is_sticky: bool, groups: tuple[int, int]
) -> None:
    kind = (stat.S_IFDIR if is_folder else stat.S_IFREG) | (stat.S_ISVTX if is_sticky else 0)
    found = other_writers(a_status(kind | file, groups[0]), a_status(stat.S_IFDIR | root, groups[1]))
    can_enter = bool(root & 0o011) and not (is_folder and is_sticky)
    replaces = 0 if root & stat.S_ISVTX else root
    by_group = bool(file & 0o020) and not (replaces & 0o002 or (replaces & 0o020 and groups[0] == groups[1]))
    by_all = bool(file & 0o002) and not replaces & 0o002
    assert found in ("", "its group", "all users")
    assert bool(found) == (can_enter and (by_group or by_all))
    assert (found == "all users") == (can_enter and by_all)


def a_status(mode: int, gid: int) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, 0, gid, 0, 0, 0, 0))


@given(size=st.integers(0, 3 * LIMIT), limit=st.integers(0, 3 * LIMIT))
@example(size=LIMIT, limit=LIMIT)
@example(size=LIMIT + 1, limit=LIMIT)
def test_a_file_is_read_completely_or_refused_because_of_its_size(
    tmp_path_factory, size: int, limit: int
) -> None:
    folder = tmp_path_factory.mktemp("read")
    content = bytes(each % 251 for each in range(size))
    (folder / "file").write_bytes(content)
    if size <= limit:
        read = read_beneath(folder, folder / "file", limit)
        assert (read.data, read.uid) == (content, os.geteuid())
    else:
        with pytest.raises(UnsafePath, match=f"it has {size} bytes, more than the limit of {limit}"):
            read_beneath(folder, folder / "file", limit)


def test_a_file_that_grows_while_it_is_read_is_refused_at_the_size_limit(root, monkeypatch) -> None:
    read_some = os.read

    def read_and_grow(descriptor: int, most_bytes: int) -> bytes:
        with file_in(root).open("ab") as file:
            file.write(bytes(LIMIT))
        return read_some(descriptor, most_bytes)

    monkeypatch.setattr(os, "read", read_and_grow)
    with pytest.raises(UnsafePath, match=f"more than the limit of {3 * LIMIT}"):
        read(root, 3 * LIMIT)
    assert file_in(root).stat().st_size < 9 * LIMIT


def test_the_error_for_a_file_that_cannot_be_read_contains_its_path(root, monkeypatch) -> None:
    def fails(descriptor: int, most_bytes: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = len(os.listdir("/proc/self/fd"))
    assert read(root) == CONTENT
    monkeypatch.setattr(os, "read", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        read(root)
    assert caught.value.filename == str(file_in(root))
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_error_for_a_missing_file_contains_its_full_path(root) -> None:
    file_in(root).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        read(root)
    assert caught.value.filename == str(file_in(root))


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027])
def test_a_new_file_is_writable_only_by_its_owner_under_any_umask(root, umask: int) -> None:
    before = os.umask(umask)
    try:
        descriptor = open_to_append(root, root / "log")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o644 & ~umask
    assert os.get_blocking(descriptor), "a command that inherits it expects that"
    os.close(descriptor)


def test_refusing_a_file_leaves_no_descriptor_open(root) -> None:
    file_in(root).chmod(0o666)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(OthersMayWrite):
            read(root)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_error_for_a_file_above_the_size_limit_has_the_errno_efbig(root) -> None:
    file_in(root).write_bytes(bytes(LIMIT + 1))
    with pytest.raises(UnsafePath) as caught:
        read(root)
    assert caught.value.errno == errno.EFBIG


# ---- files named by a user


def test_a_file_named_by_a_user_may_be_a_link_but_may_not_exceed_the_size_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    (tmp_path / "link").symlink_to("file")
    assert read_named(tmp_path / "link", len(CONTENT)) == CONTENT
    with pytest.raises(UnsafePath, match="more than the limit of 18") as refused:
        read_named(tmp_path / "link", len(CONTENT) - 1)
    assert refused.value.errno == errno.EFBIG


def test_a_named_pipe_socket_or_device_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero")):
        with pytest.raises(UnsafePath, match="it is not a regular file"):
            read_named(path, LIMIT)
    with socket.socket(socket.AF_UNIX) as listener:
        bind(listener, tmp_path / "socket")
        with pytest.raises(OSError, match="No such device or address"):
            read_named(tmp_path / "socket", LIMIT)
    with pytest.raises(IsADirectoryError):
        read_named(tmp_path, LIMIT)


def test_the_pipe_of_a_shell_is_read_to_its_end(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb", buffering=0) as written, ThreadPoolExecutor() as pool:
        written.write(CONTENT)
        content = pool.submit(read_named, Path(f"/dev/fd/{reader}"), LIMIT)
        wait_until(lambda: content.done() or _queued_bytes(reader) == 0, "the first part is read")
        written.write(CONTENT)
        written.close()
        assert content.result() == 2 * CONTENT


def _queued_bytes(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
