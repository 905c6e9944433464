"""The training code as one archive in the workspace."""

import contextlib
import errno
import io
import os
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import types

import pytest
from another_user import as_another_user
from deadlines import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.config import code_folder
from nni_manager.config.code_folder import CodeUnusable
from nni_manager.engine import code_snapshot
from nni_manager.engine.code_snapshot import SnapshotNotWritten, take_snapshot
from nni_manager.engine.code_version import code_version
from trial_keeper.errors import MountUnreadable
from trial_keeper.host import mount
from trial_keeper.host.mount import unpack_code
from trial_keeper.wire.workspace import Workspace


class Place:
    """A code folder, a workspace, and the folders into which a keeper unpacks snapshots."""

    def __init__(self, folder):
        self.code, self.workspace = folder / "code", Workspace(folder / "EXPT")
        self.code.mkdir(parents=True)
        self.workspace.root.mkdir()
        self._folder = folder
        self._unpacked = 0

    def write(self, **files):
        for name, content in files.items():
            path = self.code / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    def take(self):
        return take_snapshot(self.code, self.workspace)

    def unpack(self):
        self._unpacked += 1
        folder = self._folder / f"unpacked{self._unpacked}"
        unpack_code(self.workspace.file(self.take().name), folder)
        return folder

    def snapshots(self):
        return sorted(path.name for path in self.workspace.root.iterdir())


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def tree(folder):
    """All entries below a folder: names, kinds, permissions and contents, as bytes."""
    found = {}
    root = os.fsencode(folder)
    for parent, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            relative = os.path.relpath(path, root)
            if os.path.islink(path):
                found[relative] = os.readlink(path)
            elif os.path.isdir(path):
                found[relative] = None
            else:
                with open(path, "rb") as file:
                    found[relative] = (bool(os.stat(path).st_mode & 0o100), file.read())
    return found


# ---- packed files


