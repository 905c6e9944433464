"""Links, pipes and devices that another user puts into a workspace folder are not followed and do not block."""

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from attempts import attempt_id

from nni_manager.store.writer import log_path
from trial_keeper.host.attempt_files import Tail
from trial_keeper.host.mount import unpack_code
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.safe_open import UnsafePath, open_beneath
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import AttemptFolder, Workspace

SECRET = b"root:secret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "elsewhere" / "output").mkdir(parents=True)
    (tmp_path / "elsewhere" / "output" / "stdout").write_bytes(SECRET)
    folder = tmp_path / "attempt"
    (folder / "output").mkdir(parents=True)
    (folder / "output" / "stdout").write_bytes(b"mine")
    return folder


def content(folder: Path, path: Path) -> bytes:
    with open(open_beneath(folder, path), "rb") as file:
        return file.read()


def a_link(folder: Path) -> None:
    (folder / "output" / "stdout").unlink()
    (folder / "output" / "stdout").symlink_to(folder.parent / "secret")


def a_folder_that_is_a_link(folder: Path) -> None:
    (folder / "output").rename(folder / "was")
    (folder / "output").symlink_to(folder.parent / "elsewhere" / "output")


def a_pipe(folder: Path) -> None:
    (folder / "output" / "stdout").unlink()
    os.mkfifo(folder / "output" / "stdout")


def a_folder(folder: Path) -> None:
    (folder / "output" / "stdout").unlink()
    (folder / "output" / "stdout").mkdir()


def a_device(folder: Path) -> None:
    (folder / "output" / "stdout").unlink()
    (folder / "output" / "stdout").symlink_to("/dev/zero")


OBSTACLES = [a_link, a_folder_that_is_a_link, a_pipe, a_folder, a_device]


def test_a_link_in_place_of_the_folder_itself_is_followed(folder: Path) -> None:
    link = folder.parent / "mount"
    link.symlink_to(folder)
    assert content(link, link / "output" / "stdout") == b"mine"


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_path_that_is_not_a_regular_file_inside_the_folder_is_refused(folder: Path, obstacle) -> None:
    obstacle(folder)
    with pytest.raises(UnsafePath, match="stdout"):
        content(folder, folder / "output" / "stdout")


@pytest.mark.parametrize("path", ["../secret", "output/../../secret"])
def test_a_path_that_leads_outside_the_folder_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(ValueError, match=r"cannot open|subpath"):
        open_beneath(folder, folder / path)


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_keeper_sends_no_bytes_if_a_stream_file_was_replaced(folder: Path, obstacle) -> None:
    obstacle(folder)
    tail = Tail(AttemptFolder(folder), folder.parent)
    assert tail.sizes((Stream.STDOUT,)) == {Stream.STDOUT: 0}
    assert tail.read(Stream.STDOUT, 0, 100) == b""
    assert tail.last_text(Stream.STDOUT, 100) == ""
    tail.close()


def a_link_at_the_path(temporary: Path) -> None:
    temporary.symlink_to(temporary.parent / "passwd")


def a_pipe_at_the_path(temporary: Path) -> None:
    os.mkfifo(temporary)


def a_readable_file_at_the_path(temporary: Path) -> None:
    temporary.write_bytes(b"left by one that died")
    temporary.chmod(0o644)


def a_hard_link_at_the_path(temporary: Path) -> None:
    os.link(temporary.parent / "passwd", temporary)


@pytest.mark.parametrize(
    "put", [a_link_at_the_path, a_pipe_at_the_path, a_readable_file_at_the_path, a_hard_link_at_the_path]
)
def test_a_link_or_pipe_or_file_at_the_temporary_path_is_replaced_and_never_written_to(
    tmp_path: Path, put
) -> None:
    (tmp_path / "passwd").write_bytes(SECRET)
    temporary = tmp_path / ".exit.json.new"
    put(temporary)
    # If the temporary path is a pipe, a write to the pipe would block without this reader.
    reader = os.open(temporary, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(tmp_path / "exit.json", b"{}", 0o600)
    os.close(reader)
    made = (tmp_path / "exit.json").lstat()
    assert (stat.S_ISREG(made.st_mode), stat.S_IMODE(made.st_mode)) == (True, 0o600)
    assert (tmp_path / "exit.json").read_bytes() == b"{}"
    assert (tmp_path / "passwd").read_bytes() == SECRET
    assert not temporary.exists()


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", ".hidden", "a\0b", "a\nb", "x" * 241])
def test_a_name_that_would_lead_outside_its_folder_is_refused(name: str) -> None:
    workspace = Workspace(Path("/mnt/exp"))
    for make in (
        lambda: workspace.trial(name),
        lambda: workspace.file(name),
        lambda: workspace.warm_marker(name),
        lambda: workspace.attempt(AttemptKey("abcde", attempt_id(0), name)),
        lambda: log_path(Path("/logs"), AttemptKey(name, attempt_id(0), "main-0"), Stream.STDOUT),
        lambda: log_path(Path("/logs"), AttemptKey("abcde", attempt_id(0), name), Stream.STDOUT),
    ):
        with pytest.raises(ValueError, match="cannot use"):
            make()


def test_an_unpacked_file_has_no_setuid_bit_and_belongs_to_the_current_user(tmp_path: Path) -> None:
    snapshot = tmp_path / "code-0.tar.gz"
    with tarfile.open(snapshot, "w:gz") as archive:
        member = tarfile.TarInfo("tool")
        member.mode, member.uid, member.gid = 0o6777, 12345, 12345
        archive.addfile(member, io.BytesIO())
    unpack_code(snapshot, tmp_path / "code")
    status = (tmp_path / "code" / "tool").stat()
    assert stat.S_IMODE(status.st_mode) == 0o755
    assert (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())
