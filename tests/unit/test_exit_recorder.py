"""The keeper's record of the ends of attempts in the workspace."""

import contextlib
import shutil
import types

import pytest
from attempts import attempt_id

from trial_keeper.core.events import RecordExit
from trial_keeper.host.exit_recorder import ExitRecorder
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import AttemptKey, Stream, TrialEnded
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace


@pytest.fixture
def place(tmp_path):
    """A recorder, its workspace, and the events that it has reported."""
    workspace, handled = Workspace(tmp_path), []

    def writing(write):
        with contextlib.suppress(OSError):
            write()

    context = types.SimpleNamespace(
        workspace=workspace,
        settings=KeeperSettings("EXPT", "job", str(tmp_path), "f00d"),
        log=types.SimpleNamespace(writing=writing),
        handle=handled.append,
    )
    return types.SimpleNamespace(recorder=ExitRecorder(context), workspace=workspace, handled=handled)


def end(place, trial_id):
    """Record the end of an attempt; return its exit.json."""
    key = AttemptKey(trial_id, attempt_id(0), "main-0")
    folder = place.workspace.attempt(key)
    folder.path.mkdir(parents=True, exist_ok=True)
    ended = TrialEnded(key, ExitReason.SUCCEEDED, 0, 10.0, 11.0, dict.fromkeys(Stream, 0))
    return folder, RecordExit(ended)


def test_a_missing_attempt_folder_does_not_block_the_recording_of_a_later_trial_end(place):
    lost, record_lost = end(place, "t0")
    shutil.rmtree(lost.path)
    place.recorder.record(record_lost)
    assert len(place.handled) == 1
    later, record_later = end(place, "t1")
    place.recorder.record(record_later)
    assert later.exit_json.exists()
    with pytest.raises(FileNotFoundError):
        place.recorder.retry()
    lost.path.mkdir()
    place.recorder.retry()
    assert lost.exit_json.exists()
    place.recorder.retry()
