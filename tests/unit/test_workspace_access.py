"""Manager and keeper ignore workspace files that other users could have written, report the files, and never block on them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nni_manager.engine.shared_files import SharedFiles, Signer
from trial_keeper.errors import MountUnreadable
from trial_keeper.host.attempt_files import claim_attempt
from trial_keeper.host.doctor import CheckResult, check_manager_document
from trial_keeper.host.mount import check_mounted, unpack_code
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.documents import ManagerDocument
from trial_keeper.wire.messages import Stream
from trial_keeper.wire.workspace import AttemptFolder, Workspace

SETTINGS = KeeperSettings("EXPT", "job", "/unused", "f00d")
SIGNER = Signer("EXPT", "job", lambda _: SETTINGS.token)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace with the modes of a cluster storage."""
    workspace = Workspace(tmp_path / "EXPT")
    trial = workspace.trial("trial1")
    trial.attempts.mkdir(parents=True)
    for folder in (workspace.root, workspace.trials, trial.path):
        folder.chmod(0o755)
    trial.attempts.chmod(0o1777)
    trial.parameter_cfg.write_text("{}")
    workspace.manager_json.write_bytes(ManagerDocument("EXPT", "0.7.0", ("127.0.0.1:9",)).to_bytes())
    return workspace


def claimed(workspace: Workspace) -> AttemptFolder:
    return claim_attempt(workspace, SETTINGS, "trial1", "main-0")[1]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o027, 0o000, 0o077])
def test_files_of_a_keeper_are_writable_only_by_their_owner_under_any_umask(workspace, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = claimed(workspace)
    finally:
        os.umask(before)
    made = [folder.path.parent, folder.path, *folder.path.rglob("*")]
    assert {path.name: path.stat().st_mode & 0o777 for path in made} == {
        path.name: (0o755 if path.is_dir() else 0o644) & ~umask for path in made
    }
    assert SharedFiles(workspace).find_attempts("trial1", SIGNER).rejected == ()


@pytest.mark.parametrize(
    ("opened", "mode", "message"),
    [
        (
            lambda folder: folder.stream(Stream.METRICS),
            0o664,
            "cannot use metrics: its group can write to this file",
        ),
        (
            lambda folder: folder.attempt_json,
            0o646,
            "cannot use attempt.json: all users can write to this file",
        ),
        (lambda folder: folder.path, 0o775, "its group can write to this folder"),
        (lambda folder: folder.path.parent, 0o777, "all users can write to this folder"),
    ],
)
def test_a_signed_attempt_that_is_writable_by_other_users_is_ignored_and_reported(
    workspace, opened: Callable[[AttemptFolder], Path], mode: int, message: str
) -> None:
    folder = claimed(workspace)
    opened(folder).chmod(mode)
    found = SharedFiles(workspace).find_attempts("trial1", SIGNER)
    assert found.keys == ()
    (rejected,) = found.rejected
    assert rejected.startswith(f"ignored {folder.path}: ")
    assert message in rejected
    assert "run `chmod go-w` on it; check who may write to the shared storage" in rejected


def test_the_output_of_a_trial_is_collected_even_if_the_trial_has_made_the_output_world_writable(
    workspace,
) -> None:
    folder = claimed(workspace)
    folder.output.chmod(0o777)
    folder.stream(Stream.STDOUT).write_bytes(b"a line")
    folder.stream(Stream.STDOUT).chmod(0o666)
    files = SharedFiles(workspace)
    (key,) = files.find_attempts("trial1", SIGNER).keys
    assert files.see_attempt(key, {Stream.STDOUT: 0}, SIGNER).pieces == ((Stream.STDOUT, 0, b"a line"),)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_sparse_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 4 << 30)


TRAPS = [a_pipe, a_link_to_zeros, a_sparse_file]


@pytest.mark.parametrize("trap", TRAPS)
def test_a_keeper_starts_even_if_a_later_attempt_has_an_unreadable_document(workspace, trap) -> None:
    later = workspace.trial("trial1").attempts / "7ZZZZZZZZZZZZZZZZZZZZZZZZZ" / "main-0"
    later.mkdir(parents=True)
    trap(later / "attempt.json")
    assert claimed(workspace).attempt_json.is_file()


@pytest.mark.parametrize("trap", TRAPS)
def test_keeper_and_doctor_report_a_manager_json_that_is_not_a_document(workspace, trap) -> None:
    workspace.manager_json.unlink()
    trap(workspace.manager_json)
    with pytest.raises(
        MountUnreadable, match=r"cannot read \S+/manager.json: .*; remove it, check who may write"
    ):
        check_mounted(workspace.root.parent, workspace)
    found = check_manager_document(workspace, {}, pytest.fail)
    assert found.outcome is CheckResult.FAIL
    assert str(workspace.manager_json) in found.found
    assert found.remedy.startswith("remove it, check who may write there, and run `nnictl resume`")


def test_folders_of_unpacked_code_are_writable_only_by_their_owner(workspace, tmp_path) -> None:
    from nni_manager.engine.code_snapshot import take_snapshot

    (tmp_path / "code" / "package").mkdir(parents=True)
    (tmp_path / "code" / "package" / "module.py").touch()
    snapshot = workspace.file(take_snapshot(tmp_path / "code", workspace).name)
    before = os.umask(0)
    try:
        unpack_code(snapshot, tmp_path / "unpacked")
    finally:
        os.umask(before)
    modes = {
        path.stat().st_mode & 0o022 for path in (tmp_path / "unpacked", *(tmp_path / "unpacked").rglob("*"))
    }
    assert modes == {0}
