"""The keeper's errors, grouped by who must act.

Three kinds: `KeeperUserError` (the user has to change something), `KeeperRetryableError` (a retry may succeed) and `KeeperBug`
(the keeper has to be fixed). Each error has the keeper's exit code. The first line of the docstring is the default message.
"""

from __future__ import annotations

from typing import ClassVar

from trial_keeper.exit_codes import KeeperExit


class KeeperError(Exception):
    """The keeper cannot do its work."""

    exit_code: ClassVar[int] = KeeperExit.KEEPER_BUG

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        if exit_code is not None:
            cls.exit_code = exit_code

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or type(self).__name__).partition("\n")[0])


class KeeperUserError(KeeperError, exit_code=KeeperExit.SETTINGS):
    """The user must change the job, the image or the experiment file."""


class KeeperRetryableError(KeeperError, exit_code=KeeperExit.ENVIRONMENT):
    """Something outside the keeper failed temporarily; the same job may succeed when run again."""


class KeeperBug(KeeperError, exit_code=KeeperExit.KEEPER_BUG):
    """The keeper has a bug."""


class SettingsInvalid(KeeperUserError, exit_code=KeeperExit.SETTINGS):
    """A variable that the keeper reads is missing or malformed."""


class MountMissing(KeeperUserError, exit_code=KeeperExit.MOUNT_MISSING):
    """The mount point of the shared storage does not exist."""


class MountUnreadable(KeeperUserError, exit_code=KeeperExit.MOUNT_UNREADABLE):
    """The shared storage is mounted but cannot be read."""


class WorkspaceMissing(KeeperUserError, exit_code=KeeperExit.WORKSPACE):
    """The experiment's folder, or a file that the manager wrote in it, is not on the storage."""


class WorkspaceNotWritable(KeeperUserError, exit_code=KeeperExit.WORKSPACE_WRITE):
    """The shared storage cannot be written."""


class MountReadOnly(WorkspaceNotWritable, exit_code=KeeperExit.MOUNT_READ_ONLY):
    """The shared storage is mounted read-only."""


class MountFull(WorkspaceNotWritable, exit_code=KeeperExit.MOUNT_FULL):
    """The shared storage is full, or the user's quota there is used up."""


class MountForbidden(WorkspaceNotWritable, exit_code=KeeperExit.MOUNT_FORBIDDEN):
    """The user may not write on the shared storage."""


class CodeDamaged(KeeperUserError, exit_code=KeeperExit.CODE):
    """The code snapshot cannot be unpacked."""


class VersionMismatch(KeeperUserError, exit_code=KeeperExit.VERSION):
    """Keeper and manager differ in the first two numbers of their version."""


class CommandNotStarted(KeeperUserError, exit_code=KeeperExit.COMMAND):
    """The trial's command could not be started."""


class WarmStartRefused(KeeperUserError, exit_code=KeeperExit.COMMAND):
    """A trial cannot start as a fork of the warm interpreter; it gets a plain start instead."""
