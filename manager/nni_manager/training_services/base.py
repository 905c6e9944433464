"""What the manager needs from a cluster."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from nni_manager.domain.completion import Completion
from nni_manager.training_services.share import Share
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason


class JobPresence(Enum):
    """What a cluster knows of a job."""

    RUNNING = "running"  # or queued: it will run without our doing
    ENDED = "ended"
    UNKNOWN = "unknown"  # never submitted, or forgotten


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job is over, whatever the reason. `message` is what the cluster or the job's own log says, for people.

    `reason` is for a trial that ends with it, unless the exit code is one of the keeper's own.
    """

    job_id: str
    exit_code: int | None
    message: str
    reason: ExitReason = ExitReason.KEEPER_LOST


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the trials of a job run: their code folder as the job sees it, and their GPUs (None: untouched).

    `code_dir` None: every attempt runs in a fresh copy of the code snapshot. Only where the service `uses_snapshot`.
    """

    code_dir: str | None
    gpu_indices: tuple[int, ...] | None


class TrainingService(ABC):
    """The adapter to one kind of cluster. Lives on the manager's event loop.

    `on_job_ended` is called once for each job that ends, after `submit` or `adopt` has returned.
    """

    uses_snapshot: ClassVar[bool] = False
    """Whether jobs do not see the code folder itself, so that the training code has to be packed into the workspace for them."""

    def __init__(self, on_job_ended: Callable[[JobEnded], None]) -> None:
        self.on_job_ended = on_job_ended

    @property
    @abstractmethod
    def run_script(self) -> str:
        """The content of run.sh: starts the keeper in whatever the job's environment is."""

    @property
    def problem(self) -> str:
        """What keeps jobs from starting, or the cluster from being asked, at present; empty while all is well."""
        return ""

    def why_it_waits(self, job_id: str) -> str:
        """What keeps this job from starting, for people; empty where nothing is known, and for any that has started."""
        return ""

    @property
    def share(self) -> Share | None:
        """The jobs' storage where this machine has no mount of it; None: it is the workspace's own, as most have it."""
        return None

    @property
    def completion(self) -> Completion:
        """The tasks of a job, and when they end its trial."""
        return Completion()

    def link(self, job_id: str) -> str | None:
        """Where people look at the job with a browser, whether it has ended or not; None: nowhere."""
        return None

    async def place(self, job_id: str) -> None:  # noqa: B027 - clusters with a queue of their own have room for any job
        """Wait until there is room for the job, and reserve it."""

    def placement(self, job_id: str) -> Placement:
        """Where the job was placed, or runs: it was placed or adopted.

        By default a fresh copy of the code, and the GPUs that the cluster shows to the container.
        """
        return Placement(None, None)

    def release(self, job_id: str) -> None:  # noqa: B027 - as for place
        """Give up the room that `place` made: there will be no such job."""

    @abstractmethod
    async def submit(self, settings: KeeperSettings) -> None:
        """Run a job for which `place` has made room. Everything it needs is in the workspace.

        `settings.workspace` is the manager's own path. A service whose jobs see the storage elsewhere puts that path there,
        and `mount` beside it.

        Raises:
            UserMistake: the cluster will never take it.
            TryAgain: it may later.
        """

    @abstractmethod
    async def stop(self, job_id: str) -> bool:
        """Ask the job to end; True when `on_job_ended` will tell of its end, False when there is no such job."""

    @abstractmethod
    async def adopt(self, job_id: str) -> JobPresence:
        """Take over a job that an earlier manager submitted. RUNNING: `on_job_ended` will tell of its end."""

    def last_words(self, job_id: str) -> str:
        """What is known of why a job ended while no manager was there, for people; empty when nothing is."""
        return ""

    @abstractmethod
    async def end_leftovers(self, job_id: str, trial_id: str) -> None:
        """Make sure that nothing of a trial whose job is gone runs any more."""

    def clear_away(self) -> None:  # noqa: B027 - most clusters keep no job for its manager to delete
        """Remove what earlier managers left of jobs that have ended. All others were adopted."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the cluster; jobs that run go on."""
