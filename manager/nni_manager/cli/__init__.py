"""nnictl: the command line of the manager."""

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
