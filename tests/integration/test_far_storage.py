"""Streams on a FUSE file system, whose files other clients replace."""

import shutil
import subprocess
import sys

import far_storage
import pytest
from attempts import attempt_id
from fault_plan import Need
from fault_site import has_fuse
from real_experiment import wait_until

from trial_keeper.host.attempt_files import Tail
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.workspace import Workspace


@pytest.fixture
def far_folder(tmp_path):
    """A folder and its mount, as another client sees it."""
    if not has_fuse():
        pytest.skip(f"needs {Need.FUSE.value}")
    folder, mount = tmp_path / "storage", tmp_path / "mount"
    folder.mkdir()
    mount.mkdir()
    server = subprocess.Popen([sys.executable, far_storage.__file__, folder, mount, tmp_path / "faults.json"])
    try:
        wait_until(mount.is_mount, "the storage is mounted")
        try:
            yield folder, mount
        finally:
            subprocess.run(["fusermount3", "-u", "-z", mount], check=True)
    finally:
        server.kill()
        server.wait()


def test_a_stream_is_readable_again_after_its_attempt_was_removed_remotely_and_its_file_was_recreated(
    far_folder,
):
    folder, mount = far_folder
    workspace = Workspace(mount)
    attempt = workspace.attempt(AttemptKey("trial1", attempt_id(0), "main-0"))
    metrics = attempt.stream(Stream.METRICS)
    metrics.parent.mkdir(parents=True)
    metrics.touch()
    tail = Tail(attempt, workspace.trials)
    assert tail.sizes()[Stream.METRICS] == 0
    shutil.rmtree(folder / attempt.path.parent.relative_to(mount))
    metrics.parent.mkdir(parents=True)
    metrics.write_bytes(b"abc")
    assert tail.sizes()[Stream.METRICS] == 3
    # The open descriptor belongs to the removed file, so a read returns nothing. truncated_size() closes it, so that the next
    # read opens the new file.
    assert tail.read(Stream.METRICS, 0, 3) == b""
    assert tail.truncated_size(Stream.METRICS, 3) is None
    assert tail.read(Stream.METRICS, 0, 3) == b"abc"
    tail.close()
