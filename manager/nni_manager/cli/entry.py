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
    except RuntimeError as error:
        # Before Python 3.12, an interrupt while an import creates a class is only the cause of the error.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        sys.exit(INTERRUPTED)
