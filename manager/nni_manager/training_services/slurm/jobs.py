"""What a service knows of one job, what Slurm lists, and the files of jobs in the experiment's folder, on the shared home."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from nni_manager.training_services.slurm.render import task_log
from nni_manager.training_services.slurm.states import JobEndState, JobRow, end_of, end_of_forgotten_task
from trial_keeper.frozen_dataclass import dataclass
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.small_files import replace_file

# After this time, a user who watches a pending trial should see the reason.
_MAX_QUEUE_S = 60.0
_LOG_TAIL_BYTES = 2000
# As the batch script writes it: of a job, or of the task of an array.
_SLURM_ID = re.compile(rb"\d+(_\d+)?\n")


@dataclass(slots=True)
class Job:
    """One job. Times are monotonic.

    `name`: in Slurm; array tasks have the array's. `settings`: None for a job of an earlier manager. `slurm_id`: empty
    until sbatch has printed it. `is_submitting`: it waits for sbatch. `is_repeated`: an earlier sbatch that was not answered may
    have created it. `was_signalled`: its keeper has received SIGTERM; a second one would kill the trial at once.
    """

    job_id: str
    name: str
    settings: KeeperSettings | None = None
    slurm_id: str = ""
    is_submitting: bool = False
    is_repeated: bool = False
    row: JobRow | None = None
    waits_since_s: float | None = None
    missing_polls: int = 0
    stop_is_wanted: bool = False
    was_signalled: bool = False
    is_preemption_announced: bool = False

    @property
    def is_array_task(self) -> bool:
        """True if it is a task of a job array."""
        return "_" in self.slurm_id

    @property
    def awaits_submit(self) -> bool:
        """True if the manager will submit the job once more."""
        return self.settings is not None and not self.slurm_id and not self.stop_is_wanted

    def note(self, row: JobRow, now_s: float) -> None:
        """Record what squeue shows of a job that has not ended."""
        self.row, self.slurm_id, self.name, self.missing_polls = row, row.slurm_id, row.name, 0
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
class JobArray:
    """A job array of Slurm. Its task N is the job `job_ids[N]`."""

    name: str
    job_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MissedEnd:
    """A job that ended while no manager was running. `slurm_id`: empty if it is unknown.

    `unstarted_in`: the array of a task that has not started. `row`: what squeue lists; None: nothing.
    """

    slurm_id: str
    unstarted_in: JobArray | None
    row: JobRow | None = None

    def end(self, row: JobRow | None, log: str, *, was_stopped: bool) -> JobEndState:
        """How it ended, by the row of squeue or of the accounting. `log`: see `end_of`."""
        if row is not None and row.has_ended:
            return end_of(row, log, was_stopped=was_stopped)
        if self.unstarted_in is not None:
            return end_of_forgotten_task(self.slurm_id, self.unstarted_in.name, was_stopped=was_stopped)
        return JobEndState(None, log, ExitReason.KEEPER_LOST, is_explained=False)


class ListedJobs:
    """The jobs of an experiment that Slurm lists."""

    def __init__(self, rows: Iterable[JobRow], prefix: str, arrays: Mapping[str, JobArray]) -> None:
        """`prefix`: the start of the names of jobs. `arrays`: those of the experiment, by name."""
        self._rows: dict[str, JobRow] = {}
        self._numbers: dict[str, int] = {}
        # A job that was submitted twice runs once. The other one ends at its start.
        for row in sorted(rows, key=lambda row: (not row.has_ended, row.number)):
            array = arrays.get(row.name)
            if array is None:
                self._rows[row.name.removeprefix(prefix)] = row
                continue
            self._numbers[row.name] = row.number
            if row.task is not None and row.task < len(array.job_ids):
                self._rows[array.job_ids[row.task]] = row

    def row(self, job_id: str) -> JobRow | None:
        """The newest job of this id among those that have not ended, else among all; None if Slurm lists none."""
        return self._rows.get(job_id)

    def task_id(self, array: JobArray | None, job_id: str) -> str | None:
        """The id of a task if Slurm lists anything of its array, else None.

        Slurm keeps nothing of a task that was cancelled before it started.
        """
        if array is None or array.name not in self._numbers:
            return None
        return f"{self._numbers[array.name]}_{array.job_ids.index(job_id)}"


class JobFiles:
    """The files of jobs. `<job>.log` has a job's output, or `<array>-<task>.log`. `<job>.started` exists once the job has
    started, and has its id in Slurm. `<array>.tasks` has the ids of an array's jobs, each in a line.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrays: dict[str, JobArray] = {}
        """By name."""
        self._array_of: dict[str, JobArray] = {}

    def read_arrays(self) -> list[JobArray]:
        """The job arrays of earlier managers, by age."""
        paths = sorted(self.folder.glob("*.tasks"), key=lambda path: path.stat().st_mtime_ns)
        return [JobArray(path.stem, tuple(path.read_text().split())) for path in paths]

    def write_array(self, array: JobArray) -> None:
        """Write the list of an array that will be submitted.

        Raises:
            OSError: the list cannot be written.
        """
        content = "".join(f"{job_id}\n" for job_id in array.job_ids).encode()
        replace_file(self.folder / f"{array.name}.tasks", content, is_durable=True)

    # Files are read and written by several threads, but only the event loop changes the dicts.

    def note(self, array: JobArray) -> None:
        """Record an array whose list exists."""
        self.arrays[array.name] = array
        self._array_of.update(dict.fromkeys(array.job_ids, array))

    def forget(self, array: JobArray) -> None:
        """Forget an array that Slurm has refused. Its list stays, and names jobs of no array."""
        del self.arrays[array.name]
        self._array_of = {job_id: each for job_id, each in self._array_of.items() if each is not array}

    def array_of(self, job_id: str) -> JobArray | None:
        """The newest array that contains the job, even if the job was submitted again alone; None if there is none."""
        return self._array_of.get(job_id)

    def log(self, job_id: str) -> Path:
        """The file of the output of a job that is submitted alone."""
        return self.folder / f"{job_id}.log"

    def started(self, job_id: str) -> Path:
        """The file that the batch script creates."""
        return self.folder / f"{job_id}.started"

    def started_as(self, job_id: str) -> str | None:
        """The id with which Slurm has started the job; empty if its file shows none. None: it has not started.

        A full disk leaves an empty file, and a power failure may leave one of zeros.
        """
        with contextlib.suppress(FileNotFoundError):
            content = self.started(job_id).read_bytes()
            return content.decode().strip() if _SLURM_ID.fullmatch(content) else ""
        return None

    def log_tail(self, job_id: str) -> str:
        """The last lines of the output; empty without any."""
        log, array = self.log(job_id), self.array_of(job_id)
        with contextlib.suppress(OSError):
            if array is not None and not log.exists():
                log = Path(task_log(str(self.folder / array.name), array.job_ids.index(job_id)))
            with log.open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES, 0))
                return file.read(_LOG_TAIL_BYTES).decode(errors="replace").strip()
        return ""
