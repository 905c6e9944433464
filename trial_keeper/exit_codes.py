"""The meaning of a keeper's exit code.

A keeper ends with its trial's own code, or 128 + n if signal n ended the trial. A failure of the keeper itself has one of the
codes below. These codes are from 100 to 119: OpenPAI's runtime assigns its own meanings to most codes from 128 to 255, and shells
use 126 and 127.

Source: OpenPAI 1.8 `k8s-job-exit-spec.yaml` and the exit handler of openpai-runtime.
"""

from __future__ import annotations

from enum import IntEnum

from trial_keeper.wire.reasons import ExitReason


class KeeperExit(IntEnum):
    """A failure of the keeper itself: the exit code, its meaning, the remedy, and the trial's exit reason."""

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
        "start the job with nnictl, and set no TRIAL_KEEPER_*, PAI_* or FC_* variable by hand",
    )
    WORKSPACE = (
        101,
        "the experiment's folder is not on the storage that the container mounts",
        "mount the manager's storage in the container: set containerNFSMountPath and nniManagerNFSMountPath on OpenPAI, or nfs, "
        "pvc or azureStorage on Kubernetes",
        ExitReason.MOUNT,
    )
    WORKSPACE_WRITE = (
        102,
        "a write to the shared storage failed",
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
        "use an image with bash, and check that the code folder exists and that the container's user may enter it",
    )
    MOUNT_MISSING = (
        105,
        "the mount point of the shared storage does not exist in the container",
        "mount the storage at that path, or correct the path (on OpenPAI containerNFSMountPath)",
        ExitReason.MOUNT,
    )
    MOUNT_UNREADABLE = (
        106,
        "the shared storage is mounted but cannot be read",
        "let the container's user read the storage, and check that the storage's server responds",
        ExitReason.MOUNT,
    )
    REFUSED = (
        107,
        "the manager refused the keeper",
        "read the reason in the keeper's log, stop the job, and run `nnictl resume` to start new jobs",
    )
    TAINTED = (
        108,
        "a trial left something that the keeper could not clean up, so the job ran no other trial",
        "do nothing: the manager starts a new job; the keeper's log names the remains",
    )
    ENVIRONMENT = (
        109,
        "something outside the keeper failed temporarily",
        "run the job again; the last lines of the keeper's log name the failure",
    )
    KEEPER_BUG = (
        110,
        "the keeper has a bug",
        "report the bug, with the keeper's log",
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
        "free some space on the storage, or request more quota",
        ExitReason.MOUNT,
    )
    MOUNT_FORBIDDEN = (
        113,
        "the container's user, or the user to whom the storage's server squashes it, may not write to the shared storage",
        "export the storage with no_root_squash, run the container as the folder's owner (runAsUser, fsGroup), or make it "
        "writable for all with chmod 1777",
        ExitReason.MOUNT,
    )
    CODE = (
        114,
        "the code snapshot cannot be unpacked",
        "remove the snapshot from the experiment's folder, and run `nnictl resume` to pack it again",
        ExitReason.MOUNT,
    )
    MISSING = (
        115,
        "there is no trial-keeper in the container",
        "install trial-keeper-bundle in nnictl's Python, or build an image with `images/build.sh keeper` and name it in the "
        "experiment file",
    )
    MANAGER_UNREACHABLE = (
        116,
        "the manager could not be reached, and a reused job receives trials only over the network",
        "let containers connect to the address in manager.json (see `trial-keeper doctor`), or set reuse: false",
    )


def known(code: int) -> KeeperExit | None:
    """Return the keeper's own failure with this exit code; None for any other code."""
    return next((own for own in KeeperExit if own == code), None)


def of_signal(number: int) -> int:
    """Return the exit code of a process that a signal ended, as shells and clusters report it."""
    return 128 + number
