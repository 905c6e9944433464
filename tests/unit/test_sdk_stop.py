"""`should_stop` and `stop_reason`, and the two files through which keeper and SDK communicate."""

import os

import pytest

import nni_sdk as nni
from nni_sdk.errors import EnvironmentIncomplete
from nni_sdk.trial import TrialContext
from trial_keeper.wire.documents import stop_notice_to_bytes
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import AttemptFolder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make this process an attempt of a trial. Returns the folder of the attempt."""
    (tmp_path / ".nni").mkdir()
    environ = {"NNI_PLATFORM": "local", "NNI_SYS_DIR": str(tmp_path)}
    monkeypatch.setattr("nni_sdk.trial._trial", TrialContext(environ))
    return AttemptFolder(tmp_path)


def test_the_function_should_stop_returns_true_after_the_keeper_has_written_a_stop_notice(folder):
    assert (nni.should_stop(), nni.stop_reason()) == (False, None)
    folder.stop_notice_json.write_bytes(stop_notice_to_bytes(ExitReason.EARLY_STOPPED))
    assert (nni.should_stop(), nni.stop_reason()) == (True, "early stopped")


@pytest.mark.parametrize("ask", [nni.should_stop, nni.stop_reason])
def test_only_the_first_query_for_a_stop_creates_the_file_that_requests_a_stop_notice(folder, ask):
    assert not folder.awaits_stop_notice.exists()
    ask()
    assert folder.awaits_stop_notice.exists()
    folder.awaits_stop_notice.unlink()
    ask()
    assert not folder.awaits_stop_notice.exists(), "later questions cost one system call"


@pytest.mark.parametrize("reason", ExitReason)
def test_the_function_stop_reason_returns_the_reason_that_the_keeper_records(folder, reason):
    folder.stop_notice_json.write_bytes(stop_notice_to_bytes(reason))
    assert nni.stop_reason() == reason.value


def test_a_stop_notice_is_read_even_if_the_folder_is_not_writable(folder):
    os.rmdir(folder.path / ".nni")
    assert not nni.should_stop()
    folder.stop_notice_json.write_bytes(stop_notice_to_bytes(ExitReason.TIME_LIMIT))
    assert nni.stop_reason() == "time limit"


def test_code_outside_an_experiment_is_never_asked_to_stop(monkeypatch):
    monkeypatch.setattr("nni_sdk.trial._trial", TrialContext({}))
    assert (nni.should_stop(), nni.stop_reason()) == (False, None)


def test_the_error_for_a_missing_environment_variable_contains_the_name_of_the_variable(monkeypatch):
    monkeypatch.setattr("nni_sdk.trial._trial", TrialContext({"NNI_PLATFORM": "local"}))
    with pytest.raises(EnvironmentIncomplete, match="NNI_SYS_DIR is not"):
        nni.should_stop()
