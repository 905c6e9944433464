"""Ranges of trial logs: they contain complete characters, have no gaps, and follow no links."""

import contextlib
import os
import shutil
import subprocess

import pytest
from another_user import as_another_user
from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st
from strangers import NOBODY

from nni_manager.domain.attempts import RegisteredAttempt
from nni_manager.engine.tokens import token_of
from nni_manager.engine.trial_logs import LogReplaced, attempts_of, output_location, read_range, sizes_of
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.rows import attempt_row
from nni_manager.store.writer import Store, log_path
from trial_keeper.wire.documents import AttemptDocument
from trial_keeper.wire.messages import AttemptKey, Stream

SECRET = b"secret"
KEYS = [AttemptKey("t1", attempt_id(number), "main-0") for number in range(10)]
KEY = KEYS[0]
# These are the attempts of another trial, t3. Its second attempt belongs to a lost job.
KEYS_WITH_LOST = [AttemptKey("t3", attempt_id(number), "main-0") for number in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return a_folder(tmp_path_factory.mktemp("logs"))


def a_folder(parent):
    made = ExperimentFolder(parent / "TESTEXPT")
    made.make()
    store = Store.create(made.database, made.collected_logs, "TESTEXPT", "{}", SECRET, 0.0)
    with contextlib.closing(store):
        rows = [attempt_row(key, number) for number, key in enumerate(KEYS)]
        rows.append(attempt_row(AttemptKey("t1", attempt_id(2), "worker-0"), 0))
        rows += [attempt_row(key, number, is_lost=number == 1) for number, key in enumerate(KEYS_WITH_LOST)]
        store.commit(rows, 0.0)
    return made


def write(folder, content, key=KEY, stream=Stream.STDOUT, *, collected=False):
    path = (
        log_path(folder.collected_logs, key, stream)
        if collected
        else folder.workspace.attempt(key).stream(stream)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def read(folder, first=0, most=256 * 1024, **options):
    return read_range(folder, "t1", Stream.STDOUT, first=first, most_bytes=most, **options)


TEXT = st.text(st.sampled_from("aé€😀\n\x1b\x00"), max_size=60)


@given(text=TEXT, most=st.integers(4, 30))
def test_consecutive_ranges_of_a_log_together_contain_the_whole_text(folder, text, most):
    write(folder, text.encode())
    read_so_far, at = "", 0
    while at < len(text.encode()):
        part = read(folder, at, most)
        assert (part.first, part.size_bytes) == (at, len(text.encode()))
        assert part.following > at
        read_so_far, at = read_so_far + part.text, part.following
    assert read_so_far == text


@given(text=TEXT, first=st.integers(-300, 300), most=st.integers(4, 30))
def test_a_range_of_a_log_has_only_complete_characters_at_any_offset(folder, text, first, most):
    content = text.encode()
    write(folder, content)
    part = read(folder, first, most)
    assert content[part.first : part.following].decode() == part.text
    asked = min(max(len(content) + first, 0) if first < 0 else first, len(content))
    assert asked <= part.first <= min(asked + 3, max(len(content), asked))


@pytest.mark.parametrize("text", ["aé€😀b", "😀😀", "€é\n€€", "éa"])
def test_a_range_that_starts_inside_a_character_starts_with_the_next_character(folder, text):
    content = text.encode()
    write(folder, content)
    for first in range(len(content)):
        # If a character starts before `first`, its remaining bytes are not text, so read() must skip them.
        expected = content[first:].decode(errors="ignore")
        at = len(content) - len(expected.encode())
        for start in (first, first - len(content)):
            part = read(folder, start)
            assert (part.text, part.first, part.following) == (expected, at, len(content))


@given(content=st.binary(max_size=80), most=st.integers(4, 30))
def test_bytes_that_are_not_valid_text_are_shown_with_replacement_characters(folder, content, most):
    write(folder, content)
    at, seen = 0, ""
    while True:
        part = read(folder, at, most, is_whole=True)
        seen += part.text
        if part.following == at:
            break
        at = part.following
    assert at == len(content)
    assert len(seen.encode("utf-8", "replace")) >= len(content) / 4


def test_an_incomplete_character_at_the_end_is_shown_when_its_remaining_bytes_arrive(folder):
    write(folder, "a€".encode()[:-1])
    assert (read(folder).text, read(folder).following) == ("a", 1)
    assert read(folder, is_whole=True).text == "a\ufffd"


def test_the_larger_of_the_collected_log_and_the_workspace_log_is_shown(folder):
    key = AttemptKey("t1", attempt_id(1), "main-0")
    write(folder, b"written, all of it", key)
    write(folder, b"collected", key, collected=True)
    assert read(folder, attempt=1).text == "written, all of it"
    write(folder, b"collected, and then all was removed", key, collected=True)
    assert read(folder, attempt=1).text.endswith("removed")
    assert sizes_of(folder, RegisteredAttempt(key, 1)) == {Stream.STDOUT: 35}


def test_the_log_of_the_newest_attempt_is_shown_unless_an_attempt_is_selected(folder):
    write(folder, b"first", KEY)
    write(folder, b"second", AttemptKey("t1", attempt_id(2), "main-0"))
    write(folder, b"worker", AttemptKey("t1", attempt_id(2), "worker-0"))
    assert read(folder).text == "second"
    assert read(folder, attempt=0).text == "first"
    assert read(folder, attempt=0, task="worker-0").text == "worker"
    assert [(each.number, each.key.task) for each in attempts_of(folder, "t1")][-2:] == [
        (2, "main-0"),
        (0, "worker-0"),
    ]


def test_the_log_of_an_attempt_of_a_lost_job_is_shown_only_if_no_other_attempt_has_a_log(folder):
    first, lost = KEYS_WITH_LOST
    write(folder, b"lost", lost)
    assert read_range(folder, "t3", Stream.STDOUT, first=0, most_bytes=99).text == "lost"
    write(folder, b"first", first)
    assert read_range(folder, "t3", Stream.STDOUT, first=0, most_bytes=99).text == "first"


def test_a_collected_log_is_shown_if_the_workspace_has_no_folder_of_its_attempt(folder):
    write(folder, b"collected", KEYS[5], collected=True)
    assert not folder.workspace.attempt(KEYS[5]).path.exists()
    assert read(folder, attempt=5).text == "collected"


@pytest.mark.parametrize("closed", ["attempts", "attempt", "stdout"])
def test_a_collected_log_is_shown_if_the_workspace_is_closed_to_this_user(tmp_path, open_way, closed):
    folder = a_folder(tmp_path)
    write(folder, b"collected", collected=True)
    written = write(folder, b"longer than collected")
    paths = {
        "attempts": folder.workspace.trial("t1").attempts,
        "attempt": folder.workspace.attempt(KEY).path,
        "stdout": written,
    }
    subprocess.run(["chown", "-R", str(NOBODY), folder.path], check=True)
    paths[closed].chmod(0)
    with as_another_user():
        assert read(folder).text == "collected"
        shutil.rmtree(folder.collected_logs)
        with pytest.raises(PermissionError):
            read(folder)


def test_a_log_is_shown_even_if_other_users_may_write_to_it(folder):
    """A trial may choose any mode for its logs, and the manager reads no results from logs."""
    folder.path.chmod(0o755)
    write(folder, b"shared", KEYS[6]).chmod(0o666)
    assert read(folder, attempt=6).text == "shared"
    folder.path.chmod(0o700)


def test_an_output_file_is_located_in_the_newest_attempt_of_its_trial(folder):
    write(folder, b"", KEYS_WITH_LOST[0])
    write(folder, b"", KEYS_WITH_LOST[1])
    location = output_location(folder, "t3", "model.pt")
    directory = folder.workspace.attempt(KEYS_WITH_LOST[1])
    assert location.path == directory.output / "model.pt"
    assert location.attempt.key == KEYS_WITH_LOST[1]
    location.path.write_bytes(b"weights")
    with open(location.open(), "rb") as file:
        assert file.read() == b"weights"
    assert output_location(folder, "t4", "model.pt") is None


def test_an_unregistered_attempt_is_listed_only_if_its_signature_is_valid(folder):
    for number, token in ((3, token_of(SECRET, "job")), (4, "guessed")):
        key = AttemptKey("t2", attempt_id(number), "main-0")
        write(folder, f"attempt {number}".encode(), key)
        document = AttemptDocument("TESTEXPT", "job", key, 1.0)
        folder.workspace.attempt(key).attempt_json.write_bytes(document.to_bytes(token))
    (shown,) = attempts_of(folder, "t2")
    assert (int(shown.key.attempt_id), shown.number) == (3, 0)


@pytest.mark.parametrize(
    "named",
    [
        {"attempt": 9},
        {"attempt": 2, "task": "nobody"},
        {"attempt": 2, "task": "../../x"},
        {"attempt": 2, "task": ""},
    ],
)
def test_the_log_of_a_missing_attempt_or_task_is_empty(folder, named):
    found = read(folder, **named)
    assert (found.size_bytes, found.first, found.text, found.following) == (0, 0, "", 0)


def test_a_symbolic_link_in_place_of_a_log_is_not_followed(folder, tmp_path):
    path = write(folder, b"x", AttemptKey("t1", attempt_id(7), "main-0"))
    path.unlink()
    (tmp_path / "stdout").write_text("a secret")
    path.symlink_to(tmp_path / "stdout")
    with pytest.raises(LogReplaced, match=r"inspect it with care$"):
        read(folder, attempt=7)
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    with pytest.raises(LogReplaced, match=r"inspect it with care$"):
        read(folder, attempt=7)
    path.parent.unlink()


def test_a_pipe_in_place_of_a_log_is_shown_as_empty_without_waiting(folder):
    path = write(folder, b"x", AttemptKey("t1", attempt_id(9), "main-0"))
    path.unlink()
    os.mkfifo(path)
    assert read(folder, attempt=9).size_bytes == 0


def test_showing_the_end_of_a_large_log_reads_only_the_shown_bytes(folder, monkeypatch):
    path = folder.workspace.attempt(AttemptKey("t1", attempt_id(8), "main-0")).stream(Stream.STDOUT)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
        file.seek(0, os.SEEK_END)
        file.write(b"the last line\n")
    read_bytes = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *given: read_bytes.append(given[1]) or pread(*given))
    part = read(folder, -1000, 1000, attempt=8)
    assert part.text.endswith("the last line\n")
    assert part.size_bytes == 100 * 2**20 + 14
    assert sum(read_bytes) <= 1003
