"""The meaning of a keeper's exit code.

A keeper ends with its trial's own code, or 128 + n if signal n ended the trial. A failure of the keeper itself has one of the
codes below. They lie in 100–119 because OpenPAI's runtime assigns its own meanings to most codes from 128 to 255, and shells
use 126 and 127.

Source: OpenPAI 1.8 `k8s-job-exit-spec.yaml` and the exit handler of openpai-runtime.
"""

from __future__ import annotations

from enum import IntEnum

from trial_keeper.wire.reasons import ExitReason


class KeeperExit(IntEnum):
    """A failure of the keeper itself: the exit code, its meaning, the remedy, and the reason that its trial ends with."""

    meaning: str
    remedy: str
    reason: ExitReason

    def __new__(
        cls, code: int, meaning: str, remedy: str, reason: ExitReason = ExitReason.COULD_NOT_START
    ) -> KeeperExit:
        """Create a member whose value is the code, with the other fields as attributes."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        member.remedy = remedy
        member.reason = reason
        return member

    SETTINGS = (
        100,
        "a setting of the keeper is missing or malformed",
        "start the job through nnictl, and set none of the keeper's, PAI_* or FC_* variables by hand",
    )
    WORKSPACE = (
        101,
        "the experiment's folder is not on the storage that the container sees",
        "let the container mount the storage that the manager has: on OpenPAI containerNFSMountPath and nniManagerNFSMountPath "
        "name it, on Kubernetes nfs, pvc or azureStorage",
        ExitReason.MOUNT,
    )
    WORKSPACE_WRITE = (
        102,
        "the shared storage fails when it is written to",
        "check the storage's server and the network to it; the keeper's line on stderr has the storage's own error",
        ExitReason.MOUNT,
    )
    VERSION = (
        103,
        "keeper and manager differ in the first two numbers of their version",
        "install the manager's version of trial-keeper in the image",
        ExitReason.VERSION,
    )
    COMMAND = (
        104,
        "the trial's command could not be started",
        "use an image with bash, and check that the code folder exists and the user may enter it",
    )
    MOUNT_MISSING = (
        105,
        "the path where the shared storage should be does not exist in the container",
        "mount the storage there, or name the path where it is: on OpenPAI in containerNFSMountPath",
        ExitReason.MOUNT,
    )
    MOUNT_UNREADABLE = (
        106,
        "the shared storage is there and cannot be read",
        "let the container's user read it, and see that the storage's server answers",
        ExitReason.MOUNT,
    )
    REFUSED = (
        107,
        "the manager refused the keeper, and gave it no trial",
        "look for the reason in the keeper's log; stop the job, and let `nnictl resume` make new ones",
    )
    TAINTED = (
        108,
        "a trial left something behind that the keeper could not clear away, so the job ran no other trial",
        "nothing: the manager asks for a new job; the keeper's log names what was left",
    )
    ENVIRONMENT = (
        109,
        "something the keeper depends on failed for the moment",
        "run the job again; the last lines of the keeper's log name what failed",
    )
    KEEPER_BUG = (
        110,
        "the keeper has a bug",
        "report it, with the keeper's log",
    )
    MOUNT_READ_ONLY = (
        111,
        "the shared storage is mounted read-only",
        "mount it read-write in the container",
        ExitReason.MOUNT,
    )
    MOUNT_FULL = (
        112,
        "the shared storage is full, or the user's quota there is used up",
        "free some space there, or ask for more quota",
        ExitReason.MOUNT,
    )
    MOUNT_FORBIDDEN = (
        113,
        "the container's user may not write on the shared storage, or is squashed there to one who may not",
        "export it with no_root_squash, run the container as the folder's owner (runAsUser, fsGroup), or chmod it for all",
        ExitReason.MOUNT,
    )
    CODE = (
        114,
        "the code snapshot cannot be unpacked",
        "remove the file in the experiment's folder and let `nnictl resume` pack it again",
        ExitReason.MOUNT,
    )
    MISSING = (
        115,
        "there is no trial-keeper in the container",
        "add it to the image with `images/build.sh keeper`, and name the result in the experiment file",
    )
    MANAGER_UNREACHABLE = (
        116,
        "no manager could be reached, and a job that runs many trials is given them over the network alone",
        "let containers connect to the address in manager.json (see `trial-keeper doctor`), or write reuse: false",
    )


def known(code: int) -> KeeperExit | None:
    """Return the keeper's own failure with this exit code. None for any other code."""
    return next((own for own in KeeperExit if own == code), None)


def of_signal(number: int) -> int:
    """Return the exit code of a process that a signal ended, as shells and clusters report it."""
    return 128 + number
