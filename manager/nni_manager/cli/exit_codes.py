"""How nnictl ends."""

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