NAMES = st.binary(min_size=1, max_size=20).filter(
    lambda name: not set(name) & {0, 47} and name not in (b".", b"..", b".nniignore")
)
TREES = st.recursive(
    st.binary(max_size=2000) | st.tuples(st.booleans(), st.binary(max_size=10)),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def make(folder, content):
    for name, inner in content.items():
        path = os.path.join(folder, name)
        if isinstance(inner, dict):
            os.mkdir(path)
            make(path, inner)
        else:
            is_program, data = inner if isinstance(inner, tuple) else (False, inner)
            with open(path, "wb") as file:
                file.write(data)
            os.chmod(path, 0o700 if is_program else 0o600)


@given(content=st.dictionaries(NAMES, TREES, max_size=4))
def test_an_unpacked_snapshot_equals_the_code_folder_even_with_unusual_file_names(tmp_path_factory, content):
    place = Place(tmp_path_factory.mktemp("place"))
    make(os.fsencode(place.code), content)
    unpacked = place.unpack()
    assert tree(unpacked) == tree(place.code)


def test_the_snapshot_of_equal_code_has_equal_bytes_and_is_stored_once(place, tmp_path):
    place.write(b="2", a="1", sub__c="3")
    first = place.take()
    content = place.workspace.file(first.name).read_bytes()
    assert content[4:8] == bytes(4), "the time in the gzip header"
    stamp = place.workspace.file(first.name).stat().st_mtime_ns
    os.utime(place.code / "a", (1, 1))
    assert place.take() == first
    assert place.workspace.file(first.name).stat().st_mtime_ns == stamp
    other = Place(tmp_path / "other")
    other.write(sub__c="3", a="1", b="2")
    assert other.workspace.file(other.take().name).read_bytes() == content
    assert place.snapshots() == [first.name]


@pytest.mark.parametrize(
    "change",
    [
        lambda code: (code / "train.py").write_text("print(2)"),
        lambda code: (code / "train.py").chmod(0o755),
        lambda code: (code / "train.py").rename(code / "main.py"),
        lambda code: (code / "empty").mkdir(),
        lambda code: (code / "link").symlink_to("train.py"),
    ],
    ids=["content", "rights", "name", "folder", "link"],
)
def test_changed_code_creates_another_snapshot_and_the_old_snapshot_stays(place, change):
    place.write(train_dot_py="print(1)")
    first = place.take().name
    change(place.code)
    second = place.take().name
    assert first != second
    assert place.snapshots() == sorted([first, second])


def test_a_code_snapshot_reports_the_number_of_files_and_bytes(place):
    place.write(a="x" * 2**20, sub__b="y" * 2**19)
    snapshot = place.take()
    assert (snapshot.files, snapshot.size_bytes) == (2, 2**20 + 2**19)
    assert str(snapshot) == f"2 files, 1.5 MiB in {snapshot.name}"


def test_a_container_that_runs_as_another_user_can_read_the_snapshot(place):
    place.write(train_dot_py="1", tool="2")
    (place.code / "train.py").chmod(0o600)
    (place.code / "tool").chmod(0o4700)
    (place.code / "private").mkdir(mode=0o700)
    umask = os.umask(0o077)
    try:
        unpacked, file = place.unpack(), place.workspace.file(place.take().name)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((unpacked / "train.py").stat().st_mode) == 0o644
    assert stat.S_IMODE((unpacked / "tool").stat().st_mode) == 0o755
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    with tarfile.open(file) as archive:
        assert {(member.uid, member.gid, member.mtime) for member in archive} == {(0, 0, 315532800)}
        assert archive.getmember("private").mode == 0o755


def test_the_snapshot_omits_files_that_nniignore_lists(place):
    place.write(train_dot_py="1", data__big="2", sub__x_dot_log="3", sub__y="4")
    (place.code / ".nniignore").write_text("data/\n*.log\n")
    assert set(tree(place.unpack())) == {b".nniignore", b"train.py", b"sub", b"sub/y"}


def test_the_error_for_an_invalid_nniignore_line_contains_the_line_number(place):
    (place.code / ".nniignore").write_text("*.log\n!\n")
    with pytest.raises(
        CodeUnusable, match=r"cannot use \S+/\.nniignore: line 2, '!', is not a gitignore pattern"
    ):
        place.take()


def test_the_snapshot_omits_the_folder_of_the_experiment(tmp_path):
    place = Place(tmp_path)
    place.write(train_dot_py="1")
    place.workspace = Workspace(place.code / "experiments" / "EXPT")
    place.workspace.root.mkdir(parents=True)
    first = place.take()
    assert place.take() == first
    assert set(tree(place.unpack())) == {b"train.py", b"experiments"}


def test_the_snapshot_omits_and_reports_sockets_and_pipes(place, monkeypatch):
    place.write(train_dot_py="1")
    os.mkfifo(place.code / "pipe")
    # The path of a Unix socket must be short, so the test binds the socket to a relative path.
    monkeypatch.chdir(place.code)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert place.take().left_out == ("pipe", "socket")
        assert set(tree(place.unpack())) == {b"train.py"}


# ---- links


def test_a_link_inside_the_code_folder_stays_a_link_even_if_its_target_is_missing(place):
    place.write(sub__train_dot_py="1")
    links = {"main.py": "sub/train.py", "again": "sub", "nowhere": "no/such/file", "sub/up": "../main.py"}
    for name, target in links.items():
        (place.code / name).symlink_to(target)
    unpacked = place.unpack()
    assert {name: os.readlink(unpacked / name) for name in links} == links
    assert (unpacked / "sub" / "up").read_text() == "1"


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_link_to_a_file_outside_the_code_folder_is_replaced_by_the_file(place, tmp_path, is_absolute):
    (tmp_path / "shared" / "deep").mkdir(parents=True)
    (tmp_path / "shared" / "deep" / "lib.py").write_text("2")
    (tmp_path / "one").write_text("3")
    base = str(tmp_path) if is_absolute else ".."
    (place.code / "lib").symlink_to(f"{base}/shared")
    (place.code / "one").symlink_to(f"{base}/one")
    assert tree(place.unpack()) == {
        b"lib": None,
        b"lib/deep": None,
        b"lib/deep/lib.py": (False, b"2"),
        b"one": (False, b"3"),
    }


def test_a_link_that_leaves_and_reenters_the_code_folder_is_replaced_by_the_target_file(place):
    place.write(train_dot_py="1")
    (place.code / "main.py").symlink_to("../code/train.py")
    assert tree(place.unpack())[b"main.py"] == (False, b"1")


def test_the_error_contains_a_remedy_if_a_link_points_to_a_missing_file_outside_the_code_folder(place):
    (place.code / "data").symlink_to("/mnt/no-such-storage/data")
    with pytest.raises(CodeUnusable, match=r"cannot pack the link 'data' .*; list the link in \.nniignore"):
        place.take()
    (place.code / ".nniignore").write_text("/data\n")
    assert place.take().files == 1


def test_a_link_to_a_parent_folder_is_an_error(place):
    (place.code / "up").symlink_to("..")
    with pytest.raises(CodeUnusable, match=r"cannot pack 'up/code/' .*remove the link, or list it"):
        place.take()


# ---- limits


@pytest.mark.slow
def test_the_error_names_the_folders_with_the_most_files_if_there_are_too_many_files(place):
    for number in range(1995):
        (place.code / f"data{number % 2}").mkdir(exist_ok=True)
        (place.code / f"data{number % 2}" / str(number)).touch()
    place.write(a="", b="", c="", d="", e="")
    place.take()
    place.write(f="")
    with pytest.raises(CodeUnusable) as caught:
        place.take()
    message = str(caught.value)
    assert message.startswith(
        f"cannot pack codeDir {place.code}: it holds 2001 files of 0.0 MiB; the limits are 2000 files"
    )
    assert "most is in 'data0'/ (998 files, 0.0 MiB), 'data1'/ (997 files, 0.0 MiB), 'a' (1 files" in message
    assert message.endswith(
        "name what trials do not need in .nniignore there, or put data on the shared storage"
    )
    assert len(place.snapshots()) == 1


def test_the_error_names_the_largest_file_if_there_are_too_many_bytes(place):
    place.write(train_dot_py="1" * 100, deep__down__small="2")
    os.truncate(place.code / "deep" / "down" / "small", 2**20)
    (place.code / "deep" / "down" / "model.bin").touch()
    os.truncate(place.code / "deep" / "down" / "model.bin", 300 * 2**20)
    with pytest.raises(CodeUnusable) as caught:
        place.take()
    assert "it holds 3 files of 301.0 MiB" in str(caught.value)
    assert "most is in 'deep/down/model.bin' (1 files, 300.0 MiB), 'train.py'" in str(caught.value)
    (place.code / ".nniignore").write_text("model.bin")
    assert place.take().files == 3


def test_the_scan_of_a_folder_with_too_many_files_stops_early(place, monkeypatch):
    monkeypatch.setattr(code_folder, "_MAX_ENTRIES", 50)
    for number in range(60):
        (place.code / str(number)).touch()
    with pytest.raises(CodeUnusable, match="it holds more than 50 files"):
        place.take()


# ---- changing and unreadable files


def test_a_constantly_changing_file_does_not_damage_the_archive(place):
    place.write(a_dot_log="", train_dot_py="1", z="2")
    stopped, grown = threading.Event(), threading.Event()

    def grow_and_shrink():
        with (place.code / "a.log").open("ab", buffering=0) as log:
            while not stopped.is_set():
                log.write(b"line\n" * 1000)
                if log.tell() > 100_000:
                    log.truncate(0)
                grown.set()

    writer = threading.Thread(target=grow_and_shrink)
    writer.start()
    try:
        grown.wait(DEADLINE_S)
        for _ in range(5):
            found = tree(place.unpack())
            assert found[b"train.py"] == (False, b"1")
            assert found[b"z"] == (False, b"2")
            assert set(found[b"a.log"][1]) <= set(b"line\n")
    finally:
        stopped.set()
        writer.join()


def test_a_file_that_grows_or_shrinks_during_the_read_is_read_again(place, monkeypatch):
    place.write(train_dot_py="half")
    copy, times = code_snapshot._copy, []

    def copy_during_a_write(file, into, size_bytes):
        copy(file, into, size_bytes)
        times.append(size_bytes)
        # The snapshot copies a file once for the digest and once for the archive. The test changes the file after the first and
        # after the third copy.
        if len(times) == 1:
            place.write(train_dot_py="the whole of it")
        elif len(times) == 3:
            place.write(train_dot_py="half")

    monkeypatch.setattr(code_snapshot, "_copy", copy_during_a_write)
    assert tree(place.unpack())[b"train.py"] == (False, b"half")


def test_files_that_together_grow_beyond_the_limit_during_the_read_are_refused(place, monkeypatch):
    place.write(a_dot_log="1" * 60, z="2" * 30)
    copy = code_snapshot._copy

    def copy_while_another_file_grows(file, into, size_bytes):
        copy(file, into, size_bytes)
        place.write(z="2" * 60)

    monkeypatch.setattr(code_snapshot, "_copy", copy_while_another_file_grows)
    monkeypatch.setattr(code_snapshot, "MAX_BYTES", 100)
    with pytest.raises(CodeUnusable, match=r"'z' grows while it is read; name it in \.nniignore"):
        place.take()


def test_the_whole_snapshot_is_synced_before_it_gets_its_final_name(place, monkeypatch):
    place.write(train_dot_py="1")
    synced_bytes = []
    monkeypatch.setattr(
        code_snapshot.os, "fsync", lambda number: synced_bytes.append(os.fstat(number).st_size)
    )
    path = place.take()
    assert synced_bytes == [place.workspace.file(path.name).stat().st_size]


def test_the_snapshot_omits_a_file_that_vanishes_during_packing(place, monkeypatch):
    place.write(train_dot_py="1", lock="2")
    entries = code_folder.CodeFolder.entries

    def scan_and_lose(scan):
        found = entries(scan)
        (place.code / "lock").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(code_folder.CodeFolder, "entries", scan_and_lose)
    assert set(tree(place.unpack())) == {b"train.py"}


@pytest.mark.any_machine
def test_a_single_error_names_all_unreadable_files(tmp_path, open_way):
    place = Place(tmp_path)
    place.write(open="1", secret="2", sub__hidden="3")
    (place.code / "secret").chmod(0o600)
    (place.code / "sub").chmod(0o700)
    place.workspace.root.chmod(0o777)
    with as_another_user(), pytest.raises(CodeUnusable) as refused:
        place.take()
    assert str(refused.value).startswith(f"cannot read 'secret', 'sub/' in codeDir {place.code}; ")
    assert ".nniignore" in str(refused.value)


def test_the_error_for_a_missing_code_folder_contains_the_path_of_the_folder(place):
    shutil.rmtree(place.code)
    with pytest.raises(CodeUnusable, match=r"cannot read codeDir \S+/code: No such file or directory; "):
        place.take()


def test_the_error_names_a_file_that_cannot_be_copied_to_the_temporary_folder(place, monkeypatch):
    (place.code / "model.bin").write_bytes(bytes(code_snapshot._IN_MEMORY_BYTES + 1))
    monkeypatch.setattr(tempfile, "tempdir", str(place.code / "absent"))
    with pytest.raises(
        CodeUnusable, match=r"cannot copy \S+/model.bin to a temporary file: No such .* TMPDIR"
    ):
        place.take()
    version = code_version(place.code, place.workspace.root, 5.0)
    assert version.digest == "", "the manager starts without the digest"


def test_folders_that_are_nested_too_deeply_are_refused(place):
    deepest = place.code
    for _ in range(sys.getrecursionlimit()):
        deepest /= "d"
        os.mkdir(deepest)
    try:
        with pytest.raises(CodeUnusable, match=r"nested too deeply; list the topmost of them in \.nniignore"):
            place.take()
    finally:
        # Python cannot remove folders that are nested so deeply, so the test calls rm.
        subprocess.run(["rm", "-rf", place.code / "d"], check=True)


def test_a_failed_snapshot_write_leaves_no_partial_file(place, monkeypatch):
    place.write(train_dot_py=os.urandom(5000).hex())

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        SnapshotNotWritten, match=r"cannot write the code snapshot .*No space left on device; "
    ):
        place.take()
    assert place.snapshots() == []
    monkeypatch.undo()
    assert place.snapshots() == [] != [place.take().name]


