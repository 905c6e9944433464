"""Writes the ends of attempts to the workspace. Without a manager, exit.json is the only record of an end."""

from trial_keeper.core import events
from trial_keeper.host.keeper_context import KeeperContext
from trial_keeper.wire.documents import exit_to_bytes
from trial_keeper.wire.messages import AttemptKey, TrialEnded
from trial_keeper.wire.small_files import replace_file


class ExitRecorder:
    """The ends that are not recorded yet."""

    def __init__(self, context: KeeperContext) -> None:
        self._context = context
        self._unrecorded: dict[AttemptKey, TrialEnded] = {}
        self.unclaimed: set[AttemptKey] = set()
        """Attempts that could not be claimed, and so have no folder."""

    def record(self, effect: events.RecordExit) -> None:
        """Write exit.json, or keep the end for `retry`."""
        if effect.ended.key not in self.unclaimed:
            self._unrecorded[effect.ended.key] = effect.ended
            self._context.log.writing(self.retry)
            if self._unrecorded:
                self._context.handle(events.ExitNotRecorded())

    def retry(self) -> None:
        """Write the ends that could not be written. One that still cannot, e.g. because its folder is gone, hinders no other.

        Raises:
            OSError: one of them cannot be written.
        """
        workspace, token = self._context.workspace, self._context.settings.token
        failed: OSError | None = None
        for ended in list(self._unrecorded.values()):
            try:
                replace_file(workspace.attempt(ended.key).exit_json, exit_to_bytes(ended, token))
            except OSError as error:
                failed = failed or error
            else:
                del self._unrecorded[ended.key]
        if failed is not None:
            raise failed

    def release(self, key: AttemptKey) -> None:
        """Forget an end that the manager has recorded."""
        self._unrecorded.pop(key, None)
