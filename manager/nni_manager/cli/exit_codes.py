"""How nnictl ends: 0 when all is well, and one of these. docs/nnictl.md has them for users."""

FAILED = 1
"""Something could not be done; stderr says why, on one line for each mistake."""
INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as shells have it."""
