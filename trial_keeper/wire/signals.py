"""Names of signals."""

from signal import Signals


def signal_name(number: int) -> str:
    """Return the name of a signal of this platform, such as SIGSEGV; empty if it has none."""
    try:
        return Signals(number).name
    except ValueError:
        return ""
