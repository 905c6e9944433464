"""The keeper's errors, by who must act.

Three kinds: `UserError` (the user has to change something), `RetryableError` (the same may work later) and `KeeperBug` (we have
to fix it). Each error carries the keeper's exit code. The first line of the docstring is the default message.
"""

from __future__ import annotations

from typing import ClassVar

from trial_keeper.exit_codes import KeeperExit


class KeeperError(Exception):
    """The keeper cannot do its work."""

    exit_code: ClassVar[int] = KeeperExit.KEEPER_BUG

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or type(self).__name__).partition("\n")[0])


class UserError(KeeperError):
    """Somebody has to change the job, the image or the experiment file before this can work."""

    exit_code: ClassVar[int] = KeeperExit.SETTINGS


class RetryableError(KeeperError):
    """Something outside the keeper failed for the moment; the same job may work when run again."""

    exit_code: ClassVar[int] = KeeperExit.ENVIRONMENT


class KeeperBug(KeeperError):
    """The keeper has a bug."""

    exit_code: ClassVar[int] = KeeperExit.KEEPER_BUG


class SettingsInvalid(UserError):
    """A variable the keeper reads is missing or malformed."""

    exit_code: ClassVar[int] = KeeperExit.SETTINGS


class MountMissing(UserError):
    """The path where the shared storage should be does not exist."""

    exit_code: ClassVar[int] = KeeperExit.MOUNT_MISSING


class MountUnreadable(UserError):
    """The shared storage is there and cannot be read."""

    exit_code: ClassVar[int] = KeeperExit.MOUNT_UNREADABLE


class WorkspaceMissing(UserError):
    """The experiment's folder, or what the manager wrote there, is not on the storage."""

    exit_code: ClassVar[int] = KeeperExit.WORKSPACE


class WorkspaceNotWritable(UserError):
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


class CodeDamaged(UserError):
    """The code snapshot cannot be unpacked."""

    exit_code: ClassVar[int] = KeeperExit.CODE


class VersionMismatch(UserError):
    """Keeper and manager differ in the first two numbers of their version."""

    exit_code: ClassVar[int] = KeeperExit.VERSION


class CommandNotStarted(UserError):
    """The trial's command could not be started."""

    exit_code: ClassVar[int] = KeeperExit.COMMAND


class WarmStartRefused(UserError):
    """A trial cannot be a fork of a warm interpreter; it is started plainly instead."""

    exit_code: ClassVar[int] = KeeperExit.COMMAND
