"""What can go wrong in a keeper, by who must act.

Three kinds: `UserMistake` (somebody has to change something), `TryAgain` (the same thing may work later) and
`KeeperBug` (we have to). Each error carries the code the keeper ends with. An error raised without a message
speaks with its docstring's first line.
"""

from __future__ import annotations

from typing import ClassVar

from trial_keeper.exit_codes import KeeperExit


class KeeperError(Exception):
    """The keeper cannot do its work."""

    exit_code: ClassVar[int] = KeeperExit.KEEPER_BUG

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or type(self).__name__).partition("\n")[0])


class UserMistake(KeeperError):
    """Somebody has to change the job, the image or the experiment file before this can work."""

    exit_code: ClassVar[int] = KeeperExit.SETTINGS


class TryAgain(KeeperError):
    """Something outside the keeper failed for the moment; the same job may work when run again."""

    exit_code: ClassVar[int] = KeeperExit.OUTSIDE


class KeeperBug(KeeperError):
    """The keeper has a bug."""

    exit_code: ClassVar[int] = KeeperExit.KEEPER_BUG


class SettingsInvalid(UserMistake):
    """A variable the keeper reads is missing or malformed."""

    exit_code: ClassVar[int] = KeeperExit.SETTINGS


class MountMissing(UserMistake):
    """The path where the shared storage should be does not exist."""

    exit_code: ClassVar[int] = KeeperExit.MOUNT_MISSING


class MountUnreadable(UserMistake):
    """The shared storage is there and cannot be read."""

    exit_code: ClassVar[int] = KeeperExit.MOUNT_UNREADABLE


class WorkspaceMissing(UserMistake):
    """The experiment's folder, or what the manager wrote there, is not on the storage."""

    exit_code: ClassVar[int] = KeeperExit.WORKSPACE


class WorkspaceNotWritable(UserMistake):
    """The shared storage takes nothing."""

    exit_code: ClassVar[int] = KeeperExit.WORKSPACE_WRITE


class MountReadOnly(WorkspaceNotWritable):
    """The shared storage is mounted read-only."""

    exit_code: ClassVar[int] = KeeperExit.MOUNT_READ_ONLY


class MountFull(WorkspaceNotWritable):
    """The shared storage is full, or the user's quota there is used up."""

    exit_code: ClassVar[int] = KeeperExit.MOUNT_FULL


class MountForbidden(WorkspaceNotWritable):
    """The user may not write on the shared storage."""

    exit_code: ClassVar[int] = KeeperExit.MOUNT_FORBIDDEN


class CodeDamaged(UserMistake):
    """The code snapshot cannot be unpacked."""

    exit_code: ClassVar[int] = KeeperExit.CODE


class VersionMismatch(UserMistake):
    """Keeper and manager differ in the first two numbers of their version."""

    exit_code: ClassVar[int] = KeeperExit.VERSION


class CommandNotStarted(UserMistake):
    """The trial's command could not be started."""

    exit_code: ClassVar[int] = KeeperExit.COMMAND


class WarmStartRefused(UserMistake):
    """A trial cannot be a fork of a warm interpreter; it is started plainly instead."""

    exit_code: ClassVar[int] = KeeperExit.COMMAND
