"""The keeper's exit codes, their page, and the errors that carry them."""

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
def test_the_page_says_what_the_code_says(code: KeeperExit):
    assert f"| {int(code)} | {code.name} | {code.meaning} | {code.remedy} |" in PAGE.read_text().splitlines()


@pytest.mark.parametrize("code", KeeperExit, ids=lambda code: code.name)
def test_a_code_of_the_keeper_is_one_clusters_and_shells_leave_alone(code: KeeperExit):
    assert 100 <= code <= 119


@pytest.mark.parametrize("code", KeeperExit, ids=lambda code: code.name)
def test_a_code_of_the_keeper_is_described_on_one_line(code: KeeperExit):
    assert known(int(code)) is code
    assert f"{code.meaning}; {code.remedy}".isprintable()
    assert code.meaning
    assert code.remedy


@pytest.mark.parametrize("code", [0, 1, 99, 119, 127, 137, 255, -9])
def test_any_other_code_has_no_description(code: int):
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
def test_a_code_of_the_keeper_is_the_reason_its_trial_ends_with(
    kind: type[errors.KeeperError], reason: ExitReason
):
    assert KeeperExit(kind.exit_code).reason is reason


def test_a_signal_is_counted_from_128():
    assert of_signal(signal.SIGKILL) == 137


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_ends_the_keeper_with_one_of_its_codes(kind: type[errors.KeeperError]):
    assert kind.exit_code in set(KeeperExit)


def test_every_code_has_an_error():
    # By a keeper that works as it should.
    decided = {KeeperExit.REFUSED, KeeperExit.TAINTED, KeeperExit.MANAGER_UNREACHABLE}
    without_a_keeper = {KeeperExit.MISSING}  # the job's script says so
    assert {kind.exit_code for kind in ERRORS} == set(KeeperExit) - decided - without_a_keeper


def test_every_error_but_the_base_says_who_must_act():
    kinds = (errors.UserError, errors.RetryableError, errors.KeeperBug)
    assert all(issubclass(kind, kinds) for kind in ERRORS if kind is not errors.KeeperError)


def test_an_error_without_a_message_speaks_with_its_docstring():
    assert str(errors.MountReadOnly()) == "The shared storage is mounted read-only."
    assert str(errors.WorkspaceNotWritable("cannot write /mnt")) == "cannot write /mnt"
