"""What the routes of an experiment share: its trials by id, reads of its store, and reads of the storage that trials write to."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar, Union

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nni_manager.domain.trial import Trial
from nni_manager.engine.storage_executor import StorageExecutor
from nni_manager.store.reader import StoreReader

if TYPE_CHECKING:
    from nni_manager.engine.engine import Engine
    from nni_manager.engine.stored_experiment import StoredExperimentReader

ExperimentBackend: TypeAlias = Union["Engine", "StoredExperimentReader"]
"""The engine of an experiment, or a read-only view of a stored one, which rejects changes."""
Answer = TypeVar("Answer")
# A slow storage answers within this time; one that hangs does not.
STORAGE_TIMEOUT_S = 10.0


class BackendReads:
    """Reads of one experiment, in threads beside its event loop."""

    def __init__(self, engine: ExperimentBackend) -> None:
        self.engine = engine
        self._storage = StorageExecutor()

    def close(self) -> None:
        """End the threads; those of storage that does not answer end with the process."""
        self._storage.close()

    def trial_of(self, request: Request) -> Trial:
        """The trial that the request's path names.

        Raises:
            HTTPException: there is no such trial.
        """
        trial_id = request.path_params["trial_id"]
        trial = self.engine.snapshot().experiment.trials.get(trial_id)
        if trial is None:
            raise HTTPException(404, f"cannot find trial {trial_id!r}; `nnictl trial ls` lists them")
        return trial

    async def from_store(self, read: Callable[[StoreReader], Answer]) -> Answer:
        """Read the store in another thread, which may also encode the answer."""

        def read_beside_the_engine() -> Answer:
            with StoreReader(self.engine.folder.database) as reader:
                return read(reader)

        return await asyncio.to_thread(read_beside_the_engine)

    async def from_storage(self, read: Callable[[], Answer]) -> Answer:
        """Read from the storage that trials write to, which may be unavailable.

        Raises:
            HTTPException: it does not answer, or refuses.
        """
        try:
            return await asyncio.wait_for(self._storage.call(read), STORAGE_TIMEOUT_S)
        except (asyncio.TimeoutError, OSError) as error:
            why = str(error) or f"no answer within {STORAGE_TIMEOUT_S:.0f} s"
            raise HTTPException(
                503, f"cannot read the files of the trial: {why}; check the shared storage, or try again"
            ) from error
