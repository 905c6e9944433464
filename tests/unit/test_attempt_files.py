"""How a keeper reads the manager's documents of a trial, starts attempts, and reads growing streams."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest
from attempts import attempt_id

from trial_keeper.errors import (
    KeeperRetryableError,
    MountForbidden,
    MountFull,
    MountReadOnly,
    MountUnreadable,
    SettingsInvalid,
    WorkspaceMissing,
    WorkspaceNotWritable,
)
from trial_keeper.host import attempt_files, process
from trial_keeper.host.attempt_files import Tail, claim_attempt, not_writable, read_shared, read_trial
from trial_keeper.host.process import TrialProcess
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.attempt_ids import is_attempt_id, new_attempt_id, sort_key, start_ms_of
from trial_keeper.wire.documents import AttemptDocument, TrialDocument
from trial_keeper.wire.file_changes import FileChange
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.small_files import replace_file
from trial_keeper.wire.workspace import AttemptFolder, Workspace

TRIAL = TrialDocument("trial1", 0, "true", "/code")
PARAMETERS = b'{"parameter_id": 0, "parameters": {}}'


SETTINGS = KeeperSettings("EXPT", "job", "/unused", "f00d")


@pytest.fixture
def workspace(tmp_path):
    workspace = Workspace(tmp_path / "EXPT")
    folder = workspace.trial("trial1")
    folder.path.mkdir(parents=True)
    folder.trial_json.write_bytes(TRIAL.to_bytes())
    folder.parameter_cfg.write_bytes(PARAMETERS)
    return workspace


@pytest.fixture
def folder(workspace):
    return claim_attempt(workspace, SETTINGS, "trial1", "main-0")[1]


@pytest.fixture
def quick_storage(monkeypatch):
    monkeypatch.setattr(attempt_files, "SHARED_STORAGE_LAG_S", 0.0)
    monkeypatch.setattr(attempt_files, "_RETRY_DELAY_S", 0.001)


# ---- files of the manager


def test_the_keeper_waits_for_a_file_that_appears_late_on_the_storage(tmp_path, monkeypatch):
    monkeypatch.setattr(attempt_files, "_RETRY_DELAY_S", 0.001)
    path = tmp_path / "manager.json"
    writer = threading.Timer(0.1, replace_file, [path, b"late"])
    writer.start()
    assert read_shared(Workspace(tmp_path), path) == b"late"
    writer.join()


def test_the_error_names_the_mount_if_a_file_never_appears(tmp_path, quick_storage):
    with pytest.raises(WorkspaceMissing, match=r"cannot find \S+/manager\.json: .*check the mount"):
        read_shared(Workspace(tmp_path), tmp_path / "manager.json")


def test_a_folder_in_place_of_a_shared_file_raises_an_error_with_a_remedy(tmp_path):
    (tmp_path / "manager.json").mkdir()
    with pytest.raises(
        MountUnreadable, match=r"cannot read .*it is not a regular file; remove it, check who"
    ):
        read_shared(Workspace(tmp_path), tmp_path / "manager.json")


def test_the_keeper_reads_a_trial_from_its_document(workspace):
    assert read_trial(workspace, "trial1") == TRIAL


def test_an_invalid_trial_document_raises_a_workspace_error(workspace):
    workspace.trial("trial1").trial_json.write_bytes(b"{}")
    with pytest.raises(WorkspaceMissing, match=r"cannot read trial\.json: .*use a keeper of the version"):
        read_trial(workspace, "trial1")


@pytest.mark.parametrize("trial_id", ["..", "a/b", "", "-x"])
def test_a_trial_id_that_is_a_path_outside_the_workspace_raises_a_settings_error(workspace, trial_id):
    with pytest.raises(SettingsInvalid, match="cannot run trial"):
        read_trial(workspace, trial_id)


# ---- claiming an attempt


def test_each_claim_of_a_keeper_creates_a_new_signed_attempt(workspace):
    keys = [
        claim_attempt(workspace, SETTINGS, "trial1", task)[0]
        for task in ("main-0", "main-0", "main-1", "main-0")
    ]
    assert len({key.attempt_id for key in keys}) == 4
    assert all(is_attempt_id(key.attempt_id) for key in keys)
    for key in keys:
        content = workspace.attempt(key).attempt_json.read_bytes()
        document = AttemptDocument.from_bytes(content, {"job": "f00d"}.__getitem__)
        assert (document.experiment_id, document.key) == ("EXPT", key)
        assert abs(document.started_at_s - time.time()) < 60


def test_concurrent_claims_get_different_attempts(workspace):
    claimed, start = [], threading.Barrier(8)

    def claim():
        start.wait()
        claimed.append(claim_attempt(workspace, SETTINGS, "trial1", "main-0")[0].attempt_id)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(claimed)) == 8


def test_an_attempt_id_from_the_manager_is_used_only_if_no_path_with_this_id_exists(workspace, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    attempts = workspace.trial("trial1").attempts
    attempts.mkdir()
    (attempts / attempt_id(1)).symlink_to(tmp_path / "elsewhere")
    (attempts / attempt_id(2)).write_text("no folder")
    chosen = [0, 0, 1, 2]
    ids = [
        claim_attempt(workspace, SETTINGS, "trial1", "main-0", attempt_id(number))[0].attempt_id
        for number in chosen
    ]
    assert ids[0] == attempt_id(0)
    assert len({*ids, attempt_id(1), attempt_id(2)}) == 6, "ids whose path exists are not used"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_attempt_ids_increase_even_if_the_clock_is_set_back(workspace):
    later = new_attempt_id(time.time() + 3600)
    before, _ = claim_attempt(workspace, SETTINGS, "trial1", "main-0", later)
    key, _ = claim_attempt(workspace, SETTINGS, "trial1", "main-0")
    assert sort_key(before.attempt_id) < sort_key(key.attempt_id)
    assert start_ms_of(key.attempt_id) == start_ms_of(later) + 1


def test_a_new_attempt_ignores_the_future_start_time_of_a_forged_attempt(workspace):
    forged = AttemptKey("trial1", new_attempt_id(time.time() + 3600), "main-0")
    workspace.attempt(forged).path.mkdir(parents=True)
    document = AttemptDocument("EXPT", "job", forged, 1.0)
    workspace.attempt(forged).attempt_json.write_bytes(document.to_bytes("guessed"))
    key, _ = claim_attempt(workspace, SETTINGS, "trial1", "main-0")
    assert start_ms_of(key.attempt_id) <= time.time() * 1000


def test_the_folder_of_a_claimed_attempt_contains_the_parameters_and_empty_streams(workspace):
    key, folder = claim_attempt(workspace, SETTINGS, "trial1", "main-0")
    assert folder == workspace.attempt(key)
    assert folder.parameter_cfg.read_bytes() == PARAMETERS
    assert all(folder.stream(stream).read_bytes() == b"" for stream in Stream)


def test_a_keeper_raises_an_error_and_claims_no_attempt_if_the_trial_has_no_parameters(
    workspace, quick_storage
):
    workspace.trial("trial1").parameter_cfg.unlink()
    with pytest.raises(WorkspaceMissing, match=r"cannot find \S+/parameter\.cfg"):
        claim_attempt(workspace, SETTINGS, "trial1", "main-0")
    assert workspace.attempts_of("trial1") == []


def test_the_error_for_a_file_in_place_of_the_attempts_folder_contains_a_remedy(workspace):
    workspace.trial("trial1").attempts.touch()
    with pytest.raises(
        WorkspaceNotWritable, match=r"cannot write to the workspace .*; check the storage's server"
    ):
        claim_attempt(workspace, SETTINGS, "trial1", "main-0")


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (errno.EROFS, MountReadOnly, "mount it read-write"),
        (errno.ENOSPC, MountFull, "free some space"),
        (errno.EDQUOT, MountFull, "more quota"),
        (errno.EACCES, MountForbidden, f"run the container as user {os.getuid()}, who owns "),
        (errno.EPERM, MountForbidden, "(drwx------)"),
        (errno.EIO, WorkspaceNotWritable, "check the storage's server"),
    ],
)
def test_each_cause_of_a_write_error_has_its_own_error_class_and_remedy(tmp_path, number, kind, remedy):
    tmp_path.chmod(0o700)
    error = not_writable(tmp_path, OSError(number, os.strerror(number)))
    assert type(error) is kind
    assert str(error).startswith(f"cannot write to the workspace {tmp_path}: {os.strerror(number)}")
    assert str(error).count("; ") == 1
    assert remedy in str(error)


def test_the_error_for_root_without_write_access_names_the_no_root_squash_option(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "export the storage with no_root_squash" in str(not_writable(tmp_path, PermissionError(1, "no")))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "squash" not in str(not_writable(tmp_path, PermissionError(1, "no")))


# ---- reading while it grows


@pytest.fixture
def tail(workspace, folder):
    tail = Tail(folder, workspace.trials)
    yield tail
    tail.close()


def append(folder: AttemptFolder, stream: Stream, data: bytes) -> None:
    with folder.stream(stream).open("ab") as file:
        file.write(data)


def test_the_stream_reader_returns_the_current_sizes_and_bytes_of_growing_files(folder, tail):
    assert tail.sizes() == dict.fromkeys(Stream, 0)
    append(folder, Stream.METRICS, b"abc")
    append(folder, Stream.STDERR, b"de")
    assert tail.sizes() == dict.fromkeys(Stream, 0) | {Stream.METRICS: 3, Stream.STDERR: 2}
    append(folder, Stream.METRICS, b"fgh")
    assert tail.read(Stream.METRICS, 2, 3) == b"cfg"
    assert tail.read(Stream.METRICS, 4, 10) == b"gh"


def test_a_file_is_read_as_empty_if_it_does_not_exist_yet(folder, tail):
    folder.stream(Stream.METRICS).unlink()
    assert tail.sizes()[Stream.METRICS] == 0
    assert tail.read(Stream.METRICS, 0, 5) == b""
    append(folder, Stream.METRICS, b"abc")
    assert tail.sizes()[Stream.METRICS] == 3
    assert tail.read(Stream.METRICS, 0, 3) == b"abc"


def test_the_stream_reader_reopens_a_file_whose_descriptor_fails(folder, tail):
    append(folder, Stream.METRICS, b"abc")
    assert tail.sizes()[Stream.METRICS] == 3
    # The closed descriptor simulates a stale handle on NFS: both fail at each call.
    os.close(tail._descriptors[Stream.METRICS])
    append(folder, Stream.METRICS, b"de")
    assert tail.sizes()[Stream.METRICS] == 5, "at the end of a trial no other poll follows"
    assert tail.read(Stream.METRICS, 3, 2) == b"de"


def test_a_failed_read_returns_no_bytes_and_the_next_read_returns_all_bytes(folder, tail):
    append(folder, Stream.STDOUT, b"abc")
    tail.sizes()
    os.close(tail._descriptors[Stream.STDOUT])
    assert tail.read(Stream.STDOUT, 0, 3) == b""
    assert tail.read(Stream.STDOUT, 0, 3) == b"abc"


def test_a_truncated_file_is_distinguished_from_a_temporarily_unreadable_file(folder, tail, monkeypatch):
    append(folder, Stream.STDOUT, b"abcdef")
    tail.sizes()
    assert tail.truncated_size(Stream.STDOUT, 6) is None
    os.truncate(folder.stream(Stream.STDOUT), 2)
    assert tail.truncated_size(Stream.STDOUT, 6) == 2
    os.close(tail._descriptors[Stream.STDOUT])
    with monkeypatch.context() as failing:
        failing.setattr(attempt_files, "open_beneath", fail_with(errno.EIO))
        assert tail.truncated_size(Stream.STDOUT, 6) is None
    assert tail.truncated_size(Stream.STDOUT, 6) == 2


def fail_with(number, times=10**6):
    """A function that raises an error of the storage this many times. Later calls go to its attribute `successor`."""
    left = [times]

    def call(*arguments):
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return call.successor(*arguments)

    return call


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_document_that_the_storage_cannot_read_for_a_moment_is_read_again(folder, monkeypatch, number):
    """A manager on another machine has replaced the file while the keeper was reading it."""
    folder.path.joinpath("document").write_bytes(b"new")
    failing = fail_with(number, times=2)
    failing.successor = attempt_files.open_beneath
    monkeypatch.setattr(attempt_files, "open_beneath", failing)
    with attempt_files.open_shared(folder.path / "document") as file:
        assert file.read() == b"new"


def test_a_document_that_the_storage_cannot_read_for_a_long_time_raises_an_error(folder, monkeypatch):
    monkeypatch.setattr(attempt_files, "SHARED_STORAGE_LAG_S", 0.0)
    monkeypatch.setattr(attempt_files, "open_beneath", fail_with(errno.EIO))
    with pytest.raises(MountUnreadable, match="check the storage's server"):
        attempt_files.open_shared(folder.path / "document")


def removed(file: Path) -> None:
    file.unlink()


def replaced_by_a_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("change", [removed, replaced_by_a_link])
def test_a_file_that_is_removed_after_a_failed_read_has_size_0_after_the_shared_storage_lag(
    folder, tail, change, monkeypatch
):
    append(folder, Stream.METRICS, b"abc")
    tail.sizes()
    # A closed descriptor simulates a failed read, after which the reader has to open the file again.
    os.close(tail._descriptors[Stream.METRICS])
    change(folder.stream(Stream.METRICS))
    for _ in range(2):
        assert tail.read(Stream.METRICS, 0, 3) == b""
        assert tail.truncated_size(Stream.METRICS, 3) is None
    monkeypatch.setattr(attempt_files, "SHARED_STORAGE_LAG_S", 0.0)
    assert tail.truncated_size(Stream.METRICS, 3) == 0
    assert tail.changes == {Stream.METRICS: FileChange.REPLACED}


def test_a_file_is_not_regarded_as_removed_if_its_storage_is_not_mounted(
    workspace, folder, tail, quick_storage
):
    append(folder, Stream.METRICS, b"abc")
    tail.sizes()
    os.close(tail._descriptors[Stream.METRICS])
    workspace.root.rename(workspace.root.with_name("unmounted"))
    assert tail.read(Stream.METRICS, 0, 3) == b""
    assert tail.read(Stream.METRICS, 0, 3) == b""
    assert tail.truncated_size(Stream.METRICS, 3) is None
    workspace.root.with_name("unmounted").rename(workspace.root)
    assert tail.read(Stream.METRICS, 0, 3) == b"abc"
    assert tail.changes == {}


def test_a_file_that_only_grows_is_not_reported_as_changed(folder, tail):
    for number in range(10):
        append(folder, Stream.METRICS, b"a record %d\n" % number * 10)
        assert len(tail.read(Stream.METRICS, 110 * number, 1000)) == 110
    # As after a lost connection, the bytes from the start are read a second time.
    tail.read(Stream.METRICS, 0, 100)
    tail.check(Stream)
    assert tail.changes == {}


@pytest.mark.parametrize("is_read_on", [True, False])
def test_a_rewritten_file_is_detected_by_its_most_recently_read_bytes(folder, tail, is_read_on):
    append(folder, Stream.METRICS, b"one\ntwo\n")
    assert tail.read(Stream.METRICS, 0, 8) == b"one\ntwo\n"
    folder.stream(Stream.METRICS).write_bytes(b"two\nthree\nfour\n")
    if is_read_on:
        assert tail.read(Stream.METRICS, 8, 100) == b"e\nfour\n"
    else:
        tail.check((Stream.METRICS,))
    assert tail.changes == {Stream.METRICS: FileChange.REWRITTEN}


def test_a_file_with_a_hole_after_truncation_counts_as_rewritten(folder, tail):
    with folder.stream(Stream.STDOUT).open("wb") as file:
        file.write(b"one\n")
        file.flush()
        assert tail.read(Stream.STDOUT, 0, 4) == b"one\n"
        os.truncate(folder.stream(Stream.STDOUT), 0)
        file.write(b"two\n")
        file.flush()
    assert tail.read(Stream.STDOUT, 4, 4) == b"two\n"
    assert tail.changes == {Stream.STDOUT: FileChange.REWRITTEN}


def test_a_shortened_file_does_not_count_as_rewritten(folder, tail):
    append(folder, Stream.METRICS, b"one\ntwo\n")
    tail.read(Stream.METRICS, 0, 8)
    os.truncate(folder.stream(Stream.METRICS), 3)
    tail.check((Stream.METRICS,))
    assert tail.changes == {}


def test_a_removed_or_replaced_file_is_detected(folder, tail):
    for stream in (Stream.METRICS, Stream.STDOUT):
        append(folder, stream, b"one\n")
    tail.sizes()
    folder.stream(Stream.METRICS).unlink()
    folder.stream(Stream.STDOUT).rename(folder.output / "old")
    append(folder, Stream.STDOUT, b"another\n")
    tail.check((Stream.METRICS, Stream.STDOUT, Stream.STDERR))
    assert tail.changes == {Stream.METRICS: FileChange.REPLACED, Stream.STDOUT: FileChange.REPLACED}


def test_a_file_replaced_by_an_identical_copy_does_not_count_as_changed(folder, tail):
    append(folder, Stream.STDOUT, b"one\n")
    tail.sizes()
    (folder.output / "copy").write_bytes(b"one\n")
    (folder.output / "copy").replace(folder.stream(Stream.STDOUT))
    tail.check((Stream.STDOUT,))
    assert tail.changes == {}


@pytest.mark.parametrize(
    ("content", "longest", "text"),
    [
        (b"", 10, ""),
        (b"one\ntwo\n", 100, "one\ntwo"),
        (b"one\ntwo\n", 8, "one\ntwo"),
        (b"one\ntwo\n", 7, "two"),
        (b"one\ntwo\n", 5, "two"),
        (b"a line that is longer than all", 8, "than all"),
        (b"\xff\xfe\n", 10, "��"),
        ("é".encode() * 10, 5, "�éé"),
    ],
)
def test_the_last_text_of_a_stream_starts_with_a_whole_line_if_possible(folder, tail, content, longest, text):
    append(folder, Stream.STDERR, content)
    assert tail.last_text(Stream.STDERR, longest) == text


def test_closing_the_stream_reader_twice_raises_no_error_and_keeps_the_files_of_the_streams(folder, tail):
    append(folder, Stream.METRICS, b"abc")
    tail.sizes()
    tail.close()
    tail.close()
    assert folder.stream(Stream.METRICS).read_bytes() == b"abc"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_command_is_not_started_if_its_output_files_cannot_be_opened(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(WorkspaceNotWritable, match=f"cannot write to the workspace {tmp_path}: "):
        TrialProcess.started(
            "touch ran", str(tmp_path), {}, tmp_path / "stdout", tmp_path / "stderr", register=lambda _: None
        )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("call", ["pipe", "posix_spawn of the shell"])
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_the_error_names_the_limits_if_a_command_cannot_start_because_of_limits(
    tmp_path, monkeypatch, call, number
):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((process.os, "pipe") if call == "pipe" else (process.subprocess, "Popen")), fail)
    with pytest.raises(
        KeeperRetryableError, match=r"cannot start the trial's command: .*; raise the limits on"
    ):
        TrialProcess.started("true", str(tmp_path), os.environ, tmp_path / "out", tmp_path / "err")
