"""The file with the jobs that an experiment may have left on its cluster."""

import os

import pytest

from nni_manager.store import leftover_jobs
from nni_manager.store.folders import ExperimentFolder, FolderUnreadable


@pytest.fixture
def folder(tmp_path):
    folder = ExperimentFolder(tmp_path / "abc11111")
    folder.make()
    return folder


def test_the_leftover_jobs_file_exists_only_while_jobs_may_be_left(folder):
    assert leftover_jobs.read(folder) == {}
    left = {"aB3dE": "remove it with `kubectl delete …`"}
    leftover_jobs.write(folder, left)
    assert leftover_jobs.read(folder) == left
    assert folder.leftover_jobs.stat().st_mode & 0o777 == 0o600
    leftover_jobs.write(folder, {})
    assert not folder.leftover_jobs.exists()
    leftover_jobs.write(folder, {})


@pytest.mark.parametrize("content", [b"", b'{"aB3', b"\xff", b"[]"])
def test_the_error_for_a_damaged_leftover_jobs_file_contains_the_remedy(folder, content):
    folder.leftover_jobs.write_bytes(content)
    with pytest.raises(
        FolderUnreadable, match=r"leftover-jobs\.json: it is damaged; look for jobs of abc11111"
    ):
        leftover_jobs.read(folder)


def test_a_pipe_in_place_of_the_leftover_jobs_file_is_refused_without_being_read(folder):
    folder.database.touch()
    os.mkfifo(folder.leftover_jobs)
    with pytest.raises(FolderUnreadable, match=r"leftover-jobs\.json: it is a pipe, not a file; remove it"):
        folder.check_files()
