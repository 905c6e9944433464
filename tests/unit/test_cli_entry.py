"""The console script nnictl, around the import of its program."""

import pytest

import nni_manager.cli.main as program
from nni_manager.cli import INTERRUPTED, entry


def raising(error, cause=None):
    def main():
        raise error from cause

    return main


@pytest.mark.parametrize(
    "nnictl",
    # Before Python 3.12, an interrupt while an import creates a class has this form.
    [raising(KeyboardInterrupt()), raising(RuntimeError("Error calling __set_name__"), KeyboardInterrupt())],
    ids=["in a command", "in an import"],
)
def test_an_interrupt_ends_nnictl_without_a_traceback(monkeypatch, nnictl):
    monkeypatch.setattr(program, "main", nnictl)
    with pytest.raises(SystemExit) as exit_:
        entry.main()
    assert exit_.value.code == INTERRUPTED


def test_an_error_that_no_interrupt_has_caused_is_raised(monkeypatch):
    monkeypatch.setattr(program, "main", raising(RuntimeError("a bug"), ValueError()))
    with pytest.raises(RuntimeError, match="a bug"):
        entry.main()
