"""The shared parts of a running experiment: its state, store and cluster, and the loop that handles its events."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from nni_manager.config.model import ExperimentSpec
from nni_manager.domain.events import Effect, Event
from nni_manager.engine.commits import GroupCommit
from nni_manager.engine.ids import TRIAL_ID_LENGTH, new_id
from nni_manager.engine.shared_files import SharedFiles
from nni_manager.engine.snapshot import snapshot_from_stored
from nni_manager.engine.tuner_executor import TunerExecutor
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.lease import Lease, LeaseLost
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import Write
from nni_manager.store.writer import Store
from nni_manager.training_services.base import TrainingService
from nni_manager.tuner.assessment import Assessment
from nni_manager.tuner.base import BaseTuner

log = logging.getLogger(__name__)


class Runtime(ABC):
    """One experiment on one event loop; nothing here is thread-safe."""

    def __init__(
        self,
        config: ExperimentSpec,
        folder: ExperimentFolder,
        make_service: Callable[[], TrainingService],
        make_tuner: Callable[[ExperimentSpec], BaseTuner],
        assessment: Assessment | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        # The lease holder migrates the database to the current schema before it is read.
        self.commits = GroupCommit(Store(folder.database, folder.collected_logs, lease), self._fail)
        self.reader = StoreReader(folder.database)
        self.stored = self.reader.experiment()
        self.failed = asyncio.Event()
        """Set when the manager must end and store nothing more: after a bug, from which a resume recovers, or because another
        manager holds the lease."""
        self.lease_lost: LeaseLost | None = None
        """The error that names the manager which now holds the lease; None while this one holds it."""
        self.last_save: asyncio.Future[None] | None = None
        """Done when all decisions so far are durable; None: nothing was decided yet."""
        self.service = make_service()
        self.files = SharedFiles(folder.workspace, self.service.share, self.service.runs_as_manager)
        self.algorithms = TunerExecutor(
            self.stored.experiment_id, config, make_tuner, assessment, self.post, self.new_trial_id
        )
        self.experiment = snapshot_from_stored(
            self.stored, config, self.service, may_prefetch=not self.algorithms.learns
        )
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    # ---- events

    def post(self, event: Event) -> None:
        """Handle an event at once, or after the current event if one is being handled."""
        if self.failed.is_set():
            return
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                for effect in self.experiment.handle(self._events.popleft(), time.monotonic()):
                    self._perform(effect)
            self._note_handled()
        except Exception as error:  # noqa: BLE001 - most callers cannot handle it
            self._events.clear()
            self._fail(error)
        finally:
            self._is_handling = False

    @abstractmethod
    def _perform(self, effect: Effect) -> None:
        """Perform an effect."""

    @abstractmethod
    def _note_handled(self) -> None:
        """Called when all effects of all posted events are performed."""

    # ---- the store

    def save(self, write: Write) -> None:
        """Store the write with the next transaction."""
        self.last_save = self.commits.add([write])

    def durable(self) -> "asyncio.Future[None]":
        """A future that is done when all decisions so far are stored."""
        return self.commits.add([])

    def _after_save(self, action: Callable[[], None]) -> None:
        if self.last_save is None or self.last_save.done():
            action()
        else:
            self.last_save.add_done_callback(lambda done: action() if not done.exception() else None)

    def new_trial_id(self) -> str:
        """An id that no trial has."""
        trial_id = new_id(TRIAL_ID_LENGTH)
        while trial_id in self.experiment.trials:
            trial_id = new_id(TRIAL_ID_LENGTH)
        return trial_id

    def open_workspace(self) -> None:
        """Call `ExperimentFolder.open_workspace` as this experiment needs it. Blocks, and raises the same errors."""
        is_private, reuses_jobs = self.service.runs_as_manager, self.config.reuse_mode
        if self.folder.open_workspace(is_private=is_private, reuses_jobs=reuses_jobs):
            log.warning(
                "%s was missing and has been created; what trials had written there is gone",
                self.folder.workspace.trials,
            )

    # ---- tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run the work as a task; its failure ends the manager. While the manager closes, no work starts."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_task)
        if self._is_closing:
            task.cancel()
        return task

    async def _cancel_tasks(self) -> None:
        # No task may outlive the store. A cancelled submission ends its trial, and the next one would then be submitted.
        self._is_closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _note_task(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def on_lease_lost(self, error: LeaseLost) -> None:
        """Store nothing more and end: another manager holds the lease."""
        if self.lease_lost is None:
            self.lease_lost = error
            log.critical("%s", error)
        self.failed.set()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, LeaseLost):
            self.on_lease_lost(error)
            return
        # A bug: the state in memory cannot be trusted, so stop here. The stored state is valid.
        log.critical("internal error; the manager stops", exc_info=error)
        self.failed.set()
