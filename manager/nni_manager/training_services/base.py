"""The interface between the manager and a cluster."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import ClassVar

from nni_manager.domain.completion import Completion
from nni_manager.support.keeper_bundle import KeeperBundle
from nni_manager.training_services.share import Share
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason


class JobPresence(Enum):
    """The presence of a job on the cluster: alive, ended, or unknown."""

    RUNNING = "running"  # or queued: the cluster will start it
    ENDED = "ended"
    UNKNOWN = "unknown"  # never submitted, or no longer stored


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The end of a job. `message` comes from the cluster or the job's own log, for people.

    `reason` is the reason of a trial that ends with the job, unless the exit code is one of the keeper's own.
    `is_explained`: the first line of `message` is why the cluster ended the job, or that it did. `pending_reason`: why the job
    had not started; empty if it had, or if that is unknown. `is_unknown`: the cluster has never shown the job to this manager, so
    it may never have existed.
    """

    job_id: str
    exit_code: int | None
    message: str
    reason: ExitReason = ExitReason.KEEPER_LOST
    is_explained: bool = False
    pending_reason: str = ""
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The allocation of a job: the code folder as the job sees it, and the job's GPUs (None: not managed).

    `code_dir` None: every attempt runs in a fresh copy of the code snapshot. Only where the service `uses_snapshot`.
    """

    code_dir: str | None
    gpu_indices: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class ManagedGpu:
    """A GPU of this machine, and the experiment's jobs that have it.

    `has_other_programs`: other programs compute on it, so no job gets it. None: unknown, since a job has it or no driver answers.
    """

    index: int
    job_ids: tuple[str, ...]
    has_other_programs: bool | None


class TrainingService(ABC):
    """The adapter to one kind of cluster. Runs on the manager's event loop.

    `on_job_ended` is called once for each job that ends, after `submit` or `adopt` has returned.
    """

    uses_snapshot: ClassVar[bool] = False
    """True if jobs cannot see the code folder, so that the training code must be packed into the workspace."""
    grace_s: ClassVar[float] = 0.0
    """Seconds between a stop request and the cluster's kill, plus the time to send and detect it; 0: the cluster never kills."""
    run_script: str
    """The content of run.sh: starts the keeper in the job's environment."""
    bundle: KeeperBundle | None = None
    """The keeper that `run_script` starts in an image without one; None: images need their own."""
    stops_at_once: ClassVar[bool] = False
    """True if a stop request is a signal, which would overtake the message to a connected keeper."""
    has_job_logs: ClassVar[bool] = False
    """True if the cluster keeps what the tasks of jobs write: see `job_log`."""
    reports_preemption: ClassVar[bool] = False
    """True if the end of a job that the cluster preempted has the reason PREEMPTED."""
    runs_as_manager = False
    """True if tasks run as the manager's own user on this machine. The workspace can then be private."""
    share: Share | None = None
    """Access to the jobs' storage if this machine has not mounted it. None: the workspace is on that storage, as usual."""
    completion = Completion()
    """The tasks of a job, and the rule by which they end its trial."""

    def __init__(self, on_job_ended: Callable[[JobEnded], None]) -> None:
        self.on_job_ended = on_job_ended
        self.on_job_preempted: Callable[[str], None] = lambda job_id: None
        """Called with a job's id, once, when the cluster starts to preempt it, if it reports that before the job ends."""
        self.on_node_changed: Callable[[str, bool], None] = lambda job_id, is_ready: None
        """Called with a job's id when the cluster reports that a node of it is not ready (False), or that all are again (True).

        `warning` describes it meanwhile.
        """

    @property
    def problem(self) -> str:
        """Why jobs cannot start or the cluster cannot be queried at present; empty if there is no problem."""
        return ""

    def pending_reason(self, job_id: str) -> str:
        """Returns why this job has not started, for people; empty if unknown or once it has started."""
        return ""

    def warning(self, job_id: str) -> str:
        """Returns what the cluster reports about a running job that may end it, for people; empty if it reports nothing."""
        return ""

    def will_restart(self, job_id: str) -> bool:
        """Returns True if the cluster has ended the job's keepers, and will start the same job again."""
        return False

    def link(self, job_id: str) -> str | None:
        """Returns the URL of the job's page, also for an ended job; None if there is no page."""
        return None

    async def job_log(self, job_id: str) -> Mapping[str, str]:
        """Returns the end of what each task of the job has written, also of an ended job, by the task's name.

        Default: empty, because the cluster keeps no logs.

        Raises:
            UserError: the cluster has no log of the job, or refuses the request.
            RetryableError: the cluster cannot be reached.
        """
        return {}

    async def gpus(self) -> Sequence[ManagedGpu]:
        """Returns the GPUs that the service assigns to jobs; empty if a cluster does, or no trial has any."""
        return ()

    async def reserve(  # noqa: B027 - clusters with their own queue accept any job
        self, job_id: str, trial_id: str | None = None
    ) -> None:
        """Wait until the job can be allocated, and reserve the allocation. `trial_id`: that of a job that runs one trial."""

    def placement(self, job_id: str) -> Placement:
        """Returns the allocation of a job that has a reservation or was adopted.

        Default: a fresh copy of the code, and the GPUs that the cluster shows to the container.
        """
        return Placement(None, None)

    def note_trial(self, job_id: str, trial_id: str) -> None:  # noqa: B027 - all jobs see the same storage
        """Called before the manager writes the files of a trial that will run in this job."""

    def release(self, job_id: str) -> None:  # noqa: B027 - as for reserve
        """Release the reservation of `reserve`: the job will not be submitted."""

    @abstractmethod
    async def submit(self, settings: KeeperSettings) -> None:
        """Run a job that `reserve` has reserved an allocation for. Everything it needs is in the workspace.

        `settings.workspace` is the manager's own path. A service whose jobs see the storage at another path replaces it and
        sets `mount`.

        Raises:
            UserError: the cluster refuses it permanently.
            RetryableError: a later submit may succeed.
        """

    @abstractmethod
    async def stop(self, job_id: str) -> bool:
        """Request the end of a job. True: `on_job_ended` will report it. False: there is no such job.

        A job exists from the start of its `submit`, so the service remembers a stop during the submission. If that `submit`
        fails, the service may report nothing: the manager asks again.
        """

    def wake(self, job_id: str) -> None:  # noqa: B027 - a cluster kills a frozen job after its grace period
        """Resume a frozen (stopped) keeper if this machine can, so that it handles the next request."""

    async def kill(self, job_id: str) -> None:
        """End a job that ignored a stop request, without grace. Default: request the stop again."""
        await self.stop(job_id)

    @abstractmethod
    def removal_command(self, job_id: str) -> str:
        """Returns the command with which a person ends the job if this service could not."""

    @abstractmethod
    async def adopt(self, job_id: str) -> JobPresence:
        """Take over a job that an earlier manager submitted. RUNNING: `on_job_ended` will report its end."""

    def report_end(self, job_id: str, *, stop_was_asked: bool) -> None:
        """Report the end of a job for which `adopt` has returned ENDED: `on_job_ended` receives it now or later.

        `stop_was_asked`: an earlier manager was to stop it. Default: only the message is known.
        """
        self.on_job_ended(JobEnded(job_id, None, self.termination_message(job_id)))

    def termination_message(self, job_id: str) -> str:
        """Returns why a job ended while no manager was running, for people; empty if unknown."""
        return ""

    async def reap_orphans(self, job_id: str, trial_ids: Collection[str]) -> None:  # noqa: B027 - as for wake
        """Ensure that no process of these trials runs after their job is gone. A terminated container leaves none."""

    def garbage_collect(self) -> None:  # noqa: B027 - most clusters keep no ended jobs that the manager must delete
        """Delete ended jobs of earlier managers. Call it after all other jobs were adopted."""

    def leftovers(self) -> dict[str, str]:
        """Returns a message with the removal command for each ended job of which the cluster may still have objects."""
        return {}

    async def settle(self) -> None:  # noqa: B027 - as for garbage_collect
        """Wait, for a bounded time, until the cluster has deleted the objects of ended jobs. No job is submitted afterwards."""

    @abstractmethod
    async def close(self) -> None:
        """Release the cluster's resources. Running jobs continue."""
