"""When nnictl resume reads an experiment file again, to compare its search space with the stored one."""

import pytest

from nni_manager.config import changed_files
from nni_manager.config.changed_files import space_may_have_changed

LATER_S = 60.0
WITH_FILE = ("searchSpacePath: space.json", "searchSpaceFile: './space.json'  # the space")


@pytest.fixture
def a_config(tmp_path):
    """Returns a function that writes an experiment file with this line, which names an older file."""

    def make(line):
        (tmp_path / "space.json").write_text("{}")
        path = tmp_path / "config.yml"
        path.write_text(f"trialCommand: 'true'\n{line}\n")
        return path

    return make


def rewritten_after(path, earlier):
    """Rewrites the file until its change time is later than that of the other; returns a time between the two."""
    before_s = earlier.lstat().st_ctime
    while path.stat().st_ctime <= before_s:
        path.write_text(path.read_text())
    return (path.stat().st_ctime + before_s) / 2


@pytest.mark.parametrize("line", [*WITH_FILE, "searchSpace: {}"])
def test_an_experiment_file_that_is_older_than_the_experiment_has_not_changed(a_config, line):
    path = a_config(line)
    now_s = path.stat().st_ctime
    assert not space_may_have_changed(path, now_s + LATER_S)
    assert space_may_have_changed(path, now_s - LATER_S)
    assert space_may_have_changed(path, now_s + 1), "a clock may be behind"


@pytest.mark.parametrize(
    ("line", "expected"), [*((line, True) for line in WITH_FILE), ("searchSpace: {}", False)]
)
def test_only_a_file_that_the_experiment_file_names_can_have_the_search_space(
    a_config, monkeypatch, line, expected
):
    monkeypatch.setattr(changed_files, "_TOLERANCE_S", 0.0)
    path = a_config(line)
    between_s = rewritten_after(path.parent / "space.json", path)
    assert space_may_have_changed(path, between_s) is expected


def test_a_link_to_an_older_file_may_have_changed_the_search_space(a_config, monkeypatch, tmp_path):
    monkeypatch.setattr(changed_files, "_TOLERANCE_S", 0.0)
    path, space = a_config(WITH_FILE[0]), tmp_path / "space.json"
    before_s = path.stat().st_ctime
    while space.lstat().st_ctime <= before_s:
        space.unlink()
        space.symlink_to(path)
    assert space_may_have_changed(path, (space.lstat().st_ctime + before_s) / 2)


@pytest.mark.parametrize("content", ["searchSpacePath: absent.json", "searchSpacePath: [1]", "- 1", "{", ""])
def test_files_that_only_the_reader_can_judge_may_have_changed(tmp_path, content):
    path = tmp_path / "config.yml"
    path.write_text(content)
    assert space_may_have_changed(path, path.stat().st_ctime + LATER_S)


def test_an_experiment_without_an_experiment_file_has_no_other_search_space(tmp_path):
    assert not space_may_have_changed(tmp_path / "absent.yml", 0.0)
