"""Unusable files of an experiment are detected before they are opened."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from nni_manager.store import unusable_files
from nni_manager.store.unusable_files import why_no_folder, why_unusable


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [a_folder, a_pipe, a_device, a_socket])
def test_a_path_is_refused_if_a_folder_or_pipe_or_device_or_socket_is_in_place_of_the_file(
    tmp_path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "x.json"
    make(path)
    what = make.__name__.removeprefix("a_")
    assert why_unusable(path, "remove it") == f"cannot use {path}: it is a {what}, not a file; remove it"


def test_an_accessible_or_missing_file_is_accepted(tmp_path) -> None:
    (tmp_path / "x").touch()
    assert why_unusable(tmp_path / "x", "remove it", os.R_OK | os.W_OK) == ""
    assert why_unusable(tmp_path / "missing", "remove it") == ""
    assert why_unusable(tmp_path / "x" / "y", "remove it") == ""


def test_a_file_that_is_removed_during_the_check_is_accepted(tmp_path, monkeypatch) -> None:
    """For example, SQLite removes its write-ahead log when the last connection is closed."""
    path = tmp_path / "x-wal"
    path.touch()

    def removed_meanwhile(path: Path, *_: object, **__: object) -> bool:
        path.unlink()
        return False

    monkeypatch.setattr(unusable_files.os, "access", removed_meanwhile)
    assert why_unusable(path, "remove it") == ""


def test_the_error_for_an_inaccessible_file_contains_the_chmod_command(tmp_path, monkeypatch) -> None:
    (tmp_path / "x").touch()
    # Root can access all files, so the test fakes the answer that os.access() gives another user.
    monkeypatch.setattr(unusable_files.os, "access", lambda *_, **__: False)
    assert f"run `chmod u+rw {tmp_path / 'x'}`" in why_unusable(tmp_path / "x", "remove it")


def test_a_file_in_place_of_a_folder_is_refused(tmp_path) -> None:
    (tmp_path / "x").touch()
    assert (
        why_no_folder(tmp_path / "x", "move it away")
        == f"cannot use {tmp_path / 'x'}: it is not a folder; move it away"
    )
    assert why_no_folder(tmp_path, "move it away") == ""
    assert why_no_folder(tmp_path / "missing", "move it away") == ""
