"""The version rule: keeper and manager must agree in the first two numbers.

Source: the version check policy of NNI's page on OpenPAI.
"""

from packaging.version import Version

# Managers before this release accept any keeper.
FIRST_CHECKING_RELEASE = (0, 6)


def versions_agree(manager: str, keeper: str) -> bool:
    """True if this keeper may serve this manager.

    The numbers are compared, not the text: 2.10 is not 2.1. A version that is invalid for PyPI agrees only with itself.
    """
    if manager == keeper:
        return True
    try:
        wanted, present = _first_two(manager), _first_two(keeper)
    except ValueError:  # InvalidVersion, or more digits than Python converts
        return False
    return wanted < FIRST_CHECKING_RELEASE or wanted == present


def _first_two(version: str) -> tuple[int, int]:
    parsed = Version(version)
    return parsed.major, parsed.minor


def installation_of(version: str) -> str:
    """How to install this version. No package index is named: its trial-keeper may be absent, or of another version."""
    return f"`pip install .` in a checkout of trial-keeper {version}"


def mismatch_message(manager: str, keeper: str) -> str:
    """Return the message of trial, log, nnictl and web page; it ends with the remedy."""
    return (
        f"cannot run: manager is version {manager} and keeper is version {keeper}, which differ in the first two numbers; "
        f"where the trial runs, run {installation_of(manager)}, or set versionCheck: false to run without this check"
    )
