"""The start of nnictl: an interrupt, also if a library raises another error instead."""

import pytest
from pydantic_core import SchemaError

from nni_manager.cli import INTERRUPTED, entry, main


def caused_by_an_interrupt() -> RuntimeError:
    error = RuntimeError("Error calling __set_name__ on 'field' instance")
    error.__cause__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        caused_by_an_interrupt(),
        SchemaError('Error building "literal" validator:\n  KeyboardInterrupt: '),
    ],
    ids=["interrupt", "class", "schema"],
)
def test_an_interrupt_ends_nnictl_without_a_traceback_even_if_a_library_turns_it_into_another_error(
    monkeypatch, error
):
    def interrupted() -> None:
        raise error

    monkeypatch.setattr(main, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == INTERRUPTED


@pytest.mark.parametrize(
    "error", [SchemaError("Error building"), RuntimeError("KeyboardInterrupt:"), ValueError()]
)
def test_an_error_at_the_start_of_nnictl_is_raised_if_no_interrupt_caused_it(monkeypatch, error):
    def fail() -> None:
        raise error

    monkeypatch.setattr(main, "main", fail)
    with pytest.raises(type(error)):
        entry.main()
