"""A cached folder listing. The folder is read again only if it may have changed."""

import os
from pathlib import Path

from trial_keeper.host.cached_listing import CachedListing

LONG_AGO_S = 1_000_000_000


def test_each_listing_of_a_folder_includes_new_entries_and_excludes_deleted_entries(tmp_path: Path) -> None:
    folder = CachedListing(str(tmp_path))
    assert folder.names() == frozenset()
    (tmp_path / "a").touch()
    assert folder.names() == {"a"}
    (tmp_path / "b").mkdir()
    assert folder.names() == {"a", "b"}
    (tmp_path / "a").unlink()
    assert folder.names() == {"b"}


def test_a_recently_changed_folder_is_listed_again_despite_an_equal_mtime(
    tmp_path: Path,
) -> None:
    folder = CachedListing(str(tmp_path))
    (tmp_path / "a").touch()
    stamp = tmp_path.stat()
    assert folder.names() == {"a"}
    (tmp_path / "b").touch()
    os.utime(tmp_path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert folder.names() == {"a", "b"}


def test_a_folder_without_recent_changes_is_not_listed_again(tmp_path: Path) -> None:
    folder = CachedListing(str(tmp_path))
    os.utime(tmp_path, (LONG_AGO_S, LONG_AGO_S))
    assert folder.names() == frozenset()
    (tmp_path / "a").touch()
    os.utime(tmp_path, (LONG_AGO_S, LONG_AGO_S))
    assert folder.names() == frozenset()
    os.utime(tmp_path, (LONG_AGO_S + 1, LONG_AGO_S + 1))
    assert folder.names() == {"a"}


def test_the_listing_of_a_missing_folder_is_empty_until_the_folder_exists(tmp_path: Path) -> None:
    folder = CachedListing(str(tmp_path / "later"))
    assert folder.names() == frozenset()
    (tmp_path / "later" / "a").mkdir(parents=True)
    assert folder.names() == {"a"}
