"""Checkpoints in the training process. A checkpoint is saved completely or not at all, and verified before it is loaded. The
number and the size of checkpoints are limited.
"""

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

import nni_sdk as nni
from nni_sdk.errors import CheckpointInvalid, CheckpointNotSaved, CheckpointTooLarge, MetricNotWritten
from nni_sdk.records import Mark, decode
from nni_sdk.trial import TrialContext

FIRST, SECOND = "01ARZ3NDEKTSV4RRFFQ69G5FA1", "01ARZ3NDEKTSV4RRFFQ69G5FA2"


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Make this process an attempt of the trial. Returns the folder of the attempt."""

    def started(attempt_id=FIRST, sources=()):
        folder = tmp_path / "attempts" / attempt_id / "0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "parameter.cfg").write_text('{"parameter_id": 5, "parameters": {}}')
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        if sources:
            (folder / "checkpoint_sources.json").write_text(json.dumps({"checkpoints": sources}))
        environ = {
            "NNI_PLATFORM": "local",
            "NNI_TRIAL_JOB_ID": "tRiAl",
            "NNI_SYS_DIR": str(folder),
            "NNI_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        }
        monkeypatch.setattr("nni_sdk.trial._trial", TrialContext(environ))
        return folder

    return started


def sign(folder):
    """Record each new manifest, like the keeper but without a signature. Returns the checkpoint sources for the next attempt."""
    manifests = [json.loads(path.read_text()) for path in sorted((folder / "checkpoints").glob("*.json"))]
    (folder / "checkpoints.json").write_text(json.dumps({"checkpoints": manifests}))
    origin = {"trial_id": "tRiAl", "attempt_id": folder.parent.name, "task": folder.name}
    return [manifest | origin | {"folder": str(folder / "checkpoints")} for manifest in reversed(manifests)]


def stream(folder):
    """The values and checkpoint marks in the metrics file of the attempt, in order."""
    decoded = decode((folder / ".nni/metrics").read_bytes(), 0)
    assert decoded.garbage == []
    found = sorted([*decoded.records, *decoded.marks])
    return [each.checkpoint if isinstance(each, Mark) else (each.sequence, each.value) for each in found]


def loaded(name="model"):
    return Path(nni.load_checkpoint(), name).read_text()


def saving(text):
    def save(folder):
        with open(os.path.join(folder, "model"), "w") as file:
            file.write(text)

    return save


def test_a_checkpoint_is_loaded_unchanged_if_it_comes_from_a_file_or_a_folder_or_a_save_function(
    attempt, tmp_path
):
    attempt()
    model = tmp_path / "model.pt"
    model.write_text("weights")
    nni.save_checkpoint(model)
    assert os.path.basename(nni.load_checkpoint()) == "model.pt"
    assert Path(nni.load_checkpoint()).read_text() == "weights"

    (tmp_path / "all/inner").mkdir(parents=True)
    (tmp_path / "all/inner/a").write_text("1")
    nni.save_checkpoint(str(tmp_path / "all"))
    assert loaded("inner/a") == "1"

    nni.save_checkpoint(saving("written"))
    assert loaded() == "written"


def test_load_checkpoint_returns_none_if_there_is_no_checkpoint(attempt):
    folder = attempt()
    assert nni.load_checkpoint() is None
    nni.report_intermediate_result(1)
    assert stream(folder) == [(0, "1")]


def test_the_next_attempt_continues_from_the_checkpoint_and_records_which_attempt_saved_it(attempt):
    folder = attempt()
    nni.report_intermediate_result(0.1)
    nni.save_checkpoint(saving("after step 0"))
    nni.report_intermediate_result(0.2)
    assert stream(folder) == [(0, "0.1"), "000001", (1, "0.2")]

    sources = sign(folder)
    folder = attempt(SECOND, sources)
    assert loaded() == "after step 0"
    nni.report_intermediate_result(0.2)
    nni.save_checkpoint(saving("after step 1"))
    assert stream(folder) == ["000001", (1, "0.2"), "000001"]
    (continued, saved) = decode((folder / ".nni/metrics").read_bytes(), 0).marks
    assert (continued.offset, continued.attempt_id, continued.task) == (0, FIRST, "0")
    assert continued.load
    assert saved.attempt_id is None


def test_a_trial_numbers_its_own_results_from_zero_if_it_continues_a_parent_trial(attempt):
    folder = attempt()
    nni.report_intermediate_result(0.1)
    nni.save_checkpoint(saving("parent's"))
    sources = [source | {"trial_id": "parent"} for source in sign(folder)]
    folder = attempt(SECOND, sources)
    assert loaded() == "parent's"
    nni.report_intermediate_result(0.2)
    assert stream(folder) == ["000001", (0, "0.2")]


def test_a_process_writes_no_record_if_it_loads_a_checkpoint_but_reports_no_results(attempt):
    sources = sign_of_one(attempt)
    folder = attempt(SECOND, sources)
    assert nni.load_checkpoint()
    assert not (folder / ".nni/metrics").exists()


def test_reloading_a_checkpoint_resets_the_sequence_number_of_results(attempt):
    folder = attempt()
    nni.report_intermediate_result(1)
    nni.save_checkpoint(saving("good"))
    nni.report_intermediate_result(2)
    assert "good" in loaded()
    nni.report_intermediate_result(3)
    assert stream(folder) == [(0, "1"), "000001", (1, "2"), "000001", (1, "3")]


def sign_of_one(attempt):
    folder = attempt()
    nni.save_checkpoint(saving("first"))
    nni.save_checkpoint(saving("second"))
    return sign(folder)


def test_a_checkpoint_with_changed_files_is_skipped_and_the_previous_checkpoint_is_loaded(attempt, capfd):
    sources = sign_of_one(attempt)
    with open(os.path.join(sources[0]["folder"], "000002/model"), "a") as file:
        file.write("!")
    attempt(SECOND, sources)
    assert loaded() == "first"
    assert "000002: its files have changed since they were saved" in capfd.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "model", 1),
        lambda folder: (folder / "model").unlink(),
        lambda folder: (folder / "model").rename(folder / "other"),
        lambda folder: (folder / "more").touch(),
        lambda folder: ((folder / "model").unlink(), (folder / "model").mkdir()),
        lambda folder: (
            (folder / "model").rename(folder.parent / "x"),
            (folder / "model").symlink_to("../x"),
        ),
    ],
    ids=["truncated", "removed", "renamed", "added", "replaced", "linked"],
)
def test_load_checkpoint_raises_an_error_with_a_remedy_if_every_checkpoint_is_invalid(
    attempt, tmp_path, damage
):
    sources = sign_of_one(attempt)[:1]
    damage(tmp_path / "attempts" / FIRST / "0/checkpoints/000002")
    attempt(SECOND, sources)
    with pytest.raises(
        CheckpointInvalid, match=r"cannot use checkpoint .*000002: .*To start at the first step, remove"
    ):
        nni.load_checkpoint()


def test_a_checkpoint_is_loaded_only_if_the_keeper_has_verified_it(attempt):
    sign_of_one(attempt)
    attempt(SECOND)
    assert nni.load_checkpoint() is None


def test_save_checkpoint_keeps_the_newest_checkpoints_and_at_least_one_signed_checkpoint(attempt):
    folder = attempt()

    def names():
        return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())

    nni.save_checkpoint(saving("1"), keep=1)
    sign(folder)
    nni.save_checkpoint(saving("2"), keep=1)
    # Despite keep=1, the first checkpoint stays until the second checkpoint is signed.
    assert names() == ["000001", "000002"]
    sign(folder)
    nni.save_checkpoint(saving("3"), keep=1)
    assert names() == ["000002", "000003"]
    nni.save_checkpoint(saving("4"), keep=3)
    assert names() == ["000002", "000003", "000004"]


def test_checkpoints_of_earlier_attempts_are_removed_after_enough_new_checkpoints_are_saved(attempt):
    sources = sign_of_one(attempt)
    old = sources[0]["folder"]
    folder = attempt(SECOND, sources)
    nni.save_checkpoint(saving("1"))
    sign(folder)
    assert os.path.exists(old)
    nni.save_checkpoint(saving("2"))
    assert not os.path.exists(old)
    assert "2" in loaded()


def test_a_checkpoint_over_the_size_limit_is_not_saved(attempt):
    folder = attempt()
    with pytest.raises(CheckpointTooLarge, match="more than 3 bytes; save less, or raise the limit"):
        nni.save_checkpoint(saving("four"), max_bytes=3)
    assert os.listdir(folder / "checkpoints") == []
    assert nni.load_checkpoint() is None


def test_an_exception_in_the_save_function_leaves_no_files(attempt):
    folder = attempt()

    def fails(path):
        saving("half")(path)
        raise KeyError("lr")

    with pytest.raises(KeyError):
        nni.save_checkpoint(fails)
    assert os.listdir(folder / "checkpoints") == []


def test_the_error_for_a_missing_source_file_contains_its_path(attempt, tmp_path):
    attempt()
    with pytest.raises(CheckpointNotSaved, match=r"cannot save a checkpoint: .*/absent: No such file"):
        nni.save_checkpoint(tmp_path / "absent")


def test_a_checkpoint_with_a_symbolic_link_is_refused(attempt):
    attempt()
    with pytest.raises(CheckpointInvalid, match="cannot save 'model': it is a link"):
        nni.save_checkpoint(lambda folder: os.symlink("/etc/passwd", os.path.join(folder, "model")))


def test_checkpoint_files_are_not_writable_by_other_users(attempt):
    attempt()
    closed = []

    def save(folder):
        closed.append(os.stat(folder).st_mode & 0o777)
        saving("1")(folder)

    before = os.umask(0)
    try:
        path = nni.save_checkpoint(save)
    finally:
        os.umask(before)
    assert closed == [0o700]
    modes = [os.stat(each).st_mode & 0o777 for each in (path, os.path.join(path, "model"))]
    assert modes == [0o755, 0o644]


def test_an_incomplete_checkpoint_of_a_killed_process_is_not_loaded(attempt):
    folder = attempt()
    nni.save_checkpoint(saving("whole"))
    # These files simulate a process that was killed after it had renamed the files of a checkpoint and before it renamed the
    # manifest.
    shutil.copytree(folder / "checkpoints/000001", folder / "checkpoints/000002")
    (folder / "checkpoints/.new-1-3").mkdir()
    assert nni.load_checkpoint().endswith("000001")
    assert nni.save_checkpoint(saving("next")).endswith("000003")


def test_threads_create_separate_checkpoints_if_they_save_at_the_same_time(attempt):
    folder = attempt()
    nni.report_intermediate_result(1)
    both = threading.Barrier(2)

    def save(path):
        both.wait(DEADLINE_S)
        saving("1")(path)

    threads = [threading.Thread(target=nni.save_checkpoint, args=(save,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()) == [
        "000001",
        "000002",
    ]
    assert sorted(stream(folder)[1:]) == ["000001", "000002"]


def test_no_checkpoint_remains_if_a_save_fails_before_the_manifest_is_written(attempt, monkeypatch):
    folder = attempt()
    nni.report_intermediate_result(1)
    nni.save_checkpoint(saving("whole"))
    nni.report_intermediate_result(2)
    with monkeypatch.context() as patched:
        patched.setattr("nni_sdk.checkpoints._replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            nni.save_checkpoint(saving("without a manifest"))
    sources = sign(folder)
    attempt(SECOND, sources)
    assert [source["name"] for source in sources] == ["000001"]
    assert loaded() == "whole"


def test_a_failed_save_removes_its_files_and_its_number_is_not_reused_if_its_mark_was_written(
    attempt, monkeypatch
):
    folder = attempt()
    with monkeypatch.context() as patched:
        patched.setattr(TrialContext, "append", full_disk)
        with pytest.raises(MetricNotWritten):
            nni.save_checkpoint(saving("without a mark"))
    assert [*(folder / "checkpoints").iterdir()] == []
    with monkeypatch.context() as patched:
        patched.setattr("nni_sdk.checkpoints.os.replace", full_disk)
        with pytest.raises(CheckpointNotSaved, match="No space left on device"):
            nni.save_checkpoint(saving("without a manifest"))
    assert [path.name for path in (folder / "checkpoints").rglob("*")] == ["000001"]
    assert Path(nni.save_checkpoint(saving("whole"))).name == "000002"
    assert stream(folder) == ["000001", "000002"]


def full_disk(*_):
    raise MetricNotWritten(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_checkpoint_is_saved_even_if_old_checkpoints_cannot_be_removed(attempt, monkeypatch):
    attempt()
    monkeypatch.setattr("nni_sdk.checkpoints._remove_old", full_disk)
    nni.save_checkpoint(saving("whole"))
    assert loaded() == "whole"


def test_a_checkpoint_source_that_is_neither_a_path_nor_a_function_is_refused(attempt):
    folder = attempt()
    with pytest.raises(
        CheckpointInvalid, match=r"cannot save a dict as a checkpoint: .* pass its path, or pass a function"
    ):
        nni.save_checkpoint({"model": 1})
    assert [*(folder / "checkpoints").iterdir()] == []


def test_the_function_checkpoint_dir_returns_the_checkpoint_folder_of_the_trial(attempt, tmp_path):
    attempt()
    assert nni.checkpoint_dir() == str(tmp_path / "checkpoints")


def test_checkpoints_outside_an_experiment_are_kept_until_the_process_exits(monkeypatch):
    monkeypatch.setattr("nni_sdk.trial._trial", TrialContext({}))
    assert os.path.isdir(nni.checkpoint_dir())
    assert nni.load_checkpoint() is None
    nni.save_checkpoint(saving("1"), keep=1)
    nni.save_checkpoint(saving("2"), keep=1)
    assert loaded() == "2"
    assert len(os.listdir(os.path.join(nni.checkpoint_dir(), "checkpoints"))) == 2
