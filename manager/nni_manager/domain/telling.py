"""What is said of a trial where there is room for one line."""

# Their message begins with what happened, and what the trial wrote follows. Others are what the trial wrote alone.
_NOT_OF_THE_TRIAL = ("keeper lost", "job lost", "could not start", "mount", "version", "out of memory")


def telling_line(reason: str, message: str) -> str:
    """Of the lines of a trial's message, the one that says most; empty when there is none. `reason`: in `ExitReason`'s words."""
    lines = message.strip().splitlines()
    if not lines:
        return ""
    return lines[0 if reason in _NOT_OF_THE_TRIAL else -1].strip()
