"""What a keeper's exit code means.

A keeper ends with its trial's own code, or 128 + n when signal n ended the trial. When the keeper itself
could not do its work it ends with one of the codes below. They lie in 100–119 because OpenPAI's runtime gives
meanings of its own to most codes from 128 to 255, and shells use 126 and 127.

Source: OpenPAI 1.8 `k8s-job-exit-spec.yaml` and the exit handler of openpai-runtime.
"""

from __future__ import annotations

from enum import IntEnum


class KeeperExit(IntEnum):
    """A failure of the keeper itself: the exit code, what it means, and what to do about it."""

    meaning: str
    remedy: str

    def __new__(cls, code: int, meaning: str, remedy: str) -> KeeperExit:
        """A member that is its code, with its two sentences beside it."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        member.remedy = remedy
        return member

    SETTINGS = (
        100,
        "a setting of the keeper is missing or malformed",
        "start the job through nnictl, and set none of the keeper's, PAI_* or FC_* variables by hand",
    )
    WORKSPACE = (
        101,
        "the experiment's workspace is not there or cannot be read",
        "mount the shared storage in the container at the path that the experiment file names",
    )
    WORKSPACE_WRITE = (
        102,
        "the workspace cannot be written",
        "mount it read-write, free some space, and let the container's user write there",
    )
    VERSION = (
        103,
        "keeper and manager differ in the first two numbers of their version",
        "install the manager's version of trial-keeper in the image",
    )
    COMMAND = (
        104,
        "the trial's command could not be started",
        "use an image with bash, and check that the code folder exists and the user may enter it",
    )
    OUTSIDE = (
        109,
        "something the keeper depends on failed for the moment",
        "run the job again; the last lines of the keeper's log name what failed",
    )
    KEEPER_BUG = (
        110,
        "the keeper has a bug",
        "report it, with the keeper's log",
    )


def describe(code: int) -> str | None:
    """Meaning and remedy of one of the keeper's own exit codes, on one line. None for any other code."""
    return next((f"{own.meaning}; {own.remedy}" for own in KeeperExit if own == code), None)


def of_signal(number: int) -> int:
    """The exit code of a process that a signal ended, as shells and clusters count it."""
    return 128 + number
