"""The version of the training code: its digest and its git commit."""

import shutil
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.provenance import CodeVersion, code_at
from nni_manager.engine.code_snapshot import MAX_FILES, take_snapshot
from nni_manager.engine.code_version import code_version
from trial_keeper.wire.workspace import Workspace


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "repo/code"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    return folder


def git(folder, *arguments):
    who = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def version_of(code, tmp_path):
    return code_version(code, tmp_path / "workspace", 5.0)


def test_a_code_version_outside_git_has_the_snapshot_digest_and_no_commit(code, tmp_path):
    workspace = Workspace(tmp_path / "workspace")
    workspace.root.mkdir()
    found = version_of(code, tmp_path)
    assert take_snapshot(code, workspace).name == f"code-{found.digest}.tar.gz"
    assert (found.since_s, found.git_commit, found.is_dirty) == (5.0, None, None)


def test_two_code_versions_are_the_same_if_they_differ_only_in_their_time():
    one = CodeVersion(1.0, "digest", "commit", is_dirty=False)
    assert one.is_same(replace(one, since_s=2.0))
    for other in ({"digest": "other"}, {"git_commit": "other"}, {"is_dirty": True}):
        assert not one.is_same(replace(one, **other))


def test_a_code_folder_with_too_many_files_has_no_digest(code, tmp_path):
    for number in range(MAX_FILES + 1):
        (code / str(number)).touch()
    assert version_of(code, tmp_path).digest == ""


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
def test_the_commit_is_marked_dirty_if_the_code_folder_differs_from_the_commit(code, tmp_path, monkeypatch):
    # The shell that runs the tests may have set GIT_DIR to another repository, so the test removes the variable. It sets the
    # variable first, because delenv() fails for a missing variable.
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    repository = code.parent
    monkeypatch.delenv("GIT_DIR")
    git(repository, "init")
    (repository / ".gitignore").write_text("*.log\n")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "first")
    commit = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")

    clean = version_of(code, tmp_path)
    (code / "run.log").touch()
    (repository / "README").touch()
    unrelated = version_of(code, tmp_path)
    (code / "model.py").touch()
    untracked = version_of(code, tmp_path)

    assert {each.git_commit for each in (clean, unrelated, untracked)} == {commit}
    assert (clean.is_dirty, unrelated.is_dirty, untracked.is_dirty) == (False, False, True)


@given(st.lists(st.floats(0, 1e9), max_size=5), st.none() | st.floats(0, 1e9))
def test_the_code_version_at_a_time_is_the_latest_version_up_to_that_time(times, at_s):
    versions = [CodeVersion(since_s, "") for since_s in sorted(times)]
    found = code_at(versions, at_s)
    before = [each for each in versions if at_s is None or each.since_s <= at_s]
    assert found == (before[-1] if before else None)
