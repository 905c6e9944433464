"""Exit codes of nnictl other than 0 (success). docs/nnictl.md describes them for users."""

FAILED = 1
"""An error; stderr has one line for each."""
INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as in shells."""
