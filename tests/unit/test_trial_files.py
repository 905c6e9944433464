"""The files that the manager writes into a workspace, and how the manager reads the files of keepers and of other users."""

import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from attempts import attempt_id

import nni_sdk
from nni_manager.domain.trial import Trial
from nni_manager.engine.shared_files import (
    AttemptReadout,
    SharedFiles,
    Signer,
    is_signed,
)
from nni_manager.engine.tokens import token_of
from nni_manager.store.folders import ExperimentFolder
from nni_manager.training_services.base import Placement
from nni_sdk.records import encode
from trial_keeper.wire.documents import (
    AttemptDocument,
    ManagerDocument,
    TrialDocument,
    exit_to_bytes,
    stop_from_bytes,
)
from trial_keeper.wire.messages import AttemptKey, StopTrial, Stream, TrialEnded
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.signatures import DocumentInvalid
from trial_keeper.wire.workspace import AttemptFolder, Workspace

DOCUMENT = ManagerDocument("expABCDE", "0.6.0", ("127.0.0.1:1",))
KEY = AttemptKey("abcde", attempt_id(0), "main-0")
_NOBODY = 65534
TOKEN = "f00d"
SIGNER = Signer("expABCDE", "job", lambda job_id: TOKEN if job_id == "job" else f"{TOKEN} of {job_id}")
FRAME = encode(0, "abcde", "PERIODICAL", 0, 1.5)
SDK_FOLDER = Path(nni_sdk.__file__).parent
SDK = {path.name: path.read_bytes() for path in SDK_FOLDER.glob("*.py")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


def test_the_sdk_folder_of_a_workspace_contains_only_nni_sdk_and_the_fallback_nni_package(
    tmp_path: Path,
) -> None:
    workspace = Workspace(tmp_path)
    SharedFiles(workspace).write_experiment(DOCUMENT, "exit\n")
    assert sorted(path.name for path in workspace.sdk.iterdir()) == ["nni", "nni_sdk"]
    assert contents(workspace.sdk / "nni") == {
        "__init__.py": (SDK_FOLDER / "fallback/nni/__init__.py").read_bytes()
    }
    assert contents(workspace.sdk / "nni_sdk") == SDK
    assert contents(workspace.sdk / "nni_sdk/integrations") == contents(SDK_FOLDER / "integrations") != {}
    assert {"__init__.py", "trial.py", "records.py"} <= SDK.keys()


def test_the_files_of_a_restarted_trial_have_no_stop_request_of_its_earlier_attempt(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    files, trial = SharedFiles(workspace), Trial("abcde", 0, {"x": 1}, {}, 0.0, "job")
    workspace.trials.mkdir()
    files.write_trial(trial, "true", Placement("/code", None), None)
    assert not workspace.trial("abcde").stop_json.exists()
    files.write_stop(StopTrial("abcde", ExitReason.TRIAL_OVER))
    assert stop_from_bytes(workspace.trial("abcde").stop_json.read_bytes()).reason is ExitReason.TRIAL_OVER
    files.write_trial(trial, "true", Placement("/code", None), None)
    with pytest.raises(DocumentInvalid):
        stop_from_bytes(workspace.trial("abcde").stop_json.read_bytes())


def test_a_later_manager_atomically_replaces_only_the_changed_sdk_files(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    SharedFiles(workspace).write_experiment(DOCUMENT, "exit\n")
    folder = workspace.sdk / "nni_sdk"
    (folder / "errors.py").unlink()
    (folder / "trial.py").write_bytes(b"# of an earlier version")
    before = {path.name: path.stat().st_ino for path in folder.glob("*.py")}
    with (folder / "trial.py").open("rb") as being_read:
        SharedFiles(workspace).write_experiment(DOCUMENT, "exit\n")
        assert being_read.read() == b"# of an earlier version"
    assert contents(folder) == SDK
    touched = {path.name for path in folder.glob("*.py") if path.stat().st_ino != before.get(path.name)}
    assert touched == {"errors.py", "trial.py"}


@pytest.mark.parametrize(
    ("is_private", "reuses_jobs", "modes"),
    [
        (True, False, [0o700, 0o755]),
        (True, True, [0o700, 0o755]),
        (False, False, [0o755, 0o755]),
        (False, True, [0o755, 0o1777]),
    ],
)
def test_other_users_have_access_to_a_shared_workspace_only_if_tasks_run_as_other_users(
    tmp_path: Path, is_private: bool, reuses_jobs: bool, modes: list[int]
) -> None:
    (tmp_path / "storage").mkdir()
    folder = ExperimentFolder(tmp_path / "expABCDE")
    before = os.umask(0o077)
    try:
        folder.make(tmp_path / "storage")
        assert mode_of(folder.workspace.root) == 0o700, "it is private until a manager sets the access"
        folder.open_workspace(is_private=is_private, reuses_jobs=reuses_jobs)
    finally:
        os.umask(before)
    assert [mode_of(folder.workspace.root), mode_of(folder.workspace.trials)] == modes


def test_the_folder_of_an_experiment_stays_private_if_its_workspace_is_shared(tmp_path: Path) -> None:
    folder = ExperimentFolder(tmp_path / "expABCDE")
    folder.make()
    folder.open_workspace(is_private=False, reuses_jobs=True)
    assert mode_of(folder.path) == 0o700


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def a_trial() -> Trial:
    return Trial("abcde", 0, {"lr": 0.1}, {}, 1.0, "job")


def test_writing_the_files_of_a_trial_again_replaces_the_earlier_files(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.trials.mkdir()
    for command in ("first", "second"):
        SharedFiles(workspace).write_trial(a_trial(), command, Placement(None, None), None)
    folder = workspace.trial("abcde")
    assert TrialDocument.from_bytes(folder.trial_json.read_bytes()).command == "second"
    assert mode_of(folder.attempts) == 0o1777
    folder.attempts.rmdir()
    SharedFiles(workspace, is_private=True).write_trial(a_trial(), "third", Placement(None, None), None)
    assert not mode_of(folder.attempts) & 0o022, "no other user may create attempts"


@pytest.mark.any_machine
@pytest.mark.parametrize("how", ["folder", "attempts", "link"])
def test_no_file_is_written_into_a_trial_folder_created_by_another_user(tmp_path: Path, how: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a folder to another user")
    workspace = Workspace(tmp_path / "workspace")
    folder = workspace.trial("abcde")
    workspace.trials.mkdir(parents=True)
    (tmp_path / "theirs").mkdir()
    made = folder.attempts if how == "attempts" else folder.path
    made.parent.mkdir(exist_ok=True)
    made.symlink_to(tmp_path / "theirs") if how == "link" else made.mkdir()
    os.chown(made, _NOBODY, _NOBODY, follow_symlinks=False)
    with pytest.raises(FileExistsError, match="another user has created it"):
        SharedFiles(workspace).write_trial(a_trial(), "true", Placement(None, None), None)
    assert not folder.trial_json.exists()
    assert list((tmp_path / "theirs").iterdir()) == []


# ---- polls of keepers' files


@pytest.fixture
def running_folder(tmp_path: Path) -> AttemptFolder:
    """The folder of a running attempt, with the files that its keeper creates."""
    folder = Workspace(tmp_path).attempt(KEY)
    (folder.path / ".nni").mkdir(parents=True)
    folder.output.mkdir()
    folder.stream(Stream.METRICS).write_bytes(FRAME)
    folder.stream(Stream.STDOUT).write_bytes(b"hello\n")
    folder.stream(Stream.KEEPER).write_bytes(b"the command runs\n")
    return folder


def end(folder: AttemptFolder, key: AttemptKey = KEY, **sizes: int) -> TrialEnded:
    final_sizes = {Stream(name): size for name, size in sizes.items()}
    ended = TrialEnded(key, ExitReason.SUCCEEDED, 0, 1.0, 2.0, final_sizes)
    folder.exit_json.write_bytes(exit_to_bytes(ended, TOKEN))
    return ended


def poll(
    tmp_path: Path, offsets: dict[Stream, int] | None = None, *, has_ended: bool = False
) -> AttemptReadout:
    return SharedFiles(Workspace(tmp_path)).see_attempt(
        KEY, offsets or {Stream.METRICS: 0}, SIGNER, has_ended=has_ended
    )


def test_a_poll_returns_the_bytes_after_the_stored_offsets(
    tmp_path: Path, running_folder: AttemptFolder
) -> None:
    seen = poll(tmp_path, {Stream.METRICS: 5, Stream.STDOUT: 0, Stream.STDERR: 0})
    assert seen == AttemptReadout(
        KEY, True, ((Stream.METRICS, 5, FRAME[5:]), (Stream.STDOUT, 0, b"hello\n")), None
    )
    assert poll(tmp_path, {Stream.METRICS: len(FRAME)}).pieces == ()


def test_an_attempt_counts_as_started_only_if_its_command_or_its_keeper_has_written_something(
    tmp_path: Path, running_folder: AttemptFolder
) -> None:
    running_folder.stream(Stream.METRICS).write_bytes(b"")
    assert poll(tmp_path).has_started
    running_folder.stream(Stream.KEEPER).write_bytes(b"")
    assert poll(tmp_path).has_started, "its keeper was killed before it wrote that the command runs"
    running_folder.stream(Stream.STDOUT).write_bytes(b"")
    assert not poll(tmp_path).has_started, "its code may still be unpacked"


def test_a_long_file_is_read_in_chunks(tmp_path: Path, running_folder: AttemptFolder) -> None:
    running_folder.stream(Stream.STDOUT).write_bytes(b"x" * 600_000)
    offset, sizes = 0, []
    while pieces := poll(tmp_path, {Stream.STDOUT: offset}).pieces:
        sizes.append(len(pieces[0][2]))
        offset += sizes[-1]
    assert sizes == [262_144, 262_144, 75_712]


def test_bytes_after_the_recorded_final_size_are_not_read(
    tmp_path: Path, running_folder: AttemptFolder
) -> None:
    ended = end(running_folder, metrics=10, stdout=0)
    seen = poll(tmp_path, {Stream.METRICS: 0, Stream.STDOUT: 0})
    assert seen == AttemptReadout(KEY, True, ((Stream.METRICS, 0, FRAME[:10]),), ended)
    assert poll(tmp_path, {Stream.METRICS: 12}).pieces == ()


def test_a_running_attempt_is_read_only_up_to_zeros_that_stand_for_delayed_bytes(
    tmp_path: Path, running_folder: AttemptFolder
) -> None:
    metrics = running_folder.stream(Stream.METRICS)
    metrics.write_bytes(FRAME + bytes(len(FRAME)) + FRAME)
    assert poll(tmp_path).pieces == ((Stream.METRICS, 0, FRAME),)
    assert poll(tmp_path, {Stream.METRICS: len(FRAME)}).pieces == ()
    assert len(poll(tmp_path, has_ended=True).pieces[0][2]) == 3 * len(FRAME)
    end(running_folder, metrics=3 * len(FRAME))
    assert len(poll(tmp_path).pieces[0][2]) == 3 * len(FRAME)


@pytest.mark.parametrize("content", [b"", b"{", b'{"trial_id": "abcde"}', b"x" * 100_000])
def test_an_incomplete_exit_file_is_ignored(
    tmp_path: Path, running_folder: AttemptFolder, content: bytes
) -> None:
    running_folder.exit_json.write_bytes(content)
    assert poll(tmp_path).ended is None


def test_attempt_json_and_exit_json_are_ignored_if_they_exceed_their_size_limits(
    tmp_path: Path, running_folder: AttemptFolder
) -> None:
    """The test pads the documents with leading spaces, which change neither content nor signature."""
    sign(Workspace(tmp_path), KEY)
    end(running_folder)
    for path, limit in ((running_folder.attempt_json, 4 * 1024), (running_folder.exit_json, 64 * 1024)):
        document = path.read_bytes()
        for size, is_read in ((limit, True), (limit + 1, False)):
            path.write_bytes(document.rstrip().rjust(size))
            assert bool(SharedFiles(Workspace(tmp_path)).find_attempts("abcde", SIGNER).keys) is (
                is_read or path == running_folder.exit_json
            )
            assert (poll(tmp_path).ended is not None) is (is_read or path == running_folder.attempt_json)
        path.write_bytes(document)


def test_the_exit_file_of_a_different_attempt_is_ignored(
    tmp_path: Path, running_folder: AttemptFolder
) -> None:
    end(running_folder, AttemptKey("another", attempt_id(0), "main-0"), metrics=0)
    assert poll(tmp_path).ended is None


@pytest.mark.parametrize("what", ["pipe", "link", "folder link", "folder", "nothing", "no attempt"])
def test_a_poll_never_blocks_and_never_follows_links_out_of_the_workspace(
    tmp_path: Path, running_folder: AttemptFolder, what: str
) -> None:
    metrics = running_folder.stream(Stream.METRICS)
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "metrics").write_bytes(b"secret")
    metrics.unlink()
    match what:
        case "pipe":
            os.mkfifo(metrics)
        case "link":
            metrics.symlink_to(secret / "metrics")
        case "folder link":
            metrics.parent.rmdir()
            metrics.parent.symlink_to(secret)
        case "folder":
            metrics.mkdir()
        case "no attempt":
            shutil.rmtree(running_folder.path)
    assert poll(tmp_path).pieces == ()


@pytest.mark.any_machine
def test_the_error_contains_the_path_of_a_folder_that_the_manager_has_no_permission_to_read(
    tmp_path: Path, running_folder: AttemptFolder, open_way: None
) -> None:
    running_folder.path.chmod(0)
    user = os.geteuid()
    if user == 0:  # Root can read all files, so the test becomes another user.
        os.seteuid(_NOBODY)
    try:
        with pytest.raises(PermissionError, match=str(running_folder.path)):
            poll(tmp_path)
    finally:
        os.seteuid(user)
        running_folder.path.chmod(0o700)


# ---- signed attempts


def sign(workspace: Workspace, key: AttemptKey, **fields: str) -> Path:
    """Write the attempt.json of a keeper.

    `fields` replaces the experiment id, job id or token.
    """
    named = {"experiment_id": "expABCDE", "job_id": "job", "token": TOKEN} | fields
    folder = workspace.attempt(key)
    folder.path.mkdir(parents=True, exist_ok=True)
    document = AttemptDocument(named["experiment_id"], named["job_id"], key, 1.0)
    folder.attempt_json.write_bytes(document.to_bytes(named["token"]))
    return folder.path


def key_of(number: int, task: str = "main-0") -> AttemptKey:
    return AttemptKey("abcde", attempt_id(number), task)


def test_the_newest_signed_attempt_of_each_task_is_found(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    keys = [key_of(number, task) for number, task in ((0, "a"), (0, "b"), (1, "a"), (10, "a"))]
    for key in keys:
        sign(workspace, key)
    found = SharedFiles(workspace).find_attempts("abcde", SIGNER)
    assert (set(found.newest), found.rejected) == ({keys[1], keys[3]}, ())
    assert SharedFiles(workspace).find_attempts("other", SIGNER).newest == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"token": "guessed"}, "attempt.json was not signed with the token of its job"),
        ({"job_id": "another"}, "attempt.json was not signed with the token of its job"),
        ({"experiment_id": "another"}, "attempt.json names another attempt"),
    ],
)
def test_an_attempt_is_reported_if_it_is_not_signed_by_a_keeper_of_the_job(
    tmp_path: Path, fields: dict[str, str], why: str
) -> None:
    workspace = Workspace(tmp_path)
    sign(workspace, key_of(1))
    path = sign(workspace, key_of(2), **fields)
    found = SharedFiles(workspace).find_attempts("abcde", SIGNER)
    assert found.newest == [key_of(1)]
    assert found.rejected == (f"ignored {path}: {why}; check who may write to the shared storage",)


def test_an_attempt_of_an_earlier_job_of_the_trial_is_ignored_without_a_warning(
    tmp_path: Path,
) -> None:
    workspace = Workspace(tmp_path)
    sign(workspace, key_of(1), job_id="before", token=f"{TOKEN} of before")
    sign(workspace, key_of(2))
    found = SharedFiles(workspace).find_attempts("abcde", SIGNER)
    assert (found.keys, found.rejected) == ((key_of(2),), ())


@pytest.mark.slow
def test_a_deeply_nested_attempt_document_is_regarded_as_unsigned(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    folder = workspace.attempt(KEY)
    folder.path.mkdir(parents=True)
    signed = AttemptDocument("expABCDE", "job", KEY, 1.0).to_bytes(TOKEN).rstrip().removesuffix(b"}")
    for depth in range(1, 1500):
        folder.attempt_json.write_bytes(signed + b', "z": ' + b"[" * depth + b"]" * depth + b"}")
        assert SharedFiles(workspace).find_attempts("abcde", SIGNER).keys == ()


@pytest.mark.any_machine
@pytest.mark.parametrize("closed", ["folder", "document"])
def test_the_attempt_of_a_keeper_is_found_beside_an_unreadable_folder_of_another_user(
    tmp_path: Path, open_way: None, closed: str
) -> None:
    workspace = Workspace(tmp_path)
    own, other = sign(workspace, key_of(1)), sign(workspace, key_of(2))
    shut = other.parent if closed == "folder" else workspace.attempt(key_of(2)).attempt_json
    shut.chmod(0)
    user = os.geteuid()
    if user == 0:  # Root can read all files, so the test becomes another user.
        os.seteuid(_NOBODY)
    try:
        found = SharedFiles(workspace).find_attempts("abcde", SIGNER)
        assert found.keys == (key_of(1),)
        assert not found.rejected or "Permission denied" in found.rejected[0]
        os.seteuid(user)
        shutil.rmtree(own.parent)
        if user == 0:
            os.seteuid(_NOBODY)
        # The unreadable attempt may be the keeper's attempt, so the manager must not ignore it.
        with pytest.raises(PermissionError):
            SharedFiles(workspace).find_attempts("abcde", SIGNER)
    finally:
        os.seteuid(user)
        shut.chmod(0o700)


def test_a_signed_attempt_is_valid_only_in_the_folder_named_in_attempt_json(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    shutil.copytree(sign(workspace, key_of(1)), workspace.attempt(key_of(2)).path)
    found = SharedFiles(workspace).find_attempts("abcde", SIGNER)
    assert found.newest == [key_of(1)]
    assert "attempt.json names another attempt" in found.rejected[0]


def test_an_attempt_folder_is_ignored_until_its_attempt_json_is_signed(
    tmp_path: Path, running_folder: AttemptFolder
) -> None:
    workspace = Workspace(tmp_path)
    running_folder.stream(Stream.METRICS).write_bytes(b"")
    found = SharedFiles(workspace).find_attempts("abcde", SIGNER)
    assert (found.keys, found.rejected) == ((), ()), "its keeper is about to sign it"
    running_folder.stream(Stream.METRICS).write_bytes(FRAME)
    found = SharedFiles(workspace).find_attempts("abcde", SIGNER)
    assert found.keys == ()
    assert "it has no attempt.json" in found.rejected[0]
    sign(workspace, KEY)
    assert SharedFiles(workspace).find_attempts("abcde", SIGNER).keys == (KEY,)


def test_an_unsigned_attempt_of_version_0_6_is_accepted_if_it_is_registered(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for name in ("0", "7"):
        workspace.attempt(AttemptKey("abcde", name, "main-0")).path.mkdir(parents=True)
    found = SharedFiles(workspace).find_attempts("abcde", replace(SIGNER, unsigned_ids=frozenset({"0"})))
    assert found.newest == [AttemptKey("abcde", "0", "main-0")]
    assert "attempts/7/main-0: it is not a registered attempt" in found.rejected[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_a_stream_file_is_not_read_if_its_owner_differs_from_the_owner_of_its_folder(
    tmp_path: Path, running_folder: AttemptFolder
) -> None:
    end(running_folder, metrics=len(FRAME))
    assert poll(tmp_path).ended is not None
    for path in (running_folder.stream(Stream.METRICS), running_folder.exit_json):
        os.chown(path, _NOBODY, _NOBODY)
    assert (poll(tmp_path).pieces, poll(tmp_path).ended) == ((), None)


def test_an_exit_file_that_is_not_signed_with_the_job_token_is_ignored(
    tmp_path: Path, running_folder: AttemptFolder
) -> None:
    ended = end(running_folder)
    running_folder.exit_json.write_bytes(exit_to_bytes(ended, "guessed"))
    assert poll(tmp_path).ended is None


def test_an_attempt_with_a_valid_signature_of_any_job_can_be_displayed(tmp_path: Path) -> None:
    workspace, secret = Workspace(tmp_path), b"secret"
    sign(workspace, key_of(1), job_id="j7", token=token_of(secret, "j7"))
    sign(workspace, key_of(2), job_id="j7", token=token_of(secret, "j8"))
    signed = [is_signed(workspace, key_of(number), "expABCDE", secret) for number in (1, 2, 3)]
    assert signed == [True, False, False]


def test_a_stream_is_read_up_to_its_recorded_final_size(
    tmp_path: Path, running_folder: AttemptFolder
) -> None:
    end(running_folder, metrics=10, stdout=4)
    assert poll(tmp_path, {Stream.METRICS: 9}).pieces == ((Stream.METRICS, 9, FRAME[9:10]),)
    assert poll(tmp_path, {Stream.METRICS: 10, Stream.STDOUT: 5}).pieces == ()
