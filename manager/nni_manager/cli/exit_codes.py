"""Exit codes of nnictl other than 0 (success). docs/nnictl.md describes them for users."""

INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as in shells."""
