"""The keeper's exit codes, their documentation page, and the error classes with these exit codes."""

from __future__ import annotations

import inspect
import signal
from pathlib import Path

import pytest

from trial_keeper import errors
from trial_keeper.exit_codes import KeeperExit, known, of_signal
from trial_keeper.wire.reasons import ExitReason

PAGE = Path(__file__).parents[2] / "docs" / "exit-codes.md"
ERRORS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.KeeperError)
]


@pytest.mark.parametrize("code", KeeperExit, ids=lambda code: code.name)
def test_the_exit_code_page_describes_the_meaning_and_the_remedy_of_every_code(code: KeeperExit):
    assert f"| {int(code)} | {code.name} | {code.meaning} | {code.remedy} |" in PAGE.read_text().splitlines()


@pytest.mark.parametrize("code", KeeperExit, ids=lambda code: code.name)
def test_keeper_exit_codes_differ_from_the_exit_codes_of_clusters_and_shells(code: KeeperExit):
    assert 100 <= code <= 119


@pytest.mark.parametrize("code", KeeperExit, ids=lambda code: code.name)
def test_a_keeper_exit_code_has_a_one_line_description(code: KeeperExit):
    assert known(int(code)) is code
    assert f"{code.meaning}; {code.remedy}".isprintable()
    assert code.meaning
    assert code.remedy


@pytest.mark.parametrize("code", [0, 1, 99, 119, 127, 137, 255, -9])
def test_an_exit_code_outside_the_keepers_range_has_no_description(code: int):
    assert known(code) is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.MountMissing, ExitReason.MOUNT),
        (errors.WorkspaceNotWritable, ExitReason.MOUNT),
        (errors.VersionMismatch, ExitReason.VERSION),
        (errors.CommandNotStarted, ExitReason.COULD_NOT_START),
    ],
)
def test_a_keeper_exit_code_maps_to_the_exit_reason_of_the_trial(
    kind: type[errors.KeeperError], reason: ExitReason
):
    assert KeeperExit(kind.exit_code).reason is reason


def test_the_exit_code_of_a_process_killed_by_a_signal_is_128_plus_the_signal_number():
    assert of_signal(signal.SIGKILL) == 137


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_keeper_error_has_a_keeper_exit_code(kind: type[errors.KeeperError]):
    assert kind.exit_code in set(KeeperExit)


def test_every_keeper_exit_code_has_an_error_class():
    # The keeper ends with the exit codes in `decided` without an exception, so these codes have no error class.
    decided = {KeeperExit.REFUSED, KeeperExit.TAINTED, KeeperExit.MANAGER_UNREACHABLE}
    without_a_keeper = {KeeperExit.MISSING}  # only the script of the job exits with MISSING
    assert {kind.exit_code for kind in ERRORS} == set(KeeperExit) - decided - without_a_keeper


def test_every_keeper_error_is_a_user_error_or_a_retryable_error_or_a_bug():
    kinds = (errors.KeeperUserError, errors.KeeperRetryableError, errors.KeeperBug)
    assert all(issubclass(kind, kinds) for kind in ERRORS if kind is not errors.KeeperError)


def test_the_default_message_of_an_error_is_its_docstring():
    assert str(errors.MountReadOnly()) == "The shared storage is mounted read-only."
    assert str(errors.WorkspaceNotWritable("cannot write /mnt")) == "cannot write /mnt"
