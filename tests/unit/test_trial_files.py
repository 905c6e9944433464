"""What the manager writes into a workspace, and what it sees there of what others wrote."""

import os
import shutil
import stat
from pathlib import Path

import pytest

import nni_sdk
from nni_manager.domain.trial import Trial
from nni_manager.engine.trial_files import Seen, newest_attempts, see_attempt, write_experiment, write_trial
from nni_manager.store.folders import ExperimentFolder
from nni_manager.training_services.base import Placement
from nni_sdk.records import encode
from trial_keeper.wire.messages import AttemptKey, Stream, TrialEnded
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import (
    AttemptFolder,
    ManagerDocument,
    TrialDocument,
    Workspace,
    exit_to_bytes,
)

DOCUMENT = ManagerDocument("expABCDE", "0.6.0", ("127.0.0.1:1",))
KEY = AttemptKey("abcde", 0, "main-0")
_NOBODY = 65534
FRAME = encode(0, "abcde", "PERIODICAL", 0, 1.5)
SDK = {path.name: path.read_bytes() for path in Path(nni_sdk.__file__).parent.glob("*.py")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_workspace_has_the_managers_own_sdk_and_nothing_beside_it(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_experiment(workspace, DOCUMENT, "exit\n")
    assert [path.name for path in workspace.sdk.iterdir()] == ["nni_sdk"]
    assert contents(workspace.sdk / "nni_sdk") == SDK
    assert {"__init__.py", "trial.py", "records.py"} <= SDK.keys()


def test_a_later_manager_touches_only_what_differs_and_swaps_it_whole(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_experiment(workspace, DOCUMENT, "exit\n")
    folder = workspace.sdk / "nni_sdk"
    (folder / "errors.py").unlink()
    (folder / "trial.py").write_bytes(b"# of an earlier version")
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    with (folder / "trial.py").open("rb") as being_read:
        write_experiment(workspace, DOCUMENT, "exit\n")
        assert being_read.read() == b"# of an earlier version"
    assert contents(folder) == SDK
    touched = {path.name for path in folder.iterdir() if path.stat().st_ino != before.get(path.name)}
    assert touched == {"errors.py", "trial.py"}


@pytest.mark.parametrize("reuses_jobs", [False, True])
def test_the_folder_of_all_trials_is_open_to_keepers_only_that_are_given_trials(
    tmp_path: Path, reuses_jobs: bool
) -> None:
    (tmp_path / "storage").mkdir()
    folder = ExperimentFolder(tmp_path / "expABCDE")
    before = os.umask(0o077)
    try:
        folder.make(tmp_path / "storage", reuses_jobs=reuses_jobs)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.workspace.trials.stat().st_mode) == (0o1777 if reuses_jobs else 0o755)


def a_trial() -> Trial:
    return Trial("abcde", 0, {"lr": 0.1}, {}, 1.0, "job")


def test_a_trial_is_written_again_over_what_an_earlier_try_has_written(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.trials.mkdir()
    for command in ("first", "second"):
        write_trial(workspace, a_trial(), command, Placement(None, None), None)
    folder = workspace.trial("abcde")
    assert TrialDocument.from_bytes(folder.trial_json.read_bytes()).command == "second"
    assert stat.S_IMODE(folder.attempts.stat().st_mode) == 0o1777


@pytest.mark.parametrize("how", ["folder", "attempts", "link"])
def test_nothing_is_written_into_a_trials_folder_that_another_user_has_made(tmp_path: Path, how: str) -> None:
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
    with pytest.raises(FileExistsError, match="another user made this"):
        write_trial(workspace, a_trial(), "true", Placement(None, None), None)
    assert not folder.trial_json.exists()
    assert list((tmp_path / "theirs").iterdir()) == []


# ---- looks at what keepers leave


@pytest.fixture
def left(tmp_path: Path) -> AttemptFolder:
    """An attempt's folder as a keeper makes it, of a trial that runs."""
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
    folder.exit_json.write_bytes(exit_to_bytes(ended))
    return ended


def look(tmp_path: Path, offsets: dict[Stream, int] | None = None, *, is_over: bool = False) -> Seen:
    return see_attempt(Workspace(tmp_path), KEY, offsets or {Stream.METRICS: 0}, is_over=is_over)


def test_a_look_brings_what_follows_the_offsets(tmp_path: Path, left: AttemptFolder) -> None:
    seen = look(tmp_path, {Stream.METRICS: 5, Stream.STDOUT: 0, Stream.STDERR: 0})
    assert seen == Seen(KEY, True, ((Stream.METRICS, 5, FRAME[5:]), (Stream.STDOUT, 0, b"hello\n")), None)
    assert look(tmp_path, {Stream.METRICS: len(FRAME)}).pieces == ()


def test_an_attempt_begins_with_the_first_word_of_its_keeper(tmp_path: Path, left: AttemptFolder) -> None:
    left.stream(Stream.METRICS).write_bytes(b"")
    assert look(tmp_path).has_begun
    left.stream(Stream.KEEPER).write_bytes(b"")
    assert not look(tmp_path).has_begun, "its code may still be unpacked"


def test_a_long_file_is_read_in_pieces(tmp_path: Path, left: AttemptFolder) -> None:
    left.stream(Stream.STDOUT).write_bytes(b"x" * 600_000)
    offset, sizes = 0, []
    while pieces := look(tmp_path, {Stream.STDOUT: offset}).pieces:
        sizes.append(len(pieces[0][2]))
        offset += sizes[-1]
    assert sizes == [262_144, 262_144, 75_712]


def test_what_was_written_after_the_end_does_not_count(tmp_path: Path, left: AttemptFolder) -> None:
    ended = end(left, metrics=10, stdout=0)
    seen = look(tmp_path, {Stream.METRICS: 0, Stream.STDOUT: 0})
    assert seen == Seen(KEY, True, ((Stream.METRICS, 0, FRAME[:10]),), ended)
    assert look(tmp_path, {Stream.METRICS: 12}).pieces == ()


def test_zeros_that_stand_for_what_has_not_come_are_waited_for_until_nothing_more_can_come(
    tmp_path: Path, left: AttemptFolder
) -> None:
    metrics = left.stream(Stream.METRICS)
    metrics.write_bytes(FRAME + bytes(len(FRAME)) + FRAME)
    assert look(tmp_path).pieces == ((Stream.METRICS, 0, FRAME),)
    assert look(tmp_path, {Stream.METRICS: len(FRAME)}).pieces == ()
    assert len(look(tmp_path, is_over=True).pieces[0][2]) == 3 * len(FRAME)
    end(left, metrics=3 * len(FRAME))
    assert len(look(tmp_path).pieces[0][2]) == 3 * len(FRAME)


@pytest.mark.parametrize("content", [b"", b"{", b'{"trial_id": "abcde"}', b"x" * 100_000])
def test_an_end_that_is_not_whole_is_none(tmp_path: Path, left: AttemptFolder, content: bytes) -> None:
    left.exit_json.write_bytes(content)
    assert look(tmp_path).ended is None


def test_an_end_of_another_attempt_is_none(tmp_path: Path, left: AttemptFolder) -> None:
    end(left, AttemptKey("another", 0, "main-0"), metrics=0)
    assert look(tmp_path).ended is None


@pytest.mark.parametrize("what", ["pipe", "link", "folder link", "folder", "nothing", "no attempt"])
def test_a_look_neither_waits_nor_leads_outside(tmp_path: Path, left: AttemptFolder, what: str) -> None:
    metrics = left.stream(Stream.METRICS)
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
            shutil.rmtree(left.path)
    assert look(tmp_path).pieces == ()


def test_a_folder_that_the_manager_may_not_read_is_an_error_that_names_it(
    tmp_path: Path, left: AttemptFolder, open_way: None
) -> None:
    left.path.chmod(0)
    user = os.geteuid()
    if user == 0:  # who may read everything
        os.seteuid(_NOBODY)
    try:
        with pytest.raises(PermissionError, match=str(left.path)):
            look(tmp_path)
    finally:
        os.seteuid(user)
        left.path.chmod(0o700)


def test_the_newest_attempt_of_each_task_is_the_one_to_look_at(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    keys = [AttemptKey("abcde", number, task) for number, task in ((0, "a"), (0, "b"), (1, "a"), (10, "a"))]
    for key in keys:
        workspace.attempt(key).path.mkdir(parents=True)
    assert set(newest_attempts(workspace, "abcde")) == {keys[1], keys[3]}
    assert newest_attempts(workspace, "other") == []