def test_a_file_with_credentials_and_all_links_to_the_file_are_omitted_from_the_snapshot(place):
    place.write(train_dot_py="1", config_dot_yml="token: secret", sub__x="2")
    os.link(place.code / "config.yml", place.code / "sub" / "copy.yml")
    # The snapshot replaces an absolute link by the content of its target. This link leads to the token, so the snapshot must omit
    # the link.
    (place.code / "alias.yml").symlink_to(place.code / "config.yml")
    snapshot = take_snapshot(place.code, place.workspace, (place.code / "config.yml",))
    unpack_code(place.workspace.file(snapshot.name), place.code.parent / "seen")
    assert set(tree(place.code.parent / "seen")) == {b"train.py", b"sub/x", b"sub"}


def test_the_error_names_the_snapshot_if_its_storage_fails_during_the_unpacking(place, monkeypatch):
    place.write(train="pass\n" * 100_000)
    place.take()
    opened = mount.open_shared

    @contextlib.contextmanager
    def failing_after_the_start(path):
        with opened(path) as file:
            start = io.BytesIO(file.read(100))

            def read(size):
                if data := start.read(size):
                    return data
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            yield types.SimpleNamespace(read=read)

    monkeypatch.setattr(mount, "open_shared", failing_after_the_start)
    with pytest.raises(MountUnreadable, match=r"cannot read .*code-.*: Input/output error"):
        place.unpack()
