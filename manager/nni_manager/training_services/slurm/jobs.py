"""What a service knows of one job, and the files of jobs in the experiment's folder, on the shared home."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from nni_manager.training_services.slurm.states import JobRow
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.settings import KeeperSettings

# After this time, a user who watches a pending trial should see the reason.
_MAX_QUEUE_S = 60.0
_LOG_TAIL_BYTES = 2000


@dataclass(slots=True)
class Job:
    """One job. Times are monotonic.

    `settings`: None for a job of an earlier manager. `slurm_id`: empty until sbatch has printed it. `is_submitting`: sbatch runs.
    `was_signalled`: the keeper has received SIGTERM; a second one would kill its trial at once.
    """

    job_id: str
    name: str
    settings: KeeperSettings | None = None
    slurm_id: str = ""
    is_submitting: bool = False
    row: JobRow | None = None
    waits_since_s: float | None = None
    missing_polls: int = 0
    stop_is_wanted: bool = False
    was_signalled: bool = False
    is_preemption_announced: bool = False

    @property
    def awaits_submit(self) -> bool:
        """True if the manager will submit the job once more."""
        return self.settings is not None and not self.slurm_id and not self.stop_is_wanted

    def note(self, row: JobRow, now_s: float) -> None:
        """Record what squeue shows of a job that has not ended."""
        self.row, self.slurm_id, self.missing_polls = row, row.slurm_id, 0
        if not row.is_pending:
            self.waits_since_s = None
        elif self.waits_since_s is None:
            self.waits_since_s = now_s


def queue_problem(jobs: Collection[Job], now_s: float) -> str:
    """Why the job that has been pending longest has not started; empty if none has been for long."""
    waiting = [(job.waits_since_s, job) for job in jobs if job.waits_since_s is not None]
    since_s, longest = min(waiting, key=lambda each: each[0], default=(now_s, None))
    if longest is None or longest.row is None or now_s - since_s < _MAX_QUEUE_S:
        return ""
    return (
        f"Slurm has not started {len(waiting)} of {len(jobs)} jobs; {longest.name} is pending: {longest.row.pending_reason}; "
        f"see `scontrol show job {longest.slurm_id}`"
    )


@dataclass(frozen=True, slots=True)
class JobFiles:
    """`<job>.log` has a job's output. `<job>.started` exists once the job has started."""

    folder: Path

    def log(self, job_id: str) -> Path:
        """The file of the output."""
        return self.folder / f"{job_id}.log"

    def started(self, job_id: str) -> Path:
        """The file that the batch script creates."""
        return self.folder / f"{job_id}.started"

    def log_tail(self, job_id: str) -> str:
        """The last lines of the output; empty without any."""
        with contextlib.suppress(OSError), self.log(job_id).open("rb") as log:
            log.seek(max(os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES, 0))
            return log.read(_LOG_TAIL_BYTES).decode(errors="replace").strip()
        return ""
