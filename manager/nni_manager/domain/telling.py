"""What is said of a trial where there is room for one line."""

from trial_keeper.wire.reasons import ExitReason

# Their message begins with what happened, and what the trial wrote follows. Others are what the trial wrote alone.
_NOT_OF_THE_TRIAL = tuple(
    reason.value
    for reason in (
        ExitReason.KEEPER_LOST,
        ExitReason.JOB_LOST,
        ExitReason.COULD_NOT_START,
        ExitReason.MOUNT,
        ExitReason.VERSION,
        ExitReason.OUT_OF_MEMORY,
    )
)


def telling_line(reason: str, message: str) -> str:
    """Of the lines of a trial's message, the one that says most; empty when there is none. `reason`: in `ExitReason`'s words."""
    lines = message.strip().splitlines()
    if not lines:
        return ""
    return lines[0 if reason in _NOT_OF_THE_TRIAL else -1].strip()
