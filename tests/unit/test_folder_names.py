"""The names in a folder that is seldom listed."""

import os
from pathlib import Path

from trial_keeper.host.cached_listing import CachedListing

LONG_AGO_S = 1_000_000_000


def test_what_comes_and_goes_is_seen_at_the_next_look(tmp_path: Path) -> None:
    folder = CachedListing(str(tmp_path))
    assert folder.names() == frozenset()
    (tmp_path / "a").touch()
    assert folder.names() == {"a"}
    (tmp_path / "b").mkdir()
    assert folder.names() == {"a", "b"}
    (tmp_path / "a").unlink()
    assert folder.names() == {"b"}


def test_a_folder_that_changed_a_moment_ago_may_change_unnoticed_so_it_is_listed_again(
    tmp_path: Path,
) -> None:
    folder = CachedListing(str(tmp_path))
    (tmp_path / "a").touch()
    stamp = tmp_path.stat()
    assert folder.names() == {"a"}
    (tmp_path / "b").touch()
    os.utime(tmp_path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert folder.names() == {"a", "b"}


def test_a_folder_that_has_been_as_it_is_for_long_is_not_listed_again(tmp_path: Path) -> None:
    folder = CachedListing(str(tmp_path))
    os.utime(tmp_path, (LONG_AGO_S, LONG_AGO_S))
    assert folder.names() == frozenset()
    (tmp_path / "a").touch()
    os.utime(tmp_path, (LONG_AGO_S, LONG_AGO_S))
    assert folder.names() == frozenset()
    os.utime(tmp_path, (LONG_AGO_S + 1, LONG_AGO_S + 1))
    assert folder.names() == {"a"}


def test_of_a_folder_that_is_not_there_nothing_is_seen_until_it_is(tmp_path: Path) -> None:
    folder = CachedListing(str(tmp_path / "later"))
    assert folder.names() == frozenset()
    (tmp_path / "later" / "a").mkdir(parents=True)
    assert folder.names() == {"a"}
