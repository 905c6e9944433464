"""The local training service in the test process; its keepers may outlive its manager."""

import signal
import time
from typing import ClassVar

from deadlines import DEADLINE_S

from nni_manager.training_services.local.client import LocalTrainingService
from trial_keeper import processes
from trial_keeper.settings import KeeperSettings


class JobsHere(LocalTrainingService):
    """A local training service whose keepers may outlive an engine; `end_keepers` ends them after the
    test.
    """

    keepers: ClassVar[list[int]] = []
    """Their pids."""

    async def submit(self, settings: KeeperSettings) -> None:
        """Start a keeper."""
        await super().submit(settings)
        self.keepers.append(self._pids[settings.job_id])

    @classmethod
    def end_keepers(cls) -> None:
        """End all keepers and wait for their exit."""
        while cls.keepers:
            keeper = cls.keepers.pop()
            processes.is_sent(keeper, signal.SIGTERM)
            processes.wait_for_ends([keeper], time.monotonic() + DEADLINE_S)
            assert processes.is_dead(keeper)
