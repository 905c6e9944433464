"""The local training service in the test process; its keepers may outlive its manager."""

import signal
import subprocess
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
    _children_to_reap: ClassVar[list[subprocess.Popen[bytes]]] = []
    """Those that were started as new processes."""

    async def submit(self, settings: KeeperSettings) -> None:
        """Start a keeper."""
        await super().submit(settings)
        self.keepers.append(self._pids[settings.job_id])
        if settings.job_id in self._children:
            self._children_to_reap.append(self._children[settings.job_id])

    @classmethod
    def end_keepers(cls) -> None:
        """End all keepers and wait for their exit."""
        while cls.keepers:
            keeper = cls.keepers.pop()
            processes.is_sent(keeper, signal.SIGTERM)
            processes.wait_for_ends([keeper], time.monotonic() + DEADLINE_S)
            assert processes.is_dead(keeper)
        while cls._children_to_reap:
            cls._children_to_reap.pop().wait(DEADLINE_S)
