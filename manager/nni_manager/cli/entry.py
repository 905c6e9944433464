"""The console script nnictl: imports the program, which takes longer than Python's own start."""

from __future__ import annotations

import sys

from nni_manager.cli import INTERRUPTED


def main() -> None:
    """Run nnictl. What prevents the import is one line; Ctrl-C outside of a command ends without one."""
    try:
        from nni_manager.startup.required_extra import ManagerExtraMissing, required_extra

        try:
            with required_extra("nnictl"):
                from nni_manager.cli.main import main as nnictl
        except ManagerExtraMissing as error:
            print(f"ERROR: {error}", file=sys.stderr)
            sys.exit(1)
        nnictl()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if not _is_interrupt(error):
            raise
        sys.exit(INTERRUPTED)


def _is_interrupt(error: Exception) -> bool:
    """True if another error has taken the place of an interrupt.

    Before Python 3.12, an interrupt while an import creates a class is only the cause of a RuntimeError. An interrupt while
    pydantic builds the validator of a schema is only the last line of its SchemaError.
    """
    is_named = type(error).__name__ == "SchemaError" and str(error).rstrip().endswith("KeyboardInterrupt:")
    return is_named or isinstance(error.__cause__, KeyboardInterrupt)
